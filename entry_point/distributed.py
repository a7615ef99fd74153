"""The group of processes: one per GPU, over all hosts, or failure; never two groups."""

from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .config import Config
from .container import Container, choose_device
from .errors import HangError, TopologyError, TrainingError, failure_report, report_failure


@dataclass(frozen=True)
class Ranks:
    """The place of this process in the group, as its launcher gave it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str


def read_ranks(env: Mapping[str, str], n_hosts: int) -> Ranks | None:
    """torchrun's variables, else Open MPI's; None when nothing launched this process.

    Raises:
        TopologyError: the variables contradict themselves or the number of hosts.
    """

    def number(name: str) -> int:
        try:
            return int(env[name])
        except (KeyError, ValueError):
            raise TopologyError(f"{name}={env.get(name)!r} must be a whole number") from None

    mpi = [f"OMPI_COMM_WORLD_{word}" for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if "RANK" in env and "WORLD_SIZE" in env:
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
        names += ["LOCAL_WORLD_SIZE"] if "LOCAL_WORLD_SIZE" in env else []
    elif mpi[1] in env:
        names = mpi
    else:
        return None
    rank, world_size, local_rank, *rest = map(number, names)
    local_world_size = rest[0] if rest else max(1, world_size // n_hosts)
    launcher = env.get("SM_NANOGPT_LAUNCHER", "mpirun" if mpi[1] in env else "torchrun")
    ranks = Ranks(rank, world_size, local_rank, local_world_size, launcher)
    if not 0 <= ranks.rank < ranks.world_size or not 0 <= ranks.local_rank < ranks.local_world_size:
        raise TopologyError(f"{ranks.launcher} gave an impossible place: {ranks}")
    if n_hosts > 1 and ranks.world_size != n_hosts * ranks.local_world_size:
        raise TopologyError(
            f"{ranks.launcher} made a group of {ranks.world_size} with"
            f" {ranks.local_world_size} on this host, but the job has {n_hosts} hosts:"
            " each would train a model of its own"
        )
    return ranks


def in_one_line(error: Exception) -> str:
    """torch's message about a connection, as one line."""
    # NCCL gives its cause in a later line; C++ frames follow these words.
    return " ".join(str(error).split("Exception raised from")[0].split())


STOP_SECONDS = 5.0  # takes the place of hang_seconds once a run is to stop, and 5 more in a parent

JOIN_TIMEOUT = timedelta(minutes=10)  # for all ranks to find the store


# No rank waits longer for another: one may compile, evaluate or write a large model meanwhile.
LONGEST_WAIT = timedelta(minutes=30)

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def master_port() -> int:
    """MASTER_PORT, or torch's default. Raises TopologyError if it is not a port."""
    port = os.environ.get("MASTER_PORT", "7777")
    if not port.isdecimal() or int(port) >= 1 << 16:
        raise TopologyError(f"MASTER_PORT={port!r}: must be a port, up to 65535")
    return int(port)


def is_loopback(address: str) -> bool:
    return address == "localhost" or address == "::1" or address.startswith("127.")


def interface_towards(host: str) -> str | None:
    """The network interface whose address this host has on its way to another (Linux, IPv4).

    gloo would use the address of this host's name, which on Debian is 127.0.1.1.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # which sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface may have no address
                found = fcntl.ioctl(probe, 0x8915, name.encode().ljust(40, b"\0"))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == own and not is_loopback(own):
                    return name
    return None


def listen(address: str, port: int) -> socket.socket:
    """The socket at which the store of the ranks is served; port 0 takes any that is free.

    At a loopback address it listens only there, else at all addresses, as torch does.

    Raises:
        TopologyError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        if is_loopback(address):
            return socket.create_server((address, port), family=family)
        dual = socket.has_dualstack_ipv6()
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
        )
    except OSError as error:
        raise TopologyError(
            f"cannot serve the ranks at {address}:{port}: {in_one_line(error)}"
            " (MASTER_PORT names another port)"
        ) from None


