"""The money of a sweep: one pot, of which each job reserves what it may cost before it is sent, and
to which it gives back what it did not spend."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.backends import Backend
from launcher.job import JobDescription, TrainingJob
from launcher.launching.launch import Plan
from launcher.launching.records import Sweep
from launcher.sagemaker.cost import CeilingTooLow, usd
from launcher.settings import Settings
from launcher.tracking import with_costs


@dataclass
class Pot:
    """ceiling and spent are in USD, as is what the jobs that run have reserved, by their member's
    number. spent and reserved together never exceed the ceiling by a job that is started."""

    ceiling: float
    spent: float = 0.0
    reserved: dict[int, float] = field(default_factory=dict)

    @property
    def unspent(self) -> float:
        return self.ceiling - self.spent

    @property
    def free(self) -> float:
        """What is neither spent nor reserved."""
        return self.unspent - sum(self.reserved.values())

    def __str__(self) -> str:
        reserved = sum(self.reserved.values())
        return f"{usd(self.spent)} spent and {usd(reserved)} reserved of {usd(self.ceiling)}"

    def reserve(self, number: int, job: TrainingJob) -> None:
        self.reserved[number] = own_worst_cost(job)

    def settle(self, number: int, job: JobDescription | None, settings: Settings) -> None:
        """Replace what a job has reserved by what it cost; all of it, if that is not known."""
        reserved = self.reserved.pop(number, 0.0)
        cost = with_costs([job], settings)[0].cost if job is not None else None
        self.spent += reserved if cost is None else cost


def own_worst_cost(job: TrainingJob) -> float:
    """USD that a job may cost, without those that it resumes; infinity if that is unknown."""
    if job.worst_cost is None:
        return math.inf
    if job.max_cost is None:  # then only the job itself was counted: see cost.afford
        return job.worst_cost
    return job.worst_cost - (job.earlier_cost or 0.0)


@dataclass(frozen=True)
class Costs:
    """What the tries of a member have cost, in USD: the newest one, those that it resumes, of which
    some may be deleted, and the others."""

    newest: float = 0.0
    resumed: float = 0.0
    others: float = 0.0

    @property
    def chain(self) -> float:
        """What counts for a job that resumes the newest one."""
        return self.newest + self.resumed


def costs_of(tries: Sequence[JobDescription], backend: Backend, settings: Settings) -> Costs:
    if not tries:
        return Costs()
    costs = {job.job_id: job.cost or 0.0 for job in with_costs(tries, settings)}
    newest = tries[-1].job_id
    own, resumed = costs[newest], backend.job(newest).earlier_cost or 0.0
    job_id = newest
    while job_id in costs:
        del costs[job_id]
        job_id = backend.job(job_id).resume or ""
    return Costs(own, resumed, sum(costs.values()))


def pot_of(
    ceiling: float,
    tries: Mapping[int, Sequence[JobDescription]],
    backend: Backend,
    settings: Settings,
) -> Pot:
    """The pot of a sweep after its jobs so far, of which those that run have reserved money."""
    pot = Pot(ceiling)
    for number, jobs in tries.items():
        costs = costs_of(jobs, backend, settings)
        pot.spent += costs.resumed + costs.others
        if jobs and jobs[-1].is_running:
            pot.reserve(number, backend.job(jobs[-1].job_id))
        else:
            pot.spent += costs.newest
    return pot


def slots_for(sweep: Sweep, n_left: int, n_running: int = 0) -> int:
    """Among how many jobs the free money is divided: those that can start now. With a time limit,
    each job reserves what that may cost."""
    if sweep.job.max_run is not None:
        return 1
    return max(1, min(sweep.parallel - n_running, n_left))


def prepare_affordable(prepare_for: Callable[[float], Plan], free: float, slots: int) -> Plan:
    """The plan of a job with one of `slots` equal parts of what is free, in USD, or with all of it
    if a part is too little. Raises CeilingTooLow if all of it is."""
    if free <= 0:
        raise CeilingTooLow("nothing is left of the ceiling of the sweep")
    try:
        return prepare_for(free / slots)
    except CeilingTooLow:
        if slots == 1:
            raise
        return prepare_for(free)
