"""Run nanoGPT's unmodified train.py as one of several processes on a CPU.

  torchrun --standalone --nproc_per_node 2 ddp_cpu.py NANOGPT/train.py --backend=gloo ...

Under torchrun, nanoGPT's train.py uses the device cuda:LOCAL_RANK whatever --device is, so it
cannot run without GPUs. This script makes torch answer such names with the CPU. Nothing else
changes, except that nanoGPT then also takes its fused optimizer, which it otherwise takes on CUDA
only.
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
