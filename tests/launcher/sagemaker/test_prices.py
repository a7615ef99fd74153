"""What an instance costs: AWS's price list, what is kept of it, and the table behind both."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import money_service
import pytest
from money_service import TODAY

from sm_nanogpt import Settings
from sm_nanogpt.launcher.sagemaker.cost import Price, Prices, training_price

TRAIN = "USE1-Train:ml.g5.12xlarge"
LISTED = Price(7.09, f"AWS's price list of {TODAY}")
TABLE = Price(7.09, "the offline table of 2026-07")


@pytest.fixture
def service(money, home, monkeypatch):
    """AWS's price list on loopback, and somebody who may ask it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    home.mkdir()
    return money


def prices(region: str = "us-east-1", offline: bool = False) -> Prices:
    return Prices(Settings(region=region).with_offline(offline))


def keep(home: Path, per_hour: float, days: int, region: str = "us-east-1") -> str:
    """Writes an old answer; returns its date."""
    day = (TODAY - timedelta(days=days)).isoformat()
    entry = {"ml.g5.12xlarge": {"per_hour": per_hour, "day": day}}
    (home / "prices.json").write_text(json.dumps({region: entry}))
    return day


def test_each_region_has_its_own_price_of_training(service):
    assert prices().of("ml.g5.12xlarge") == LISTED
    ((_, body),) = service.calls
    answer = money_service.get_products(body)["PriceList"]
    assert len(answer) == 3  # training, hosting, notebooks
    europe = prices("eu-west-1")
    assert europe.of("ml.g5.12xlarge") == Price(8.508, LISTED.source)
    assert europe.of("ml.g6.12xlarge") is None  # not sold there


def test_the_price_list_is_requested_once_a_week(service, home):
    for _ in range(2):
        assert prices().of("ml.g5.12xlarge") == LISTED
    assert service.operations() == ["GetProducts"]
    for days in (8, -1):  # a week ago, or by a clock that was ahead, which else would last as long
        keep(home, 6.0, days)
        assert prices().of("ml.g5.12xlarge") == LISTED
    assert service.operations() == ["GetProducts"] * 3


@pytest.mark.parametrize("offline", [False, True])
def test_an_old_price_counts_if_there_is_no_other(service, home, offline):
    service.refuse["GetProducts"] = ("AccessDeniedException", "no")
    day = keep(home, 6.0, 80)
    price = prices(offline=offline).of("ml.g5.12xlarge")
    assert price == Price(6.0, f"AWS's price list of {day}")


def test_a_type_without_a_price_is_not_remembered(service, home):
    assert prices().of("ml.p5.48xlarge") is None
    assert not (home / "prices.json").exists()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "GetProducts: no (AccessDenied"),
        ({"PriceList": [json.dumps({"product": {"attributes": {"usagetype": TRAIN}}})]}, ""),
        ({"PriceList": ["5"]}, ""),
    ],
)
def test_without_an_answer_the_table_is_used(service, answer, why):
    if answer is None:
        service.refuse["GetProducts"] = ("AccessDeniedException", "no")
    else:
        service.instead["GetProducts"] = answer
    price_list = prices()
    assert price_list.of("ml.g5.12xlarge") == TABLE
    assert price_list.failure.startswith(f"could not ask AWS's price list: {why}")
    assert price_list.of("ml.p5.48xlarge") is None
    assert service.operations() == ["GetProducts"]  # once is enough


def test_a_partition_without_a_price_list_makes_no_request(service):
    price_list = prices("cn-north-1")
    assert price_list.of("ml.g5.12xlarge") is None
    assert "cn-north-1 (partition aws-cn)" in price_list.failure
    assert service.operations() == []


def test_in_a_dry_run_no_request_is_made(service, home):
    keep(home, 6.0, days=1)
    assert prices(offline=True).of("ml.g5.12xlarge").per_hour == 6.0  # type: ignore[union-attr]
    assert prices(offline=True).of("ml.g5.xlarge") == Price(1.408, TABLE.source)
    assert not service.calls


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"us-east-1": {"ml.g5.12xlarge": {"per_hour": 0, "day": "2999-01-01"}}}',
    ],
)
def test_a_damaged_file_of_prices_is_rewritten(service, home, content):
    (home / "prices.json").write_text(content)
    assert prices().of("ml.g5.12xlarge") == LISTED
    assert json.loads((home / "prices.json").read_text())["us-east-1"]["ml.g5.12xlarge"]


def test_a_price_that_cannot_be_saved_is_still_returned(service, home):
    (home / "prices.json").mkdir()
    assert prices().of("ml.g5.12xlarge") == LISTED


def test_the_table_covers_one_region(service):
    assert prices(offline=True).of("ml.g5.12xlarge") == TABLE
    assert prices("eu-west-1", offline=True).of("ml.g5.12xlarge") is None


def test_a_product_of_the_free_tier_is_not_the_price():
    (product,) = (
        json.dumps(product)
        for product in money_service.products("ml.m5.xlarge", "us-east-1", 0.0)
        if product["product"]["attributes"]["component"] == "Training"
    )
    assert training_price([product], "ml.m5.xlarge") is None
