"""The SageMaker training instances: what a launch has to know of each.

boto3 knows the names; the table below adds the GPUs, by what EC2 says of its instance types. A type
that SageMaker trains on, and that no GPU family holds, has none.
"""

from __future__ import annotations

import difflib
import functools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import InputError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Instance:
    """A machine with GPUs. gpu_memory is in GiB for each GPU, network in Gbit/s."""

    gpus: int
    gpu: str
    gpu_memory: int
    network: float


def _gpu_family(
    family: str, gpu: str, gpu_memory: int, sizes: Mapping[str, tuple[int, float]]
) -> dict[str, Instance]:
    return {
        f"ml.{family}.{size}": Instance(gpus, gpu, gpu_memory, network)
        for size, (gpus, network) in sizes.items()
    }


_ONE_TO_EIGHT = {
    "xlarge": (1, 10),
    "2xlarge": (1, 10),
    "4xlarge": (1, 25),
    "8xlarge": (1, 25),
    "16xlarge": (1, 25),
    "12xlarge": (4, 40),
    "24xlarge": (4, 50),
    "48xlarge": (8, 100),
}

INSTANCES: dict[str, Instance] = {
    **_gpu_family("g5", "A10G", 24, _ONE_TO_EIGHT),
    **_gpu_family("g6", "L4", 24, _ONE_TO_EIGHT),
    **_gpu_family(
        "g6e",
        "L40S",
        48,
        {
            "xlarge": (1, 20),
            "2xlarge": (1, 20),
            "4xlarge": (1, 20),
            "8xlarge": (1, 25),
            "16xlarge": (1, 35),
            "12xlarge": (4, 100),
            "24xlarge": (4, 200),
            "48xlarge": (8, 400),
        },
    ),
    **_gpu_family(
        "g4dn",
        "T4",
        16,
        {
            "xlarge": (1, 25),
            "2xlarge": (1, 25),
            "4xlarge": (1, 25),
            "8xlarge": (1, 50),
            "16xlarge": (1, 50),
            "12xlarge": (4, 50),
        },
    ),
    **_gpu_family("p3", "V100", 16, {"2xlarge": (1, 10), "8xlarge": (4, 10), "16xlarge": (8, 25)}),
    **_gpu_family("p3dn", "V100", 32, {"24xlarge": (8, 100)}),
    **_gpu_family("p4d", "A100", 40, {"24xlarge": (8, 400)}),
    **_gpu_family("p4de", "A100", 80, {"24xlarge": (8, 400)}),
    **_gpu_family("p5", "H100", 80, {"4xlarge": (1, 100), "48xlarge": (8, 3200)}),
    **_gpu_family("p5e", "H200", 141, {"48xlarge": (8, 3200)}),
    **_gpu_family("p5en", "H200", 141, {"48xlarge": (8, 3200)}),
    **_gpu_family("p6-b200", "B200", 179, {"48xlarge": (8, 3200)}),
    **_gpu_family("p6-b300", "B300", 268, {"48xlarge": (8, 6400)}),
    **_gpu_family(
        "g7",
        "RTX PRO 4500",
        32,
        {
            "2xlarge": (1, 60),
            "4xlarge": (1, 60),
            "8xlarge": (1, 80),
            "12xlarge": (2, 175),
            "24xlarge": (4, 350),
            "48xlarge": (8, 700),
        },
    ),
    **_gpu_family(
        "g7e",
        "RTX PRO 6000",
        96,
        {
            "2xlarge": (1, 50),
            "4xlarge": (1, 50),
            "8xlarge": (1, 100),
            "12xlarge": (2, 400),
            "24xlarge": (4, 800),
            "48xlarge": (8, 1600),
        },
    ),
}

PATTERN = re.compile(r"ml\.[a-z][a-z0-9-]*\.[a-z0-9]+")


# Machines that AWS's training images do not run on, and why.
UNSUITABLE = {
    r"ml\.(trn|inf)": "train.py needs GPUs or a CPU, not Neuron",
    r"ml\.p\d+e-gb": "its CPUs are Arm, and AWS's training images are for x86",
    r"ml\.p2\.": "PyTorch has ended its support of such GPUs (K80)",
}


