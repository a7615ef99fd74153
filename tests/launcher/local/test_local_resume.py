"""Resuming jobs on this machine."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import launching
import pytest
from jobs import change, jobs_in, running
from launching import Finished

from sm_nanogpt import Request
from sm_nanogpt.launcher.launching.draft import Draft


def set_hyperparameters(job: Finished, **values: Any) -> None:
    """Makes a job one that was launched with these hyperparameters, too."""
    file = job.directory / "job.json"
    hyperparameters = json.loads(file.read_text())["hyperparameters"]
    change(file, hyperparameters={**hyperparameters, **values})


def taken_over(job: Finished, earlier: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The hyperparameters that resume a job, which was launched with other ones."""
    set_hyperparameters(job, **earlier)
    draft = Draft(Request(resume=job.job_id, **options), launching.settings_of(job.home))
    draft.take_over_earlier_job()
    return draft.request.hyperparameters


def test_a_resumed_job_keeps_the_values_of_its_launch(job, caplog):
    assert taken_over(job, {"momentum": 0.5})["momentum"] == 0.5
    adamw = {"optimizer": "adamw", "learning_rate": 0.002}
    assert taken_over(job, adamw, preset="baby")["learning_rate"] == 0.002
    caplog.set_level("INFO", "sm_nanogpt")
    assert "gone" not in taken_over(job, {"gone": 1}, hyperparameters={"max_steps": 15})
    (line,) = caplog.messages
    assert "has no gone;" in line


@pytest.mark.parametrize(
    ("arguments", "code", "fact"),
    [
        ("", 2, "max_steps=10: "),
        ("--set max_steps=5", 2, "`--set max_steps=N` with N above 10"),
        ("--set n_embd=64", 2, "n_embd (from 32 to 64)"),
        ("--set max_steps=20 --processes-per-instance 3", 2, "batch_size=3 or 6"),
        ("--preset auto", 2, "--preset auto: is for a new run"),
        ("--instance ml.g5.xlarge", 2, "which ran on local"),
    ],
)
def test_resuming_with_unfit_options_starts_nothing(job, resume, arguments, code, fact):
    assert resume(arguments.split()).failed(code, fact)
    assert jobs_in(job.home) == [job.job_id]


def test_a_dry_run_of_a_resumed_job_says_where_it_would_end(job, resume):
    ran = resume("--set", "max_steps=15", "--dry-run").good
    assert "go on to step 15 in 1 process" in ran.err
    assert jobs_in(job.home) == [job.job_id]


def test_the_model_of_the_last_generation_starts_a_new_run(job, resume):
    set_hyperparameters(job, generations=2, max_steps=5)
    assert resume().failed(2, f"`sm-nanogpt launch --init-from {job.job_id}`")
    assert jobs_in(job.home) == [job.job_id]


def test_a_job_without_a_checkpoint_cannot_be_resumed(job, resume):
    change(job.directory / "state.json", status="Stopped")
    shutil.rmtree(job.directory / "hosts/algo-1/checkpoints")
    ran = resume()
    assert ran.code == 1
    assert re.search(rf"{job.job_id} .*Stopped.* left n.* checkpoint", ran.error)
    assert jobs_in(job.home) == [job.job_id]


def test_a_running_job_cannot_be_resumed(home, cli):
    with running(home / "jobs/a"):
        ran = cli("launch", "--instance", "local", "--resume", "a")
    assert ran.failed(1, "`sm-nanogpt stop a`")
    assert jobs_in(home) == ["a"]


def test_a_job_with_a_damaged_record_cannot_be_resumed(job, resume):
    file = job.directory / "job.json"
    change(file, job={**json.loads(file.read_text())["job"], "field_of_tomorrow": 1})
    ran = resume()
    assert ran.code == 1
    assert ran.error.startswith(f"{file} is damaged")


def test_a_job_that_failed_after_its_last_step_can_be_resumed(job, resume):
    change(job.directory / "state.json", status="Failed")
    ran = resume().good
    assert (job.home / "jobs" / ran.out.strip() / "output/model.tar.gz").exists()
