"""Check and price the jobs that a sweep lacks, before the first of them starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, Any

from sm_nanogpt.launcher.backends import Backend, backend_class, backend_for
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.groups import sweep as sweeps
from sm_nanogpt.launcher.groups.find import Tries, find_group
from sm_nanogpt.launcher.groups.ledger import GroupLedger, finite
from sm_nanogpt.launcher.groups.money import (
    cost_with_earlier,
    own_worst_cost,
    settle,
    settle_deleted,
)
from sm_nanogpt.launcher.groups.stop import lock_group
from sm_nanogpt.launcher.groups.sweep import Sweep
from sm_nanogpt.launcher.job import Request
from sm_nanogpt.launcher.launching.draft import check_name
from sm_nanogpt.launcher.launching.launch import Plan, new_job_id, prepare
from sm_nanogpt.launcher.launching.names import Member, next_try
from sm_nanogpt.launcher.sagemaker.cost import CeilingTooLow
from sm_nanogpt.launcher.settings import Settings

DEFAULT_SEED = 1337


@dataclass
class SweepPlan:
    """A sweep whose missing jobs are checked and priced.

    tries: its jobs so far, which get those that are started. plans: the jobs to start, by their
    number. unaffordable: why others are not, since the ceiling is used up. lock: keeps other
    commands from running the sweep, if it has jobs.
    """

    group: str
    sweep: Sweep
    settings: Settings
    ledger: GroupLedger
    tries: Tries
    plans: dict[int, Plan] = field(default_factory=dict)
    unaffordable: dict[int, CeilingTooLow] = field(default_factory=dict)
    lock: IO[str] | None = None
    # Its texts and its folder are those of all.
    first: Plan | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.ledger.ceiling = self.sweep.ceiling

    @property
    def worst_cost(self) -> float:
        """What the jobs may cost together, in USD; infinity if the price is unknown."""
        worst = math.fsum(own_worst_cost(plan.job, self.settings) for plan in self.plans.values())
        return min(worst, self.ledger.unspent)

    @cached_property
    def backend(self) -> Backend:
        return backend_for(self.sweep.job.instance or "", self.settings)

    @property
    def missing(self) -> list[int]:
        """The numbers of the jobs to start, for the first time or again."""
        missing = []
        for number in self.sweep.numbers:
            jobs = self.tries.get(number)
            if not jobs or not (jobs[-1].is_running or jobs[-1].status == "Completed"):
                missing.append(number)
        return missing

    # -- what happened since the last command ------------------------------------------------------

    def update_ledger(self) -> None:
        """Bring the ledger up to date: earlier commands may have been killed before they noted how
        their jobs ended."""
        backend = self.backend
        recorded = {entry["job"] for entry in self.ledger.of("reserved")}
        for number, jobs in self.tries.items():
            for job in jobs:
                if job.job_id not in recorded:
                    self.adopt(number, job.job_id, backend)
        for job_id in self.ledger.open_reservations:
            self.update_job(job_id, backend.describe(job_id))

    def update_job(self, job_id: str, description: JobDescription | None) -> None:
        """Note what a job gave; description is None if its backend does not know it."""
        if description is not None:
            self.ledger.note_sent(job_id)
            if not description.is_running:
                settle(self.ledger, description, self.settings)
        elif self.ledger.was_sent(job_id):
            settle_deleted(self.ledger, job_id)
        else:
            self.ledger.release(job_id)

    def adopt(self, number: int, job_id: str, backend: Backend) -> None:
        """Add a job that the ledger lacks, as one of an older backup does."""
        amount = finite(own_worst_cost(backend.job(job_id), self.settings))
        self.ledger.add("reserved", job=job_id, number=number, usd=amount)

    # -- the jobs that are missing -----------------------------------------------------------------

    def plan_missing(self) -> None:
        """Check and price the missing jobs. Raises CeilingTooLow if the sweep has no job yet, and
        its ceiling pays none."""
        self.choose_share()
        for number in self.missing:
            if number in self.plans:  # choose_share has prepared it
                continue
            try:
                self.plans[number] = self.prepare_member(number, self.amount)
            except CeilingTooLow as limit:
                if not self.ledger.of("reserved"):
                    raise
                self.unaffordable[number] = limit

    @property
    def amount(self) -> float:
        """USD that a job may cost."""
        return self.ledger.unspent if self.sweep.share is None else self.sweep.share

    def choose_share(self) -> None:
        """Choose what each job may cost, if there is a ceiling and no time limit: the unspent USD,
        divided by the number of missing jobs. If that does not pay even the shortest run, by half
        as many, and so on."""
        unspent = self.ledger.unspent
        if math.isinf(unspent) or self.sweep.job.max_run is not None or not self.missing:
            return
        if self.sweep.share is not None and self.sweep.share <= unspent:
            return
        n_shares = len(self.missing)
        while n_shares > 1 and not self.plan_first_missing(unspent / n_shares):
            n_shares //= 2
        share = unspent / n_shares if unspent > 0 else None  # then prepare_member refuses
        self.sweep = self.sweep.model_copy(update={"share": share})

    def plan_first_missing(self, amount: float) -> bool:
        """Plan the first missing job, if so many USD pay it. Returns whether they do."""
        number = self.missing[0]
        try:
            self.plans[number] = self.prepare_member(number, amount)
        except CeilingTooLow:
            return False
        return True

    def prepare_member(self, number: int, amount: float = math.inf) -> Plan:
        """The next job of a member, checked. It continues the last try if that left a checkpoint.

        amount: USD that the job itself may cost. Raises CeilingTooLow if even the shortest run
        costs more.
        """
        if amount <= 0:
            raise CeilingTooLow("nothing is left of the ceiling of the sweep")
        resumed = self.resumable_try(number)
        fields: dict[str, Any] = self.sweep.fields_of(number)
        if resumed:
            fields = {"resume": resumed.job_id}
        if not math.isinf(amount):
            earlier = cost_with_earlier(resumed, self.backend, self.settings) if resumed else 0.0
            fields["max_cost"] = min(amount + earlier, self.settings.max_cost or math.inf)
        member = self.next_member(number)
        if self.sweep.job.name is not None:
            fields["name"] = f"{self.sweep.job.name}{member.suffix}"
        request = Request(**fields)
        texts = None
        if self.first is not None:
            channels = self.first.channels
            texts = {name: channels[name] for name in ("data", "validation") if name in channels}
            if not resumed:
                request._source = self.first.job.source
        plan = prepare(request, self.settings, member.job_id, texts)
        self.first = self.first or plan
        return plan

    def resumable_try(self, number: int) -> JobDescription | None:
        """The last try of a member, if it left a checkpoint."""
        jobs = self.tries.get(number)
        last = self.backend.describe(jobs[-1].job_id) if jobs else None
        return last if last is not None and last.checkpoint_uri else None

    def next_member(self, number: int) -> Member:
        """The next try of a number, whose id no job has had."""
        ids = [job.job_id for job in self.tries.get(number, [])]
        ids += [entry["job"] for entry in self.ledger.of("sent")]
        return next_try(self.group, number, ids)


def plan_sweep(
    request: Request, settings: Settings, values: Mapping[str, Any], seeds: int, parallel: int
) -> SweepPlan:
    """Check and price the jobs of a new sweep: each combination of the values, with each of `seeds`
    seeds, `parallel` jobs at a time. Raises InputError if the values are no lists, or as `prepare`
    if a job cannot run.
    """
    job_id = request.resume
    if job_id is not None:
        raise InputError("continues one job", "sweep-of-one", "resume", job_id, job_id=job_id)
    varied = {}
    for name, name_values in values.items():
        varied[name.replace("-", "_")] = sweeps.list_values(name, name_values)
    sweeps.check_varied(varied, request, seeds)
    first_seed = int(request.hyperparameters.get("seed", DEFAULT_SEED))
    members = sweeps.grid(varied, seeds, first_seed)
    check_name(request, settings)
    if request.name is not None:  # jobs that continue the sweep have names too
        request.replaced(name=f"{request.name}-{len(members)}-try99")
    shares_cores = backend_class(request.instance or "").shares_cores
    if shares_cores and parallel > 1 and request.processes_per_instance is None:
        request = request.model_copy(update={"processes_per_instance": 1})

    group = new_job_id()
    sweep = Sweep(job=request, members=members, parallel=parallel)
    ledger = sweeps.open_ledger(group, settings)
    plan = SweepPlan(group, sweep, settings, ledger, {})
    plan.plan_missing()
    return plan


def continue_sweep(
    group: str, settings: Settings, max_cost: float | None, parallel: int | None
) -> SweepPlan:
    """Check and price the jobs of a sweep of this machine that have not completed."""
    with ExitStack() as unless_planned:
        lock = unless_planned.enter_context(lock_group(group, settings))
        ledger = sweeps.open_ledger(group, settings)
        sweep = sweeps.read_sweep(ledger, settings)
        if sweep is None:
            raise InputError(f"sweep {group} was not launched from this machine, or was deleted")
        sweep = changed(sweep, max_cost, parallel)
        tries = find_group(group, settings).tries
        plan = SweepPlan(group, sweep, settings, ledger, tries, lock=lock)
        plan.update_ledger()
        plan.plan_missing()
        unless_planned.pop_all()
    return plan


def changed(sweep: Sweep, max_cost: float | None, parallel: int | None) -> Sweep:
    """The sweep with another ceiling, which is shared anew, and another number of jobs at a
    time."""
    update: dict[str, Any] = {}
    if parallel is not None:
        update["parallel"] = parallel
    if max_cost is not None:
        update["job"] = sweep.job.replaced(max_cost=max_cost)
        update["share"] = None
    return sweep.model_copy(update=update)
