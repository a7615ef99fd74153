"""The script of the first day on a real account, whole, against the emulator."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import cloudformation_service
import first_day
import pytest
from emulator import client

from sm_nanogpt.launcher.cli import run
from sm_nanogpt.launcher.sagemaker import deploy


def in_this_process(arguments: tuple[str, ...], env: Mapping[str, str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, env, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run(list(arguments))
    return code, out.getvalue(), err.getvalue()


# The emulator's hosts have no GPU, so these steps would run the job of an earlier one again.
LIKE = {9: 2, 13: 2, 14: 12}
launch = first_day.Day.launch


def launch_unless_alike(day: first_day.Day, cost: float, *arguments: str, **options: Any) -> str:
    """Launches a step's job, or takes that of the step that is alike, and only checks the words."""
    if day.number not in LIKE:
        return launch(day, cost, *arguments, **options)
    dry_run = ("launch", "--dry-run", *arguments, "--data", day.text, "--max-cost", str(cost))
    code, _, err = in_this_process(dry_run, day.environment)
    assert code == 0, err
    jobs = day.state["jobs"].items()
    return next(job_id for job_id, job in jobs if job["step"] == LIKE[day.number])


@pytest.mark.timeout(1800)  # two minutes of processor time, and nine by the clock on a busy machine
def test_every_step_passes_and_nothing_is_left(aws, text_file, tmp_path, monkeypatch):
    for name in ("STORE", "ROLE"):
        monkeypatch.delenv(f"SM_NANOGPT_{name}")
    monkeypatch.setitem(deploy.WAIT, "Delay", 0.01)
    aws.sagemaker.rate = aws.sagemaker.run.rate = 5.0
    monkeypatch.setattr(first_day, "execute", in_this_process)
    monkeypatch.setattr(first_day.Day, "launch", launch_unless_alike)
    buckets = client("s3", aws.url).list_buckets()["Buckets"]
    users = client("iam", aws.url).list_users()["Users"]  # of other tests
    arguments = ["--emulator", "--yes", "--directory", str(tmp_path / "day")]
    with cloudformation_service.repaired():
        code = first_day.main([*arguments, "--text", str(text_file)])
    transcript = (tmp_path / "day/transcript.txt").read_text()
    assert code == 0, transcript[-5000:]
    state = json.loads((tmp_path / "day/state.json").read_text())
    assert len(state["passed"]) == len(first_day.STEPS)
    assert not aws.sagemaker.jobs
    assert client("s3", aws.url).list_buckets()["Buckets"] == buckets
    assert client("iam", aws.url).list_users()["Users"] == users
