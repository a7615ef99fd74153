"""`jobs` and `status`: a table of jobs, and the facts of one."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from jobs import NEWER


def test_status_shows_state_step_loss_and_paths(job, cli):
    shown = cli("status", job.job_id).out
    model = r"file:///\S+/model\.tar\.gz"
    for line in ("state: +Completed", "step: +10/10", r"best loss: +\d\.\d{4}", f"model: +{model}"):
        assert re.search(f"^{line}$", shown, re.MULTILINE), line
    status = json.loads(cli("status", job.job_id, "--json").out)
    assert status["status"] == "Completed"
    assert status["hyperparameters"]["n_embd"] == 32
    assert status["metrics"]["step"] == status["hyperparameters"]["max_steps"] == 10
    assert status["created"] <= status["started"] <= status["ended"]
    assert status["best_loss"] == status["metrics"]["best_loss"]


def test_jobs_are_listed_newest_first(job, newer, cli):
    rows = cli("jobs").table
    assert list(rows[0])[:2] == ["JOB-ID", "STATE"]
    assert [row["JOB-ID"] for row in rows] == [NEWER, job.job_id]
    descriptions = json.loads(cli("jobs", "--json").out)
    assert [description["job_id"] for description in descriptions] == [NEWER, job.job_id]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("job.json", '{"job": {}}'),
        ("state.json", "{"),
    ],
)
def test_an_unreadable_job_hides_no_other(job, newer, cli, file, content):
    broken = newer / file
    broken.write_text(content)
    beside_another = cli("jobs")
    shutil.rmtree(job.directory)
    alone = cli("jobs")
    assert [row["JOB-ID"] for row in beside_another.table] == [job.job_id]
    assert alone.table == []
    for ran in (beside_another, alone):
        assert ran.code == 0
        assert ran.err.count("\n") == 1
        assert ran.err.startswith(f"job {NEWER} is left out: {broken} is damaged")
    assert cli("status", NEWER).failed(1, f"{broken} is damaged")


def test_an_empty_list_of_jobs_says_how_to_begin(cli):
    ran = cli("jobs")
    assert ran.code == 0
    assert ran.out == ""
    assert "next: sm-nanogpt upload-data FILE" in ran.err
    assert json.loads(cli("jobs", "--json").out) == []
    assert cli("status", "latest").failed(1, "sm-nanogpt upload-data FILE", "AWS_REGION")
    assert cli("jobs", "--group", "latest").failed(2, "--sweep")


@pytest.mark.parametrize(
    "arguments",
    [
        "status latest",
        "logs latest",
        "report latest",
        "stop latest",
        "delete latest",
        "fetch-and-sample latest",
        "chat latest",
        "play latest",
        "eval latest input.txt",
        "launch --resume latest",
        "launch --instance local --init-from latest",
        "upload-data input.txt --tokenizer latest",
    ],
)
def test_without_a_job_latest_says_the_first_step(cli, short_text_file, arguments):
    ran = cli(arguments.split())
    assert ran.failed(1, "you have no jobs yet")
    assert ran.error.endswith("; next: sm-nanogpt upload-data FILE")
    assert cli("upload-data", short_text_file).good
    ran = cli(arguments.split())
    assert ran.failed(1, "you have no jobs yet")
    assert ran.error.endswith("; next: sm-nanogpt launch --instance local --preset auto")


@pytest.mark.parametrize("arguments", ["status latest", "jobs"])
def test_a_refused_store_leaves_upload_data_as_first_step(
    cloud, cli, short_text_file, arguments, monkeypatch
):
    assert cli("upload-data", short_text_file).good
    for method in ("GET", "HEAD"):
        monkeypatch.setitem(cloud.refuse, method, ("AccessDenied", "no", 403))
    ran = cli(arguments.split())
    assert ran.err.endswith("; next: sm-nanogpt upload-data FILE\n")


def test_a_job_is_found_by_a_unique_part_of_its_id(job, cli):
    for part in (job.job_id[:14], job.job_id[-6:], "latest"):
        ran = cli("status", part).good
        assert f"job:         {job.job_id}\n" in ran.out
    other = f"{job.job_id[:-6]}ffffff"
    shutil.copytree(job.directory, job.directory.parent / other)
    ran = cli("status", "sm-nanogpt-2")
    assert ran.failed(2, "matches 2 jobs: ", job.job_id, other)


def test_the_list_of_jobs_shows_losses_and_changes(job, cli):
    (row,) = cli("jobs").table
    assert re.fullmatch("input-[0-9a-f]{12}", row["DATA"])
    assert row["SETTINGS"].startswith("cpu n_layer=1 n_embd=32 ")
    assert "COST" not in row  # no job has one
    rows = [{"step": 5, "val_loss": 2.0, "best_loss": 2.0, "bits_per_byte": 1.5}]
    rows += [{"step": 10, "val_loss": 4.0, "best_loss": 2.0, "bits_per_byte": 3.0}]
    curve = job.directory / "hosts/algo-1/checkpoints/metrics-00000001.jsonl"
    curve.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = cli("jobs").table
    assert row["BEST LOSS"] == "2.0000"
    assert row["BITS/BYTE"] == "1.5000"
