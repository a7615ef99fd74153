"""The SDK's estimator, which makes a request and changes nothing of the caller."""

from __future__ import annotations

import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from sm_nanogpt import InputError, Settings
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.sagemaker import estimator
from sm_nanogpt.launcher.sagemaker.backend import SageMakerBackend
from sm_nanogpt.launcher.sagemaker.estimator import quiet_sdk
from sm_nanogpt.launcher.sagemaker.request import Placement, create_request

JOB_ID = "sm-nanogpt-20261125-120000-abcd"
KEY = "arn:aws:kms:us-east-1:111122223333:key/1"
IMAGES = ("pytorch-training:2.10.0-gpu-py313", "pytorch:2.13-cu133-amzn2023-sagemaker")
JOB = TrainingJob(instance="ml.g5.xlarge", data="s3://bucket/data/text")
PLACEMENT = Placement(
    "us-east-1", "root", "arn:aws:iam::111122223333:role/one", "image:1", "s3://b/p", {}, None, None
)


def test_a_launch_does_not_change_the_callers_sdk(monkeypatch, caplog):
    estimator.create_request(JOB_ID, JOB, PLACEMENT)  # imports the SDK without a word of its own
    from sagemaker import estimator as sdk
    from sagemaker import utils

    mine = Mock(side_effect=AssertionError("our own config is not validated"))
    monkeypatch.setattr(utils, "validate_sagemaker_config", mine)
    loggers = [logging.getLogger(name) for name in (None, "sagemaker", "sagemaker.config")]
    for logger in loggers:
        caplog.set_level(logging.DEBUG, logger.name)
    state_before = sdk.TensorBoardApp, dict(os.environ)
    estimator.create_request(JOB_ID, JOB, PLACEMENT)
    assert (sdk.TensorBoardApp, dict(os.environ)) == state_before
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


def test_the_sdks_configuration_does_not_change_the_request(tmp_path, monkeypatch):
    config = tmp_path / "config.yaml"
    config.write_text(
        "SchemaVersion: '1.0'\n"
        "SageMaker:\n  TrainingJob:\n    EnableNetworkIsolation: true\n"
        "    VpcConfig: {Subnets: [subnet-1], SecurityGroupIds: [sg-1]}\n"
    )
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(config))
    request = estimator.create_request(JOB_ID, JOB, PLACEMENT)
    assert "VpcConfig" not in request
    assert not request.get("EnableNetworkIsolation")


jobs = st.fixed_dictionaries(
    {
        "instance": st.sampled_from(
            ["ml.g5.12xlarge", "ml.m5.xlarge", "ml.g5.xlarge,ml.g6.xlarge"]
        ),
        "data": st.sampled_from(["s3://bucket/data/text", "s3://bucket/data/text.txt"]),
        "launcher": st.sampled_from(["pytorchddp", "torchrun"]),
    },
    optional={
        "instance_count": st.integers(1, 8),
        "validation": st.just("s3://bucket/data/validation"),
        "init_from": st.just("s3://bucket/models/one"),
        "input_mode": st.sampled_from(["File", "FastFile"]),
        "spot": st.booleans(),
        "max_run": st.integers(60, 400_000),
        "max_wait": st.integers(400_000, 900_000),
        "keep_alive": st.integers(1, 3600),
        "volume_size": st.integers(1, 16_384),
        "environment": st.sampled_from([{"A": "b c"}, {"NCCL_DEBUG": "INFO"}]),
        "tags": st.just({"team": "one", "cost": "é"}),
        "subnets": st.just(("subnet-1", "subnet-2")),
        "security_group_ids": st.just(("sg-1",)),
        "network_isolation": st.booleans(),
        "encrypt_traffic": st.booleans(),
    },
)


placements = st.builds(
    Placement,
    region=st.just("us-east-1"),
    owner=st.sampled_from(["root", "role/é@x"]),
    role=st.just("arn:aws:iam::111122223333:role/one"),
    image_uri=st.sampled_from(IMAGES).map("763104351884.dkr.ecr.us-east-1.amazonaws.com/{}".format),
    store=st.just("s3://bucket/prefix"),
    hyperparameters=st.dictionaries(
        st.sampled_from(["max_steps", "preset", "learning_rate", "tie_embeddings"]),
        st.sampled_from([True, 7, 0.5, "quick", "1e-3", 'a "quoted" é']),
    ),
    kms_key=st.sampled_from([None, KEY]),
    volume_kms_key=st.sampled_from([None, KEY]),
)


@given(values=jobs, placement=placements)
@settings(max_examples=24, derandomize=True, database=None, phases=[Phase.generate])
def test_without_the_sdk_the_request_is_the_same(values, placement):
    try:
        job = TrainingJob(**values)
    except InputError:
        assume(False)
    expected = estimator.create_request(JOB_ID, job, placement)
    assert create_request(JOB_ID, job, placement) == expected


@pytest.mark.parametrize("lacking", ["sagemaker", "sagemaker.pytorch"])  # which version 3 lacks
def test_without_a_whole_version_2_the_sdk_is_not_used(lacking, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, lacking, None)
    backend = SageMakerBackend(Settings(home=tmp_path, region="us-east-1"))
    assert backend.request(JOB_ID, JOB, PLACEMENT) == create_request(JOB_ID, JOB, PLACEMENT)


@pytest.mark.usefixtures("cloud")
def test_nothing_is_sent_if_the_sdk_would_send_another_request(
    cloud, s3, cli, short_text_file, monkeypatch
):
    other = {"TrainingJobName": "another", "StoppingCondition": {"MaxRuntimeInSeconds": 86_400}}
    monkeypatch.setattr(estimator, "create_request", lambda *_: other)
    arguments = ("launch", "--instance", "ml.g5.xlarge", "--data", str(short_text_file))
    assert cli(arguments).failed(1, "StoppingCondition", "nothing was sent", "constraints.txt")
    assert not cloud.calls
    assert not s3.list_objects_v2(Bucket=s3.bucket)["KeyCount"]
