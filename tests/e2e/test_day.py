"""The script of the first day on a real account, whole, against the emulator."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Mapping
from unittest.mock import patch

import cloudformation_service
import first_day
import training_runs
from emulator import client

from launcher.cli import run
from launcher.sagemaker import deploy


def in_this_process(words: tuple[str, ...], env: Mapping[str, str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, env, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run(list(words))
    return code, out.getvalue(), err.getvalue()


def test_every_step_passes_and_nothing_is_left(aws, text_file, tmp_path, monkeypatch):
    for name in ("STORE", "ROLE"):
        monkeypatch.delenv(f"SM_NANOGPT_{name}")
    monkeypatch.setitem(deploy.WAIT, "Delay", 0.01)
    monkeypatch.setattr("launcher.sagemaker.backend.QUIET_SECONDS", 0.3)
    for name in ("START_SECONDS", "GRACE_SECONDS"):  # waiting proves nothing here
        monkeypatch.setattr(training_runs, name, 1.0)
    aws.sagemaker.rate = aws.sagemaker.run.rate = 5.0
    monkeypatch.setattr(first_day, "execute", in_this_process)
    buckets = client("s3", aws.url).list_buckets()["Buckets"]
    users = client("iam", aws.url).list_users()["Users"]  # of other tests
    words = ["--emulator", "--yes", "--directory", str(tmp_path / "day")]
    with cloudformation_service.repaired():
        code = first_day.main([*words, "--text", str(text_file)])
    transcript = (tmp_path / "day/transcript.txt").read_text()
    assert code == 0, transcript[-5000:]
    state = json.loads((tmp_path / "day/state.json").read_text())
    assert len(state["passed"]) == len(first_day.STEPS)
    assert not aws.sagemaker.jobs
    assert client("s3", aws.url).list_buckets()["Buckets"] == buckets
    assert client("iam", aws.url).list_users()["Users"] == users