def serve_store(address: str, listener: socket.socket) -> dist.TCPStore:
    """The store at which the ranks meet, served by this process."""
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=JOIN_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class Watch:
    """Finds the rank that hangs, from what each rank reports in the store every second.

    A rank reports how many operations with the others it has begun (`heartbeats`), and how many
    seconds it may take to the next one (`timeout`, at least hang_seconds). A rank is hung if it has
    not reported for hang_seconds (its process is stopped, or its host is gone), or if it is
    furthest behind and has exceeded its timeout. A rank may take JOIN_TIMEOUT until its first
    report; one from before torchrun's restart, which the store still has, does not count. Ranks
    that reported until the store stopped answering are not hung.

    Only seconds awake count: after Ctrl-Z and `fg`, or a closed lid, the others do not hang.
    """

    def __init__(
        self,
        place: tuple[str, int],
        world_size: int,
        rank: int | None,
        host: str,
        hang_seconds: float,
        on_hang: Callable[[str], object],
    ) -> None:
        self.place, self.rank, self.host, self.on_hang = place, rank, host, on_hang
        self.world_size, self.hang_seconds = world_size, hang_seconds
        self.heartbeats, self.timeout = 0, LONGEST_WAIT.total_seconds()
        # For each rank: number of reports, heartbeats, timeout, host.
        self.heard: list[list[Any]] = []
        self.talks = 0
        self.joined = False  # whether each rank is known to have come
        self.ended = threading.Event()
        self.talker = threading.Thread(target=self.talk, daemon=True)
        self.talker.start()
        threading.Thread(target=self.judge, daemon=True).start()

    def expect(self, seconds: float) -> None:
        """Sets how long this rank may take to its next heartbeat, up to LONGEST_WAIT."""
        self.timeout = min(seconds, LONGEST_WAIT.total_seconds())

    def talk(self) -> None:
        with suppress(
            RuntimeError
        ):  # the store is gone; the process that served it ends the others
            # Older torch would block all threads while it waits for a host that starts later.
            while not self.ended.wait(0.1):
                with suppress(OSError):
                    socket.create_connection(self.place, timeout=5).close()
                    break
            # A connection of its own, since the main thread may wait on the other one.
            store = dist.TCPStore(*self.place, is_master=False, timeout=LONGEST_WAIT)
            keys = [f"sm-nanogpt/watch/{rank}" for rank in range(self.world_size)]
            for key in keys:
                store.compare_set(key, "", json.dumps([0, 0, self.timeout, "some host"]))
            while not self.ended.is_set():
                self.talks += 1
                if self.rank is not None:
                    report = [self.talks, self.heartbeats, self.timeout, self.host]
                    store.set(keys[self.rank], json.dumps(report))
                self.heard = [json.loads(report) for report in store.multi_get(keys)]
                self.ended.wait(1)

    def judge(self) -> None:
        before, talks, unheard = self.heard, 0, 0
        quiet, still = [0] * self.world_size, [0] * self.world_size  # seconds without a change
        came = [False] * self.world_size  # whether a report has changed
        more = 5 if self.rank is None else 0  # the parent reports only if no rank can
        while not self.ended.wait(1):
            unheard = unheard + 1 if talks == self.talks else 0
            talks, now = self.talks, self.heard
            before = before or now
            for rank, (was, report) in enumerate(zip(before, now, strict=True)):
                # A parent's store is new, and so is each report in it.
                came[rank] |= report != was or (self.rank is None and report[0] > 0)
                quiet[rank] = quiet[rank] + 1 if report == was else 0
                still[rank] = still[rank] + (not unheard) if report[1] == was[1] else 0
            before, names = now, [f"rank {rank} on {report[3]}" for rank, report in enumerate(now)]
            joining = JOIN_TIMEOUT.total_seconds()
            limits = [self.hang_seconds if self.joined or known else joining for known in came]
            silent = [
                rank
                for rank, limit in enumerate(limits)
                if quiet[rank] > max(limit + more, unheard + 2)
            ]
            last = [rank for rank, report in enumerate(now) if report[1] == min(s[1] for s in now)]
            timeouts = [max(report[2], self.hang_seconds) for report in now]
            if not now:
                continue
            if unheard > self.hang_seconds + more:
                hung = f"{names[0]}, or what serves the store of the ranks, does not answer"
            elif silent:
                hung = f"{', '.join(names[rank] for rank in silent)} gave no sign of life"
            elif all(still[rank] > timeouts[rank] + more for rank in last):
                hung = f"{', '.join(names[rank] for rank in last)} made no progress"
                hung += " while the others waited" * (len(last) < len(now))
            else:
                continue
            seconds = max(*quiet, *still, unheard)
            self.on_hang(f"{hung} for {seconds} s (a larger hang_seconds allows more)")
            return

    def end(self) -> None:
        self.ended.set()
        self.talker.join(10)


