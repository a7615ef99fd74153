"""The SageMaker training instances: what a launch has to know of each.

Facts from the EC2 instance type pages and the SageMaker pricing page; the SDK's own table lacks the
newer families.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import InputError


@dataclass(frozen=True)
class Instance:
    """gpu_memory is in GiB for each GPU, network in Gbit/s. gpu is '' on CPU instances."""

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


def _cpu_family(family: str, sizes: Mapping[str, float]) -> dict[str, Instance]:
    return {f"ml.{family}.{size}": Instance(0, "", 0, network) for size, network in sizes.items()}


# Gbit/s by size; most are "up to" on the smaller ones.
_SMALL_FIFTH = dict.fromkeys(("xlarge", "2xlarge", "4xlarge"), 10.0)
_M5 = {"large": 10.0, **_SMALL_FIFTH, "12xlarge": 12.0, "24xlarge": 25.0}
_C5 = {**_SMALL_FIFTH, "9xlarge": 12.0, "18xlarge": 25.0}
_R5 = {**_M5, "8xlarge": 10.0, "16xlarge": 20.0}
_C6 = {
    **dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge"), 12.5),
    "12xlarge": 18.75,
    "16xlarge": 25.0,
    "24xlarge": 37.5,
    "32xlarge": 50.0,
}
_M6 = {"large": 12.5, **_C6}
_SEVENTH = {**{size: n for size, n in _M6.items() if size != "32xlarge"}, "48xlarge": 50.0}
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
    **_cpu_family("t3", dict.fromkeys(("medium", "large", "xlarge", "2xlarge"), 5.0)),
    **_cpu_family("m5", _M5),
    **_cpu_family("c5", _C5),
    **_cpu_family("r5", _R5),
    **_cpu_family(
        "c5n",
        {
            **dict.fromkeys(("xlarge", "2xlarge", "4xlarge"), 25.0),
            "9xlarge": 50.0,
            "18xlarge": 100.0,
        },
    ),
    **_cpu_family("m6i", _M6),
    **_cpu_family("c6i", _C6),
    **_cpu_family("m7i", _SEVENTH),
    **_cpu_family("c7i", _SEVENTH),
    **_cpu_family("r7i", _SEVENTH),
}

PATTERN = re.compile(r"ml\.[a-z][a-z0-9-]*\.[a-z0-9]+")


def nearest_instances(name: str) -> list[str]:
    """Up to three known types that look like `name`."""
    return difflib.get_close_matches(name, INSTANCES, n=3, cutoff=0.5)


def check_instance(name: str) -> None:
    """Raises InputError unless it is `local` or looks like a SageMaker type, known here or not."""
    if name != "local" and not PATTERN.fullmatch(name):
        near = difflib.get_close_matches(name, ["local"]) or nearest_instances(f"ml.{name}")
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise InputError(f"--instance {name}: must be local or a SageMaker type{hint}")


def remark(name: str) -> str:
    """What a machine is; a type that is not in the table may be newer than the table is."""
    if name in INSTANCES:
        known = INSTANCES[name]
        gpus = f"{known.gpus} {known.gpu} of {known.gpu_memory} GiB" if known.gpus else "no GPU"
        return f"{name}: {gpus}, {known.network:g} Gbit/s"
    near = nearest_instances(name)
    kind = "GPU" if looks_like_gpu(name) else "CPU"
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"warning: {name} is not known here and taken for a {kind} instance{hint}"


# By EC2's naming, a d after the generation stands for disks of the machine; others have them too.
LOCAL_STORAGE = re.compile(r"ml\.([a-z]+\d[a-z]*d[a-z]*|g5|g6|g6e|p5|p5e|p5en|p6-b[23]00)\.")


def has_local_storage(name: str) -> bool:
    """Whether the machine brings disks of its own, as most GPU families do.

    SageMaker adds no volume there: the size that a request names has no effect, and a key for it is
    refused.
    """
    return bool(LOCAL_STORAGE.match(name))


def looks_like_gpu(name: str) -> bool:
    """Whether a type is of a GPU family, known or not: AWS names those g and p."""
    if name in INSTANCES:
        return INSTANCES[name].gpus > 0
    return bool(re.match(r"ml\.[gp]\d", name))
