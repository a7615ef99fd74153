"""Run the missing jobs of a group, some at a time, and yield each when it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from sm_nanogpt.launcher.aws import PATIENCE_SECONDS, OverQuota, QuotaWait, patiently
from sm_nanogpt.launcher.backends import Backend
from sm_nanogpt.launcher.description import JobDescription, UnreadableJob
from sm_nanogpt.launcher.errors import LauncherError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.groups.ledger import GroupLedger
from sm_nanogpt.launcher.groups.money import own_worst_cost, settle
from sm_nanogpt.launcher.groups.plan import SweepPlan
from sm_nanogpt.launcher.groups.stop import lock_sweep, may_run, stop_mark, write_mark
from sm_nanogpt.launcher.groups.sweep import Sweep
from sm_nanogpt.launcher.launching.launch import Plan
from sm_nanogpt.launcher.launching.names import name_reserved
from sm_nanogpt.launcher.sagemaker.cost import CeilingTooLow
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.source import keep_source

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_JOBS_READ = 100  # the newest jobs, any of which may use a quota


@dataclass(frozen=True)
class Event:
    """A job of a group has started or ended, or an obstacle keeps it from starting."""

    number: int
    job_id: str
    description: JobDescription | None = None  # how it ended
    continued: str | None = None  # the id of the job that it continues
    obstacle: CeilingTooLow | OverQuota | None = None

    @property
    def what_happened(self) -> str:
        """What happened to the job, as the rest of a sentence on it, such as `started`."""
        if isinstance(self.obstacle, OverQuota):
            return "waits"
        if self.obstacle is not None:
            return "is at its cost ceiling"
        if self.description is not None:
            outcome = self.description.status.lower()
            loss = self.description.best_loss
            if loss is not None:
                outcome += f", best loss {loss:.5f}"
            return outcome
        if self.continued is not None:
            return f"continues {self.continued}"
        return "started"


def begin_sweep(plan: SweepPlan) -> Iterator[Event]:
    """Upload what the jobs read, and record the sweep; return an iterator that runs the jobs.

    The texts and models that the store lacks are uploaded, unless no job is to be started. The
    iterator starts the jobs, `parallel` at a time, until all have ended. It yields an Event when a
    job starts, when it ends, and when a quota or the cost ceiling keeps it from starting. A job
    that a quota keeps from starting waits until another one ends. A job that stopped or failed
    earlier continues from its checkpoint. Ended jobs are added to plan.group. A job that is deleted
    meanwhile is logged, and leaves the group. After an error, the running jobs keep running.
    """
    first = plan.first_plan
    if first is not None:
        first.upload()  # for all jobs, which read the same
        plan.sweep = with_uploaded_inputs(plan.sweep, first)
    new_name = plan.sweep.job.name if plan.ledger.sweep is None else None
    with name_reserved(new_name, plan.settings):
        plan.ledger.record(plan.sweep)
    return SweepRun(plan).events()


def with_uploaded_inputs(sweep: Sweep, plan: Plan) -> Sweep:
    """The sweep with the URIs of what a plan of one of its jobs uploaded, and its kept folder.

    So later tries read the same as the first tries, whatever was changed or launched meanwhile, and
    from any directory.
    """
    inputs: dict[str, Any] = {name: channel.uri for name, channel in plan.channels.items()}
    if plan.job.entry_point is not None:
        inputs["entry_point"] = keep_source(plan.job.source, plan.settings)
    job = sweep.job.model_copy(update=inputs)
    return sweep.model_copy(update={"job": job})


class GroupRun:
    """The jobs of a group while a command runs it, `parallel` at a time.

    name: of the group. waiting: the plans of the jobs to start, by their numbers. running: the ids
    of the jobs that run, by their numbers.
    """

    def __init__(
        self, name: str, ledger: GroupLedger, backend: Backend, settings: Settings, parallel: int
    ) -> None:
        self.name = name
        self.ledger = ledger
        self.backend = backend
        self.settings = settings
        self.parallel = parallel
        self.waiting = dict[int, Plan]()
        self.running = dict[int, str]()
        self.quota_wait = QuotaWait()
        self.waits_for_money = False  # the next job waits for what a running one may give back
        self.logged_pending = set[str]()  # jobs that wait for capacity, which was logged

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
        """Start no more jobs if somebody has stopped the group."""

    def patiently(self, call: Callable[[], T]) -> T:
        """Make a call about the group, and retry it during an outage, as aws.patiently does."""
        return patiently(call, job_id=self.name, code="", bills=self.backend.bills)

    # -- start ------------------------------------------------------------------------------------

    @property
    def may_start(self) -> bool:
        """True if a job waits, and neither a quota nor the ceiling holds it back."""
        has_room = len(self.running) < self.parallel
        is_held_back = self.waits_for_money or not self.quota_wait.may_send
        return bool(self.waiting) and has_room and not is_held_back

    def start_next(self) -> Iterator[Event]:
        """Start the next job, unless a quota or the ceiling holds it back."""
        number, plan = next(iter(self.waiting.items()))
        try:
            self.start(number, plan)
        except OverQuota as error:
            may_free = self.may_free_quota(plan.job.instances)
            if self.quota_wait.note_refusal(error, may_free):  # the first refusal of this job
                yield Event(number, plan.job_id, obstacle=error)
        except CeilingTooLow as error:
            if self.running:
                self.waits_for_money = True
            else:
                del self.waiting[number]
                yield Event(number, plan.job_id, obstacle=error)
        else:
            del self.waiting[number]
            self.running[number] = plan.job_id
            self.quota_wait.note_sent()
            yield Event(number, plan.job_id, continued=plan.job.resume)

    def may_free_quota(self, instances: Collection[str]) -> bool:
        """True if any job of the caller on these instance types runs, or has just ended.

        SageMaker may count a job for up to PATIENCE_SECONDS after its end.
        """
        if self.running:
            return True
        for job in islice(self.backend.list(), MAX_JOBS_READ):
            if isinstance(job, UnreadableJob) or job.instance not in instances:
                continue
            if job.is_running or time.time() < (job.ended or 0.0) + PATIENCE_SECONDS:
                return True
        return False

    def start(self, number: int, plan: Plan) -> None:
        """Reserve what a job may cost, and send it.

        Raises OverQuota, CeilingTooLow, and the errors of `Plan.submit`.
        """
        self.reserve(number, plan)
        try:
            self.send(plan)
        except LauncherError as error:
            if error.code != "job-may-exist":
                self.ledger.note_unsent(plan.job_id)
            raise
        self.ledger.note_sent(plan.job_id)

    def reserve(self, number: int, plan: Plan) -> None:
        """Note in the ledger what a job may cost. Raises OverCeiling."""
        amount = own_worst_cost(plan.job, self.settings)
        self.ledger.reserve(plan.job_id, amount, number=number)

    def send(self, plan: Plan) -> None:
        """Submit a job whose texts were uploaded. Its name was checked when the group began."""
        plan.backend.parallel = self.parallel
        replace(plan, channels={}, new_name=None).submit(confirmed=True)

    # -- end --------------------------------------------------------------------------------------

    def poll(self) -> Iterator[Event]:
        """Ask about each running job, and yield those that have ended."""
        for number, job_id in list(self.running.items()):
            job = self.patiently(partial(self.backend.describe, job_id))
            if job is None:
                logger.info(f"job {job_id} was deleted")
                self.ledger.note_deleted(job_id)
                self.note_end(number)
            elif job.is_running:
                self.note_running(job)
            else:
                self.settle(job)
                self.note_end(number)
                yield Event(number, job_id, job)

    def note_running(self, job: JobDescription) -> None:
        """Log once that a running job waits for capacity, if it does."""
        if job.secondary_status == "Pending" and job.job_id not in self.logged_pending:
            self.logged_pending.add(job.job_id)
            job.log_pending()

    def settle(self, job: JobDescription) -> None:
        """Note the result of an ended job in the ledger."""
        settle(self.ledger, job, self.settings)

    def note_end(self, number: int) -> None:
        """Make room for another job, after one has ended or was deleted."""
        del self.running[number]
        self.quota_wait.note_end()
        self.waits_for_money = False


class SweepRun(GroupRun):
    """The jobs of a sweep while a command runs it, which any machine may stop."""

    def __init__(self, plan: SweepPlan) -> None:
        parallel = plan.sweep.parallel
        super().__init__(plan.group.id, plan.ledger, plan.backend, plan.settings, parallel)
        self.plan = plan
        self.tries = plan.group.tries  # the ended jobs of each number
        self.was_stopped = False
        self.mark = ""
        self.waiting.update(plan.plans)
        for number, jobs in list(self.tries.items()):
            if jobs[-1].is_running:
                self.running[number] = jobs.pop().job_id
            if not jobs:
                del self.tries[number]

    def events(self) -> Iterator[Event]:
        # A sweep that continues was locked before it was planned.
        with self.plan.lock or lock_sweep(self.name, self.settings):
            for number, error in self.plan.unaffordable.items():
                job_id = self.plan.next_member(number).job_id
                yield Event(number, job_id, obstacle=error)
            if self.waiting or self.running:
                self.allow_starts()
            for event in super().events():
                if event.description is not None:
                    self.tries.setdefault(event.number, []).append(event.description)
                yield event

    # -- stop -------------------------------------------------------------------------------------

    def allow_starts(self) -> None:
        """Write the file that says that this sweep may start jobs."""
        self.mark = stop_mark(self.name, self.job_directory(), self.settings)
        write_mark(self.mark, self.settings, may_run=True)

    def job_directory(self) -> str:
        """The directory or S3 prefix of one job of the sweep, no matter which."""
        if self.plan.first_plan is None:
            job_id = next(iter(self.running.values()))
            return self.backend.directories(job_id)[0]
        data_store = self.plan.first_plan.backend.settings.data_store
        return storage.join(data_store, "jobs", self.plan.first_plan.job_id)

    def obey_stop(self) -> None:
        self.was_stopped = not self.patiently(partial(may_run, self.mark, self.settings))
        if self.was_stopped:
            self.waiting.clear()

    def note_running(self, job: JobDescription) -> None:
        super().note_running(job)
        if self.was_stopped and job.status == "InProgress":
            self.backend.stop(job.job_id)