def end_hung(why: str) -> NoReturn:
    """Ends a rank whose main thread waits for a hung one; its launcher then ends all others."""
    with suppress(OSError):  # the reader may be gone
        report_failure(failure_report(HangError(why)))
    os._exit(1)


class Group:
    """The processes that train together, and their collective operations.

    With one process, each method returns at once.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        container: Container,
        hang_seconds: float = Config.hang_seconds,
    ) -> None:
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.local_rank, self.local_world_size = ranks.local_rank, ranks.local_world_size
        self.device = device
        self.store: dist.Store | None = None
        self.broadcasts = 0
        self.watch: Watch | None = None
        if ranks.world_size == 1:
            return
        served = (
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        )  # by torchrun, or by spawn
        address, port = os.environ.get("MASTER_ADDR", container.hosts[0]), master_port()
        alone = len(container.hosts) == 1 and (
            container.inside
            or is_loopback(address)
            or os.environ.get("LOCAL_WORLD_SIZE") == str(ranks.world_size)
        )
        if not served and (address == "localhost" or (alone and container.inside)):
            address = "127.0.0.1"
        interface = LOOPBACK if alone else container.interface
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            interface = interface or interface_towards(address)
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if interface == LOOPBACK:  # NCCL uses it only if it is named
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        try:
            if ranks.rank == 0 and not served:
                self.store = serve_store(address, listen(address, port))
            else:
                self.store = dist.TCPStore(address, port, is_master=False, timeout=JOIN_TIMEOUT)
            host = container.current_host if container.inside else socket.gethostname()
            self.watch = Watch(
                (address, port),
                ranks.world_size,
                ranks.rank,
                host,
                hang_seconds,
                on_hang=end_hung,
            )
            if ranks.local_world_size == ranks.world_size:
                # torchrun's store outlives the ranks, and still has entries from before a restart.
                # (With several hosts, each counts its own restarts, so no count is common.)
                attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                self.store = dist.PrefixStore(f"attempt{attempt}", self.store)
            cuda = device.type == "cuda"
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=self.store,
                rank=ranks.rank,
                world_size=ranks.world_size,
                timeout=LONGEST_WAIT + timedelta(minutes=5),  # for the watch to name a rank
                device_id=device if cuda else None,
            )
            # Flags travel on the host's side, so that asking never waits for a GPU.
            self.flags = dist.new_group(backend="gloo") if cuda else None
        except (RuntimeError, ValueError) as error:
            raise TopologyError(
                f"rank {ranks.rank} could not join the group of {ranks.world_size} at"
                f" {address}:{port}:"
                f" {in_one_line(error)} (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network"
                " interface to use)"
            ) from None
        # The store also holds keys of earlier groups, so this group uses a prefix of its own.
        began = torch.tensor(time.time_ns(), device=device)
        self.broadcast_([began])
        self.watch.joined = True
        self.store = dist.PrefixStore(str(int(began)), self.store)

    def heartbeat(self) -> None:
        """Every rank calls it at the same points, before it waits for others."""
        if self.watch is not None:
            self.watch.heartbeats += 1

    def expect(self, seconds: float) -> None:
        """Bounds the time until the next heartbeat, at first LONGEST_WAIT, as Watch.expect."""
        if self.watch is not None:
            self.watch.expect(seconds)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks, in place; every rank gets the same bits."""
        self.heartbeat()
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites each tensor with rank 0's."""
        self.heartbeat()
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def async_all_reduce_max(self, value: int) -> Callable[[], int]:
        """Starts to find the largest value (0 to 255) of any rank; call the result for the answer.

        Computation in between hides the time that this takes.
        """
        if self.world_size == 1:
            return lambda: value
        self.heartbeat()
        tensor = torch.tensor(value, dtype=torch.uint8)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.flags, async_op=True)

        def answer() -> int:
            work.wait()
            return int(tensor)

        return answer

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value (JSON), on every rank; all of them call this in step."""
        if self.store is None:
            return value
        self.heartbeat()
        self.broadcasts += 1
        key = f"sm-nanogpt/broadcast/{self.broadcasts}"
        if self.rank == 0:
            self.store.set(key, json.dumps(value))
            return value
        return json.loads(self.store.get(key))

    def synchronize(self) -> None:
        """Waits until the device has finished its work, so that a clock may be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def barrier(self) -> None:
        self.heartbeat()
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        self.barrier()
        if self.watch is not None:
            self.watch.end()
            self.barrier()  # no rank leaves before, as another may still use its store
            dist.destroy_process_group()


