"""What the jobs of a group cost, and what they may cost."""

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
    """USD that a job may cost, without those that it resumes; infinity if that is unknown."""
    if job.worst_cost is None:
        return math.inf
    if ceiling_of(job, settings) is None:  # then only the job itself was counted: see cost.afford
        return job.worst_cost
    return job.worst_cost - (job.earlier_cost or 0.0)


def cost_so_far(job: JobDescription, settings: Settings) -> float | None:
    """USD of a job; None on this machine, or if its price is unknown."""
    return with_costs([job], settings)[0].cost


def cost_with_earlier(job: JobDescription, backend: Backend, settings: Settings) -> float:
    """USD of a job and of those that it resumes: the earlier cost of a job that resumes it."""
    cost = cost_so_far(job, settings) or 0.0
    earlier_cost = backend.job(job.job_id).earlier_cost or 0.0
    return cost + earlier_cost


def settle(ledger: GroupLedger, job: JobDescription, settings: Settings) -> None:
    """Note in the ledger what a job that has ended gave, and what it cost."""
    cost = cost_so_far(job, settings)
    ledger.settle(job.job_id, cost, status=job.status, loss=job.best_loss)
