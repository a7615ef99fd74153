"""Jobs on SageMaker: request, refusals and the life of a job, against a service on loopback."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import signal
import tarfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import botocore.session
import launching
import pytest
import sagemaker_service
from access import ACCOUNT, Refusal
from botocore.awsrequest import AWSResponse
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    LoginError,
    LoginInsufficientPermissions,
    LoginRefreshRequired,
    NoCredentialsError,
    ReadTimeoutError,
    UnauthorizedSSOTokenError,
)
from botocore.httpsession import URLLib3Session
from botocore.utils import generate_login_cache_key
from botocore.validate import ParamValidator
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from launching import Ran

from entry_point import train
from entry_point.config import metric_definitions
from launcher import InputError, Request, ServiceError, Settings, jobs, launch, wait
from launcher.aws import service_errors, why
from launcher.files import storage
from launcher.files.storage import local_path
from launcher.job import TrainingJob
from launcher.launching.launch import prepare
from launcher.machines import (
    DEFAULT_VERSION,
    GPUS,
    IMAGES,
    check_instance,
    describe_instance,
    find_image,
    gpus_of,
    has_local_storage,
    looks_like_gpu,
    sagemaker_types,
    training_image,
)
from launcher.sagemaker.backend import SageMakerBackend
from launcher.sagemaker.description import describe_job, is_our_job
from launcher.sagemaker.estimator import quiet_sdk
from launcher.sagemaker.logs import script_lines
from launcher.sagemaker.request import sendable_hyperparameters, source_archive
from launcher.settings import load_settings
from launcher.source import Source

LAUNCH = ("launch", "--instance", "ml.g5.12xlarge")
FIVE = [f"ml.g5.{size}" for size in ("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge")]
TWO = ("--instance", "ml.g5.12xlarge,ml.g6.12xlarge")
NO_QUOTA = "ml.g6.48xlarge"  # in the emulator
ROLE = f"arn:aws:iam::{ACCOUNT}:role/training"
REGISTRY = "763104351884.dkr.ecr.us-east-1.amazonaws.com"
TAGGED = "[1,mpirank:0,algo-1]<stdout>:"


@pytest.fixture
def launched(cloud, cli, text_file):
    """The id of a job on SageMaker."""
    ran = cli(*LAUNCH, "--data", str(text_file))
    assert ran.code == 0, ran.err
    return ran.out.strip()


def names_and_times_apart(request: dict[str, Any]) -> str:
    return re.sub(r"sm-nanogpt-\d{8}-\d{6}-[0-9a-f]{6}", "JOB", json.dumps(request, sort_keys=True))


# -- the request -----------------------------------------------------------------------------------


@pytest.fixture
def dry(home, cli, text_file):
    """The request of a dry run, in an environment without credentials or network."""

    def run(*words: str) -> dict[str, Any]:
        place = ("--region", "us-east-1", "--store", "s3://bucket/some/prefix")
        ran = cli(*place, *LAUNCH, "--data", str(text_file), "--dry-run", *words)
        assert ran.code == 0, ran.err
        request: dict[str, Any] = json.loads(ran.out)
        return request

    return run


def test_a_dry_run_shows_the_request_without_credentials(dry):
    request = dry()
    values = request["HyperParameters"]
    assert values["sagemaker_distributed_dataparallel_enabled"] == "true"
    assert json.loads(values["n_embd"]) == 384  # a GPU gets the baby preset
    image = request["AlgorithmSpecification"]["TrainingImage"]
    assert image.endswith(f"/{find_image(DEFAULT_VERSION).name(gpu=True)}")
    assert request["AlgorithmSpecification"]["MetricDefinitions"] == metric_definitions()
    # S3 knows no directories: without the slash, GROUP-1 would begin GROUP-10.
    place = f"s3://bucket/some/prefix/checkpoints/{request['TrainingJobName']}/"
    assert request["CheckpointConfig"]["S3Uri"] == place
    assert request["ProfilerConfig"] == {"DisableProfiler": True}
    assert "DebugHookConfig" not in request
    assert "ROLE-NOT-KNOWN-YET" in request["RoleArn"]
    places = re.findall(r"s3://[^\"\\]+", json.dumps(request))
    assert len(places) == 4  # data, source, checkpoints, output
    assert all(place.startswith("s3://bucket/some/prefix/") for place in places), places
    assert re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", request["TrainingJobName"])


@pytest.mark.parametrize("preset", ["cpu", "quick", "laptop"])
def test_a_preset_for_the_cpu_is_refused_on_gpus(preset, dry, cli, text_file):
    place = ("--region", "us-east-1", "--store", "s3://bucket/some/prefix")
    ran = cli(*place, *LAUNCH, "--preset", preset, "--data", str(text_file), "--dry-run")
    assert ran.code == 2
    assert "`--set device=auto`" in ran.error
    for device in ("auto", "cpu"):
        words = ("--instance", "ml.g5.xlarge", "--preset", preset)
        request = dry(*words, "--set", f"device={device}")
        assert request["HyperParameters"]["device"] == f'"{device}"'
    assert dry("--preset", preset, "--instance", "ml.m5.large")


def test_a_dry_run_does_not_deny_an_upload(home, cli):
    place = ("--region", "us-east-1", "--store", "s3://bucket/some/prefix")
    words = ("--preset", "auto", "--data", "s3://bucket/some/prefix/data/text-1", "--dry-run")
    ran = cli(*place, *LAUNCH, *words)
    assert ran.code == 2
    assert "a dry run does not ask S3" in ran.error


def test_a_dry_run_shows_the_request_that_a_launch_sends(cloud, cli, text_file):
    words = (*LAUNCH, "--data", str(text_file), "--instance-count", "2", "--spot")
    shown = json.loads(cli(*words, "--dry-run").out)
    assert not cloud.calls
    assert cli(*words).code == 0
    ((operation, sent),) = cloud.calls
    assert operation == "CreateTrainingJob"
    assert names_and_times_apart(sent) == names_and_times_apart(shown)


@pytest.mark.parametrize(
    ("words", "where", "expected"),
    [
        (
            ("--launcher", "torchrun"),
            ("HyperParameters", "sagemaker_torch_distributed_enabled"),
            "true",
        ),
        (("--max-run", "3600"), ("StoppingCondition", "MaxRuntimeInSeconds"), 3600),
        (("--spot", "--max-run", "60"), ("StoppingCondition", "MaxWaitTimeInSeconds"), 120),
        (
            ("--spot", "--max-run", "2419200"),
            ("StoppingCondition", "MaxWaitTimeInSeconds"),
            2419200,
        ),
        (("--spot",), ("EnableManagedSpotTraining",), True),
        (("--keep-alive", "600"), ("ResourceConfig", "KeepAlivePeriodInSeconds"), 600),
        (
            ("--instance", "ml.m5.xlarge", "--volume-size", "99"),
            ("ResourceConfig", "VolumeSizeInGB"),
            99,
        ),
        (
            ("--instance", "ml.p3.8xlarge", "--pytorch-version", "2.8.0", "--kms-key", "key"),
            ("ResourceConfig", "VolumeKmsKeyId"),
            "key",
        ),
        (("--kms-key", "key"), ("OutputDataConfig", "KmsKeyId"), "key"),
        (("--input-mode", "FastFile"), ("InputDataConfig", 0, "InputMode"), "FastFile"),
        (("--environment", "A=b=c"), ("Environment", "A"), "b=c"),
        ((), ("StoppingCondition", "MaxPendingTimeInSeconds"), 86_400),
        (("--network-isolation",), ("EnableNetworkIsolation",), True),
        (("--encrypt-traffic",), ("EnableInterContainerTrafficEncryption",), True),
        (("--image-uri", "mine:1"), ("AlgorithmSpecification", "TrainingImage"), "mine:1"),
        (
            ("--subnet", "subnet-1", "--security-group", "sg-1"),
            ("VpcConfig",),
            {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
        ),
    ],
)
def test_each_option_is_in_the_request(dry, words, where, expected):
    value: Any = dry(*words)
    for name in where:
        value = value[name]
    assert value == expected


PRESCRIBED = """\
subnets = ["subnet-1"]
security_group_ids = ["sg-1"]
network_isolation = true
encrypt_traffic = true
tags = {team = "a", cost-center = "7"}
"""


def test_the_request_holds_what_the_config_file_prescribes(home, dry):
    home.mkdir()
    (home / "config.toml").write_text(PRESCRIBED)
    request = dry()
    assert request["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    assert request["EnableNetworkIsolation"]
    assert request["EnableInterContainerTrafficEncryption"]
    tags = {tag["Key"]: tag["Value"] for tag in request["Tags"]}
    assert tags == {"sm-nanogpt": "job", "team": "a", "cost-center": "7"}


def test_the_command_line_overrides_the_config_file(home, dry):
    home.mkdir()
    (home / "config.toml").write_text(PRESCRIBED)
    own = ("--subnet", "subnet-2", "--security-group", "sg-2", "--no-encrypt-traffic")
    request = dry(*own, "--no-network-isolation", "--tag", "team=b")
    assert request["VpcConfig"] == {"Subnets": ["subnet-2"], "SecurityGroupIds": ["sg-2"]}
    assert not request.get("EnableNetworkIsolation")
    assert not request.get("EnableInterContainerTrafficEncryption")
    tags = {tag["Key"]: tag["Value"] for tag in request["Tags"]}
    assert tags == {"sm-nanogpt": "job", "team": "b", "cost-center": "7"}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('subnets = ["subnet-1"]', "--subnet and --security-group must be given together"),
        ('subnets = "subnet-1"', "config.toml: subnets='subnet-1': must be a valid list"),
        ("subnets = [1]", "config.toml: subnets=1: must be a valid string"),
        ("tags = {sm-nanogpt = 'x'}", "from the settings: --tag sm-nanogpt"),
    ],
)
def test_an_invalid_value_in_the_config_file_is_refused(home, cli, text_file, config, said):
    home.mkdir()
    (home / "config.toml").write_text(config)
    place = ("--region", "us-east-1", "--store", "s3://bucket/some/prefix")
    ran = cli(*place, *LAUNCH, "--data", str(text_file), "--dry-run")
    assert ran.code == 2
    assert said in ran.error


def test_a_list_in_a_variable_is_json(home, cli, monkeypatch):
    monkeypatch.setenv("SM_NANOGPT_SUBNETS", "subnet-1")
    ran = cli("jobs")
    assert (ran.code, ran.error[:32]) == (2, "SM_NANOGPT_SUBNETS: must be JSON")
    monkeypatch.setenv("SM_NANOGPT_SUBNETS", '["subnet-1"]')
    assert load_settings().subnets == ["subnet-1"]


def test_a_local_job_ignores_the_prescribed_options(home, text_file):
    settings = Settings(home=home, network_isolation=True)
    ready = prepare(Request(data=str(text_file)), settings, "a-job")
    assert not ready.job.network_isolation


def test_a_resumed_job_gets_later_changes_of_the_config_file(cloud, s3, home, cli, text_file):
    earlier = stopped(s3, cli, text_file, "--tag", "team=b")
    (home / "config.toml").write_text(PRESCRIBED)
    ran = cli("launch", "--resume", earlier)
    assert ran.code == 0, ran.err
    assert "configured: encrypt_traffic, network_isolation, security_group_ids, " in ran.err
    request = cloud.sagemaker.jobs[ran.out.strip()].request
    assert request["VpcConfig"]["Subnets"] == ["subnet-1"]
    assert {"Key": "team", "Value": "b"} in request["Tags"]


@pytest.mark.parametrize("launcher", ["pytorchddp", "torchrun"])
def test_several_types_are_preferences_in_their_order(dry, launcher):
    types = ", ".join(reversed(FIVE))
    request = dry("--instance", types, "--launcher", launcher, "--keep-alive", "60")
    assert request["ResourceConfig"] == {
        "InstancePreferences": [{"InstanceType": name} for name in reversed(FIVE)],
        "InstanceCount": 1,
        "VolumeSizeInGB": 50,
        "KeepAlivePeriodInSeconds": 60,
    }
    name = find_image(DEFAULT_VERSION).name(gpu=True)
    # The toolkit would take it for the type that was chosen.
    assert "sagemaker_instance_type" not in request["HyperParameters"]
    assert request["AlgorithmSpecification"]["TrainingImage"].endswith(name)
    assert json.loads(request["HyperParameters"]["n_embd"]) == 384
    validate(request)


def test_volumes_of_several_types_are_encrypted_with_the_key(dry):
    request = dry("--instance", "ml.m5.xlarge,ml.c5.xlarge", "--kms-key", "key")
    assert request["ResourceConfig"]["VolumeKmsKeyId"] == "key"
    assert "VolumeKmsKeyId" not in dry(*TWO, "--kms-key", "key")["ResourceConfig"]


def test_an_instance_with_local_disks_gets_no_volume_key(dry):
    request = dry("--kms-key", "key")
    assert "VolumeKmsKeyId" not in request["ResourceConfig"]
    assert request["OutputDataConfig"]["KmsKeyId"] == "key"


def test_the_request_holds_our_tags_and_the_users_tags(dry):
    tags = {tag["Key"]: tag["Value"] for tag in dry("--tag", "team=a")["Tags"]}
    assert tags == {"sm-nanogpt": "job", "team": "a"}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        *[(name, True) for name in ("g4dn", "g5", "g6", "g6e", "g6f", "g7", "g7e", "r5d")],
        *[(name, True) for name in ("p3dn", "p4d", "p4de", "p5", "p5e", "p5en", "m5d", "m6gd")],
        *[(name, True) for name in ("p6-b200", "p6-b300", "m8id")],
        *[(name, False) for name in ("p2", "p3", "t3", "m5", "c5", "c5n", "r5", "m6i", "m7i-flex")],
        *[(name, False) for name in ("c8i", "m8i", "r8i", "r8i-flex")],
    ],
)
def test_the_instances_with_local_disks_are_known(family, expected):
    assert has_local_storage(f"ml.{family}.48xlarge") == expected


def test_a_known_type_is_described(home):
    assert describe_instance("ml.g5.12xlarge") == "ml.g5.12xlarge: 4 A10G"
    assert describe_instance("ml.c8i.96xlarge") == "ml.c8i.96xlarge: no GPU"


def test_a_type_unknown_to_boto3_is_sent_with_a_warning(cloud, cli, text_file):
    cloud.refuse["CreateTrainingJob"] = ("ValidationException", "no such type")
    ran = cli("launch", "--instance", "ml.g6f.xlarge", "--data", str(text_file))
    assert "warning: boto3 knows no training instance ml.g6f.xlarge" in ran.err
    assert "assuming a GPU instance; did you mean ml.g6" in ran.err
    image = cloud.calls[-1][1]["AlgorithmSpecification"]["TrainingImage"]
    assert image.endswith(find_image(DEFAULT_VERSION).name(gpu=True))


def test_each_type_is_known_to_have_gpus_or_not():
    for name in sagemaker_types():
        try:
            check_instance(name)
        except InputError:
            assert name.startswith(("ml.trn", "ml.p2.", "ml.p6e-gb200."))
        else:
            assert looks_like_gpu(name) == bool(gpus_of(name)), name


def test_sagemaker_trains_on_each_type_of_the_gpu_table():
    assert set(GPUS) <= set(sagemaker_types())


@pytest.mark.parametrize(
    ("region", "registry"),
    [
        ("us-east-1", "763104351884.dkr.ecr.us-east-1.amazonaws.com"),
        ("ap-southeast-7", "590183813437.dkr.ecr.ap-southeast-7.amazonaws.com"),
        ("cn-north-1", "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn"),
    ],
)
def test_images_come_from_the_registry_of_the_region(region, registry):
    for image in IMAGES:
        uri = training_image(region, image.version, True)
        assert uri == f"{registry}/{image.name(gpu=True)}"


def test_a_region_without_a_known_registry_is_refused():
    with pytest.raises(InputError, match="region eu-nowhere-1"):
        training_image("eu-nowhere-1", DEFAULT_VERSION, True)


@pytest.mark.parametrize("instance", ["ml.g5.12xlarge", "ml.m5.xlarge"])
@pytest.mark.parametrize("launcher", ["pytorchddp", "torchrun"])
@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.version)
def test_each_image_runs_by_each_launcher(home, cli, text_file, image, launcher, instance):
    place = ("--region", "us-east-1", "--store", "s3://bucket/some/prefix")
    words = ("launch", "--instance", instance, "--data", str(text_file), "--dry-run")
    chosen = ("--pytorch-version", image.version, "--launcher", launcher)
    ran = cli(*place, *words, *chosen)
    gpu = instance.startswith("ml.g")
    assert ran.code == 0, ran.err
    request = json.loads(ran.out)
    assert request["AlgorithmSpecification"]["TrainingImage"].endswith(f"/{image.name(gpu)}")
    starts = {"pytorchddp": "distributed_dataparallel", "torchrun": "torch_distributed"}
    assert request["HyperParameters"][f"sagemaker_{starts[launcher]}_enabled"] == "true"
    validate(request)


def validate(request: dict[str, Any]) -> None:
    """As boto3 does before it sends."""
    shape = botocore.session.get_session().get_service_model("sagemaker")
    validated = ParamValidator().validate(request, shape.shape_for("CreateTrainingJobRequest"))
    assert not validated.has_errors(), validated.generate_report()


def test_a_launch_says_until_when_its_image_is_patched(cloud, cli, text_file):
    for options in ((), ("--dry-run",)):
        ran = cli(*LAUNCH, "--data", str(text_file), "--pytorch-version", "2.8.0", *options)
        assert ran.code == 0, ran.err
        ended = "warning: AWS stopped patching pytorch-training:2.8.0-gpu-py312 on 2026-08-06;"
        assert ended in ran.err


def test_a_launch_says_that_torchrun_replaces_pytorchddp(home, cli, text_file):
    place = ("--region", "us-east-1", "--store", "s3://bucket/some/prefix")
    words = ("launch", "--data", str(text_file), "--dry-run", "--instance")
    for size, launcher in (("48xlarge", "torch_distributed"), ("4xlarge", "dataparallel")):
        ran = cli(*place, *words, f"ml.p5.{size}")
        assert ran.code == 0, ran.err
        assert launcher in ran.out
        said = "launcher: torchrun, since the SageMaker SDK refuses pytorchddp on ml.p5.48xlarge"
        assert (said in ran.err) == (size == "48xlarge")


@pytest.mark.parametrize("launcher", ["pytorchddp", "torchrun"])
def test_a_launch_warns_that_torchrun_ignores_nccl_debug(home, cli, text_file, launcher):
    place = ("--region", "us-east-1", "--store", "s3://bucket/some/prefix")
    words = ("--data", str(text_file), "--dry-run", "--launcher", launcher)
    ran = cli(*place, *LAUNCH, *words, "--environment", "NCCL_DEBUG=INFO")
    assert ran.code == 0, ran.err
    assert ("warning: --environment NCCL_DEBUG" in ran.err) == (launcher == "torchrun")


@pytest.mark.parametrize(
    ("words", "level"), [((), "WARN"), (("--environment", "NCCL_DEBUG=INFO"), "INFO")]
)
def test_nccl_logs_only_warnings_by_default(dry, words, level):
    values = dry(*words)["HyperParameters"]
    options = values["sagemaker_distributed_dataparallel_custom_mpi_options"]
    assert json.loads(options) == f"--NCCL_DEBUG {level}"


def many(option: str, n: int) -> list[str]:
    return [word for i in range(n) for word in (option, f"A{i}=x")]


# -- refusals before anything is sent --------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--max-wait", "100"), "--max-wait is for --spot"),
        (("--spot", "--max-wait", "100"), "--max-wait 100 must be at least --max-run 3600"),
        (("--spot", "--keep-alive", "60"), "--keep-alive and --spot cannot be combined"),
        (("--keep-alive", "3601"), "keep_alive=3601: must be at most 3600"),
        (("--subnet", "subnet-1"), "--subnet and --security-group must be given together"),
        (("--environment", f"A={'x' * 513}"), "Environment.A: 'x"),
        (("--environment", "a-b=c"), "Environment.a-b: "),
        (("--environment", "SM_HOSTS=[]"), "--environment SM_HOSTS: "),
        (many("--environment", 101), "Environment: "),
        (many("--tag", 50), "Tags: "),
        (("--kms-key", "my key!"), "OutputDataConfig.KmsKeyId: 'my key!'"),
        (("--subnet", "a b", "--security-group", "sg"), "VpcConfig.Subnets.1: 'a b'"),
        ((*["--subnet", "a"] * 17, "--security-group", "sg"), "VpcConfig.Subnets: "),
        (("--subnet", "a", *["--security-group", "b"] * 6), "VpcConfig.SecurityGroupIds: "),
        (("--spot", "--max-wait", "9999999"), "max_wait=9999999: "),
        (("--image-uri", "x" * 256), "AlgorithmSpecification.TrainingImage: "),
        (("--image-uri", f"{REGISTRY}/pytorch-inference:2.6.0-gpu-py312"), "no SageMaker training"),
        (("--image-uri", "pytorch-training:2.9.0-gpu-py312-ubuntu22.04-ec2"), "no SageMaker train"),
        (("--image-uri", "pytorch-training:2.9.0-cpu-py312"), "no SageMaker training image for"),
        (("--image-uri", f"{REGISTRY.replace('east', 'west')}/mine:1"), "only from us-east-1"),
        (("--tag", "aws:a=b"), "--tag aws:a"),
        (("--processes-per-instance", "2"), "--processes-per-instance is for --instance local"),
        (("--set", "batch_size=66"), "cannot be shared by 4 processes"),
        (("--set", "n_embdd=3"), "did you mean n_embd"),
        (("--instance", "g5.12xlarge"), "did you mean ml.g5.12xlarge"),
        (("--instance", "local", "--spot"), "--spot is for SageMaker"),
        (("--pytorch-version", "2.99"), "--image-uri takes any other image"),
        (("--image-uri", "mine:1", "--pytorch-version", "2.8.0"), "but not both"),
        (("--max-run", "1"), "max_run=1: must be at least 60"),
        (("--instance", "ml.p5.48xlarge", "--launcher", "pytorchddp"), "--launcher torchrun"),
        (("--instance", "ml.p3.2xlarge"), "use --pytorch-version 2.8.0"),
        (("--instance", "ml.trn1.2xlarge"), "Neuron"),
        (("--instance", "ml.p6e-gb200.36xlarge"), "Arm"),
        (("--instance", "ml.g5.12xlrge"), "did you mean ml.g5.12xlarge"),
        (("--instance", "ml.g5.13xlarge"), "or ml.g5.12xlarge or"),
        (("--volume-size", "500"), "ml.g5.12xlarge has local disks"),
        (("--tag", "sm-nanogpt=x"), "--tag sm-nanogpt"),
        (("--tag", "a=b;c"), "Tags.2.Value: 'b;c'"),
        (("--tag", "a=b\tc"), "Tags.2.Value: 'b\\tc'"),
        (("--instance", "ml.g5.xlarge,ml.g6.xlarge", "--spot"), "--spot takes one --instance type"),
        (("--instance", "ml.g5.xlarge,ml.g5.xlarge"), "ml.g5.xlarge is given twice"),
        (("--instance", f"{','.join(FIVE)},ml.g6.xlarge"), "6 types, and SageMaker allows 5"),
        (("--instance", "ml.g5.xlarge,local"), "local cannot be combined with other types"),
        (("--instance", "ml.g5.xlarge,ml.m5.xlarge"), "types with and without GPUs"),
        (("--instance", "ml.g5.xlarge,ml.trn1.2xlarge"), "--instance ml.trn1.2xlarge: "),
        (("--instance", "ml.g5.xlarge,ml.p3.8xlarge"), "the V100 of ml.p3.8xlarge"),
        (
            ("--instance", "ml.m5d.large,ml.r5d.large,ml.r5.large", "--kms-key", "k"),
            "only types without",
        ),
        (("--instance", "ml.m5.xlarge,ml.r5d.large", "--volume-size", "9"), "ml.r5d.large has"),
        (
            ("--instance", "ml.g5.xlarge,ml.g5.48xlarge", "--set", "batch_size=12"),
            "cannot be shared by 8 processes",
        ),
    ],
)
def test_a_request_aws_would_refuse_is_not_sent(cloud, s3, cli, text_file, words, reason):
    ran = cli(*LAUNCH, "--data", str(text_file), *words)
    assert ran.code == 2
    assert reason in ran.error
    assert not cloud.calls
    assert "Contents" not in s3.list_objects_v2(Bucket=s3.bucket)
    assert ran.out == ""


def test_a_missing_region_role_or_store_is_one_line(cloud, cli, text_file, monkeypatch):
    words = (*LAUNCH, "--data", str(text_file))
    monkeypatch.delenv("SM_NANOGPT_ROLE")
    assert "--role" in cli(*words).error
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert "--region" in cli(*words).error
    monkeypatch.delenv("SM_NANOGPT_STORE")
    assert "--store" in cli("--region", "us-east-1", *words, "--dry-run").error
    both = cli(*words, "--dry-run").error
    assert "--store" in both
    assert "--region" in both


@pytest.mark.parametrize(
    "metadata",
    [
        {"ResourceName": "default", "DomainId": "d-1", "ExecutionRoleArn": ROLE},  # Studio
        {"ResourceName": "mine"},  # a notebook instance, which is asked about
    ],
)
def test_a_launch_in_a_notebook_takes_and_names_its_role(
    cloud, cli, text_file, tmp_path, monkeypatch, metadata
):
    file = tmp_path / "resource-metadata.json"
    file.write_text(json.dumps(metadata))
    monkeypatch.setattr("launcher.sagemaker.backend.NOTEBOOK_METADATA", file)
    described = {"NotebookInstanceName": "mine", "RoleArn": ROLE}
    cloud.sagemaker.DescribeNotebookInstance = lambda body: described
    monkeypatch.delenv("SM_NANOGPT_ROLE")
    ran = cli(*LAUNCH, "--data", str(text_file))
    assert ran.code == 0, ran.err
    assert f"role: {ROLE} (from this SageMaker notebook)" in ran.err
    assert cloud.sagemaker.jobs[ran.out.strip()].request["RoleArn"] == ROLE


def test_the_default_bucket_is_the_store_but_is_never_created(
    cloud, s3, cli, text_file, monkeypatch
):
    monkeypatch.delenv("SM_NANOGPT_STORE")
    bucket = f"sagemaker-us-east-1-{ACCOUNT}"
    ran = cli(*LAUNCH, "--data", str(text_file))
    assert ran.code == 2
    assert "no default bucket" in ran.error
    assert bucket not in [b["Name"] for b in s3.list_buckets()["Buckets"]]
    s3.create_bucket(Bucket=bucket)
    ran = cli(*LAUNCH, "--data", str(text_file))
    assert ran.code == 0, ran.err
    assert f"store: s3://{bucket}/sm-nanogpt (the account's default SageMaker bucket" in ran.err


def test_the_default_bucket_must_belong_to_this_account(cloud):
    """Anybody may make a bucket of that name, and would then have the text and the script."""
    backend, owners = SageMakerBackend(load_settings()), []

    def note(params: dict[str, Any], **_: Any) -> None:
        owners.append(params["headers"].get("x-amz-expected-bucket-owner"))

    backend.client("s3").meta.events.register("before-call.s3.HeadBucket", note)
    backend.default_bucket()
    assert owners == [ACCOUNT]


# -- launching -------------------------------------------------------------------------------------


def test_a_launch_prints_the_id_and_names_the_next_commands(cloud, cli, text_file):
    ran = cli(*LAUNCH, "--data", str(text_file))
    assert ran.code == 0, ran.err
    assert ran.out.strip() in cloud.sagemaker.jobs
    assert f"#/jobs/{ran.out.strip()}" in ran.err
    assert f"sm-nanogpt fetch-and-sample {ran.out.strip()}" in ran.err


def test_suggested_commands_repeat_the_region(cloud, cli, text_file, monkeypatch):
    there = ("--region", "us-east-1")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    ran = cli(*there, "upload-data", str(text_file))
    assert "next: sm-nanogpt --region us-east-1 launch" in ran.err
    job_id = cli(*there, *LAUNCH, "--data", str(text_file)).out.strip()
    for words in (("status", "nope"), ("fetch-and-sample", job_id)):
        ran = cli(*there, *words)
        assert "`sm-nanogpt --region us-east-1 " in ran.error
        assert not re.search("`sm-nanogpt (?!--region us-east-1 )", ran.error)
    ran = cli(*there, *LAUNCH, "--data", str(text_file), "--follow")
    assert f"next: sm-nanogpt --region us-east-1 fetch-and-sample {ran.out.strip()}" in ran.err


@pytest.mark.parametrize(
    ("region", "host"),
    [
        ("eu-west-1", "https://eu-west-1.console.aws.amazon.com/"),
        ("us-gov-west-1", "https://us-gov-west-1.console.amazonaws-us-gov.com/"),
        ("cn-north-1", "https://cn-north-1.console.amazonaws.cn/"),
        ("us-iso-east-1", None),
    ],
)
def test_the_console_link_matches_the_partition(home, region, host):
    link = SageMakerBackend(Settings(home=home, region=region)).console_link("job")
    if host is None:
        assert link is None
    else:
        assert link == f"{host}sagemaker/home?region={region}#/jobs/job"


def test_the_source_archive_holds_the_folder_and_mpi4py(cloud, s3, launched):
    key = f"some/prefix/jobs/{launched}/source/sourcedir.tar.gz"
    archive = s3.get_object(Bucket=s3.bucket, Key=key)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        sent = {n: file.read() for n in tar.getnames() if (file := tar.extractfile(n))}
    assert {n for n in sent if "/" in n} == {"mpi4py/__init__.py", "mpi4py/__main__.py"}
    assert {n: sent[n] for n in sent if "/" not in n} == Source.packaged().files


def test_nothing_is_written_outside_of_the_prefix(cloud, s3, launched):
    keys = [o["Key"] for o in s3.list_objects_v2(Bucket=s3.bucket)["Contents"]]
    assert keys
    assert all(key.startswith("some/prefix/") for key in keys)


def test_a_launch_sends_the_last_local_upload_to_s3(cloud, s3, cli, text_file, monkeypatch):
    store = f"s3://{s3.bucket}/some/prefix"
    monkeypatch.delenv("SM_NANOGPT_STORE")
    near = cli("upload-data", str(text_file)).out.strip()
    ran = cli("--store", store, *LAUNCH)
    assert ran.code == 0, ran.err
    sent = cloud.sagemaker.jobs[ran.out.strip()].request["InputDataConfig"][0]["DataSource"][
        "S3DataSource"
    ]
    assert sent["S3Uri"] == f"{store}/data/{near.rsplit('/', 1)[-1]}/"


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_newer_local_upload_precedes_an_older_one_on_s3(
    cloud, s3, cli, text_file, tmp_path, monkeypatch, words
):
    store = f"s3://{s3.bucket}/some/prefix"
    assert cli("upload-data", str(text_file)).out.startswith(store)
    newer = tmp_path / "newer.txt"
    newer.write_text("Some other text.\n" * 1000)
    monkeypatch.delenv("SM_NANOGPT_STORE")
    near = cli("upload-data", str(newer)).out.strip()
    assert near.startswith("file://")
    ran = cli("--store", store, *LAUNCH, *words)
    assert ran.code == 0, ran.err
    assert f"data: {store}/data/{near.rsplit('/', 1)[-1]} (the last upload, {near})" in ran.err


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_launch_uploads_local_tokens(cloud, s3, cli, text_file, monkeypatch, words):
    store = f"s3://{s3.bucket}/some/prefix"
    monkeypatch.delenv("SM_NANOGPT_STORE")
    made = cli("upload-data", str(text_file), "--tokenizer", "bpe", "--vocab-size", "300")
    near = local_path(made.out.strip())
    assert near is not None
    ran = cli("--store", store, *LAUNCH, *words)
    assert ran.code == 0, ran.err
    assert f"data: {store}/data/{near.name} (the last upload, {near.as_uri()})" in ran.err
    there = s3.list_objects_v2(Bucket=s3.bucket, Prefix=f"some/prefix/data/{near.name}/")
    names = {each["Key"].rsplit("/", 1)[-1] for each in there.get("Contents", [])}
    assert names == (set() if words else {path.name for path in near.iterdir()})


def test_a_deleted_local_upload_is_not_replaced_by_an_older_one(
    cloud, s3, home, cli, text_file, monkeypatch
):
    store = f"s3://{s3.bucket}/some/prefix"
    cli("upload-data", str(text_file))
    monkeypatch.delenv("SM_NANOGPT_STORE")
    cli("upload-data", str(text_file))
    shutil.rmtree(home / "store")
    ran = cli("--store", store, *LAUNCH)
    assert ran.code == 2
    assert "--data" in ran.error
    assert not cloud.sagemaker.jobs


@pytest.mark.parametrize(
    ("change", "words", "told"),
    [
        ({"AWS_ACCESS_KEY_ID": "EXPIRED"}, (), "have expired"),
        ({"AWS_ACCESS_KEY_ID": "WRONG"}, (), "check AWS_PROFILE or the keys"),
        (
            {},
            ("--instance", "ml.g6.48xlarge"),
            "training job usage' is 0: request",
        ),
        ({}, (), None),
    ],
)
def test_a_refusal_by_aws_is_one_line_with_advice(
    cloud, cli, text_file, monkeypatch, change, words, told
):
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    ran = cli(*LAUNCH, *words, "--data", str(text_file))
    if told is None:
        assert ran.code == 0, ran.err
        return
    assert ran.code == 1
    assert told in ran.error
    assert not cloud.sagemaker.jobs


@pytest.mark.parametrize(
    ("code", "message", "told"),
    [
        ("RequestTimeTooSkewed", "The difference is too large.", "the clock"),
        ("InvalidSignatureException", "Signature expired: 1 is now earlier than 2", "the clock"),
        ("SignatureDoesNotMatch", "Signature not yet current: 2 is still later", "the clock"),
        ("InvalidSignatureException", "The signature we calculated is another", "the credentials"),
    ],
)
def test_a_refused_signature_blames_the_clock_or_the_key(code, message, told):
    error = ClientError({"Error": {"Code": code, "Message": message}}, "HeadBucket")
    assert told in why(error)
    assert message in why(error)


def test_a_bug_is_not_blamed_on_the_network():
    answer: dict[str, Any] = {}
    with pytest.raises(KeyError), service_errors("DescribeTrainingJob"):
        answer["ResourceConfig"]


def test_sso_in_a_host_name_does_not_mean_expired_credentials():
    said = why(EndpointConnectionError(endpoint_url="https://lessons.s3.amazonaws.com/"))
    assert "the network" in said
    assert "expired" not in said
    assert "expired" in why(UnauthorizedSSOTokenError())


# -- the credentials of `aws login` ----------------------------------------------------------------


@pytest.fixture
def login_token(cloud, home, monkeypatch):
    """Where the token of a person's `aws login` is kept; it is not there yet."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    session = f"arn:aws:iam::{ACCOUNT}:user/me"
    config = home.parent / ".aws/config"
    config.parent.mkdir()
    config.write_text(f"[default]\nlogin_session = {session}\n")
    token = config.parent / f"login/cache/{generate_login_cache_key(session)}.json"
    token.parent.mkdir(parents=True)
    return token