@functools.cache
def sagemaker_types() -> tuple[str, ...]:
    """The types that SageMaker trains on, as boto3 knows them; SageMaker may have newer ones."""
    from botocore.loaders import create_loader

    model = create_loader().load_service_model("sagemaker", "service-2")
    return tuple(model["shapes"]["TrainingInstanceType"]["enum"])


def size_of(name: str) -> str:
    return name.rpartition(".")[2]


def nearest_instances(name: str) -> list[str]:
    """Up to three known types that look like `name`."""
    return difflib.get_close_matches(name, sagemaker_types(), n=3, cutoff=0.5)


def check_instance(name: str) -> None:
    """Raises InputError unless it is `local`, a SageMaker type, or may be one newer than boto3.

    AWS adds families far more often than sizes, so an unknown size is a typing error. Machines that
    the training image does not run on are refused too.
    """
    for pattern, reason in UNSUITABLE.items():
        if re.match(pattern, name):
            raise InputError(f"--instance {name}: {reason}")
    if name == "local" or name in sagemaker_types():
        return
    if PATTERN.fullmatch(name) and size_of(name) in map(size_of, sagemaker_types()):
        return
    near = difflib.get_close_matches(name, ["local"])
    near = near or nearest_instances(f"ml.{name.removeprefix('ml.')}")
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise InputError(f"--instance {name}: must be local or a SageMaker type{hint}")


MOST_TYPES = 5  # that SageMaker chooses among


def types_of(instance: str) -> tuple[str, ...]:
    """The types of `--instance`, which have commas between them."""
    return tuple(name.strip() for name in instance.split(","))


def check_instances(names: Sequence[str]) -> None:
    """Raises InputError unless a job can run on the first of these types that has capacity.

    They have one image, so either all of them have GPUs or none has.
    """
    for name in names:
        check_instance(name)
    problem = None
    if len(names) > 1 and "local" in names:
        problem = "local does not go with other types"
    elif len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        problem = f"{twice} is there twice"
    elif len(names) > MOST_TYPES:
        problem = f"{len(names)} types, and SageMaker takes {MOST_TYPES}"
    elif len({looks_like_gpu(name) for name in names}) > 1:
        problem = "some types have GPUs and some have none, and these need different images"
    if problem:
        raise InputError(f"--instance {','.join(names)}: {problem}")


def log_instance(name: str) -> None:
    """Log what a machine has; warn about a type that boto3 does not know."""
    level = logging.WARNING if gpus_of(name) is None else logging.INFO
    logger.log(level, describe_instance(name))


def describe_instance(name: str) -> str:
    """The GPUs of an instance type, or why it may not be one."""
    if name in INSTANCES:
        known = INSTANCES[name]
        gpus = f"{known.gpus} {known.gpu} of {known.gpu_memory} GiB"
        return f"{name}: {gpus}, {known.network:g} Gbit/s"
    if name in sagemaker_types():
        return f"{name}: no GPU"
    near = nearest_instances(name)
    kind = "GPU" if looks_like_gpu(name) else "CPU"
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return (
        f"boto3 knows no training instance {name}, so SageMaker may refuse it; it is taken"
        f" for a {kind} instance{hint}"
    )


def gpus_of(name: str) -> int | None:
    """How many GPUs a machine has; None where the type is not known."""
    if name in INSTANCES:
        return INSTANCES[name].gpus
    return 0 if name in sagemaker_types() else None


# By EC2's naming, a d after the generation stands for disks of the machine; the GPU families have
# them too, but p2 and p3.
LOCAL_STORAGE = re.compile(r"ml\.([a-z]+\d[a-z]*d[a-z]*|g\d[a-z]*|p[4-9][a-z0-9-]*)\.")


def has_local_storage(name: str) -> bool:
    """Whether the machine brings disks of its own, as most GPU families do.

    SageMaker adds no volume there: the size that a request names has no effect, and a key for it is
    refused.
    """
    return bool(LOCAL_STORAGE.match(name))


def looks_like_gpu(name: str) -> bool:
    """Whether a type is of a GPU family, known or not: AWS names those g and p."""
    return bool(re.match(r"ml\.[gp]\d", name))
