"""A forward and backward pass as a CUDA graph, whose kernels start with one call of the host."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import TrainingError, counted, first_line, log

Run = Callable[[Tensor, Tensor, Tensor], Tensor]

NO_GRAPH = "note: no CUDA graph, so the host may be slower than the GPU"


class PassGraph:
    """Replays a pass whose kernels were recorded once, with other inputs.

    `run(x, y, weight)` computes on the GPU alone, adds to existing gradients, and returns a tensor.
    The gradients, and every other tensor that it reads, must stay at their address. Dropout draws
    by torch.manual_seed, as without a graph
    (docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). One host of an H200 took 9 ms to
    start the kernels of a step of `baby`, for which the GPU took 5.
    """

    def __init__(self, run: Run, x: Tensor, y: Tensor, pool: Any) -> None:
        weight = torch.ones((), device=x.device)
        self.inputs = [x.clone(), y.clone(), weight]
        self.graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile, as NCCL's do.
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.result = run(*self.inputs)

    def __call__(self, x: Tensor, y: Tensor, weight: float) -> Tensor:
        """The result, which the next call of any graph overwrites."""
        self.inputs[0].copy_(x)
        self.inputs[1].copy_(y)
        self.inputs[2].fill_(weight)
        self.graph.replay()
        return self.result


def record_passes(
    run: Run, passes: Sequence[tuple[Tensor, Tensor, float]], parameters: Sequence[Tensor]
) -> tuple[dict[torch.Size, PassGraph], Tensor | None]:
    """A graph for each pass, by the shape of its inputs [rows, length], if there can be one.

    They add to the gradients of the parameters, which are views of one buffer, the second result.
    The graphs share the memory of the largest pass, and an evaluation needs memory in addition. The
    caller clears the gradients. Raises TrainingError if a pass cannot be recorded, which leaves
    CUDA in no state to go on.
    """
    device = passes[0][0].device
    total_memory = torch.cuda.get_device_properties(device).total_memory
    if torch.cuda.max_memory_allocated() > total_memory / 2:
        log(f"{NO_GRAPH}: the run takes over half of the GPU's memory")
        return {}, None
    try:
        gradients = flat_gradients(parameters)  # fails for weights of another type
        try_passes(run, passes)
    except RuntimeError as error:
        log(f"{NO_GRAPH}: {first_line(error)}")
        return {}, None
    try:
        pool = torch.cuda.graph_pool_handle()
        graphs = {x.shape: PassGraph(run, x, y, pool) for x, y, _ in passes}
    except RuntimeError as error:
        cause = first_line(error.__context__ or error)
        raise TrainingError(f"no CUDA graph (compile=off needs none): {cause}") from error
    torch.cuda.reset_peak_memory_stats()  # of try_passes, which needs more than training
    log(f"recorded {counted(len(graphs), 'CUDA graph')}")
    return graphs, gradients


def flat_gradients(parameters: Sequence[Tensor]) -> Tensor:
    """A buffer of zeros, of which each parameter's gradient becomes a view.

    One operation then averages all of them over the ranks. Views begin at multiples of 128 bytes.
    """
    begins = []
    end = 0
    for parameter in parameters:
        begins.append(end)
        end += math.ceil(parameter.numel() / 32) * 32  # numbers of 4 bytes
    buffer = torch.zeros(end, device=parameters[0].device)
    for parameter, begin in zip(parameters, begins, strict=True):
        parameter.grad = buffer[begin : begin + parameter.numel()].view_as(parameter)
    return buffer


def try_passes(run: Run, passes: Sequence[tuple[Tensor, Tensor, float]]) -> None:
    """Runs passes on a stream of their own, as torch asks for before a graph is recorded.

    Raises RuntimeError if one waits for the GPU, as `tensor.item()` does, which no graph can.
    """
    stream = torch.cuda.Stream()
    current = torch.cuda.current_stream()
    weight = torch.ones((), device=passes[0][0].device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            for x, y, _ in passes:
                run(x, y, weight)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            current.wait_stream(stream)  # which may still read these tensors
