"""Log how many runs of a search have ended, the time that passes, and the time left."""

from __future__ import annotations

import logging
import math
import time

from sm_nanogpt.entry_point.metrics import duration
from sm_nanogpt.launcher.files.progress import LINE_SECONDS
from sm_nanogpt.launcher.values import counted

logger = logging.getLogger(__name__)

MIN_SECONDS_LEFT = 5  # with less time left, nothing is logged


class RunProgress:
    """Counts runs that have ended, and logs the time left, at most once in LINE_SECONDS.

    at_once runs are made together, and judged when all of them have ended, so their time is known
    only then. made_by_job: a job makes all runs before the first is judged, so the time left is the
    time of judging.
    """

    def __init__(self, n_runs: int, at_once: int, made_by_job: bool = False) -> None:
        self.n_runs = n_runs
        self.at_once = at_once
        self.made_by_job = made_by_job
        self.n_ended = 0
        self.start_time = time.monotonic()
        self.last_log_time = -math.inf

    def begin(self, purpose: str) -> None:
        """Log the purpose and the number of the runs."""
        at_once = min(self.at_once, self.n_runs)
        logger.info(f"{purpose}: {counted(self.n_runs, 'run')}, {at_once} at a time")

    def note_time(self) -> None:
        """Log how long the runs go on, unless the time left was logged just before."""
        now = time.monotonic()
        if now - self.last_log_time > LINE_SECONDS:
            passed = duration(now - self.start_time)
            line = f"{self.n_ended} of {self.n_runs} runs have ended after {passed}"
            if self.n_ended == 0 and self.at_once < self.n_runs:
                line += f"; the first {self.at_once} will show the time left"
            logger.info(line)

    def note_made(self) -> None:
        """Note that a run was made, and will be judged now."""
        if self.made_by_job and self.n_ended == 0:
            self.start_time = time.monotonic()

    def note_end(self) -> None:
        """Count a run that has ended and is judged."""
        self.n_ended += 1
        n_left = self.n_runs - self.n_ended
        now = time.monotonic()
        is_due = now - self.last_log_time > LINE_SECONDS
        if not is_due or self.n_ended % self.at_once:
            return
        seconds_left = (now - self.start_time) / self.n_ended * n_left
        if seconds_left >= MIN_SECONDS_LEFT:
            self.last_log_time = now
            time_left = duration(seconds_left)
            logger.info(f"{self.n_ended} of {self.n_runs} runs, time left {time_left}")
