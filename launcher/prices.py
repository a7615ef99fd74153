"""What a SageMaker training instance costs: AWS's price list, what it said before, a table.

The Price List API is asked at one of its few endpoints, us-east-1, which knows every region of the
`aws` partition. What it says is kept in HOME/prices.json for a week. Where it cannot be asked, an
older answer is taken, and then the table below; a Price tells which it is. Prices are on demand, in
USD, before taxes, credits and savings plans.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from launcher import storage
from launcher.aws import quick_client, why
from launcher.settings import Settings

ENDPOINT_REGION = "us-east-1"
FRESH = timedelta(days=7)

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
    """per_hour is USD for one instance; source tells from where it is known, with its date."""

    per_hour: float
    source: str


class Prices:
    """The prices of a region. A session of None asks nobody."""

    def __init__(self, settings: Settings, region: str, session: Any) -> None:
        self.file = settings.home / "prices.json"
        self.region = region
        self.session = session
        self.trouble = ""  # why AWS could not be asked; it is then not asked again

    def of(self, instance: str) -> Price | None:
        """The price of an instance type, or None where it is not known. Raises nothing."""
        kept = self.kept().get(self.region, {}).get(instance)
        fresh = kept is not None and date.fromisoformat(kept["date"]) > date.today() - FRESH
        if not fresh and self.session is not None and not self.trouble:
            asked = self.ask(instance)
            if asked is not None:
                kept = {"per_hour": asked, "date": date.today().isoformat()}
                self.keep(instance, kept)
        if kept is not None:
            return Price(kept["per_hour"], f"AWS's price list of {kept['date']}")
        return offline_price(instance, self.region)

    def ask(self, instance: str) -> float | None:
        """What the price list says now; None, with `trouble` set, if it says nothing."""
        filters = {"regionCode": self.region, "instanceName": instance}
        try:
            answer = quick_client(self.session, "pricing", ENDPOINT_REGION).get_products(
                ServiceCode="AmazonSageMaker",
                Filters=[
                    {"Type": "TERM_MATCH", "Field": name, "Value": value}
                    for name, value in filters.items()
                ],
                MaxResults=100,
            )
        # Whatever goes wrong here, and parsers raise anything, a launch does not fail by it.
        except Exception as error:
            self.trouble = f"AWS's price list could not be asked: {why(error)}"
            return None
        return training_price(answer["PriceList"], instance)

    def kept(self) -> dict[str, Any]:
        """What was asked before: {region: {type: {per_hour, date}}}."""
        try:
            return dict(json.loads(self.file.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def keep(self, instance: str, entry: Mapping[str, Any]) -> None:
        all_kept = self.kept()
        all_kept.setdefault(self.region, {})[instance] = entry
        storage.write_text(str(self.file), json.dumps(all_kept, indent=2) + "\n")


def training_price(products: list[str], instance: str) -> float | None:
    """USD per hour of training among products of the price list, each a JSON document.

    An instance type is a product for each use. A training's is known by its usage type, as
    `USE1-Train:ml.g5.12xlarge`; hosting, spot (whose seconds are billed at another meter) and the
    rest have other ones.
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
    return max(found, default=0.0) or None  # a product of 0 USD is of the free tier


def offline_price(instance: str, region: str) -> Price | None:
    if region == OFFLINE_REGION:
        for month, prices in OFFLINE.items():
            if instance in prices:
                return Price(prices[instance], f"the offline table of {month}")
    return None
