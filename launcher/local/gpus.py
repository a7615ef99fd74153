"""Find the GPUs that this process may use, and the device files with which a program uses one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

DEVICES = Path("/dev")
# A folder for each GPU of NVIDIA, by its address on the bus.
GPU_INFO_DIRECTORY = Path("/proc/driver/nvidia/gpus")


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
    gpu = find_nvidia_gpu(name)
    if gpu is None:
        return LocalGpu(name, tuple(devices))
    other_gpu = re.compile(rf"nvidia(?!{gpu.minor}$)\d+")
    devices = [path for path in devices if not other_gpu.fullmatch(path.name)]
    return LocalGpu(gpu.uuid, tuple(devices))


@dataclass(frozen=True)
class NvidiaGpu:
    """A GPU, as NVIDIA's driver describes it."""

    uuid: str
    minor: str  # the number in the name of its device file
    model: str


def find_nvidia_gpu(name: str) -> NvidiaGpu | None:
    """Find the GPU that has this name in CUDA_VISIBLE_DEVICES; None if it cannot be told from
    others."""
    gpus = read_nvidia_gpus()
    # CUDA numbers GPUs by their speed, and equal ones by their address on the bus.
    is_one_model = len({gpu.model for gpu in gpus}) == 1
    if name.isdecimal() and (is_one_model or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"):
        matches = gpus[int(name) : int(name) + 1]
    else:
        matches = [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None


def read_nvidia_gpus() -> list[NvidiaGpu]:
    """The GPUs that NVIDIA's driver knows, in the order of their addresses on the bus."""
    gpus = []
    for path in sorted(GPU_INFO_DIRECTORY.glob("*/information")):
        facts = {}
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
        gpu = NvidiaGpu(
            uuid=facts.get("GPU UUID", ""),
            minor=facts.get("Device Minor", ""),
            model=facts.get("Model", ""),
        )
        gpus.append(gpu)
    return gpus
