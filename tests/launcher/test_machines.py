"""The table of AWS's images: names, and what runs in them."""

from __future__ import annotations

import pytest

from sm_nanogpt import InputError
from sm_nanogpt.launcher import machines
from sm_nanogpt.launcher.machines import (
    DEFAULT_VERSION,
    IMAGES,
    default_launcher,
    find_image,
    image_problem,
)

G5 = "ml.g5.12xlarge"


def test_images_have_the_names_that_aws_gives_them():
    cases = [
        ("2.8.0", True, "pytorch-training:2.8.0-gpu-py312"),
        ("2.10.0", True, "pytorch-training:2.10.0-gpu-py313"),
        ("2.10.0", False, "pytorch-training:2.10.0-cpu-py313"),
        ("2.12.1", True, "pytorch:2.12-cu130-amzn2023-sagemaker"),
        ("2.13.0", True, "pytorch:2.13-cu133-amzn2023-sagemaker"),
        ("2.13.0", False, "pytorch:2.13-cpu-amzn2023-sagemaker"),
    ]
    for version, gpu, name in cases:
        assert find_image(version).name(gpu) == name


def test_an_image_is_found_by_version_and_minor():
    for image in IMAGES:
        assert find_image(image.version) is find_image(image.minor) is image


def test_a_version_without_an_image_error_lists_the_versions():
    with pytest.raises(InputError, match=r"pytorch_version=2\.1: .* 2\.8\.0, .*2\.14\.0"):
        find_image("2.1")


def test_each_image_runs_both_launchers_on_gpus_and_cpus():
    for image in IMAGES:
        for launcher in ("pytorchddp", "torchrun"):
            assert image_problem(image.name(gpu=True), image, G5, launcher) == ""
            assert image_problem(image.name(gpu=False), image, "ml.m5.xlarge", launcher) == ""


@pytest.mark.parametrize("instance", ["ml.p3.8xlarge", "ml.g5.xlarge,ml.p3dn.24xlarge"])
def test_v100s_need_an_image_before_cuda_13(instance):
    fitting = [
        image.version
        for image in IMAGES
        if image_problem(image.name(gpu=True), image, instance, "torchrun") == ""
    ]
    assert fitting == ["2.8.0"]


@pytest.mark.parametrize(
    "uri",
    [
        "registry/pytorch-inference:2.6.0-gpu-py312",
        "pytorch-training:2.9.0-gpu-py312-ubuntu22.04-ec2",
        "pytorch-training:2.9.0-cpu-py312",
    ],
)
def test_an_image_that_trains_on_no_gpu_is_refused(uri):
    assert "is no SageMaker training image" in image_problem(uri, None, G5, "torchrun")


@pytest.mark.parametrize(
    ("instance", "launcher"), [("ml.p5.48xlarge", "torchrun"), ("ml.p5.4xlarge", "pytorchddp")]
)
def test_torchrun_is_the_default_where_pytorchddp_is_refused(instance, launcher):
    image = find_image(DEFAULT_VERSION)
    problem = image_problem(image.name(gpu=True), image, instance, "pytorchddp")
    assert default_launcher(instance) == launcher
    assert bool(problem) == (launcher == "torchrun")


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
        if image.commercial_only and region == "cn-north-1":
            continue
        uri = machines.training_image(region, image.version, True)
        assert uri == f"{registry}/{image.name(gpu=True)}"
    with pytest.raises(InputError, match="known in eu-nowhere-1"):
        machines.training_image("eu-nowhere-1", DEFAULT_VERSION, True)


def test_an_image_that_a_partition_lacks_is_refused():
    region = "us-gov-west-1"
    with pytest.raises(InputError, match=rf"pytorch_version=2\.14: .* no image .* in {region}"):
        machines.training_image(region, "2.14", True)
    assert machines.training_image(region, DEFAULT_VERSION, True)
