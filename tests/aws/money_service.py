"""AWS's Price List and Service Quotas, as far as the launcher calls them.

Each function takes the body of a request and gives the body of the answer, in AWS's own shapes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from access import ACCOUNT, Refusal

TODAY = date(2026, 11, 20)  # for what a test keeps by the day: the real one may end meanwhile
PREFIXES = {"us-east-1": "USE1-", "us-east-2": "USE2-", "eu-west-1": "EU-"}
TRAINING = {
    "ml.g5.xlarge": {"us-east-1": 1.408, "eu-west-1": 1.69},
    "ml.g5.12xlarge": {"us-east-1": 7.09, "eu-west-1": 8.508},
    "ml.g6.12xlarge": {"us-east-1": 5.752},
    "ml.m5.xlarge": {"us-east-1": 0.23},
    "ml.p3.8xlarge": {"us-east-1": 14.688},
}
# By instance type: training, spot training, warm pool.
QUOTAS = {
    "ml.g5.xlarge": (4, 4, 0),
    "ml.g5.12xlarge": (4, 2, 0),
    "ml.g6.12xlarge": (0, 0, 0),
    "ml.m5.xlarge": (15, 0, 2),
    "ml.p3.8xlarge": (2, 0, 0),
}
PER_JOB = {
    "Longest run time for a training job": 432_000,
    "Maximum number of instances per spot training job": 20,
    "Maximum number of instances per training job": 20,
}
USES = ("training job usage", "spot training job usage", "training warm pool usage")
QUOTA_PAGE = 5


def get_products(body: dict[str, Any]) -> dict[str, Any]:
    """GetProducts of `pricing`: one product for each use of an instance type in a region."""
    if body.get("ServiceCode") != "AmazonSageMaker":
        raise Refusal("NotFoundException", "Service code not found")
    if not 1 <= body.get("MaxResults", 100) <= 100:
        raise Refusal("InvalidParameterException", "MaxResults has to be between 1 and 100")
    matching = [
        product
        for instance, by_region in TRAINING.items()
        for region, price in by_region.items()
        for product in products(instance, region, price)
        if all(matches(product, filter) for filter in body.get("Filters", []))
    ]
    first, size = int(body.get("NextToken", 0)), body.get("MaxResults", 100)
    answer: dict[str, Any] = {
        "FormatVersion": "aws_v1",
        "PriceList": [json.dumps(product) for product in matching[first : first + size]],
    }
    if first + size < len(matching):
        answer["NextToken"] = str(first + size)
    return answer


def matches(product: dict[str, Any], filter: dict[str, str]) -> bool:
    if filter["Type"] != "TERM_MATCH":
        raise Refusal("InvalidParameterException", f"Unknown filter type {filter['Type']}")
    values = {**product["product"]["attributes"], "productFamily": "ML Instance"}
    return str(values.get(filter["Field"], "")).lower() == filter["Value"].lower()


def products(instance: str, region: str, price: float) -> Iterator[dict[str, Any]]:
    uses = (
        ("Training", "Train", price),
        ("Hosting", "Host", price * 1.1),
        ("Notebook", "Notebk", 0),
    )
    for component, short, usd in uses:
        usage = f"{PREFIXES[region]}{short}:{instance}"
        sku = hashlib.sha1(usage.encode()).hexdigest()[:16].upper()
        rate = f"{sku}.JRTCKXETXF.6YS6EN2CT7"
        yield {
            "product": {
                "productFamily": "ML Instance",
                "sku": sku,
                "attributes": {
                    "component": component,
                    "instanceName": instance,
                    "locationType": "AWS Region",
                    "operation": "RunInstance",
                    "regionCode": region,
                    "servicecode": "AmazonSageMaker",
                    "servicename": "Amazon SageMaker",
                    "usagetype": usage,
                },
            },
            "serviceCode": "AmazonSageMaker",
            "terms": {
                "OnDemand": {
                    f"{sku}.JRTCKXETXF": {
                        "effectiveDate": "2026-11-01T00:00:00Z",
                        "offerTermCode": "JRTCKXETXF",
                        "priceDimensions": {
                            rate: {
                                "appliesTo": [],
                                "beginRange": "0",
                                "description": f"${usd:.4f} per {component} {instance} hour",
                                "endRange": "Inf",
                                "pricePerUnit": {"USD": f"{usd:.10f}"},
                                "rateCode": rate,
                                "unit": "Hrs",
                            }
                        },
                        "sku": sku,
                        "termAttributes": {},
                    }
                }
            },
            "publicationDate": "2026-11-01T00:00:00Z",
            "version": "20261101000000",
        }


def quotas(values: dict[str, tuple[int, int, int]] | None = None) -> list[dict[str, Any]]:
    """All quotas of SageMaker in the account, in the order of their names."""
    counts = {
        f"{instance} for {use}": count
        for instance, three in (QUOTAS if values is None else values).items()
        for use, count in zip(USES, three, strict=True)
    }
    counts.update(PER_JOB)
    counts.update({f"ml.t3.{size} for notebook instance usage": 2 for size in ("large", "medium")})
    return [quota(name, count) for name, count in sorted(counts.items())]


def quota(name: str, value: float) -> dict[str, Any]:
    code = f"L-{hashlib.sha1(name.encode()).hexdigest()[:8].upper()}"
    return {
        "ServiceCode": "sagemaker",
        "ServiceName": "Amazon SageMaker",
        "QuotaArn": f"arn:aws:servicequotas:us-east-1:{ACCOUNT}:sagemaker/{code}",
        "QuotaCode": code,
        "QuotaName": name,
        "Value": float(value),
        "Unit": "None",
        "Adjustable": True,
        "GlobalQuota": False,
        "QuotaAppliedAtLevel": "ACCOUNT",
    }


def list_service_quotas(
    body: dict[str, Any], values: dict[str, tuple[int, int, int]] | None = None
) -> dict[str, Any]:
    """ListServiceQuotas of `service-quotas`, in pages; `values` replaces QUOTAS."""
    check_service(body)
    matching = quotas(values)
    first, size = int(body.get("NextToken", 0)), min(body.get("MaxResults", 100), QUOTA_PAGE)
    answer: dict[str, Any] = {"Quotas": matching[first : first + size]}
    if first + size < len(matching):
        answer["NextToken"] = str(first + size)
    return answer


def check_service(body: dict[str, Any]) -> None:
    if body.get("ServiceCode") != "sagemaker":
        raise Refusal("NoSuchResourceException", "The service does not exist")


@dataclass
class MoneyService:
    """What a test may look at and change: calls made, refusals and other answers, quotas."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refuse: dict[str, tuple[str, str]] = field(default_factory=dict)  # by operation
    instead: dict[str, Any] = field(default_factory=dict)  # answers, by operation
    quotas: dict[str, tuple[int, int, int]] = field(default_factory=lambda: dict(QUOTAS))

    def call(self, operation: str, body: dict[str, Any]) -> Any:
        self.calls.append((operation, body))
        if operation in self.refuse:
            raise Refusal(*self.refuse[operation])
        if operation in self.instead:
            return self.instead[operation]
        operations: dict[str, Callable[[], dict[str, Any]]] = {
            "GetProducts": lambda: get_products(body),
            "ListServiceQuotas": lambda: list_service_quotas(body, self.quotas),
        }
        if operation not in operations:
            raise Refusal("UnknownOperationException", operation)
        return operations[operation]()

    def operations(self) -> list[str]:
        return [operation for operation, _ in self.calls]
