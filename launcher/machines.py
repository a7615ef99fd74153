"""AWS's training images, and how many processes train on this machine."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.cores import cores
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.instances import V100, V100_32GB, gpu_of, looks_like_gpu, types_of

# -- processes of this machine ---------------------------------------------------------------------

CPU_TIMES = Path("/proc/stat")
SAMPLE_SECONDS = 0.25


def cpu_processes(config: Config) -> int:
    """The number of processes with which this machine's CPU trains fastest.

    Threads wait for each other at every operation. Processes wait once in a step, and then exchange
    all gradients. On two quiet cores, two threads are faster than two processes by a third in a
    step of 10**9 operations, by a tenth in one of 10**10, and not at all in one of 10**12. On busy
    cores, threads lose most, since each waits for the slowest.
    """
    operations = 6 * config.matrix_parameters * config.batch_size * config.block_size
    if operations < 3e11:
        return 1
    micro_batch = config.batch_size // max(1, config.gradient_accumulation_steps)
    max_processes = min(8, cores() // chosen_threads())
    for n in range(max_processes, 1, -1):
        if micro_batch % n == 0:
            return n
    return 1


def chosen_threads() -> int:
    """The threads of a process, by OMP_NUM_THREADS; 1 if that is not set."""
    # The variable may have a number for each level of nesting.
    match = re.match(r"\s*([1-9]\d*)", os.environ.get("OMP_NUM_THREADS", ""))
    return int(match[1]) if match else 1


def is_busy() -> bool:
    """True if other programs use over a quarter of the cores that a job may use.

    On Linux, this program waits a quarter of a second, and measures. On other systems, the mean
    load of the last minute decides, which includes this program's own runs.
    """
    start_seconds = busy_seconds()
    if start_seconds is None:
        busy_cores = os.getloadavg()[0]
    else:
        time.sleep(SAMPLE_SECONDS)
        end_seconds = busy_seconds() or start_seconds
        busy_cores = (end_seconds - start_seconds) / SAMPLE_SECONDS
    return busy_cores > cores() / 4


def busy_seconds() -> float | None:
    """The seconds that the CPUs of this process have computed since the start of the system.

    All programs count. None if the system does not measure it.

    https://docs.kernel.org/filesystems/proc.html#miscellaneous-kernel-statistics-in-proc-stat
    """
    try:
        rows = [line.split() for line in CPU_TIMES.read_text().splitlines()]
    except OSError:
        return None
    cpus = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for name, *counts in rows:
        if name in cpus:
            user, nice, system, _idle, _waiting, *interrupts = map(int, counts[:8])
            ticks += user + nice + system + sum(interrupts)
    return ticks / os.sysconf("SC_CLK_TCK")


# -- images ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Image:
    """One release of the image."""

    version: str  # of torch
    repository: str
    python: str
    cuda: str  # of the image for GPUs
    commercial_only: bool = False  # True if China and GovCloud have no copy of it

    @property
    def minor(self) -> str:
        return self.version.rpartition(".")[0]

    def name(self, gpu: bool) -> str:
        """The repository and the tag; patched builds keep the tag."""
        if self.repository == "pytorch-training":
            kind = "gpu" if gpu else "cpu"
            tag = f"{self.version}-{kind}-py{self.python.replace('.', '')}"
        else:
            kind = f"cu{self.cuda.replace('.', '')}" if gpu else "cpu"
            tag = f"{self.minor}-{kind}-amzn2023-sagemaker"
        return f"{self.repository}:{tag}"


# Oldest first.
IMAGES = (
    Image("2.8.0", "pytorch-training", "3.12", "12.9"),
    Image("2.9.0", "pytorch-training", "3.12", "13.0"),
    Image("2.10.0", "pytorch-training", "3.13", "13.0"),
    Image("2.11.0", "pytorch", "3.12", "13.0"),
    Image("2.12.1", "pytorch", "3.12", "13.0"),
    Image("2.13.0", "pytorch", "3.12", "13.3"),
    Image("2.14.0", "pytorch", "3.12", "13.3", commercial_only=True),
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

OTHER_PARTITIONS = ("cn-", "us-gov-")  # the beginnings of the names of their regions

# The newest image with CUDA 13.0, which needs driver 580 or later on the host; a job cannot choose
# its host's. AWS does not publish the drivers of its training hosts, but releases an image with
# CUDA 13.0 after training jobs on ml.g5.12xlarge and ml.g6.12xlarge with NCCL; CUDA 13.3 is tested
# on ml.g4dn.12xlarge. Where a host's driver is older, train.py says that it sees no GPU, and 2.8.0
# (CUDA 12.9, driver 525) is left.
DEFAULT_VERSION = "2.12.1"

TORCHRUN_ONLY = "ml.p5.48xlarge"  # the only type for which the SDK refuses pytorchddp


def default_launcher(instance: str) -> str:
    return "torchrun" if TORCHRUN_ONLY in instance else "pytorchddp"


def find_image(version: str) -> Image:
    """Find the image of a version such as 2.13 or 2.13.0."""
    for image in IMAGES:
        if version in (image.version, image.minor):
            return image
    versions = ", ".join(image.version for image in IMAGES)
    raise InputError(
        f"must be one of {versions}", code="other-image", field="pytorch_version", value=version
    )


def training_image(region: str, pytorch_version: str, gpu: bool) -> str:
    """The URI of AWS's image. Raises InputError if there is none of this version or region."""
    image = find_image(pytorch_version)
    if image.commercial_only and region.startswith(OTHER_PARTITIONS):
        missing = f"AWS has no image of PyTorch {image.version} in {region}"
        raise InputError(
            missing, code="other-image", field="pytorch_version", value=pytorch_version
        )
    for account, regions in REGISTRIES.items():
        if region in regions.split():
            suffix = ".cn" if region.startswith("cn-") else ""
            return f"{account}.dkr.ecr.{region}.amazonaws.com{suffix}/{image.name(gpu)}"
    raise InputError(
        f"no registry of AWS's training images is known in {region}", code="other-image"
    )


def image_problem(uri: str, image: Image | None, instance: str, launcher: str) -> str:
    """Why a launcher does not run in an image on an instance type, or ''.

    image is the release that the URI names, if it is AWS's. instance may be several types,
    separated by commas.
    """
    other_image = r"(^|/)pytorch[\w-]*:.*?-(inference|ec2|eks|ecs|cpu)\b|/pytorch-inference"
    match = re.search(other_image, uri)
    if match and (match[2] != "cpu" or looks_like_gpu(instance)):
        return f"{name_of(uri)} is no SageMaker training image for {instance}"
    if launcher == "pytorchddp" and TORCHRUN_ONLY in instance:
        return f"the SageMaker SDK refuses pytorchddp on {TORCHRUN_ONLY}; torchrun runs there"
    for name in types_of(instance):
        is_v100 = gpu_of(name) in (V100, V100_32GB)
        if image and is_v100 and not image.cuda.startswith("12."):
            lacks = f"has CUDA {image.cuda}, which does not support the V100 of {name}"
            return f"{name_of(uri)} {lacks}; the image of PyTorch 2.8.0 does"
    return ""


def name_of(uri: str) -> str:
    """The repository and the tag of an image's URI, without the registry."""
    return uri.rpartition("/")[2]
