"""Starts the ranks of a host, where no launcher did, and waits for them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing import connection
from typing import Any, NoReturn

import torch.distributed as dist

from .container import Container
from .errors import TrainingError, failure_report, os_reason, report_failure

ECHO_SECONDS = 1.0  # a terminal and a launcher may both pass on one Ctrl-C
FAREWELL_SECONDS = 2.0  # for the other ranks to report their own end, once one has failed


def start_ranks(
    run_rank: Callable[..., NoReturn], container: Container, n_local: int, device_type: str
) -> int:
    """Runs the host's ranks as children of this process, and returns their exit status.

    The first host's parent serves the store at which all ranks meet, so a host that is started
    alone waits for the others. Raises TrainingError if the store's port is taken.
    """
    n_hosts = len(container.hosts)
    first_rank = container.hosts.index(container.current_host) * n_local
    address, port = "127.0.0.1", 0  # 0: any port that is free
    if n_hosts > 1:
        address = os.environ.get("MASTER_ADDR", container.hosts[0])
        port = int(os.environ.get("MASTER_PORT", "7777"))
    serves_store = first_rank == 0
    if serves_store:
        listener, port = listen(address, port)

    context = process_context(device_type)
    ranks: list[Any] = []
    try:
        for local_rank in range(n_local):
            rank = first_rank + local_rank
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(n_local * n_hosts),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(n_local),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "SM_NANOGPT_LAUNCHER": os.environ.get("SM_NANOGPT_LAUNCHER", "train.py"),
            }
            name = f"rank {rank} on {container.current_host}"
            process = context.Process(target=run_rank, args=(env, sys.argv[1:]), name=name)
            process.start()
            ranks.append(process)

        if serves_store:  # after the forks, since it starts a thread; lives as long as the variable
            _store = serve_store(address, port, listener)
        return wait_for_ranks(ranks)
    except BaseException:  # without a store, the ranks would wait for it in C++
        for process in ranks:
            process.kill()
        raise


def listen(address: str, port: int) -> tuple[int, int]:
    """A socket for the store, as a descriptor, and its port. Raises TrainingError."""
    interface = address if address.startswith("127.") else ""  # "": all of them
    try:
        server = socket.create_server((interface, port))
    except OSError as error:
        raise TrainingError(
            f"cannot listen at port {port}: {os_reason(error)}; set MASTER_PORT to a free one, on"
            " each host"
        ) from None
    port = server.getsockname()[1]
    return server.detach(), port


def process_context(device_type: str) -> Any:
    """How to start processes. On Linux, CPU ranks are forked, so that torch is imported once."""
    if sys.platform != "linux" or device_type != "cpu":
        return multiprocessing.get_context("spawn")
    import_module("torch._dynamo")  # which takes a second; DistributedDataParallel imports it
    return multiprocessing.get_context("fork")


def serve_store(address: str, port: int, listener: int) -> dist.TCPStore:
    """The store at which the ranks meet, served to those who connect to a listening socket."""
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


class StopSignals:
    """The signals that ask to stop: the first, and whether another one came after its echoes."""

    def __init__(self) -> None:
        self.first = 0
        self.first_at = 0.0

    def repeats(self, signum: int) -> bool:
        """Notes a signal. True if somebody has asked again."""
        now = time.monotonic()
        if not self.first:
            self.first, self.first_at = signum, now
        return now - self.first_at > ECHO_SECONDS


def wait_for_ranks(ranks: Sequence[Any]) -> int:
    """Waits until all processes end or one fails, and returns the exit status of that one.

    The first signal goes on to the ranks; a second kills them.
    """
    signals = StopSignals()

    def forward(signum: int, frame: Any) -> None:
        if signals.repeats(signum):
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

    deadline = time.monotonic() + FAREWELL_SECONDS
    for rank in running.values():  # they report their own end, or wait for the rank that failed
        rank.join(max(0, deadline - time.monotonic()))
        rank.kill()

    if not failed:
        return 0
    status = failed[0].exitcode
    if signals.first:
        return 128 + signals.first
    if status < 0:
        report_killed(failed[0].name, signal.Signals(-status))
        return 128 - status
    return int(status)


def report_killed(name: str, killer: signal.Signals) -> None:
    """Reports the end of a rank by a signal, of which it could not say anything itself."""
    problem = f"{name} was killed by {killer.name}"
    if killer == signal.SIGKILL:
        problem += " (was there too little memory?)"
    report_failure(failure_report(TrainingError(problem)))


def end_with_parent() -> None:
    """Asks the kernel to interrupt this process when its parent ends, however it ends (Linux).

    Orphans would continue, and write into the checkpoints of the next run.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():  # it ended before that
            os.kill(os.getpid(), signal.SIGINT)
