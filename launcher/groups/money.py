"""Compute what the jobs of a group cost, and what they may cost."""

from __future__ import annotations

import math

from sm_nanogpt.launcher.backends import Backend
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.groups.ledger import GroupLedger
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.sagemaker.cost import ceiling_of
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.tracking import with_costs


def own_worst_cost(job: TrainingJob, settings: Settings) -> float:
    """What a job may cost, in USD, without the jobs that it resumes; infinite if it is unknown."""
    if job.worst_cost is None:
        return math.inf
    if ceiling_of(job, settings) is None:  # then only the job itself was counted: see cost.afford
        return job.worst_cost
    return job.worst_cost - (job.earlier_cost or 0.0)


def cost_so_far(job: JobDescription, settings: Settings) -> float | None:
    """What a job has cost, in USD; None on this machine, or if its price is unknown."""
    return with_costs([job], settings)[0].cost


def cost_with_earlier(job: JobDescription, backend: Backend, settings: Settings) -> float:
    """What a job and the jobs that it resumes have cost, in USD."""
    cost = cost_so_far(job, settings) or 0.0
    earlier_cost = backend.job(job.job_id).earlier_cost or 0.0
    return cost + earlier_cost


def settle(ledger: GroupLedger, job: JobDescription, settings: Settings) -> None:
    """Note the result and the cost of an ended job in the ledger."""
    cost = cost_so_far(job, settings)
    ledger.settle(job.job_id, cost, status=job.status, loss=job.best_loss)
