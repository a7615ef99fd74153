"""The script of the first day on a real account, whole, against the emulator."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import first_day
import pytest
from access import ACCOUNT
from emulator import Emulator, client
from moto.logs.models import logs_backends
from sagemaker_service import LOG_GROUP, REGION, Job, split, write_log

from sm_nanogpt.launcher.cli import run


def in_this_process(arguments: tuple[str, ...], env: Mapping[str, str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, env, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run(list(arguments))
    return code, out.getvalue(), err.getvalue()


# The emulator's hosts have no GPU, so these steps would run the last job of an earlier one again.
LIKE = {9: 2, 13: 2, 14: 4}
TWO_GPU_HOSTS = 12
LIKE_OF_LAUNCHER = {"mpirun": 4, "torchrun": 5}  # of that step, which has a job under each
# Nor do they have isolated networks, FastFile, spot capacity or several types. So jobs of these
# steps which ask for that are as the first one, and only seem to run.
REPEATED = {6, 11}
FIRST_JOB = 2
launch = first_day.Day.launch


def job_of_step(day: first_day.Day, number: int) -> str:
    """The last job of an earlier step."""
    jobs = [job_id for job_id, job in day.state["jobs"].items() if job["step"] == number]
    return jobs[-1]


def launch_unless_alike(
    aws: Emulator, day: first_day.Day, cost: float, *arguments: str, **options: Any
) -> str:
    """Launches a step's job, or takes that of the step that is alike, and only checks the words."""
    earlier = LIKE.get(day.number)
    if day.number == TWO_GPU_HOSTS:
        earlier = LIKE_OF_LAUNCHER["torchrun" if "torchrun" in arguments else "mpirun"]
    if earlier is None:
        is_repeated = day.number in REPEATED and "--data" not in arguments
        script = {"like": job_of_step(day, FIRST_JOB)} if is_repeated else {}
        aws.sagemaker.next_script = script
        return launch(day, cost, *arguments, **options)
    dry_run = ("launch", "--dry-run", *arguments, "--data", day.text, "--max-cost", str(cost))
    code, _, err = in_this_process(dry_run, day.environment)
    assert code == 0, err
    return job_of_step(day, earlier)


def repeat(aws: Emulator, earlier: Job, job: Job) -> None:
    """Lets a job seem to run, and leaves what an earlier one has left."""
    for state in ("Downloading", "Training"):
        job.enter(state)
    streams = logs_backends[ACCOUNT][REGION].groups[LOG_GROUP].streams
    for event in streams[earlier.stream("algo-1")].events:
        write_log(job, "algo-1", time.time(), event.message)
    s3 = client("s3", aws.url)
    bucket, _ = split(job.request["OutputDataConfig"]["S3OutputPath"])
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for key in [content["Key"] for content in page["Contents"]]:
            if earlier.name in key and not key.endswith("/job.json"):
                target = key.replace(earlier.name, job.name)
                s3.copy_object(Bucket=bucket, Key=target, CopySource=f"{bucket}/{key}")
    job.enter("Uploading")
    job.end("Completed")


@pytest.mark.timeout(1800)  # a minute of processor time, and nine by the clock on a busy machine
@pytest.mark.usefixtures("stacks")
def test_every_step_passes_and_nothing_is_left(aws, short_text_file, tmp_path, monkeypatch):
    for name in ("STORE", "ROLE"):
        monkeypatch.delenv(f"SM_NANOGPT_{name}")
    aws.sagemaker.rate = aws.sagemaker.run.rate = 5.0
    monkeypatch.setattr(first_day, "execute", in_this_process)
    monkeypatch.setattr(
        first_day.Day,
        "launch",
        lambda day, *arguments, **options: launch_unless_alike(aws, day, *arguments, **options),
    )
    train = aws.sagemaker.run

    def run(job: Job) -> None:
        if "like" in job.script:
            repeat(aws, aws.sagemaker.jobs[job.script["like"]], job)
        else:
            train(job)

    aws.sagemaker.run = run
    buckets = client("s3", aws.url).list_buckets()["Buckets"]
    users = client("iam", aws.url).list_users()["Users"]  # of other tests
    arguments = ["--emulator", "--yes", "--directory", str(tmp_path / "day")]
    code = first_day.main([*arguments, "--text", str(short_text_file)])
    transcript = (tmp_path / "day/transcript.txt").read_text()
    assert code == 0, transcript[-5000:]
    state = json.loads((tmp_path / "day/state.json").read_text())
    assert len(state["passed"]) == len(first_day.STEPS)
    assert not aws.sagemaker.jobs
    assert client("s3", aws.url).list_buckets()["Buckets"] == buckets
    assert client("iam", aws.url).list_users()["Users"] == users
