"""Deleting jobs."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from jobs import copy_job, jobs_in
from launching import tree

from sm_nanogpt import Request, Settings
from sm_nanogpt.launcher.cli.delete import ends_of
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.groups.sweep import Sweep, SweepLedger
from sm_nanogpt.launcher.launching.names import ledger_path


def test_delete_removes_job_and_fetched_model(job, cli):
    assert cli("fetch-and-sample", job.job_id, "--max-new-tokens", "1").code == 0
    ran = cli("delete", "latest", "--yes")
    assert ran.code == 0
    assert ran.out == ""
    assert f"file://{job.directory}\n" in ran.err
    assert not any(job.job_id in name for name in tree(job.home))
    assert json.loads(cli("jobs", "--json").out) == []


def test_keep_model_fetches_it_first(job, cli):
    ran = cli("delete", job.job_id, "--keep-model", "--yes")
    assert ran.code == 0, ran.err
    assert (Path(ran.out.strip()) / "model.safetensors").exists()
    assert not job.directory.exists()
    assert cli("status", job.job_id).failed(1, f"; its model is in {ran.out.strip()}")
    sampled = cli("sample", job.job_id, "--max-new-tokens", "1").good
    assert f"model: {ran.out.strip()}\n" in sampled.err


def test_delete_says_what_the_name_of_a_resumed_job_means_now(job, cli):
    earlier = copy_job(job, "sm-nanogpt-20200101-000000-abcdef", name="plays")
    later = copy_job(job, "sm-nanogpt-20200102-000000-abcdef", name="plays", resume=earlier)
    assert f"delete {earlier}`" in cli("delete", "plays", "--yes").good.err
    assert later not in jobs_in(job.home)
    assert "means" not in cli("delete", "plays", "--yes").good.err


def test_delete_of_a_sweep_takes_all_tries_and_its_record(job, home, cli):
    group = "sm-nanogpt-20260101-000000-abcdef"
    for name in ("1", "1-try2", "2"):
        shutil.copytree(job.directory, home / "jobs" / f"{group}-{name}")
    settings = Settings(home=home)
    sweep = Sweep(job=Request(instance="local"), members=[{}, {}], parallel=1)
    SweepLedger(group, settings).record(sweep)
    assert cli("delete", "--group", "abcdef", "--yes").code == 0
    assert [path.name for path in (home / "jobs").iterdir()] == [job.job_id]
    assert not ledger_path(group, settings).exists()
    ran = cli("delete", "--yes")
    assert ran.code == 2
    assert "JOB-ID" in ran.error


def test_a_job_of_a_sweep_is_told_by_the_end_of_its_id():
    sweep = "sm-nanogpt-20260101-000000-abcdef"
    assert ends_of([f"{sweep}-1", f"{sweep}-12"]) == "abcdef-1, abcdef-12"


@pytest.mark.parametrize("room", ["jobs", "models"])
def test_delete_does_not_follow_a_link(job, cli, tmp_path, room):
    elsewhere, link = tmp_path / "elsewhere", job.home / room / job.job_id
    shutil.copytree(job.directory, elsewhere)
    shutil.rmtree(link, ignore_errors=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(elsewhere)
    files_before = tree(elsewhere)
    ran = cli("delete", job.job_id, "--yes")
    assert ran.code == 1
    assert f"{link} is a link" in ran.error
    assert tree(elsewhere) == files_before
    link.unlink()
    if room == "models":  # a link among the files of a job
        (job.directory / "link").symlink_to(elsewhere)
        assert cli("delete", job.job_id, "--yes").code == 0
        assert tree(elsewhere) == files_before


def test_delete_asks_first(job, cli, monkeypatch):
    ran = cli("delete", job.job_id)
    assert ran.code == 2
    assert "--yes" in ran.error
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    assert cli("delete", job.job_id).code == 1
    assert job.directory.exists()


def test_without_a_model_there_is_none_to_keep(job, cli):
    checkpoints = job.directory.glob("hosts/algo-1/checkpoints/*.safetensors")
    for path in (job.directory / "output/model.tar.gz", *checkpoints):
        path.unlink()
    ran = cli("delete", job.job_id, "--keep-model", "--yes")
    assert ran.failed(1, "neither a model nor a checkpoint")
    assert job.directory.exists()


def test_delete_with_one_unknown_job_deletes_nothing(job, cli):
    ran = cli("delete", job.job_id, "nope", "--yes")
    assert ran.code == 1
    assert "nope" in ran.error
    assert job.directory.exists()


def test_a_running_job_is_not_deleted(job, cli, monkeypatch):
    monkeypatch.setattr("sm_nanogpt.launcher.description.JobDescription.is_running", True)
    assert "stop it first" in cli("delete", job.job_id, "--yes").error
    assert job.directory.exists()


def test_an_interrupted_deletion_leaves_the_job_listed(job, cli, monkeypatch):
    rmtree, removed = shutil.rmtree, list[Path]()

    def interrupted(path: Path) -> None:
        removed.append(path)
        if len(removed) == 3:
            raise KeyboardInterrupt
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    assert cli("delete", job.job_id, "--yes").code == 1
    assert cli("status", job.job_id).code == 0
    monkeypatch.undo()


def test_a_job_on_sagemaker_loses_prefixes_and_entry(cloud, s3, cli, short_text_file):
    launch = ("launch", "--instance", "ml.g5.xlarge", "--data", str(short_text_file))
    gone, other = cli(launch).out.strip(), cli(launch).out.strip()
    for job_id in (gone, other):
        cli("wait", job_id)
        storage.write_bytes(f"s3://{s3.bucket}/some/prefix/checkpoints/{job_id}/a", b"a")
    ran = cli("delete", gone, "--yes")
    assert ran.code == 0, ran.err
    names = storage.list_files(f"s3://{s3.bucket}/some/prefix")
    assert {name.split("/")[1] for name in names if not name.startswith("data/")} == {other}
    assert [job["job_id"] for job in json.loads(cli("jobs", "--json").out)] == [other]


def test_a_job_with_a_warm_pool_keeps_its_files(cloud, s3, cli, short_text_file):
    arguments = (
        "--instance",
        "ml.g5.xlarge",
        "--data",
        str(short_text_file),
        "--keep-alive",
        "600",
    )
    job_id = cli("launch", arguments).out.strip()
    cli("wait", job_id)
    files_before = storage.list_files(f"s3://{s3.bucket}")
    ran = cli("delete", job_id, "--yes")
    assert ran.code == 1
    assert "warm pool" in ran.error
    assert storage.list_files(f"s3://{s3.bucket}") == files_before
    cloud.sagemaker.jobs[job_id].rate = 1e6  # the pool has ended
    assert cli("delete", job_id, "--yes").code == 0


def test_a_job_of_which_no_pool_is_reported_can_be_deleted(launch, cli):
    """AWS keeps the machines of a job only if it was no error of its own that ended it."""
    job_id = launch("--keep-alive", "1", reason="InternalServerError: try again")
    cli("wait", job_id)
    time.sleep(1)
    assert cli("delete", job_id, "--yes").code == 0
