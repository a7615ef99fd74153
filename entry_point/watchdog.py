"""The watchdog: it ends a run whose rank hangs, and names that rank."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from .errors import TrainingError, failure_report, report_failure

JOIN_MINUTES = 10  # for all ranks to come
LONGEST_WAIT = timedelta(minutes=30)  # for a rank that compiles, evaluates or writes a large model
STOP_SECONDS = 20.0  # replaces hang_seconds after a signal to stop: a disk may stall for so long


def wait_for_all(store: dist.Store, rank: int, world_size: int, host: str) -> list[Report]:
    """Writes this rank's first report for the watchdogs, and returns those of all ranks.

    Raises TrainingError if a rank has not come within JOIN_MINUTES.
    """
    keys = report_keys(world_size)
    report = Report(second=0, heartbeats=0, timeout=LONGEST_WAIT.total_seconds(), host=host)
    store.set(keys[rank], json.dumps(report))
    try:
        store.wait(keys, timedelta(minutes=JOIN_MINUTES))
    except RuntimeError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise TrainingError(
            f"of {world_size} ranks, these did not come within {JOIN_MINUTES} minutes:"
            f" {', '.join(missing)}"
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
        self.store = store
        self.rank = rank
        self.reports = reports  # of all ranks, as read last
        self.hang_seconds = hang_seconds
        self.server = server  # who serves the store
        self.device = device
        self.heartbeats = 0  # of this rank
        self.timeout = LONGEST_WAIT.total_seconds()
        self.events = deque[torch.cuda.Event]()  # heartbeats that a GPU has not come to
        self.silent_seconds = [0] * len(reports)  # for each rank, since its report changed
        self.still_seconds = [0] * len(reports)  # for each rank, since its heartbeats changed
        self.unanswered = 0  # seconds since the store answered
        self.ended = threading.Event()

        # Python runs no signal handler while the main thread waits for another rank in C++.
        self.signals, wakeup = os.pipe()
        os.set_blocking(self.signals, False)
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        self.threads = [
            threading.Thread(target=self.watch_ranks, daemon=True),
            threading.Thread(target=self.watch_store, daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def watch_ranks(self) -> None:
        if self.device.type == "cuda":  # else this thread's queries take memory of the first GPU
            torch.cuda.set_device(self.device)
        keys = report_keys(len(self.reports))
        report = self.reports[self.rank]
        with suppress(RuntimeError):  # the store's server is gone, as watch_store will say
            while not self.ended.wait(1):
                heartbeats = self.count_heartbeats()
                report = Report(report.second + 1, heartbeats, self.timeout, report.host)
                self.store.set(keys[self.rank], json.dumps(report))
                reports = read_reports(self.store, keys)
                self.unanswered = 0
                problem = self.find_hung(reports)
                if problem:
                    end_hung(problem)

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
        for rank, (before, now) in enumerate(zip(self.reports, reports, strict=True)):
            self.silent_seconds[rank] += 1
            self.still_seconds[rank] += 1
            if now != before:
                self.silent_seconds[rank] = 0
            if now.heartbeats != before.heartbeats:
                self.still_seconds[rank] = 0
        self.reports = reports

        dead = [rank for rank, n in enumerate(self.silent_seconds) if n > self.hang_seconds]
        if dead:
            return self.describe(dead, "gave no sign of life", self.silent_seconds)

        fewest = min(report.heartbeats for report in reports)
        behind = [rank for rank, report in enumerate(reports) if report.heartbeats == fewest]
        for rank in behind:
            if self.still_seconds[rank] <= max(reports[rank].timeout, self.hang_seconds):
                return ""  # this one may still compute, and others wait for it
        symptom = "made no progress"
        if len(behind) < len(reports):
            symptom += " while the others waited"
        return self.describe(behind, symptom, self.still_seconds)

    def describe(self, ranks: list[int], symptom: str, seconds: list[int]) -> str:
        """The message that these ranks hang; `seconds` are those of all ranks."""
        names = ", ".join(f"rank {rank} on {self.reports[rank].host}" for rank in ranks)
        longest = max(seconds[rank] for rank in ranks)
        return f"{names} {symptom} for {longest} s (a larger hang_seconds allows more)"

    def end(self) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join(10)


def end_hung(problem: str) -> NoReturn:
    """Ends a rank whose main thread waits for a hung one; its launcher then ends all others."""
    report_failure(failure_report(TrainingError(problem)))
    os._exit(1)
