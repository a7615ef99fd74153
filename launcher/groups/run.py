"""Run the jobs that a group lacks, some at a time, and yield each as it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from sm_nanogpt.launcher.aws import PATIENCE_SECONDS, OverQuota, QuotaWait, patiently
from sm_nanogpt.launcher.backends import Backend
from sm_nanogpt.launcher.description import JobDescription, UnreadableJob
from sm_nanogpt.launcher.errors import LauncherError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.groups.ledger import GroupLedger
from sm_nanogpt.launcher.groups.money import own_worst_cost, settle, settle_deleted
from sm_nanogpt.launcher.groups.plan import SweepPlan
from sm_nanogpt.launcher.groups.stop import is_stopped, lock_group, stop_mark, write_mark
from sm_nanogpt.launcher.groups.sweep import write_sweep
from sm_nanogpt.launcher.launching.launch import Plan
from sm_nanogpt.launcher.sagemaker.cost import CeilingTooLow
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.source import keep_source

logger = logging.getLogger(__name__)

NEWEST = 100  # jobs among which one is looked for that holds a quota


@dataclass(frozen=True)
class Event:
    """A job of a group for the screen: what it continues when it starts, or how it ended; or what
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


def begin_sweep(plan: SweepPlan) -> Iterator[Event]:
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
            fixed["entry_point"] = keep_source(first.job.source, plan.settings)
        job = plan.sweep.job.model_copy(update=fixed)
        plan.sweep = plan.sweep.model_copy(update={"job": job})
    write_sweep(plan.ledger, plan.sweep)
    return SweepRun(plan).events()


class GroupRun:
    """The jobs of a group while a command runs it, `parallel` at a time.

    plans: the jobs to start, and running: the ids of those that run, by their numbers. name is that
    of the group.
    """

    def __init__(
        self, name: str, ledger: GroupLedger, backend: Backend, settings: Settings, parallel: int
    ) -> None:
        self.name = name
        self.ledger = ledger
        self.backend = backend
        self.settings = settings
        self.parallel = parallel
        self.plans = dict[int, Plan]()
        self.waiting = list[int]()
        self.running = dict[int, str]()
        self.quota_wait = QuotaWait()
        self.needs_money = False  # the next job waits for what a running one may give back
        self.pending = set[str]()  # jobs that wait for capacity, which was logged

    def add(self, number: int, plan: Plan) -> None:
        """Add a job to start."""
        self.plans[number] = plan
        self.waiting.append(number)

    def events(self) -> Iterator[Event]:
        """Start the jobs, and yield each when it starts and when it ends."""
        while self.waiting or self.running:
            self.obey_stop()
            if self.may_start:
                yield from self.start_next()
            else:
                time.sleep(max(0.5, self.backend.poll_seconds))
                yield from self.poll()

    def obey_stop(self) -> None:
        """Start no other job if somebody has stopped the group."""

    # -- start ------------------------------------------------------------------------------------

    @property
    def may_start(self) -> bool:
        has_room = len(self.running) < self.parallel
        is_held_back = self.needs_money or not self.quota_wait.may_send
        return bool(self.waiting) and has_room and not is_held_back

    def start_next(self) -> Iterator[Event]:
        """Start the next job, unless a quota or the ceiling holds it back."""
        number = self.waiting[0]
        job_id = self.plans[number].job_id
        try:
            event = self.start(number)
        except OverQuota as quota:
            is_first = self.quota_wait.note_refusal(quota, self.may_free_quota(number))
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

    def may_free_quota(self, number: int) -> bool:
        """True if a job of the caller on these instances runs, of this group or of none, or ended
        minutes ago: SageMaker may count a job for a while after its end."""
        if self.running:
            return True
        instances = self.plans[number].job.instances
        for job in islice(self.backend.list(), NEWEST):
            if isinstance(job, UnreadableJob) or job.instance not in instances:
                continue
            if job.is_running or time.time() < (job.ended or 0.0) + PATIENCE_SECONDS:
                return True
        return False

    def start(self, number: int) -> Event:
        """Reserve what a job may cost, and send it. Raises OverQuota, CeilingTooLow, or as
        `Plan.submit`."""
        plan = self.plans[number]
        self.reserve(number, plan)
        try:
            self.send(plan)
        except LauncherError as error:
            if error.code != "job-may-exist":
                self.ledger.release(plan.job_id)
            raise
        self.ledger.note_sent(plan.job_id)
        self.running[number] = plan.job_id
        return Event(number, plan.job_id, continued=plan.job.resume)

    def reserve(self, number: int, plan: Plan) -> None:
        """Note in the ledger what a job may cost. Raises OverCeiling."""
        amount = own_worst_cost(plan.job, self.settings)
        self.ledger.reserve(plan.job_id, amount, number=number)

    def send(self, plan: Plan) -> None:
        """Submit a job whose texts were uploaded."""
        plan.backend.parallel = self.parallel
        replace(plan, channels={}).submit(confirmed=True)

    # -- end --------------------------------------------------------------------------------------

    def poll(self) -> Iterator[Event]:
        """Ask about each job that runs. Yields those that have ended."""
        for number, job_id in list(self.running.items()):
            describe = partial(self.backend.describe, job_id)
            job = patiently(describe, job_id=self.name, code="", bills=self.backend.bills)
            if job is None:
                logger.info(f"job {job_id} was deleted")
                settle_deleted(self.ledger, job_id)
                self.forget_try(number, job_id)
                self.note_end(number)
                continue
            self.note_try(number, job)
            if not job.is_running:
                self.settle(job)
                self.note_end(number)
                yield Event(number, job_id, job)
            elif job.secondary_status == "Pending" and job_id not in self.pending:
                self.pending.add(job_id)
                job.log_pending()

    def note_try(self, number: int, job: JobDescription) -> None:
        """Take the newest state of a job into account."""

    def forget_try(self, number: int, job_id: str) -> None:
        """Take into account that a job was deleted."""

    def settle(self, job: JobDescription) -> None:
        """Note in the ledger what a job gave that has ended."""
        settle(self.ledger, job, self.settings)

    def note_end(self, number: int) -> None:
        """A job has ended or was deleted, and makes room for others."""
        del self.running[number]
        self.quota_wait.note_end()
        self.needs_money = False


