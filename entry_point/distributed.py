"""Starts the ranks, joins them in one process group, and ends a run whose rank hangs."""

from __future__ import annotations

import ctypes
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from multiprocessing import connection
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .config import Config
from .container import Container, Ranks
from .errors import ConfigError, TrainingError, failure_report, report_failure

JOIN_MINUTES = 10  # for all ranks to come
LONGEST_WAIT = timedelta(minutes=30)  # for a rank that compiles, evaluates or writes a large model
STOP_SECONDS = 20.0  # replaces hang_seconds after a signal to stop: a disk may stall for so long


def start_ranks(
    run_rank: Callable[..., NoReturn], container: Container, n_local: int, device_type: str
) -> int:
    """Runs the host's ranks as children of this process, and returns their exit status.

    The first host's parent serves the store at which all ranks meet, so a host that is started
    alone waits for the others. On Linux, CPU ranks are forked, so that torch is imported once.
    Raises TrainingError if the store's port is taken.
    """
    n_hosts, first = len(container.hosts), container.hosts.index(container.current_host) * n_local
    address = os.environ.get("MASTER_ADDR", container.hosts[0]) if n_hosts > 1 else "127.0.0.1"
    port = int(os.environ.get("MASTER_PORT", "7777")) if n_hosts > 1 else 0
    if first == 0:
        try:
            listener = socket.create_server((address if address.startswith("127.") else "", port))
        except OSError as error:
            why = f"cannot listen at port {port}: {error.strerror}"
            raise TrainingError(f"{why}; set MASTER_PORT to a free one, on each host") from None
        port, fd = listener.getsockname()[1], listener.detach()
    forks = sys.platform == "linux" and device_type == "cpu"
    if forks:
        import_module("torch._dynamo")  # which takes a second; DistributedDataParallel imports it
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
    ranks = []
    for local_rank in range(n_local):
        env = dict(
            RANK=str(first + local_rank),
            WORLD_SIZE=str(n_local * n_hosts),
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(n_local),
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            SM_NANOGPT_LAUNCHER=os.environ.get("SM_NANOGPT_LAUNCHER", "train.py"),
        )
        name = f"rank {first + local_rank} on {container.current_host}"
        ranks.append(context.Process(target=run_rank, args=(env, sys.argv[1:]), name=name))
        ranks[-1].start()
    try:
        if first == 0:  # after the forks, since it starts a thread; lives as long as the variable
            _store = serve_store(address, port, fd)
        return wait_for_ranks(ranks)
    except BaseException:  # without a store, the ranks would wait for it in C++
        for rank in ranks:
            rank.kill()
        raise


def serve_store(address: str, port: int, listener: int) -> dist.TCPStore:
    """The store at which the ranks meet, served to those who connect to a listening socket."""
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener,
        use_libuv=False,  # that of torch before 2.8 takes no listening socket
    )


def wait_for_ranks(ranks: Sequence[Any]) -> int:
    """Waits until all processes end or one fails, and returns the exit status of that one.

    The first signal goes on to the ranks; a second kills them.
    """
    signals: list[tuple[int, float]] = []  # and when they came

    def forward(signum: int, frame: Any) -> None:
        signals.append((signum, time.monotonic()))
        seconds = signals[-1][1] - signals[0][1]
        if seconds > 1:  # not an echo: a terminal signals all of us
            sys.stderr.write("ending now; steps after the newest checkpoint are lost\n")
            signum = signal.SIGKILL
        for rank in ranks:
            if rank.is_alive():
                os.kill(rank.pid, signum)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    running = {rank.sentinel: rank for rank in ranks}
    while running and not any(rank.exitcode for rank in ranks):
        for sentinel in connection.wait(list(running)):
            running.pop(sentinel).join()
    failed = [rank for rank in ranks if rank.exitcode]
    status, name = (failed[0].exitcode, failed[0].name) if failed else (0, "")
    deadline = time.monotonic() + 2
    for rank in running.values():  # they report their own end, or wait for the rank that failed
        rank.join(max(0, deadline - time.monotonic()))
        rank.kill()
    if status and signals:
        return 128 + signals[0][0]
    if status < 0:
        problem = f"{name} was killed by {signal.Signals(-status).name}"  # it could not say so
        if -status == signal.SIGKILL:
            problem += " (was there too little memory?)"
        report_failure(failure_report(TrainingError(problem)))
    return status if status >= 0 else 128 - status


