"""Runs nanoGPT's unmodified train.py as one of several processes on a CPU.

    torchrun --standalone --nproc_per_node 2 ddp_cpu.py NANOGPT/train.py --backend=gloo ...

Under torchrun its train.py names the device cuda:LOCAL_RANK, whatever --device says, and so it
cannot run without GPUs. Here torch answers these names with the CPU; nothing else is touched, and
nanoGPT gains a fused optimizer by it, which it takes on CUDA alone.
"""

import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch


def to_cpu(move: Any) -> Any:
    def to(self: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        return move(self, "cpu" if str(device).startswith("cuda") else device, *args, **kwargs)

    return to


warnings.filterwarnings("ignore", message=".*CUDA is not available.*")
parallel: Any = torch.nn.parallel
wrap = parallel.DistributedDataParallel
parallel.DistributedDataParallel = lambda model, device_ids: wrap(model)
torch.cuda.set_device = lambda device: None
tensor: Any = torch.Tensor
module: Any = torch.nn.Module
tensor.pin_memory = lambda self: self
for kind in (tensor, module):
    kind.to = to_cpu(kind.to)

sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