def spawn(
    run_rank: Callable[..., NoReturn], config: Config, container: Container, n_local: int
) -> int:
    """Runs the host's ranks as children of this process, and returns their exit status.

    This does what torchrun does, without elasticity: the first host's parent serves the store
    at which all ranks meet, so a host started alone waits for the others. On Linux, CPU ranks are
    forked, so that torch is imported once for all of them.
    """
    n_hosts = len(container.hosts)
    world_size = n_local * n_hosts
    address, port = "127.0.0.1", 0
    if n_hosts > 1:
        address, port = os.environ.get("MASTER_ADDR", container.hosts[0]), master_port()
    serves = container.host_index == 0
    if serves:
        listener = listen(address, port)
        port = listener.getsockname()[1]
    forks = sys.platform == "linux" and choose_device(config, container, n_local) == "cpu"
    if forks:
        import_module("torch._dynamo")  # which takes a second; DistributedDataParallel imports it
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
    children = []
    for local_rank in range(n_local):
        env = dict(
            RANK=str(container.host_index * n_local + local_rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(n_local),
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",  # the store is served by the parent
            TORCHELASTIC_RESTART_COUNT="0",
            SM_NANOGPT_LAUNCHER=os.environ.get("SM_NANOGPT_LAUNCHER", "train.py"),
        )
        children.append(context.Process(target=run_rank, args=(env, sys.argv[1:])))
        children[-1].start()
    end_with_parent()  # from here on, threads start, which must not exist before a fork
    if serves:
        _store = serve_store(address, listener)  # it lives as long as the variable

    stop_signal, stopped_at, deadline = 0, 0.0, math.inf
    hung: list[str] = []

    def terminate(number: int = signal.SIGTERM) -> None:
        for child in children:
            if child.exitcode is None:
                os.kill(child.pid, number)

    def forward(signum: int, frame: Any) -> None:
        nonlocal stop_signal, stopped_at, deadline
        if not stop_signal:
            stop_signal, stopped_at = signum, time.monotonic()
            watch.hang_seconds = min(watch.hang_seconds, STOP_SECONDS)
            terminate()
        elif is_second(stopped_at):
            sys.stderr.write("ending now; steps after the newest checkpoint are lost\n")
            deadline = min(deadline, time.monotonic() + 2)
            terminate(signal.SIGINT)

    watch = Watch((address, port), world_size, None, "", config.hang_seconds, on_hang=hung.append)
    on_stop_signals(forward)
    dead, status = 0, 0  # the rank that failed first, and how
    while True:
        codes = [child.exitcode for child in children]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if (
            hung and None in codes and not failed
        ):  # the only rank on this host hangs, so it cannot report that
            report_failure(failure_report(HangError(hung[0])))
            failed = [(0, 128 + stop_signal if stop_signal else 1)]
        if failed and not status:
            (dead, status), deadline = failed[0], min(deadline, time.monotonic() + 2)
            terminate()
        if None not in codes:
            break
        if time.monotonic() > deadline:
            for child in children:
                child.kill()
        if any(code is not None for code in codes):
            watch.ended.set()  # the store may end with the first host
        time.sleep(0.05)
    watch.end()
    if stop_signal and (status < 0 or status > 128):
        return 128 + stop_signal
    if status >= 0:
        return status
    # A killed rank cannot report its own end.
    dead += container.host_index * n_local
    killed = f"rank {dead} on {container.current_host} was killed by {signal.Signals(-status).name}"
    killed += " (was there too little memory?)" * (-status == signal.SIGKILL)
    report_failure(failure_report(TrainingError(killed)))
    return 128 - status


def is_second(stopped_at: float) -> bool:
    """Whether this is a second signal, not an echo of the first: a terminal signals the parent and
    its ranks."""
    return time.monotonic() - stopped_at > 1


def on_stop_signals(handler: Callable[[int, Any], None] | signal.Handlers) -> None:
    """Sets the handler of the signals that end this process, or its terminal.

    Under nohup, the process continues to ignore the end of its terminal.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Ends this process when the one that started it ends, however that ends.

    Orphans would continue, and write into the checkpoints of the next run.
    """
    parent = multiprocessing.parent_process()
    # A pipe to which the parent never writes.
    lifeline = parent.sentinel if parent else int(os.environ.get("SM_NANOGPT_LIFELINE", -1))

    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    if lifeline >= 0:
        threading.Thread(target=watch, daemon=True).start()
