"""What an instance costs: AWS's price list, what is kept of it, and the table behind both."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import boto3
import money_service
import pytest
from money_service import TODAY

from launcher import Settings
from launcher.sagemaker.cost import OFFLINE, Price, Prices, offline_price, training_price

TRAIN = "USE1-Train:ml.g5.12xlarge"
LISTED_TODAY = f"AWS's price list of {TODAY}"


@pytest.fixture
def service(money, home, monkeypatch):
    """AWS's price list on loopback, and somebody who may ask it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    home.mkdir()
    return money


def prices(region: str = "us-east-1", session: Any = "new") -> Prices:
    return Prices(Settings(), region, boto3.Session() if session == "new" else session)


def keep(home: Path, per_hour: float | None, days: int, region: str = "us-east-1") -> str:
    """Writes an old answer; returns its date."""
    day = (TODAY - timedelta(days=days)).isoformat()
    entry = {"ml.g5.12xlarge": {"per_hour": per_hour, "day": day}}
    (home / "prices.json").write_text(json.dumps({region: entry}))
    return day


def test_the_price_is_that_of_training(service):
    assert prices().of("ml.g5.12xlarge") == Price(7.09, LISTED_TODAY)
    ((_, body),) = service.calls
    answer = money_service.get_products(body)["PriceList"]
    assert len(answer) == 3  # training, hosting, notebooks


def test_each_region_has_its_own_price(service):
    assert prices("eu-west-1").of("ml.g5.12xlarge") == Price(8.508, LISTED_TODAY)


def test_the_price_list_is_requested_once_a_week(service, home):
    for _ in range(2):
        assert prices().of("ml.g5.12xlarge") == Price(7.09, LISTED_TODAY)
    assert service.operations() == ["GetProducts"]
    keep(home, 6.0, days=8)
    assert prices().of("ml.g5.12xlarge") == Price(7.09, LISTED_TODAY)
    assert service.operations() == ["GetProducts"] * 2


def test_a_saved_price_from_the_future_is_not_fresh(service, home):
    """A clock that was ahead would else keep it for as long."""
    keep(home, 6.0, days=-1)
    assert prices().of("ml.g5.12xlarge") == Price(7.09, LISTED_TODAY)


def test_an_old_price_is_used_with_its_date(service, home):
    day = keep(home, 6.0, days=80, region="eu-west-1")
    service.refuse["GetProducts"] = ("AccessDeniedException", "no")
    assert prices("eu-west-1").of("ml.g5.12xlarge") == Price(6.0, f"AWS's price list of {day}")


@pytest.mark.parametrize("asked", [True, False])
def test_the_higher_of_old_price_and_table_counts(service, home, asked):
    service.refuse["GetProducts"] = ("AccessDeniedException", "no")
    session = "new" if asked else None
    keep(home, 6.0, days=80)
    table = Price(7.09, "the offline table of 2026-07")
    assert prices(session=session).of("ml.g5.12xlarge") == table
    day = keep(home, 8.0, days=80)
    assert prices(session=session).of("ml.g5.12xlarge") == Price(8.0, f"AWS's price list of {day}")


def test_a_type_without_a_price_is_requested_once_a_day(service, home):
    for _ in range(2):
        assert prices().of("ml.p5.48xlarge") is None
    assert service.operations() == ["GetProducts"]
    keep(home, None, days=1)
    assert prices().of("ml.g5.12xlarge") == Price(7.09, LISTED_TODAY)


@pytest.mark.parametrize("product", [{}, {"product": {"attributes": {"usagetype": TRAIN}}}, 5])
def test_a_malformed_product_is_a_note_and_not_an_error(service, product):
    service.instead["GetProducts"] = {"PriceList": [json.dumps(product)]}
    known = prices()
    assert known.of("ml.g5.12xlarge") == Price(7.09, "the offline table of 2026-07")
    assert known.trouble.startswith("could not ask AWS's price list: ")


def test_a_price_that_cannot_be_saved_is_still_returned(service, home):
    (home / "prices.json").mkdir()
    assert prices().of("ml.g5.12xlarge") == Price(7.09, LISTED_TODAY)


def test_the_offline_table_is_the_last_resort(service):
    service.refuse["GetProducts"] = ("AccessDeniedException", "no")
    known = prices()
    assert known.of("ml.g5.12xlarge") == Price(7.09, "the offline table of 2026-07")
    assert known.trouble.startswith("could not ask AWS's price list: not allowed")


def test_a_failed_price_list_is_not_requested_again(service):
    service.refuse["GetProducts"] = ("AccessDeniedException", "no")
    known = prices()
    assert known.of("ml.g5.12xlarge") is not None
    assert known.of("ml.p5.48xlarge") is None
    assert service.operations() == ["GetProducts"]


@pytest.mark.parametrize("region", ["cn-north-1", "us-gov-west-1"])
def test_a_partition_without_a_price_list_makes_no_request(service, region):
    known = prices(region)
    assert known.of("ml.g5.12xlarge") is None
    said = f"there is no price list for {region} (partition aws-"
    assert known.trouble.startswith(said)
    assert service.operations() == []


def test_without_a_session_no_request_is_made(service, home):
    keep(home, 6.0, days=1)
    assert prices(session=None).of("ml.g5.12xlarge").per_hour == 6.0  # type: ignore[union-attr]
    assert prices(session=None).of("ml.g5.xlarge") == offline_price("ml.g5.xlarge", "us-east-1")
    assert not service.calls


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "5",
        "[1]",
        '{"us-east-1": null}',
        '{"us-east-1": {"ml.g5.12xlarge": null}}',
        '{"us-east-1": {"ml.g5.12xlarge": {"per_hour": 6, "day": "soon"}}}',
        '{"us-east-1": {"ml.g5.12xlarge": {"per_hour": 0, "day": "2999-01-01"}}}',
    ],
)
def test_a_damaged_file_of_prices_is_rewritten(service, home, content):
    (home / "prices.json").write_text(content)
    assert prices().of("ml.g5.12xlarge") == Price(7.09, LISTED_TODAY)
    assert json.loads((home / "prices.json").read_text())["us-east-1"]["ml.g5.12xlarge"]


def test_a_type_that_is_not_sold_has_no_price(service):
    assert prices("eu-west-1").of("ml.g6.12xlarge") is None


def test_the_table_covers_one_region_and_each_type_once():
    assert offline_price("ml.g5.12xlarge", "eu-west-1") is None
    names = [name for group in OFFLINE.values() for name in group]
    assert len(names) == len(set(names))


def test_a_product_of_the_free_tier_is_not_the_price():
    (product,) = (
        json.dumps(product)
        for product in money_service.products("ml.m5.xlarge", "us-east-1", 0.0)
        if product["product"]["attributes"]["component"] == "Training"
    )
    assert training_price([product], "ml.m5.xlarge") is None
