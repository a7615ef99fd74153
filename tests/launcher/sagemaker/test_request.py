"""The request for a job on SageMaker: dry runs, refusals before anything is sent, and the SDK."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable
from typing import Any

import boto3
import pytest
from sagemaker_jobs import LAUNCH, REGISTRY, part

from sm_nanogpt import Request, Settings
from sm_nanogpt.entry_point import config
from sm_nanogpt.entry_point.metrics import metric_definitions
from sm_nanogpt.launcher import source
from sm_nanogpt.launcher.launching.launch import prepare
from sm_nanogpt.launcher.machines import DEFAULT_VERSION, find_image
from sm_nanogpt.launcher.sagemaker.backend import SageMakerBackend
from sm_nanogpt.launcher.settings import load_settings
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.text import corpus


def uri(version: str, gpu: bool = True) -> str:
    return f"{REGISTRY}/{find_image(version).name(gpu)}"


def test_a_dry_run_shows_the_request_without_credentials(dry):
    request = dry()
    assert json.loads(request["HyperParameters"]["n_embd"]) == 384  # a GPU gets the baby preset
    assert part(request, IMAGE) == uri(DEFAULT_VERSION)
    assert request["AlgorithmSpecification"]["MetricDefinitions"] == metric_definitions()
    # S3 knows no directories: without the slash, GROUP-1 would begin GROUP-10.
    checkpoints = f"s3://bucket/some/prefix/checkpoints/{request['TrainingJobName']}/"
    assert request["CheckpointConfig"]["S3Uri"] == checkpoints
    assert request["ProfilerConfig"] == {"DisableProfiler": True}
    assert "DebugHookConfig" not in request
    assert "ROLE-NOT-KNOWN-YET" in request["RoleArn"]
    uris = re.findall(r"s3://[^\"\\]+", json.dumps(request))
    assert len(uris) == 4  # data, source, checkpoints, output
    assert all(checkpoints.startswith("s3://bucket/some/prefix/") for checkpoints in uris), uris
    assert re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", request["TrainingJobName"])


def test_a_dry_run_shows_the_request_that_a_launch_sends(cloud, cli, short_text_file):
    arguments = (*LAUNCH, "--data", str(short_text_file), "--instance-count", "2", "--spot")
    shown = json.loads(cli(arguments, "--dry-run").out)
    assert not cloud.calls
    assert cli(arguments).code == 0
    ((operation, sent_request),) = cloud.calls
    assert operation == "CreateTrainingJob"
    one, other = (
        re.sub(r"sm-nanogpt-\d{8}-\d{6}-[0-9a-f]{6}", "JOB", json.dumps(request, sort_keys=True))
        for request in (sent_request, shown)
    )
    assert one == other.replace("OWNER-NOT-KNOWN-YET", "root")


@pytest.mark.parametrize("arguments", ["--preset auto", "--sweep learning_rate=0.01,0.02"])
def test_a_dry_run_reads_and_makes_each_thing_once(rehearse, monkeypatch, arguments):
    done: list[str] = []

    def counted(owner: Any, name: str, function: Callable[..., object]) -> None:
        original = getattr(owner, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            done.append(f"{name} {function(*args, **kwargs)}")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    counted(source, "read_file", lambda path, *_: path)
    counted(boto3.Session, "__init__", lambda *_, **__: "")
    counted(config, "make_config", lambda *args: args)
    counted(corpus, "survey_upload", lambda name, *_: name)
    Source.packaged.cache_clear()
    assert rehearse(arguments.split()).code == 0
    assert Counter(done).most_common(1)[0][1] == 1, Counter(done)
    assert {each.split()[0] for each in done} == {
        "read_file",
        "__init__",
        "make_config",
        "survey_upload",
    }


NETWORK = {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
TAGS = {
    "sm-nanogpt": "job",
    "sm-nanogpt-owner": "OWNER-NOT-KNOWN-YET",
    "sm-nanogpt-summary": "baby",
    "team": "a",
}
FIVE = [f"ml.g5.{size}" for size in ("16xlarge", "8xlarge", "4xlarge", "2xlarge", "xlarge")]
SEVERAL = f"--instance '{', '.join(FIVE)}'"
PREFERENCES = [{"InstanceType": name} for name in FIVE]
DEVICE = "HyperParameters.device"
BY_MPI = "HyperParameters.sagemaker_distributed_dataparallel_enabled"
BY_TORCHRUN = "HyperParameters.sagemaker_torch_distributed_enabled"
MPI = "HyperParameters.sagemaker_distributed_dataparallel_custom_mpi_options"
# The toolkit would take it for the type that was chosen.
TOOLKITS_TYPE = "HyperParameters.sagemaker_instance_type"
IMAGE = "AlgorithmSpecification.TrainingImage"
KEY, VOLUME_KEY = "OutputDataConfig.KmsKeyId", "ResourceConfig.VolumeKmsKeyId"
RUNTIME, WAIT, PENDING = (
    f"StoppingCondition.Max{name}InSeconds" for name in ("Runtime", "WaitTime", "PendingTime")
)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {PENDING: 86_400, BY_MPI: "true", MPI: '"--NCCL_DEBUG WARN"'}),
        (
            "--environment NCCL_DEBUG=INFO --environment A=b=c",
            {MPI: '"--NCCL_DEBUG INFO"', "Environment.A": "b=c"},
        ),
        ("--pytorch-version 2.8.0", {IMAGE: uri("2.8"), BY_MPI: "true", BY_TORCHRUN: None}),
        ("--launcher torchrun", {BY_MPI: None, BY_TORCHRUN: "true"}),
        ("--preset quick --set device=cpu", {DEVICE: '"cpu"'}),
        (
            "--preset quick --instance ml.m5.large",
            {DEVICE: '"cpu"', IMAGE: uri(DEFAULT_VERSION, gpu=False), PENDING: None},
        ),
        ("--instance ml.g6f.xlarge", {IMAGE: uri(DEFAULT_VERSION)}),  # unknown to boto3
        ("--image-uri mine:1 --max-run 3600", {IMAGE: "mine:1", RUNTIME: 3600}),
        ("--spot --max-run 60", {"EnableManagedSpotTraining": True, WAIT: 120, PENDING: None}),
        ("--spot --max-run 2419200", {WAIT: 2_419_200}),
        ("--instance ml.m5.xlarge --volume-size 99", {"ResourceConfig.VolumeSizeInGB": 99}),
        # AWS refuses a key for local disks.
        ("--kms-key key --instance ml.g5.12xlarge,ml.g6.12xlarge", {KEY: "key", VOLUME_KEY: None}),
        ("--kms-key key --instance ml.p3.8xlarge --pytorch-version 2.8.0", {VOLUME_KEY: "key"}),
        (
            "--keep-alive 600 --input-mode FastFile --network-isolation --encrypt-traffic"
            " --subnet subnet-1 --security-group sg-1 --tag team=a",
            {
                "ResourceConfig.KeepAlivePeriodInSeconds": 600,
                "InputDataConfig.0.InputMode": "FastFile",
                "EnableNetworkIsolation": True,
                "EnableInterContainerTrafficEncryption": True,
                "VpcConfig": NETWORK,
                "Tags": [{"Key": name, "Value": TAGS[name]} for name in TAGS],
            },
        ),
        (
            f"{SEVERAL} --launcher torchrun",
            {
                "ResourceConfig.InstancePreferences": PREFERENCES,
                "ResourceConfig.InstanceType": None,
                "ResourceConfig.InstanceCount": 1,
                TOOLKITS_TYPE: None,
                "HyperParameters.n_embd": "384",
                IMAGE: uri(DEFAULT_VERSION),
            },
        ),
    ],
)
def test_each_option_is_in_the_request(dry, arguments, expected):
    request = dry(shlex.split(arguments))
    assert {path: part(request, path) for path in expected} == expected


def test_a_launch_warns_of_a_type_that_is_not_known(rehearse):
    note = "no training instance ml."
    noted = [note in rehearse("--instance", f"ml.{n}").err for n in ("g6f.xlarge", "p5.4xlarge")]
    assert noted == [True, False]


def test_either_region_variable_of_aws_sets_the_region(home, cli, short_text_file, monkeypatch):
    arguments = ("--store", "s3://bucket/x", *LAUNCH, "--data", str(short_text_file), "--dry-run")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        with monkeypatch.context() as context:
            context.setenv(name, "eu-west-1")
            assert ".eu-west-1." in cli(arguments).out


def facts(request: Any) -> tuple[Any, ...]:
    """Network, isolation, encrypted traffic, and tags but our own."""
    tags = {tag["Key"]: tag["Value"] for tag in request["Tags"]}
    tags = {name: value for name, value in tags.items() if not name.startswith("sm-nanogpt")}
    names = ("EnableNetworkIsolation", "EnableInterContainerTrafficEncryption")
    return request["VpcConfig"], *(bool(request.get(name)) for name in names), tags


def test_options_override_what_the_configuration_prescribes(
    home, rehearse, dry, short_text_file, monkeypatch
):
    home.mkdir()
    (home / "config.toml").write_text("""\
