"""Find the GPUs that this process may use, and the device files with which a program uses one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

DEVICES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia/gpus")  # GPUs, by address on the bus


@dataclass(frozen=True)
class LocalGpu:
    """A GPU for a program.

    name is the value of the program's CUDA_VISIBLE_DEVICES, and devices are the device files.
    """

    name: str
    devices: tuple[Path, ...]


def visible_gpus(count: int) -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES of the first `count` GPUs that this process may use.

    These are numbers, or the UUIDs of GPUs or of their parts. If the variable is not set, they are
    the numbers from 0.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [name.strip() for name in names if name.strip()]
    return names[:count] or [str(number) for number in range(count)]


def find_gpu(name: str) -> LocalGpu:
    """Find the GPU that has this name in our CUDA_VISIBLE_DEVICES, with its own devices.

    A program that sees only this GPU names it by its UUID, since its numbers begin at 0. If one GPU
    cannot be told from the others, the devices are those of all GPUs. That is so for parts of GPUs,
    for GPUs of different models, and for those of other makers than NVIDIA.
    """
    patterns = ("nvidia*", "dri", "kfd", "dxg")
    devices: list[Path] = []
    for pattern in patterns:
        devices += sorted(DEVICES.glob(pattern))
    numbers = find_numbers(name)
    if numbers is None:
        return LocalGpu(name, tuple(devices))
    other_gpu = re.compile(rf"nvidia(?!{numbers.minor}$)\d+")
    devices = [path for path in devices if not other_gpu.fullmatch(path.name)]
    return LocalGpu(numbers.uuid, tuple(devices))


@dataclass(frozen=True)
class Numbers:
    """The UUID that NVIDIA's driver gives a GPU, and the number in the name of its device file."""

    uuid: str
    minor: str


def find_numbers(name: str) -> Numbers | None:
    """The numbers of the GPU with this name; None if it cannot be told from others."""
    models = set()
    gpus = []
    for path in sorted(DRIVER.glob("*/information")):
        facts = {}
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
        models.add(facts.get("Model"))
        gpus.append(Numbers(facts.get("GPU UUID", ""), facts.get("Device Minor", "")))
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if name.isdecimal() and (by_bus or len(models) == 1):
        matches = gpus[int(name) : int(name) + 1]
    else:
        matches = [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None