def end_with_parent() -> None:
    """Asks the kernel to interrupt this process when its parent ends, however it ends (Linux).

    Orphans would continue, and write into the checkpoints of the next run.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():  # it ended before that
            os.kill(os.getpid(), signal.SIGINT)


class Group:
    """The processes that train together, and their collective operations.

    With one process, no method communicates.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        container: Container,
        hang_seconds: float = Config.hang_seconds,
    ) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.local_world_size, self.device = ranks.local_world_size, device
        self.host = container.current_host if container.inside else socket.gethostname()
        self.objects = 0  # how many broadcast has sent
        self.watchdog: Watchdog | None = None
        if ranks.world_size > 1:
            self.join(container, hang_seconds)

    def join(self, container: Container, hang_seconds: float) -> None:
        """Meets the other ranks at a store, and starts the watchdog.

        Raises TrainingError if a rank does not come, or cannot be reached.
        """
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        one_host = self.local_world_size == self.world_size
        if interface := loopback if one_host else container.interface:
            # By default gloo takes the address of the host's name, which may lead nowhere.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        address = os.environ.get("MASTER_ADDR") or container.hosts[0]
        port = int(os.environ.get("MASTER_PORT", "7777"))
        # torchrun and start_ranks serve the store; else rank 0 does.
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        timeout = LONGEST_WAIT + timedelta(minutes=5)  # the watchdog names a rank before
        cuda = self.device.type == "cuda"
        try:
            self.store = connect(address, port, serve=self.rank == 0 and not served)
            reports = wait_for_all(self.store, self.rank, self.world_size, self.host)
            self.store.set_timeout(timeout)
            dist.init_process_group(
                # What is on the CPU travels by gloo, so that flags never wait for a GPU.
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=self.store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timeout,
                device_id=self.device if cuda else None,
            )
            # A connection of its own, since the main thread may wait on the other.
            store = connect(address, port, serve=False)
        except (RuntimeError, ValueError) as error:
            cause = str(error).partition("Exception raised from")[0]  # C++ frames follow
            raise TrainingError(
                f"rank {self.rank} could not join the group of {self.world_size} at"
                f" {address}:{port}: {cause} (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the"
                " network interface to use)"
            ) from None
        server = "the launcher of rank 0" if served else f"rank 0 on {reports[0].host}"
        self.watchdog = Watchdog(store, self.rank, reports, hang_seconds, server, self.device)

    def heartbeat(self) -> None:
        """Every rank calls it at the same points, before it waits for others.

        On a GPU it counts when the kernels before it are done: the host starts them without a wait,
        so a kernel that never ends shows only there.
        """
        if self.watchdog is not None and self.device.type == "cuda":
            self.watchdog.events.append(torch.cuda.current_stream().record_event())
        elif self.watchdog is not None:
            self.watchdog.heartbeats += 1

    @contextmanager
    def without_heartbeats(self) -> Iterator[None]:
        """For work that may fail on one rank alone, whose count would then stay behind."""
        watchdog, self.watchdog = self.watchdog, None
        yield
        self.watchdog = watchdog

    def allow_seconds(self, seconds: float) -> None:
        """Bounds the time until this rank's next heartbeat; at most, and at first, LONGEST_WAIT."""
        if self.watchdog is not None:
            self.watchdog.timeout = min(seconds, LONGEST_WAIT.total_seconds())

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks, in place; every rank gets the same bits."""
        self.heartbeat()
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def average_(self, tensor: Tensor, dtype: torch.dtype) -> None:
        """Averages a tensor over the ranks, in place; it is sent and summed in this type."""
        if self.world_size > 1:
            tensor.copy_(self.sum_(tensor.to(dtype))).div_(self.world_size)

    def async_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts to send a tensor of one shape [...] to all ranks, and to get theirs.

        Call the result for those of all ranks: [world_size, ...].
        """
        if self.world_size == 1:
            return lambda: tensor[None]
        self.heartbeat()
        gathered = tensor.new_empty(self.world_size, *tensor.shape)
        # As bytes, since gloo cannot send each type.
        outputs = [output.view(-1).view(torch.uint8) for output in gathered]
        work = dist.all_gather(outputs, tensor.view(-1).view(torch.uint8), async_op=True)

        def answer() -> Tensor:
            work.wait()
            return gathered

        return answer

    def ranks_unlike_first(self, tensors: Iterable[Tensor]) -> list[int]:
        """The ranks on which these tensors have other bits than on rank 0."""
        if self.world_size == 1:
            return []
        ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        bit_sums = [tensor.detach().view(ints[tensor.itemsize]).sum() for tensor in tensors]
        first, *others = self.async_all_gather(torch.stack(bit_sums).sum())().tolist()
        return [rank for rank, other in enumerate(others, start=1) if other != first]

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The tensor of the rank `source`, written over this rank's, or over zeros for a meta one.

        A tensor on another device is moved to this rank's.
        """
        self.heartbeat()
        device = self.device
        tensor = torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        if self.world_size > 1:
            dist.broadcast(tensor, src=source)
        return tensor

    def broadcast(self, value: Any) -> Any:
        """Gives rank 0's value to the other ranks, as JSON."""
        if self.world_size == 1:
            return value
        self.heartbeat()
        self.objects += 1
        key = f"object/{self.objects}"
        if self.rank == 0:
            self.store.set(key, json.dumps(value))
            return value
        return json.loads(self.store.get(key))

    def check_same(self, values: Mapping[str, Any], advice: str = "use one for all ranks") -> None:
        """Raises ConfigError, which names the value, unless it is the same on rank 0."""
        for name, first in self.broadcast(values).items():
            if values[name] != first:
                raise ConfigError(
                    f"{name} is {values[name]!r} on rank {self.rank} ({self.host}) and {first!r} on"
                    f" rank 0; {advice}"
                )

    def async_all_reduce_max(self, value: int) -> Callable[[], int]:
        """Starts to find the largest value of any rank; call the result for the answer.

        Computation in between hides the time that this takes.
        """
        values = self.async_all_gather(torch.tensor(value))
        return lambda: int(values().max())

    def synchronize(self) -> None:
        """Waits until the device has finished its work, so that a clock may be read.

        What follows, an evaluation or a checkpoint, may take any time.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()
        self.allow_seconds(math.inf)

    def close(self) -> None:
        if self.watchdog is not None:
            self.heartbeat()
            dist.barrier()
            self.watchdog.end()
            dist.barrier()  # no rank leaves before, as another may still use its store
            dist.destroy_process_group()


def connect(address: str, port: int, serve: bool) -> dist.Store:
    """The store at which the ranks meet, as torch's env:// finds it."""
    timeout = timedelta(minutes=JOIN_MINUTES)
    store = dist.TCPStore(address, port, None, serve, timeout, wait_for_workers=False)
    # torchrun's store outlives the ranks, and still has their entries from before a restart.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"sm-nanogpt/{restart}", store)


