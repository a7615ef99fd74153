"""Prices of SageMaker training instances: from AWS's price list, a cache, or an offline table.

The Price List API has few endpoints; us-east-1 knows every region of the `aws` partition.
HOME/prices.json keeps its prices for a week, and the absence of one for a day. If the API cannot be
asked, the higher of an older answer and the table below is used. Prices are on demand, in USD,
before taxes, credits and savings plans. Called by the SageMaker backend, `tracking` and `doctor`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from pydantic import Field

from launcher import storage
from launcher.aws.session import quick_client, why
from launcher.documents import Document
from launcher.settings import Settings

ENDPOINT_REGION = "us-east-1"
FRESH = timedelta(days=7)
UNKNOWN_FRESH = timedelta(days=1)

# USD an hour in us-east-1, by the month in which they were last seen: in answers of the price list,
# or (the second group) on the pricing page. Types that are in neither group are not known: among
# them p3 (on its way out), p4 and p5 (cut since), p6, t3 (not sold for training everywhere).
OFFLINE_REGION = "us-east-1"
OFFLINE: dict[str, dict[str, float]] = {
    "2026-07": {
        "ml.g5.xlarge": 1.408,
        "ml.g5.2xlarge": 1.515,
        "ml.g5.4xlarge": 2.03,
        "ml.g5.8xlarge": 3.06,
        "ml.g5.12xlarge": 7.09,
        "ml.g6.xlarge": 1.127,
        "ml.g6.2xlarge": 1.222,
        "ml.g6.4xlarge": 1.654,
        "ml.g6.12xlarge": 5.752,
        "ml.g6e.2xlarge": 2.8,
        "ml.g6e.4xlarge": 3.76,
        "ml.g6e.8xlarge": 5.66,
        "ml.g6e.12xlarge": 13.12,
        "ml.g4dn.xlarge": 0.736,
        "ml.m5.large": 0.115,
        "ml.m5.xlarge": 0.23,
        "ml.m5.4xlarge": 0.922,
        "ml.m6i.4xlarge": 0.922,
        "ml.c6i.8xlarge": 1.632,
        "ml.r5.4xlarge": 1.21,
        "ml.r7i.2xlarge": 0.635,
        "ml.r7i.4xlarge": 1.2701,
    },
    "2024-12": {
        "ml.g5.16xlarge": 5.12,
        "ml.g5.24xlarge": 10.18,
        "ml.g5.48xlarge": 20.36,
        "ml.g4dn.2xlarge": 0.94,
        "ml.g4dn.4xlarge": 1.505,
        "ml.g4dn.8xlarge": 2.72,
        "ml.g4dn.12xlarge": 4.89,
        "ml.g4dn.16xlarge": 5.44,
        "ml.m5.2xlarge": 0.461,
        "ml.m5.12xlarge": 2.765,
        "ml.m5.24xlarge": 5.53,
        "ml.c5.xlarge": 0.204,
        "ml.c5.2xlarge": 0.408,
        "ml.c5.4xlarge": 0.816,
        "ml.c5.9xlarge": 1.836,
        "ml.c5.18xlarge": 3.672,
    },
}


@dataclass(frozen=True)
class Price:
    """per_hour is in USD per instance; source says where the price comes from, and its date."""

    per_hour: float
    source: str


class Answer(Document):
    """What the price list said on a day: USD per hour, or None for no price."""

    per_hour: float | None = Field(gt=0, lt=1e6)
    day: date

    @property
    def is_fresh(self) -> bool:
        lasts = UNKNOWN_FRESH if self.per_hour is None else FRESH
        return timedelta() <= date.today() - self.day < lasts

    @property
    def price(self) -> Price | None:
        if self.per_hour is None:
            return None
        return Price(self.per_hour, f"AWS's price list of {self.day.isoformat()}")


Answers = dict[str, dict[str, Answer]]  # prices.json: by region and instance type


class Prices:
    """The prices of a region. With no session, AWS is not asked."""

    def __init__(self, settings: Settings, region: str, session: Any) -> None:
        self.file = settings.home / "prices.json"
        self.region = region
        self.session = session
        self.trouble = ""  # why AWS could not be asked; it is not asked again

    def of(self, instance: str) -> Price | None:
        """The price of an instance type, or None if it is unknown. Raises nothing."""
        answer = self.kept(instance)
        asks = self.session is not None and not self.trouble
        if asks and not (answer and answer.is_fresh):
            answer = self.ask(instance) or answer
        listed = answer.price if answer else None
        if answer and answer.is_fresh and listed:
            return listed
        known = [price for price in (listed, offline_price(instance, self.region)) if price]
        return max(known, key=lambda price: price.per_hour, default=None)

    def ask(self, instance: str) -> Answer | None:
        """Ask the price list and keep its answer; on failure set `trouble` and return None."""
        filters = {"regionCode": self.region, "instanceName": instance}
        try:
            partition = self.session.get_partition_for_region(self.region)
            if partition != "aws":  # the endpoint rejects its credentials
                self.trouble = f"there is no price list for {self.region} (partition {partition})"
                return None
            found = quick_client(self.session, "pricing", ENDPOINT_REGION).get_products(
                ServiceCode="AmazonSageMaker",
                Filters=[
                    {"Type": "TERM_MATCH", "Field": name, "Value": value}
                    for name, value in filters.items()
                ],
                MaxResults=100,
            )
            per_hour = training_price(found["PriceList"], instance)
            answer = Answer(per_hour=per_hour, day=date.today())
        # A launch must not fail here, whatever a parser raises.
        except Exception as error:
            self.trouble = f"could not ask AWS's price list: {why(error)}"
            return None
        known = storage.read_cache(self.file, Answers)
        known.setdefault(self.region, {})[instance] = answer
        storage.write_cache(self.file, known)
        return answer

    def kept(self, instance: str) -> Answer | None:
        """The cached answer."""
        return storage.read_cache(self.file, Answers).get(self.region, {}).get(instance)


def training_price(products: list[str], instance: str) -> float | None:
    """USD per hour of training among products of the price list, each a JSON document.

    Each use of an instance type is a product. That of training has a usage type such as
    `USE1-Train:ml.g5.12xlarge`; hosting, spot and the rest have others.
    """
    usage = re.compile(rf"(.+-)?Train:{re.escape(instance)}")
    found = [
        float(dimension["pricePerUnit"].get("USD", 0))
        for product in map(json.loads, products)
        if usage.fullmatch(product["product"]["attributes"].get("usagetype", ""))
        for term in product["terms"].get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
        if dimension["unit"].lower() in ("hrs", "hours")
    ]
    return max(found, default=0.0) or None  # 0 USD means the free tier


def offline_price(instance: str, region: str) -> Price | None:
    if region == OFFLINE_REGION:
        for month, prices in OFFLINE.items():
            if instance in prices:
                return Price(prices[instance], f"the offline table of {month}")
    return None
