"""What a job costs, and the time limit that keeps it below a ceiling."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from priced import HOURLY, P4D, TWO, UNPRICED, description, job, offline

from sm_nanogpt import InputError, Settings
from sm_nanogpt.launcher.cli.show import explain
from sm_nanogpt.launcher.sagemaker.cost import (
    OVERHEAD_SECONDS,
    Price,
    Prices,
    afford,
    cost_of,
    longest_run,
    rate,
    usd,
    worst_case,
)


def test_amounts_are_rounded_up_to_the_cent():
    cases = [(0, "0.00 USD"), (0.001, "0.01 USD"), (7.09, "7.09 USD"), (1234.561, "1,234.57 USD")]
    for amount, shown in cases:
        assert usd(amount) == shown


@pytest.mark.parametrize(("amount", "keep_alive"), [(1.5, 0), (99.99, 600)])
def test_the_longest_run_just_stays_below_the_amount(amount, keep_alive):
    longest = longest_run(amount, HOURLY, keep_alive)
    assert worst_case(HOURLY, longest, keep_alive) <= amount
    assert worst_case(HOURLY, longest + 1, keep_alive) > amount


def test_the_worst_case_counts_startup_and_warm_pool():
    assert worst_case(3600.0, 100, 10) == OVERHEAD_SECONDS + 110
    assert OVERHEAD_SECONDS > 841 - 603  # a job with a limit of 603 s was billed for 841 s


def test_cost_counts_each_host_and_each_billed_disk():
    assert rate(job(instance_count=2), Price(HOURLY, "")) == 2 * HOURLY  # has a disk of its own
    disk = {"instance": "ml.m5.xlarge", "volume_size": 16_384}
    assert rate(job(**disk), Price(0.23, "")) > 6
    assert cost_of(description(**disk, started=0.0), Price(0.23, ""), now=3600.0) > 6


def test_cost_counts_seconds_that_are_or_may_be_billed():
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 0),
        ({"started": 100.0}, 800),
        ({"started": 100.0, "ended": 300.0}, 200),
        ({"started": 100.0, "ended": 300.0, "billable_seconds": 60, "warm_pool_seconds": 5}, 65),
        ({"started": 100.0, "keep_alive": 600}, 800),
        ({"started": 100.0, "ended": 300.0, "keep_alive": 600}, 800),  # at most
        ({"started": 100.0, "ended": 300.0, "keep_alive": 600, "warm_pool_seconds": 0}, 200),
        ({"ended": 300.0, "keep_alive": 600}, 0),  # it got no machines
        # AWS keeps no pool after an error of its own, and says so by nothing.
        ({"started": 100.0, "ended": 300.0, "keep_alive": 601, "status": "Failed"}, 801),
        ({"started": 100.0, "ended": 300.0, "keep_alive": 600, "status": "Failed"}, 200),
    ]
    for facts, seconds in cases:
        assert description(**facts).billed_seconds(now=900.0) == seconds


def test_a_disk_adds_to_the_price_of_a_type(caplog):
    prices = {"ml.r5d.large": Price(1.0, "A"), "ml.r5.large": Price(0.9, "B")}
    price_list = SimpleNamespace(of=prices.get, region="us-east-1")
    two = job(instance=",".join(prices), volume_size=1000)
    caplog.set_level("INFO", "sm_nanogpt")
    ready = afford(two, Settings(), cast("Prices", price_list), 0.0)
    price, cost = caplog.messages
    assert ready.instance == two.instance
    assert price == "price: 0.90 USD an hour, by B (ml.r5.large, the most expensive)"
    assert cost.startswith("cost: at most 1.49 USD")


def test_advice_after_a_time_limit_names_the_ceiling():
    """A job that resumes it takes the ceiling over, so that --max-run alone gives no more time."""
    advice = explain(description(status="Stopped", failure_reason="MaxRuntimeExceeded"), Settings())
    assert "raise --max-run, or --max-cost" in advice


OWN = "5.00 USD"
CONFIGURED = "USD in SM_NANOGPT_MAX_COST or config.toml"


@pytest.fixture
def limited(tmp_path, caplog):
    """Limits a job by what it may cost; some of its fields are those of the job that it resumes,
    which cost 0.197 USD. Returns its time limit and the last line of the log."""

    def run(values: dict[str, Any], inherited: str, configured: float | None) -> Any:
        settings = offline(tmp_path, max_cost=configured)
        request = job(**values)
        request.mark_inherited(set(inherited.split()))
        spent = 100 * HOURLY / 3600 if request.resume else 0.0
        caplog.set_level("INFO", "sm_nanogpt")
        ready = afford(request, settings, Prices(settings), spent)
        return ready.time_limit, caplog.messages[-1]

    return run


@pytest.mark.parametrize(
    ("values", "inherited", "configured", "seconds", "source"),
    [
        ({"max_cost": 5}, "", 10, 1938, OWN),
        ({"max_cost": 5, "instance": TWO, "max_run": 7200}, "", None, 1938, OWN),
        ({}, "", 5, 1938, f"5.00 {CONFIGURED}"),
        ({"resume": "j"}, "", 4, 1331, f"4.00 {CONFIGURED}"),
        ({"resume": "j", "max_cost": 5}, "max_cost", None, 1838, f"{OWN} of job j"),
        ({"resume": "j", "max_cost": 5}, "max_cost", 2, 315, f"2.00 {CONFIGURED}"),
    ],
)
def test_a_ceiling_that_limits_the_time_is_named(
    limited, values, inherited, configured, seconds, source
):
    limit, message = limited(values, inherited, configured)
    assert limit == seconds
    assert message == f"time limit: {seconds} s, from the ceiling of {source}"


@pytest.mark.parametrize(
    ("values", "inherited", "seconds"),
    [
        ({"max_cost": 5, "max_run": 600}, "", 600),
        ({"max_cost": 50, "spot": True, "max_wait": 900}, "", 900),
        ({"resume": "j", "max_cost": 50, "max_run": 600}, "max_cost max_run", 600),
    ],
)
def test_a_ceiling_leaves_a_shorter_limit_as_it_is(limited, values, inherited, seconds):
    limit, message = limited(values, inherited, configured=None)
    assert limit == seconds
    assert f"for {seconds} s" in message


@pytest.mark.parametrize(
    ("values", "inherited", "configured", "facts"),
    [
        ({"max_cost": 1}, "", None, ["1.00 USD is too low", "of 60 s", "1.30 USD"]),
        ({"max_cost": 6}, "", 5, ["max_cost=6", "5.00 USD"]),
        ({"max_run": 7200}, "", 5, ["7200 s may cost 15.37 USD", "5.00 USD", "at most 1938 s"]),
        ({"resume": "j", "max_run": 7200}, "max_run", 2, ["of 7200 s of job j may cost"]),
        ({"max_cost": 5, "instance": f"{TWO},{P4D}"}, "", None, [UNPRICED]),
    ],
)
def test_a_job_that_no_limit_makes_cheap_is_refused(limited, values, inherited, configured, facts):
    with pytest.raises(InputError) as caught:
        limited(values, inherited, configured)
    for fact in facts:
        assert fact in str(caught.value)
