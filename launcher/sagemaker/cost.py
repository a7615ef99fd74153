"""Compute the cost of a job, and the time limit that keeps it below a cost ceiling.

SageMaker bills each instance of a job by the second, from TrainingStartTime to TrainingEndTime: the
download of image and data, the run, stop and upload, but not the wait for machines. The time limit
(MaxRuntimeInSeconds) covers only the run: a report to the SDK's authors shows a job with a limit of
603 s that was billed for 841 s. SageMaker does not limit the rest, so a ceiling holds as long as
the allowance OVERHEAD_SECONDS suffices. Spot capacity is billed at about the same price for fewer
seconds; that difference covers the start-ups that interruptions add.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from pydantic import Field

from sm_nanogpt.launcher.aws import Offline, aws_session, check_region, make_client, message_of
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.cache import Cache
from sm_nanogpt.launcher.files.documents import Document
from sm_nanogpt.launcher.instances import Price, has_local_disks, offline_price
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)

# Seconds that are billed besides the run, which SageMaker does not limit: a generous allowance (the
# default image has some 10 GB), not a promise. Very large data takes longer.
OVERHEAD_SECONDS = 420 + 120 + 60  # start; from the limit's SIGTERM to SIGKILL; upload
MIN_RUN_SECONDS = 60
# USD of a GiB of disk for an hour. AWS asks 0.14 a month in us-east-1 and 0.27 where it is dearest.
DISK_PER_HOUR = 0.27 / 730


class CeilingTooLow(InputError):
    """The shortest run, or the run of max_run, may cost more than the cost ceiling."""


class Unconfirmed(InputError):
    """Nobody has agreed to what a launch may cost.

    The fact `worst_cost` is in USD, and infinite if it is unknown. `limit` is the setting
    ask_above.
    """


@dataclass(frozen=True)
class Ceiling:
    """The most that a job, and the jobs that it resumes, may cost."""

    amount: float  # USD
    source: str  # who set it, as the end of a sentence

    def __str__(self) -> str:
        return f"the ceiling of {usd(self.amount)}{self.source}"


def usd(amount: float) -> str:
    """An amount of money, rounded up to the cent."""
    return f"{math.ceil(round(amount * 100, 6)) / 100:,.2f} USD"


def check_confirmed(worst_cost: float, max_cost: float | None, settings: Settings) -> None:
    """Raise Unconfirmed if jobs may cost more than ask_above and have no ceiling.

    worst_cost: what they may cost, in USD; infinite if that is unknown. max_cost: their ceiling, if
    the user chose it now. The ceiling of a resumed job is no consent.
    """
    has_ceiling = bool(max_cost or settings.max_cost) and worst_cost < math.inf
    if worst_cost <= settings.ask_above or has_ceiling:
        return
    cost = "an unknown amount" if worst_cost == math.inf else usd(worst_cost)
    raise Unconfirmed(
        f"this may cost {cost}, more than {usd(settings.ask_above)} (ask_above), without a ceiling",
        code="cost-unconfirmed",
        worst_cost=worst_cost,
        limit=settings.ask_above,
    )


def rate(job: TrainingJob | JobDescription, price: Price) -> float:
    """What an hour of a job costs, in USD: its instances, and their disks if these are billed."""
    disk = 0 if has_local_disks(job.instance) else job.volume_size * DISK_PER_HOUR
    return job.instance_count * (price.per_hour + disk)


def cost_of(job: JobDescription, price: Price, now: float) -> float:
    """What a job has cost so far or in total, in USD. now: in seconds since the epoch."""
    return job.billed_seconds(now) / 3600 * rate(job, price)


def worst_case(per_hour: float, time_limit: int, keep_alive: int) -> float:
    """What a job costs that runs to its time limit, with its warm pool, in USD."""
    return per_hour * (time_limit + OVERHEAD_SECONDS + keep_alive) / 3600


def longest_run(amount: float, per_hour: float, keep_alive: int) -> int:
    """The time limit in seconds, possibly negative, at which a job costs at most `amount`."""
    return math.floor(amount * 3600 / per_hour) - OVERHEAD_SECONDS - keep_alive


def ceiling_of(job: TrainingJob, settings: Settings) -> Ceiling | None:
    """The cost ceiling of a job. A lower one in the settings replaces that of a resumed job."""
    requested = job.max_cost
    configured = settings.max_cost
    if configured is None:
        return None if requested is None else Ceiling(requested, job.origin("max_cost"))
    if requested is not None and requested <= configured:
        return Ceiling(requested, job.origin("max_cost"))
    ceiling = Ceiling(configured, " in SM_NANOGPT_MAX_COST or config.toml")
    if requested is not None and not job.origin("max_cost"):
        raise InputError(f"exceeds {ceiling}", field="max_cost", value=f"{requested:g}")
    return ceiling


def with_affordable_run(
    job: TrainingJob, per_hour: float, ceiling: Ceiling, spent: float
) -> TrainingJob:
    """Return the job with a time limit that keeps it below the ceiling.

    per_hour: what an hour costs, in USD. spent: what the jobs that this one resumes have cost, in
    USD. Raises CeilingTooLow.
    """
    keep_alive = job.keep_alive or 0
    affordable_seconds = longest_run(ceiling.amount - spent, per_hour, keep_alive)
    if affordable_seconds >= job.time_limit:
        return job
    min_seconds = MIN_RUN_SECONDS
    if job.max_run is not None and job.max_cost is None:
        min_seconds = job.max_run  # the user asked for all of it
    if affordable_seconds >= min_seconds:
        return job.model_copy(update={"affordable_run": affordable_seconds})

    origin = job.origin("max_run") if min_seconds == job.max_run else ""
    worst_cost = usd(spent + worst_case(per_hour, min_seconds, keep_alive))
    advice = ""
    if affordable_seconds >= MIN_RUN_SECONDS:
        advice = f"; a run of at most {affordable_seconds} s stays below it"
    raise CeilingTooLow(
        f"{ceiling} is too low: a run of {min_seconds} s{origin} may cost {worst_cost}"
        f" ({usd(per_hour)} an hour, {other_costs(spent)}){advice}"
    )


def earlier_cost(record: TrainingJob, job: JobDescription, prices: Prices) -> float | None:
    """The cost of a job that is resumed, and of the jobs that it resumed itself, in USD.

    None if it is unknown. record is the job as it was submitted.
    """
    earlier = 0.0 if record.resume is None else record.earlier_cost
    if earlier is None or not job.is_placed:
        return earlier
    price = prices.of(job.instance)
    if price is None:
        return None
    return earlier + cost_of(job, price, time.time())


def afford(
    job: TrainingJob, settings: Settings, prices: Prices, earlier: float | None
) -> TrainingJob:
    """Return the job with a time limit that keeps it below its ceiling; log what it may cost.

    earlier: what the jobs that it resumes have cost, in USD; None if that is unknown. Raises
    InputError if the job has a ceiling and a price is unknown, and CeilingTooLow.
    """
    ceiling = ceiling_of(job, settings)
    known_prices = find_prices(job.instances, prices)
    without_price = [instance for instance in job.instances if instance not in known_prices]
    check_prices_known(job, ceiling, prices.region, earlier, without_price)
    if without_price:
        return job.model_copy(update={"earlier_cost": earlier})

    rates = rates_of(job, known_prices)
    instance = max(rates, key=lambda name: rates[name])  # SageMaker may choose any of them
    price = known_prices[instance]
    per_hour = rates[instance]
    spent = earlier if ceiling and earlier else 0.0
    if ceiling is not None:
        job = with_affordable_run(job, per_hour, ceiling, spent)
    worst_cost = spent + worst_case(per_hour, job.time_limit, job.keep_alive or 0)
    log_price(job, instance, price)
    logger.info(
        f"cost: at most {usd(worst_cost)}, if it runs for {job.time_limit} s"
        f" (counted: {other_costs(spent)})"
    )
    if job.time_limit == job.affordable_run:
        logger.info(f"time limit: {job.time_limit} s, from {ceiling}")
    return job.model_copy(update={"worst_cost": worst_cost, "earlier_cost": earlier})


def find_prices(instances: Iterable[str], prices: Prices) -> dict[str, Price]:
    """The prices of instance types, without those that have no known price."""
    price_of_type = {}
    for instance in instances:
        price = prices.of(instance)
        if price is not None:
            price_of_type[instance] = price
    return price_of_type


def check_prices_known(
    job: TrainingJob,
    ceiling: Ceiling | None,
    region: str,
    earlier: float | None,
    without_price: list[str],
) -> None:
    """Log each cost that is unknown, or raise InputError if the job has a ceiling."""
    unknown = []
    if earlier is None:
        unknown.append(f"the cost of the earlier job {job.resume} is unknown")
    if without_price:
        unknown.append(f"the price of {' and '.join(without_price)} in {region} is unknown")
    for problem in unknown:
        if ceiling is not None:
            raise InputError(f"{problem}, so the job may cost more than {ceiling}")
        logger.info(problem)


def rates_of(job: TrainingJob, prices: Mapping[str, Price]) -> dict[str, float]:
    """What an hour of the job costs, in USD, on each type on which SageMaker may run it."""
    rates = {}
    for instance, price in prices.items():
        rates[instance] = rate(job.model_copy(update={"instance": instance}), price)
    return rates


def log_price(job: TrainingJob, instance: str, price: Price) -> None:
    total = usd(job.instance_count * price.per_hour)
    line = f"price: {total} an hour"
    if job.instance_count > 1:
        line += f" ({job.instance_count} x {usd(price.per_hour)})"
    line += f", by {price.source}"
    if job.spot:
        line += "; spot is billed for fewer seconds (AWS says: up to 90% less)"
    if len(job.instances) > 1:
        line += f" ({instance}, the most expensive)"
    logger.info(line)


def other_costs(spent: float) -> str:
    """Describe what a worst cost includes besides the run.

    spent: what the jobs that it resumes have cost, in USD.
    """
    text = f"an allowance of {OVERHEAD_SECONDS} s for start-up, stop and upload"
    if spent:
        text += f", {usd(spent)} of the earlier jobs"
    return text


# -- prices ----------------------------------------------------------------------------------------


ENDPOINT_REGION = "us-east-1"  # of the price list
MAX_AGE = timedelta(days=7)  # of an answer that need not be asked for again
OFFLINE_REGION = "us-east-1"  # of the prices in launcher.instances


class PriceAnswer(Document):
    """The price in the price list on a day, in USD per hour."""

    per_hour: float = Field(gt=0, lt=1e6)
    day: date


Answers = dict[str, dict[str, PriceAnswer]]  # prices.json: by region and instance type


class Prices:
    """The prices of the region of the settings. In a dry run, AWS is not asked."""

    def __init__(self, settings: Settings) -> None:
        self.cache = Cache(settings.home / "prices.json", Answers)
        self.session = aws_session(settings)
        self.region = check_region(self.session)
        self.failure = ""  # why AWS could not be asked; then it is not asked again

    def of(self, instance: str) -> Price | None:
        """The price of an instance type; None if it is unknown. This raises no errors."""
        answer = self.saved_answer(instance)
        if not (is_fresh(answer) or self.failure):
            answer = self.ask(instance) or answer
            if self.failure:
                logger.info(self.failure)
        if answer is not None:
            return Price(answer.per_hour, f"AWS's price list of {answer.day}")
        return offline_price(instance) if self.region == OFFLINE_REGION else None

    def saved_answer(self, instance: str) -> PriceAnswer | None:
        return self.cache.read().get(self.region, {}).get(instance)

    def ask(self, instance: str) -> PriceAnswer | None:
        """Ask the price list and save its price, if it has one; on failure, set `failure`."""
        try:
            products = self.products_of(instance)
            per_hour = None if products is None else training_price(products, instance)
            if per_hour is None:
                return None
            answer = PriceAnswer(per_hour=per_hour, day=date.today())
        except Offline:
            return None
        # A launch must not fail here, so any error of a parser is caught.
        except Exception as error:
            self.failure = f"could not ask AWS's price list: {message_of(error)}"
            return None
        answers = self.cache.read()
        answers.setdefault(self.region, {})[instance] = answer
        self.cache.write(answers)
        return answer

    def products_of(self, instance: str) -> list[str] | None:
        """The products of an instance type in the price list, each a JSON document.

        None, with `failure` set, if there is no list for the region.
        """
        partition = self.session.get_partition_for_region(self.region)
        if partition != "aws":  # the endpoint rejects its credentials
            self.failure = f"there is no price list for {self.region} (partition {partition})"
            return None
        filters = [
            {"Type": "TERM_MATCH", "Field": "regionCode", "Value": self.region},
            {"Type": "TERM_MATCH", "Field": "instanceName", "Value": instance},
        ]
        client = make_client(self.session, "pricing", ENDPOINT_REGION, 1)
        answer = client.get_products(ServiceCode="AmazonSageMaker", Filters=filters, MaxResults=100)
        products: list[str] = answer["PriceList"]
        return products


def is_fresh(answer: PriceAnswer | None) -> bool:
    """True if an answer is so new that AWS need not be asked again."""
    if answer is None:
        return False
    age = date.today() - answer.day
    return timedelta() <= age < MAX_AGE


def training_price(products: list[str], instance: str) -> float | None:
    """The price of training, in USD per hour, in products of the price list, which are JSON.

    Each use of an instance type is a product. Training has a usage type such as
    `USE1-Train:ml.g5.12xlarge`; hosting, spot, and other uses have others.
    """
    training_usage = re.compile(rf"(.+-)?Train:{re.escape(instance)}")
    prices = []
    for product in map(json.loads, products):
        usage = product["product"]["attributes"].get("usagetype", "")
        if training_usage.fullmatch(usage):
            prices += hourly_prices(product)
    return max(prices, default=0.0) or None  # 0 USD means the free tier


def hourly_prices(product: Any) -> list[float]:
    """The on-demand prices of a product in USD per hour."""
    prices = []
    for term in product["terms"].get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            if dimension["unit"].lower() in ("hrs", "hours"):
                prices.append(float(dimension["pricePerUnit"].get("USD", 0)))
    return prices
