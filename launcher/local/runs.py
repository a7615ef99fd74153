"""Runs of train.py on this machine that are no jobs: pilots of a forecast, and runs of a search."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.local.confine import confined
from launcher.source import Source

SILENT = {"sample_length": 0, "log_interval": 1 << 20}  # hyperparameters of a run nobody watches


@dataclass(frozen=True)
class Run:
    """A run of train.py to be made: its folder, its options, its text, and how it is held.

    gpu is the one that it sees, None for the CPU. It is ended after `limit` seconds, or when its
    files take more than `room` bytes. alone: it reads no file but its folder, its text and Python's
    packages, where the system can see to that.
    """

    source: Source
    values: Mapping[str, Any]
    text: Path
    threads: int = 1
    gpu: int | None = None
    limit: float = math.inf
    room: float = math.inf
    alone: bool = False


@dataclass(frozen=True)
class Ended:
    """A run that ended: its directory, its exit status, and seconds by the clock and of the CPU,
    with those of every process that it started. stopped says why it was ended early."""

    run: Run
    out: Path
    status: int
    seconds: float
    cpu_seconds: float
    stopped: str = ""

    @property
    def problem(self) -> str:
        """Why it was ended, what killed it, or the last line of its log; '' if it completed."""
        if self.stopped or not self.status:
            return self.stopped
        if self.status < 0:
            return f"it was killed by signal {-self.status}"
        return last_line(self.out / "log") or f"it ended with exit status {self.status}"


@dataclass
class Running:
    """A run that has begun, and the process that makes it."""

    index: int
    run: Run
    out: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)
    measured: float = 0.0  # when its files were
    stopped: str = ""

    def ended(self) -> Ended | None:
        """The run, if it has ended; it is told to if it takes more than it may."""
        seconds, run = time.monotonic() - self.began, self.run
        if seconds > run.limit and not self.stopped:
            self.stopped = f"it took over {run.limit:.0f} s"
        if run.room < math.inf and seconds > self.measured + 0.5 and not self.stopped:
            self.measured = seconds
            if bytes_below(self.out) > run.room:
                self.stopped = f"it wrote over {run.room / 1e6:,.0f} MB"
        if self.stopped:
            self.stop()
            return Ended(run, self.out, self.process.returncode, seconds, 0.0, self.stopped)
        pid, status, used = os.wait4(self.process.pid, os.WNOHANG)
        if not pid:
            return None
        self.process.returncode = code = os.waitstatus_to_exitcode(status)
        cpu_seconds = used.ru_utime + used.ru_stime
        return Ended(run, self.out, code, seconds, cpu_seconds, self.stopped)

    def stop(self) -> None:
        """End it now, with what it has started: what confines it sees to that."""
        if self.run.alone:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_all(runs: Sequence[Run], at_once: int) -> Iterator[tuple[int, Ended]]:
    """Make these runs, some at once, and yield each with its index when it ends.

    Its directory is there until the next one is asked for. None goes on afterwards.
    """
    waiting, running = deque(enumerate(runs)), list[Running]()
    with tempfile.TemporaryDirectory(prefix="sm-nanogpt-", ignore_cleanup_errors=True) as temporary:
        place = Path(temporary)

        def fill() -> None:
            while waiting and len(running) < at_once:
                index, run = waiting.popleft()
                code, out = place / run.source.sha256, place / f"run-{index}"
                run.source.write(code)
                running.append(Running(index, run, out, start(run, code, out)))

        try:
            fill()
            while running:
                time.sleep(0.02)
                for each in [*running]:
                    if ended := each.ended():
                        running.remove(each)
                        fill()  # so that it runs while the caller looks at this one
                        yield each.index, ended
        finally:
            for each in running:
                each.stop()


def last_line(log: Path) -> str:
    """The last line of a log, or the last 1,000 bytes of it."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1000))
        return file.read().decode(errors="replace").strip().rpartition("\n")[2]


def bytes_below(directory: Path) -> int:
    """What the files below a directory take, as far as they stay while it looks."""
    size = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            size += 512 * path.lstat().st_blocks
    return size


def start(run: Run, code: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start train.py in a session of its own, which Ctrl-C does not reach; it ends with us."""
    values = {**SILENT, **run.values, "data": run.text, "out": out}
    words = [f"--{name}={value}" for name, value in values.items()]
    command = [sys.executable, str(code / "train.py"), *words]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(run.threads),
        "SM_NANOGPT_LAUNCHER": "sm-nanogpt",
    }
    out.mkdir()
    if run.gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(run.gpu)
    if run.alone:
        command = confined(command, [code, run.text], [out], devices=run.gpu is not None)
        env |= {"HOME": str(out), "TMPDIR": str(out)}  # where compilers keep what they make
    with (out / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