@pytest.mark.parametrize("command", ["jobs", "upload-data"])
@pytest.mark.parametrize(
    ("crypto", "said"),
    [(None, "the package awscrt is missing"), (object(), "renew them with `aws login`")],
)
def test_an_unusable_login_says_what_to_do(
    login_token, cli, text_file, monkeypatch, command, crypto, said
):
    for module in ("botocore", "aiobotocore"):  # of boto3 and of s3fs
        monkeypatch.setattr(f"{module}.credentials.EC", crypto)
    ran = cli(command, *[str(text_file)] * (command == "upload-data"))
    assert ran.code == 1
    assert said in ran.error


def test_a_dry_run_ignores_an_expired_login(login_token, home, text_file):
    words = ("--region", "us-east-1", "--store", "s3://bucket", *LAUNCH, "--dry-run")
    ran = launching.command(*words, "--data", str(text_file), home=home)  # which imports the SDK
    assert ran.code == 0
    assert "login" not in ran.err


@pytest.mark.parametrize("command", ["jobs", "upload-data"])
def test_a_login_is_renewed_when_its_credentials_expire(
    cloud, login_token, cli, text_file, monkeypatch, command
):
    keys = {"accessKeyId": "testing", "secretAccessKey": "testing", "sessionToken": "testing"}
    expired = {**keys, "accountId": ACCOUNT, "expiresAt": "2026-01-01T00:00:00Z"}
    key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
    )
    said = {"dpopKey": key.decode(), "clientId": "cli", "refreshToken": "r"}
    login_token.write_text(json.dumps({"accessToken": expired, **said}))
    answer = {"accessToken": keys, "tokenType": "t", "expiresIn": 900, "refreshToken": "r"}
    monkeypatch.setitem(cloud.credentials, "/v1/token", lambda: answer)
    ran = cli(command, *[str(text_file)] * (command == "upload-data"))
    assert ran.code == 0, ran.err
    assert json.loads(login_token.read_text())["accessToken"]["expiresAt"] > "2026-11"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LoginRefreshRequired(), "expired"),
        (LoginError(), "renew them with `aws login`"),
        (LoginInsufficientPermissions(), "signin:CreateOAuth2Token"),
        (NoCredentialsError(), "`aws login`"),
    ],
)
def test_each_login_error_names_its_remedy(error, said):
    assert said in why(error)


