"""Devices and how many processes share them; threads, memory, precision, compiler and graphs."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from typing import Any

import torch

from .command_line import Options
from .config import TOKENS_PER_PASS, Config
from .container import Container, Ranks
from .cores import cores
from .errors import ConfigError, TrainingError, counted
from .kernels import LARGE_MEMORY


def choose_device(config: Config, container: Container, processes: int) -> str:
    """The type of device: 'cuda' (also for ROCm), 'mps' or 'cpu'. It never falls back silently.

    Raises TrainingError if the chosen device, or a GPU that SageMaker counted, is not available.
    """
    if config.device == "cpu":  # without a look at CUDA, which a process must not ask and then fork
        return "cpu"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mps = torch.backends.mps.is_available()
    available = {"auto": True, "cuda": gpus > 0, "mps": mps}
    if container.num_gpus and gpus != container.num_gpus:
        raise TrainingError(
            f"the host has {counted(container.num_gpus, 'GPU')} but torch {torch.__version__} sees"
            f" {gpus}; use a container image for GPUs with a CUDA that the host's driver supports,"
            " or set device=cpu"
        )
    if not available[config.device]:
        raise TrainingError(
            f"device={config.device}, but torch {torch.__version__} sees no such GPU; device=auto"
            " runs without it"
        )
    if config.device == "mps" and processes > 1:
        raise TrainingError(f"device=mps is one device; {processes} processes cannot share it")
    if config.device != "auto":
        return config.device
    if gpus:
        return "cuda"
    return "mps" if mps and processes == 1 else "cpu"


def rank_device(config: Config, container: Container, ranks: Ranks) -> torch.device:
    """The device of this rank: on GPUs, one for each rank.

    Raises TrainingError if there is no such device, or not one process for each GPU.
    """
    device_type = choose_device(config, container, ranks.world_size)
    if device_type != "cuda":
        return torch.device(device_type)
    gpus = torch.cuda.device_count()
    if ranks.local_world_size != gpus:
        raise TrainingError(
            f"this host has {counted(gpus, 'GPU')}, and {ranks.launcher} started"
            f" {counted(ranks.local_world_size, 'process')} on it; each GPU takes one, and"
            " CUDA_VISIBLE_DEVICES chooses among them"
        )
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


def local_processes(config: Config, container: Container, options: Options) -> int:
    """How many processes this host runs: one per GPU; on a CPU as many as asked for, or one."""
    device = choose_device(config, container, options.processes or 1)
    if options.processes:
        return options.processes
    if device == "cuda":
        return torch.cuda.device_count()
    if device == "cpu" and options.processes_before:
        return options.processes_before
    return 1


def share_cores(processes: int) -> None:
    """Gives this process as many threads as it has cores, where `processes` share them."""
    torch.set_num_threads(max(1, cores() // processes))


def share_cores_to_compile(processes: int) -> None:
    """Bounds the processes in which torch compiles for this one, unless the user did.

    By default, each of the `processes` that share the cores may start 32. Torch reads this variable
    when it imports its compiler. Ranks on CPUs are forked after that, and keep the default.
    """
    n_compilers = max(1, min(32, cores() // processes))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(n_compilers))


def keep_freed_memory() -> None:
    """Makes glibc keep the memory of freed tensors for the next ones.

    By default, glibc returns large blocks to the system, which clears each page again. In some
    runs that took a fifth of a step.
    """
    trim_threshold, mmap_max = -1, -4  # of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(trim_threshold, -1)  # never return memory at the end of the heap
        mallopt(mmap_max, 0)  # never map a block on its own: to free it would unmap it


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for products of bfloat16."""
    if device.type == "cpu":
        tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, test, lambda: False)() for test in tests)
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def choose_precision(config: Config, device: torch.device) -> torch.dtype:
    """The type to compute in; TF32 counts as float32. Raises ConfigError if the device has none."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    has_tf32 = capability >= (8, 0) and not torch.version.hip
    if config.precision == "tf32" and not has_tf32:
        raise ConfigError("precision=tf32 needs NVIDIA's Ampere or later; auto takes the fastest")
    if config.precision == "tf32":
        return torch.float32
    if config.precision != "auto":
        dtype: torch.dtype = getattr(torch, config.precision)
        return dtype
    if has_fast_bfloat16(device):
        return torch.bfloat16
    # The tensor cores of Volta (V100) and Turing (T4) support only float16.
    return torch.float16 if capability >= (7, 0) else torch.float32


def compiling_pays(config: Config, device: torch.device, parameters: int, world_size: int) -> bool:
    """Whether the compiler is here, and a rank's work is worth its minute.

    That is a minute at 50 TFLOP/s, of the 70 that an A10G has, with 6 operations per parameter and
    token (arXiv:2001.08361, section 2.1).
    """
    tokens = config.total_steps * config.batch_size * config.block_size / world_size
    has_compiler = device.type == "cuda" and find_spec("triton") is not None
    return has_compiler and 6 * parameters * tokens > 3e15


def compiler_options() -> dict[str, Any]:
    """Options of torch's compiler for GPUs, as far as this torch has them.

    Without them, one kernel writes both halves of the gradient of SwiGLU, and computes each half
    for every element.
    """
    from torch._inductor import config  # its import takes a second

    names = ("max_pointwise_cat_inputs", "max_complex_pointwise_cat_inputs")
    return {name: 0 for name in names if hasattr(config, name)}


def can_use_graph(config: Config, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a CUDA graph may replay the passes of this run.

    In float16 the scale of the loss changes. `compile=off` executes Python in each step. To draw
    the same dropout again, `recompute` reads the random state, which no graph can.
    """
    draws_again = config.recompute and config.dropout > 0
    may_record = config.compile != "off" and dtype != torch.float16 and not draws_again
    return device.type == "cuda" and may_record


def graph_pays(config: Config, parameters: int, world_size: int, n_passes: int) -> bool:
    """Whether passes are better recorded than left to DistributedDataParallel.

    It averages the gradients of several GPUs while the last pass computes, and not after it. But it
    leaves the host to start the kernels, which takes milliseconds a pass. A pass that needs more
    operations than this takes an A10G over 0.15 seconds.
    """
    tokens = config.batch_size * config.block_size / world_size / n_passes
    return world_size == 1 or 6 * parameters * tokens < 1e13


def tokens_per_pass(config: Config, device: torch.device) -> int:
    """The most tokens of a forward and backward pass: enough to keep the device busy.

    GPUs of 60 GB and more take 65,536, as nanochat does; others 16,384. The activations of a token
    have about 36 n_layer n_embd bytes, and fill at most half of the GPU's memory.
    """
    if device.type != "cuda":
        return TOKENS_PER_PASS
    memory = torch.cuda.get_device_properties(device).total_memory
    fitting = memory // 2 // (36 * config.n_layer * config.n_embd)
    return min(fitting, 4 * TOKENS_PER_PASS if memory > LARGE_MEMORY else TOKENS_PER_PASS)
