"""Runs of train.py on this machine that are no jobs: pilots of a forecast, and runs of a search."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entry_point.files import open_standard_streams
from launcher.local.confine import PATIENCE, confined, end, environment
from launcher.local.process import how_it_ended
from launcher.source import Source

SILENT = {"sample_length": 0, "log_interval": 1 << 20}  # hyperparameters of a run nobody watches


@dataclass(frozen=True)
class Run:
    """A run of train.py to be made: its folder, its options, its text, and how it is held.

    It is ended after `limit` seconds. alone: it reads no file but its folder, its text and Python's
    packages, where the system can see to that, and has no variable of AWS.
    """

    source: Source
    values: Mapping[str, Any]
    text: Path
    threads: int = 1
    limit: float = math.inf
    alone: bool = False


@dataclass(frozen=True)
class Ended:
    """A run that ended: its directory, its exit status, and seconds by the clock and of the CPU,
    with those of every process that it started."""

    run: Run
    out: Path
    status: int
    seconds: float
    cpu_seconds: float

    @property
    def problem(self) -> str:
        """Why it was ended, what killed it, or the last line of its log, after the place in its
        folder that failed; '' if it completed."""
        if self.seconds > self.run.limit:
            return f"it took over {self.run.limit:.0f} s"
        if self.status < 0:
            return f"it {how_it_ended(self.status)}"
        if not self.status:
            return ""
        with (self.out / "log").open("rb") as log:  # of any size
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4000))
            said = log.read().decode(errors="replace").strip()
        last = said.rpartition("\n")[2][-1000:] or f"it {how_it_ended(self.status)}"
        places = re.findall(rf'{self.run.source.sha256}/(\w+\.py)", line (\d+)', said)
        return ": ".join([*map(":".join, places[-1:]), last])


def run_all(
    runs: Sequence[Run], at_once: int, gpus: Sequence[str] = ()
) -> Iterator[tuple[int, Ended]]:
    """Make these runs, some at once, and yield each with its index when it ends.

    With gpus, each run has one of them, and at_once is their number. A run's directory is there
    until the next one is asked for. None goes on afterwards.
    """
    waiting = deque(enumerate(runs))
    free: list[str | None] = [*gpus] or [None] * at_once
    running = dict[subprocess.Popen[bytes], tuple[int, float, str | None]]()
    with tempfile.TemporaryDirectory(prefix="sm-nanogpt-", ignore_cleanup_errors=True) as temporary:
        place = Path(temporary)

        def fill() -> None:
            while waiting and free:
                (index, run), gpu = waiting.popleft(), free.pop()
                code = place / run.source.sha256
                run.source.write(code)
                process = start(run, code, place / f"run-{index}", gpu)
                running[process] = index, time.monotonic(), gpu

        try:
            fill()
            while running:
                time.sleep(0.02)
                for process, (index, began, gpu) in list(running.items()):
                    run, seconds = runs[index], time.monotonic() - began
                    if seconds > run.limit:
                        late = seconds > run.limit + PATIENCE
                        os.kill(process.pid, signal.SIGKILL if late else signal.SIGTERM)
                    pid, status, used = os.wait4(process.pid, os.WNOHANG)
                    if not pid:
                        continue
                    process.returncode = os.waitstatus_to_exitcode(status)
                    del running[process]
                    free.append(gpu)
                    fill()  # so that it runs while the caller looks at this one
                    out, computed = place / f"run-{index}", used.ru_utime + used.ru_stime
                    yield index, Ended(run, out, process.returncode, seconds, computed)
                    shutil.rmtree(out, ignore_errors=True)
        finally:
            for process in running:
                end(process)


def start(run: Run, code: Path, out: Path, gpu: str | None) -> subprocess.Popen[bytes]:
    """Start train.py in a session of its own, which Ctrl-C does not reach; it ends with us."""
    open_standard_streams()
    values = {**SILENT, **run.values, "data": run.text, "out": out}
    words = [f"--{name}={value}" for name, value in values.items()]
    command = [sys.executable, str(code / "train.py"), *words]
    env = environment(out) if run.alone else dict(os.environ)
    env |= {"OMP_NUM_THREADS": str(run.threads), "SM_NANOGPT_LAUNCHER": "sm-nanogpt"}
    out.mkdir()
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    if run.alone:
        command = confined(command, [code, run.text], [out], devices=gpu is not None)
    with (out / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