@pytest.mark.parametrize("attempts", ["", "0"])
@pytest.mark.parametrize("words", [("jobs",), ("upload-data", "input.txt")])
def test_an_invalid_aws_max_attempts_is_refused_by_name(
    cloud, cli, text_file, tmp_path, monkeypatch, words, attempts
):
    (tmp_path / "input.txt").write_bytes(text_file.read_bytes())
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", attempts)
    ran = cli(*words)
    assert ran.code == 2
    assert ran.error.startswith(f"AWS_MAX_ATTEMPTS={attempts!r}")


def test_a_launch_is_retried_when_the_first_answer_is_lost(cloud, cli, text_file, monkeypatch):
    create = cloud.sagemaker.CreateTrainingJob
    asked: list[str] = []

    def lose_the_first_answer(body: dict[str, Any]) -> Any:
        asked.append(body["TrainingJobName"])
        answer = create(body)
        if len(asked) == 1:
            raise Refusal("InternalFailure", "no answer", 503)
        return answer

    monkeypatch.setattr(cloud.sagemaker, "CreateTrainingJob", lose_the_first_answer)
    ran = cli(*LAUNCH, "--data", str(text_file))
    assert ran.code == 0, ran.err
    assert asked == [ran.out.strip()] * 2
    assert list(cloud.sagemaker.jobs) == [ran.out.strip()]


