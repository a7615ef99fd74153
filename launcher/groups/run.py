"""Run the jobs that a sweep lacks, some at a time, and yield each as it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from launcher.aws import OverQuota, QuotaWait, patiently
from launcher.errors import LauncherError
from launcher.files import storage
from launcher.groups.money import own_worst_cost, settle, settle_deleted
from launcher.groups.plan import SweepPlan
from launcher.groups.stop import is_stopped, lock_group, stop_mark, write_mark
from launcher.groups.sweep import write_sweep
from launcher.job import JobDescription
from launcher.sagemaker.cost import CeilingTooLow
from launcher.source import keep

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """A job of a sweep for the screen: what it continues when it starts, or how it ended; or what
    keeps it from being started, its cost ceiling or a quota of the account."""

    number: int
    job_id: str
    description: JobDescription | None = None
    continued: str | None = None
    obstacle: CeilingTooLow | OverQuota | None = None

    @property
    def what_happened(self) -> str:
        """What happened to the job, as the predicate of a sentence: `started`, for example."""
        if isinstance(self.obstacle, OverQuota):
            return "waits"
        if self.obstacle is not None:
            return "is at its cost ceiling"
        if self.description is not None:
            loss = self.description.best_loss
            result = f", best loss {loss:.5f}" if loss is not None else ""
            return f"{self.description.status.lower()}{result}"
        if self.continued is not None:
            return f"continues {self.continued}"
        return "started"


def submit(plan: SweepPlan) -> Iterator[Event]:
    """Upload the text and record the sweep. Returns an iterator that runs it.

    It starts the jobs, `parallel` at a time, until all have ended, and yields each when it starts
    and when it ends; one that is deleted meanwhile is logged, and leaves plan.tries. A job that
    stopped or failed earlier continues from its checkpoint. A job that a quota of the account holds
    back waits until another job ends. After an error, the jobs that run keep running.
    """
    if plan.plans:
        first = next(iter(plan.plans.values()))
        first.upload()
        # What later tries read must be what the first one does, whatever is changed or launched
        # meanwhile, and from any directory.
        fixed: dict[str, Any] = {}
        for name, channel in first.channels.items():
            fixed[name] = channel.uri
        if first.job.entry_point is not None:
            fixed["entry_point"] = keep(first.job.source, plan.settings)
        job = plan.sweep.job.model_copy(update=fixed)
        plan.sweep = plan.sweep.model_copy(update={"job": job})
    write_sweep(plan.ledger, plan.sweep)
    return SweepRun(plan).events()


class SweepRun:
    """The jobs of a sweep while a command runs it: those that wait to be started, and those that
    run, by their numbers."""

    def __init__(self, plan: SweepPlan) -> None:
        self.plan = plan
        self.ledger, self.settings = plan.ledger, plan.settings
        self.backend = plan.backend
        self.waiting = list(plan.plans)
        self.running = dict[int, str]()
        for number, jobs in plan.tries.items():
            if jobs[-1].is_running:
                self.running[number] = jobs[-1].job_id
        self.quota_wait = QuotaWait()
        self.needs_money = False  # the next job waits for what a running one may give back
        self.was_stopped = False
        self.mark = ""

    def events(self) -> Iterator[Event]:
        with self.plan.lock or lock_group(self.plan.group, self.settings):
            for number, limit in self.plan.unaffordable.items():
                job_id = self.plan.next_id(number)
                yield Event(number, job_id, obstacle=limit)
            self.allow_starts()
            while self.waiting or self.running:
                self.obey_stop()
                if self.may_start:
                    yield from self.start_next()
                else:
                    time.sleep(max(0.5, self.backend.poll_seconds))
                    yield from self.poll()

    # -- stop -------------------------------------------------------------------------------------

    def allow_starts(self) -> None:
        """Write the file that says that this sweep may start jobs."""
        self.mark = stop_mark(self.plan.group, self.job_directory(), self.settings)
        write_mark(self.mark, self.settings, may_run=True)

    def job_directory(self) -> str:
        """The directory or prefix of a job of the sweep."""
        for plan in self.plan.plans.values():
            return storage.join(plan.backend.settings.data_store, "jobs", plan.job_id)
        for jobs in self.plan.tries.values():
            return self.backend.directories(jobs[0].job_id)[0]
        return ""

    def obey_stop(self) -> None:
        self.was_stopped = is_stopped(self.plan.group, self.mark, self.settings)
        if self.was_stopped:
            self.waiting.clear()

    # -- start ------------------------------------------------------------------------------------

    @property
    def may_start(self) -> bool:
        has_room = len(self.running) < self.plan.sweep.parallel
        is_held_back = self.needs_money or not self.quota_wait.may_send
        return bool(self.waiting) and has_room and not is_held_back

    def start_next(self) -> Iterator[Event]:
        """Start the next job, unless a quota or the ceiling holds it back."""
        number = self.waiting[0]
        job_id = self.plan.plans[number].job_id
        try:
            event = self.start(number)
        except OverQuota as quota:
            is_first = self.quota_wait.note_refusal(quota, bool(self.running))
            if is_first:
                yield Event(number, job_id, obstacle=quota)
        except CeilingTooLow as limit:
            if self.running:
                self.needs_money = True
            else:
                self.waiting.remove(number)
                yield Event(number, job_id, obstacle=limit)
        else:
            self.waiting.remove(number)
            self.quota_wait.note_sent()
            yield event

    def start(self, number: int) -> Event:
        """Reserve what a job may cost, and send it. Raises OverQuota, CeilingTooLow, or as
        `Plan.submit`."""
        plan = self.plan.plans[number]
        amount = own_worst_cost(plan.job, self.settings)
        self.ledger.reserve(plan.job_id, amount, number=number)
        plan.backend.parallel = self.plan.sweep.parallel
        try:
            replace(plan, channels={}).submit(confirmed=True)  # `submit` has uploaded them
        except LauncherError as error:
            if error.code != "job-may-exist":
                self.ledger.release(plan.job_id)
            raise
        self.ledger.note_sent(plan.job_id)
        self.running[number] = plan.job_id
        return Event(number, plan.job_id, continued=plan.job.resume)

    # -- end --------------------------------------------------------------------------------------

    def poll(self) -> Iterator[Event]:
        """Ask about each job that runs. Yields those that have ended."""
        for number, job_id in list(self.running.items()):
            describe = partial(self.backend.describe, job_id)
            job = patiently(describe, job_id=self.plan.group, code="")
            if job is None:
                logger.info(f"job {job_id} was deleted")
                settle_deleted(self.ledger, job_id)
                self.forget_try(number, job_id)
                self.note_end(number)
                continue
            if self.was_stopped and job.status == "InProgress":
                self.backend.stop(job_id)
            self.note_try(number, job)
            if not job.is_running:
                settle(self.ledger, job, self.settings)
                self.note_end(number)
                yield Event(number, job_id, job)

    def note_try(self, number: int, job: JobDescription) -> None:
        """Keep the newest state of a job among the tries of its member."""
        self.forget_try(number, job.job_id)
        self.plan.tries.setdefault(number, []).append(job)

    def forget_try(self, number: int, job_id: str) -> None:
        """Leave a job out of the tries of its member."""
        tries = self.plan.tries.pop(number, [])
        others = [job for job in tries if job.job_id != job_id]
        if others:
            self.plan.tries[number] = others

    def note_end(self, number: int) -> None:
        """A job has ended or was deleted, and makes room for others."""
        del self.running[number]
        self.quota_wait.note_end()
        self.needs_money = False
