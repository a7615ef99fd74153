"""SageMaker's instance types: a table of their families, and functions that read it.

boto3 knows the names of the types, and the table may have newer ones. A training type that only
boto3 knows has no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sm_nanogpt.launcher.backends import LOCAL
from sm_nanogpt.launcher.errors import did_you_mean
from sm_nanogpt.launcher.limits import instance_types


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    teraflops is the number of 10**12 dense 16-bit operations per second in NVIDIA's data sheet. It
    is None if it was not looked up.
    """

    name: str
    memory: int  # GB
    teraflops: int | None = None


@dataclass(frozen=True)
class Price:
    """A price of an instance type.

    per_hour is in USD for one instance; source says where it is from, and its date.
    """

    per_hour: float
    source: str


@dataclass(frozen=True)
class Family:
    """The instance types `ml.NAME.SIZE` of a family, by their sizes.

    If a family has local disks, SageMaker adds no volume: it ignores the volume size of a request
    and refuses a key. prices has the prices that were looked up in AWS's price list, in the month
    `priced`, which a family with prices names: USD per hour in us-east-1.
    """

    gpu: Gpu | None = None
    gpu_counts: Mapping[str, int] = field(default_factory=dict)  # by size
    has_local_disks: bool = True
    prices: Mapping[str, float] = field(default_factory=dict)
    priced: str = ""


# -- the tables ------------------------------------------------------------------------------------

T4 = Gpu("T4", memory=16, teraflops=65)
A10G = Gpu("A10G", memory=24, teraflops=70)
L4 = Gpu("L4", memory=24, teraflops=121)
L40S = Gpu("L40S", memory=48, teraflops=362)
RTX_PRO_4500 = Gpu("RTX PRO 4500", memory=32)
RTX_PRO_6000 = Gpu("RTX PRO 6000", memory=96)
V100 = Gpu("V100", memory=16, teraflops=125)
V100_32GB = Gpu("V100 32GB", memory=32, teraflops=125)
A100 = Gpu("A100", memory=40, teraflops=312)
A100_80GB = Gpu("A100 80GB", memory=80, teraflops=312)
H100 = Gpu("H100", memory=80, teraflops=989)
H200 = Gpu("H200", memory=141, teraflops=989)
B200 = Gpu("B200", memory=192)
B300 = Gpu("B300", memory=288)

