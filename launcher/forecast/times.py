"""Compute how long a job takes on an instance type, by a job that ended on it, and its cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.forecast.sizes import operations_of_step
from sm_nanogpt.launcher.sagemaker.cost import OVERHEAD_SECONDS
from sm_nanogpt.launcher.source import Source


@dataclass(frozen=True)
class InstanceType:
    """An instance type, with the speed of a job that ended on it, and its price."""

    name: str
    operations_per_second: float | None = None  # None if no speed is known
    seconds_around: float = 0.0  # before and after the steps of the job
    usd_per_second: float | None = None
    job_id: str = ""

    def seconds(self, operations: float) -> float | None:
        """The time of a job of so many operations; None if no speed is known."""
        if self.operations_per_second is None:
            return None
        return self.seconds_around + operations / self.operations_per_second

    def dollars(self, operations: float, allowance: float = 0.0) -> float | None:
        """What so many operations cost, with `allowance` more seconds, in USD; None if unknown."""
        seconds = self.seconds(operations)
        if seconds is None or self.usd_per_second is None:
            return None
        return (seconds + allowance) * self.usd_per_second

    def fits(self, operations: float, max_cost: float | None) -> bool:
        """True if a job of so many operations costs at most max_cost, in USD.

        False if its cost is unknown, or max_cost is None.
        """
        dollars = self.dollars(operations, OVERHEAD_SECONDS)
        return dollars is not None and max_cost is not None and dollars <= max_cost


def speed_of(
    job: JobDescription, source: Source, vocabulary_size: Callable[[], int]
) -> InstanceType | None:
    """The instance type of an ended job, with its speed.

    None if the job did not complete, if its speed is unknown, if a teacher or generations made it
    slower, or if its hyperparameters are of another folder. vocabulary_size reads how many
    characters or tokens its text has; it is called only if the job has a speed.
    """
    tokens_per_second = (job.metrics or {}).get("tokens_per_second")
    if job.status != "Completed" or not (tokens_per_second and job.started and job.ended):
        return None
    values = source.known_hyperparameters(job.hyperparameters)
    try:
        config = source.module("config").Config(**values)
    except source.module("errors").ConfigError:
        return None
    if getattr(config, "generations", 1) > 1 or "teacher" in job.inputs:  # those are slower
        return None
    step_seconds = config.batch_size * config.block_size / tokens_per_second
    seconds_around = max(0.0, job.ended - job.started - config.max_steps * step_seconds)
    operations_per_second = operations_of_step(config, vocabulary_size()) / step_seconds
    return InstanceType(job.instance, operations_per_second, seconds_around, job_id=job.job_id)