subnets = ["subnet-1"]
security_group_ids = ["sg-1"]
network_isolation = true
encrypt_traffic = true
tags = {team = "a", cost-center = "7"}
""")
    ran = rehearse()
    assert "configured: encrypt_traffic, network_isolation, security_group_ids, " in ran.err
    assert facts(json.loads(ran.out)) == (NETWORK, True, True, {"team": "a", "cost-center": "7"})
    options = "--subnet subnet-2 --security-group sg-2 --no-encrypt-traffic --no-network-isolation"
    request = dry(options.split(), "--tag", "team=b")
    other = {"Subnets": ["subnet-2"], "SecurityGroupIds": ["sg-2"]}
    assert facts(request) == (other, False, False, {"team": "b", "cost-center": "7"})
    local = prepare(Request(instance="local", data=str(short_text_file)), load_settings()).job
    assert not local.network_isolation
    monkeypatch.setenv("SM_NANOGPT_SUBNETS", '["subnet-3"]')
    assert dry()["VpcConfig"]["Subnets"] == ["subnet-3"]


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        ('subnets = ["subnet-1"]', "subnets and security groups need each other"),
        ("tags = {sm-nanogpt = 'x'}", "from the settings: tags=sm-nanogpt: "),
    ],
)
def test_an_invalid_prescribed_value_names_its_source(home, rehearse, config, fact):
    home.mkdir()
    (home / "config.toml").write_text(config)
    assert rehearse().failed(2, fact)


def test_a_missing_region_role_or_store_names_the_option(cloud, cli, short_text_file, monkeypatch):
    arguments = (*LAUNCH, "--data", str(short_text_file))
    monkeypatch.delenv("SM_NANOGPT_ROLE")
    assert "--role" in cli(arguments).error
    assert "ARN" in cli("--role", "mine", arguments).error
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert "--region" in cli(arguments).error
    monkeypatch.delenv("SM_NANOGPT_STORE")
    assert "--store" in cli("--region", "us-east-1", arguments, "--dry-run").error


def test_the_console_link_matches_the_partition(home):
    cases = [
        ("eu-west-1", "https://eu-west-1.console.aws.amazon.com/"),
        ("us-gov-west-1", "https://us-gov-west-1.console.amazonaws-us-gov.com/"),
        ("cn-north-1", "https://cn-north-1.console.amazonaws.cn/"),
        ("us-iso-east-1", None),
    ]
    for region, host in cases:
        link = SageMakerBackend(Settings(home=home, region=region)).console_link("job")
        assert link == (host and f"{host}sagemaker/home?region={region}#/jobs/job")
