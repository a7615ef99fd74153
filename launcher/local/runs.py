"""Run train.py on this machine outside of jobs: for pilots of a forecast, and runs of a search."""

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

from sm_nanogpt.entry_point.startup import open_standard_streams
from sm_nanogpt.launcher.local.confine import Sandbox, confined, environment, lease
from sm_nanogpt.launcher.local.gpus import find_gpu
from sm_nanogpt.launcher.local.process import Program, describe_status, remove
from sm_nanogpt.launcher.source import Source

# Hyperparameters of a run that nobody watches, and that writes only its model.
SILENT = {"sample_length": 0, "log_interval": 1 << 20, "moments": 0}

# A run that computes is ended by its processor time, so that no other program of the machine can
# make it fail. The clock ends only a run that hangs, or that gets less than 1 / CLOCK_FACTOR of a
# core.
CLOCK_SECONDS = 600
CLOCK_FACTOR = 50
LOG_BYTES = 4000  # at the end of a log, which are kept


@dataclass(frozen=True)
class Run:
    """A run of train.py to be made.

    values are the options of train.py. The run may compute for `max_seconds` of processor time; on
    a GPU, the clock counts. An isolated run reaches only its folder, its text, and Python's
    packages, as far as this system can confine it, and gets no variables that may be secret.
    """

    source: Source
    values: Mapping[str, Any]
    text: Path
    threads: int = 1
    max_seconds: float = math.inf
    is_isolated: bool = False


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended."""

    run: Run
    directory: Path
    status: int  # the exit status, or minus the number of a signal
    clock_seconds: float
    cpu_seconds: float  # with those of the processes that it started and waited for
    log: str  # the end of its output
    gpu: str | None = None

    @property
    def seconds(self) -> float:
        """The seconds to which the limit applies. On a CPU, the clock would count others' work."""
        return self.cpu_seconds if self.gpu is None else self.clock_seconds

    @property
    def problem(self) -> str:
        """Why the run was ended, what killed it, or the last line of its log; '' if it completed.

        The file and the line of its folder that failed come before that last line.
        """
        if self.seconds > self.run.max_seconds:
            clock = "of processor time" if self.gpu is None else "by the clock"
            return f"it took over {self.run.max_seconds:.0f} s {clock}"
        if self.clock_seconds > clock_limit(self.run, self.gpu):
            return f"it had not ended after {self.clock_seconds:.0f} s by the clock"
        if self.status == 0:
            return ""
        last_line = self.log.rpartition("\n")[2][-1000:]
        if self.status < 0 or not last_line:
            return f"it {describe_status(self.status)}"
        lines = re.findall(rf'{self.run.source.sha256}/(\w+\.py)", line (\d+)', self.log)
        if not lines:
            return last_line
        file, number = lines[-1]
        return f"{file}:{number}: {last_line}"


def clock_limit(run: Run, gpu: str | None) -> float:
    """The seconds by the clock after which a run is ended, even if it has computed little."""
    if gpu is not None:
        return run.max_seconds
    return CLOCK_SECONDS + CLOCK_FACTOR * run.max_seconds


def run_all(
    runs: Sequence[Run], at_once: int, gpus: Sequence[str] = (), in_groups: bool = False
) -> Iterator[tuple[int, FinishedRun]]:
    """Make these runs, at_once at a time, and yield each with its index when it ends.

    If there are gpus, each run gets one of them, and at_once does not count. The directory of a run
    exists until the next run is asked for. No run goes on after this function.

    in_groups: no run goes on while the caller looks at one. As many runs as may run at the same
    time are started together, and yielded when all of them have ended.
    """
    waiting = deque(enumerate(runs))
    free_gpus: list[str | None] = list(gpus) or [None] * at_once  # None: a run on a CPU
    running: list[RunningProcess] = []
    with tempfile.TemporaryDirectory(prefix="sm-nanogpt-", ignore_cleanup_errors=True) as temporary:

        def start_waiting() -> None:
            while waiting and free_gpus:
                index, run = waiting.popleft()
                code = Path(temporary, run.source.sha256)
                run.source.write(code)
                directory = Path(temporary, f"run-{index}")
                running.append(RunningProcess(index, run, code, directory, free_gpus.pop()))

        try:
            start_waiting()
            while running:
                time.sleep(0.02)
                ended = [process for process in running if process.has_ended()]
                if in_groups and len(ended) < len(running):
                    continue
                for process in ended:
                    running.remove(process)
                    free_gpus.append(process.gpu)
                    if not in_groups:
                        start_waiting()  # so that it runs while the caller looks at this one
                    try:
                        yield process.index, process.finish()
                    finally:
                        remove(process.directory)
                if in_groups:
                    start_waiting()
        finally:
            for process in running:
                process.program.end()
                remove(process.directory)


class RunningProcess:
    """A run that goes on. It ends with this process."""

    def __init__(self, index: int, run: Run, code: Path, directory: Path, gpu: str | None) -> None:
        self.index = index
        self.run = run
        self.directory = directory
        self.gpu = gpu
        self.start_time = time.monotonic()
        self.seconds = 0.0  # from its start to its end
        directory.mkdir()
        # The file stays open, since the run may replace it.
        self.log = (directory / "log").open("w+b")
        self.program = start(run, code, directory, gpu, self.log)

    def has_ended(self) -> bool:
        """Return True if the run has ended. A run that takes too long by the clock is ended now."""
        if self.program.status is not None:
            return True
        self.seconds = time.monotonic() - self.start_time
        if self.seconds > clock_limit(self.run, self.gpu):
            self.program.end()
        return self.program.has_ended()

    def finish(self) -> FinishedRun:
        with self.log as file:
            size = file.seek(0, os.SEEK_END)  # may be any size
            file.seek(max(0, size - LOG_BYTES))
            log = file.read(LOG_BYTES).decode(errors="replace").strip()
        return FinishedRun(
            run=self.run,
            directory=self.directory,
            status=self.program.status or 0,
            clock_seconds=self.seconds,
            cpu_seconds=self.program.cpu_seconds,
            log=log,
            gpu=self.gpu,
        )


def start(run: Run, code: Path, directory: Path, gpu: str | None, log: BinaryIO) -> Program:
    """Start train.py in a session of its own, which Ctrl-C does not reach.

    code: the directory of the training folder. directory: into which the run writes.
    """
    open_standard_streams()
    values = {**SILENT, **run.values, "data": run.text, "out": directory}
    options = [f"--{name}={value}" for name, value in values.items()]
    command = [sys.executable, str(code / "train.py"), *options]
    variables = {"OMP_NUM_THREADS": str(run.threads), "SM_NANOGPT_LAUNCHER": "sm-nanogpt"}
    device = None
    if gpu is not None:
        device = find_gpu(gpu)
        variables["CUDA_VISIBLE_DEVICES"] = device.name
    env = {**os.environ, **variables}
    if run.is_isolated:
        sandbox = Sandbox([code, run.text], directory, device, run.max_seconds)
        command = confined(command, sandbox)
        # Intel's library counts cores by a call that the sandbox forbids, and would take one.
        env = environment(directory, MKL_DYNAMIC="FALSE", **variables)
    return Program(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[lease(os.getpid())] if run.is_isolated else [],
    )
