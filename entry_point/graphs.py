"""A forward and backward pass as a CUDA graph, whose kernels start with one call of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
from torch import Tensor

from .errors import counted, first_line, log

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class PassGraph:
    """Replays a pass whose kernels were recorded once, with other inputs.

    `run(x, y, weight)` computes on the GPU alone, takes inputs of one shape, adds to gradients that
    are there, and returns a tensor. The gradients, and what the pass reads beside its inputs, keep
    their place in memory. Dropout draws by torch.manual_seed, as without a graph
    (docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). One host of an H200 took 9 ms to
    start the kernels of a step of `baby`, for which the GPU took 5.
    """

    def __init__(self, run: Run, x: Tensor, y: Tensor) -> None:
        weight = torch.ones((), device=x.device)
        self.inputs = [x.clone(), y.clone(), weight]
        stream = torch.cuda.Stream()  # the libraries allocate their workspaces on it
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = run(*self.inputs)

    def __call__(self, x: Tensor, y: Tensor, weight: float) -> Tensor:
        """The result, which the next call overwrites."""
        self.inputs[0].copy_(x)
        self.inputs[1].copy_(y)
        self.inputs[2].fill_(weight)
        self.graph.replay()
        return self.result


def record_passes(
    run: Run, passes: Sequence[tuple[Tensor, Tensor, float]], model: nn.Module
) -> dict[int, PassGraph]:
    """A graph for each length of windows [rows, length] in the passes, if the memory suffices.

    A graph keeps the memory of its pass for itself, so that evaluations come on top. The
    caller clears the gradients.
    """
    there = torch.cuda.get_device_properties(passes[0][0].device).total_memory
    if torch.cuda.max_memory_allocated() > there / 2:
        return {}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        graphs = {x.size(1): PassGraph(run, x, y) for x, y, _ in passes}
    except RuntimeError as error:
        log(f"note: no CUDA graph, so the host may be slower than the GPU: {first_line(error)}")
        return {}
    log(f"recorded {counted(len(graphs), 'CUDA graph')}")
    return graphs
