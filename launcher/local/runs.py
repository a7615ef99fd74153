"""Runs of train.py on this machine that are no jobs: pilots of a forecast, and runs of a search."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from entry_point.files import open_standard_streams
from launcher.local.confine import Sandbox, confined, environment
from launcher.local.gpus import find_gpu
from launcher.local.process import Program, how_it_ended, remove
from launcher.source import Source

SILENT = {"sample_length": 0, "log_interval": 1 << 20}  # hyperparameters of a run nobody watches

# A run that computes is stopped by its processor time, so that no other program on the machine can
# make it fail. The clock only ends one that hangs, or gets less than 1/50 of a core.
HANGS, BUSY = 600, 50
STOP = 1.1  # times its limit, where the kernel ends a run
LOGGED = 4000  # bytes of the end of a log


@dataclass(frozen=True)
class Run:
    """A run of train.py to be made: its folder, its options, its text, and how it is held.

    limit: the seconds that it may compute, of processor time, or on a GPU by the clock. alone: it
    reaches nothing but its folder, its text and Python's packages, where the system can see to
    that, and has no variables that may be secret.
    """

    source: Source
    values: Mapping[str, Any]
    text: Path
    threads: int = 1
    limit: float = math.inf
    alone: bool = False


@dataclass(frozen=True)
class Ended:
    """A run that ended: its directory, its exit status, and its seconds: those by the clock, and
    those of the processor, with those of the processes that it started and waited for. log is the
    end of what it has printed."""

    run: Run
    out: Path
    status: int
    clock_seconds: float
    cpu_seconds: float
    log: str
    gpu: str | None = None

    @property
    def seconds(self) -> float:
        """The seconds that count: on a busy machine, those of the clock count other programs."""
        return self.cpu_seconds if self.gpu is None else self.clock_seconds

    @property
    def problem(self) -> str:
        """Why it was ended, what killed it, or the last line of its log, after the place in its
        folder that failed; '' if it completed."""
        if self.seconds > self.run.limit:
            kind = "of processor time" if self.gpu is None else "by the clock"
            return f"it took over {self.run.limit:.0f} s {kind}"
        if self.clock_seconds > clock_limit(self.run, self.gpu):
            return f"it had not ended after {self.clock_seconds:.0f} s by the clock"
        if self.status < 0:
            return f"it {how_it_ended(self.status)}"
        if not self.status:
            return ""
        last = self.log.rpartition("\n")[2][-1000:] or f"it {how_it_ended(self.status)}"
        places = re.findall(rf'{self.run.source.sha256}/(\w+\.py)", line (\d+)', self.log)
        return ": ".join([*map(":".join, places[-1:]), last])


def clock_limit(run: Run, gpu: str | None) -> float:
    """The seconds by the clock after which a run is ended, however little it has computed."""
    return run.limit if gpu is not None else HANGS + BUSY * run.limit


def run_all(
    runs: Sequence[Run], at_once: int, gpus: Sequence[str] = ()
) -> Iterator[tuple[int, Ended]]:
    """Make these runs, some at once, and yield each with its index when it ends.

    With gpus, each run has one of them, and at_once is their number. A run's directory is there
    until the next one is asked for. None goes on afterwards.
    """
    waiting = deque(enumerate(runs))
    free: list[str | None] = [*gpus] or [None] * at_once
    running = list[Running]()
    with tempfile.TemporaryDirectory(prefix="sm-nanogpt-", ignore_cleanup_errors=True) as temporary:
        base = Path(temporary)

        def fill() -> None:
            while waiting and free:
                index, run = waiting.popleft()
                code, out = base / run.source.sha256, base / f"run-{index}"
                run.source.write(code)
                running.append(Running(index, run, code, out, free.pop()))

        try:
            fill()
            while running:
                time.sleep(0.02)
                for process in [process for process in running if process.has_ended()]:
                    running.remove(process)
                    free.append(process.gpu)
                    fill()  # so that it runs while the caller looks at this one
                    try:
                        yield process.index, process.outcome()
                    finally:
                        remove(process.out)
        finally:
            for process in running:
                process.program.end()
                remove(process.out)


class Running:
    """A run that goes on, and ends with this process."""

    def __init__(self, index: int, run: Run, code: Path, out: Path, gpu: str | None) -> None:
        self.index, self.run, self.out, self.gpu = index, run, out, gpu
        self.began = time.monotonic()
        out.mkdir()
        # It stays open: the run may put anything at the place of the file.
        self.log = (out / "log").open("w+b")
        self.program = start(run, code, out, gpu, self.log)

    def has_ended(self) -> bool:
        """Whether it has ended; it is ended if it takes too long."""
        self.seconds = time.monotonic() - self.began
        if self.seconds > clock_limit(self.run, self.gpu):
            self.program.end()
        return self.program.has_ended()

    def outcome(self) -> Ended:
        with self.log as log:  # of any size
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOGGED))
            text = log.read(LOGGED).decode(errors="replace").strip()
        status, computed = self.program.status or 0, self.program.cpu_seconds
        return Ended(self.run, self.out, status, self.seconds, computed, text, self.gpu)


def start(run: Run, code: Path, out: Path, gpu: str | None, log: BinaryIO) -> Program:
    """Start train.py in a session of its own, which Ctrl-C does not reach; it ends with us."""
    open_standard_streams()
    values = {**SILENT, **run.values, "data": run.text, "out": out}
    options = [f"--{name}={value}" for name, value in values.items()]
    command = [sys.executable, str(code / "train.py"), *options]
    own = {"OMP_NUM_THREADS": str(run.threads), "SM_NANOGPT_LAUNCHER": "sm-nanogpt"}
    device = find_gpu(gpu) if gpu is not None else None
    if device is not None:
        own["CUDA_VISIBLE_DEVICES"] = device.name
    if run.alone:
        stop = STOP * run.limit + 1  # the kernel counts by ticks, a few percent off
        command = confined(command, Sandbox([code, run.text], out, device, stop))
        env = environment(out, **own)
    else:
        env = {**os.environ, **own}
    return Program(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