def test_a_launch_that_gets_an_error_answer_names_the_job(cloud, cli, text_file, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    cloud.refuse["CreateTrainingJob"] = ("InternalFailure", "no such luck", 503)
    ran = cli(*LAUNCH, "--data", str(text_file))
    assert (ran.code, ran.out) == (1, "")
    ((_, request),) = [call for call in cloud.calls if call[0] == "CreateTrainingJob"]
    assert f"`sm-nanogpt status {request['TrainingJobName']}`" in ran.error


def test_a_launch_that_gets_no_answer_names_the_job_in_one_line(cloud, cli, text_file, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    send = URLLib3Session.send

    def lose(session: Any, request: Any) -> Any:
        if b"CreateTrainingJob" in request.headers.get("X-Amz-Target", b""):
            raise ReadTimeoutError(endpoint_url="https://api.sagemaker")
        return send(session, request)

    monkeypatch.setattr(URLLib3Session, "send", lose)
    ran = cli(*LAUNCH, "--data", str(text_file))
    assert (ran.code, ran.out) == (1, "")
    assert re.search(r"`sm-nanogpt status sm-nanogpt-[\w-]+` shows", ran.error)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_launch_names_the_job_that_may_run(cloud, cli, text_file, monkeypatch, sign):
    create = cloud.sagemaker.CreateTrainingJob

    def create_and_interrupt(body: dict[str, Any]) -> Any:
        answer = create(body)
        os.kill(os.getpid(), sign)
        time.sleep(0.5)  # the answer comes too late
        return answer

    monkeypatch.setattr(cloud.sagemaker, "CreateTrainingJob", create_and_interrupt)
    before = signal.signal(sign, signal.default_int_handler)  # so that no test run ends here
    try:
        ran = cli(*LAUNCH, "--data", str(text_file))
        assert signal.getsignal(sign) is signal.default_int_handler
    finally:
        signal.signal(sign, before)
    assert (ran.code, ran.out) == (1, "")
    (job_id,) = cloud.sagemaker.jobs
    told = ran.err.splitlines()[-1]
    assert told.startswith("interrupted: ")
    assert f"`sm-nanogpt status {job_id}`" in told
    assert f"`sm-nanogpt stop {job_id}`" in told


@pytest.mark.parametrize("code", ["ValidationException", "ResourceInUse"])
def test_a_refused_launch_names_no_job_and_leaves_no_files(cloud, s3, cli, text_file, code):
    earlier = stopped(s3, cli, text_file)
    before = storage.list_files(f"s3://{s3.bucket}")
    cloud.refuse["CreateTrainingJob"] = (code, "no such luck")
    ran = cli("launch", "--resume", earlier)
    assert (ran.code, ran.out) == (1, "")
    assert ran.error.endswith(f"no such luck ({code})")
    left = storage.list_files(f"s3://{s3.bucket}").keys() - before.keys()
    assert bool(left) == (code == "ResourceInUse")  # they belong to the job of that name
    assert cli("stop", "latest").error.startswith(f"job {earlier} has already ended")


def test_a_launch_refused_after_a_retry_leaves_no_files(cloud, s3, cli, text_file, monkeypatch):
    answers = [Refusal("ThrottlingException", "no"), Refusal("ResourceLimitExceeded", "no quota")]

    def refuse(body: dict[str, Any]) -> Any:
        raise answers.pop(0)

    monkeypatch.setattr(cloud.sagemaker, "CreateTrainingJob", refuse)
    ran = cli(*LAUNCH, "--data", str(text_file))
    assert (ran.code, ran.out, answers) == (1, "", [])
    assert "no quota" in ran.error
    left = storage.list_files(f"s3://{s3.bucket}/some/prefix")
    assert not [name for name in left if not name.startswith("data/")]


def test_a_resumed_job_without_checkpoints_leaves_no_files(cloud, s3, cli, text_file, monkeypatch):
    earlier = stopped(s3, cli, text_file)
    before = storage.list_files(f"s3://{s3.bucket}")
    monkeypatch.setattr(storage, "copy", lambda *_: 0)
    assert cli("launch", "--resume", earlier).code == 1
    assert storage.list_files(f"s3://{s3.bucket}") == before


@pytest.mark.parametrize(
    ("code", "message", "told"),
    [
        ("ThrottlingException", "Rate exceeded", "wait a minute"),
        ("AccessDeniedException", "User x is not authorized to perform: y", "not allowed"),
        ("CapacityError", "Unable to provision requested ML compute capacity.", "try later"),
        ("ValidationException", "Something else", "Something else (ValidationException)"),
    ],
)
def test_each_service_error_is_one_line_with_advice(cloud, cli, launched, code, message, told):
    cloud.refuse["StopTrainingJob"] = (code, message)
    ran = cli("stop", launched)
    assert ran.code == 1
    assert told in ran.error


# -- the life of a job -----------------------------------------------------------------------------


def test_status_tells_the_states_times_and_numbers(cloud, cli, launched):
    assert "state:       InProgress (" in cli("status", launched).out
    assert cli("wait", launched).code == 0
    told = cli("status", launched).out
    assert "state:       Completed" in told
    assert "billable:    100 s" in told
    assert "best loss:   1.5000" in told
    assert "step:        1000/1000" in told
    assert json.loads(cli("status", launched, "--json").out)["billable_seconds"] == 100


@pytest.mark.parametrize(
    ("status", "secondary", "reason"),
    [
        ("InProgress", "Interrupted", None),
        ("InProgress", "Starting", None),
        ("Stopped", "MaxWaitTimeExceeded", "Spot capacity was reclaimed"),
    ],
)
def test_an_interruption_is_a_reason_once_the_job_has_ended(
    cloud, launched, status, secondary, reason
):
    raw = SageMakerBackend(load_settings()).known(launched)
    raw |= {"TrainingJobStatus": status, "SecondaryStatus": secondary}
    raw["FailureReason"] = "Spot capacity was reclaimed"
    assert describe_job(raw, None).failure_reason == reason


def test_status_of_a_spot_job_shows_the_savings(cloud, cli, text_file):
    job_id = cli(*LAUNCH, "--data", str(text_file), "--spot").out.strip()
    assert cli("wait", job_id).code == 0
    assert "billable:    30 s, 70% saved by spot" in cli("status", job_id).out


def test_a_failed_job_shows_its_reason_and_its_last_lines(cloud, cli, text_file):
    cloud.sagemaker.next_script = {
        "reason": "AlgorithmError: ExecuteUserScriptError: DataError: no text",
        "log": [
            (at, "algo-1", f"{TAGGED}{line}")
            for at, line in ((0.1, "one"), (0.7, "DataError: no text"))
        ],
    }
    job_id = cli(*LAUNCH, "--data", str(text_file)).out.strip()
    ran = cli("wait", job_id)
    assert ran.code == 1
    assert "DataError: no text" in ran.error
    time.sleep(sagemaker_service.LOG_DELAY_SECONDS)
    told = cli("status", job_id)
    assert "state:       Failed" in told.out
    assert told.out.endswith("  one\n  DataError: no text\n")


WRAPPED = "AlgorithmError: ExecuteUserScriptError:\nExitCode 1\n{}\nCommand ..., exit code: 1"
PLAIN = "AlgorithmError: {}, exit code: 1"  # what train.py leaves


@pytest.mark.parametrize(
    ("form", "words", "told"),
    [
        (WRAPPED, 'ErrorMessage "DataError: no text [Exception]\n ----"', "DataError: no text"),
        (WRAPPED, 'ErrorMessage "DataError: no text"', "DataError: no text"),
        (WRAPPED, 'ErrorMessage "TrainingError: CUDA [RuntimeError]"', "TrainingError: CUDA"),
        (WRAPPED, 'ErrorMessage "----\n"\nExtraInfo "OutOfMemory: killed"', "OutOfMemory: killed"),
        (WRAPPED, 'ErrorMessage ""', " ".join(WRAPPED.format('ErrorMessage ""').split())),
        (PLAIN, "DataError: no text [Exception]", "DataError: no text"),
        (PLAIN, "OSError: no disk", "OSError: no disk"),
    ],
)
def test_a_job_reports_the_scripts_own_failure(cloud, cli, text_file, form, words, told):
    cloud.sagemaker.next_script = {"reason": form.format(words)}
    job_id = cli(*LAUNCH, "--data", str(text_file)).out.strip()
    assert f"failed: {told};" in cli("wait", job_id).error
    assert f"reason:      {told}\n" in cli("status", job_id).out


def test_jobs_lists_all_our_jobs_on_sagemaker_and_here(cloud, cli, text_file):
    ids = [cli(*LAUNCH, "--data", str(text_file)).out.strip() for _ in range(4)]
    local = cli(*launching.launching(data=text_file), "--detach").out.strip()
    request = {**cloud.sagemaker.jobs[ids[0]].request, "TrainingJobName": "another", "Tags": []}
    cloud.sagemaker.CreateTrainingJob(request)
    listed = [job["job_id"] for job in json.loads(cli("jobs", "--json").out)]
    assert listed == [local, *reversed(ids)]
    assert all(job_id in cli("jobs").out for job_id in listed)


def test_local_jobs_are_listed_when_aws_refuses(cloud, cli, text_file):
    local = cli(*launching.launching(data=text_file), "--detach").out.strip()
    cloud.refuse["Search"] = ("AccessDeniedException", "no")
    ran = cli("jobs")
    assert local in ran.out
    assert ran.code == 1
    assert "Search: not allowed" in ran.err


@pytest.mark.parametrize("words", ["stop latest", "delete latest --yes", "status {}"])
def test_no_job_is_guessed_when_aws_refuses(cloud, cli, job, words):
    cloud.refuse["Search"] = ("ExpiredTokenException", "no")
    ran = cli(*words.format(job.job_id[-6:]).split())
    assert ran.code == 1
    assert "Search: the AWS credentials have expired" in ran.error
    assert cli("status", job.job_id).code == 0


def test_latest_is_the_job_launched_last_though_search_lags(cloud, cli, text_file, launched):
    cloud.sagemaker.jobs[launched].created -= 1000
    cloud.sagemaker.search_lag = 500
    last = cli(*LAUNCH, "--data", str(text_file)).out.strip()
    assert [d.job_id for d in jobs()] == [last, launched]
    assert cli("stop", "latest").code == 0
    assert cloud.sagemaker.jobs[last].ended
    assert cli("delete", "latest", "--yes").code == 0
    assert json.loads(cli("status", "latest", "--json").out)["job_id"] == launched


def test_jobs_are_ordered_by_the_clock_of_their_ids(cloud, cli, job, launched):
    cloud.sagemaker.jobs[launched].created = 1e9
    assert [d.job_id for d in jobs()] == [launched, job.job_id]


def test_the_library_lists_local_jobs_when_aws_refuses(cloud, job):
    cloud.refuse["Search"] = ("AccessDeniedException", "no")
    with pytest.warns(UserWarning, match="Search: not allowed"):
        assert [description.job_id for description in jobs()] == [job.job_id]


def test_logs_of_all_hosts_are_merged_by_time_until_the_end(cloud, cli, text_file):
    # The first ten are there when one begins to look; the others come meanwhile, so that hosts may
    # be asked before and after a line.
    times = [*(0.01 * i - 2 for i in range(10)), *(0.2 * i for i in range(10))]
    lines = [(at, f"algo-{1 + i % 2}", f"line {i}") for i, at in enumerate(times)]
    cloud.sagemaker.next_script = {"log": lines}
    job_id = cli(*LAUNCH, "--data", str(text_file), "--instance-count", "2").out.strip()
    ran = cli("logs", job_id, "--follow", "--raw")
    assert ran.code == 0, ran.err
    said, told = [f"{host}: {line}" for _, host, line in lines], ran.out.splitlines()
    assert told[:10] == said[:10]
    for host in ("algo-1", "algo-2"):
        own = [line for line in said if line.startswith(host)]
        assert [line for line in told if line.startswith(host)] == own
    assert len(told) == len(said)
    assert cli("logs", job_id, "--raw").out.splitlines() == said
    assert cli("logs", job_id, "--raw", "--tail", "3").out.splitlines() == said[-3:]
    assert "state:       Completed" in cli("status", job_id).out


CHATTER = "2026-11-23 05:54:51,090 sagemaker-training-toolkit "
ENVIRONMENT = [
    "SM_HOSTS=[...]",
    "Invoking script with the following command:",
    "",
    "mpirun train.py",
]


PRELOAD = "ERROR: ld.so: object '/libchangehostname.so' from LD_PRELOAD cannot be preloaded"


def test_logs_show_only_the_lines_of_the_script():
    lines = [
        ("algo-1-1", f"{CHATTER}INFO     Imported framework"),
        ("algo-2-1", "bash: no job control in this shell"),
        *(("algo-1-1", line) for line in ENVIRONMENT),
        ("algo-1-1", f"{TAGGED}step=1/2 train_loss=1.0"),
        ("algo-1-1", "[1,mpirank:3,algo-2]<stderr>:OutOfMemory: too much"),
        ("algo-1-1", f"{TAGGED}{PRELOAD} (cannot open shared object file): ignored."),
        ("algo-1-1", "mpirun noticed that process rank 3 exited"),
        ("algo-2-1", f"{CHATTER}INFO     Orted process exited"),
        ("algo-1-1", f"{CHATTER}ERROR    Reporting training FAILURE"),
    ]
    assert list(script_lines(lines)) == [
        "step=1/2 train_loss=1.0",
        "algo-2: OutOfMemory: too much",
        "mpirun noticed that process rank 3 exited",
        f"{CHATTER}ERROR    Reporting training FAILURE",
    ]


def test_logs_find_the_lines_of_each_start_under_torchrun():
    """A spot job that starts again has new streams, which the toolkit begins anew."""
    lines = []
    for start in ("17", "18"):
        streams = (f"algo-1-{start}", f"algo-2-{start}")
        lines += [(stream, line) for stream in streams for line in ENVIRONMENT]
        lines += [
            (streams[0], f"step={start}/20"),
            (streams[1], "a warning"),
            (streams[1], f"{PRELOAD} (cannot open shared object file): ignored."),
            (streams[0], f"{CHATTER}INFO     Done"),
        ]
    warned = "algo-2: a warning"
    assert list(script_lines(lines)) == ["step=17/20", warned, "step=18/20", warned]


def test_an_empty_log_shows_the_state_of_the_job(cli, launched):
    ran = cli("logs", launched)
    assert (ran.code, ran.out) == (0, "")
    said = (
        r"the script printed nothing yet; the job is InProgress \(\w+\); --raw shows all lines.*\n"
    )
    assert re.fullmatch(said, ran.err)


def test_a_followed_launch_ends_with_the_job(cloud, cli, text_file):
    cloud.sagemaker.next_script = {"log": [(0.1, "algo-1", f"{TAGGED}step=1/2 train_loss=1.0")]}
    ran = cli(*LAUNCH, "--data", str(text_file), "--follow")
    assert ran.code == 0, ran.err
    assert "step=1/2 train_loss=1.0" in ran.err.splitlines()
    cloud.sagemaker.next_script = {"reason": "AlgorithmError: oh no"}
    ran = cli(*LAUNCH, "--data", str(text_file), "--follow")
    assert ran.code == 1
    assert "failed: AlgorithmError: oh no" in ran.err


def test_ctrl_c_leaves_a_job_on_sagemaker_running(cloud, cli, text_file, monkeypatch):
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.tracking.logs", interrupted)
    ran = cli(*LAUNCH, "--data", str(text_file), "--follow")
    assert ran.code == 0
    assert "the job keeps running" in ran.err
    assert "StopTrainingJob" not in [operation for operation, _ in cloud.calls]


PAGE = b"<html><body>Sign in to the network of this house</body></html>"


def sent_back(request: Any, status: int, body: bytes) -> AWSResponse:
    raw = io.BytesIO(body)
    raw.stream = lambda: iter([body])  # type: ignore[attr-defined]
    return AWSResponse(request.url, status, {}, raw)


class Outage:
    """A network that loses requests to SageMaker and CloudWatch, or has an answer of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: tuple[int, bytes] | None = None
        self.begin(0)
        send = URLLib3Session.send

        def lose(session: Any, request: Any) -> Any:
            if self.operation in request.headers.get("X-Amz-Target", b""):
                self.before -= 1
                if self.before < 0 and self.lost < self.length:
                    self.lost += 1
                    if self.answer is not None:
                        return sent_back(request, *self.answer)
                    raise EndpointConnectionError(endpoint_url="https://api.sagemaker")
            return send(session, request)

        monkeypatch.setattr(URLLib3Session, "send", lose)

    def begin(self, length: int, operation: bytes = b"Training", after: int = 0) -> None:
        """Loses `length` requests for an operation, after some that still get through."""
        self.operation, self.before, self.length, self.lost = operation, after, length, 0


@pytest.fixture
def outage(cloud, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("launcher.aws.AGAIN_SECONDS", 0.1)
    return Outage(monkeypatch)


@pytest.mark.parametrize(
    ("words", "operation", "after"),
    [
        (("wait",), b"DescribeTrainingJob", 1),
        (("logs", "--follow", "--raw"), b"DescribeTrainingJob", 1),
        (("logs", "--follow", "--raw"), b"DescribeLogStreams", 1),
        (("logs", "--follow", "--raw"), b"GetLogEvents", 1),
    ],
)
def test_following_survives_an_outage_and_misses_no_line(
    cloud, cli, text_file, outage, words, operation, after
):
    lines = [(0.1 * i, "algo-1", f"line {i}") for i in range(10)]
    cloud.sagemaker.next_script = {"log": lines}
    job_id = cli(*LAUNCH, "--data", str(text_file)).out.strip()
    outage.begin(3, operation, after)
    ran = cli(words[0], job_id, *words[1:])
    assert ran.code == 0, ran.err
    assert outage.lost == 3
    (told,) = [line for line in ran.err.splitlines() if "Could not connect" in line]
    assert "retrying" in told
    if words[0] == "logs":
        assert ran.out.splitlines() == [f"{host}: {line}" for _, host, line in lines]


def error_of(code: str) -> bytes:
    return json.dumps({"__type": code, "message": "not now"}).encode()


@pytest.mark.parametrize(
    ("operation", "answer"),
    [
        (b"DescribeTrainingJob", (500, error_of("InternalFailure"))),
        (b"DescribeTrainingJob", (400, error_of("ThrottlingException"))),
        (b"DescribeTrainingJob", (200, PAGE)),
        (b"DescribeTrainingJob", (302, PAGE)),
        (b"DescribeTrainingJob", (404, PAGE)),
        (b"DescribeLogStreams", (200, PAGE)),
        (b"GetLogEvents", (503, error_of("ServiceUnavailableException"))),
        (b"GetLogEvents", (200, PAGE)),
    ],
)
def test_an_unusable_answer_counts_as_an_outage(cloud, cli, text_file, outage, operation, answer):
    cloud.sagemaker.next_script = {"log": [(0.1, "algo-1", "line 1"), (0.5, "algo-1", "line 2")]}
    job_id = cli(*LAUNCH, "--data", str(text_file)).out.strip()
    outage.answer = answer
    outage.begin(3, operation, after=1)
    ran = cli("logs", job_id, "--follow", "--raw")
    assert ran.code == 0, ran.err
    assert outage.lost == 3
    assert "retrying" in ran.err
    assert ran.out.splitlines() == ["algo-1: line 1", "algo-1: line 2"]


@pytest.mark.parametrize("words", [("wait",), ("logs", "--follow")])
def test_expired_credentials_end_the_following_but_not_the_job(cli, launched, outage, words):
    outage.answer = (400, error_of("ExpiredTokenException"))
    outage.begin(1000, b"DescribeTrainingJob", after=1)
    ran = cli(words[0], launched, *words[1:])
    assert ran.code == 1
    assert "the AWS credentials have expired" in ran.error
    assert "a running job continues and is billed" in ran.error
    assert outage.lost == 1


def test_the_last_lines_arrive_if_a_job_ends_in_an_outage(monkeypatch):
    backend, now = SageMakerBackend(Settings()), [0.0]
    # The module's own, as the service of other tests lives in threads of this process.
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    monkeypatch.setattr("launcher.sagemaker.backend.time", clock)
    polls = iter(range(1000))

    def news(job_id: str, seen: dict[str, str]) -> tuple[dict[str, Any], list[Any], dict[str, str]]:
        poll = next(polls)
        if poll == 1:
            now[0] += 100  # the outage
        raw = {"TrainingJobStatus": "Completed" if poll else "InProgress"}
        late = [(0, "algo-1", "the end")] if poll == 2 else []
        return {**raw, "ResourceConfig": {"InstanceCount": 1}}, late, seen

    monkeypatch.setattr(backend, "news", news)
    assert list(backend.stream_lines("job", True)) == [("algo-1", "the end")]


def test_a_long_outage_ends_the_following_but_not_the_job(cli, launched, outage, monkeypatch):
    monkeypatch.setattr("launcher.aws.PATIENCE_SECONDS", 0.3)
    for words in (("wait", launched), ("logs", launched, "--follow")):
        outage.begin(1000, after=1)
        ran = cli(*words)
        assert ran.code == 1
        assert "DescribeTrainingJob: Could not connect" in ran.error
        assert "continues and is billed" in ran.error
        assert f"`sm-nanogpt logs {launched} --follow`" in ran.error


@pytest.mark.parametrize("words", [("wait",), ("logs", "--follow")])
def test_a_refusal_ends_the_following_at_once(cloud, cli, launched, words):
    cloud.refuse["DescribeTrainingJob"] = ("AccessDeniedException", "no")
    ran = cli(words[0], launched, *words[1:])
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert "not allowed" in ran.error


def test_the_timeout_of_wait_holds_during_an_outage(launched, outage):
    outage.begin(1000, after=1)
    began = time.monotonic()
    with pytest.raises(ServiceError, match="Could not connect"):
        wait(launched, timeout=0.5)
    assert time.monotonic() - began < 10


def test_a_first_request_fails_at_once_in_an_outage(cli, launched, outage):
    asking = ("status", "logs", "stop", "wait", "logs --follow")  # the last two to begin with
    for command, *words in (words.split() for words in asking):
        outage.begin(1000)
        ran = cli(command, launched, *words)
        assert ran.code == 1
        assert ran.err.count("\n") == 1
        assert "check the region's name and the network" in ran.error


def test_stop_waits_and_names_the_checkpoint(cloud, s3, cli, launched):
    key = f"some/prefix/checkpoints/{launched}/checkpoint-00000010.safetensors"
    s3.put_object(Bucket=s3.bucket, Key=key, Body=b"x")
    ran = cli("stop", launched)
    assert ran.code == 0, ran.err
    assert f"--resume {launched}" in ran.err
    assert "its checkpoint of step 10" in ran.err
    again = cli("stop", launched)
    assert again.code == 1
    assert "has already ended: Stopped" in again.error


def test_a_resumed_job_starts_from_the_earlier_jobs_checkpoint(cloud, s3, cli, launched):
    key = "some/prefix/checkpoints/{}/checkpoint-00000010.safetensors"
    s3.put_object(Bucket=s3.bucket, Key=key.format(launched), Body=b"x")
    running = cli(*LAUNCH, "--resume", launched)
    assert running.code == 1
    assert f"`sm-nanogpt stop {launched}`" in running.error
    assert cli("stop", launched).code == 0
    ran = cli(*LAUNCH, "--resume", launched, "--set", "max_steps=6000")
    assert ran.code == 0, ran.err
    resumed = ran.out.strip()
    assert s3.get_object(Bucket=s3.bucket, Key=key.format(resumed))["Body"].read() == b"x"
    before, after = (cloud.sagemaker.jobs[name].request for name in (launched, resumed))
    assert after["InputDataConfig"] == before["InputDataConfig"]
    assert after["HyperParameters"]["max_steps"] == "6000"
    assert after["HyperParameters"]["n_embd"] == before["HyperParameters"]["n_embd"]
    refused = cli(*LAUNCH, "--resume", launched, "--set", "n_embd=192")
    assert refused.code == 2
    assert "n_embd was 384 and is 192" in refused.error


def test_a_job_of_a_cpu_is_not_resumed_silently_on_gpus(cloud, s3, cli, text_file):
    words = ("--instance", "ml.m5.xlarge", "--preset", "quick", "--data", str(text_file))
    job_id = cli("launch", *words).out.strip()
    key = f"some/prefix/checkpoints/{job_id}/checkpoint-00000010.safetensors"
    s3.put_object(Bucket=s3.bucket, Key=key, Body=b"x")
    assert cli("stop", job_id).code == 0
    refused = cli(*LAUNCH, "--resume", job_id)
    assert refused.code == 2
    assert "`--set device=auto`" in refused.error
    for device in ("auto", "cpu"):
        ran = cli(*LAUNCH, "--resume", job_id, "--set", f"device={device}")
        assert ran.code == 0, ran.err
    again = ran.out.strip()  # on a GPU instance, where the CPU was asked for
    s3.put_object(Bucket=s3.bucket, Key=key.replace(job_id, again), Body=b"x")
    assert cli("stop", again).code == 0
    assert cli("launch", "--resume", again).code == 0


def test_resuming_a_completed_job_requires_more_steps(cloud, s3, cli, text_file):
    """It would be billed for its start and its upload, and make the same model."""
    ran = cli(*LAUNCH, "--data", str(text_file), *launching.sets(max_steps=10))
    job_id = ran.out.strip()
    key = f"some/prefix/checkpoints/{job_id}/checkpoint-00000010.safetensors"
    s3.put_object(Bucket=s3.bucket, Key=key, Body=b"x")
    assert cli("wait", job_id).code == 0
    refused = cli("launch", "--resume", job_id)
    assert refused.code == 2
    assert "--set max_steps=" in refused.error
    assert list(cloud.sagemaker.jobs) == [job_id]
    assert cli("launch", "--resume", job_id, *launching.sets(max_steps=11)).code == 0


def test_a_resumed_job_runs_the_script_of_its_launch_by_default(
    cloud, s3, home, cli, text_file, tmp_path
):
    def archive(job_id: str) -> str:
        return f"some/prefix/jobs/{job_id}/source/sourcedir.tar.gz"

    def sent(job_id: str) -> bytes:
        return bytes(s3.get_object(Bucket=s3.bucket, Key=archive(job_id))["Body"].read())

    def resumed(*words: str) -> str:
        ran = cli("launch", "--resume", first, *words)
        assert ran.code == 0, ran.err
        return ran.out.strip()

    mine = launching.edited(tmp_path / "mine", ("of initial weights", "of mine"))
    first = stopped(s3, cli, text_file, "--entry-point", str(mine))
    shutil.rmtree(mine)
    assert sent(resumed()) == sent(first)
    shutil.rmtree(home / "sources")  # as on another machine
    ran = cli("launch", "--resume", first)
    assert ran.code == 2
    assert "is not on this machine; name it with --entry-point DIR" in ran.error
    other = launching.edited(tmp_path / "other", ("of initial weights", "of another"))
    s3.delete_object(Bucket=s3.bucket, Key=archive(first))
    assert resumed("--entry-point", str(other))


def test_code_from_the_store_does_not_run_on_this_machine(cloud, s3, cli, text_file, tmp_path):
    mine = launching.edited(tmp_path / "mine")
    first = stopped(s3, cli, text_file, "--entry-point", str(mine))
    evil = f"open({str(tmp_path / 'executed')!r}, 'w')\n".encode()
    key = f"some/prefix/jobs/{first}/source/sourcedir.tar.gz"
    archive = source_archive(Source(tmp_path, {"train.py": evil}), "torchrun")
    s3.put_object(Bucket=s3.bucket, Key=key, Body=archive)
    (tmp_path / "fetched.py").write_bytes(evil)  # a path from the store is not taken either
    places = {"data": "s3://bucket/text", "entry_point": str(tmp_path / "fetched.py")}
    record = json.dumps({"instance": "ml.g5.12xlarge", **places})
    s3.put_object(Bucket=s3.bucket, Key=f"some/prefix/jobs/{first}/job.json", Body=record.encode())
    assert cli("launch", "--resume", first).code == 2
    assert cli("launch", "--resume", first, "--dry-run").code == 2
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"instance": "ml.g5.12xlarge", "field_of_tomorrow": 1}']
)
def test_resuming_from_a_damaged_record_is_one_line(cloud, s3, cli, text_file, content):
    earlier = stopped(s3, cli, text_file)
    record = f"some/prefix/jobs/{earlier}/job.json"
    s3.put_object(Bucket=s3.bucket, Key=record, Body=content)
    ran = cli("launch", "--resume", earlier)
    assert ran.code == 1
    assert ran.error.startswith(f"s3://{s3.bucket}/{record} is damaged, or of another version")


def test_a_resumed_jobs_machines_are_not_read_from_the_store(cloud, s3, cli, text_file):
    earlier = stopped(s3, cli, text_file, "--image-uri", "mine:1", "--environment", "A=1")
    record = f"s3://{s3.bucket}/some/prefix/jobs/{earlier}/job.json"
    content = json.loads(storage.read_bytes(record) or b"")
    assert content["image_uri"] == "mine:1"
    content |= {"image_uri": "evil:1", "environment": {"LD_PRELOAD": "evil"}}
    content |= {"instance": "ml.p5.48xlarge", "instance_count": 8}
    storage.write_json(record, content)
    request = json.loads(cli("launch", "--resume", earlier, "--dry-run").out)
    assert request["AlgorithmSpecification"]["TrainingImage"] == "mine:1"
    assert request["Environment"] == {"A": "1"}
    resources = request["ResourceConfig"]
    assert (resources["InstanceType"], resources["InstanceCount"]) == ("ml.g5.12xlarge", 1)


def test_a_ceiling_from_the_store_allows_no_unasked_cost(cloud, s3, cli, text_file, monkeypatch):
    monkeypatch.setenv("SM_NANOGPT_ASK_ABOVE", "10")
    earlier = stopped(s3, cli, text_file)
    record = f"s3://{s3.bucket}/some/prefix/jobs/{earlier}/job.json"
    content = json.loads(storage.read_bytes(record) or b"")
    storage.write_json(record, content | {"max_cost": 1e6, "max_run": 7200})
    ran = cli("launch", "--resume", earlier)
    assert (ran.code, ran.error.partition(",")[0]) == (2, "this may cost 15.56 USD")


@pytest.mark.parametrize(
    ("before", "name", "off"),
    [
        (("--spot", "--max-wait", "90000"), "EnableManagedSpotTraining", "--on-demand"),
        (("--network-isolation",), "EnableNetworkIsolation", "--no-network-isolation"),
    ],
)
def test_a_resumed_job_can_switch_off_an_inherited_option(
    cloud, s3, cli, text_file, before, name, off
):
    earlier = stopped(s3, cli, text_file, *before)
    for words, on in (((), True), ((off,), False)):
        ran = cli("launch", "--resume", earlier, "--dry-run", *words)
        assert ran.code == 0, ran.err
        assert json.loads(ran.out).get(name, False) == on


@pytest.mark.parametrize(
    ("before", "after", "image"),
    [
        (("--image-uri", "mine:1"), ("--pytorch-version", "2.9.0"), "pytorch-training:2.9.0-gpu"),
        (("--pytorch-version", "2.9.0"), ("--image-uri", "mine:1"), "mine:1"),
    ],
)
def test_a_resumed_job_runs_the_image_named_last(cloud, s3, cli, text_file, before, after, image):
    earlier = stopped(s3, cli, text_file, *before)
    ran = cli("launch", "--resume", earlier, "--dry-run", *after)
    assert ran.code == 0, ran.err
    assert image in json.loads(ran.out)["AlgorithmSpecification"]["TrainingImage"]


def test_a_resumed_job_merges_variables_and_tags_by_name(cloud, s3, cli, text_file):
    both = ("--environment", "A=1", "--environment", "B=1", "--tag", "A=1", "--tag", "B=1")
    earlier = stopped(s3, cli, text_file, *both)
    words = ("--environment", "B=2", "--tag", "C=2")
    request = json.loads(cli("launch", "--resume", earlier, "--dry-run", *words).out)
    assert request["Environment"] == {"A": "1", "B": "2"}
    tags = {tag["Key"]: tag["Value"] for tag in request["Tags"]}
    assert tags == {"sm-nanogpt": tags["sm-nanogpt"], "A": "1", "B": "1", "C": "2"}


def test_resuming_on_spot_capacity_drops_the_warm_pool(cloud, s3, cli, text_file):
    earlier = stopped(s3, cli, text_file, "--keep-alive", "600")
    ran = cli("launch", "--resume", earlier, "--spot", "--dry-run")
    assert ran.code == 0, ran.err
    request = json.loads(ran.out)
    assert request["EnableManagedSpotTraining"]
    assert "KeepAlivePeriodInSeconds" not in request["ResourceConfig"]


def test_resuming_on_a_type_with_disks_drops_the_volume_size(cloud, s3, cli, text_file):
    earlier = stopped(s3, cli, text_file, "--instance", "ml.m5.xlarge", "--volume-size", "500")
    for words, size in (((), 500), (("--instance", "ml.g5.12xlarge"), 50)):
        ran = cli("launch", "--resume", earlier, "--dry-run", *words)
        assert ran.code == 0, ran.err
        assert json.loads(ran.out)["ResourceConfig"]["VolumeSizeInGB"] == size


def stopped(s3: Any, cli: Callable[..., Ran], text_file: Path, *words: str) -> str:
    """The id of a job that was stopped and left a checkpoint."""
    ran = cli(*LAUNCH, "--data", str(text_file), *words)
    assert ran.code == 0, ran.err
    job_id = ran.out.strip()
    key = f"some/prefix/checkpoints/{job_id}/checkpoint-00000010.safetensors"
    s3.put_object(Bucket=s3.bucket, Key=key, Body=b"x")
    assert cli("stop", job_id).code == 0
    return job_id


def test_a_model_is_fetched_at_the_end_and_again_if_changed(cloud, s3, cli, launched, finished):
    archive = finished.directory / "output" / "model.tar.gz"
    key = f"some/prefix/jobs/{launched}/output/model.tar.gz"
    s3.put_object(Bucket=s3.bucket, Key=key, Body=archive.read_bytes())
    early = cli("fetch-and-sample", launched)
    assert early.code == 1
    assert "still InProgress" in early.error
    assert cli("wait", launched).code == 0
    first = cli("fetch-and-sample", launched, "--max-new-tokens", "20")
    assert first.code == 0, first.err
    s3.delete_object(Bucket=s3.bucket, Key=key)
    s3.put_object(Bucket=s3.bucket, Key=key, Body=b"another")
    other = cli("fetch-and-sample", launched)
    assert other.code == 1
    assert "damaged" in other.error


def test_fetching_a_model_describes_the_job_once(cloud, s3, cli, launched, finished):
    archive = finished.directory / "output" / "model.tar.gz"
    key = f"some/prefix/jobs/{launched}/output/model.tar.gz"
    s3.put_object(Bucket=s3.bucket, Key=key, Body=archive.read_bytes())
    assert cli("wait", launched).code == 0
    before = len(cloud.calls)
    assert cli("fetch-and-sample", launched, "--max-new-tokens", "5").code == 0
    assert [operation for operation, _ in cloud.calls[before:]] == ["DescribeTrainingJob"]


@pytest.mark.parametrize("store", ["/home/me", "file:///home/me", "s3://bucket"])
def test_only_a_store_on_s3_makes_a_job_ours(store):
    raw = {
        "TrainingJobName": "id",
        "OutputDataConfig": {"S3OutputPath": f"{store}/jobs"},
        "CheckpointConfig": {"S3Uri": f"{store}/checkpoints/id"},
    }
    assert is_our_job(raw) == (store == "s3://bucket")


def test_a_job_launched_by_another_tool_is_left_alone(cloud, cli, launched):
    request = {**cloud.sagemaker.jobs[launched].request, "TrainingJobName": "prod-xgb"}
    cloud.sagemaker.CreateTrainingJob(request)
    for command in ("stop", "status", "logs", "fetch-and-sample"):
        ran = cli(command, "prod-xgb")
        assert ran.code == 1
        assert "sm-nanogpt did not launch" in ran.error
    assert "StopTrainingJob" not in [operation for operation, _ in cloud.calls]


def test_a_resumed_job_copies_checkpoints_from_the_old_store(cloud, s3, cli, launched):
    key = f"some/prefix/checkpoints/{launched}/checkpoint-00000010.safetensors"
    s3.put_object(Bucket=s3.bucket, Key=key, Body=b"x")
    assert cli("stop", launched).code == 0
    other = f"s3://{s3.bucket}/other"
    ran = cli("--store", other, "launch", "--resume", launched)
    assert ran.code == 0, ran.err
    key = f"other/checkpoints/{ran.out.strip()}/checkpoint-00000010.safetensors"
    assert s3.get_object(Bucket=s3.bucket, Key=key)["Body"].read() == b"x"


def test_a_job_is_resumed_where_it_ran(cloud, cli, text_file):
    local = cli(*launching.launching(data=text_file)).out.strip()
    ran = cli(*LAUNCH, "--resume", local)
    assert ran.code == 2
    assert "ran on local" in ran.error
    assert cli("launch", "--resume", local, "--set", "max_steps=12").code == 0


def test_the_library_resumes_a_job_on_its_instance_type(cloud, s3, cli, text_file):
    earlier = stopped(s3, cli, text_file)
    resumed = launch(Request(resume=earlier, spot=True))
    request = cloud.sagemaker.jobs[resumed].request
    assert request["ResourceConfig"]["InstanceType"] == "ml.g5.12xlarge"
    assert request["EnableManagedSpotTraining"]


def test_resuming_a_local_job_refuses_sagemaker_options(job):
    more = {"max_steps": 12}
    with pytest.raises(InputError, match="--spot is for SageMaker"):
        launch(Request(resume=job.job_id, hyperparameters=more, spot=True))
    assert len(list((job.home / "jobs").iterdir())) == 1


def test_a_job_without_capacity_says_what_to_do(cloud, cli, text_file):
    cloud.sagemaker.next_script = {
        "reason": "CapacityError: Unable to provision requested ML compute capacity."
    }
    job_id = cli(*LAUNCH, "--data", str(text_file)).out.strip()
    assert "name several types with --instance TYPE,TYPE" in cli("wait", job_id).error


def test_status_shows_all_types_until_one_is_chosen(cloud, cli, text_file):
    cloud.sagemaker.exhausted = {"ml.g5.12xlarge", "ml.g6.12xlarge"}
    job_id = cli(*LAUNCH, *TWO, "--data", str(text_file)).out.strip()
    job = cloud.sagemaker.jobs[job_id]
    launching.until(lambda: "Insufficient capacity" in job.transitions[-1]["StatusMessage"])
    waiting = cli("status", job_id)
    assert "state:       InProgress (Pending)\n" in waiting.out
    assert "instance:    1 x ml.g5.12xlarge,ml.g6.12xlarge\n" in waiting.out
    assert "message:     Insufficient capacity error" in waiting.out
    assert "cost:" not in waiting.out
    assert "is not known" not in waiting.err
    cloud.sagemaker.exhausted = {"ml.g5.12xlarge"}
    assert cli("wait", job_id).code == 0
    assert "instance:    1 x ml.g6.12xlarge\n" in cli("status", job_id).out
    assert [job["instance"] for job in json.loads(cli("jobs", "--json").out)] == ["ml.g6.12xlarge"]


@pytest.mark.parametrize("words", ["wait", "logs --follow"])
def test_a_pending_job_says_why_and_ends_after_a_day(cloud, cli, text_file, words):
    cloud.sagemaker.exhausted = {"ml.g5.12xlarge"}
    cloud.sagemaker.rate = 86_400  # a day of SageMaker's in a second of ours
    job_id = cli(*LAUNCH, "--data", str(text_file)).out.strip()
    command, *more = words.split()
    ran = cli(command, job_id, *more)
    assert ran.err.count(f"job {job_id} is InProgress (Pending): Insufficient capacity error") == 1
    assert "name several types" in cli("wait", job_id).error
    assert "reason:      CapacityError: " in cli("status", job_id).out


def test_a_job_waiting_for_capacity_can_be_stopped(cloud, cli, text_file):
    cloud.sagemaker.exhausted = {"ml.g5.12xlarge"}
    job_id = cli(*LAUNCH, "--data", str(text_file)).out.strip()
    assert cli("stop", job_id).code == 0
    assert "state:       Stopped\n" in cli("status", job_id).out


def test_a_job_without_gpus_does_not_wait_for_capacity(cloud, cli, text_file):
    types = "ml.m5.xlarge,ml.c5.xlarge"
    cloud.sagemaker.exhausted = {"ml.m5.xlarge", "ml.c5.xlarge"}
    ran = cli("launch", "--instance", types, "--data", str(text_file), "--follow")
    assert ran.code == 1
    assert "CapacityError: Unable to provision" in ran.error
    assert types in cli("jobs").out


def test_a_resumed_job_keeps_the_instance_types(cloud, s3, cli, text_file):
    earlier = stopped(s3, cli, text_file, *TWO)
    assert f"`sm-nanogpt launch --resume {earlier}`" in cli("status", earlier).err
    resources = json.loads(cli("launch", "--resume", earlier, "--dry-run").out)["ResourceConfig"]
    assert [each["InstanceType"] for each in resources["InstancePreferences"]] == TWO[1].split(",")
    refused = cli("launch", "--resume", earlier, "--spot", "--dry-run")
    assert "--spot takes one --instance type" in refused.error
    one = cli("launch", "--resume", earlier, "--spot", *LAUNCH[1:], "--dry-run")
    assert json.loads(one.out)["ResourceConfig"]["InstanceType"] == "ml.g5.12xlarge"


@pytest.mark.parametrize(
    ("resources", "more", "said"),
    [
        ({"InstanceType": "ml.g5.12xlarge"}, {}, "Exactly one of InstanceType and"),
        ({"InstancePreferences": []}, {}, "greater than or equal to 1"),
        ({"InstancePreferences": [{"InstanceType": t} for t in FIVE] * 2}, {}, "less than or"),
        ({"InstancePreferences": [{"InstanceType": FIVE[0]}] * 2}, {}, "appear only once"),
        ({"SelectedInstanceType": "ml.g5.12xlarge"}, {}, "read-only"),
        ({}, {"EnableManagedSpotTraining": True}, "InstancePreferences is not supported with"),
        (
            {"InstancePreferences": [{"InstanceType": t} for t in ("ml.g5.xlarge", NO_QUOTA)]},
            {},
            f"'{NO_QUOTA} for training job usage' is 0 Instances",
        ),
    ],
)
def test_the_emulator_refuses_instance_preferences_as_aws_does(
    cloud, cli, text_file, resources, more, said
):
    job_id = cli(*LAUNCH, *TWO, "--data", str(text_file)).out.strip()
    sent = cloud.sagemaker.jobs[job_id].request
    if more:
        more = {**more, "StoppingCondition": {"MaxRuntimeInSeconds": 9, "MaxWaitTimeInSeconds": 9}}
    with pytest.raises(Refusal, match=said):
        cloud.sagemaker.CreateTrainingJob(
            {
                **sent,
                **more,
                "TrainingJobName": "another",
                "ResourceConfig": {**sent["ResourceConfig"], **resources},
            }
        )


@pytest.mark.parametrize(
    ("instance", "told"),
    [
        ("ml.m5.xlarge", "raise --volume-size"),
        ("ml.g5.12xlarge", "use a larger --instance"),
    ],
)
def test_advice_about_a_full_disk_depends_on_the_instance(cloud, cli, text_file, instance, told):
    cloud.sagemaker.next_script = {"reason": "TrainingError: No space left on device"}
    words = ("launch", "--instance", instance, "--data", str(text_file))
    assert told in cli("wait", cli(*words).out.strip()).error


def test_either_region_variable_of_aws_sets_the_region(dry, cli, text_file, monkeypatch):
    words = ("--store", "s3://bucket/x", *LAUNCH, "--data", str(text_file), "--dry-run")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        with monkeypatch.context() as context:
            context.setenv(name, "eu-west-1")
            assert ".eu-west-1." in cli(*words).out


def test_a_dry_run_finds_the_last_upload_without_asking_s3(cloud, s3, cli, text_file):
    uploaded = cli("upload-data", str(text_file)).out.strip()
    s3.delete_object(Bucket=s3.bucket, Key="some/prefix/data/latest.json")
    request = json.loads(cli(*LAUNCH, "--dry-run").out)
    sent = request["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"]
    assert sent == uploaded + "/"


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_launch_prefers_this_machines_upload_to_others(
    cloud, cli, text_file, tmp_path, monkeypatch, words
):
    ours = cli("upload-data", str(text_file)).out.strip()
    upload_elsewhere(cli, tmp_path, monkeypatch)
    assert f"data: {ours} (the last upload)" in cli(*LAUNCH, *words).err


def test_a_launch_takes_others_upload_if_this_machine_has_none(cloud, cli, tmp_path, monkeypatch):
    theirs = upload_elsewhere(cli, tmp_path, monkeypatch)
    assert f"data: {theirs} (the last upload)" in cli(*LAUNCH).err
    ran = cli(*LAUNCH, "--dry-run")  # which cannot know of it
    assert ran.code == 2
    assert "a dry run does not ask" in ran.error


def upload_elsewhere(
    cli: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Somebody else's upload to the same store; returns its URI."""
    (tmp_path / "theirs.txt").write_text("Some other text.\n" * 1000)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SM_NANOGPT_HOME", str(tmp_path / "elsewhere"))
        return cli("upload-data", "theirs.txt").out.strip()


def test_a_role_must_be_an_arn(cli, text_file):
    ran = cli("--role", "mine", *LAUNCH, "--data", str(text_file))
    assert ran.code == 2
    assert "must be an ARN" in ran.error


def test_a_local_job_is_found_despite_a_broken_aws_setup(home, cli, text_file, monkeypatch):
    local = cli(*launching.launching(data=text_file), "--detach").out.strip()
    monkeypatch.setenv("AWS_PROFILE", "nope")
    assert cli("status", local).code == 0
    ran = cli("jobs")
    assert local in ran.out
    assert "nope" in ran.err


def test_an_upload_is_encrypted_with_the_configured_key(s3, cli, text_file, monkeypatch):
    monkeypatch.setenv("SM_NANOGPT_KMS_KEY", "alias/mine")
    uri = cli("upload-data", str(text_file)).out.strip()
    key = uri.removeprefix(f"s3://{s3.bucket}/") + "/input.txt"
    head = s3.head_object(Bucket=s3.bucket, Key=key)
    assert head["ServerSideEncryption"] == "aws:kms"
    assert head["SSEKMSKeyId"].endswith("alias/mine")


def test_an_unknown_job_is_one_line(cloud, cli):
    ran = cli("status", "nope")
    assert ran.code == 1
    assert "there is no job 'nope' on this machine or in us-east-1: " in ran.error


@pytest.fixture
def bare_configuration(home, monkeypatch):
    """A machine whose AWS configuration names nothing."""
    home.mkdir(exist_ok=True)
    (home / "aws-config").write_text("[default]\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "aws-config"))


def test_an_unknown_job_says_that_sagemaker_was_not_asked(home, cli):
    ran = cli("status", "nope")
    assert ran.code == 1
    assert "on this machine (SageMaker was not asked: set --region or AWS_REGION" in ran.error


def test_an_unknown_job_without_a_region_is_one_line(home, cli, bare_configuration):
    ran = cli("status", "nope")
    assert ran.code == 2
    assert "no region: set --region" in ran.error


def test_a_launch_without_a_region_names_the_local_one(home, cli, bare_configuration):
    ran = cli("launch")
    assert ran.code == 2
    assert ran.error.startswith("no region: `sm-nanogpt launch --instance local` ")


def test_jobs_without_a_region_lists_local_jobs_and_says_so(cli, job, bare_configuration):
    ran = cli("jobs")
    assert ran.code == 2  # as where a region is misspelt
    assert job.job_id in ran.out
    assert ran.error.startswith("no region: ")
    assert ran.error.endswith("; jobs on SageMaker are not listed")


# -- what is validated without AWS -----------------------------------------------------------------


def test_a_value_a_shell_would_interpret_is_not_sent(tmp_path, home):
    """train.py has no such hyperparameter, but an edited copy may."""
    folder = launching.edited(tmp_path / "mine")
    source = (folder / "config.py").read_text(encoding="utf-8")
    edited = re.sub(r',\s*choices=\("auto", "on", "off"\)', "", source)
    assert edited != source
    (folder / "config.py").write_text(edited, encoding="utf-8")
    job = TrainingJob(
        instance="ml.g5.xlarge",
        data="s3://b/d",
        entry_point=folder,
        hyperparameters={"compile": "$(reboot)"},
    )
    with pytest.raises(InputError, match=r"compile='\$\(reboot\)'"):
        sendable_hyperparameters(job)


def test_only_one_module_imports_the_sdk():
    root = Path(train.__file__).parent.parent / "launcher"
    importing = [
        path.name
        for path in root.rglob("*.py")
        if re.search(r"^\s*(?:import|from) sagemaker\b", path.read_text(), re.MULTILINE)
    ]
    assert importing == ["estimator.py"]


def test_a_launch_does_not_change_the_callers_sdk(home, dry, monkeypatch, caplog):
    dry()  # imports the SDK without a word of its own
    from sagemaker import utils

    def mine(config: Any) -> None:
        raise AssertionError("our own config is not validated")

    monkeypatch.setattr(utils, "validate_sagemaker_config", mine)
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", "mine.yaml")
    monkeypatch.delenv("SAGEMAKER_SUPPRESS_V2_WARNING", raising=False)
    loggers = [logging.getLogger(name) for name in (None, "sagemaker", "sagemaker.config")]
    for logger in loggers:
        caplog.set_level(logging.DEBUG, logger.name)
    before = dict(os.environ)
    dry()
    assert dict(os.environ) == before
    assert [logger.level for logger in loggers] == [logging.DEBUG] * 3
    assert utils.validate_sagemaker_config is mine


def test_launches_in_threads_do_not_change_the_process(home):
    """The second would take for the process's own what the first has set."""
    home.mkdir()
    before, entered, leave = dict(os.environ), threading.Event(), threading.Event()

    def first() -> None:
        with quiet_sdk(home):
            entered.set()
            leave.wait(10)

    def second() -> None:
        with quiet_sdk(home):
            assert leave.is_set()

    with ThreadPoolExecutor() as pool:
        one = pool.submit(first)
        assert entered.wait(10)
        other = pool.submit(second)
        time.sleep(0.1)
        leave.set()
        one.result()
        other.result()
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"])
def test_a_named_profile_overrides_a_missing_one(home, tmp_path, monkeypatch, name):
    (tmp_path / "config").write_text("[profile me]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv(name, "gone")
    job = TrainingJob(instance="ml.g5.xlarge", data="s3://bucket/text/")
    settings = Settings(home=home, profile="me", store="s3://bucket/some/prefix")
    backend = SageMakerBackend(settings.for_a_dry_run())
    request = backend.request("a-job", job, backend.check(job))
    assert request["TrainingJobName"] == "a-job"
    assert os.environ[name] == "gone"


@pytest.mark.parametrize("name", ["ADMIN", "USER"])
def test_the_sdks_configuration_does_not_change_the_request(dry, tmp_path, monkeypatch, name):
    config = tmp_path / "config.yaml"
    config.write_text(
        "SchemaVersion: '1.0'\n"
        "SageMaker:\n  TrainingJob:\n    EnableNetworkIsolation: true\n"
        "    VpcConfig: {Subnets: [subnet-1], SecurityGroupIds: [sg-1]}\n"
    )
    monkeypatch.setenv(f"SAGEMAKER_{name}_CONFIG_OVERRIDE", str(config))
    request = dry()
    assert "VpcConfig" not in request
    assert not request.get("EnableNetworkIsolation")


def test_the_sdks_configuration_is_written_once(home, dry):
    dry()
    before = (home / "sagemaker-sdk.yaml").stat()
    dry()
    after = (home / "sagemaker-sdk.yaml").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
