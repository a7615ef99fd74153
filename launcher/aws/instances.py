"""SageMaker training instances: their names, GPUs and disks. Validation and backends use it.

boto3 knows the names; the table below adds the GPUs, from EC2's data. A training type outside of
the GPU families has none.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence

from launcher.errors import InputError, did_you_mean

logger = logging.getLogger(__name__)


_ONE_GPU = dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"), 1)
_ONE_TO_EIGHT = {**_ONE_GPU, "12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
_G7 = {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, "24xlarge": 4, "48xlarge": 8}

# (GPU, how many the sizes have) by family.
_FAMILIES: dict[str, tuple[str, dict[str, int]]] = {
    "g4dn": ("T4", {**_ONE_GPU, "12xlarge": 4}),
    "g5": ("A10G", _ONE_TO_EIGHT),
    "g6": ("L4", _ONE_TO_EIGHT),
    "g6e": ("L40S", _ONE_TO_EIGHT),
    "g7": ("RTX PRO 4500", _G7),
    "g7e": ("RTX PRO 6000", _G7),
    "p3": ("V100", {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8}),
    "p3dn": ("V100 32GB", {"24xlarge": 8}),
    "p4d": ("A100", {"24xlarge": 8}),
    "p4de": ("A100 80GB", {"24xlarge": 8}),
    "p5": ("H100", {"4xlarge": 1, "48xlarge": 8}),
    "p5e": ("H200", {"48xlarge": 8}),
    "p5en": ("H200", {"48xlarge": 8}),
    "p6-b200": ("B200", {"48xlarge": 8}),
    "p6-b300": ("B300", {"48xlarge": 8}),
}
GPUS: dict[str, tuple[int, str]] = {
    f"ml.{family}.{size}": (count, gpu)
    for family, (gpu, sizes) in _FAMILIES.items()
    for size, count in sizes.items()
}

# GiB of memory of each GPU.
GPU_MEMORY: dict[str, int] = {
    "T4": 16,
    "A10G": 24,
    "L4": 24,
    "L40S": 48,
    "RTX PRO 4500": 32,
    "RTX PRO 6000": 96,
    "V100": 16,
    "V100 32GB": 32,
    "A100": 40,
    "A100 80GB": 80,
    "H100": 80,
    "H200": 141,
    "B200": 180,
    "B300": 268,
}

PATTERN = re.compile(r"ml\.[a-z][a-z0-9-]*\.[a-z0-9]+")


# Instance types that AWS's training images do not run on, and why.
UNSUITABLE = {
    r"ml\.(trn|inf)": "train.py needs GPUs or a CPU, not Neuron",
    r"ml\.p\d+e-gb": "its CPUs are Arm, and AWS's training images are for x86",
    r"ml\.p2\.": "PyTorch no longer supports its GPU (K80)",
}


@functools.cache
def sagemaker_types() -> tuple[str, ...]:
    """The training instance types that boto3 knows; SageMaker may have newer ones."""
    from botocore.loaders import create_loader

    model = create_loader().load_service_model("sagemaker", "service-2")
    return tuple(model["shapes"]["TrainingInstanceType"]["enum"])


def size_of(name: str) -> str:
    return name.rpartition(".")[2]


def nearest(name: str) -> str:
    return did_you_mean(name, sagemaker_types(), cutoff=0.5)


def check_instance(name: str) -> None:
    """Raise InputError unless a name is `local`, a SageMaker type, or may be a newer type.

    AWS adds families more often than sizes, so an unknown size is a typo. Types that the training
    image does not run on are refused too.
    """
    for pattern, reason in UNSUITABLE.items():
        if re.match(pattern, name):
            raise InputError(f"--instance {name}: {reason}")
    if name == "local" or name in sagemaker_types():
        return
    if PATTERN.fullmatch(name) and size_of(name) in map(size_of, sagemaker_types()):
        return
    known = did_you_mean(name, ["local"]) or nearest(f"ml.{name.removeprefix('ml.')}")
    hint = f"; {known}" if known else ""
    raise InputError(f"--instance {name}: must be local or a SageMaker type{hint}")


MOST_TYPES = 5  # that SageMaker chooses among


def types_of(instance: str) -> tuple[str, ...]:
    """The instance types of `--instance`, separated by commas."""
    return tuple(name.strip() for name in instance.split(","))


def check_instances(names: Sequence[str]) -> None:
    """Raise InputError unless SageMaker can choose among these types.

    They share one image, so either all of them have GPUs or none has.
    """
    for name in names:
        check_instance(name)
    problem = None
    if len(names) > 1 and "local" in names:
        problem = "local cannot be combined with other types"
    elif len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        problem = f"{twice} is given twice"
    elif len(names) > MOST_TYPES:
        problem = f"{len(names)} types, and SageMaker allows {MOST_TYPES}"
    elif len({looks_like_gpu(name) for name in names}) > 1:
        problem = "types with and without GPUs need different images"
    if problem:
        raise InputError(f"--instance {','.join(names)}: {problem}")


def log_instance(name: str) -> None:
    """Log what a machine has; warn about a type that boto3 does not know."""
    level = logging.WARNING if gpus_of(name) is None else logging.INFO
    logger.log(level, describe_instance(name))


def describe_instance(name: str) -> str:
    """The GPUs of an instance type, or why it may not be one."""
    if name in GPUS:
        count, gpu = GPUS[name]
        return f"{name}: {count} {gpu}"
    if name in sagemaker_types():
        return f"{name}: no GPU"
    kind = "GPU" if looks_like_gpu(name) else "CPU"
    hint = f"; {near}" if (near := nearest(name)) else ""
    return (
        f"boto3 knows no training instance {name}, so SageMaker may refuse it; assuming a {kind}"
        f" instance{hint}"
    )


def gpus_of(name: str) -> int | None:
    """The number of GPUs of an instance type; None if the type is unknown."""
    if name in GPUS:
        return GPUS[name][0]
    return 0 if name in sagemaker_types() else None


# In EC2's names, a d after the generation means local disks; the GPU families have them too,
# except p2 and p3.
LOCAL_STORAGE = re.compile(r"ml\.([a-z]+\d[a-z]*d[a-z]*|g\d[a-z]*|p[4-9][a-z0-9-]*)\.")


def has_local_storage(name: str) -> bool:
    """Whether an instance type has local disks, as most GPU families do.

    SageMaker adds no volume there: it ignores the volume size of a request and refuses a key.
    """
    return bool(LOCAL_STORAGE.match(name))


def looks_like_gpu(name: str) -> bool:
    """Whether a type belongs to a GPU family, known or not: AWS names them g and p."""
    return bool(re.match(r"ml\.[gp]\d", name))
