"""The passes of a step: forward, backward, and the average of the gradients over the ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .config import derive_seed
from .conversations import Packed
from .cuda_graphs import PassGraph, record_passes
from .data import Batches
from .device import (
    can_use_graph,
    compiler_options,
    compiling_pays,
    graph_pays,
    tokens_per_pass,
)
from .distributed import Group
from .errors import first_line, log
from .model import GPT
from .optim import Optimizer, first_steps, window_length


class Passes:
    """Computes the gradients of a step's batch, in passes whose rows differ by one at most.

    DistributedDataParallel averages the gradients of several ranks while the last pass computes.
    Where GPUs record passes as CUDA graphs, each rank replays those of the bare model, and one
    all-reduce of all gradients follows the last. Attention does not cross the token `end`. After
    set_teacher, the model learns what the teacher says, too.
    """

    def __init__(
        self,
        model: GPT,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        batches: Batches,
        group: Group,
        end: int | None,
    ) -> None:
        config = model.config
        device = group.device
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.batches = batches
        self.group = group
        self.end = end
        self.is_chat = isinstance(batches.tokens, Packed)
        n_passes = config.passes(group.world_size, tokens_per_pass(config, device))
        self.n_passes = group.async_all_reduce_max(n_passes)()  # that of the smallest GPU
        self.angles = functools.cache(model.angles)  # by length of windows
        self.reduce_dtype = getattr(torch, config.reduce_precision)
        self.n_parameters = sum(parameter.numel() for parameter in model.parameters())

        self.compiled = config.compile == "on"
        if config.compile == "auto":
            world_size = group.world_size
            self.compiled = compiling_pays(config, device, self.n_parameters, world_size)
        # Evaluations use the uncompiled model: compiling it for them takes longer than they do.
        self.trained_net: nn.Module = self.runnable(model)  # what a pass runs
        self.teacher: GPT | None = None
        self.teacher_net: Any = None  # what runs the teacher
        self.uses_graphs = can_use_graph(config, device, model.compute_dtype) and graph_pays(
            config, self.n_parameters, group.world_size, self.n_passes
        )
        self.graphs: dict[torch.Size, PassGraph] = {}  # by shape of inputs
        self.gradients: Tensor | None = None  # all of them, in one buffer, where there are graphs
        if not self.uses_graphs:
            self.distribute()

    def runnable(self, model: GPT) -> Any:
        """What computes a model in a pass."""
        if not self.compiled:
            return model
        # Four lengths of windows, with two numbers of rows, of a model and its teacher.
        torch._dynamo.config.cache_size_limit = 16  # its name since torch 2.0
        options = compiler_options() if self.group.device.type == "cuda" else None
        # One graph for all lengths of windows would break at each attention.
        return torch.compile(model, dynamic=False, options=options)

    def forward_backward(self, step: int) -> Tensor:
        """Gradients of the step's batch, averaged over the ranks; returns this rank's mean loss."""
        config, group = self.config, self.group
        loss = torch.zeros((), device=group.device)
        for index, (x, y, weight) in enumerate(self.batch(step)):
            if config.dropout:
                torch.manual_seed(derive_seed(config.seed, "dropout", step, index, group.rank))
            run_pass = self.graphs.get(x.shape, self.run_pass)
            is_last = index == self.n_passes - 1
            with nullcontext() if is_last else self.no_sync():
                loss += run_pass(x, y, weight)

        # Without graphs, DistributedDataParallel has done both while the last pass computed.
        if self.gradients is not None:
            group.average_(self.gradients, self.reduce_dtype)
            for buffer in self.model.buffers():  # of an edit
                group.broadcast_(buffer)
        return loss

    def no_sync(self) -> AbstractContextManager[None]:
        """Passes within add to this rank's own gradients."""
        if isinstance(self.trained_net, DistributedDataParallel):
            return self.trained_net.no_sync()
        return nullcontext()

    def zero_grad(self) -> None:
        if self.gradients is None:
            self.model.zero_grad()
        else:  # graphs add to gradients at their address
            self.gradients.zero_()

    def run_pass(self, x: Tensor, y: Tensor, weight: float | Tensor) -> Tensor:
        """Adds a pass's gradients, and returns its share of the loss."""
        taught = self.teacher_logits(x) if self.teacher is not None else None
        angles = self.angles(x.size(1))
        mean_loss = self.trained_net(
            x, y, angles=angles, end=self.end, chats=self.is_chat, taught=taught
        )
        loss = mean_loss / self.n_passes * weight
        self.group.heartbeat()  # what follows waits for the others, in DDP
        self.scaler.scale(loss).backward()
        return loss.detach()

    def batch(self, step: int) -> list[tuple[Tensor, Tensor, float]]:
        """A step's passes: inputs and targets [rows, length], and the weight of its mean loss.

        The mean over the passes is then that over all rows, or over all targets of conversations.
        """
        group = self.group
        x, y = self.batches.rows(step, group.rank, group.world_size)
        # As the inputs of a graph: the compiler makes another model for other strides.
        length = window_length(step, self.config)
        x = x.reshape(-1, length).contiguous()
        y = y.reshape(-1, length).contiguous()
        inputs = x.tensor_split(self.n_passes)
        targets = y.tensor_split(self.n_passes)

        tokens = self.batches.tokens
        if isinstance(tokens, Packed):
            starts = self.batches.window_starts(step)
            weights = tokens.loss_weights(starts, group.rank, group.world_size, self.n_passes)
        else:
            weights = [len(rows) * self.n_passes / len(x) for rows in inputs]
        return list(zip(inputs, targets, weights, strict=True))

    @torch.no_grad()
    def teacher_logits(self, x: Tensor) -> Tensor:
        """The teacher's logits of ids [rows, length], as many of each as the model has."""
        angles = self.teacher_angles(x.size(1))
        logits = self.teacher_net(x, angles=angles, end=self.end, chats=self.is_chat)
        n_missing = self.model.embed.weight.size(0) - logits.size(-1)  # rows may be padding
        return F.pad(logits, (0, n_missing), value=-math.inf)

    def set_teacher(self, teacher: GPT) -> None:
        """From now on, and after warm_up, the model learns from the teacher too."""
        if self.compiled:
            torch.compiler.reset()  # it compiles a function for 16 kinds of inputs at most
        self.teacher = teacher
        self.teacher_angles = functools.cache(teacher.angles)
        self.teacher_net = self.runnable(teacher)
        self.graphs = {}
        self.gradients = None
        self.model.zero_grad()

    def warm_up(self) -> None:
        """Compiles and records, by steps whose gradients and buffers are thrown away.

        DistributedDataParallel lays its buckets out anew after its first step, and the order in
        which gradients are added up follows the layout. After two steps of each length of windows,
        a resumed run adds in the same order as one that was never interrupted (on CPUs: on GPUs
        some kernels add in no fixed order).
        """
        steps = first_steps(self.config)
        saved_buffers = [buffer.clone() for buffer in self.model.buffers()]  # of an edit
        if self.uses_graphs:
            self.rehearse(steps)
            self.record(steps)
        if not self.graphs and self.trained_net is not self.model:
            self.rehearse(sorted(2 * steps))
        for buffer, saved in zip(self.model.buffers(), saved_buffers, strict=True):
            buffer.detach().copy_(saved)

    def rehearse(self, steps: Sequence[int]) -> None:
        """Compiles for the windows of these steps, and runs them."""
        if self.compiled:
            self.try_compiler(steps)
        for step in steps:
            self.forward_backward(step)
            self.optimizer.check_gradients()  # DDP itself reports nothing before its next step
            self.model.zero_grad()

    def try_compiler(self, steps: Sequence[int]) -> None:
        """Compiles for the windows of these steps; with compile=auto, trains eagerly if that fails.

        It does so without DDP's all-reduce, in which the others would wait for a rank that fails.
        """
        with self.group.without_heartbeats(), self.no_sync():
            try:
                for step in steps:
                    self.forward_backward(step)
            except Exception as error:  # one that is not the compiler's comes again without it
                if self.config.compile == "on":
                    raise
                torch.compiler.set_stance("force_eager")
                log(f"note: rank {self.group.rank} does not compile: {first_line(error)}")
        self.model.zero_grad()

    def record(self, steps: Sequence[int]) -> None:
        """Records a pass of each shape; if a rank cannot, all go on without."""
        pass_of_shape = {}
        for step in steps:
            for x, y, weight in self.batch(step):
                pass_of_shape[x.shape] = (x, y, weight)
        passes = list(pass_of_shape.values())
        parameters = list(self.optimizer.parameters.values())
        with self.group.without_heartbeats():
            graphs, gradients = record_passes(self.run_pass, passes, parameters)

        wait_for_ranks = self.group.async_all_reduce_max(0 if graphs else 1)
        some_rank_has_none = wait_for_ranks() == 1
        if some_rank_has_none:
            self.uses_graphs = False
            self.distribute()
        else:
            self.graphs = graphs
            self.gradients = gradients
        self.zero_grad()

    def distribute(self) -> None:
        """Has DistributedDataParallel average the gradients, while the last pass computes."""
        if self.group.world_size == 1:
            return
        device = self.group.device
        self.trained_net = DistributedDataParallel(
            self.trained_net,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        if self.reduce_dtype == torch.bfloat16:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            compress: Any = default_hooks.bf16_compress_hook
            # By its own name, torch refuses the hook without NCCL.
            self.trained_net.register_comm_hook(None, lambda _, bucket: compress(None, bucket))