class SweepRun(GroupRun):
    """The jobs of a sweep while a command runs it, which any machine may stop."""

    def __init__(self, plan: SweepPlan) -> None:
        parallel = plan.sweep.parallel
        super().__init__(plan.group, plan.ledger, plan.backend, plan.settings, parallel)
        for number, member in plan.plans.items():
            self.add(number, member)
        for number, jobs in plan.tries.items():
            if jobs[-1].is_running:
                self.running[number] = jobs[-1].job_id
        self.plan = plan
        self.was_stopped = False
        self.mark = ""

    def events(self) -> Iterator[Event]:
        with self.plan.lock or lock_group(self.name, self.settings):
            for number, limit in self.plan.unaffordable.items():
                job_id = self.plan.next_member(number).job_id
                yield Event(number, job_id, obstacle=limit)
            self.allow_starts()
            yield from super().events()

    # -- stop -------------------------------------------------------------------------------------

    def allow_starts(self) -> None:
        """Write the file that says that this sweep may start jobs."""
        self.mark = stop_mark(self.name, self.job_directory(), self.settings)
        write_mark(self.mark, self.settings, may_run=True)

    def job_directory(self) -> str:
        """The directory or prefix of a job of the sweep."""
        for plan in self.plans.values():
            return storage.join(plan.backend.settings.data_store, "jobs", plan.job_id)
        for jobs in self.plan.tries.values():
            return self.backend.directories(jobs[0].job_id)[0]
        return ""

    def obey_stop(self) -> None:
        self.was_stopped = is_stopped(self.name, self.mark, self.settings, self.backend.bills)
        if self.was_stopped:
            self.waiting.clear()

    # -- its tries --------------------------------------------------------------------------------

    def note_try(self, number: int, job: JobDescription) -> None:
        if self.was_stopped and job.status == "InProgress":
            self.backend.stop(job.job_id)
        self.forget_try(number, job.job_id)
        self.plan.tries.setdefault(number, []).append(job)

    def forget_try(self, number: int, job_id: str) -> None:
        tries = self.plan.tries.pop(number, [])
        others = [job for job in tries if job.job_id != job_id]
        if others:
            self.plan.tries[number] = others
