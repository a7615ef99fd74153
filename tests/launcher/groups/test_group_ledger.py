"""Groups of runs: their ledger, its money, and what a kill at any write leaves."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from kills import Killed, kill_at

from sm_nanogpt import Settings
from sm_nanogpt.launcher.groups.ledger import GroupLedger
from sm_nanogpt.launcher.groups.sweep import SweepLedger
from sm_nanogpt.launcher.sagemaker.cost import CeilingTooLow

MONEY = ("--max-cost", "0.6", "--max-run", "60")


@pytest.fixture
def ledger(tmp_path):
    ledger = GroupLedger(tmp_path / "group.jsonl")
    ledger.ceiling = 2.0
    return ledger


# -- money -----------------------------------------------------------------------------------------


def test_a_job_gives_back_what_it_did_not_spend(ledger):
    ledger.reserve("a", 1.5)
    assert ledger.free == 0.5
    ledger.settle("a", 0.25)
    assert ledger.spent == 0.25
    assert ledger.reserved == 0.0
    assert ledger.free == 1.75


def test_no_job_reserves_more_than_is_free(ledger):
    ledger.reserve("a", 1.5)
    with pytest.raises(CeilingTooLow, match=r"0\.50 of 2\.00 USD are free"):
        ledger.reserve("b", 0.6)
    assert list(ledger.open_reservations) == ["a"]


def test_a_job_whose_cost_is_unknown_costs_what_it_reserved(ledger):
    ledger.reserve("a", 1.5)
    ledger.settle("a", None)
    assert ledger.spent == 1.5


def test_a_job_that_was_never_sent_costs_nothing(ledger):
    ledger.reserve("a", 1.5)
    ledger.note_unsent("a")
    ledger.reserve("a", 1.0)  # the same id, once more
    assert ledger.spent == 0.0
    assert ledger.reserved == 1.0


def test_a_group_without_a_ceiling_reserves_what_it_likes(tmp_path):
    ledger = GroupLedger(tmp_path / "group.jsonl")
    ledger.reserve("a", math.inf)
    assert ledger.free == math.inf


@pytest.fixture
def killed(cloud, cli, short_text_file, home):
    """Launches a sweep of two jobs, and kills the command at a write of its ledger; returns the id
    of the sweep."""

    def launch(write: int, is_torn: bool = False) -> str:
        arguments = ("--instance", "ml.g5.xlarge", "--data", str(short_text_file))
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, write, is_torn)
            with pytest.raises(Killed):
                cli("launch", arguments, MONEY, "--sweep", "n_layer=1,2")
        [path] = (home / "sweeps").glob("*.jsonl")
        return path.stem

    return launch


@pytest.mark.parametrize(
    ("write", "is_torn"),
    [(1, False), (2, False), (3, False), (4, False), (7, False), (3, True)],
    ids=["asked", "reserved", "sent", "settled", "settled-last", "sent-in-part"],
)
def test_a_sweep_survives_a_kill_at_every_write(cloud, cli, home, killed, write, is_torn):
    """No job is lost, started twice, or paid twice; the ceiling holds for all."""
    group = killed(write, is_torn)
    assert cli("launch", "--resume", group).good

    jobs = [f"{group}-1", f"{group}-2"]
    assert sorted(cloud.sagemaker.jobs) == jobs
    ledger = SweepLedger(group, Settings(home=home))
    assert not ledger.open_reservations
    assert sorted(entry["job"] for entry in ledger.of("sent")) == jobs
    listed = json.loads(cli("jobs", "--group", group, "--json").good.out)
    assert ledger.spent == pytest.approx(sum(job["cost"] for job in listed))
    assert ledger.spent <= 0.6


def test_a_sweep_that_was_not_recorded_has_started_no_job(cloud, cli, killed):
    group = killed(1, is_torn=True)
    assert cli("launch", "--resume", group).failed(2, "was not launched from this machine")
    assert not cloud.sagemaker.jobs


def test_short_jobs_spend_what_the_first_ones_left(cloud, cli, short_text_file):
    """Each may cost 0.26 USD, and costs a few cents; together they may cost 1.29 USD."""
    arguments = ("--instance", "ml.g5.xlarge", "--data", str(short_text_file), "--seeds", "5")
    assert cli("launch", arguments, "--max-cost", "0.9", "--parallel", "3").good
    jobs = cloud.sagemaker.jobs.values()
    assert [job.status for job in jobs] == ["Completed"] * 5
    limits = {job.request["StoppingCondition"]["MaxRuntimeInSeconds"] for job in jobs}
    assert len(limits) == 1


def test_a_used_up_ceiling_does_not_leave_running_jobs(cloud, cli, home, killed):
    """A member that was never started is at the ceiling; the command waits for the others."""
    group = killed(3)  # one job was sent
    [job_id] = cloud.sagemaker.jobs
    ledger = SweepLedger(group, Settings(home=home))
    ledger.add("settled", job="another", usd=0.5)
    ran = cli("launch", "--resume", group)
    assert ran.failed(1, "--max-cost USD")
    assert f"{group}-2 is at its cost ceiling" in ran.err
    assert cloud.sagemaker.jobs[job_id].status == "Completed"


def test_deleted_jobs_still_count_for_the_ceiling(cloud, cli, short_text_file, home):
    arguments = ("--instance", "ml.g5.xlarge", "--data", str(short_text_file))
    ran = cli("launch", arguments, MONEY, "--sweep", "n_layer=1,2").good
    group = ran.out.strip()
    spent = SweepLedger(group, Settings(home=home)).spent
    assert cli("delete", f"{group}-1", "--yes").good
    assert cli("launch", "--resume", group).good
    assert f"{group}-1-try2" in cloud.sagemaker.jobs
    assert SweepLedger(group, Settings(home=home)).spent > spent


def files_below(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def test_a_deleted_sweep_leaves_no_file(cloud, cli, short_text_file, home):
    arguments = ("--instance", "ml.g5.xlarge", "--data", str(short_text_file))
    group = cli("launch", arguments, "--sweep", "n_layer=1,2").good.out.strip()
    assert f"{group}.jsonl" in files_below(home / "sweeps")
    assert cli("delete", "--group", group, "--yes").good
    assert files_below(home / "sweeps") == []
