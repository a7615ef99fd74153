"""What SageMaker's API would refuse is refused before anything is sent."""

from __future__ import annotations

import os
import shlex

import pytest
from launching import edited
from sagemaker_jobs import LAUNCH, REGISTRY

from sm_nanogpt.launcher import limits

SIX = (2, 4, 8, 12, 16, 24)
NO_TRAINING = "no SageMaker training image"


def many(option: str, n: int) -> str:
    return " ".join(f"{option} A{i}=x" for i in range(n))


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ("--max-wait 100", "--max-wait: is for spot"),
        ("--volume-size 500", "ml.g5.12xlarge has local disks"),
        ("--environment 'NCCL_DEBUG=INFO; reboot'", "NCCL_DEBUG='INFO; reboot'"),
    ],
    ids=["request", "check", "parts"],
)
def test_a_request_aws_would_refuse_is_not_sent(cloud, s3, cli, text_file, arguments, fact):
    """Whether the request says so, a check of the job, or the making of its parts."""
    assert cli(LAUNCH, "--data", text_file, shlex.split(arguments)).failed(2, fact)
    assert not cloud.calls
    assert "Contents" not in s3.list_objects_v2(Bucket=s3.bucket)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ("--spot --max-wait 100", "--max-wait 100: must be at least the time limit, 3600"),
        ("--spot --keep-alive 600", "--keep-alive 600: SageMaker keeps no warm pool of spot"),
        ("--keep-alive 3601", "--keep-alive 3601: must be at most 3600"),
        ("--max-run 1", "--max-run 1: must be at least 60"),
        ("--subnet subnet-1", "subnets and security groups need each other"),
        ("--subnet a,b --security-group sg", "--subnet a,b: must match"),
        ("--subnet a --security-group 'sg 1'", "--security-group sg 1: must match"),
        ("--kms-key 'my key!'", "--kms-key my key!: must match"),
        ("--environment a-b=c", "--environment a-b: must match"),
        ("--tag 'a=x,y;z'", "--tag a: its value must match"),
        ("--tag 'a;b=c'", "--tag a;b: must match"),
        ("--environment SM_HOSTS=[]", "--environment SM_HOSTS: "),
        ("--tag aws:a=b", "--tag aws:a"),
        ("--tag sm-nanogpt=x", "--tag sm-nanogpt"),
        (f"--image-uri {REGISTRY}/pytorch-inference:2.6.0-gpu-py312", NO_TRAINING),
        ("--image-uri pytorch-training:2.9.0-gpu-py312-ubuntu22.04-ec2", NO_TRAINING),
        ("--image-uri pytorch-training:2.9.0-cpu-py312", f"{NO_TRAINING} for"),
        ("--image-uri mine:1 --pytorch-version 2.8.0", "image_uri names another"),
        ("--processes-per-instance 2", "--processes-per-instance: is for local"),
        ("--set batch_size=12 --instance ml.g5.xlarge,ml.g5.48xlarge", "8 processes"),
        ("--volume-size 9 --instance ml.m5.xlarge,ml.r5d.large", "ml.r5d.large has local disks"),
        ("--instance ml.p6e-gb200.36xlarge", "Arm"),
        ("--instance ml.g5.12xlrge", "did you mean ml.g5.12xlarge"),
        ("--instance ml.g5.13xlarge", "or ml.g5.12xlarge or"),
        ("--instance ml.g5.xlarge,ml.g6.xlarge --spot", "--spot: takes one type"),
        ("--instance ml.g5.xlarge,local", "local cannot be combined"),
        ("--instance ml.g5.xlarge,ml.m5.xlarge", "with and without GPUs"),
        ("--instance ml.g5.xlarge,ml.trn1.2xlarge", "Neuron"),
        ("--instance ml.g5.xlarge,ml.p3.8xlarge", "the V100 of ml.p3.8xlarge"),
        ("--preset quick", "`--set device=auto`"),
        ("--preset auto --data s3://bucket/some", "preset=auto and a size need"),
    ],
)
def test_a_dry_run_refuses_what_does_not_fit(rehearse, arguments, fact):
    ran = rehearse(shlex.split(arguments))
    assert ran.failed(2, fact)
    assert ran.out == ""


def words_of(option: str, n: int) -> str:
    """An option n times, each with another value."""
    return " ".join(f"{option} v{i}" for i in range(n))


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (f"{words_of('--subnet', 17)} --security-group sg", "--subnet: has 17 entries"),
        (f"--subnet a {words_of('--security-group', 6)}", "--security-group: has 6 entries"),
        (f"--subnet {'a' * 33} --security-group sg", "--subnet aaa"),
        (f"--image-uri {'x' * 256}", "--image-uri xxx"),
        (f"--environment A={'x' * 513}", "--environment A: its value has 513 characters"),
        (many("--environment", 101), "--environment: has 101 entries"),
        (f"--tag A={'x' * 257}", "--tag A: its value has 257 characters"),
        (f"--tag {'A' * 129}=x", "--tag AAA"),
        (many("--tag", 48), "--tag: has 51 entries"),
        (f"--kms-key {'k' * 2049}", "--kms-key kkk"),
        (f"--instance {','.join(f'ml.g5.{n}xlarge' for n in SIX)}", "--instance: has 6 entries"),
        (f"--data s3://bucket/{'x' * 1024}", "--data s3://bucket/xxx"),
        (f"--validation s3://bucket/some/prefixes/{'x' * 1024}", "--validation s3://bucket/some"),
    ],
)
def test_a_dry_run_refuses_what_is_too_long_for_aws(rehearse, arguments, fact):
    ran = rehearse(shlex.split(arguments))
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


def test_a_store_whose_keys_would_be_too_long_is_named(home, cli, text_file):
    location = ("--region", "us-east-1", "--store", f"s3://bucket/{'x' * 980}")
    ran = cli(location, LAUNCH, "--data", text_file, "--dry-run")
    assert ran.failed(2, "--store s3://bucket/xxx", "SageMaker takes at most 1,024")


def test_the_longest_that_aws_takes_is_taken(dry):
    tags = [word for n in range(47) for word in ("--tag", f"{n}{'k' * 126}={'v' * 256}")]
    network = f"{words_of('--subnet', 16)} {words_of('--security-group', 5)}".split()
    request = dry("--environment", f"A={'x' * 512}", tags, network)
    assert len(request["Tags"]) == 50
    assert len(request["VpcConfig"]["Subnets"]) == 16


def test_a_secret_that_is_too_long_is_not_printed(rehearse):
    assert "hunter2" not in rehearse("--environment", f"KEY={'hunter2' * 80}").err


def test_a_value_that_is_not_utf8_says_so(rehearse):
    assert rehearse("--environment", os.fsdecode(b"A=caf\xe9")).failed(2, "is not UTF-8")


def test_what_an_edited_folder_sends_too_much_of_is_named(rehearse, tmp_path):
    fields = "".join(f'    more_{n}: int = hyperparameter(0, "one more")\n' for n in range(100))
    folder = edited(tmp_path / "edited", ("    seed: int = h", f"{fields}    seed: int = h"))
    assert rehearse("--entry-point", folder).failed(2, "HyperParameters has 1")


def test_a_pattern_that_only_java_reads_is_left_to_aws(dry, monkeypatch):
    """Another release of boto3 may bring some."""
    for shape in limits.shapes().values():
        if "pattern" in shape:
            monkeypatch.setitem(shape, "pattern", r"\p{Alnum}(")
    assert dry("--tag", "team=a")["Tags"]
