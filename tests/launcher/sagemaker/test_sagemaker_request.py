"""The request for a job on SageMaker: dry runs, refusals before anything is sent, and the SDK."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import boto3
import pytest
from launching import edited
from sagemaker_jobs import part

from entry_point import config
from entry_point.metrics import metric_definitions
from launcher import instances, limits, machines, source
from launcher.job import TrainingJob
from launcher.launching.launch import prepare
from launcher.machines import DEFAULT_VERSION, IMAGES, find_image
from launcher.sagemaker.backend import SageMakerBackend
from launcher.sagemaker.checks import check_memory
from launcher.sagemaker.estimator import quiet_sdk
from launcher.settings import load_settings
from launcher.source import Source
from launcher.text import corpus
from launcher.tracking import TrackedJob
from sm_nanogpt import InputError, Request, Settings

LAUNCH = ("launch", "--instance", "ml.g5.12xlarge")
REGISTRY = "763104351884.dkr.ecr.us-east-1.amazonaws.com"
SIX = (2, 4, 8, 12, 16, 24)
NO_TRAINING = "no SageMaker training image"


def uri(version: str, gpu: bool = True) -> str:
    return f"{REGISTRY}/{find_image(version).name(gpu)}"


@pytest.fixture
def rehearse(home, cli, text_file):
    """A dry run, in an environment without credentials or network."""
    place = ("--region", "us-east-1", "--store", "s3://bucket/some/prefix")
    return lambda *words: cli(*place, *LAUNCH, "--data", str(text_file), "--dry-run", *words)


@pytest.fixture
def dry(rehearse):
    """The request that a dry run shows."""
    return lambda *words: json.loads(rehearse(*words).good.out)


def test_a_dry_run_shows_the_request_without_credentials(dry):
    request = dry()
    assert json.loads(request["HyperParameters"]["n_embd"]) == 384  # a GPU gets the baby preset
    assert part(request, IMAGE) == uri(DEFAULT_VERSION)
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


def test_a_dry_run_shows_the_request_that_a_launch_sends(cloud, cli, text_file):
    words = (*LAUNCH, "--data", str(text_file), "--instance-count", "2", "--spot")
    shown = json.loads(cli(*words, "--dry-run").out)
    assert not cloud.calls
    assert cli(*words).code == 0
    ((operation, sent),) = cloud.calls
    assert operation == "CreateTrainingJob"
    one, other = (
        re.sub(r"sm-nanogpt-\d{8}-\d{6}-[0-9a-f]{6}", "JOB", json.dumps(request, sort_keys=True))
        for request in (sent, shown)
    )
    assert one == other.replace("OWNER-NOT-KNOWN-YET", "root")


@pytest.mark.parametrize("words", ["", "--preset auto", "--sweep learning_rate=0.01,0.02"])
def test_a_dry_run_reads_and_makes_each_thing_once(rehearse, monkeypatch, words):
    done: list[str] = []

    def counted(place: Any, name: str, what: Callable[..., object]) -> None:
        original = getattr(place, name)

        def count(*given: Any, **named: Any) -> Any:
            done.append(f"{name} {what(*given, **named)}")
            return original(*given, **named)

        monkeypatch.setattr(place, name, count)

    counted(source, "read_file", lambda path, *_: path)
    counted(boto3.Session, "__init__", lambda *_, **__: "")
    counted(config, "make_config", lambda *given: given)
    counted(corpus, "survey_upload", lambda name, *_: name)
    Source.packaged.cache_clear()
    assert rehearse(*words.split()).code == 0
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
    ("words", "expected"),
    [
        ("", {PENDING: 86_400, BY_MPI: "true", MPI: '"--NCCL_DEBUG WARN"'}),
        (
            "--environment NCCL_DEBUG=INFO --environment A=b=c",
            {MPI: '"--NCCL_DEBUG INFO"', "Environment.A": "b=c"},
        ),
        ("--pytorch-version 2.8.0", {IMAGE: uri("2.8"), BY_MPI: "true", BY_TORCHRUN: None}),
        ("--pytorch-version 2.13.0", {IMAGE: uri("2.13"), BY_MPI: "true", BY_TORCHRUN: None}),
        ("--pytorch-version 2.13.0 --launcher torchrun", {BY_MPI: None, BY_TORCHRUN: "true"}),
        ("--launcher torchrun", {BY_MPI: None, BY_TORCHRUN: "true"}),
        ("--preset quick --set device=cpu", {DEVICE: '"cpu"'}),
        ("--preset quick --instance ml.m5.large", {DEVICE: '"cpu"'}),
        ("--instance ml.m5.large", {IMAGE: uri(DEFAULT_VERSION, gpu=False), PENDING: None}),
        ("--instance ml.g6f.xlarge", {IMAGE: uri(DEFAULT_VERSION)}),  # unknown to boto3
        ("--image-uri mine:1 --max-run 3600", {IMAGE: "mine:1", RUNTIME: 3600}),
        ("--spot --max-run 60", {"EnableManagedSpotTraining": True, WAIT: 120, PENDING: None}),
        ("--spot --max-run 2419200", {WAIT: 2_419_200}),
        ("--instance ml.m5.xlarge --volume-size 99", {"ResourceConfig.VolumeSizeInGB": 99}),
        ("--kms-key key", {KEY: "key", VOLUME_KEY: None}),  # AWS refuses it for local disks
        ("--kms-key key --instance ml.g5.12xlarge,ml.g6.12xlarge", {VOLUME_KEY: None}),
        ("--kms-key key --instance ml.m5.xlarge,ml.c5.xlarge", {VOLUME_KEY: "key"}),
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
            SEVERAL,
            {
                "ResourceConfig.InstancePreferences": PREFERENCES,
                "ResourceConfig.InstanceType": None,
                "ResourceConfig.InstanceCount": 1,
                TOOLKITS_TYPE: None,
                "HyperParameters.n_embd": "384",
                IMAGE: uri(DEFAULT_VERSION),
            },
        ),
        (f"{SEVERAL} --launcher torchrun", {TOOLKITS_TYPE: None}),
    ],
)
def test_each_option_is_in_the_request(dry, words, expected):
    request = dry(*shlex.split(words))
    assert {path: part(request, path) for path in expected} == expected


def test_a_launch_warns_of_a_type_that_boto3_does_not_know(rehearse):
    note = "boto3 knows no training instance ml."
    noted = [note in rehearse("--instance", f"ml.{n}").err for n in ("g6f.xlarge", "p5.4xlarge")]
    assert noted == [True, False]


def test_either_region_variable_of_aws_sets_the_region(home, cli, text_file, monkeypatch):
    words = ("--store", "s3://bucket/x", *LAUNCH, "--data", str(text_file), "--dry-run")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        with monkeypatch.context() as context:
            context.setenv(name, "eu-west-1")
            assert ".eu-west-1." in cli(*words).out


def facts(request: Any) -> tuple[Any, ...]:
    """Network, isolation, encrypted traffic, and tags but our own."""
    tags = {tag["Key"]: tag["Value"] for tag in request["Tags"]}
    tags = {name: value for name, value in tags.items() if not name.startswith("sm-nanogpt")}
    names = ("EnableNetworkIsolation", "EnableInterContainerTrafficEncryption")
    return request["VpcConfig"], *(bool(request.get(name)) for name in names), tags


def test_options_override_what_the_configuration_prescribes(
    home, rehearse, dry, text_file, monkeypatch
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
    own = "--subnet subnet-2 --security-group sg-2 --no-encrypt-traffic --no-network-isolation"
    request = dry(*own.split(), "--tag", "team=b")
    other = {"Subnets": ["subnet-2"], "SecurityGroupIds": ["sg-2"]}
    assert facts(request) == (other, False, False, {"team": "b", "cost-center": "7"})
    local = prepare(Request(instance="local", data=str(text_file)), load_settings(), TrackedJob).job
    assert not local.network_isolation
    monkeypatch.setenv("SM_NANOGPT_SUBNETS", '["subnet-3"]')
    assert dry()["VpcConfig"]["Subnets"] == ["subnet-3"]
    monkeypatch.setenv("SM_NANOGPT_SUBNETS", "subnet-3")
    assert rehearse().error.startswith("SM_NANOGPT_SUBNETS: must be JSON")


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        ('subnets = ["subnet-1"]', "subnets and security groups need each other"),
        ('subnets = "subnet-1"', "subnets='subnet-1' (SM_NANOGPT_SUBNETS, "),
        ("tags = {sm-nanogpt = 'x'}", "from the settings: tags=sm-nanogpt: "),
    ],
)
def test_an_invalid_prescribed_value_names_its_source(home, rehearse, config, fact):
    home.mkdir()
    (home / "config.toml").write_text(config)
    assert rehearse().failed(2, fact)


def many(option: str, n: int) -> str:
    return " ".join(f"{option} A{i}=x" for i in range(n))


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("--max-wait 100", "--max-wait: is for spot"),
        ("--spot --max-wait 100", "--max-wait 100: must be at least the time limit, 3600"),
        ("--spot --max-wait 9999999", "--max-wait 9999999: "),
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
        ("--environment 'NCCL_DEBUG=INFO; reboot'", "NCCL_DEBUG='INFO; reboot'"),
        ("--tag aws:a=b", "--tag aws:a"),
        ("--tag sm-nanogpt=x", "--tag sm-nanogpt"),
        (f"--image-uri {REGISTRY}/pytorch-inference:2.6.0-gpu-py312", NO_TRAINING),
        ("--image-uri pytorch-training:2.9.0-gpu-py312-ubuntu22.04-ec2", NO_TRAINING),
        ("--image-uri pytorch-training:2.9.0-cpu-py312", f"{NO_TRAINING} for"),
        ("--image-uri mine:1 --pytorch-version 2.8.0", "image_uri names another"),
        ("--processes-per-instance 2", "--processes-per-instance: is for local"),
        ("--set batch_size=12 --instance ml.g5.xlarge,ml.g5.48xlarge", "8 processes"),
        ("--volume-size 500", "ml.g5.12xlarge has local disks"),
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
        ("--preset auto --data s3://bucket/some --dry-run", "preset=auto and a size need"),
    ],
)
def test_a_request_aws_would_refuse_is_not_sent(cloud, s3, cli, text_file, words, fact):
    assert cli(*LAUNCH, "--data", str(text_file), *shlex.split(words)).failed(2, fact)
    assert not cloud.calls
    assert "Contents" not in s3.list_objects_v2(Bucket=s3.bucket)


def words_of(option: str, n: int) -> str:
    """An option n times, each with another value."""
    return " ".join(f"{option} v{i}" for i in range(n))


@pytest.mark.parametrize(
    ("words", "fact"),
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
def test_a_dry_run_refuses_what_aws_would(rehearse, words, fact):
    ran = rehearse(*shlex.split(words))
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
    place = ("--region", "us-east-1", "--store", f"s3://bucket/{'x' * 980}")
    ran = cli(*place, *LAUNCH, "--data", str(text_file), "--dry-run")
    assert ran.failed(2, "--store s3://bucket/xxx", "SageMaker takes at most 1,024")


def test_the_longest_that_aws_takes_is_taken(dry):
    tags = [word for n in range(47) for word in ("--tag", f"{n}{'k' * 126}={'v' * 256}")]
    network = f"{words_of('--subnet', 16)} {words_of('--security-group', 5)}".split()
    request = dry("--environment", f"A={'x' * 512}", *tags, *network)
    assert len(request["Tags"]) == 50
    assert len(request["VpcConfig"]["Subnets"]) == 16


def test_a_secret_that_is_too_long_is_not_printed(rehearse):
    assert "hunter2" not in rehearse("--environment", f"KEY={'hunter2' * 80}").err


def test_a_value_that_is_not_utf8_says_so(rehearse):
    assert rehearse("--environment", os.fsdecode(b"A=caf\xe9")).failed(2, "is not UTF-8")


def test_what_an_edited_folder_sends_too_much_of_is_named(rehearse, tmp_path):
    more = "".join(f'    more_{n}: int = hyperparameter(0, "one more")\n' for n in range(100))
    folder = edited(tmp_path / "edited", ("    seed: int = h", f"{more}    seed: int = h"))
    assert rehearse("--entry-point", str(folder)).failed(2, "HyperParameters has 1")


def test_a_pattern_that_only_java_reads_is_left_to_aws(dry, monkeypatch):
    """Another release of boto3 may bring some."""
    for shape in limits.shapes().values():
        if "pattern" in shape:
            monkeypatch.setitem(shape, "pattern", r"\p{Alnum}(")
    assert dry("--tag", "team=a")["Tags"]


def test_a_missing_region_role_or_store_names_the_option(cloud, cli, text_file, monkeypatch):
    words = (*LAUNCH, "--data", str(text_file))
    monkeypatch.delenv("SM_NANOGPT_ROLE")
    assert "--role" in cli(*words).error
    assert "ARN" in cli("--role", "mine", *words).error
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert "--region" in cli(*words).error
    monkeypatch.delenv("SM_NANOGPT_STORE")
    assert "--store" in cli("--region", "us-east-1", *words, "--dry-run").error


@pytest.mark.parametrize(
    ("families", "expected"),
    [
        ("g4dn g5 g6 g6e g6f g7 g7e p3dn p4d p4de p5 p5e p5en p6-b200 p6-b300", True),
        ("m5d m6gd m8id r5d", True),
        ("p2 p3 t3 m5 c5 c5n r5 m6i m7i-flex c8i m8i r8i r8i-flex", False),
    ],
)
def test_the_instances_with_local_disks_are_known(families, expected):
    for family in families.split():
        assert instances.has_local_disks(f"ml.{family}.48xlarge") == expected, family


def test_each_type_is_known_to_have_gpus_or_not():
    assert instances.describe_instance("ml.g5.12xlarge") == "ml.g5.12xlarge: 4 A10G"
    assert instances.describe_instance("ml.c8i.96xlarge") == "ml.c8i.96xlarge: no GPU"
    for name, family in instances.FAMILIES.items():
        sizes = {*family.gpu_counts, *family.prices}
        assert {f"ml.{name}.{size}" for size in sizes} <= set(limits.instance_types())
    for name in limits.instance_types():
        if instances.instance_problem([name]):
            assert name.startswith(("ml.trn", "ml.p2.", "ml.p6e-gb200."))
        else:
            assert instances.looks_like_gpu(name) == bool(instances.count_gpus(name)), name


@pytest.mark.parametrize(
    ("instance", "layers", "fits"),
    [
        ("ml.g5.xlarge", 8, True),  # 1.6 billion parameters in matrices
        ("ml.g5.xlarge", 12, False),
        ("ml.g5.48xlarge", 12, True),  # eight GPUs share the momentum
        ("ml.p5.4xlarge", 12, True),
        ("ml.m5.xlarge", 12, True),
    ],
)
def test_a_model_that_no_gpu_can_hold_is_refused(instance, layers, fits):
    job = TrainingJob(
        instance=instance,
        data="s3://bucket/data",
        hyperparameters={"n_layer": layers, "n_embd": 4096, "n_head": 32},
    )
    if fits:
        check_memory(job, instance)
    else:
        with pytest.raises(InputError, match="24 GB"):
            check_memory(job, instance)


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
        uri = machines.training_image(region, image.version, True)
        assert uri == f"{registry}/{image.name(gpu=True)}"
    with pytest.raises(InputError, match="known in eu-nowhere-1"):
        machines.training_image("eu-nowhere-1", DEFAULT_VERSION, True)


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
    assert link == (host and f"{host}sagemaker/home?region={region}#/jobs/job")


def test_a_launch_does_not_change_the_callers_sdk(dry, monkeypatch, caplog):
    dry()  # imports the SDK without a word of its own
    from sagemaker import estimator, utils

    mine = Mock(side_effect=AssertionError("our own config is not validated"))
    monkeypatch.setattr(utils, "validate_sagemaker_config", mine)
    loggers = [logging.getLogger(name) for name in (None, "sagemaker", "sagemaker.config")]
    for logger in loggers:
        caplog.set_level(logging.DEBUG, logger.name)
    before = estimator.TensorBoardApp, dict(os.environ)
    dry()
    assert (estimator.TensorBoardApp, dict(os.environ)) == before
    assert [logger.level for logger in loggers] == [logging.DEBUG] * 3
    assert utils.validate_sagemaker_config is mine


def test_launches_in_threads_do_not_change_the_process():
    """Another would take for the process's own what the first has set."""
    seen = list[str]()

    def launch(n: int) -> None:
        with quiet_sdk():
            seen.append("enters")
            time.sleep(0.02)
            seen.append("leaves")

    with ThreadPoolExecutor() as pool:
        list(pool.map(launch, range(4)))
    assert seen == ["enters", "leaves"] * 4


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
