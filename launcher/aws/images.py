"""AWS's training images for PyTorch: names, launchers, and until when AWS patches them.

The facts are those of github.com/aws/deep-learning-containers (docs/src/data, docker/pytorch and
.github/config/image), read in November 2026. The SDK knows no image after 2.8.0.
Called by the SageMaker backend, the estimator and `doctor`.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from datetime import date

from launcher.aws.instances import GPUS, looks_like_gpu, types_of
from launcher.errors import InputError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Image:
    """One release of the image. version is torch's; cuda is that of the image for GPUs."""

    version: str
    repository: str
    python: str
    cuda: str
    patched_until: date

    @property
    def minor(self) -> str:
        return self.version.rpartition(".")[0]

    def name(self, gpu: bool) -> str:
        """Repository and tag; patched builds keep the tag."""
        if self.repository == "pytorch-training":
            kind = "gpu" if gpu else "cpu"
            tag = f"{self.version}-{kind}-py{self.python.replace('.', '')}"
        else:
            kind = f"cu{self.cuda.replace('.', '')}" if gpu else "cpu"
            tag = f"{self.minor}-{kind}-amzn2023-sagemaker"
        return f"{self.repository}:{tag}"


# Oldest first.
IMAGES = (
    Image("2.8.0", "pytorch-training", "3.12", "12.9", date(2026, 8, 6)),
    Image("2.9.0", "pytorch-training", "3.12", "13.0", date(2026, 10, 15)),
    Image("2.10.0", "pytorch-training", "3.13", "13.0", date(2027, 1, 21)),
    Image("2.11.0", "pytorch", "3.12", "13.0", date(2027, 4, 30)),
    Image("2.12.1", "pytorch", "3.12", "13.0", date(2027, 7, 2)),
    Image("2.13.0", "pytorch", "3.12", "13.3", date(2027, 7, 20)),
    Image("2.14.0", "pytorch", "3.12", "13.3", date(2027, 9, 28)),
)

# The accounts whose registries hold these images, by region; those of the SDK's version 2.257.7
# (sagemaker/image_uri_config/pytorch.json).
REGISTRIES = {
    "763104351884": "ap-northeast-1 ap-northeast-2 ap-south-1 ap-southeast-1 ap-southeast-2"
    " ca-central-1 eu-central-1 eu-north-1 eu-west-1 eu-west-2 eu-west-3 sa-east-1 us-east-1"
    " us-east-2 us-west-1 us-west-2",
    "626614931356": "af-south-1",
    "871362719292": "ap-east-1",
    "975050140332": "ap-east-2",
    "364406365360": "ap-northeast-3",
    "772153158452": "ap-south-2",
    "907027046896": "ap-southeast-3",
    "457447274322": "ap-southeast-4",
    "550225433462": "ap-southeast-5",
    "633930458069": "ap-southeast-6",
    "590183813437": "ap-southeast-7",
    "204538143572": "ca-west-1",
    "727897471807": "cn-north-1 cn-northwest-1",
    "380420809688": "eu-central-2",
    "692866216735": "eu-south-1",
    "503227376785": "eu-south-2",
    "780543022126": "il-central-1",
    "914824155844": "me-central-1",
    "217643126080": "me-south-1",
    "637423239942": "mx-central-1",
    "446045086412": "us-gov-east-1",
    "442386744353": "us-gov-west-1",
}

# The newest image with CUDA 13.0, which needs driver 580 or later on the host; a job cannot choose
# its host's. AWS does not publish the drivers of its training hosts, but releases an image with
# CUDA 13.0 after training jobs on ml.g5.12xlarge and ml.g6.12xlarge with NCCL; CUDA 13.3 is tested
# on ml.g4dn.12xlarge. Where a host's driver is older, train.py says that it sees no GPU, and 2.8.0
# (CUDA 12.9, driver 525) is left.
DEFAULT_VERSION = "2.12.1"

TORCHRUN_ALONE = "ml.p5.48xlarge"  # the only type for which the SDK refuses pytorchddp


