"""Which GPUs of this machine are ours, and the device files by which a program uses one of them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

DEVICES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia/gpus")  # a directory for each GPU, named by its place on the bus


@dataclass(frozen=True)
class Gpu:
    """A GPU for a program: its name in CUDA_VISIBLE_DEVICES there, and the files of its devices."""

    name: str
    devices: tuple[Path, ...]


def visible_gpus(count: int) -> list[str]:
    """The first `count` GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES.

    These are numbers, or the UUIDs of GPUs or of their parts. Without the variable, the numbers
    begin at 0.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [name.strip() for name in names if name.strip()]
    return names[:count] or [str(number) for number in range(count)]


def find_gpu(name: str) -> Gpu:
    """The GPU of this name in our CUDA_VISIBLE_DEVICES, and the devices of no other.

    Its UUID is its name for a program that sees it alone, since numbers begin at 0 there. Where the
    GPU cannot be told from others, which are parts of GPUs, GPUs of different models, and those of
    other makers than NVIDIA, the devices are those of all.
    """
    patterns = ("nvidia*", "dri", "kfd", "dxg")
    devices = [path for pattern in patterns for path in sorted(DEVICES.glob(pattern))]
    number = find_numbers(name)
    if number is None:
        return Gpu(name, tuple(devices))
    others = re.compile(rf"nvidia(?!{number.minor}$)\d+")
    return Gpu(number.uuid, tuple(path for path in devices if not others.fullmatch(path.name)))


@dataclass(frozen=True)
class Numbers:
    """How NVIDIA's driver numbers a GPU: its UUID, and the number in the name of its device."""

    uuid: str
    minor: str


def find_numbers(name: str) -> Numbers | None:
    """The numbers of the GPU of this name; None where it cannot be told from others."""
    models, gpus = set(), []
    for path in sorted(DRIVER.glob("*/information")):
        lines = [line.partition(":") for line in path.read_text().splitlines()]
        facts = {key.strip(): value.strip() for key, _, value in lines}
        models.add(facts.get("Model"))
        gpus.append(Numbers(facts.get("GPU UUID", ""), facts.get("Device Minor", "")))
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if name.isdecimal() and (by_bus or len(models) == 1):
        matches = gpus[int(name) : int(name) + 1]
    else:
        matches = [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None