ONE_GPU = {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1}
ONE_TO_EIGHT = {**ONE_GPU, "12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
G7_COUNTS = {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, "24xlarge": 4, "48xlarge": 8}

FAMILIES = {
    "g4dn": Family(T4, {**ONE_GPU, "12xlarge": 4}, prices={"xlarge": 0.736}, priced="2026-07"),
    "g5": Family(
        A10G,
        ONE_TO_EIGHT,
        prices={
            "xlarge": 1.408,
            "2xlarge": 1.515,
            "4xlarge": 2.03,
            "8xlarge": 3.06,
            "12xlarge": 7.09,
        },
        priced="2026-07",
    ),
    "g6": Family(
        L4,
        ONE_TO_EIGHT,
        prices={"xlarge": 1.127, "2xlarge": 1.222, "4xlarge": 1.654, "12xlarge": 5.752},
        priced="2026-07",
    ),
    "g6e": Family(
        L40S,
        ONE_TO_EIGHT,
        prices={"2xlarge": 2.8, "4xlarge": 3.76, "8xlarge": 5.66, "12xlarge": 13.12},
        priced="2026-07",
    ),
    "g7": Family(RTX_PRO_4500, G7_COUNTS),
    "g7e": Family(RTX_PRO_6000, G7_COUNTS),
    "p3": Family(V100, {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8}, has_local_disks=False),
    "p3dn": Family(V100_32GB, {"24xlarge": 8}),
    "p4d": Family(A100, {"24xlarge": 8}),
    "p4de": Family(A100_80GB, {"24xlarge": 8}),
    "p5": Family(H100, {"4xlarge": 1, "48xlarge": 8}),
    "p5e": Family(H200, {"48xlarge": 8}),
    "p5en": Family(H200, {"48xlarge": 8}),
    "p6-b200": Family(B200, {"48xlarge": 8}),
    "p6-b300": Family(B300, {"48xlarge": 8}),
    "m5": Family(has_local_disks=False, prices={"large": 0.115, "xlarge": 0.23}, priced="2026-07"),
}
GPUS = [family.gpu for family in FAMILIES.values() if family.gpu is not None]

# Names of types with local disks, for families that are not in the table: EC2 puts a d after the
# generation. Newer GPU families also have such disks.
NAMES_LOCAL_DISKS = re.compile(r"ml\.([a-z]+\d[a-z]*d[a-z]*|g\d[a-z]*|p[4-9][a-z0-9-]*)\..*")

# Instance types that AWS's training images do not run on, and why.
UNSUITABLE = {
    r"ml\.(trn|inf)": "train.py needs GPUs or a CPU, not Neuron",
    r"ml\.p\d+e-gb": "its CPUs are Arm, and AWS's training images are for x86",
    r"ml\.p2\.": "PyTorch no longer supports its GPU (K80)",
}


# -- reading the tables ----------------------------------------------------------------------------


def types_of(instance: str) -> tuple[str, ...]:
    """The instance types that a field names, separated by commas."""
    return tuple(name.strip() for name in instance.split(","))


def known_types() -> set[str]:
    """The training instance types that boto3 or the table knows; SageMaker may have newer ones."""
    types = set(instance_types())
    for name, family in FAMILIES.items():
        types |= {f"ml.{name}.{size}" for size in (*family.gpu_counts, *family.prices)}
    return types


def family_and_size(name: str) -> tuple[str, str]:
    """The two parts of `ml.FAMILY.SIZE`."""
    family, _, size = name.removeprefix("ml.").rpartition(".")
    return family, size


def family_of(name: str) -> Family | None:
    """The family of an instance type; None if the table does not have it."""
    return FAMILIES.get(family_and_size(name)[0])


def gpu_of(name: str) -> Gpu | None:
    """The kind of GPU of an instance type; None if it has none or is unknown."""
    family = family_of(name) or Family()
    return family.gpu


def count_gpus(name: str) -> int | None:
    """The number of GPUs of an instance type; None if the type is unknown."""
    family = family_of(name)
    if family is not None and family.gpu is not None:
        return family.gpu_counts.get(family_and_size(name)[1])
    return 0 if name in known_types() else None


def assume_gpus(name: str) -> int:
    """The number of GPUs of an instance type. An unknown type counts as 8 if its name has a GPU's
    form."""
    n_gpus = count_gpus(name)
    if n_gpus is not None:
        return n_gpus
    return 8 if looks_like_gpu(name) else 0


def offline_price(name: str) -> Price | None:
    """The price of an instance type in us-east-1, from the table; None if it has none."""
    family = family_of(name) or Family()
    per_hour = family.prices.get(family_and_size(name)[1])
    return None if per_hour is None else Price(per_hour, f"the offline table of {family.priced}")


def has_local_disks(name: str) -> bool:
    """True if an instance type has local disks, as most GPU families do."""
    family = family_of(name)
    if family is not None:
        return family.has_local_disks
    return NAMES_LOCAL_DISKS.fullmatch(name) is not None


def looks_like_gpu(name: str) -> bool:
    """True if the name of a type is that of a GPU family, which begins with g or p."""
    return re.match(r"ml\.[gp]\d", name) is not None


def describe_instance(name: str) -> str:
    """Describe the GPUs of an instance type, or say that the type is unknown."""
    n_gpus = count_gpus(name)
    gpu = gpu_of(name)
    if n_gpus is None:
        kind = "GPU" if looks_like_gpu(name) else "CPU"
        return f"no training instance {name} is known; SageMaker may refuse it; assuming {kind}s"
    if gpu is None:
        return f"{name}: no GPU"
    return f"{name}: {n_gpus} {gpu.name}"


def instance_problem(names: Sequence[str]) -> str:
    """Why a job cannot run on these types, of which SageMaker chooses one; or ''.

    A type may be newer than boto3 and FAMILIES. AWS adds families more often than sizes, so an
    unknown size counts as a typo.
    """
    if LOCAL in names:  # beside others: a job on LOCAL alone is not SageMaker's
        return f"{LOCAL} cannot be combined with other types"
    sizes = {name.rpartition(".")[2] for name in known_types()}
    for name in names:
        for pattern, reason in UNSUITABLE.items():
            if re.match(pattern, name):
                return reason
        if not name.startswith("ml.") or name.rpartition(".")[2] not in sizes:
            return unknown_type_problem(name)
    if len({looks_like_gpu(name) for name in names}) > 1:
        return "types with and without GPUs need different images"
    return ""


def unknown_type_problem(name: str) -> str:
    """What is wrong with a name that is no instance type, and the names that it resembles."""
    full_name = f"ml.{name.removeprefix('ml.')}"
    suggestion = did_you_mean(name, [LOCAL])
    if not suggestion:
        suggestion = did_you_mean(full_name, sorted(known_types()), cutoff=0.5)
    problem = f"must be {LOCAL} or a SageMaker type"
    return f"{problem}; {suggestion}" if suggestion else problem