def default_launcher(instance: str) -> str:
    return "torchrun" if TORCHRUN_ALONE in instance else "pytorchddp"


def find_image(version: str) -> Image:
    """Find the image of a version such as 2.13 or 2.13.0.

    Raises:
        InputError: the table has none.
    """
    for image in IMAGES:
        if version in (image.version, image.minor):
            return image
    known = ", ".join(image.version for image in IMAGES)
    raise InputError(
        f"--pytorch-version {version}: must be one of {known}; --image-uri takes any other image"
    )


def training_image(region: str, pytorch_version: str, gpu: bool) -> str:
    """The URI of AWS's PyTorch training image for GPU or CPU.

    Raises:
        InputError: there is no image of that version, or no registry in that region.
    """
    image = find_image(pytorch_version)
    for account, regions in REGISTRIES.items():
        if region in regions.split():
            suffix = ".cn" if region.startswith("cn-") else ""
            return f"{account}.dkr.ecr.{region}.amazonaws.com{suffix}/{image.name(gpu)}"
    raise InputError(
        f"region {region}: no registry of AWS's training images is known there; --image-uri names"
        " an image"
    )


def image_of(uri: str) -> Image | None:
    """The release that a URI in any registry names; None if it is unknown."""
    named = re.search(r"(?:^|/)([\w-]+):(\d+\.\d+)(?:\.\d+)?-(?:gpu|cpu|cu\d)", uri)
    for image in IMAGES:
        if named and named.groups() == (image.repository, image.minor):
            return image
    return None


def problem(uri: str, instance: str, launcher: str) -> str | None:
    """Why a launcher does not run in an image on an instance type, or None.

    instance may be several types, separated by commas.
    """
    kind = re.search(
        r"(^|/)pytorch[\w-]*:.*?-(inference|ec2|eks|ecs|cpu)\b|/pytorch-inference", uri
    )
    if kind and (kind[2] != "cpu" or looks_like_gpu(instance)):
        return f"{name_of(uri)} is no SageMaker training image for {instance}"
    if launcher == "pytorchddp" and TORCHRUN_ALONE in instance:
        return f"the SageMaker SDK refuses pytorchddp on {TORCHRUN_ALONE}; use --launcher torchrun"
    image = image_of(uri)
    for name in types_of(instance):
        _, gpu = GPUS.get(name, (0, ""))
        if image and gpu == "V100" and not image.cuda.startswith("12."):
            return (
                f"{name_of(uri)} has CUDA {image.cuda}, which does not support the V100 of {name};"
                " use --pytorch-version 2.8.0"
            )
    return None


def log_image(uri: str, instance: str, launcher: str, today: date) -> None:
    """Log the release of a known image; warn if AWS no longer patches it."""
    image = image_of(uri)
    if image is None:
        return
    if image.patched_until < today:
        logger.warning(no_patches(image, uri, instance, launcher, today))
    else:
        until = f"patched until {image.patched_until}"
        logger.info(f"image: {name_of(uri)} (Python {image.python}, {until})")


def no_patches(image: Image, uri: str, instance: str, launcher: str, today: date) -> str:
    """Say that AWS no longer patches an image, and which options choose the newest one that it
    patches and that runs on the instance type."""
    ended = f"AWS stopped patching {name_of(uri)} on {image.patched_until}"
    patched = [other for other in reversed(IMAGES) if other.patched_until >= today]
    for starter in dict.fromkeys((launcher, "torchrun")):
        for other in patched:
            if problem(other.name(looks_like_gpu(instance)), instance, starter) is None:
                way = f"--pytorch-version {other.version}"
                way += "" if starter == launcher else f" --launcher {starter}"
                return f"{ended}; use {way}, patched until {other.patched_until}"
    return f"{ended}, and no image known here is patched and runs on {instance}"


def name_of(uri: str) -> str:
    """Repository and tag, without the registry."""
    return uri.rpartition("/")[2]
