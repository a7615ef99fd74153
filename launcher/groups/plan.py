"""Check and price the jobs of a sweep that are to start, before the first one starts."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import IO, Any

from sm_nanogpt.launcher.backends import backend_for
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.groups.find import JobGroup, find_group
from sm_nanogpt.launcher.groups.ledger import finite_or_none
from sm_nanogpt.launcher.groups.money import cost_with_earlier, own_worst_cost, settle
from sm_nanogpt.launcher.groups.stop import lock_sweep
from sm_nanogpt.launcher.groups.sweep import MODEL_CHOICES, Sweep, SweepLedger, combinations_of
from sm_nanogpt.launcher.job import Request
from sm_nanogpt.launcher.launching.draft import check_name
from sm_nanogpt.launcher.launching.launch import Plan, new_job_id, prepare
from sm_nanogpt.launcher.launching.names import Member, next_try
from sm_nanogpt.launcher.sagemaker.cost import CeilingTooLow
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)


class SweepPlan:
    """A sweep whose jobs to start are checked and priced.

    group has the jobs so far, to which started jobs are added. By the numbers of jobs, plans has
    the jobs to start, and unaffordable the errors for jobs that the ceiling does not pay. lock
    keeps other commands from running the sweep, if it has jobs.
    """

    def __init__(
        self, group: JobGroup, sweep: Sweep, settings: Settings, lock: IO[str] | None = None
    ) -> None:
        self.group = group
        self.sweep = sweep
        self.settings = settings
        self.lock = lock
        self.ledger = SweepLedger(group.id, settings)
        self.ledger.ceiling = sweep.ceiling
        self.backend = backend_for(sweep.job.instance_name, settings)
        self.plans = dict[int, Plan]()
        self.unaffordable = dict[int, CeilingTooLow]()

    @property
    def first_plan(self) -> Plan | None:
        """The plan of the first job to start, or None. All jobs have its texts and folder."""
        return next(iter(self.plans.values()), None)

    @property
    def worst_cost(self) -> float:
        """What the jobs to start may cost together, in USD; infinity if the price is unknown."""
        costs = [own_worst_cost(plan.job, self.settings) for plan in self.plans.values()]
        return min(math.fsum(costs), self.ledger.unspent)

    @property
    def numbers_to_start(self) -> list[int]:
        """The numbers of the jobs to start, for the first time or again."""
        numbers = []
        for number in self.sweep.numbers:
            last = self.group.last_try(number)
            if last is None or not (last.is_running or last.status == "Completed"):
                numbers.append(number)
        return numbers

    # -- what happened since the last command ------------------------------------------------------

    def update_ledger(self) -> None:
        """Add to the ledger how jobs ended, if killed commands did not note it."""
        recorded = {entry["job"] for entry in self.ledger.of("reserved")}
        for number, jobs in self.group.tries.items():
            for job in jobs:
                if job.job_id not in recorded:
                    self.adopt(number, job.job_id)
        for job_id in self.ledger.open_reservations:
            self.update_job(job_id, self.backend.describe(job_id))

    def update_job(self, job_id: str, description: JobDescription | None) -> None:
        """Note how a job ended, if it has. description: None if the backend does not know it."""
        if description is not None:
            self.ledger.note_sent(job_id)
            if not description.is_running:
                settle(self.ledger, description, self.settings)
        elif self.ledger.was_sent(job_id):
            self.ledger.note_deleted(job_id)
        else:
            self.ledger.note_unsent(job_id)

    def adopt(self, number: int, job_id: str) -> None:
        """Add a job that the ledger lacks, as after a backup was restored."""
        amount = finite_or_none(own_worst_cost(self.backend.job(job_id), self.settings))
        self.ledger.add("reserved", job=job_id, number=number, usd=amount)

    # -- the jobs to start -------------------------------------------------------------------------

    def plan_jobs_to_start(self) -> None:
        """Check and price the jobs to start.

        Raises CeilingTooLow if the sweep has no job yet and its ceiling does not pay any.
        """
        self.choose_share()
        for number in self.numbers_to_start:
            if number in self.plans:  # choose_share has planned it
                continue
            try:
                self.plan_member(number, self.amount_per_job)
            except CeilingTooLow as limit:
                if not self.ledger.of("reserved"):
                    raise
                self.unaffordable[number] = limit

    @property
    def amount_per_job(self) -> float:
        """What a job may cost, in USD."""
        if self.sweep.share is None:
            return self.ledger.unspent
        return self.sweep.share

    def choose_share(self) -> None:
        """Choose the share of the ceiling that each job may cost, if there is no time limit.

        It is the unspent amount, divided by the number of jobs to start. If that does not pay even
        the shortest run, the amount is divided by half of that number, and so on. An earlier choice
        that can still be paid stays.
        """
        unspent = self.ledger.unspent
        numbers = self.numbers_to_start
        if math.isinf(unspent) or self.sweep.job.max_run is not None or not numbers:
            return
        if self.sweep.share is not None and self.sweep.share <= unspent:
            return
        n_shares = len(numbers)
        while n_shares > 1:
            try:
                self.plan_member(numbers[0], unspent / n_shares)
                break
            except CeilingTooLow:
                n_shares //= 2
        share = None  # if nothing is unspent, plan_member raises CeilingTooLow
        if unspent > 0:
            share = unspent / n_shares
        self.sweep = self.sweep.model_copy(update={"share": share})

    def plan_member(self, number: int, amount: float) -> None:
        """Plan the next job of a number, which continues the last try if that left a checkpoint.

        amount: what the job itself may cost, in USD. Raises CeilingTooLow if even the shortest run
        costs more.
        """
        if amount <= 0:
            raise CeilingTooLow("nothing is left of the ceiling of the sweep")
        resumed = self.resumable_try(number)
        member = self.next_member(number)
        request = Request(**self.fields_of(member, resumed, amount))
        texts = None
        if self.first_plan is not None:
            channels = self.first_plan.channels
            texts = {name: channels[name] for name in ("data", "validation") if name in channels}
            if resumed is None:
                request._source = self.first_plan.job.source
        self.plans[number] = prepare(request, self.settings, member.job_id, texts)

    def fields_of(
        self, member: Member, resumed: JobDescription | None, amount: float
    ) -> dict[str, Any]:
        """The fields of the request for a job."""
        if resumed is None:
            fields = self.sweep.fields_of(member.number)
        else:
            fields = {"resume": resumed.job_id}
        if not math.isinf(amount):  # without a ceiling, no price is looked up
            earlier_cost = 0.0
            if resumed is not None:
                earlier_cost = cost_with_earlier(resumed, self.backend, self.settings)
            fields["max_cost"] = min(amount + earlier_cost, self.settings.max_cost or math.inf)
        if self.sweep.job.name is not None:
            fields["name"] = f"{self.sweep.job.name}{member.suffix}"
        return fields

    def resumable_try(self, number: int) -> JobDescription | None:
        """The last try of a number, if it left a checkpoint; else None."""
        last = self.group.last_try(number)
        if last is None:
            return None
        job = self.backend.describe(last.job_id)
        if job is None or job.checkpoint_uri is None:
            return None
        return job

    def next_member(self, number: int) -> Member:
        """The next try of a number, with an id that no job has had."""
        ids = [job.job_id for job in self.group.tries.get(number, [])]
        ids += [entry["job"] for entry in self.ledger.of("sent")]
        return next_try(self.group.id, number, ids)


def plan_sweep(
    request: Request, settings: Settings, values: Mapping[str, Any], seeds: int, parallel: int
) -> SweepPlan:
    """Check and price the jobs of a new sweep, of which `parallel` run at a time.

    There is a job for each combination of the values and each of `seeds` seeds. Raises InputError
    if the values are no lists, and the errors of `prepare` if a job cannot run.
    """
    job_id = request.resume
    if job_id is not None:
        raise InputError(
            "continues one job", code="sweep-of-one", field="resume", value=job_id, job_id=job_id
        )
    combinations = combinations_of(request, values, seeds)
    check_name(request, settings)
    if request.name is not None:
        longest_name = f"{request.name}-{len(combinations)}-try99"  # of a job of the sweep
        request.replaced(name=longest_name)  # only to check it: raises InputError
    shares_cores = request.backend_class.shares_cores
    if shares_cores and parallel > 1 and request.processes_per_instance is None:
        request = request.model_copy(update={"processes_per_instance": 1})

    sweep = Sweep(job=request, members=combinations, parallel=parallel)
    plan = SweepPlan(JobGroup(new_job_id()), sweep, settings)
    plan.plan_jobs_to_start()
    log_chosen_sizes(plan)
    return plan


def log_chosen_sizes(plan: SweepPlan) -> None:
    """Log the sizes of the jobs if they differ, and are not values of the sweep."""
    if not plan.sweep.members[0].keys().isdisjoint(MODEL_CHOICES):
        return
    jobs = [job_plan.job for job_plan in plan.plans.values()]
    sizes = sorted({job.size for job in jobs if job.size is not None})
    if len(sizes) > 1:
        names = ", ".join(f"{size:g}" for size in sizes)
        reason = "each job gets the size for its own hyperparameters"
        logger.info(f"sizes: {names}; {reason}", extra={"code": "one-size"})


def continue_sweep(
    sweep_id: str, settings: Settings, max_cost: float | None, parallel: int | None
) -> SweepPlan:
    """Check and price the jobs of a sweep of this machine that have not completed.

    max_cost and parallel replace the values of the sweep, unless they are None. The plan has the
    lock of the sweep.
    """
    lock = lock_sweep(sweep_id, settings)
    try:
        sweep = SweepLedger(sweep_id, settings).sweep
        if sweep is None:
            raise InputError(f"sweep {sweep_id} was not launched from this machine, or was deleted")
        sweep = with_changes(sweep, max_cost, parallel)
        plan = SweepPlan(find_group(sweep_id, settings), sweep, settings, lock)
        plan.update_ledger()
        plan.plan_jobs_to_start()
    except BaseException:
        lock.close()
        raise
    return plan


def with_changes(sweep: Sweep, max_cost: float | None, parallel: int | None) -> Sweep:
    """The sweep with another ceiling and another number of parallel jobs; None keeps a value.

    The share of each job in another ceiling is not chosen yet.
    """
    update: dict[str, Any] = {}
    if parallel is not None:
        update["parallel"] = parallel
    if max_cost is not None:
        update["job"] = sweep.job.replaced(max_cost=max_cost)
        update["share"] = None
    return sweep.model_copy(update=update)
