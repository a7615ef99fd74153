"""What a job may cost: said before it is sent, kept below a ceiling, told of jobs that exist."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from launching import launching
from priced import HOURLY, P4D, TWO, UNPRICED, description, job, offline
from sagemaker_jobs import LAUNCH

from sm_nanogpt import InputError, Request, Settings, jobs
from sm_nanogpt.launcher.sagemaker.cost import Prices, afford, earlier_cost
from sm_nanogpt.launcher.tracking import TrackedJob


@pytest.fixture
def launch(cloud, money, cli, short_text_file, monkeypatch):
    """Launches, on ml.g5.12xlarge unless other words say so, with settings from variables."""

    def run(arguments: str = "", **settings: str) -> Any:
        for name, value in settings.items():
            monkeypatch.setenv(f"SM_NANOGPT_{name.upper()}", value)
        data = () if "--resume" in arguments else ("--data", str(short_text_file))
        return cli(LAUNCH, data, arguments.split())

    return run


def limit(service: Any, job_id: str) -> int:
    request = service.sagemaker.jobs[job_id].request
    return int(request["StoppingCondition"]["MaxRuntimeInSeconds"])


# -- before a job is sent --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "above", "asks"),
    [
        ("", "", False),
        ("", "8", True),
        ("--max-run 7200 --yes", "", False),
        ("--max-run 7200 --dry-run", "", False),
    ],
)
def test_a_launch_asks_before_it_costs_much(cloud, launch, s3, monkeypatch, arguments, above, asks):
    confirm = Mock(return_value=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("click.confirm", confirm)
    ran = launch(arguments, ask_above=above)
    assert confirm.called == asks
    assert ran.code == int(asks)
    if asks:
        assert ran.out == ""
        assert ran.err.splitlines()[-1].startswith("not confirmed")
        assert not cloud.sagemaker.jobs
        assert "Contents" not in s3.list_objects_v2(Bucket=s3.bucket)


@pytest.mark.parametrize("arguments", [f"--instance {P4D}", "--sweep n_layer=2,4"])
def test_without_a_terminal_a_costly_launch_is_refused(cloud, launch, s3, arguments):
    """Also one of which nobody knows the cost."""
    ran = launch(arguments, ask_above="")
    assert ran.failed(2, "--yes", "--max-cost")
    assert ran.out == ""
    assert not cloud.sagemaker.jobs
    assert "Contents" not in s3.list_objects_v2(Bucket=s3.bucket)


def test_a_launch_below_a_ceiling_is_sent(cloud, launch):
    ran = launch("--max-run 5000", ask_above="", max_cost="12").good
    assert ran.out.strip() in cloud.sagemaker.jobs
    assert "the most expensive" not in ran.err  # of one type


def test_a_ceiling_must_be_an_amount_of_money(home, cli, monkeypatch):
    for amount in ("0", "-1", "nan", "inf", "lots"):
        for kind in (partial(Request, instance="ml.g5.xlarge"), Settings):
            with pytest.raises(InputError, match=f"max_cost={amount}"):
                kind(max_cost=amount)
    assert cli(LAUNCH, "--max-cost", "0").failed(2, "--max-cost 0")
    monkeypatch.setenv("SM_NANOGPT_MAX_COST", "lots")
    assert cli("jobs").failed(2, "max_cost='lots' (SM_NANOGPT_MAX_COST, ")


def test_an_unknown_region_names_the_nearest_one(cloud, cli, short_text_file):
    for command in (("jobs",), (*LAUNCH, "--data", str(short_text_file))):
        ran = cli("--region", "us-esat-1", command)
        assert ran.failed(2, "region us-esat-1: ", "us-east-1")
    assert not cloud.calls


def test_a_local_job_does_not_mention_money(home, cli, short_text_file, monkeypatch):
    assert cli("launch", "--instance", "local", "--max-cost", "5").failed(
        2, "--max-cost: is for SageMaker"
    )
    monkeypatch.setenv("SM_NANOGPT_MAX_COST", "5")
    ran = cli(launching("--detach", data=short_text_file)).good
    assert "USD" not in ran.err + cli("status", ran.out.strip()).out


# -- what a launch says and sends ------------------------------------------------------------------


def test_a_dry_run_asks_nobody_for_the_price(cloud, money, launch):
    ran = launch("--max-cost 5 --dry-run")
    assert json.loads(ran.out)["StoppingCondition"]["MaxRuntimeInSeconds"] == 1938
    assert "by the offline table of 2026-07" in ran.err
    assert "price list" not in ran.err
    assert not money.calls
    assert not cloud.calls


def test_a_launch_shows_price_source_and_worst_case(cloud, launch):
    ran = launch("--max-run 3000 --instance-count 2")
    assert "price: 14.18 USD an hour (2 x 7.09 USD), by AWS's price list of 2" in ran.err
    assert "cost: at most 14.18 USD, if it runs for 3000 s" in ran.err
    assert limit(cloud, ran.out.strip()) == 3000
    several = launch(f"--instance {TWO} --dry-run").err
    assert re.search(r"^price: 7\.09 USD an hour, .* \(ml\.g5\.12xlarge, ", several, re.MULTILINE)
    assert "cost: at most 8.28 USD, if it runs for 3600 s" in several
    assert "spot is billed for fewer seconds" in launch("--spot --dry-run").err


def test_a_launch_continues_without_a_price_list(launch, money):
    money.instead["GetProducts"] = "<html>Sign in</html>"
    ran = launch().good
    assert "price list: 'PriceList'" in ran.err
    assert "7.09 USD an hour, by the offline table of 2026-07" in ran.err


# -- a chain of jobs -------------------------------------------------------------------------------


@pytest.fixture
def stopped(cloud, s3, launch, cli):
    """Launches a job and stops it; it is billed for 100 s, 0.197 USD, and has a checkpoint."""

    def run(arguments: str = "", **settings: str) -> str:
        job_id = str(launch(arguments, **settings).good.out.strip())
        key = f"some/prefix/checkpoints/{job_id}/checkpoint-00000010.safetensors"
        s3.put_object(Bucket=s3.bucket, Key=key, Body=b"x")
        cli("stop", job_id)  # unless it has ended already
        assert not TrackedJob(job_id).describe().is_running
        return job_id

    return run


def test_a_ceiling_covers_a_chain_of_resumed_jobs(cloud, stopped, launch):
    first = stopped(max_cost="5")
    second = stopped(f"--resume {first}", max_cost="4")
    third = stopped(f"--resume {second} --max-cost 20", max_cost="")
    ran = launch(f"--resume {third}")
    assert f"s, from the ceiling of 20.00 USD of job {third}\n" in ran.err
    limits = [limit(cloud, each) for each in (first, second, third, ran.out.strip())]
    assert limits == [1938, 1331, 9355, 9255]  # 100 s less for each earlier one
    assert launch(f"--resume {third} --max-cost 1.5").failed(2, "0.60 USD of the earlier jobs")


def test_a_deleted_job_of_a_chain_still_counts(cloud, stopped, launch, cli):
    first = stopped()
    second = stopped(f"--resume {first}")  # no ceiling yet
    assert cli("delete", first, "--yes").code == 0
    ran = launch(f"--resume {second} --max-cost 5").good
    assert limit(cloud, ran.out.strip()) == 1738
    third = ran.out.strip()
    cli("stop", third)
    cli("delete", second, "--yes")
    assert "0.60 USD of" in launch(f"--resume {third} --dry-run").err  # inherits the ceiling


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({}, HOURLY),
        ({"resume": "first", "earlier_cost": 20}, 20 + HOURLY),
        ({"resume": "first"}, None),
        ({"instance": "ml.p4d.24xlarge"}, None),
    ],
    ids=["first", "second", "no-record", "no-price"],
)
def test_the_earlier_cost_is_the_jobs_and_its_records(tmp_path, record, expected):
    prices = Prices(offline(tmp_path))
    hour = description(started=0.0, ended=3600.0)
    hour = replace(hour, instance=record.get("instance", hour.instance))
    cost = earlier_cost(job(**record), hour, prices)
    assert cost == (expected and pytest.approx(expected))


def test_an_unknown_cost_stops_only_a_job_with_a_ceiling(tmp_path, caplog):
    settings, second = offline(tmp_path), job(resume="first")
    prices = Prices(settings)
    with pytest.raises(InputError, match="job first is unknown"):
        afford(second.replaced(max_cost=50), settings, prices, None)
    caplog.set_level("INFO", "sm_nanogpt")
    assert afford(second, settings, prices, None).earlier_cost is None
    assert "job first is unknown" in caplog.messages[0]


def test_disks_and_warm_pools_of_the_chain_count(stopped, launch, cli):
    cpu = "--instance ml.m5.xlarge --volume-size 16384 --keep-alive 3600"
    first = stopped(f"{cpu} --set n_layer=1")  # 100 s and 3600 s, at 0.23 USD and 6.06 for disks
    output = cli("status", first).out
    assert "cost:        6.47 USD so far, including all 3600 s of its warm pool" in output
    cost = json.loads(cli("status", first, "--json").out)["cost"]
    assert cost == pytest.approx(6.4646, abs=1e-4)
    assert "6.47 USD" in cli("jobs").out
    assert launch(f"--resume {first} {cpu} --max-cost 1").failed(2, "6.47 USD of the earlier jobs")


def test_a_job_without_capacity_cost_nothing(cloud, stopped, launch):
    cloud.sagemaker.exhausted = set(TWO.split(","))
    first = stopped(f"--max-cost 5 --instance {TWO}")
    assert cloud.sagemaker.jobs[first].instance is None
    assert limit(cloud, launch(f"--resume {first}").out.strip()) == 1938


# -- jobs that exist -------------------------------------------------------------------------------


def test_status_shows_the_cost_so_far_and_at_the_end(launch, cli, monkeypatch):
    monkeypatch.setattr("sagemaker_service.STAGES", (("Starting", 0.0), ("Training", math.inf)))
    monkeypatch.setattr("sagemaker_service.LOOKS", math.inf)
    job_id = launch("--instance-count 2").out.strip()
    so_far = r"cost: +0\.\d\d USD so far \(estimated\), at 7\.09 USD per instance and hour"
    assert re.search(so_far, cli("status", job_id).out)
    assert cli("stop", job_id).code == 0
    assert "cost:        0.40 USD, at 7.09 USD per instance and hour" in cli("status", job_id).out
    status = json.loads(cli("status", job_id, "--json").out)
    assert status["cost"] == pytest.approx(2 * 100 * HOURLY / 3600)
    assert status["price"]["per_hour"] == HOURLY
    TrackedJob(job_id).wait_for_end()
    assert TrackedJob(job_id).describe().cost == jobs()[0].cost == status["cost"]


@pytest.mark.parametrize(
    ("arguments", "exhausted", "cost"),
    [
        (f"--instance {TWO}", {"ml.g5.12xlarge"}, 100 * 5.752 / 3600),  # of the chosen type
        ("--spot", set(), 30 * HOURLY / 3600),  # of the seconds that are billed
    ],
)
def test_cost_is_of_the_machine_and_seconds_used(cloud, launch, cli, arguments, exhausted, cost):
    cloud.sagemaker.exhausted = exhausted
    job_id = launch(arguments).out.strip()
    assert cli("wait", job_id).code == 0
    assert json.loads(cli("status", job_id, "--json").out)["cost"] == pytest.approx(cost)


def test_jobs_asks_once_for_the_price_of_a_type(launch, money, cli, home):
    for _ in range(2):
        launch()
    (home / "prices.json").unlink()
    money.calls.clear()
    assert re.findall(r"\d\.\d\d USD", cli("jobs").out) != []
    assert money.operations() == ["GetProducts"]


def test_jobs_are_listed_without_known_prices(launch, cli):
    job_id = launch(f"--instance {P4D}").good.out.strip()
    ran = cli("jobs")
    assert ran.code == 0
    assert job_id in ran.out
    assert UNPRICED in ran.err
    assert "cost:" not in cli("status", job_id).out
