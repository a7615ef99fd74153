"""What SageMaker's API would refuse is refused before anything is sent."""

from __future__ import annotations

import os
import shlex
from typing import Any

import pytest
from launching import edited
from sagemaker_jobs import LAUNCH

from sm_nanogpt import InputError, Request
from sm_nanogpt.launcher import limits


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ("--max-wait 100", "--max-wait: is for spot"),
        ("--volume-size 500", "ml.g5.12xlarge has local disks"),
        ("--environment 'NCCL_DEBUG=INFO; reboot'", "NCCL_DEBUG='INFO; reboot'"),
    ],
    ids=["request", "check", "parts"],
)
def test_a_request_aws_would_refuse_is_not_sent(cloud, s3, cli, short_text_file, arguments, fact):
    """Whether the request says so, a check of the job, or the making of its parts."""
    assert cli(LAUNCH, "--data", short_text_file, shlex.split(arguments)).failed(2, fact)
    assert not cloud.calls
    assert "Contents" not in s3.list_objects_v2(Bucket=s3.bucket)


def refusal(**fields: Any) -> InputError:
    """Why a request for SageMaker cannot be."""
    with pytest.raises(InputError) as caught:
        Request(**{"instance": "ml.g5.12xlarge", **fields})
    return caught.value


@pytest.mark.parametrize(
    ("field", "fields", "fact"),
    [
        ("max_wait", {"spot": True, "max_wait": 3599}, "at least the time limit, 3600"),
        ("keep_alive", {"spot": True, "keep_alive": 600}, "no warm pool of spot"),
        ("spot", {"spot": True, "instance": "ml.g5.xlarge,ml.g6.xlarge"}, "takes one type"),
        ("subnets", {"subnets": ["subnet-1"]}, "need each other"),
        ("security_group_ids", {"security_group_ids": ["sg-1"]}, "need each other"),
        ("environment", {"environment": {"SM_HOSTS": "[]"}}, "SageMaker sets it"),
        ("tags", {"tags": {"AWS:a": "b"}}, "not for users"),
        ("tags", {"tags": {"sm-nanogpt": "x"}}, "not for users"),
        ("pytorch_version", {"image_uri": "mine:1", "pytorch_version": "2.8.0"}, "names another"),
        ("processes_per_instance", {"processes_per_instance": 2}, "is for local"),
    ],
)
def test_fields_that_sagemaker_does_not_take_are_refused(field, fields, fact):
    error = refusal(**fields)
    assert error.field == field
    assert fact in str(error)


@pytest.mark.parametrize(
    ("instance", "fact"),
    [
        ("ml.p6e-gb200.36xlarge", "Arm"),
        ("ml.g5.12xlrge", "did you mean ml.g5.12xlarge"),
        ("ml.g5.xlarge,local", "local cannot be combined"),
        ("ml.g5.xlarge,ml.m5.xlarge", "with and without GPUs"),
        ("ml.g5.xlarge,ml.trn1.2xlarge", "Neuron"),
    ],
)
def test_an_instance_that_no_job_can_have_is_refused(instance, fact):
    assert fact in str(refusal(instance=instance))


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ("--set batch_size=12 --instance ml.g5.xlarge,ml.g5.48xlarge", "8 processes"),
        ("--instance ml.g5.xlarge,ml.p3.8xlarge", "the V100 of ml.p3.8xlarge"),
        ("--volume-size 9 --instance ml.m5.xlarge,ml.r5d.large", "ml.r5d.large has local disks"),
        ("--preset quick", "`--set device=auto`"),
        ("--preset auto --data s3://bucket/some", "preset=auto and a size need"),
    ],
)
def test_a_dry_run_refuses_a_job_that_cannot_train(rehearse, arguments, fact):
    ran = rehearse(shlex.split(arguments))
    assert ran.failed(2, fact)
    assert ran.out == ""