def wait_for_all(store: dist.Store, rank: int, world_size: int, host: str) -> list[Report]:
    """Writes this rank's first report for the watchdogs, and returns those of all ranks.

    Raises TrainingError if a rank has not come within JOIN_MINUTES.
    """
    keys = report_keys(world_size)
    store.set(keys[rank], json.dumps(Report(0, 0, LONGEST_WAIT.total_seconds(), host)))
    try:
        store.wait(keys, timedelta(minutes=JOIN_MINUTES))
    except RuntimeError:
        missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
        raise TrainingError(
            f"of {world_size} ranks, these did not come within {JOIN_MINUTES} minutes: {missing}"
        ) from None
    return read_reports(store, keys)


class Report(NamedTuple):
    """What a rank writes to the store each second."""

    second: int
    heartbeats: int  # collective operations that the rank has come to
    timeout: float  # seconds until the next heartbeat, at most
    host: str


def report_keys(world_size: int) -> list[str]:
    return [f"watchdog/{rank}" for rank in range(world_size)]


def read_reports(store: dist.Store, keys: list[str]) -> list[Report]:
    return [Report(*json.loads(report)) for report in store.multi_get(keys)]


class Watchdog:
    """Two threads that end this process with the name of the rank that hangs.

    Each second, one writes this rank's Report to the store and reads those of the others. Every
    rank judges all. A rank is dead if its report stays the same for hang_seconds, as its process is
    stopped or its host is gone. It hangs if it has the fewest heartbeats, and the last is older
    than its own timeout (at least hang_seconds). The other thread ends this process if the store
    does not answer.

    They count seconds by their own rounds instead of a clock, so that a suspended laptop is not
    taken for a hang.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        reports: list[Report],
        hang_seconds: float,
        server: str,
        device: torch.device,
    ) -> None:
        self.store, self.rank, self.reports, self.device = store, rank, reports, device
        self.hang_seconds, self.server = hang_seconds, server
        self.heartbeats, self.timeout = 0, LONGEST_WAIT.total_seconds()
        self.events = deque[torch.cuda.Event]()  # heartbeats that a GPU has not come to
        self.silent, self.still = [0] * len(reports), [0] * len(reports)  # seconds without a change
        self.unanswered = 0  # seconds since the store answered
        self.ended = threading.Event()
        # Python runs no signal handler while the main thread waits for another rank in C++.
        self.signals, wakeup = os.pipe()
        os.set_blocking(self.signals, False)
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        targets = (self.watch_ranks, self.watch_store)
        self.threads = [threading.Thread(target=target, daemon=True) for target in targets]
        for thread in self.threads:
            thread.start()

    def watch_ranks(self) -> None:
        if self.device.type == "cuda":  # else this thread's queries take memory of the first GPU
            torch.cuda.set_device(self.device)
        keys, report = report_keys(len(self.reports)), self.reports[self.rank]
        with suppress(RuntimeError):  # the store's server is gone, as watch_store will say
            while not self.ended.wait(1):
                heartbeats = self.count_heartbeats()
                report = Report(report.second + 1, heartbeats, self.timeout, report.host)
                self.store.set(keys[self.rank], json.dumps(report))
                reports = read_reports(self.store, keys)
                self.unanswered = 0
                if hung := self.find_hung(reports):
                    end_hung(hung)

    def count_heartbeats(self) -> int:
        """This rank's heartbeats that its device has come to."""
        while self.events and self.events[0].query():
            self.events.popleft()
            self.heartbeats += 1
        return self.heartbeats

    def watch_store(self) -> None:
        while not self.ended.wait(1):
            with suppress(BlockingIOError):  # as no signal came
                os.read(self.signals, 64)
                self.hang_seconds = min(self.hang_seconds, STOP_SECONDS)
            self.unanswered += 1
            if self.unanswered > self.hang_seconds + 2:
                end_hung(f"{self.server}, which serves the ranks' store, gave no sign of life")

    def find_hung(self, reports: list[Report]) -> str:
        """The ranks that hang by this second's reports, and how it shows; '' if none does."""
        for rank, (was, now) in enumerate(zip(self.reports, reports, strict=True)):
            self.silent[rank] = 0 if now != was else self.silent[rank] + 1
            self.still[rank] = 0 if now.heartbeats != was.heartbeats else self.still[rank] + 1
        self.reports = reports
        hung = {rank: n for rank, n in enumerate(self.silent) if n > self.hang_seconds}
        how = "gave no sign of life"
        if not hung:
            fewest = min(report.heartbeats for report in reports)
            behind = [rank for rank, report in enumerate(reports) if report.heartbeats == fewest]
            hung = {rank: self.still[rank] for rank in behind}
            if any(n <= max(reports[rank].timeout, self.hang_seconds) for rank, n in hung.items()):
                return ""
            how = "made no progress" + " while the others waited" * (len(hung) < len(reports))
        names = ", ".join(f"rank {rank} on {reports[rank].host}" for rank in hung)
        return f"{names} {how} for {max(hung.values())} s (a larger hang_seconds allows more)"

    def end(self) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join(10)


def end_hung(why: str) -> NoReturn:
    """Ends a rank whose main thread waits for a hung one; its launcher then ends all others."""
    report_failure(failure_report(TrainingError(why)))
    os._exit(1)
