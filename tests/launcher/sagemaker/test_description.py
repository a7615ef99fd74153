"""What SageMaker says of a job, in the words of this project."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import launching
import pytest
from sagemaker_jobs import LAUNCH, TAGGED

from sm_nanogpt import JobDescription
from sm_nanogpt.launcher.cli.remedies import reason_of
from sm_nanogpt.launcher.sagemaker.description import describe_job

TWO = ("--instance", "ml.g5.12xlarge,ml.g6.12xlarge")


def test_a_failed_job_shows_its_reason_and_its_last_lines(cloud, cli, short_text_file):
    log = [(0.1, "algo-1", f"{TAGGED}one"), (0.2, "algo-1", f"{TAGGED}DataError: no text")]
    reason = "AlgorithmError: DataError: no text [Exception]"
    cloud.sagemaker.next_script = {"reason": reason, "log": log}
    ran = cli(LAUNCH, "--data", short_text_file, "--follow")
    assert ran.code == 1
    assert "one" in ran.err.splitlines()
    assert "failed: DataError: no text;" in ran.error
    output = cli("status", ran.out.strip()).out
    assert "state:       Failed" in output
    assert output.endswith("  one\n  DataError: no text\n")


def described(**values: Any) -> JobDescription:
    """A failed job, as SageMaker describes it, with other values."""
    raw = {"TrainingJobName": "id", "CreationTime": datetime.now(UTC), "ResourceConfig": {}}
    return describe_job({**raw, "TrainingJobStatus": "Failed", **values}, None)


def wrapped(message: str) -> str:
    """What the toolkit makes of an error."""
    return f"AlgorithmError: ExecuteUserScriptError:\nExitCode 1\n{message}\nCommand, exit code: 1"


def test_a_job_reports_the_scripts_own_failure():
    cases = [
        (wrapped('ErrorMessage "DataError: no text [Exception]\n ----"'), "DataError: no text"),
        (wrapped('ErrorMessage "DataError: no text"'), "DataError: no text"),
        (wrapped('ErrorMessage "TrainingError: CUDA [RuntimeError]"'), "TrainingError: CUDA"),
        (wrapped('ErrorMessage "----\n"\nExtraInfo "OutOfMemory: killed"'), "OutOfMemory: killed"),
        (wrapped('ErrorMessage ""'), " ".join(wrapped('ErrorMessage ""').split())),
        # What train.py leaves.
        ("AlgorithmError: DataError: no text [Exception], exit code: 1", "DataError: no text"),
        ("AlgorithmError: OSError: no disk, exit code: 1", "OSError: no disk"),
    ]
    for message, reason in cases:
        assert described(FailureReason=message).failure_reason == reason


def test_an_interruption_is_a_reason_once_the_job_has_ended():
    for state, second, message in (
        ("InProgress", "Interrupted", None),
        ("Stopped", "MaxWaitTimeExceeded", "reclaimed"),
    ):
        values = {"TrainingJobStatus": state, "SecondaryStatus": second}
        assert described(**values, FailureReason="reclaimed").failure_reason == message


@pytest.mark.parametrize(("status", "uri"), [("Completed", "s3://b/model"), ("Stopped", None)])
def test_a_job_has_a_model_once_it_has_completed(status, uri):
    artifacts = {"S3ModelArtifacts": "s3://b/model"}
    job = described(TrainingJobStatus=status, ModelArtifacts=artifacts)
    assert job.model_uri == uri


@pytest.mark.parametrize(
    ("instance", "remedy"), [("ml.m5.xlarge", "--volume-size"), ("ml.g5.12xlarge", "--instance")]
)
def test_advice_about_a_full_disk_depends_on_the_instance(instance, remedy):
    full = "TrainingError: No space left on device"
    job = described(FailureReason=full, ResourceConfig={"InstanceType": instance})
    assert re.findall(r"--[\w-]+", reason_of(job) or "") == [remedy]


def test_status_shows_all_types_until_one_is_chosen(cloud, cli, launch):
    cloud.sagemaker.exhausted = {"ml.g5.12xlarge", "ml.g6.12xlarge"}
    job_id = launch(TWO)
    launching.until(lambda: cloud.sagemaker.jobs[job_id].secondary == "Pending")
    waiting = cli("status", job_id)
    assert "state:       InProgress (Pending)\n" in waiting.out
    assert "instance:    ml.g5.12xlarge,ml.g6.12xlarge\n" in waiting.out
    assert "message:     Insufficient capacity error" in waiting.out
    assert "cost:" not in waiting.out
    assert "is not known" not in waiting.err
    assert "ml.g5.12xlarge,ml.g6.12xlarge" in cli("jobs").out
    cloud.sagemaker.exhausted = {"ml.g5.12xlarge"}
    assert cli("wait", job_id).code == 0
    assert "instance:    ml.g6.12xlarge\n" in cli("status", job_id).out
    assert [job["instance"] for job in json.loads(cli("jobs", "--json").out)] == ["ml.g6.12xlarge"]


@pytest.mark.parametrize("arguments", ["wait {}", "logs {} --follow"])
def test_a_pending_job_says_why_and_ends_after_a_day(cloud, cli, launch, monkeypatch, arguments):
    describe, looks = cloud.sagemaker.DescribeTrainingJob, iter(range(1000))

    def described(body: dict[str, Any]) -> Any:
        if next(looks) == 4:
            cloud.sagemaker.rate = 1e9  # the day is over
        return describe(body)

    monkeypatch.setattr(cloud.sagemaker, "DescribeTrainingJob", described)
    cloud.sagemaker.exhausted = {"ml.g5.12xlarge"}
    job_id = launch()
    ran = cli(arguments.format(job_id).split())
    assert ran.err.count(f"job {job_id} is InProgress (Pending): Insufficient capacity error") == 1
    assert cli("wait", job_id).failed(1, "--instance TYPE,TYPE")
    assert "reason:      CapacityError: " in cli("status", job_id).out