@pytest.mark.parametrize(
    ("field", "value", "fact"),
    [
        ("subnets", [f"subnet-{n}" for n in range(17)], "has 17 entries"),
        ("security_group_ids", ["sg 1"], "=sg 1: must match"),
        ("image_uri", "x" * 256, "has 256 characters"),
        ("environment", {"a-b": "c"}, "=a-b: must match"),
        ("environment", {"A": "x" * 513}, "=A: its value has 513 characters"),
        ("tags", {"a;b": "c"}, "=a;b: must match"),
        ("kms_key", "my key!", "=my key!: must match"),
        ("instance", ",".join(["ml.g5.xlarge"] * 6), "has 6 entries"),
    ],
)
def test_values_outside_of_the_limits_of_aws_are_refused(field, value, fact):
    network = {"subnets": ["subnet-1"], "security_group_ids": ["sg-1"]}
    fields = network if field in network else {}
    error = refusal(**{**fields, field: value})
    assert error.field == field
    assert fact in str(error)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ([word for n in range(48) for word in ("--tag", f"A{n}=x")], "--tag: has 51 entries"),
        (["--data", f"s3://bucket/{'x' * 1024}"], "--data s3://bucket/xxx"),
        (["--validation", f"s3://bucket/some/prefixes/{'x' * 1024}"], "--validation s3://bucket"),
    ],
)
def test_a_dry_run_refuses_what_is_too_long_in_all(rehearse, arguments, fact):
    """Fields that fit alone, with what is added to them."""
    ran = rehearse(arguments)
    assert ran.failed(2, fact, "SageMaker takes at most")
    assert ran.out == ""


@pytest.mark.parametrize(
    ("variable", "value", "fact"),
    [
        ("SM_NANOGPT_ROLE", f"arn:aws:iam::111122223333:role/{'r' * 2048}", "--role arn:aws:iam"),
        ("SM_NANOGPT_KMS_KEY", "a key", "--kms-key a key: must match"),
        ("SM_NANOGPT_TAGS", '{"a": "#"}', "from the settings: tags=a: its value must match"),
    ],
)
def test_a_setting_that_aws_would_refuse_is_named(rehearse, monkeypatch, variable, value, fact):
    monkeypatch.setenv(variable, value)
    assert rehearse().failed(2, fact)


def test_a_store_whose_keys_would_be_too_long_is_named(home, cli, short_text_file):
    location = ("--region", "us-east-1", "--store", f"s3://bucket/{'x' * 980}")
    ran = cli(location, LAUNCH, "--data", short_text_file, "--dry-run")
    assert ran.failed(2, "--store s3://bucket/xxx", "SageMaker takes at most 1,024")


def test_the_longest_that_aws_takes_is_taken(dry):
    arguments = ["--environment", f"A={'x' * 512}"]
    for n in range(47):
        arguments += ["--tag", f"{n}{'k' * 126}={'v' * 256}"]
    for n in range(16):
        arguments += ["--subnet", f"subnet-{n}"]
    for n in range(5):
        arguments += ["--security-group", f"sg-{n}"]
    request = dry(arguments)
    assert len(request["Tags"]) == 50
    assert len(request["VpcConfig"]["Subnets"]) == 16


def test_a_secret_that_is_too_long_is_not_printed():
    assert "hunter2" not in str(refusal(environment={"KEY": "hunter2" * 80}))


def test_a_value_that_is_not_utf8_says_so():
    assert "is not UTF-8" in str(refusal(environment={"A": os.fsdecode(b"caf\xe9")}))


def test_what_an_edited_folder_sends_too_much_of_is_named(rehearse, tmp_path):
    fields = "".join(f'    more_{n}: int = hyperparameter(0, "one more")\n' for n in range(100))
    folder = edited(tmp_path / "edited", ("    seed: int = h", f"{fields}    seed: int = h"))
    assert rehearse("--entry-point", folder).failed(2, "HyperParameters has 1")


def test_a_pattern_that_only_java_reads_is_left_to_aws(monkeypatch):
    """Another release of boto3 may bring some."""
    shape = {"type": "string", "pattern": r"\p{Alnum}("}
    assert not list(limits.violations("team", shape))
