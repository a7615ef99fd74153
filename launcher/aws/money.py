"""What a job costs, and the time limit that keeps it below a cost ceiling.

Called by the SageMaker backend at launch, and by `tracking` for the costs of jobs.

SageMaker bills each instance of a job by the second, from TrainingStartTime to TrainingEndTime: the
download of image and data, the run, stop and upload, but not the wait for machines. The time limit
(MaxRuntimeInSeconds) covers only the run: a report to the SDK's authors shows a job with a limit of
603 s that was billed for 841 s. SageMaker does not limit the rest, so a ceiling holds as long as
the allowance AROUND_SECONDS suffices. Spot capacity is billed at about the same price for fewer
seconds; that difference covers the start-ups that interruptions add.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from launcher.aws.instances import has_local_storage
from launcher.aws.prices import Price, Prices
from launcher.errors import InputError
from launcher.job import JobDescription, TrainingJob
from launcher.settings import Settings

logger = logging.getLogger(__name__)

# Seconds that are billed besides the run, which SageMaker does not limit: a generous allowance (the
# default image has some 10 GB), not a promise. Very large data takes longer.
START_SECONDS = 420
STOP_SECONDS = 120  # between the limit's SIGTERM and SIGKILL
UPLOAD_SECONDS = 60
AROUND_SECONDS = START_SECONDS + STOP_SECONDS + UPLOAD_SECONDS

SHORTEST_RUN = 60

# USD of a GiB of disk for an hour. AWS asks 0.14 a month in us-east-1 and 0.27 where it is dearest.
DISK_PER_HOUR = 0.27 / 730


class CeilingTooLow(InputError):
    """Not even the shortest run stays below the cost ceiling."""


@dataclass(frozen=True)
class Ceiling:
    """The most that a job and those it resumes may cost, in USD, and the option that says so."""

    amount: float
    source: str


def usd(amount: float) -> str:
    """An amount of money, rounded up to the cent."""
    return f"{math.ceil(round(amount * 100, 6)) / 100:,.2f} USD"


def rate(job: TrainingJob | JobDescription, price: Price) -> float:
    """USD per hour of a job: its instances, and their disks if those are billed."""
    disk = 0 if has_local_storage(job.instance) else job.volume_size * DISK_PER_HOUR
    return job.instance_count * (price.per_hour + disk)


def cost_of(job: JobDescription, price: Price, now: float) -> float:
    """USD that a job has cost so far or in total; now is in seconds since the epoch."""
    return job.billed_seconds(now) / 3600 * rate(job, price)


def worst_case(per_hour: float, time_limit: int, keep_alive: int = 0) -> float:
    """USD of a job that runs to its time limit, and of its warm pool."""
    return per_hour * (time_limit + AROUND_SECONDS + keep_alive) / 3600


def longest_run(amount: float, per_hour: float, keep_alive: int = 0) -> int:
    """The time limit in seconds, possibly negative, at which a job costs at most `amount`."""
    return math.floor(amount * 3600 / per_hour) - AROUND_SECONDS - keep_alive


def ceiling_of(job: TrainingJob, settings: Settings) -> Ceiling | None:
    """The cost ceiling of a job. A lower one in the settings replaces that of a resumed job.

    Raises:
        InputError: --max-cost exceeds the ceiling of the settings.
    """
    configured = settings.max_cost
    lower = configured is not None and job.max_cost is not None and configured < job.max_cost
    if job.max_cost is None or (lower and job.origin("max_cost")):
        source = "the configured ceiling, SM_NANOGPT_MAX_COST or max_cost in config.toml"
        return None if configured is None else Ceiling(configured, source)
    if configured is not None and job.max_cost > configured:
        raise InputError(
            f"--max-cost says {usd(job.max_cost)}, and the configured ceiling (SM_NANOGPT_MAX_COST"
            f" or max_cost in config.toml) is {usd(configured)}"
        )
    return Ceiling(job.max_cost, f"--max-cost{job.origin('max_cost')}")


def limited(job: TrainingJob, per_hour: float, ceiling: Ceiling, spent: float) -> TrainingJob:
    """The job with a time limit that keeps it below the ceiling.

    spent is the cost in USD of the jobs that this one resumes.

    Raises:
        CeilingTooLow: even the shortest run would cost more.
        InputError: --max-run is too long for the ceiling.
    """
    keep_alive = job.keep_alive or 0
    parts = [f"{usd(per_hour)} an hour", *counted(job, spent)]
    longest = longest_run(ceiling.amount - spent, per_hour, keep_alive)
    least = spent + worst_case(per_hour, SHORTEST_RUN, keep_alive)
    if longest < SHORTEST_RUN:
        raise CeilingTooLow(
            f"a cost of {usd(ceiling.amount)} ({ceiling.source}) is too low: even a run"
            f" of {SHORTEST_RUN} s may cost {usd(least)} ({', '.join(parts)})"
        )
    if longest >= job.time_limit:
        return job
    if job.max_run is not None and job.max_cost is None:
        worst = spent + worst_case(per_hour, job.max_run, keep_alive)
        raise InputError(
            f"--max-run {job.max_run}{job.origin('max_run')} may cost {usd(worst)} with"
            f" {', '.join(parts)}: more than {usd(ceiling.amount)} ({ceiling.source}); use at most"
            f" --max-run {longest}"
        )
    return job.model_copy(update={"affordable_run": longest})


def afford(
    job: TrainingJob,
    settings: Settings,
    prices: Prices,
    spent: Callable[[], float],
) -> TrainingJob:
    """The job with a time limit that keeps it below its ceiling. Logs what it may cost.

    Raises:
        InputError: the ceiling is too low, or the price is unknown.
    """
    ceiling = ceiling_of(job, settings)
    found = {instance: prices.of(instance) for instance in job.instances}
    if prices.trouble:
        logger.info(prices.trouble)
    if lacking := [instance for instance, price in found.items() if price is None]:
        unknown = f"the price of {' and '.join(lacking)} in {prices.region} is unknown"
        if ceiling is not None:
            raise InputError(
                f"{unknown}, so the job may cost more than {usd(ceiling.amount)} ({ceiling.source})"
            )
        logger.info(f"price: {unknown}")
        return job
    # SageMaker may choose any of the types, so count the most expensive one.
    on_each = [
        (job.model_copy(update={"instance": instance}), price)
        for instance, price in found.items()
        if price is not None
    ]
    dearest, price = max(on_each, key=lambda choice: rate(*choice))
    per_hour = rate(dearest, price)
    earlier = 0.0 if ceiling is None else spent()
    ready = dearest if ceiling is None else limited(dearest, per_hour, ceiling, earlier)
    worst = earlier + worst_case(per_hour, ready.time_limit, job.keep_alive or 0)
    of_which = f" ({dearest.instance}, the most expensive)" if len(found) > 1 else ""
    logger.info(f"price: {price_words(dearest, price)}{of_which}")
    logger.info(f"cost: {cost_words(ready, worst, earlier)}")
    if ceiling is not None and (reason := limit_words(ready, ceiling)):
        logger.info(f"time limit: {ready.time_limit} s, from {reason}")
    return ready.model_copy(update={"instance": job.instance, "worst_cost": worst})


def price_words(job: TrainingJob, price: Price) -> str:
    each = f"{job.instance_count} x {usd(price.per_hour)}" if job.instance_count > 1 else ""
    total = usd(job.instance_count * price.per_hour)
    spot = "; spot is billed for fewer seconds (AWS says: up to 90% less)" if job.spot else ""
    return f"{total} an hour{f' ({each})' if each else ''}, by {price.source}{spot}"


def cost_words(job: TrainingJob, worst: float, earlier: float) -> str:
    parts = ", ".join(counted(job, earlier))
    return f"at most {usd(worst)}, if it runs for {job.time_limit} s (counted: {parts})"


def limit_words(job: TrainingJob, ceiling: Ceiling) -> str:
    """What set the time limit of a job below a ceiling; empty for the default limit."""
    money = f"{ceiling.source} ({usd(ceiling.amount)})"
    if job.time_limit == job.affordable_run:
        return money
    if job.time_limit == job.max_run:
        return f"--max-run{job.origin('max_run')}, within {money}"
    if job.time_limit == job.max_wait:
        return f"--max-wait{job.origin('max_wait')}, within {money}"
    return ""


def counted(job: TrainingJob, earlier: float) -> list[str]:
    """What the estimate includes besides the run."""
    parts = [f"an allowance of {AROUND_SECONDS} s for start-up, stop and upload"]
    if not has_local_storage(job.instance):
        parts.append("disks")
    if job.keep_alive:
        parts.append(f"{job.keep_alive} s of warm pool")
    if earlier:
        parts.append(f"{usd(earlier)} of the earlier jobs")
    return parts
