"""How long a run takes: on an instance type by an ended job, and here by a few timed steps."""

from __future__ import annotations

from dataclasses import dataclass

from sm_nanogpt.launcher.sagemaker.cost import OVERHEAD_SECONDS

ROUND_STEPS = 24  # four for each length of the windows, twelve of the whole length
MAX_ROUNDS = 6  # of steps of a small model that are timed
TIMED_SECONDS = 4.0


@dataclass(frozen=True)
class InstanceType:
    """The speed of an instance type, by a job that ended on it, and its price."""

    name: str
    flops: float | None = None  # operations in a second; None if no speed is known
    around: float = 0.0  # seconds of the job before and after its steps
    usd_per_second: float | None = None
    job_id: str = ""

    def seconds(self, work: float) -> float | None:
        if self.flops is None:
            return None
        return self.around + work / self.flops

    def dollars(self, work: float, allowance: float = 0.0) -> float | None:
        """USD of so many operations, and of `allowance` seconds; None if that is not known."""
        seconds = self.seconds(work)
        if seconds is None or self.usd_per_second is None:
            return None
        return (seconds + allowance) * self.usd_per_second

    def fits(self, work: float, ceiling: float | None) -> bool:
        """True if a job that may cost the ceiling, in USD, has the time for so many operations."""
        dollars = self.dollars(work, OVERHEAD_SECONDS)
        return dollars is not None and ceiling is not None and dollars <= ceiling


@dataclass(frozen=True)
class LocalTimes:
    """How long a job takes on this machine."""

    seconds: dict[float, float | None]  # by size; None where nothing tells
    busy: bool  # True if other programs use the machine: they are by the pilots' processor time


def steps_to_time(step_seconds: float) -> int:
    """How many steps show the speed, in about TIMED_SECONDS. step_seconds is 0 if not known."""
    n_rounds = MAX_ROUNDS
    if step_seconds:
        n_rounds = round(TIMED_SECONDS / ROUND_STEPS / step_seconds)
    return ROUND_STEPS * max(1, min(n_rounds, MAX_ROUNDS))
