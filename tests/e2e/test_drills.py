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
    status = cli("status", ran.out.strip()).good.out
    assert "state:       Failed" in status
    return status


def test_text_that_was_deleted_after_its_upload(aws, s3, cli, text_file):
    uri = cli("upload-data", text_file).out.strip()
    s3.delete_object(Bucket=s3.bucket, Key=uri.removeprefix(f"s3://{s3.bucket}/") + "/input.txt")
    for options, message in (((), "incomplete"), (("--data", uri), "is missing")):
        assert cli(LAUNCH, options, sets(**TINY)).failed(2, uri, message)
    assert not aws.sagemaker.jobs


@pytest.mark.parametrize(
    ("may", "trusted", "fact"),
    [
        # SageMaker looks before it takes a job, and says the same of a prefix that is empty.
        ("s3:GetObject", "sagemaker.amazonaws.com", "No S3 objects found"),
        ("s3:*", "ec2.amazonaws.com", "Could not assume role"),
    ],
)
def test_a_role_that_sagemaker_cannot_use(aws, cli, text_file, may, trusted, fact):
    role = make_role(aws.url, f"of-{trusted}", may, trusted=trusted)
    ran = cli("--role", role, LAUNCH, "--data", text_file, sets(**TINY))
    assert ran.failed(1, fact)
    assert ran.out == ""
    assert not aws.sagemaker.jobs


def test_a_role_that_may_not_read_the_text(aws, cli, text_file):
    role = make_role(aws.url, "blind", "s3:ListBucket", "s3:PutObject", "ecr:*", "logs:*")
    ran = cli("--role", role, LAUNCH, "--data", text_file, sets(**TINY))
    status = failed(cli, ran)
    assert "Data download failed" in status
    assert "is not authorized to perform: s3:GetObject" in status
    assert "allow the execution role to read the store" in ran.error


@pytest.mark.usefixtures("containers")
def test_a_volume_that_is_full(aws, cli, text_file):
    aws.sagemaker.run.gib = 2 << 20
    values = {**ENDLESS, "n_embd": 128, "batch_size": 8, "checkpoint_seconds": 1}
    machine = ("--instance", "ml.m5.xlarge", "--volume-size", "1")
    ran = cli(LAUNCH, "--data", text_file, machine, sets(**values))
    reason = r" +TrainingError: .*: no space left on device \(raise --volume-size\)"
    assert re.search(f"failed:{reason};", ran.error)
    assert re.search(f"reason:{reason}\n", failed(cli, ran))


def test_a_job_that_outruns_its_time(aws, s3, cli, text_file):
    options = ("--spot", "--max-run", "7200", "--max-wait", "7200", "--data", str(text_file))
    values = {**ENDLESS, "batch_size": 8, "checkpoint_seconds": 1}
    job_id = cli(LAUNCH[:-1], options, sets(**values)).out.strip()
    prefix = f"some/prefix/checkpoints/{job_id}/checkpoint-"
    until(lambda: s3.list_objects_v2(Bucket=s3.bucket, Prefix=prefix)["KeyCount"])
    aws.sagemaker.run.rate = 1e5
    reason = "stopped: MaxWaitTimeExceeded (raise --max-wait, or use --on-demand)"
    assert cli("wait", job_id).failed(1, reason, f"--resume {job_id}`")
    assert "state:       Stopped" in cli("status", job_id).out
