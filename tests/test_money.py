"""What a job may cost: said before it is sent, kept below a ceiling, told of jobs that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from emulator import Emulator
from launching import Ran, sets

from launcher import InputError, JobDescription, Settings, describe
from launcher.cli.show import explain
from launcher.job import TrainingJob
from launcher.sagemaker.cost import (
    AROUND_SECONDS,
    Ceiling,
    Price,
    Prices,
    afford,
    ceiling_of,
    cost_of,
    limited,
    longest_run,
    rate,
    usd,
    worst_case,
)

LAUNCH = ("launch", "--instance", "ml.g5.12xlarge")
TWO = ("--instance", "ml.g6.12xlarge,ml.g5.12xlarge")  # 5.752 and 7.09 USD an hour
HOURLY = 7.09  # of ml.g5.12xlarge in us-east-1
CPU = Price(0.23, "")  # of ml.m5.xlarge


def job(**values: Any) -> TrainingJob:
    return TrainingJob(**{"instance": "ml.g5.12xlarge", "data": "s3://bucket/text", **values})


def description(**values: Any) -> JobDescription:
    return JobDescription(
        **{
            "job_id": "j",
            "status": "InProgress",
            "secondary_status": "Training",
            "instance": "ml.g5.12xlarge",
            "instance_count": 1,
            "created": 0.0,
            "data": "",
            **values,
        }
    )


# -- the question before a job is sent -------------------------------------------------------------


def asked(
    cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, *words: str, answer: bool = False
) -> tuple[bool, Ran]:
    """Whether a launch at a terminal asks, and how it ends."""
    confirm = Mock(return_value=answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("click.confirm", confirm)
    ran = cli(*LAUNCH, *words)
    return confirm.called, ran


@pytest.fixture
def data(cloud, text_file, monkeypatch):
    monkeypatch.delenv("SM_NANOGPT_ASK_ABOVE")
    return "--data", str(text_file)


def test_a_launch_of_an_hour_does_not_ask(cloud, money, cli, monkeypatch, data):
    question, ran = asked(cli, monkeypatch, *data)
    assert (question, ran.code) == (False, 0)
    assert "cost: at most 8.28 USD, if it runs for 3600 s" in ran.err


def test_a_declined_expensive_launch_is_not_sent(cloud, money, s3, cli, monkeypatch, data):
    question, ran = asked(cli, monkeypatch, *data, "--max-run", "7200")
    assert (question, ran.code, ran.out) == (True, 1, "")
    assert ran.err.splitlines()[-1] == "not confirmed; nothing was changed"
    assert "upload:" not in ran.err
    assert not cloud.sagemaker.jobs
    assert not s3.list_objects_v2(Bucket=s3.bucket).get("Contents")


@pytest.mark.parametrize("words", [("--yes",), ("--dry-run",)])
def test_yes_and_dry_run_skip_the_question(words, cloud, money, cli, monkeypatch, data):
    question, ran = asked(cli, monkeypatch, *data, "--max-run", "7200", *words)
    assert (question, ran.code) == (False, 0)


def test_the_cost_above_which_a_launch_asks_is_a_setting(cloud, money, cli, monkeypatch, data):
    monkeypatch.setenv("SM_NANOGPT_ASK_ABOVE", "8")
    assert asked(cli, monkeypatch, *data)[0]


@pytest.mark.parametrize(
    "words",
    [
        ("--max-run", "7200"),
        ("--instance", "ml.p4d.24xlarge"),  # at an unknown price
        ("--sweep", "n_layer=2,4"),
    ],
)
def test_a_script_needs_yes_or_a_ceiling_for_much_money(words, cloud, money, s3, cli, data):
    ran = cli(*LAUNCH, *data, *words)
    assert (ran.code, ran.out) == (2, "")
    assert "--yes" in ran.error
    assert "--max-cost" in ran.error
    assert not cloud.sagemaker.jobs
    assert not s3.list_objects_v2(Bucket=s3.bucket).get("Contents")


@pytest.mark.parametrize("configured", ["", "12"])
def test_a_ceiling_lets_a_script_launch(configured, cloud, money, cli, monkeypatch, data):
    monkeypatch.setenv("SM_NANOGPT_MAX_COST", configured)
    ceiling = () if configured else ("--max-cost", "12")
    assert cli(*LAUNCH, *data, "--max-run", "5000", *ceiling).code == 0


# -- arithmetic ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amount", "said"),
    [(0, "0.00 USD"), (0.001, "0.01 USD"), (7.09, "7.09 USD"), (1234.561, "1,234.57 USD")],
)
def test_amounts_are_in_usd_and_rounded_up_to_the_cent(amount, said):
    assert usd(amount) == said


@pytest.mark.parametrize("amount", [1.5, 5.0, 99.99])
@pytest.mark.parametrize("keep_alive", [0, 600])
def test_the_longest_run_just_stays_below_the_amount(amount, keep_alive):
    longest = longest_run(amount, HOURLY, keep_alive)
    assert worst_case(HOURLY, longest, keep_alive) <= amount
    assert worst_case(HOURLY, longest + 1, keep_alive) > amount


def test_the_worst_case_includes_startup_upload_and_warm_pool():
    assert worst_case(3600.0, 100, 10) == AROUND_SECONDS + 110
    assert AROUND_SECONDS > 841 - 603  # what a job with a limit of 603 s was seen to be billed for


def test_cost_counts_each_host_and_each_billed_disk():
    assert rate(job(instance_count=2), Price(HOURLY, "")) == 2 * HOURLY  # has a disk of its own
    cpu = job(instance="ml.m5.xlarge", volume_size=16_384)
    assert rate(cpu, Price(0.23, "")) > 6


def test_cost_uses_billable_seconds_if_they_are_known():
    assert description().billed_seconds(now=900.0) == 0
    assert description(started=100.0).billed_seconds(now=900.0) == 800
    assert description(started=100.0, ended=300.0).billed_seconds(now=900.0) == 200
    ended = description(started=100.0, ended=300.0, billable_seconds=60, warm_pool_seconds=5)
    assert ended.billed_seconds(now=900.0) == 65


def test_a_warm_pool_counts_in_full_until_its_seconds_are_known():
    running = description(started=100.0, keep_alive=600)
    assert running.billed_seconds(now=900.0) == 800
    ended = replace(running, ended=300.0)
    assert ended.billed_seconds(now=900.0) == 200 + 600
    assert replace(ended, warm_pool_seconds=0).billed_seconds(now=900.0) == 200
    assert description(ended=300.0, keep_alive=600).billed_seconds(now=900.0) == 0  # no machines


def test_a_jobs_cost_includes_its_disks():
    cpu = description(instance="ml.m5.xlarge", volume_size=16_384, started=0.0)
    assert cost_of(cpu, Price(0.23, ""), now=3600.0) > 6


def test_a_ceiling_shortens_default_and_requested_limits():
    ceiling = Ceiling(5.0, "--max-cost")
    longest = longest_run(5.0, HOURLY)
    assert limited(job(max_cost=5), HOURLY, ceiling, 0).time_limit == longest
    assert limited(job(max_cost=5, max_run=7200), HOURLY, ceiling, 0).time_limit == longest
    assert limited(job(max_cost=5, max_run=600), HOURLY, ceiling, 0).time_limit == 600


def test_a_limit_fits_into_the_wait_time_of_spot():
    spot = job(max_cost=50, spot=True, max_wait=900)
    assert limited(spot, HOURLY, Ceiling(50.0, "--max-cost"), 0).time_limit == 900


def test_the_cost_of_earlier_jobs_lowers_the_ceiling():
    ceiling = Ceiling(5.0, "--max-cost")
    assert limited(job(max_cost=5), HOURLY, ceiling, 2.0).time_limit == longest_run(3.0, HOURLY)
    with pytest.raises(InputError, match=r"4\.00 USD of the earlier jobs"):
        limited(job(max_cost=5), HOURLY, ceiling, 4.0)


def test_advice_after_a_time_limit_names_the_ceiling():
    """A job that resumes it takes the ceiling over, so that --max-run alone gives no more time."""
    stopped = description(status="Stopped", failure_reason="MaxRuntimeExceeded")
    told = explain(stopped)
    assert "--max-run" in told
    assert "--max-cost" in told


def test_a_configured_ceiling_refuses_a_longer_requested_limit():
    ceiling = Ceiling(5.0, "the configured ceiling")
    with pytest.raises(InputError, match=r"--max-run 7200 may cost 15\.37 USD.* --max-run 1938"):
        limited(job(max_run=7200), HOURLY, ceiling, 0)
    assert limited(job(), HOURLY, ceiling, 0).time_limit == 1938


def test_a_jobs_ceiling_cannot_exceed_the_configured_one(home):
    settings = Settings(max_cost=10)
    assert ceiling_of(job(max_cost=5), settings) == Ceiling(5.0, "--max-cost")
    assert ceiling_of(job(), settings).amount == 10  # type: ignore[union-attr]
    assert ceiling_of(job(), Settings()) is None
    with pytest.raises(InputError, match=r"--max-cost says 12,345\.67 USD, .* is 10\.00 USD"):
        ceiling_of(job(max_cost=12345.67), settings)


@pytest.mark.parametrize("words", ["0", "-1", "nan", "inf", "lots"])
def test_a_ceiling_must_be_an_amount_of_money(home, cli, monkeypatch, words):
    ran = cli(*LAUNCH, "--max-cost", words)
    assert ran.code == 2
    assert "max" in ran.error
    monkeypatch.setenv("SM_NANOGPT_MAX_COST", words)
    ran = cli("jobs")
    assert ran.code == 2
    assert ran.error.startswith(f"SM_NANOGPT_MAX_COST={words!r}: must be ")


# -- a launch --------------------------------------------------------------------------------------


def limit(service: Emulator, job_id: str) -> int:
    seconds: int = service.sagemaker.jobs[job_id].request["StoppingCondition"][
        "MaxRuntimeInSeconds"
    ]
    return seconds


def test_a_launch_shows_price_source_and_worst_case(cloud, cli, text_file):
    ran = cli(*LAUNCH, "--data", str(text_file), "--max-run", "3000", "--instance-count", "2")
    assert ran.code == 0, ran.err
    assert "price: 14.18 USD an hour (2 x 7.09 USD), by AWS's price list of 2" in ran.err
    assert "cost: at most 14.18 USD, if it runs for 3000 s" in ran.err
    assert ran.out.strip() in cloud.sagemaker.jobs
    spot = cli(*LAUNCH, "--data", str(text_file), "--spot").err
    assert "spot is billed for fewer seconds (AWS says: up to 90% less)" in spot


def test_a_ceiling_sets_the_time_limit_of_the_request(cloud, cli, text_file):
    ran = cli(*LAUNCH, "--data", str(text_file), "--max-cost", "5")
    assert ran.code == 0, ran.err
    assert limit(cloud, ran.out.strip()) == 1938
    assert "time limit: 1938 s, from --max-cost (5.00 USD)" in ran.err


def test_the_most_expensive_of_several_types_counts(cloud, cli, text_file):
    ran = cli(*LAUNCH, *TWO, "--data", str(text_file), "--max-cost", "5")
    assert ran.code == 0, ran.err
    assert limit(cloud, ran.out.strip()) == 1938
    said = r"^price: 7\.09 USD an hour, by AWS's price list of \S+ \(ml\.g5\.12xlarge, the most"
    assert re.search(said, ran.err, re.MULTILINE)


def test_a_ceiling_needs_the_price_of_each_type(cloud, cli, text_file):
    types = ("--instance", "ml.g5.12xlarge,ml.p4d.24xlarge", "--data", str(text_file))
    assert "the price of ml.p4d.24xlarge in us-east-1 is unknown" in cli(*LAUNCH, *types).err
    assert (
        "the job may cost more than 5.00 USD (--max-cost)"
        in cli(*LAUNCH, *types, "--max-cost", "5").error
    )


def test_a_disk_adds_to_the_price_of_a_type(caplog):
    prices = {"ml.r5d.large": Price(1.0, "A"), "ml.r5.large": Price(0.9, "B")}
    known = SimpleNamespace(of=prices.get, trouble="", region="us-east-1")
    two = job(instance=",".join(prices), volume_size=1000)
    caplog.set_level("INFO", "launcher")
    ready = afford(two, Settings(), cast("Prices", known), lambda: 0.0)
    told = caplog.messages
    assert ready.instance == two.instance
    assert told[0] == "price: 0.90 USD an hour, by B (ml.r5.large, the most expensive)"
    assert "disks" in told[1]


def test_the_smaller_of_two_limits_holds_and_is_shown(cloud, cli, text_file):
    words = (*LAUNCH, "--data", str(text_file), "--max-cost", "5")
    short = cli(*words, "--max-run", "600")
    assert limit(cloud, short.out.strip()) == 600
    assert "time limit: 600 s, from --max-run, within --max-cost (5.00 USD)" in short.err
    long = cli(*words, "--max-run", "7200")
    assert limit(cloud, long.out.strip()) == 1938
    assert "time limit: 1938 s, from --max-cost (5.00 USD)" in long.err


def test_a_message_names_the_limit_that_holds(cloud, cli, text_file):
    words = (*LAUNCH, "--data", str(text_file), "--spot", "--max-cost", "50")
    ran = cli(*words, "--max-wait", "900")
    assert limit(cloud, ran.out.strip()) == 900
    assert "time limit: 900 s, from --max-wait, within --max-cost (50.00 USD)" in ran.err


def test_a_configured_ceiling_holds_for_every_launch(cloud, cli, text_file, monkeypatch):
    monkeypatch.setenv("SM_NANOGPT_MAX_COST", "5")
    words = (*LAUNCH, "--data", str(text_file))
    assert limit(cloud, cli(*words).out.strip()) == 1938
    refused = cli(*words, "--max-run", "7200")
    assert refused.code == 2
    assert "15.37 USD" in refused.error
    above = cli(*words, "--max-cost", "6")
    assert above.code == 2
    assert "is 5.00 USD" in above.error
    assert len(cloud.sagemaker.jobs) == 1


def test_a_ceiling_that_is_too_low_is_refused_with_numbers(cloud, s3, cli, text_file):
    ran = cli(*LAUNCH, "--data", str(text_file), "--max-cost", "1")
    assert ran.code == 2
    assert "a cost of 1.00 USD (--max-cost) is too low: even a run of 60 s may cost 1.30 USD" in (
        ran.error
    )
    assert not cloud.calls
    assert "Contents" not in s3.list_objects_v2(Bucket=s3.bucket)
    assert ran.out == ""


def test_a_launch_continues_without_prices(cloud, money, cli, text_file):
    money.refuse["GetProducts"] = ("AccessDeniedException", "no")
    ran = cli(*LAUNCH, "--data", str(text_file))
    assert ran.code == 0, ran.err
    assert "could not ask AWS's price list: not allowed" in ran.err
    assert "7.09 USD an hour, by the offline table of 2026-07" in ran.err


def test_a_launch_continues_if_a_proxy_answers_for_prices(cloud, money, cli, text_file):
    money.instead["GetProducts"] = "<html>Sign in</html>"
    ran = cli(*LAUNCH, "--data", str(text_file))
    assert ran.code == 0, ran.err
    assert "could not ask AWS's price list: the answer did not come from AWS" in ran.err


@pytest.mark.parametrize(
    "content",
    ["5", "[1]", '{"us-east-1": null}', '{"us-east-1": {"day": 1, "ml.g5.12xlarge": 7.09}}'],
)
def test_a_launch_continues_with_damaged_price_files(cloud, home, cli, text_file, content):
    home.mkdir(exist_ok=True)
    (home / "prices.json").write_text(content)
    ran = cli(*LAUNCH, "--data", str(text_file))
    assert ran.code == 0, ran.err


def test_a_launch_continues_if_prices_cannot_be_saved(cloud, home, cli, text_file):
    (home / "prices.json").mkdir(parents=True)
    ran = cli(*LAUNCH, "--data", str(text_file))
    assert ran.code == 0, ran.err
    assert "7.09 USD an hour, by AWS's price list" in ran.err


def test_a_ceiling_without_a_known_price_is_refused(cloud, money, cli, text_file):
    words = ("launch", "--instance", "ml.p4d.24xlarge", "--data", str(text_file))
    ran = cli(*words, "--max-cost", "100")
    assert ran.code == 2
    assert "the price of ml.p4d.24xlarge in us-east-1 is unknown" in ran.error
    assert not cloud.sagemaker.jobs
    assert cli(*words).code == 0


def test_a_dry_run_shows_the_cost_without_a_request(cloud, money, cli, text_file):
    ran = cli(*LAUNCH, "--data", str(text_file), "--max-cost", "5", "--dry-run")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["StoppingCondition"]["MaxRuntimeInSeconds"] == 1938
    assert "by the offline table of 2026-07" in ran.err
    assert not money.calls
    assert not cloud.calls


def test_a_local_job_does_not_mention_money(home, cli, text_file, monkeypatch):
    refused = cli("launch", "--instance", "local", "--max-cost", "5")
    assert refused.code == 2
    assert "--max-cost is for SageMaker" in refused.error
    monkeypatch.setenv("SM_NANOGPT_MAX_COST", "5")
    words = ("launch", "--instance", "local", "--data", str(text_file), "--detach")
    ran = cli(*words, *sets(max_steps=1, device="cpu"))
    assert ran.code == 0, ran.err
    assert "USD" not in ran.err + cli("status", ran.out.strip()).out


# -- a chain of jobs -------------------------------------------------------------------------------


@pytest.fixture
def stopped(cloud, s3, cli, text_file):
    """Launches a job and stops it; it is billed for 100 s and has a checkpoint."""

    def launch(*words: str) -> str:
        ran = cli(*LAUNCH, *words)
        assert ran.code == 0, ran.err
        job_id = ran.out.strip()
        key = f"some/prefix/checkpoints/{job_id}/checkpoint-00000010.safetensors"
        s3.put_object(Bucket=s3.bucket, Key=key, Body=b"x")
        cli("stop", job_id)  # unless it has ended already
        assert not describe(job_id).is_running
        return job_id

    return launch


def test_a_ceiling_covers_the_whole_chain_of_resumed_jobs(cloud, stopped, cli, text_file):
    first = stopped("--data", str(text_file), "--max-cost", "5")
    second = stopped("--resume", first)
    paid = 100 * HOURLY / 3600
    assert limit(cloud, second) == longest_run(5 - paid, HOURLY)
    third = stopped("--resume", second)
    assert limit(cloud, third) == longest_run(5 - 2 * paid, HOURLY)
    refused = cli(*LAUNCH, "--resume", third, "--max-cost", "1.5")
    assert refused.code == 2
    assert "0.60 USD of the earlier jobs" in refused.error
    more = stopped("--resume", third, "--max-cost", "20")
    assert limit(cloud, more) == longest_run(20 - 3 * paid, HOURLY)


def test_a_typed_limit_is_inherited_with_the_ceiling(cloud, stopped, text_file):
    short = stopped("--data", str(text_file), "--max-cost", "50", "--max-run", "600")
    assert limit(cloud, stopped("--resume", short)) == 600
    long = stopped("--data", str(text_file), "--max-cost", "5", "--max-run", "7200")
    assert limit(cloud, long) == 1938
    assert limit(cloud, stopped("--resume", long, "--max-cost", "100")) == 7200


def test_an_inherited_limit_is_attributed_to_the_earlier_job(
    cloud, stopped, cli, text_file, monkeypatch
):
    costly = stopped("--data", str(text_file), "--max-cost", "5")
    long = stopped("--data", str(text_file), "--max-run", "7200")
    assert f"from --max-cost of job {costly} (" in cli(*LAUNCH, "--resume", costly).err
    monkeypatch.setenv("SM_NANOGPT_MAX_COST", "2")
    lowered = cli(*LAUNCH, "--resume", costly)
    assert lowered.code == 0, lowered.err
    assert "from the configured ceiling, SM_NANOGPT_MAX_COST or max_cost in" in lowered.err
    assert "--max-cost" not in lowered.err
    refused = cli(*LAUNCH, "--resume", long)
    assert refused.code == 2
    assert refused.error.startswith(f"--max-run 7200 of job {long} may cost")


def test_disks_and_warm_pools_of_the_chain_count(cloud, stopped, cli, text_file):
    cpu = ("--instance", "ml.m5.xlarge", "--volume-size", "16384", "--keep-alive", "3600")
    first = stopped("--data", str(text_file), *cpu, *sets(n_layer=1))
    told = cli("status", first).out
    paid = (100 + 3600) / 3600 * rate(job(instance="ml.m5.xlarge", volume_size=16_384), CPU)
    assert f"cost:        {usd(paid)} so far, including all 3600 s of its warm pool" in told
    assert json.loads(cli("status", first, "--json").out)["cost"] == pytest.approx(paid)
    assert usd(paid) in cli("jobs").out
    refused = cli(*LAUNCH, "--resume", first, *cpu, "--max-cost", "1")
    assert refused.code == 2
    assert f"{usd(paid)} of the earlier jobs" in refused.error


def test_a_limit_set_by_a_configured_ceiling_is_not_inherited(
    cloud, stopped, text_file, monkeypatch
):
    monkeypatch.setenv("SM_NANOGPT_MAX_COST", "5")
    first = stopped("--data", str(text_file))
    monkeypatch.setenv("SM_NANOGPT_MAX_COST", "4")
    second = stopped("--resume", first)
    assert limit(cloud, second) == longest_run(4 - 100 * HOURLY / 3600, HOURLY)


def test_a_ceiling_needs_the_cost_of_each_earlier_job(cloud, stopped, cli, text_file):
    first = stopped("--data", str(text_file))
    second = stopped("--resume", first)
    del cloud.sagemaker.jobs[first]
    refused = cli(*LAUNCH, "--resume", second, "--max-cost", "5")
    assert refused.code == 2
    assert f"the cost of the earlier job {first} is unknown" in refused.error
    assert cli(*LAUNCH, "--resume", second).code == 0


def test_an_earlier_job_without_capacity_cost_nothing(cloud, stopped, text_file):
    first = stopped("--data", str(text_file), "--max-cost", "5")
    cloud.sagemaker.exhausted = {"ml.g5.12xlarge", "ml.g6.12xlarge"}
    second = stopped("--resume", first, *TWO)
    assert cloud.sagemaker.jobs[second].instance is None
    third = stopped("--resume", second)
    assert limit(cloud, third) == longest_run(5 - 100 * HOURLY / 3600, HOURLY)


# -- what is refused beside ------------------------------------------------------------------------


def test_spot_without_checkpoints_is_refused(cloud, cli, text_file):
    words = (*LAUNCH, "--data", str(text_file), "--max-run", "3600")
    never = sets(checkpoint_seconds=3600, eval_interval=5000)
    ran = cli(*words, *never, "--spot")
    assert ran.code == 2
    assert "--spot: an interrupted job would start over" in ran.error
    assert "checkpoint_seconds=3600 with --max-run 3600" in ran.error
    assert not cloud.sagemaker.jobs
    assert cli(*words, *never).code == 0
    assert cli(*words, *sets(checkpoint_seconds=3600), "--spot").code == 0


@pytest.mark.parametrize("command", [LAUNCH, ("jobs",), (*LAUNCH, "--dry-run")])
def test_a_region_without_sagemaker_names_the_nearest_one(cloud, cli, text_file, command):
    data = ("--data", str(text_file)) if command[0] == "launch" else ()
    ran = cli("--region", "us-esat-1", *command, *data)
    assert ran.code == 2
    assert "region us-esat-1: boto3 knows no SageMaker there" in ran.error
    assert "us-east-1" in ran.error
    assert not cloud.calls


# -- jobs that exist -------------------------------------------------------------------------------


def test_status_shows_the_cost_so_far_and_at_the_end(cloud, cli, text_file, monkeypatch):
    monkeypatch.setattr("sagemaker_service.STAGES", (("Starting", 0.0), ("Training", 3600.0)))
    words = (*LAUNCH, "--data", str(text_file), "--instance-count", "2")
    job_id = cli(*words).out.strip()
    told = cli("status", job_id).out
    assert re.search(
        r"cost: +0\.\d\d USD so far \(estimated\), at 7\.09 USD per instance and hour", told
    )
    assert cli("stop", job_id).code == 0
    assert "cost:        0.40 USD, at 7.09 USD per instance and hour" in cli("status", job_id).out
    told = json.loads(cli("status", job_id, "--json").out)
    assert told["cost"] == pytest.approx(2 * 100 * HOURLY / 3600)
    assert told["price"]["per_hour"] == HOURLY


def test_a_jobs_cost_is_that_of_the_chosen_type(cloud, cli, text_file):
    cloud.sagemaker.exhausted = {"ml.g5.12xlarge"}
    types = ("--instance", "ml.g5.12xlarge,ml.g6.12xlarge")
    job_id = cli(*LAUNCH, *types, "--data", str(text_file)).out.strip()
    assert cli("wait", job_id).code == 0
    assert "cost:        0.16 USD, at 5.76 USD per instance and hour" in cli("status", job_id).out


def test_a_spot_jobs_cost_uses_the_billed_seconds(cloud, cli, text_file):
    job_id = cli(*LAUNCH, "--data", str(text_file), "--spot").out.strip()
    assert cli("wait", job_id).code == 0
    assert json.loads(cli("status", job_id, "--json").out)["cost"] == pytest.approx(
        30 * HOURLY / 3600
    )


def test_jobs_shows_costs_with_one_request_for_each_type(cloud, money, cli, home, text_file):
    for _ in range(2):
        cli(*LAUNCH, "--data", str(text_file))
    (home / "prices.json").unlink()
    money.calls.clear()
    assert re.findall(r"\d\.\d\d USD", cli("jobs").out) != []
    assert money.operations() == ["GetProducts"]


def test_jobs_are_listed_without_known_prices(cloud, money, cli, text_file):
    job_id = cli("launch", "--instance", "ml.p4d.24xlarge", "--data", str(text_file)).out.strip()
    ran = cli("jobs")
    assert ran.code == 0
    assert job_id in ran.out
    assert "the price of ml.p4d.24xlarge in us-east-1 is unknown" in ran.err
    assert "cost:" not in cli("status", job_id).out
