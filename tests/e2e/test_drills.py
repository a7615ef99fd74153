"""What goes wrong on SageMaker, and what the user sees of it: state, reason, exit code."""

from __future__ import annotations

import re
from collections.abc import Callable

import launching
import pytest
from emulator import make_role
from launching import ENDLESS, Ran, sets, until

LAUNCH = ("launch", "--instance", "ml.g5.12xlarge", "--follow")
TINY = {**launching.TINY, "batch_size": 8}


def failed(cli: Callable[..., Ran], ran: Ran) -> str:
    """What `status` says of the job of a followed launch that failed."""
    assert ran.code == 1, ran.err
    told = cli("status", ran.out.strip())
    assert told.code == 0, told.err
    assert "state:       Failed" in told.out
    return told.out


def test_a_hyperparameter_that_the_container_refuses(aws, cli, text_file):
    # It has one GPU, so the launcher expects one process; the emulator shows two.
    aws.sagemaker.run.gpus = 2
    words = ("--instance", "ml.g5.xlarge", "--data", str(text_file))
    ran = cli(*LAUNCH, *words, *sets(**{**TINY, "batch_size": 7}))
    reason = (
        "ConfigError: batch_size=7 cannot be shared by 2 processes; the nearest that fit:"
        " batch_size=6 or 8"
    )
    assert f"failed: {reason};" in ran.error
    assert f"reason:      {reason}\n" in failed(cli, ran)


def test_a_crash_on_the_second_host(aws, cli, text_file):
    words = ("--data", str(text_file), "--instance-count", "2")
    ran = cli(*LAUNCH, *words, "--environment", "NANOGPT_FAULT=1:3:raise", *sets(**TINY))
    reason = "OSError: NANOGPT_FAULT asked for this error"
    assert f"failed: {reason};" in ran.error
    assert f"reason:      {reason}\n" in failed(cli, ran)


def test_text_that_was_deleted_after_its_upload(aws, s3, cli, text_file):
    uri = cli("upload-data", str(text_file)).out.strip()
    s3.delete_object(Bucket=s3.bucket, Key=uri.removeprefix(f"s3://{s3.bucket}/") + "/input.txt")
    ran = cli(*LAUNCH, *sets(**TINY))
    assert ran.code == 2
    assert f"the last upload, {uri}, is incomplete" in ran.error
    ran = cli(*LAUNCH, "--data", uri, *sets(**TINY))
    assert ran.code == 2
    assert f"{uri}: a file of this upload is missing" in ran.error
    assert not aws.sagemaker.jobs


def test_a_role_that_finds_no_text(aws, cli, text_file):
    """SageMaker looks before it takes a job, and says the same of a prefix that is empty."""
    role = make_role(aws.url, "shut-out", "s3:GetObject")
    ran = cli("--role", role, *LAUNCH, "--data", str(text_file), *sets(**TINY))
    assert ran.code == 1
    assert "No S3 objects found" in ran.error
    assert ran.out == ""
    assert not aws.sagemaker.jobs


def test_a_channel_without_a_character(aws, s3, cli):
    s3.put_object(Bucket=s3.bucket, Key="empty/input.txt", Body=b"")
    ran = cli(*LAUNCH, "--data", f"s3://{s3.bucket}/empty", *sets(**TINY))
    reason = "DataError: /opt/ml/input/data/training: no text in it"
    assert f"failed: {reason};" in ran.error
    assert f"reason:      {reason}\n" in failed(cli, ran)


def test_a_role_that_sagemaker_may_not_act_as(aws, cli, text_file):
    role = make_role(aws.url, "of-ec2", "s3:*", trusted="ec2.amazonaws.com")
    ran = cli("--role", role, *LAUNCH, "--data", str(text_file), *sets(**TINY))
    assert ran.code == 1
    assert f"Could not assume role {role}" in ran.error
    assert not aws.sagemaker.jobs


def test_a_role_that_may_not_read_the_text(aws, cli, text_file):
    role = make_role(aws.url, "blind", "s3:ListBucket", "s3:PutObject", "ecr:*", "logs:*")
    ran = cli("--role", role, *LAUNCH, "--data", str(text_file), *sets(**TINY))
    told = failed(cli, ran)
    assert "Data download failed" in told
    assert "is not authorized to perform: s3:GetObject" in told
    assert "allow the execution role to read the store" in ran.error


def test_a_role_that_may_not_delete_old_checkpoints(aws, cli, text_file):
    may = ("s3:ListBucket", "s3:GetObject", "s3:PutObject", "ecr:*", "logs:*")
    role = make_role(aws.url, "keeps-all", *may)
    values = {**ENDLESS, "batch_size": 8, "checkpoint_seconds": 1}
    words = ("--data", str(text_file), "--max-run", "7200", *sets(**values))
    ran = cli("--role", role, *LAUNCH, *words)
    assert "is not authorized to perform: s3:DeleteObject" in failed(cli, ran)


def test_a_volume_that_is_full(aws, cli, text_file):
    aws.sagemaker.run.gib = 2 << 20
    values = {**ENDLESS, "n_embd": 128, "batch_size": 8, "checkpoint_seconds": 1}
    machine = ("--instance", "ml.m5.xlarge", "--volume-size", "1")
    ran = cli(*LAUNCH, "--data", str(text_file), *machine, *sets(**values))
    reason = r" +TrainingError: .*: No space left on device \(raise --volume-size\)"
    assert re.search(f"failed:{reason};", ran.error)
    assert re.search(f"reason:{reason}\n", failed(cli, ran))


@pytest.mark.parametrize(
    ("words", "state", "remedy"),
    [
        (
            ("--max-run", "7200"),
            "MaxRuntimeExceeded",
            "raise --max-run, or --max-cost if that set the limit",
        ),
        (
            ("--spot", "--max-run", "7200", "--max-wait", "7200"),
            "MaxWaitTimeExceeded",
            "raise --max-wait, or use --on-demand",
        ),
    ],
)
def test_a_job_that_outruns_its_time(aws, s3, cli, text_file, words, state, remedy):
    values = {**ENDLESS, "batch_size": 8, "checkpoint_seconds": 1}
    launched = cli("launch", *LAUNCH[1:3], "--data", str(text_file), *words, *sets(**values))
    job_id = launched.out.strip()
    prefix = f"some/prefix/checkpoints/{job_id}/checkpoint-"
    until(lambda: s3.list_objects_v2(Bucket=s3.bucket, Prefix=prefix)["KeyCount"])
    aws.sagemaker.run.rate = 1e5
    ran = cli("wait", job_id)
    assert ran.code == 1
    assert f"stopped: {state} ({remedy})" in ran.error
    assert f"--resume {job_id}`" in ran.error
    told = cli("status", job_id).out
    assert "state:       Stopped" in told
    assert f"reason:      {state}" in told
