"""Train a GPT on text or on tokens, on one process or on many hosts of many GPUs.

This one file needs only torch and the standard library. Copy it anywhere and run it:

    python train.py --data input.txt                                      # all GPUs of this machine
    python train.py --data input.txt --device cpu --processes 2           # two processes on the CPU
    torchrun --nproc_per_node 4 train.py --data input.txt --preset baby   # one host with four GPUs
    torchrun --nnodes 2 --node_rank 0 --nproc_per_node 4 --master_addr HOST --master_port 29500 \\
        train.py --data input.txt                                          # the first of two hosts
    torchrun --nnodes 2 --node_rank 1 --nproc_per_node 4 --master_addr HOST --master_port 29500 \\
        train.py --data input.txt                                          # the second

In a SageMaker container it needs no arguments except hyperparameters. It reads the text from the
`training` channel (and the `validation` channel, if there is one), resumes from
/opt/ml/checkpoints, and leaves a Hugging Face model directory in /opt/ml/model.
`python train.py --help` lists the rest.

The parts, in order: hyperparameters; the model, its export, sampling; optimizers; batches; the
training loop. Then what few readers need: choices by device, text, files, checkpoints, the
container, the group of processes, errors, the command line.
"""

from __future__ import annotations

import codecs
import ctypes
import dataclasses
import difflib
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import math
import mmap
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__" and "TORCH_CPP_LOG_LEVEL" not in os.environ:
    # A rank whose peer is gone prints C++ stack traces as warnings, before the reason and after it.
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # torch reads it when it is imported
if __name__ == "__main__" and "OMP_WAIT_POLICY" not in os.environ:
    # Threads that wait for each other spin, with GNU's OpenMP for some milliseconds. If another
    # program uses a core, the spinning delays the thread that they wait for. `cpu` on
    # two cores, alone and beside another program: 29k and 1k tokens/s with all of it, 28k and 8k
    # with a sixtieth, 24k and 10k with a hundredth. OpenMP reads this when torch loads it.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

# A signal during the import of torch can get lost, or abort the process.
_unblocked = signal.pthread_sigmask(
    signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
)
try:
    with warnings.catch_warnings():
        # This script does not need NumPy.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        import torch
        import torch.distributed as dist
        import torch.nn as nn
        import torch.nn.functional as F
        from torch import Tensor
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim.adamw import adamw
finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, _unblocked)

# ------------------------------------------------------------------------------------------------
# Configuration


def hyperparameter(
    default: Any,
    help: str,
    least: float | None = None,
    most: float | None = None,
    *,
    choices: tuple[str, ...] = (),
    fixed: bool = False,
    group: str = "",
) -> Any:
    """A field of Config. A `fixed` one cannot change on resume; `group` begins a part of --help."""
    metadata = dict(help=help, least=least, most=most, choices=choices, fixed=fixed, group=group)
    return field(default=default, metadata=metadata)


# Of one pass: enough to keep a GPU busy, and `gpt2` still fits the 24 GB of an A10G.
TOKENS_PER_PASS = 1 << 14


@dataclass(frozen=True)
class Config:
    """Every hyperparameter: its type, default, allowed range and meaning. The one source of truth.

    Raises:
        ConfigError: a value is out of its range, or two values contradict each other.
    """

    n_layer: int = hyperparameter(4, "layers", 1, 1024, fixed=True, group="model")
    n_head: int = hyperparameter(2, "attention heads", 1, 1024, fixed=True)
    n_kv_head: int = hyperparameter(
        0,
        "heads of keys and values, each shared by some attention heads (0: n_head)",
        0,
        1024,
        fixed=True,
    )
    head_dim: int = hyperparameter(
        0, "width of an attention head (0: n_embd / n_head)", 0, 1 << 12, fixed=True
    )
    n_embd: int = hyperparameter(128, "width", 2, 1 << 16, fixed=True)
    block_size: int = hyperparameter(64, "context length in tokens", 2, 1 << 17, fixed=True)
    n_hidden: int = hyperparameter(
        0, "width inside the MLP (0: 8/3 of n_embd)", 0, 1 << 18, fixed=True
    )
    tie_embeddings: bool = hyperparameter(
        False, "share one matrix between embedding and head", fixed=True
    )
    norm_weights: bool = hyperparameter(False, "give each norm a weight to learn", fixed=True)
    rope_theta: float = hyperparameter(
        10000.0, "base of the rotary positions' wavelengths", 1, 1e12, fixed=True
    )
    vocab_size: int = hyperparameter(
        0, "rows of embedding and head (0: as many as there are tokens)", 0, 1 << 20, fixed=True
    )
    dropout: float = hyperparameter(0.0, "dropout probability (on a CPU in 256ths)", 0, 0.95)

    validation_fraction: float = hyperparameter(
        0.1,
        "last part of the text kept for validation when there is no validation channel",
        0.001,
        0.9,
        fixed=True,
        group="data",
    )
    mask_documents: bool = hyperparameter(
        False, "end the attention where a document ends (for tokens; slower)", fixed=True
    )
    batch_size: int = hyperparameter(
        12, "sequences per optimizer step, over all processes", 1, 1 << 20, fixed=True
    )
    gradient_accumulation_steps: int = hyperparameter(
        0,
        "passes that one process makes over its part of the batch (0: the fewest of at most 16,384"
        " tokens each)",
        0,
    )
    seed: int = hyperparameter(1337, "seed of initial weights, batches and dropout", 0, fixed=True)

    max_steps: int = hyperparameter(2000, "optimizer steps", 1, 10**12, group="schedule")
    optimizer: str = hyperparameter(
        "muon",
        "muon (matrices; AdamW for the rest) or adamw (everything)",
        choices=("muon", "adamw"),
        fixed=True,
    )
    learning_rate: float = hyperparameter(
        0.0,
        "peak, of the matrices; of all with adamw (0: 0.02 with muon, 0.001 with adamw)",
        0,
        1e37,
    )
    embedding_learning_rate: float = hyperparameter(
        0.1, "peak, of the embedding with muon", 0, 1e37
    )
    head_learning_rate: float = hyperparameter(
        0.02, "peak, of the head with muon, also of a tied one", 0, 1e37
    )
    warmup_steps: int = hyperparameter(0, "steps of linear rise to the peak rate", 0)
    decay_fraction: float = hyperparameter(
        0.8, "last part of the steps, in which the rate falls linearly", 0, 1
    )
    final_learning_rate: float = hyperparameter(
        0.0, "at the last step, as a fraction of the peak", 0, 1
    )
    weight_decay: float = hyperparameter(0.0, "of the matrices, decoupled", 0, 10)
    momentum: float = hyperparameter(0.9, "of muon", 0, 0.9999)
    beta1: float = hyperparameter(0.8, "of AdamW", 0, 0.9999)
    beta2: float = hyperparameter(0.95, "of AdamW", 0, 0.999999)
    short_windows: float = hyperparameter(
        0.0,
        "first part of the steps, in windows of an eighth, then a quarter, then half of block_size",
        0,
        1,
    )
    grad_clip: float = hyperparameter(0.0, "largest norm of the gradient (0: no limit)", 0, 10**9)

    log_interval: int = hyperparameter(50, "steps between metric lines", 1, group="report")
    eval_interval: int = hyperparameter(250, "steps between evaluations", 1)
    eval_windows: int = hyperparameter(
        512, "windows of the validation part per evaluation (0: all)", 0
    )
    sample_length: int = hyperparameter(
        300, "tokens sampled after training (a third before)", 0, 10**6
    )
    checkpoint_seconds: float = hyperparameter(
        0.0,
        "seconds between checkpoints; evaluations write one too (0: 60, or longer where writing"
        " would take over 2 % of the time)",
        0,
    )

    hang_seconds: float = hyperparameter(
        150.0,
        "seconds without progress after which a rank that others wait for counts as hung (or the"
        " time of 5 steps, if that is longer)",
        5,
        1800,
        group="machine",
    )
    device: str = hyperparameter("auto", "where to compute", choices=("auto", "cuda", "mps", "cpu"))
    precision: str = hyperparameter(
        "auto",
        "of matrix products, and of gradients between ranks (auto: the first of bfloat16, float16"
        " and float32 that the device is fast at)",
        choices=("auto", "bfloat16", "float16", "tf32", "float32"),
    )
    compile: str = hyperparameter(
        "auto", "torch.compile (auto: on GPUs, where it pays)", choices=("auto", "on", "off")
    )

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            check_range(f, getattr(self, f.name))
        if not self.head_dim and self.n_embd % (2 * self.n_head):
            raise ConfigError(
                f"n_embd={self.n_embd} cannot be divided into n_head={self.n_head} heads of equal"
                " and even width, as rotary positions need;"
                f" the nearest that fit: n_embd={nearest_multiples(self.n_embd, 2 * self.n_head)}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim}: must be even, as rotary positions need")
        if self.n_head % self.kv_heads:
            raise ConfigError(
                f"n_head={self.n_head} heads cannot share n_kv_head={self.n_kv_head} evenly; the"
                f" nearest that fit: n_head={nearest_multiples(self.n_head, self.kv_heads)}"
            )
        if self.short_windows and self.block_size % 8:
            fits = nearest_multiples(self.block_size, 8)
            raise ConfigError(
                f"block_size={self.block_size} cannot be divided by eight, as short_windows needs;"
                f" the nearest that fit: block_size={fits}"
            )
        if self.warmup_steps > self.max_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} is more than max_steps={self.max_steps}"
            )
        if not self.learning_rate:  # records and reports show the one that is used
            rates = {"muon": 0.02, "adamw": 0.001}
            object.__setattr__(self, "learning_rate", rates[self.optimizer])
        self.check_world_size(1)

    @property
    def head_width(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def hidden_dim(self) -> int:
        """Width inside the gated MLP: 8/3 of n_embd gives it the size of an ungated 4x MLP."""
        return self.n_hidden or 8 * round(self.n_embd / 3)

    @property
    def matrix_parameters(self) -> int:
        """Parameters of the layers, without embedding and head."""
        attention = 2 * (self.n_head + self.kv_heads) * self.head_width
        return self.n_layer * self.n_embd * (attention + 3 * self.hidden_dim)

    def passes(self, world_size: int) -> int:
        """Passes of each process over its part of the batch; they are of one size."""
        rows, most = self.batch_size // world_size, TOKENS_PER_PASS // self.block_size
        needed = math.ceil(rows / max(1, most))
        fitting = (n for n in range(needed, rows) if rows % n == 0)
        return self.gradient_accumulation_steps or next(fitting, max(1, rows))

    def check_world_size(self, world_size: int) -> None:
        """Raises ConfigError unless world_size processes share the batch evenly."""
        parts = world_size * max(1, self.gradient_accumulation_steps)
        if self.batch_size % parts:
            passes = f"gradient_accumulation_steps={self.gradient_accumulation_steps}"
            processes = counted(world_size, "process")
            shares = processes if parts == world_size else f"{processes} with {passes}"
            raise ConfigError(
                f"batch_size={self.batch_size} cannot be shared by"
                f" {passes if world_size == 1 else shares}; the nearest that fit:"
                f" batch_size={nearest_multiples(self.batch_size, parts)}"
            )


# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    # The size of nanoGPT's configuration for a CPU: about a minute on two cores.
    "cpu": dict(n_layer=4, n_head=2, n_embd=128, block_size=64, batch_size=12, max_steps=2000,
                device="cpu"),
    # Learns what nanoGPT's configuration for a CPU does, in a twentieth of its minute: in so few
    # steps two wide layers learn more than four.
    "quick": dict(n_layer=2, n_head=2, n_embd=176, n_hidden=480, block_size=64, batch_size=12,
                  max_steps=180, learning_rate=0.05, momentum=0.85, short_windows=0.3,
                  device="cpu"),
    # The best model that two CPU cores make of a megabyte of text in three minutes.
    "laptop": dict(n_layer=4, n_head=3, n_embd=192, block_size=1024, batch_size=2, max_steps=1900,
                   weight_decay=0.1, short_windows=0.9, eval_interval=500, device="cpu"),
    # As large as nanoGPT's train_shakespeare_char, the model of most tutorials; for a GPU. Its
    # values are for a megabyte of text, which it memorizes without weight decay.
    "baby": dict(n_layer=6, n_head=3, n_embd=384, block_size=256, batch_size=64, max_steps=1000,
                 learning_rate=0.03, weight_decay=0.6, dropout=0.2, log_interval=10),
    # For subword tokens, 300 million of them and more, and about an hour on one A10G.
    "small": dict(n_layer=8, n_head=4, n_embd=512, block_size=512, tie_embeddings=True,
                  batch_size=128, max_steps=5000, weight_decay=0.1, log_interval=10),
    # The size of GPT-2; half a million tokens a step, 2.5 billion in all.
    "gpt2": dict(n_layer=12, n_head=6, n_embd=768, block_size=1024, tie_embeddings=True,
                 batch_size=480, max_steps=5000, momentum=0.95, weight_decay=0.1, log_interval=10),
}
# fmt: on


# ------------------------------------------------------------------------------------------------
# The model: a pre-norm decoder in the layout of Qwen3 (arXiv:2505.09388): RMSNorm, rotary
# positions, QK-norm, a gated MLP. Without norm_weights, Qwen3's are written out as ones.

NORM_EPS = 1e-6
# addcmul takes no number here, and to make a tensor of it costs as much as the operation.
NORM_EPS_TENSOR = torch.tensor(NORM_EPS, device="cpu")


def norm_scale(x: Tensor) -> Tensor:
    """1 / root mean square of the rows of x [..., n], [..., 1], in few operations.

    In bf16 it is rounded by up to 0.4 %, on a CPU twice.
    """
    if x.device.type == "cpu" and x.dtype != torch.float16:
        lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True).float()
        mean_square = torch.addcmul(NORM_EPS_TENSOR, lengths, lengths, value=1 / x.size(-1))
    else:  # in float32, since a length may be infinite in float16; on a GPU this copies nothing
        lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        mean_square = lengths.square_().mul_(1 / x.size(-1)).add_(NORM_EPS)
    return mean_square.rsqrt_().to(x.dtype)


class Norm(torch.autograd.Function):
    """The norm with its gradient; torch's takes three times as long on a CPU (see plain_norms)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = norm_scale(x)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        y, scale = ctx.saved_tensors
        along = (dy * y).sum(-1, keepdim=True)
        return torch.addcmul(dy, y, along, value=-1 / y.size(-1)).mul_(scale)


def norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Root-mean-square norm over the last dimension (arXiv:1910.07467), times the weight."""
    if not plain_norms(x.device):
        y = F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)
    elif torch.is_grad_enabled():
        y = Norm.apply(x)
    else:  # to call a Function takes almost as long as the norm of one token
        y = x * norm_scale(x)
    return y if weight is None else y * weight.to(y.dtype)


def norm_weight(config: Config, n: int) -> nn.Parameter | None:
    return nn.Parameter(torch.ones(n)) if config.norm_weights else None


def drop(x: Tensor, p: float) -> Tensor:
    """Dropout in training; p is 0 elsewhere.

    On a CPU, F.dropout takes half of a training step, since it draws number by number. Masks are
    made from random bytes there, which rounds p to 256ths.
    """
    if not p:
        return x
    if not plain_operations(x.device):
        return F.dropout(x, p)
    n, kept = x.numel(), round(256 * (1 - p))
    words = torch.empty((n + 7) // 8, dtype=torch.int64).random_(-(1 << 63), None)
    # Compared in place, as bytes: torch takes twenty times as long to make bools of them.
    mask = words.view(torch.uint8)[:n].view(x.shape).le_(kept - 1)
    return x * mask.to(x.dtype).mul_(256 / kept)


class Linear(nn.Linear):
    """y = x W^T with fp32 master weights, computed in the type of x.

    The weight holds n_fused matrices of equal shape, stacked along its rows.
    """

    def __init__(self, n_in: int, n_out: int, n_fused: int = 1) -> None:
        super().__init__(n_in, n_out * n_fused, bias=False)
        self.n_fused = n_fused

    def reset_parameters(self) -> None:
        """Leaves the weight to GPT.init_weights; a bias, which an edit may add, begins at 0."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def rotary(positions: Tensor, config: Config, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin of the rotary angles (arXiv:2104.09864), [positions, head_dim].

    Both halves of head_dim have the same angles; the first half of sin is negative.
    """
    n = config.head_width
    exponents = torch.arange(0, n, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None] * config.rope_theta ** (-exponents / n)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pairs (i, i + head_dim / 2) of x [..., T, head_dim] by the angles of rotary."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, dims=-1), sin)


def shared(heads: Tensor, n: int) -> Tensor:
    """Keys or values [B, n_kv_head, T, head_dim] for n heads, some of which share one
    (arXiv:2305.13245)."""
    same = heads.size(1) == n
    return heads if same else heads.repeat_interleave(n // heads.size(1), dim=1)


QUERIES_AT_ONCE = 256


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float, mask: Tensor | None = None
) -> Tensor:
    """Scaled dot-product attention of q [B, n_head, T, head_dim] over k, v [B, n_kv_head, ...].

    A mask, bool [B, 1, T, T], is false where a query may not look; it replaces causal.
    """
    B, H, T, D = q.shape
    k, v = shared(k, H), shared(v, H)
    if plain_attention(q, dropout):
        q, k, v = (heads.reshape(B * H, -1, D) for heads in (q, k, v))
        parts = []
        for begin in range(0, T, QUERIES_AT_ONCE):
            some = q[:, begin : begin + QUERIES_AT_ONCE]
            end = begin + some.size(1) if causal else k.size(1)  # so no query looks ahead
            ahead = q.new_full((some.size(1), end), float("-inf") if causal else 0.0)
            scores = torch.baddbmm(ahead.triu_(begin + 1), some, k[:, :end].mT, alpha=D**-0.5)
            if mask is not None:
                seen = mask[:, :, begin : begin + QUERIES_AT_ONCE, :end].expand(B, H, -1, -1)
                scores = scores.masked_fill(~seen.flatten(0, 1), float("-inf"))
            parts.append(drop(scores.softmax(dim=-1), dropout) @ v[:, :end])
        return torch.cat(parts, dim=1).view(B, H, T, D)
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal and mask is None, dropout_p=dropout
    )


def within_documents(idx: Tensor, end: int) -> Tensor:
    """Where a query may look, bool [B, 1, T, T]: not beyond the last `end` before it."""
    documents = (idx == end).cumsum(dim=1)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.kv_heads
        self.head_dim, self.dropout = config.head_width, config.dropout
        # Matrices of one shape: n_head / n_kv_head of them for q, then k and v.
        n = self.n_kv_head * self.head_dim
        self.qkv = Linear(config.n_embd, n, n_fused=self.n_head // self.n_kv_head + 2)
        self.out = Linear(self.n_head * self.head_dim, config.n_embd)
        self.q_norm, self.k_norm = (norm_weight(config, self.head_dim) for _ in range(2))

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, normalized and rotated, [B, n_head, T, head_dim]; k likewise, and v, of n_kv_head."""
        B, T, _ = x.shape
        H, K = self.n_head, self.n_kv_head
        heads = self.qkv(x).view(B, T, H + 2 * K, self.head_dim).transpose(1, 2)
        qk, v = heads.split((H + K, K), dim=1)
        qk = norm(qk)
        if self.q_norm is not None and self.k_norm is not None:
            weights = self.q_norm.expand(H, 1, -1), self.k_norm.expand(K, 1, -1)
            qk = qk * torch.cat(weights).to(qk.dtype)
        q, k = rotate(qk, cos, sin).split((H, K), dim=1)
        return q, k, v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x, cos, sin)
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, causal=True, dropout=dropout, mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202)."""

    activation = staticmethod(F.silu)  # its name goes into config.json

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_up = Linear(config.n_embd, config.hidden_dim, n_fused=2)
        self.down = Linear(config.hidden_dim, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


def activation_name() -> str:
    return getattr(MLP.activation, "__name__", type(MLP.activation).__name__)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config)
        self.dropout = config.dropout
        self.attention_norm, self.mlp_norm = (norm_weight(config, config.n_embd) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        x = x + drop(self.attention(norm(x, self.attention_norm), cos, sin, mask), dropout)
        return x + drop(self.mlp(norm(x, self.mlp_norm)), dropout)


LOGITS_AT_ONCE = 1 << 26  # a quarter of a gigabyte in float32; on a CPU a quarter of that


def logits_at_once(device: torch.device) -> int:
    return LOGITS_AT_ONCE >> (2 if device.type == "cpu" else 0)


class ChunkedLoss(torch.autograd.Function):
    """The mean cross-entropy of head(x); the whole logits are never in memory.

    Each chunk of rows is turned into its gradients at once (Liger Kernel, arXiv:2410.10989, section
    3.2), so nothing is computed twice. Inputs: x [N, C], the head's weight [V, C], targets [N].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        learns = any(ctx.needs_input_grad)
        total = x.new_zeros((), dtype=torch.float32)
        dx, dw = torch.empty_like(x), torch.zeros_like(weight) if learns else None
        cast, rows = weight.to(x.dtype), max(1, logits_at_once(x.device) // len(weight))
        for begin in range(0, len(x), rows):
            some, wanted = x[begin : begin + rows], targets[begin : begin + rows, None]
            logs = (some @ cast.mT).float()
            logs -= logs.logsumexp(dim=-1, keepdim=True)
            total -= logs.gather(1, wanted).sum()
            if dw is not None:  # not yet divided by N, which float16 would round to 0
                d = logs.exp_().scatter_add_(1, wanted, logs.new_full(wanted.shape, -1.0))
                d = d.to(x.dtype)
                dx[begin : begin + rows] = d @ cast
                dw += d.mT @ some
        ctx.save_for_backward(dx, dw)
        return total / len(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, dw = ctx.saved_tensors
        scale = dy / len(dx)
        return dx * scale, dw * scale, None


class GPT(nn.Module):
    """The language model.

    compute_dtype is the type of the matrix products and activations; weights stay float32. The
    weights have no values before init_weights or load_state_dict.
    """

    def __init__(
        self, config: Config, vocabulary_size: int, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        # Embedding draws from a normal distribution. On the meta device, that imports torch's
        # compiler, which takes a second.
        rows = config.vocab_size or vocabulary_size
        weight = torch.empty(rows, config.n_embd)
        self.embed: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = norm_weight(config, config.n_embd)
        self.head = None if config.tie_embeddings else Linear(config.n_embd, rows)

    def init_weights(self, seed: int) -> None:
        """Draws the initial weights on the CPU, so that every device begins with the same.

        Projections back into the residual stream begin at zero, so each block begins as the
        identity (modded-nanogpt).
        """
        generator = torch.Generator().manual_seed(derive_seed(seed, "weights"))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:  # of a norm, which begins as ones
                continue
            n_in = parameter.size(-1)
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                std = 0.0
            elif name.startswith("embed") and self.head is not None:
                std = 1.0
            elif name.startswith(("embed", "head")):
                std = 0.02
            else:
                std = n_in**-0.5
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def angles(self, T: int) -> tuple[Tensor, Tensor]:
        """rotary of the first T positions."""
        positions = torch.arange(T, device=self.embed.weight.device)
        return rotary(positions, self.config, self.compute_dtype)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        angles: tuple[Tensor, Tensor] | None = None,
        end: int | None = None,
    ) -> Tensor:
        """Logits, float32 [B, T, V], of ids [B, T]; with targets [B, T], the mean loss.

        angles are self.angles(T), computed once for many steps, since a compiled graph would
        compute them again in every layer. Attention does not cross the id `end`.
        """
        mask = None if end is None else within_documents(idx, end)
        cos, sin = angles or self.angles(idx.size(1))
        x = self.embed(idx).to(self.compute_dtype)
        x = drop(x, self.config.dropout if self.training else 0.0)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        x = norm(x, self.norm)
        head = self.embed if self.head is None else self.head
        most = logits_at_once(x.device)
        if targets is not None and targets.numel() * len(head.weight) > most:
            # needs_input_grad of a Function is true for a parameter even under no_grad.
            weight = head.weight if torch.is_grad_enabled() else head.weight.detach()
            loss: Tensor = ChunkedLoss.apply(x.flatten(0, 1), weight, targets.flatten())
            return loss
        logits = F.linear(x, head.weight.to(x.dtype)).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ------------------------------------------------------------------------------------------------
# The exported model: a Hugging Face model directory

MODEL_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
)


def to_hugging_face(weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The weights by Qwen3's names, as views: fused matrices cut apart, absent norms as ones.

    Raises:
        ModelError: Qwen3 lacks one of the weights, or has one that is not there.
    """

    def of_norm(name: str, n: int) -> Tensor:
        return left.pop(name) if config.norm_weights else torch.ones(n)

    left = dict(weights)
    width, kv_width = (n * config.head_width for n in (config.n_head, config.kv_heads))
    try:
        out = {"model.embed_tokens.weight": left.pop("embed.weight")}
        for layer in range(config.n_layer):
            ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
            qkv = left.pop(ours + "attention.qkv.weight").split((width, kv_width, kv_width))
            for name, part in zip("qkv", qkv, strict=True):
                out[f"{theirs}self_attn.{name}_proj.weight"] = part
            out[theirs + "self_attn.o_proj.weight"] = left.pop(ours + "attention.out.weight")
            gate, up = left.pop(ours + "mlp.gate_up.weight").chunk(2)
            out[theirs + "mlp.gate_proj.weight"], out[theirs + "mlp.up_proj.weight"] = gate, up
            out[theirs + "mlp.down_proj.weight"] = left.pop(ours + "mlp.down.weight")
            for name in ("q_norm", "k_norm"):
                weight = of_norm(f"{ours}attention.{name}", config.head_width)
                out[f"{theirs}self_attn.{name}.weight"] = weight
            names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
            for name, their_name in names.items():
                out[f"{theirs}{their_name}.weight"] = of_norm(ours + name, config.n_embd)
        out["model.norm.weight"] = of_norm("norm", config.n_embd)
        if not config.tie_embeddings:
            out["lm_head.weight"] = left.pop("head.weight")
    except KeyError as error:
        raise ModelError(f"it has no weight {error}") from None
    if left:
        raise ModelError(f"Qwen3 has no weight {next(iter(left))!r}")
    return out


def qwen3_logits(ids: Tensor, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Logits [T, V] of ids [T], as other tools compute them from an exported model.

    It follows the Qwen3 report (arXiv:2505.09388), model.safetensors and config.json, and shares no
    code with GPT, so whatever an edit changes in GPT shows as a difference.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], config["rms_norm_eps"])

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"])

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    head_dim, activation = config["head_dim"], getattr(F, config["hidden_act"])
    frequencies = config["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(len(ids)), frequencies).repeat(1, 2)
    x = tensors["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        attn, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        y = norm(x, f"model.layers.{layer}.input_layernorm")
        q, k, v = (
            linear(y, f"{attn}{name}_proj").unflatten(-1, (-1, head_dim)).transpose(0, 1)
            for name in "qkv"
        )
        q, k = rotated(norm(q, attn + "q_norm")), rotated(norm(k, attn + "k_norm"))
        k, v = (each.repeat_interleave(len(q) // len(each), dim=0) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(0, 1).flatten(1), attn + "o_proj")
        y = norm(x, f"model.layers.{layer}.post_attention_layernorm")
        y = activation(linear(y, mlp + "gate_proj")) * linear(y, mlp + "up_proj")
        x = x + linear(y, mlp + "down_proj")
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return linear(norm(x, "model.norm"), head)


# Largest difference by rounding, as a part of the largest logit. Measured: 1e-6 in `cpu`, 2e-6 in
# 12 layers of 768; the mildest edit tried (no QK-norm, 10 steps) makes 1e-2.
LOGIT_TOLERANCE = 1e-4


@torch.inference_mode()
def check_export(model: GPT, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Compares the exported model's logits with the model's own (CPU, float32).

    Two windows hold as many different ids as fit, in random order, as an edit may depend on what a
    text holds. All GPUs wait meanwhile, so there are no more.

    Raises:
        ModelError: they differ: the model is not the one that config.json describes.
    """
    size, generator = config["vocab_size"], torch.Generator().manual_seed(0)
    T = model.config.block_size
    order = [torch.randperm(size, generator=generator) for _ in range(-(-2 * T // size))]
    for ids in torch.cat(order)[: 2 * T].split(T):
        own = model(ids[None])[0]
        difference = float((qwen3_logits(ids, tensors, config) - own).abs().max())
        if not difference <= LOGIT_TOLERANCE * float(own.abs().max()):
            raise ModelError(f"its logits differ from Qwen3's by {difference:.2g}")


def hugging_face_config(
    config: Config, vocabulary_size: int, end: int | None = None
) -> dict[str, Any]:
    """config.json; end is the id of the end of a document.

    The window and max_window_layers=0 make transformers' cache slide like ours.

    Raises:
        ModelError: the activation is none that config.json can name.
    """
    if not hasattr(F, activation := activation_name()):
        raise ModelError(f"its activation, {activation}, is not a function of torch.nn.functional")
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size or vocabulary_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": activation,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": True,
        "sliding_window": config.block_size,
        "max_window_layers": 0,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }


def character_tokenizer(vocabulary: str) -> dict[str, Any]:
    """tokenizer.json of one token per character, given back exactly.

    The format needs an unknown token in the vocabulary, or other tools raise an error for an
    unknown character; a space is the least harmful. Our own sampler refuses such characters.
    """
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {character: index for index, character in enumerate(vocabulary)},
            "unk_token": " " if " " in vocabulary else vocabulary[0],
        },
    }


EDITED = "sm-nanogpt-edited"


def write_artefact(
    directory: Path, model: GPT, tokenizer: Tokenizer, training: Mapping[str, Any]
) -> str:
    """Writes the model (CPU, float32, evaluating) as a directory; SHA256SUMS comes last.

    An edited script's model may not be Qwen3's any more. Its weights are then written under its own
    names, and config.json has a `model_type` that no other tool takes for one it knows.

    Returns why the model is not Qwen3's; "" if it is.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config, why = model.config, ""
    weights: dict[str, Tensor] = model.state_dict()
    try:
        tensors = to_hugging_face(weights, config)
        document = hugging_face_config(config, len(tokenizer), tokenizer.end)
        check_export(model, tensors, document)
    except Exception as error:  # an edited model may have other parts, or another shape
        if is_out_of_memory(error):
            raise
        tensors, why = weights, str(error)
        if not isinstance(error, ModelError):
            why = f"it cannot be compared: {type(error).__name__}: {error}"
        document = {
            "model_type": EDITED,
            "why": f"not Qwen3: {why}; the script of training.json's script_sha256 computes it",
            "vocab_size": len(tokenizer),
        }
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    documents = {
        "tokenizer.json": tokenizer.document,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.block_size,
            "eos_token": tokenizer.end_of_text,
        },
        "training.json": {"config": dataclasses.asdict(config), **training},
        "config.json": document,
    }
    for name, content in documents.items():
        with replacing(directory / name) as temporary:
            temporary.write_text(
                json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
    write_sums(directory)
    return why


def write_sums(directory: Path) -> None:
    """Writes SHA256SUMS, which `sha256sum -c` reads too, over the files of a model."""
    lines = [
        f"{hashlib.sha256((directory / name).read_bytes()).hexdigest()}  {name}\n"
        for name in MODEL_FILES
    ]
    with replacing(directory / "SHA256SUMS") as temporary:
        temporary.write_text("".join(lines))


def script_sha256() -> str:
    """The SHA-256 of this file, which says what script made a model."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def with_weights(config: Config, vocabulary_size: int, weights: Mapping[str, Tensor]) -> GPT:
    """A model with these weights, evaluating. Raises ModelError unless all of them fit."""
    model = GPT(config, vocabulary_size)
    fill(model.state_dict(), weights)
    return model.eval()


@torch.no_grad()
def fill(
    live: Mapping[str, Tensor], given: Mapping[str, Tensor], source: str = "the checkpoint"
) -> None:
    """Copies the given tensors into the live ones. Raises ModelError unless all of them fit."""
    for name in sorted(live.keys() | given.keys()):
        own, there = (list(of[name].shape) if name in of else "nothing" for of in (live, given))
        if own != there:
            raise ModelError(f"{name} is {there} in {source} and {own} in this script")
    for name, tensor in live.items():
        tensor.copy_(given[name])


def model_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = "model."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


# ------------------------------------------------------------------------------------------------
# Starting from a model: one of ours, or of the Qwen3 family as its makers publish it

# Defaults of a run that starts from a model.
FINE_TUNING: dict[str, Any] = {
    "learning_rate": 0.005,
    "embedding_learning_rate": 0.005,
    "head_learning_rate": 0.002,
    "max_steps": 500,
}


def starting_values(directory: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a run that starts from the model in a directory.

    They are the given ones, those that the model prescribes, and FINE_TUNING.

    Raises:
        ConfigError: a given one differs from the model's, or the model is not one for this script.
    """
    shape = read_shape(directory)
    free = {"block_size": min(shape.pop("longest"), 1024)} if "longest" in shape else {}
    free["mask_documents"] = shape.pop("mask_documents", False)
    fields = {f.name: f for f in dataclasses.fields(Config)}
    values = {name.replace("-", "_"): v for name, v in given.items() if v not in (None, "")}
    for name in values.keys() & shape.keys():
        value = values[name]
        value = parse_value(fields[name], value) if isinstance(value, str) else value
        if value != shape[name]:
            raise ConfigError(f"{name}={value!r}: the model to start from has {shape[name]!r}")
    return {**FINE_TUNING, **free, **values, **shape}


def read_shape(directory: Path) -> dict[str, Any]:
    """The hyperparameters that a model prescribes, and free ones: mask_documents, and the longest
    block_size of a Qwen3.

    Raises:
        ConfigError: there is no such model, or it has something that this script does not compute.
    """
    try:
        found = json.loads((directory / "config.json").read_bytes())
        if found.get("model_type") == EDITED:
            return read_edited(directory)
        rope = found.get("rope_scaling") or found.get("rope_parameters") or {}
        stated = {**found, "rope_type": rope.get("rope_type", rope.get("type", "default"))}
        computed = {
            "model_type": "qwen3",
            "hidden_act": activation_name(),
            "rms_norm_eps": NORM_EPS,
            "attention_bias": False,
            "quantization_config": None,
            "rope_type": "default",
        }
        for name, value in computed.items():
            if stated.get(name, None if name == "model_type" else value) != value:
                raise ConfigError(
                    f"the model to start from has {name}={stated.get(name)!r}; this script computes"
                    f" only {value!r} (if an edited script trained the model, use that script)"
                )
        # Ours has norms without weights, which config.json cannot say.
        ours = directory / "training.json"
        trained = json.loads(ours.read_bytes())["config"] if ours.exists() else {}
        slides = found.get("use_sliding_window") and found.get("sliding_window")
        return {
            "n_layer": found["num_hidden_layers"],
            "n_head": found["num_attention_heads"],
            "n_kv_head": found["num_key_value_heads"],
            "head_dim": found["head_dim"],
            "n_embd": found["hidden_size"],
            "n_hidden": found["intermediate_size"],
            "tie_embeddings": found["tie_word_embeddings"],
            "norm_weights": trained.get("norm_weights", not trained),
            "mask_documents": trained.get("mask_documents", False),
            "rope_theta": float(
                found["rope_theta"] if "rope_theta" in found else rope["rope_theta"]
            ),
            "vocab_size": found["vocab_size"],
            "longest": min(found["max_position_embeddings"], slides or math.inf),
        }
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{directory / 'config.json'} cannot be read: {error!r}") from None


def read_edited(directory: Path) -> dict[str, Any]:
    """What read_shape returns, of a model that only this very script computes."""
    training = json.loads((directory / "training.json").read_bytes())
    if (needed := training["script_sha256"]) != script_sha256():
        raise ConfigError(
            f"an edited script trained the model to start from (SHA-256 {needed[:12]}...), which is"
            " not Qwen3's; use that script"
        )
    fields = itertools.takewhile(
        lambda field: field.metadata["group"] in ("model", ""), dataclasses.fields(Config)
    )
    names = [field.name for field in fields if field.name != "dropout"]
    return {name: training["config"][name] for name in names}


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of the model in a directory. Raises DataError."""
    try:
        document = json.loads((directory / "tokenizer.json").read_bytes())
        end = json.loads((directory / "tokenizer_config.json").read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{directory}: its tokenizer cannot be read: {error}") from None
    return Tokenizer(document, end["content"] if isinstance(end, dict) else end)


def load_pretrained(model: GPT, directory: Path) -> None:
    """Reads the weights of the model in a directory, which may be in several files, of any type.

    Raises:
        ModelError: they do not fit.
        FormatError: a file is missing, damaged, or not safetensors.
    """
    tensors: dict[str, Tensor] = {}
    try:
        index = directory / "model.safetensors.index.json"
        parts = json.loads(index.read_bytes())["weight_map"] if index.exists() else {}
        for name in sorted(set(map(plain_name, parts.values()))) or ["model.safetensors"]:
            tensors |= read_safetensors(directory / name, largest=1 << 24)[0]
    except OSError as error:
        raise FormatError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{index} cannot be read: {error!r}") from None
    if model.head is None:  # published files may hold the tied head too
        tensors.pop("lm_head.weight", None)
    live: Mapping[str, Tensor] = model.state_dict()
    edited = json.loads((directory / "config.json").read_bytes()).get("model_type") == EDITED
    if not edited:
        live = to_hugging_face(live, model.config)
    for name, tensor in tensors.items():
        if name in live and live[name].is_floating_point() > tensor.is_floating_point():
            raise ModelError(f"{name} is of {tensor.dtype}, not of a type of weights")
    fill(live, tensors, "the model to start from")
    if not edited and not model.config.norm_weights:
        for name, tensor in tensors.items():
            if name.endswith("norm.weight") and not bool((tensor == 1).all()):
                raise ModelError(f"{name} is not all ones, but norm_weights is False")


# ------------------------------------------------------------------------------------------------
# Sampling


def logits_to_probabilities(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Probabilities [B, V] after temperature, the top_k most likely (0: all) and nucleus top_p.

    The nucleus is the smallest set of most likely tokens with at least top_p of the probability
    (arXiv:1904.09751).
    """
    logits = logits / temperature
    if 0 < top_k < logits.size(-1):
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = logits.softmax(dim=-1)
    if top_p < 1.0:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        outside = ordered.cumsum(dim=-1) - ordered >= top_p
        outside = torch.zeros_like(outside).scatter(-1, order, outside)
        probabilities = probabilities.masked_fill(outside, 0.0)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return probabilities


def draw(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> Tensor:
    """The next ids, int64 [B], of logits [B, V].

    A temperature of 0, or close to 0, takes the most likely id.
    """
    if temperature < 1e-30:  # logits divided by a smaller number may be infinite
        return logits.argmax(dim=-1)
    probabilities = logits_to_probabilities(logits, temperature, top_k, top_p)
    # The same as torch.multinomial, without its checks of the probabilities.
    noise = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / noise).argmax(dim=-1)


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1337,
) -> Iterator[Tensor]:
    """Yields the next ids, int64 [B] on the model's device, of a prompt [B, T], one at a time.

    Each is drawn after a whole forward pass over the last block_size ids. This is slow, and
    correct for any model. The same seed gives the same ids.
    """
    generator = torch.Generator(prompt.device).manual_seed(seed)
    ids = prompt
    for _ in range(max_new_tokens):
        ids = ids[:, -model.config.block_size :]
        following = draw(model(ids)[:, -1], temperature, top_k, top_p, generator)
        yield following
        ids = torch.cat((ids, following[:, None]), dim=1)


def sample_text(model: GPT, tokenizer: Tokenizer, length: int) -> str:
    """A text of `length` tokens from the start of a document, or of a line."""
    prompt = torch.tensor([[tokenizer.start]], device=model.embed.weight.device)
    # cuDNN's kernel, which newer GPUs prefer, is planned anew for each number of keys, for 20 ms or
    # more, and has corrupted generated text (github.com/pytorch/pytorch/issues/193893).
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    model.eval()
    with sdpa_kernel(others):
        steps = list(generate(model, prompt, length))
    model.train()
    return tokenizer.decode(
        torch.cat(steps).tolist() if steps else []
    )  # copied from the device once


# ------------------------------------------------------------------------------------------------
# Optimizers and schedule

# Polar Express (arXiv:2505.16932, Algorithm 1): the polynomials a x + b x^3 + c x^5, in turn, that
# bring all singular values in [0.001, 1] to 1 fastest.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
)


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Roughly the nearest semi-orthogonal matrix of each in [n, rows, columns], rows >= columns."""
    # Normalized before rounding: in float16 the gradient itself may be 0.
    norms = matrices.norm(dim=(-2, -1), keepdim=True)
    x = (matrices / (norms * 1.02 + 1e-20)).to(dtype)
    for a, b, c in POLAR_EXPRESS:
        gram = x.mT @ x
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, polynomial, beta=a)
    return x


def upright(tensor: Tensor, n_fused: int) -> Tensor:
    """A view of a Linear's weight, or its gradient: [n_fused, rows, columns], rows >= columns."""
    matrices = tensor.view(n_fused, -1, tensor.size(1))
    return matrices if matrices.size(1) >= matrices.size(2) else matrices.mT


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None  # check_gradients made sure of it
    return parameter.grad


class Muon:
    """Momentum, orthogonalized (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    Matrices of one shape, up to transposition, are stacked and updated together; each part of a
    fused matrix is a matrix of its own. If they are large, each rank orthogonalizes a share of
    them.
    """

    def __init__(
        self, weights: Mapping[str, tuple[Tensor, int]], config: Config, group: Group
    ) -> None:
        self.group = group
        self.momentum, self.weight_decay = config.momentum, config.weight_decay
        by_shape: dict[torch.Size, list[tuple[str, Tensor, int]]] = {}
        for name, (weight, n_fused) in weights.items():
            shape = upright(weight, n_fused).shape[1:]
            by_shape.setdefault(shape, []).append((name, weight, n_fused))
        self.groups = []
        for shape, members in by_shape.items():
            count = sum(n_fused for _, _, n_fused in members)
            buffer = torch.zeros(count, *shape, device=members[0][1].device)
            self.groups.append((members, buffer))
        self.shares = group.world_size > 1 and sharing_pays([buffer for _, buffer in self.groups])

    @torch.no_grad()
    def step(self, learning_rate: float, dtype: torch.dtype) -> None:
        """One update of every matrix from its gradient; dtype is that of the orthogonalization."""
        directions = []
        for members, buffer in self.groups:
            gradient = torch.cat([upright(gradient_of(w), n_fused) for _, w, n_fused in members])
            buffer.lerp_(gradient, 1 - self.momentum)
            directions.append(gradient.lerp_(buffer, self.momentum))  # Nesterov
        updates = self.orthogonalize(directions, dtype)
        for (members, _), update in zip(self.groups, updates, strict=True):
            parts = update.split([n_fused for _, _, n_fused in members])
            for (_, weight, n_fused), part in zip(members, parts, strict=True):
                scale = max(1.0, weight.size(0) / n_fused / weight.size(1)) ** 0.5
                if self.weight_decay:
                    weight.mul_(1 - learning_rate * self.weight_decay)
                upright(weight, n_fused).add_(part, alpha=-learning_rate * scale)

    def orthogonalize(self, stacks: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Each stack [n, rows, columns] orthogonalized, alone or by all ranks together."""
        group = self.group
        if not self.shares:
            return [orthogonalize(stack, dtype) for stack in stacks]
        shares, mine = [], []
        for stack in stacks:
            share = -(-len(stack) // group.world_size)
            own = stack[group.rank * share : (group.rank + 1) * share]
            filled = own.new_zeros(share, *own.shape[1:], dtype=dtype)
            filled[: len(own)] = orthogonalize(own, dtype)
            shares.append(filled.numel())
            mine.append(filled.flatten())
        parts = group.all_gather(torch.cat(mine)).split(shares, dim=1)
        return [
            part.reshape(-1, *stack.shape[1:])[: len(stack)]
            for part, stack in zip(parts, stacks, strict=True)
        ]

    def state(self) -> dict[str, Tensor]:
        state = {}
        for members, buffer in self.groups:
            parts = buffer.split([n_fused for _, _, n_fused in members])
            for (name, _, _), part in zip(members, parts, strict=True):
                state[f"momentum.{name}"] = part
        return state


class AdamW:
    """Adam with weight decay that is separate from the gradient (arXiv:1711.05101).

    torch's class imports the compiler, which takes as long as importing torch.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], config: Config, weight_decay: float
    ) -> None:
        self.parameters, self.config, self.weight_decay = parameters, config, weight_decay
        self.steps, self.exp_avg, self.exp_avg_sq = {}, {}, {}
        for name, parameter in parameters.items():
            self.steps[name] = torch.zeros((), device=parameter.device)
            self.exp_avg[name] = torch.zeros_like(parameter)
            self.exp_avg_sq[name] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update of every parameter from its gradient."""
        adamw(
            list(self.parameters.values()),
            [gradient_of(parameter) for parameter in self.parameters.values()],
            list(self.exp_avg.values()),
            list(self.exp_avg_sq.values()),
            [],
            list(self.steps.values()),
            fused=True,
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=learning_rate,
            weight_decay=self.weight_decay,
            eps=1e-10,
            maximize=False,
        )

    def state(self) -> dict[str, Tensor]:
        kinds = {"step": self.steps, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {f"{kind}.{name}": t for kind, named in kinds.items() for name, t in named.items()}


class Optimizer:
    """Muon for the matrices and AdamW for the rest, or AdamW for everything."""

    def __init__(self, model: GPT, config: Config, group: Group) -> None:
        self.config = config
        self.dtype = model.compute_dtype
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        matrices = {
            f"{name}.weight": (module.weight, module.n_fused)
            for name, module in model.blocks.named_modules(prefix="blocks")
            if isinstance(module, Linear) and module.weight.requires_grad
        }
        rest = {name: p for name, p in self.parameters.items() if name not in matrices}
        self.muon: Muon | None = None
        self.adamws: list[tuple[AdamW, float]] = []  # with their peak learning rates
        if config.optimizer == "muon":
            self.muon = Muon(matrices, config, group)
            by_peak: dict[float, dict[str, Tensor]] = {}
            for name, parameter in rest.items():
                untied = parameter is model.embed.weight and model.head is not None
                peak = config.embedding_learning_rate if untied else config.head_learning_rate
                by_peak.setdefault(peak, {})[name] = parameter
            self.adamws = [(AdamW(named, config, 0.0), peak) for peak, named in by_peak.items()]
        else:
            inner = {name: weight for name, (weight, _) in matrices.items()}
            for parameters, decay in ((inner, config.weight_decay), (rest, 0.0)):
                one = AdamW(parameters, config, decay)
                self.adamws.append((one, config.learning_rate))

    def step(self, scale: float) -> None:
        """One update from the gradients, at `scale` times the peak learning rates."""
        self.check_gradients()
        if self.config.grad_clip:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.config.grad_clip)
        if self.muon is not None:
            self.muon.step(self.config.learning_rate * scale, self.dtype)
        for one, peak in self.adamws:
            one.step(peak * scale)

    @property
    def param_groups(self) -> list[dict[str, list[nn.Parameter]]]:
        """The parameters, as torch's GradScaler asks for them."""
        return [{"params": list(self.parameters.values())}]

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def check_gradients(self) -> None:
        """Raises ModelError if a parameter has no gradient."""
        without = [name for name, p in self.parameters.items() if p.grad is None]
        if without:
            raise ModelError(
                f"{', '.join(without[:3])}{' and more' * (len(without) > 3)}: no gradient arrives;"
                " does forward use it?"
            )

    def state(self) -> dict[str, Tensor]:
        """The state by name; its tensors are the live ones."""
        state = dict(self.muon.state()) if self.muon is not None else {}
        for one, _ in self.adamws:
            state.update(one.state())
        return state


def window_length(step: int, config: Config) -> int:
    """The length that a step's windows are cut into: it doubles three times, up to block_size.

    Attention over short windows is cheap, and a model learns short distances first
    (arXiv:2108.06084).
    """
    part = step / (config.short_windows * config.max_steps) if config.short_windows else 1.0
    return config.block_size >> (3 - min(3, int(3 * part)))


def learning_rate_scale(step: int, config: Config) -> float:
    """The part of the peak learning rates at a step: warm-up, plateau, linear decay."""
    warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
    decay_steps = config.decay_fraction * config.max_steps
    left = (config.max_steps - step) / decay_steps if decay_steps else 1.0
    return warm * (config.final_learning_rate + (1 - config.final_learning_rate) * min(1.0, left))


# ------------------------------------------------------------------------------------------------
# Batches


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that is a pure function of its parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def seed_draws(device: torch.device, seed: int) -> None:
    """Seeds the device's default generator, which dropout draws from."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    elif device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    else:
        torch.manual_seed(seed)  # seeds all kinds of devices, which takes 0.1 ms


class Batches:
    """Training windows. The batch of a step is a pure function of (seed, step).

    An epoch cuts the text into windows that touch each other, from a random phase, and visits
    each once in random order. The phase leaves less than two windows over, at
    both ends; other epochs visit them.
    """

    def __init__(self, tokens: Tensor | Shards, config: Config, device: torch.device) -> None:
        self.tokens, self.device = near_device(tokens, device), device
        self.block_size, self.batch_size = config.block_size, config.batch_size
        self.seed = config.seed
        n = len(tokens) - 1  # the last character is only ever a target
        self.windows_per_epoch = max(1, (n - self.block_size + 1) // self.block_size)
        self.phases = min(self.block_size, n - self.windows_per_epoch * self.block_size + 1)
        self.epoch, self.starts = -1, torch.empty(0, dtype=torch.long)

    def window_starts(self, step: int) -> Tensor:
        """Where each window of the global batch begins: int64 [batch_size]."""
        parts, index, end = [], step * self.batch_size, (step + 1) * self.batch_size
        while index < end:
            epoch, place = divmod(index, self.windows_per_epoch)
            if epoch != self.epoch:
                generator = torch.Generator().manual_seed(derive_seed(self.seed, "epoch", epoch))
                phase = torch.randint(self.phases, (), generator=generator)
                order = torch.randperm(self.windows_per_epoch, generator=generator)
                starts = order.mul_(self.block_size).add_(phase)
                self.epoch, self.starts = epoch, starts.to(self.tokens.device)
            part = self.starts[place : place + end - index]
            parts.append(part)
            index += len(part)
        return torch.cat(parts)

    def rows(self, step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        """This rank's slice of the step's batch: inputs and targets, int64 [rows, block_size]."""
        rows = self.batch_size // world_size
        starts = self.window_starts(step)[rank * rows : (rank + 1) * rows]
        return gather_windows(self.tokens, starts, self.block_size, self.device)


def gather_windows(
    tokens: Tensor | Shards, starts: Tensor, block_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the windows at `starts` [n]: int64 [n, block_size] on the device."""
    places = starts.to(tokens.device)[:, None] + torch.arange(block_size + 1, device=tokens.device)
    windows = tokens[places]
    if windows.device != device:
        # One copy from pinned memory: the host does not wait until the GPU has made it.
        pinned = device.type == "cuda"
        windows = (windows.pin_memory() if pinned else windows).to(device, non_blocking=pinned)
    windows = windows.long() if windows.dtype != torch.int16 else windows.long() & 0xFFFF
    return windows[:, :-1], windows[:, 1:]


# ------------------------------------------------------------------------------------------------
# Training

# Each with the format in which it is shown.
METRICS = {
    "train_loss": 5,
    "val_loss": 5,
    "best_loss": 5,  # the lowest val_loss so far, which is that of the model that is kept
    "bits_per_byte": 5,  # val_loss per byte of text, comparable between tokenizers
    "learning_rate": 7,
    "tokens_per_second": 0,
}


def metric_line(row: Mapping[str, Any], max_steps: int, seconds_left: float | None) -> str:
    """`step=250/2000 train_loss=1.81234 ... time_left=0:00:12`, which metric regexes read."""
    words = [f"step={row['step']}/{max_steps}"]
    words += [f"{name}={row[name]:.{digits}f}" for name, digits in METRICS.items() if name in row]
    if seconds_left is not None:
        words.append(f"time_left={timedelta(seconds=round(min(seconds_left, 1e13)))}")
    return " ".join(words)


def metric_definitions() -> list[dict[str, str]]:
    """What SageMaker needs to read the metrics of a log; not anchored, as mpirun tags lines."""
    number = r"([0-9]+(?:\.[0-9]+)?)"
    return [{"Name": name, "Regex": f"{name}={number}"} for name in ("step", *METRICS)]


def eval_windows(val: Tensor | Shards, config: Config) -> tuple[Tensor, ...]:
    """Where the windows of an evaluation begin, in chunks. They are spread evenly, not overlapping.

    The chunks do not depend on the number of ranks.
    """
    available = (len(val) - 1) // config.block_size
    count = min(config.eval_windows or available, available)
    starts = torch.arange(count) * available // count * config.block_size
    return starts.split(max(1, 8192 // config.block_size))


def bytes_per_token(corpus: Corpus, config: Config) -> float:
    """The mean number of UTF-8 bytes per token that an evaluation predicts.

    The end of a document has no bytes, so its loss adds to that of the text.
    """
    lengths = torch.tensor([len(word) for word in corpus.tokenizer.words])
    chunks = eval_windows(corpus.val, config)
    targets = (
        gather_windows(corpus.val, c, config.block_size, torch.device("cpu"))[1] for c in chunks
    )
    means = [(lengths[ids].double().mean().item(), len(ids)) for ids in targets]
    return sum(mean * n for mean, n in means) / sum(n for _, n in means)


@torch.no_grad()
def evaluate(
    model: nn.Module, val: Tensor | Shards, config: Config, group: Group, end: int | None = None
) -> float:
    """Mean loss in nats per token over the windows of eval_windows; end is as in GPT.forward.

    Each chunk is computed by one rank, and the chunks are added up in order, so any number of
    ranks gets the same loss from the same weights.
    """
    chunks = eval_windows(val, config)
    count = sum(map(len, chunks))
    losses = torch.zeros(len(chunks), dtype=torch.float32, device=group.device)
    model.eval()
    for index in range(group.rank, len(chunks), group.world_size):
        x, y = gather_windows(val, chunks[index], config.block_size, group.device)
        losses[index] = model(x, y, end=end)
    model.train()
    per_chunk = group.sum_(losses).tolist()
    return sum(loss * len(chunk) for loss, chunk in zip(per_chunk, chunks, strict=True)) / count


def memory_used(group: Group) -> tuple[int, int]:
    """The most bytes so far of this rank's GPU, or of the processes of this host; and all bytes."""
    if group.device.type == "cuda":
        total = torch.cuda.get_device_properties(group.device).total_memory
        return torch.cuda.max_memory_allocated(), total
    unit = 1 if sys.platform == "darwin" else 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit * group.local_world_size
    return used, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


NOTHING, CHECKPOINT, STOP = range(3)
# By default, checkpoints may take this part of the time: a model of the size of GPT-2 takes seconds
# to write, and on a GPU evaluations may come every few seconds. But one slow write must not cost an
# hour of work.
CHECKPOINT_SHARE = 0.02
LONGEST_WITHOUT_CHECKPOINT = 600.0  # seconds
LONG_RUN = 60.0  # seconds: a run that takes longer says so


def read_drill(words: str | None) -> tuple[int, int, str] | None:
    """Rank, step and action (raise, kill, hang) of NANOGPT_FAULT=RANK:STEP:ACTION.

    It shows what a failure looks like, without waiting for one. Only a run that begins at step 0
    fails; the run that resumes it continues.
    """
    if words is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+):(raise|kill|hang)", words)
    if match is None:
        raise ConfigError(f"NANOGPT_FAULT={words}: set RANK:STEP:raise, kill or hang")
    return int(match[1]), int(match[2]), match[3]


class Trainer:
    """One run: the model, its optimizer, its data, and its progress."""

    def __init__(self, config: Config, container: Container, group: Group, corpus: Corpus) -> None:
        self.config, self.container, self.group, self.corpus = config, container, group, corpus
        self.chief = group.rank == 0
        self.script_sha256 = script_sha256()  # read now: the file may be edited during the run
        self.batches = Batches(corpus.train, config, group.device)
        self.checkpoints = Checkpoints(container.checkpoint_dir)
        self.bytes_per_token = bytes_per_token(corpus, config)
        self.end = corpus.tokenizer.end if config.mask_documents else None
        self.stop_signal = 0  # the step's number, after the first
        self.step = 0
        self.kept_step: int | None = None  # of the newest checkpoint
        self.saved_at = math.inf  # time of that checkpoint, or of the start of training
        self.best_step: int | None = None
        self.best_val_loss = math.inf
        self.unsaved_best: dict[str, Tensor] = {}  # of the chief, until the next checkpoint
        self.checkpoint_cost = 0.0  # seconds to write the newest one
        self.metrics: list[dict[str, Any]] = []
        self.timed_from: tuple[int, float] | None = None  # step, time; until logged
        self.angles: dict[int, tuple[Tensor, Tensor]] = {}  # by length of windows
        device = group.device
        # Since the last metric line: the sum of this rank's losses, and its steps. In float64
        # (which MPS lacks) the sum is exact, so that an interrupted run logs the same numbers.
        exact = torch.float32 if device.type == "mps" else torch.float64
        self.loss_sum = torch.zeros((), device=device, dtype=exact)
        self.steps_summed = 0

        dtype = agreed_precision(config, group)
        if config.precision == "tf32":
            torch.set_float32_matmul_precision("high")
        self.model = GPT(config, len(corpus.tokenizer), dtype).to(device)
        self.model.init_weights(config.seed)
        self.optimizer = Optimizer(self.model, config, group)
        self.compiled = config.compile == "on"
        pays = compiling_pays(self.model, config, device, group.world_size)
        if config.compile == "auto" and pays:
            self.compiled = can_compile()
            if not self.compiled and self.chief:
                log("note: not compiled: that needs Triton, a C compiler and Python.h")
        if config.compile == "auto":
            self.compiled = group.every(self.compiled)  # hosts may differ
        # Evaluations use the uncompiled model: compiling it for them takes longer than they do.
        # One graph for all lengths of windows would break at each attention.
        net: Any = torch.compile(self.model, dynamic=False) if self.compiled else self.model
        self.ddp: nn.Module = net
        if group.world_size > 1:
            self.ddp = DistributedDataParallel(
                net,
                device_ids=[device.index] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
            )
            if dtype != torch.float32:  # in a lambda, as DDP takes no annotations that are strings
                self.ddp.register_comm_hook(
                    dtype, lambda dtype, bucket: group.average_soon(dtype, bucket)
                )
        # Gradients that are small would be 0 in float16, so the loss is scaled up. A step in which
        # they are then infinite is left out and the scale halved; after 2000 good ones it is
        # doubled. Other types need no scale.
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.logged_scale = 0.0  # the scale at the last metric line; a decrease is logged

    @property
    def choices(self) -> list[str]:
        """The choices for this device and model, as the log shows them."""
        cpu = self.group.device.type == "cpu"
        near = self.batches.tokens.device.type != "cpu"
        named = str(self.model.compute_dtype).removeprefix("torch.")
        operations = "fused operations"
        if not self.compiled and plain_norms(self.group.device):
            operations = "plain operations" if cpu else "fused operations but for norms"
        choices = [
            "tf32" if self.config.precision == "tf32" else named,
            "compiled" if self.compiled else "eager",
            operations,
            f"text {'on the GPU' if near else 'in memory'}",
        ]
        if (passes := self.config.passes(self.group.world_size)) > 1:
            choices.append(f"{passes} passes a step")
        if self.group.world_size > 1:
            choices.append(f"gradients averaged in {named}")
            if muon := self.optimizer.muon:
                choices.append(f"muon {'shared out' if muon.shares else 'on each rank'}")
        return choices

    def introduce(self, ranks: Ranks) -> None:
        """Logs where this run computes, its choices, and the size of its data."""
        device, corpus = self.group.device, self.corpus
        first_of_host = torch.tensor(float(ranks.local_rank == 0), device=device)
        hosts = int(self.group.sum_(first_of_host))
        if not self.chief:
            return
        machine = torch.cuda.get_device_name() if device.type == "cuda" else device.type.upper()
        even = hosts * ranks.local_world_size == ranks.world_size
        each = f"{ranks.local_world_size} {machine}" if even else machine
        log(
            f"running on {counted(hosts, 'host')} x {each}"
            f" = {counted(ranks.world_size, 'process')} in one group (launched by {ranks.launcher};"
            f" {counted(torch.get_num_threads(), 'CPU thread')} each)"
        )
        log(f"chosen: {', '.join(self.choices)}")
        parameters = sum(p.numel() for p in self.model.parameters())
        log(
            f"{parameters:,} parameters; {len(corpus.train):,} {corpus.tokenizer.unit} to train"
            f" on, {len(corpus.val):,} to validate on, vocabulary {len(corpus.tokenizer):,}"
        )

    # -- state ------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes, by name; the live tensors."""
        optimizer = {f"optimizer.{name}": t for name, t in self.optimizer.state().items()}
        return {**self.weights(), **optimizer}

    def weights(self) -> dict[str, Tensor]:
        """The model's parameters, and the buffers that an edited one may have."""
        return {f"model.{name}": t for name, t in self.model.state_dict(keep_vars=True).items()}

    def state(self, loss_sum: float = 0.0) -> dict[str, Any]:
        """Everything else that a checkpoint holds; loss_sum is that of all world_size ranks."""
        on_cpu = self.group.device.type == "cpu"
        return {
            "step": self.step,
            "best_step": self.best_step,
            "best_val_loss": self.best_val_loss if self.best_step is not None else None,
            "config": dataclasses.asdict(self.config),
            "script_sha256": self.script_sha256,
            "tokenizer": self.corpus.tokenizer.document,
            "end_of_text": self.corpus.tokenizer.end_of_text,
            "corpus_sha256": self.corpus.sha256,
            "data": str(self.container.training),
            "validation": str(self.container.validation or ""),
            "init_from": str(self.container.init_from or ""),
            "metrics": self.metrics,
            "loss_sum": loss_sum,
            "world_size": self.group.world_size,
            "processes": self.group.local_world_size if on_cpu else 0,
            "steps_summed": self.steps_summed,
            "scaler": self.scaler.state_dict(),
        }

    def save_checkpoint(self) -> None:
        """Every rank calls it at the same step, and rank 0 writes.

        Raises:
            NonFiniteLossError: the loss or the weights are not finite, so nothing is written.
        """
        self.saved_at = time.monotonic()
        loss_sum = float(self.group.sum_(self.loss_sum.clone()))
        self.check_finite(loss_sum)
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            raise NonFiniteLossError(self.diverged("the weights are"))
        if self.chief:
            if self.unsaved_best:
                self.checkpoints.save("best", self.unsaved_best, {"step": self.best_step})
                self.unsaved_best = {}
            self.checkpoints.save("checkpoint", self.tensors(), self.state(loss_sum))
        self.kept_step = self.step
        self.checkpoint_cost = time.monotonic() - self.saved_at

    def restore(self) -> None:
        """Loads rank 0's newest checkpoint, if there is one, on every rank."""
        loaded = self.checkpoints.load_latest() if self.chief else None
        if loaded is not None:
            check_resumable(loaded[1], self.state())
        state = loaded and loaded[1]
        # The curve may be too long for the store; the other ranks need only its last row.
        short = state and {**state, "metrics": state["metrics"][-1:]}
        shared = self.group.share(short, source=self.chief)
        state = state or shared
        if state is None:
            if self.container.init_from is not None:
                self.start_from(self.container.init_from)
            return
        if state["step"] > self.config.max_steps:
            raise ConfigError(
                f"the checkpoint is at step {state['step']}, past"
                f" max_steps={self.config.max_steps}; give a larger max_steps"
            )
        live = self.tensors()
        if loaded is not None:
            fill({name: tensor.data for name, tensor in live.items()}, loaded[0])
        self.group.broadcast_([tensor.data for tensor in live.values()])
        self.step, self.metrics = state["step"], state["metrics"]
        self.kept_step = self.step
        self.steps_summed = state["steps_summed"]
        if state.get("scaler"):  # empty in other types; older checkpoints have none
            self.scaler.load_state_dict(state["scaler"])
        ranks = self.group.world_size
        ranks_before = state.get("world_size", ranks)  # older checkpoints have none
        if self.chief:
            self.loss_sum += state["loss_sum"] * (ranks / ranks_before)
        same_script = state.get("script_sha256", self.script_sha256) == self.script_sha256
        if state["best_step"] is not None and same_script:
            self.best_step, self.best_val_loss = state["best_step"], state["best_val_loss"]
        if self.chief:
            log(f"resumed from the checkpoint of step {self.step}")
            if not same_script:  # its best weights would be exported as this model's
                log("note: another script wrote it; tracking the best weights anew")
        if self.chief and ranks != ranks_before:
            log(
                f"note: {counted(ranks_before, 'process')} wrote the checkpoint, and"
                f" {counted(ranks, 'process')} {'continues' if ranks == 1 else 'continue'} it: the"
                " last bits may differ"
            )

    def start_from(self, directory: Path) -> None:
        """Loads the weights of the model in a directory, on every rank."""
        if self.chief:
            load_pretrained(self.model, directory)
            log(f"started from the weights in {directory}")
        self.group.broadcast_([tensor.data for tensor in self.model.state_dict().values()])

    # -- one step ---------------------------------------------------------------------------------

    def forward_backward(self, step: int) -> Tensor:
        """Gradients of the step's batch, averaged over the ranks; returns this rank's mean loss."""
        config, group = self.config, self.group
        x, y = self.batches.rows(step, group.rank, group.world_size)
        length = window_length(step, config)
        x, y = x.reshape(-1, length), y.reshape(-1, length)
        if length not in self.angles:
            self.angles[length] = self.model.angles(length)
        passes = config.passes(group.world_size)
        total = torch.zeros((), device=group.device)
        for index, (xs, ys) in enumerate(zip(x.chunk(passes), y.chunk(passes), strict=True)):
            if config.dropout:
                seed = derive_seed(config.seed, "dropout", step, index, group.rank)
                seed_draws(group.device, seed)
            # Only the last pass has to average gradients over the ranks.
            alone = group.world_size > 1 and index < passes - 1
            with self.ddp.no_sync() if alone else nullcontext():  # type: ignore[operator]
                loss = self.ddp(xs, ys, angles=self.angles[length], end=self.end) / passes
                group.beat()  # what follows waits for the others, in DDP
                self.scaler.scale(loss).backward()
            total += loss.detach()
            if self.timed_from:
                self.log_duration(self.timed_from, step + (index + 1) / passes)
        return total

    def warm_up(self) -> None:
        """Two steps of each length of windows, whose gradients are thrown away.

        DDP lays its buckets out anew after its first step, and the order in which gradients are
        added up follows the layout; after this, a resumed run adds in the same order as one that
        was never interrupted (on CPUs: on GPUs some kernels add in no fixed order). Compilation
        happens here too, outside the measured time.
        """
        steps, block_size = range(self.config.max_steps), self.config.block_size
        found = {
            bisect_left(steps, block_size >> cut, key=lambda step: window_length(step, self.config))
            for cut in range(4)
        }
        first_steps = [step for step in found if step in steps]  # some lengths may never come
        if self.compiled:
            self.compile(sorted(first_steps))
        for step in sorted(2 * first_steps):
            self.forward_backward(step)
            self.optimizer.check_gradients()  # DDP itself reports nothing before its next step
            self.optimizer.zero_grad()

    def compile(self, steps: Sequence[int]) -> None:
        """Compiles for the windows of these steps; if that fails on any rank, all continue eagerly.

        Each rank compiles outside of DDP, in which the others would wait for a rank that fails.

        Raises:
            ConfigError: it fails, and compile=on asks for it.
        """
        ddp, why = self.ddp if isinstance(self.ddp, DistributedDataParallel) else None, ""
        try:
            with ddp.no_sync() if ddp else nullcontext():
                for step in steps:
                    self.forward_backward(step)
        except Exception as error:  # an error that is not the compiler's comes again without it
            first = (str(error).strip() or repr(error)).replace(":\n", ": ").splitlines()[0]
            why = f"torch.compile does not work here ({first})"
            if self.config.compile == "on":
                modules = ("torch._dynamo", "torch._inductor", "triton", "subprocess")
                if not type(error).__module__.startswith(modules):
                    raise
                raise ConfigError(f"{why}; set compile=off") from None
        self.optimizer.zero_grad()
        if self.config.compile == "on" or self.group.every(not why):
            return
        self.compiled = False
        if ddp:
            ddp.module = self.model
        else:
            self.ddp = self.model
        if self.chief:
            log(f"note: not compiled: {why or 'torch.compile does not work on another rank'}")

    # -- the loop ---------------------------------------------------------------------------------

    def fail_on_purpose(self, action: str) -> None:
        if action == "raise":
            raise OSError("NANOGPT_FAULT asked for this error")
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while not self.stop_signal:  # hang
            time.sleep(0.1)

    def run(self) -> bool:
        """Trains to max_steps and writes the artefact; False when a signal ended it before."""
        config, group = self.config, self.group
        began = time.monotonic()
        self.restore()
        if (
            self.ddp is not self.model
        ):  # else there are no buckets to lay out and nothing to compile
            self.warm_up()
        self.saved_at = time.monotonic()
        self.logged_scale = self.scaler.get_scale()
        if self.chief:  # drop the rows after the checkpoint's step, since those steps come again
            self.checkpoints.write_metrics(self.metrics, append=False)
        if self.chief and config.sample_length and self.step == 0:
            self.log_sample("before training", config.sample_length // 3)
        if self.container.init_from is not None and self.step == 0:
            self.log_metrics(True, 0.0, 0.0)  # of the model as it was
        drill = read_drill(os.environ.get("NANOGPT_FAULT")) if self.step == 0 else None
        steps_timed, started = 0, time.perf_counter()
        self.timed_from = (self.step, started) if self.chief else None
        while self.step < config.max_steps:
            now = time.monotonic()
            group.expect(5 * (now - began))  # of the last step, so that long steps have enough time
            began = now
            if drill and drill[:2] == (group.rank, self.step):
                self.fail_on_purpose(drill[2])
            agreement = group.largest_soon(self.wish())
            self.loss_sum += self.forward_backward(self.step)
            scale = learning_rate_scale(self.step, config)
            self.scaler.step(self.optimizer, scale)  # type: ignore[arg-type]
            self.scaler.update()
            self.optimizer.zero_grad()
            self.step += 1
            self.steps_summed += 1
            steps_timed += 1

            wish = agreement()
            group.expect(math.inf)  # of evaluations and checkpoints
            last = self.step == config.max_steps
            evaluates = self.step % config.eval_interval == 0 or last
            if self.step % config.log_interval == 0 or evaluates:
                group.settle()
                self.log_metrics(evaluates, scale, (time.perf_counter() - started) / steps_timed)
                steps_timed, started = 0, time.perf_counter()
            if wish or last:
                group.settle()
                before = time.perf_counter()
                self.save_checkpoint()
                started += time.perf_counter() - before
            if wish == STOP and not last:
                if self.chief:
                    log(f"stopped by a signal; the checkpoint of step {self.step} is written")
                return False
        newest = self.metrics[-1] if self.metrics else {"step": -1}
        if newest["step"] < self.step or "val_loss" not in newest or self.best_step is None:
            # The run was stopped here, between two evaluations, and now ends here; or the best
            # weights were damaged.
            self.log_metrics(True, learning_rate_scale(self.step - 1, config), 0.0)
            self.save_checkpoint()
        if self.chief:
            self.finish()
        return True

    def log_duration(self, start: tuple[int, float], done: float) -> None:
        """After three steps, or a minute, logs the time and the memory of a run that is long."""
        self.group.settle()
        steps, passed = done - start[0], time.perf_counter() - start[1]
        if steps < 3 and passed < LONG_RUN:
            return
        self.timed_from = None
        left = min((self.config.max_steps - done) * passed / steps, 1e13)
        if left > LONG_RUN:
            used, there = (each / 2**30 for each in memory_used(self.group))
            log(
                f"note: {passed / steps:.3g} s a step: about {timedelta(seconds=round(left))} to"
                f" step {self.config.max_steps:,}; memory {used:.1f} of {there:.1f} GiB"
            )

    def log_metrics(self, evaluates: bool, scale: float, seconds_per_step: float) -> None:
        """The metric line of the steps since the last; takes the weights if they are the best."""
        config, group = self.config, self.group
        row: dict[str, Any] = {"step": self.step}
        if self.steps_summed:
            losses = float(group.sum_(self.loss_sum)) / group.world_size
            row["train_loss"] = losses / self.steps_summed
            self.check_finite(row["train_loss"])
        gradient_scale = self.scaler.get_scale()
        if gradient_scale < 1:  # the scale was halved again and again
            raise NonFiniteLossError(self.diverged("the gradients are"))
        if self.chief and gradient_scale < self.logged_scale:
            log(
                "note: steps whose gradients were infinite in float16 are left out; the loss is now"
                f" scaled by {gradient_scale:g}"
            )
        self.logged_scale = gradient_scale
        if evaluates:
            row["val_loss"] = evaluate(self.model, self.corpus.val, config, group, self.end)
            self.check_finite(row["val_loss"])
            row["best_loss"] = min(self.best_val_loss, row["val_loss"])
            row["bits_per_byte"] = row["val_loss"] / math.log(2) / self.bytes_per_token
        row["learning_rate"] = config.learning_rate * scale
        row["time"] = round(time.time(), 3)
        if seconds_per_step:
            row["tokens_per_second"] = config.batch_size * config.block_size / seconds_per_step
        self.metrics.append(row)
        if self.chief:
            left = (config.max_steps - self.step) * seconds_per_step
            log(metric_line(row, config.max_steps, left if seconds_per_step else None))
            self.checkpoints.write_metrics([row], append=True)
        if evaluates and row["val_loss"] < self.best_val_loss:
            self.best_step, self.best_val_loss = self.step, row["val_loss"]
            if self.chief:
                self.unsaved_best = {
                    name: weights.detach().to("cpu", copy=True)
                    for name, weights in self.weights().items()
                }
        self.loss_sum.zero_()
        self.steps_summed = 0

    def wish(self) -> int:
        """What this rank asks for after the step: nothing, a checkpoint, or that and the end.

        All ranks then act on the largest wish. Rank 0 keeps the timer.
        """
        if self.stop_signal:
            return STOP
        passed = time.monotonic() - self.saved_at
        cheap_after = min(self.checkpoint_cost / CHECKPOINT_SHARE, LONGEST_WITHOUT_CHECKPOINT)
        late = passed > (self.config.checkpoint_seconds or max(60.0, cheap_after))
        evaluates = (self.step + 1) % self.config.eval_interval == 0
        due = late or (evaluates and passed >= cheap_after)
        return CHECKPOINT if self.chief and due else NOTHING

    def check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise NonFiniteLossError(self.diverged(f"the loss is {loss},"))

    def diverged(self, what: str) -> str:
        kept = self.kept_step
        where = (
            "there is no checkpoint yet"
            if kept is None
            else f"the checkpoint of step {kept} is kept"
        )
        wider = " or precision=float32" * self.scaler.is_enabled()
        return f"{what} not finite at step {self.step}; {where}; try a smaller learning_rate{wider}"

    def log_sample(self, when: str, length: int) -> None:
        text = sample_text(self.model, self.corpus.tokenizer, length)
        # The bars distinguish a sample from lines of the log.
        log("\n".join([f"--- sample {when} ---", *(f"| {line}" for line in text.split("\n"))]))

    def finish(self) -> None:
        """Writes the artefact of the best validation loss, and logs a sample of it."""
        assert self.best_step is not None
        tensors, _ = self.checkpoints.load("best", self.best_step)
        tokenizer = self.corpus.tokenizer
        best = with_weights(self.config, len(tokenizer), model_tensors(tensors))
        self.model.load_state_dict(best.state_dict())
        training = {
            "script_sha256": self.script_sha256,
            "step": self.best_step,
            "val_loss": self.best_val_loss,
            "metrics": self.metrics[-1],
            "corpus_sha256": self.corpus.sha256,
            "world_size": self.group.world_size,
            "torch_version": torch.__version__,
        }
        model_dir, output_dir = self.container.model_dir, self.container.output_dir
        try:
            why = write_artefact(model_dir, best, tokenizer, training)
            output_dir.mkdir(parents=True, exist_ok=True)
            curve = self.checkpoints.path("metrics", self.checkpoints.start)
            shutil.copy(curve, output_dir / "metrics.jsonl")
        except OSError as error:
            raise CheckpointError(
                f"cannot write {error.filename or model_dir}: {error.strerror};"
                f" the checkpoint of step {self.kept_step} is kept"
            ) from None
        if self.config.sample_length:
            self.log_sample("after training", self.config.sample_length)
        self.log_result()
        if why:
            log(f"note: the model is not Qwen3's, so only this script can run it: {why}")
        log(f"model written to {model_dir}")

    def log_result(self) -> None:
        """Logs the loss of the exported model, with a note if it is surprising."""
        assert self.best_step is not None
        log(f"best val_loss {self.best_val_loss:.5f} at step {self.best_step}")
        if self.best_step < self.step:
            log(
                f"note: the model is that of step {self.best_step}; no later evaluation had a lower"
                " val_loss"
            )
        guessing = math.log(len(self.corpus.tokenizer))
        if self.best_val_loss > 0.99 * guessing:
            learnt = self.metrics[-1].get("train_loss", math.inf) < 0.9 * guessing
            remedy = (
                "the training text does not predict the validation text; add more text"
                if learnt
                else "try another learning_rate or more steps"
            )
            log(f"note: guessing gives a loss of {guessing:.5f}; {remedy}")


# ------------------------------------------------------------------------------------------------
# Choices by device: where to compute, in how many processes and threads, in which precision,
# compiled or not, with which operations, where to keep the text, and what the ranks share. A run
# logs its choices; device, precision, compile, --processes and OMP_NUM_THREADS override them.


def choose_device(config: Config, container: Container, processes: int) -> str:
    """The kind of device: 'cuda' (also for ROCm), 'mps' or 'cpu'. It never falls back silently.

    Raises:
        TopologyError: the chosen device, or the GPUs that SageMaker counted, are not available.
    """
    if config.device == "cpu":  # without a look at CUDA, which a process must not ask and then fork
        return "cpu"
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if container.num_gpus and seen != container.num_gpus:
        raise TopologyError(
            f"the host has {counted(container.num_gpus, 'GPU')} but torch {torch.__version__} sees"
            f" {seen}; use a container image for GPUs with a CUDA that the host's driver supports,"
            " or set device=cpu"
        )
    if config.device == "cuda" and not seen:
        raise TopologyError(
            f"device=cuda, but torch {torch.__version__} sees no GPU; device=auto runs without one"
        )
    if seen and config.device != "mps":
        return "cuda"
    mps = torch.backends.mps.is_available()
    if config.device == "mps" and not mps:
        raise TopologyError(
            f"device=mps, but torch {torch.__version__} sees none; device=auto runs without it"
        )
    if config.device == "mps" and processes > 1:
        raise TopologyError(f"device=mps is one device; {processes} processes cannot share it")
    return "mps" if mps and processes == 1 else "cpu"


def check_kernels(device: torch.device) -> None:
    """Raises TopologyError where this build of torch has no kernels for the GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    known = re.findall(r"(sm|compute)_(\d+)", " ".join(torch.cuda.get_arch_list()))
    fitting = (
        int(number) <= 10 * major + minor and (kind == "compute" or int(number) // 10 == major)
        for kind, number in known  # compute is compiled for the GPU when it is used
    )
    if known and not any(fitting):
        raise TopologyError(
            f"torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)}"
            f" (sm_{major}{minor}), only {', '.join(torch.cuda.get_arch_list())}; use another"
            " image or another GPU"
        )


def rank_device(config: Config, container: Container, ranks: Ranks) -> torch.device:
    """The device of this rank: on GPUs, one for each rank.

    Raises:
        TopologyError: there is no such device, or not one process for each GPU.
    """
    kind = choose_device(config, container, ranks.world_size)
    if kind != "cuda":
        return torch.device(kind)
    gpus = torch.cuda.device_count()
    if ranks.local_world_size != gpus:
        raise TopologyError(
            f"this host has {counted(gpus, 'GPU')}, and {ranks.launcher} started"
            f" {counted(ranks.local_world_size, 'process')} on it; each GPU takes one"
        )
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    check_kernels(device)
    return device


def local_processes(config: Config, container: Container, options: Options) -> int:
    """How many processes this host runs: one per GPU; on a CPU as many as asked for, or one."""
    device = choose_device(config, container, options.processes or 1)
    if device == "cpu":
        return options.processes or options.processes_before or 1
    if device == "mps":
        return 1
    gpus = torch.cuda.device_count()
    if options.processes not in (0, gpus):
        raise TopologyError(
            f"processes={options.processes}, but the host has {counted(gpus, 'GPU')} and each takes"
            " one process; CUDA_VISIBLE_DEVICES chooses among them"
        )
    return gpus


def available_cores() -> int:
    """Cores that this process may use; two hardware threads of one core count once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return len(cores)


def keep_freed_memory() -> None:
    """Makes glibc keep the memory of freed tensors for the next ones.

    By default, glibc returns large blocks to the system, which clears each page again. In some
    runs that took a fifth of a step.
    """
    trim_threshold, mmap_max = -1, -4  # of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(trim_threshold, -1)  # never: taken as the largest size there is
        mallopt(mmap_max, 0)  # no separate mapping for a block, which would end with it


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for products of bfloat16."""
    if device.type == "cpu":
        tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, test, lambda: False)() for test in tests)
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def choose_precision(config: Config, device: torch.device) -> torch.dtype:
    """The type that this rank prefers to compute in, before all agree; TF32 counts as float32.

    Raises:
        ConfigError: TF32 was chosen, and the device has none.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if config.precision == "tf32" and capability < (8, 0):
        raise ConfigError(
            "precision='tf32' needs a GPU of NVIDIA's Ampere or later; auto takes the fastest that"
            " this device has"
        )
    if config.precision != "auto":
        known = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        return known.get(config.precision, torch.float32)
    if has_fast_bfloat16(device):
        return torch.bfloat16
    # The tensor cores of Volta (V100) and Turing (T4) support only float16.
    return torch.float16 if capability >= (7, 0) else torch.float32


def agreed_precision(config: Config, group: Group) -> torch.dtype:
    """The type that all ranks compute in: hosts may differ, and gradients travel in one type."""
    dtype = choose_precision(config, group.device)
    shorts = (torch.bfloat16, torch.float16)
    chosen = torch.tensor([float(dtype == short) for short in shorts], device=group.device)
    return dtype if group.world_size in group.sum_(chosen) else torch.float32


def compiling_pays(model: nn.Module, config: Config, device: torch.device, world_size: int) -> bool:
    """Whether compiling is worth its minute. It needs a GPU that Triton supports (Volta or later).

    The bound is on each rank's arithmetic, 6 operations per parameter and token
    (arXiv:2001.08361, section 2.1): a minute of it at 50 TFLOP/s, of the 70 that an A10G has, for
    each length of windows.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (7, 0):
        return False
    parameters = sum(p.numel() for p in model.parameters())
    tokens = config.max_steps * config.batch_size * config.block_size
    lengths = 4 if config.short_windows else 1
    return 6 * parameters * tokens / world_size > 3e15 * lengths


def can_compile() -> bool:
    """Whether Triton and the compiler for its host code are here."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return bool(find_spec("triton") and compiler and header.is_file())


def plain_operations(device: torch.device) -> bool:
    """Whether dropout uses a few plain operations instead of torch's own function.

    On a CPU torch's takes several times as long, unless a compiler fuses them.
    """
    return device.type == "cpu" and not torch.compiler.is_compiling()


# Whether torch has a kernel for norms on CUDA: 2.8 has none.
FUSED_NORM = hasattr(torch.ops.aten, "_fused_rms_norm_backward")


def plain_norms(device: torch.device) -> bool:
    """Whether norms use plain operations: on a CPU, and on a GPU without a kernel.

    Without a kernel, torch runs 20 operations for a norm and its gradient. Ours are 11 and move a
    fifth of the bytes; norms moved half of the bytes of a `baby` step.
    """
    chain = device.type == "cuda" and not FUSED_NORM and not torch.compiler.is_compiling()
    return chain or plain_operations(device)


def plain_attention(q: Tensor, dropout: float) -> bool:
    """Whether attention in training uses plain batched products instead of torch's kernel.

    On a CPU, torch's kernel draws dropout number by number, and in bf16 its backward takes
    several times as long as two products.
    """
    costly = bool(dropout) or q.dtype == torch.bfloat16
    return q.device.type == "cpu" and torch.is_grad_enabled() and costly


def near_device(tokens: Tensor | Shards, device: torch.device) -> Tensor | Shards:
    """The tokens, moved to the GPU if they take less than a tenth of its free memory.

    Batches are then cut there, without the host.
    """
    if device.type == "cuda" and tokens.nbytes < torch.cuda.mem_get_info(device)[0] / 10:
        return tokens.to(device)
    return tokens


SHARED_FROM = 1 << 22  # parameters


def sharing_pays(stacks: Sequence[Tensor]) -> bool:
    """Whether it is faster to send orthogonalized matrices than to compute them on every rank.

    On CPUs that was measured. On GPUs it is arithmetic: of each number two bytes are sent, and some
    15 operations for each column of its matrix are saved. An A10G breaks even at about as many
    columns over PCIe; NVLink would do with fewer, a network between hosts takes more.
    """
    if stacks[0].device.type == "cuda":
        return max(stack.size(2) for stack in stacks) >= 768
    return sum(stack.numel() for stack in stacks) >= SHARED_FROM


# ------------------------------------------------------------------------------------------------
# Text: characters, or the tokens that `upload-data --tokenizer` made, as ids in a memory map

CHUNK_BYTES = 1 << 18  # small, so that the results for a chunk stay in the cache
CODE_POINTS = 0x110000


MOST_IDS = 1 << 20


class Tokenizer:
    """A tokenizer.json (huggingface.co/docs/tokenizers) of characters, or of BPE over bytes.

    words holds the bytes of each id. end_of_text is the token that ends a document, and `end` its
    id; text of characters has neither.

    Raises:
        DataError: it is of another kind.
    """

    def __init__(self, document: Mapping[str, Any], end_of_text: str | None = None) -> None:
        self.document, self.end_of_text = document, end_of_text
        try:
            model, added = document["model"], document["added_tokens"]
            kind, vocab = model["type"], model["vocab"]
            if kind not in ("WordLevel", "BPE"):
                raise DataError(f"tokenizer.json is of {kind}, and must be of BPE over bytes")
            if kind == "WordLevel" and sorted(vocab.values()) != [*range(len(vocab))]:
                raise DataError("tokenizer.json lacks an id, or has one twice")
            byte = byte_characters()
            words = {
                id: word.encode() if kind == "WordLevel" else bytes(byte[c] for c in word)
                for word, id in vocab.items()
                if kind == "WordLevel" or all(c in byte for c in word)
            }
            special = {token["id"]: token["content"] for token in added if token["special"]}
            words |= {t["id"]: t["content"].encode() for t in added if not t["special"]}
            size = max([*words, *special]) + 1
            if size > MOST_IDS:
                raise DataError(f"tokenizer.json has ids up to {size}")
            self.words = [b"" if id in special else words.get(id, b"") for id in range(size)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"tokenizer.json cannot be read: {error!r}") from None
        ends = [id for id, content in special.items() if content == end_of_text]
        if end_of_text is not None and not ends:
            raise DataError(f"tokenizer.json has no special token {end_of_text!r}")
        self.end = ends[0] if ends else None
        first = self.words.index(b"\n") if b"\n" in self.words else 0
        self.start = first if self.end is None else self.end

    def __len__(self) -> int:
        return len(self.words)

    @property
    def unit(self) -> str:
        return "characters" if self.document["model"]["type"] == "WordLevel" else "tokens"

    def word(self, id: int) -> bytes:
        """The bytes of an id; b"" for a row beyond the vocabulary, as published models have."""
        return self.words[id] if id < len(self.words) else b""

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.word, ids)).decode(errors="replace")


def byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level BPE stands for, as in GPT-2's encoder.py.

    Printable bytes stand for themselves; the others, in order, have characters from 256.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


class Shards:
    """Ids in files of equal length (but the last), mapped into memory; one sequence, as a tensor.

    They are of int16, which may stand for uint16, or int32.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts, self.each, self.device = parts, len(parts[0]), parts[0].device
        self.nbytes = sum(part.nbytes for part in parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, places: Tensor) -> Tensor:
        found = torch.empty_like(places, dtype=self.parts[0].dtype)
        part = places // self.each
        for index in part.unique().tolist():
            here = part == index
            found[here] = self.parts[index][places[here] - index * self.each]
        return found

    def to(self, device: torch.device) -> Tensor:
        return torch.cat([part.to(device) for part in self.parts])


@dataclass(frozen=True)
class Corpus:
    """The text as ids: train and val are 1-D, of the smallest type that holds the vocabulary."""

    tokenizer: Tokenizer
    train: Tensor | Shards
    val: Tensor | Shards
    sha256: str


def plain_name(name: Any) -> str:
    """The name of a file; raises ValueError if it may lie in another directory."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"{name!r} is no plain name of a file")
    return name


def text_files(path: Path) -> list[Path]:
    """The file itself, or the *.txt files below a directory, sorted by path.

    Raises:
        DataError: nothing is there.
    """
    if path.is_file():
        return [path]
    files = sorted(p for p in path.rglob("*.txt") if p.is_file())
    if not files:
        there = "no *.txt file in it" if path.is_dir() else "no such file or directory"
        raise DataError(f"{path}: {there}")
    return files


def code_points(files: Sequence[Path], digest: Any) -> Iterator[Tensor]:
    """The text in chunks of bounded size, as int32 [n]; updates the digest with the files.

    Raises:
        DataError: a file is not UTF-8.
    """
    for path in files:
        decoder = codecs.getincrementaldecoder("utf-8")()
        offset = 0
        with path.open("rb") as file:
            while data := file.read(CHUNK_BYTES):
                digest.update(data)
                pending = decoder.getstate()[0]
                if not pending and data.isascii():
                    yield torch.frombuffer(bytearray(data), dtype=torch.uint8).int()
                else:
                    yield decoded(decoder, data, path, offset - len(pending))
                offset += len(data)
        decoded(decoder, b"", path, offset - len(decoder.getstate()[0]))
        digest.update(offset.to_bytes(8, "little"))  # the ends of files count too


def decoded(decoder: Any, data: bytes, path: Path, offset: int) -> Tensor:
    """The code points of the next bytes, or of the last if there are none: int32 [n]."""
    try:
        text = decoder.decode(data, final=not data)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {offset + error.start})") from None
    codes = bytearray(text.encode("utf-32-le"))
    return (
        torch.frombuffer(codes, dtype=torch.int32) if codes else torch.empty(0, dtype=torch.int32)
    )


def mapped(path: Path, dtype: torch.dtype, warn: Callable[[str], object]) -> Tensor:
    """The ids in a file, read from it as they are used."""
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the memory cannot be written
        try:  # private, since a FUSE mount, as FastFile's, may refuse shared maps
            memory = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
        except OSError as error:
            warn(
                f"note: {path.parent} cannot be mapped ({error.strerror}), so each process reads"
                " all of it into memory; --input-mode File needs less"
            )
            return torch.frombuffer(bytearray(file.read()), dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype)


def id_dtype(count: int) -> torch.dtype:
    """The smallest type that holds so many ids."""
    if count <= 1 << 8:
        return torch.uint8
    return torch.int16 if count <= 1 << 15 else torch.int32


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, shared, readable and writable."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]  # which has to live as long
    return memoryview(array).cast("B")


ENCODE_AGAIN = "encode the text by its tokenizer, with upload-data --tokenizer"


def load_corpus(container: Container, config: Config, group: Group) -> Corpus:
    """The tokens in the channel, or else its text by characters.

    Raises:
        DataError: text is missing, unreadable, not UTF-8, too short, or not the same on every
            host; or there is no room for its ids.
    """
    if container.training is None:
        raise DataError("no text: name it with --data FILE")
    start = read_tokenizer(container.init_from) if container.init_from else None
    tokens = (container.training / "meta.json").exists()
    same = tokens == group.share(tokens, source=group.rank == 0)
    if same:
        if start is not None and start.unit == "tokens" and not tokens:
            raise DataError(f"the model to start from takes tokens; {ENCODE_AGAIN}")
        if tokens:
            corpus = read_tokens(container, functools.cache(log if group.rank == 0 else str))
        else:
            corpus = read_text(container, config, group, start)
        if start is not None and corpus.tokenizer.words != start.words:
            raise DataError(f"the tokens are not those of the model to start from; {ENCODE_AGAIN}")
        same = corpus.sha256 == group.share(corpus.sha256, source=group.rank == 0)
    if not same:
        named = len(container.hosts) > 1
        mine = f"host {container.current_host}" if named else f"the host of rank {group.rank}"
        raise DataError(
            f"{mine} has other text than {container.hosts[0] if named else 'that of rank 0'};"
            " every host needs all of it (on SageMaker: S3DataDistributionType FullyReplicated)"
        )
    if config.mask_documents and corpus.tokenizer.end is None:
        raise DataError("mask_documents needs tokens, whose documents have an end; leave it out")
    if 0 < config.vocab_size < len(corpus.tokenizer):
        raise DataError(
            f"vocab_size={config.vocab_size}: the text has {len(corpus.tokenizer)} different"
            f" {corpus.tokenizer.unit}"
        )
    for name, part in (("training", corpus.train), ("validation", corpus.val)):
        if len(part) < config.block_size + 1:
            raise DataError(
                f"the {name} part has {len(part)} {corpus.tokenizer.unit}, and one window of"
                f" block_size={config.block_size} needs {config.block_size + 1};"
                " add more text, or set a smaller block_size"
            )
    return corpus


def largest_id(shard: Tensor) -> int:
    """The largest id, without a sign; 0 of a large shard, which a host may read over a network."""
    if shard.nbytes > 1 << 26:
        return 0
    sign = 1 << (8 * shard.itemsize - 1)
    return int((shard ^ -sign).max()) + sign


def read_tokens(container: Container, warn: Callable[[str], object]) -> Corpus:
    """Maps the shards that `upload-data --tokenizer` wrote; meta.json describes them."""
    directory = container.training
    assert directory is not None
    if container.validation is not None:
        raise DataError("the tokens hold their own validation part; leave out the other channel")
    try:
        content = (directory / "meta.json").read_bytes()
        meta = json.loads(content)
        tokenizer = Tokenizer(
            json.loads((directory / "tokenizer.json").read_bytes()), meta["end_of_text"]
        )
        dtype = {"uint16": torch.int16, "uint32": torch.int32}[meta["dtype"]]
        parts = []
        for name in ("train", "val"):
            shards = []
            for shard in meta[name]["shards"]:
                path, size = directory / plain_name(shard["name"]), shard["tokens"]
                if path.stat().st_size != size * dtype.itemsize:
                    raise DataError(f"{path} is damaged: its size is not that in meta.json")
                shards.append(mapped(path, dtype, warn))
                if not len(shards[-1]) <= len(shards[0]) == len(shards[max(0, len(shards) - 2)]):
                    raise DataError(f"{path}: only the last shard may be shorter than the others")
                if (found := largest_id(shards[-1])) >= len(tokenizer):
                    raise DataError(
                        f"{path} has the id {found}, and the tokenizer only {len(tokenizer)} tokens"
                    )
            parts.append(Shards(shards))
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{directory / 'meta.json'} cannot be read: {error!r}") from None
    return Corpus(tokenizer, parts[0], parts[1], hashlib.sha256(content).hexdigest())


def read_text(
    container: Container, config: Config, group: Group, start: Tokenizer | None
) -> Corpus:
    """Tokenizes the text once per host into a file that the host's ranks map into memory.

    Its characters are those of `start`, the tokenizer of the model to start from, or else its own.

    Without a validation channel, the last part of the text is kept for validation, as in
    nanoGPT's data/shakespeare_char/prepare.py.
    """
    first = group.local_rank == 0
    directory, described = None, {}
    try:
        if first:
            try:
                directory = tempfile.mkdtemp(prefix="sm-nanogpt-")
                known = [] if start is None else [ord(word.decode()) for word in start.words]
                described = tokenize(container, Path(directory), known)
            except OSError as error:
                place = f"{tempfile.gettempdir()} (TMPDIR names another)"
                raise DataError(f"{error.filename or place}: {error.strerror}") from None
        described = group.share(described, source=first, within=f"host{group.host_index}")
        vocabulary = described["vocabulary"]
        ids = id_dtype(len(vocabulary))
        parts = [mapped(Path(path), ids, log) for path in described["parts"]]
        group.barrier()
    finally:
        # A mapped file lives until the last process that maps it ends, even by SIGKILL.
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
    if len(parts) == 1:
        n_train = int(len(parts[0]) * (1 - config.validation_fraction))
        parts = [parts[0][:n_train], parts[0][n_train:]]
    tokenizer = Tokenizer(character_tokenizer(vocabulary))
    return Corpus(tokenizer, parts[0], parts[1], described["sha256"])


def tokenize(container: Container, directory: Path, start: Sequence[int] = ()) -> dict[str, Any]:
    """Writes the ids of each channel into the directory; returns what the ranks need of them.

    start holds the allowed code points, by id; if empty, those of the text.

    One pass finds the vocabulary, a second one writes the ids.
    """
    channels = [c for c in (container.training, container.validation) if c is not None]
    sha256, seen = hashlib.sha256(), torch.zeros(CODE_POINTS, dtype=torch.bool)
    for channel in channels:
        digest, size = hashlib.sha256(), 0
        for codes in code_points(text_files(channel), digest):
            if not seen.index_select(0, codes).all():  # cheaper than marking all of them
                seen[codes.long()] = True
            size += len(codes)
        if not size:
            raise DataError(f"{channel}: no text in it")
        sha256.update(digest.hexdigest().encode())
    known = torch.tensor(start) if start else seen.nonzero().flatten()
    seen[known] = False
    if unknown := seen.nonzero().flatten().tolist():
        raise DataError(
            f"the text has {counted(len(unknown), 'character')} that the model to start from does"
            f" not know: {', '.join(repr(chr(code)) for code in unknown[:20])}"
        )
    ids = torch.zeros(CODE_POINTS, dtype=id_dtype(len(known)))
    ids[known] = torch.arange(len(known)).to(ids)
    parts = []
    for index, channel in enumerate(channels):
        path = directory / f"{index}.ids"
        with path.open("wb") as file:
            for codes in code_points(text_files(channel), hashlib.sha256()):
                file.write(raw_bytes(ids.index_select(0, codes)))
        parts.append(str(path))
    vocabulary = "".join(map(chr, known.tolist()))
    return {"vocabulary": vocabulary, "parts": parts, "sha256": sha256.hexdigest()}


# ------------------------------------------------------------------------------------------------
# safetensors files (huggingface.co/docs/safetensors): a length, a JSON header, raw tensors

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes the file whole or not at all: under another name first, flushed to disk, renamed.

    A SHA-256 over header and tensors goes into the metadata.
    """
    header: dict[str, Any] = {}
    offset = 0
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for name, tensor in contents.items():
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    digest = content_digest(header, metadata)
    for tensor in contents.values():
        digest.update(raw_bytes(tensor))
    header["__metadata__"] = {**metadata, "sha256": digest.hexdigest()}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in contents.values():
            file.write(raw_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())


def content_digest(header: Mapping[str, Any], metadata: Mapping[str, str]) -> Any:
    return hashlib.sha256(json.dumps([header, metadata], sort_keys=True).encode())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that is renamed to `path`, for good, when the body succeeds.

    SageMaker uploads all new files in /opt/ml/checkpoints but those with this suffix.
    """
    temporary = path.with_name(f"{path.name}.sagemaker-ignore")
    try:
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


# Bytes. That of a checkpoint holds the curve, so it may exceed the safetensors library's 100 MB.
LARGEST_HEADER = 1_000_000_000


def read_safetensors_header(
    path: Path, largest: int = LARGEST_HEADER
) -> tuple[dict[str, Any], dict[str, str], int]:
    """The tensors' descriptions, the metadata, and where the data begin.

    largest is the size in bytes that the header may have.

    Raises:
        FormatError: the file is not safetensors, or shorter or longer than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise FormatError(f"{path.name} is damaged: it is shorter than its header says")
        if length > largest:
            raise FormatError(f"{path.name} is refused: its header has {length:,} bytes")
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            header = dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))
            end = 0
            for name, entry in header.items():
                first, last = entry["data_offsets"]
                shape, dtype = entry["shape"], DTYPES[entry["dtype"]]
                whole = all(type(n) is int and n >= 0 for n in (*shape, first, last))
                torch.empty(shape, dtype=dtype, device="meta")  # fails if torch cannot have it
                if not whole or first != end or last - first != math.prod(shape) * dtype.itemsize:
                    raise FormatError(f"{path.name} is damaged: bad size of {name!r}")
                end = last
            if not all(isinstance(word, str) for word in metadata.values()):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError):
            raise FormatError(f"{path.name} is damaged: its header cannot be read") from None
    if size != 8 + length + end:
        raise FormatError(
            f"{path.name} is damaged: {size} bytes, where its header says {8 + length + end}"
        )
    return header, metadata, 8 + length


def read_safetensors(
    path: Path, keep: bool = True, sealed: bool = False, largest: int = LARGEST_HEADER
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors (CPU) and the metadata; a SHA-256 in the metadata is checked.

    Without `keep`, the tensors are read only for this check, one at a time.

    Raises:
        FormatError: the file is damaged, or has no SHA-256 although it is `sealed` by one.
        OSError: it cannot be read.
    """
    header, metadata, start = read_safetensors_header(path, largest)
    sha256 = metadata.pop("sha256", None)
    if sealed and sha256 is None:
        raise FormatError(f"{path.name} is damaged: it has no SHA-256")
    digest = content_digest(header, metadata)
    tensors = {}
    with path.open("rb") as file:
        file.seek(start)
        for name, entry in header.items():
            tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
            if file.readinto(raw_bytes(tensor)) != tensor.nbytes:
                raise FormatError(f"{path.name} is damaged: it ends early")
            digest.update(raw_bytes(tensor))
            if keep:
                tensors[name] = tensor
    if sha256 is not None and digest.hexdigest() != sha256:
        raise FormatError(f"{path.name} is damaged: its SHA-256 does not match")
    return tensors, metadata


# ------------------------------------------------------------------------------------------------
# Checkpoints


class Checkpoints:
    """The checkpoints of one run in one directory.

    checkpoint-STEP holds weights, optimizer state and, as JSON, everything else that a resumed run
    needs, including its metrics; best-STEP holds the weights with the lowest validation loss. The
    last two checkpoints are kept, with the best weights that they refer to, so a damaged newest one
    is replaced by the one before.

    metrics-START holds the whole curve as the start of that number knows it; the newest counts.
    SageMaker copies the directory to each host at each start, and may upload what another host got
    over what rank 0 wrote since.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.start = 0  # the number of this start, once its curve has begun
        self.passed_over: dict[int, str] = {}  # steps of damaged checkpoints, and what is wrong

    def claim(self) -> None:
        """Locks the directory against other runs on this machine while this process lives.

        Raises:
            ConfigError: another run uses it.
            CheckpointError: it cannot be made.
        """
        with self.writing(self.directory):
            self.claimed = os.open(self.directory, os.O_RDONLY)
            try:
                fcntl.flock(self.claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another run uses {self.directory.parent}; wait until it ends and"
                    " resume it, or choose another directory"
                ) from None
            except OSError as error:  # some file systems have no locks
                log(
                    f"note: {self.directory} cannot be locked ({error.strerror}); do not start a"
                    " second run there"
                )

    def check_fresh(self) -> None:
        """Raises ConfigError if there is a checkpoint."""
        if self.steps("checkpoint"):
            raise ConfigError(
                f"{self.directory.parent} already holds a run; resume it with --resume, or"
                " choose another --out"
            )

    def path(self, kind: str, step: int) -> Path:
        suffix = "jsonl" if kind == "metrics" else "safetensors"
        return self.directory / f"{kind}-{step:08d}.{suffix}"

    def steps(self, kind: str) -> list[int]:
        """The steps of the files of a kind, newest first; of metrics, the starts."""
        names = self.directory.glob(f"{kind}-*{self.path(kind, 0).suffix}")
        stems = (path.stem.removeprefix(f"{kind}-") for path in names)
        return sorted((int(stem) for stem in stems if stem.isdecimal()), reverse=True)

    @contextmanager
    def writing(self, path: Path) -> Iterator[Path]:
        """Makes the directory for a file; raises CheckpointError where it cannot be written."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            yield path
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from None

    def save(self, kind: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Writes a checkpoint and then drops the files that no kept checkpoint needs.

        Raises:
            CheckpointError: it cannot be written; the earlier ones are untouched.
        """
        with self.writing(self.path(kind, state["step"])) as path:
            write_safetensors(path, tensors, {"format": "pt", "state": json.dumps(state)})
            if kind == "checkpoint":
                self.passed_over.pop(state["step"], None)
                self.prune(state["step"])

    def write_metrics(self, rows: Sequence[Mapping[str, Any]], append: bool) -> None:
        """Adds rows to the curve of this start, or begins it. Raises CheckpointError."""
        if not append:
            self.start = max(self.steps("metrics"), default=0) + 1
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        with self.writing(self.path("metrics", self.start)) as path:
            if append:
                with path.open("a") as file:
                    file.write(lines)
            else:
                with replacing(path) as temporary:
                    temporary.write_text(lines)

    def prune(self, newest: int) -> None:
        """Deletes all but the last two intact checkpoints up to `newest`, and what neither needs.

        Later ones are damaged: the run resumed from an earlier one.
        """
        whole = [step for step in self.steps("checkpoint") if step not in self.passed_over]
        kept = [step for step in whole if step <= newest][:2]
        best = [self.state_of(step).get("best_step") for step in kept]
        needed: dict[str, list[Any]] = {"checkpoint": kept, "best": best, "metrics": [self.start]}
        unneeded = [
            self.path(kind, step)
            for kind in needed
            for step in self.steps(kind)
            if step not in needed[kind]
        ]
        for path in (*unneeded, *self.directory.glob("*.sagemaker-ignore")):
            # If a file goes while SageMaker uploads it, the job may fail; a later call deletes it.
            uploading = path.with_name(f"{path.name}.sagemaker-uploading")
            if not uploading.exists() or uploading.with_suffix(".sagemaker-uploaded").exists():
                path.unlink()

    def state_of(self, step: int) -> dict[str, Any]:
        """The state that a checkpoint holds, without its tensors; {} if it cannot be read."""
        try:
            metadata = read_safetensors_header(self.path("checkpoint", step))[1]
            state = json.loads(metadata["state"])
        except (FormatError, OSError, KeyError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def latest_state(self) -> dict[str, Any]:
        """The state that load_latest gives, unlogged. Raises CheckpointError if none exists."""
        loaded = self.load_latest(keep=False, warn=lambda line: None)
        if loaded is None:
            raise CheckpointError(f"there is no checkpoint to resume from in {self.directory}")
        return loaded[1]

    def load(
        self, kind: str, step: int, keep: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors (none without `keep`) and the state of a file whose SHA-256 is right.

        Raises:
            FormatError, OSError: it is damaged or missing.
        """
        tensors, metadata = read_safetensors(self.path(kind, step), keep, sealed=True)
        try:
            state = json.loads(metadata["state"])
            if state["step"] != step:
                raise ValueError
        except (KeyError, ValueError, TypeError):
            name = self.path(kind, step).name
            raise FormatError(f"{name} is not a checkpoint of this script") from None
        return tensors, state

    def load_latest(
        self, keep: bool = True, warn: Callable[[str], None] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest intact checkpoint whose best weights are intact; None if no checkpoint exists.

        If no best weights are intact: the newest intact checkpoint, without a best so far.

        Raises:
            CheckpointError: all checkpoints are damaged.
        """
        warn = warn or log
        self.passed_over = {}
        found = fallback = None
        for step in self.steps("checkpoint"):
            loaded = None
            try:
                loaded = self.load("checkpoint", step, keep)
                if (best_step := loaded[1]["best_step"]) is not None:
                    self.load("best", best_step, keep=False)
                found = loaded
                break
            except (FormatError, OSError) as error:
                self.passed_over[step] = str(error)
                fallback = fallback or loaded
        if found is None and fallback is not None:
            tensors, state = fallback
            why = self.passed_over.pop(state["step"])
            warn(f"note: {why}; tracking the best weights anew from step {state['step']}")
            found = tensors, {**state, "best_step": None, "best_val_loss": None}
        if found is None and self.passed_over:
            why = next(iter(self.passed_over.values()))
            raise CheckpointError(f"every checkpoint in {self.directory} is damaged: {why}")
        for step, why in self.passed_over.items():
            warn(f"checkpoint of step {step} is skipped: {why}")
        return found


def check_resumable(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ConfigError, which names the difference, unless `now` may continue from `saved`."""
    differences = []
    for f in dataclasses.fields(Config):
        # A hyperparameter that is newer than the checkpoint was its default.
        was, value = saved["config"].get(f.name, f.default), now["config"][f.name]
        if f.metadata["fixed"] and was != value:
            differences.append(f"{f.name} was {was!r} and is {value!r}")
    if saved["corpus_sha256"] != now["corpus_sha256"]:
        differences.append("the text is not the same")
    if differences:
        raise ConfigError(
            "the checkpoint belongs to another run: "
            + "; ".join(differences)
            + ". Start without it, or use its values"
        )


# ------------------------------------------------------------------------------------------------
# The container: where things are, and which hosts there are


@dataclass(frozen=True)
class Container:
    """A host's name, the other hosts, and its directories, as SageMaker sets them.

    Outside of a container (`inside` is False) the directories come from Options.
    """

    inside: bool
    hosts: tuple[str, ...]
    current_host: str
    num_gpus: int | None  # as SageMaker counts them; None if it gives no number
    interface: str | None  # network interface between the hosts
    training: Path | None
    validation: Path | None
    model_dir: Path
    output_dir: Path
    checkpoint_dir: Path
    init_from: Path | None = None  # the model to start from

    @property
    def host_index(self) -> int:
        return self.hosts.index(self.current_host)


def host_names(value: Any) -> list[str]:
    """The value, if it is a list of names; else none."""
    whole = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return value if whole else []


def read_hosts(env: Mapping[str, str], config_file: Path) -> tuple[list[str], str, str | None]:
    """The job's hosts, which of them this one is, and the network interface between them.

    On hosts after the first, mpirun carries SM_* through /etc/environment, which cuts some of
    them, so a value that cannot be read is looked up in the file that every host has.

    Raises:
        TopologyError: the hosts are not known, or this one is not among them.
    """
    try:
        resources = json.loads(config_file.read_text())
        hosts_there = host_names(resources["hosts"])
    except (OSError, ValueError, KeyError, TypeError):
        resources, hosts_there = {}, []
    try:
        hosts = host_names(json.loads(env["SM_HOSTS"])) or hosts_there
    except (KeyError, ValueError):
        hosts = hosts_there
    current_host = env.get("SM_CURRENT_HOST")
    if current_host not in hosts:
        current_host = resources.get("current_host")
    if current_host is None or current_host not in hosts:
        raise TopologyError(
            f"cannot tell the hosts of this job: SM_HOSTS={env.get('SM_HOSTS')!r},"
            f" SM_CURRENT_HOST={env.get('SM_CURRENT_HOST')!r}, and {config_file}"
            f" {'does not settle it' if config_file.exists() else 'is missing'}"
        )
    return hosts, current_host, resources.get("network_interface_name")


def read_channels(env: Mapping[str, str], channels: Path) -> tuple[Path, Path | None, Path | None]:
    """The directories of the text, and of the text for validation and the model to start from.

    Raises:
        DataError: the `training` channel is missing, or a channel is no directory.
    """

    def channel(name: str) -> Path | None:
        variable = f"SM_CHANNEL_{name.upper()}"
        path = Path(env.get(variable) or channels / name)
        if env.get(variable) and not path.is_dir():
            raise DataError(f"{variable}={path}: no such directory")
        return path if path.is_dir() else None

    training = channel("training")
    if training is None:
        there = sorted(p.name for p in channels.iterdir()) if channels.is_dir() else []
        raise DataError(
            f"the channel 'training' is missing; the job's channels: {', '.join(there) or 'none'}"
        )
    return training, channel("validation"), channel("model")


def read_container(env: Mapping[str, str], options: Options) -> Container:
    """Reads SM_* variables and resourceconfig.json, or outside of a container the options.

    SAGEMAKER_BASE_DIR moves /opt/ml, as in the SageMaker toolkit.

    Raises:
        TopologyError, DataError: as read_hosts and read_channels.
        ConfigError: an option that names a path, in a container.
    """
    base = Path(env.get("SAGEMAKER_BASE_DIR") or "/opt/ml")
    config_file = base / "input/config/resourceconfig.json"
    by_hand = options.data or options.resume
    inside = any(name in env for name in ("SM_HOSTS", "SM_CURRENT_HOST", "SM_MODEL_DIR"))
    inside = inside or (config_file.exists() and not by_hand)
    for name in ("data", "resume", "out", "validation", "init_from"):
        if inside and getattr(options, name):
            raise ConfigError(f"--{name}: in a container SageMaker sets the paths; leave it out")
    if not inside:
        new = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"  # two may start in one second
        out = Path(options.resume or options.out or new)
        return Container(
            inside=False,
            hosts=("localhost",),
            current_host="localhost",
            num_gpus=None,
            interface=None,
            training=Path(options.data).absolute() if options.data else None,
            validation=Path(options.validation).absolute() if options.validation else None,
            init_from=Path(options.init_from).absolute() if options.init_from else None,
            model_dir=out / "model",
            output_dir=out / "output",
            checkpoint_dir=out / "checkpoints",
        )

    hosts, current_host, interface = read_hosts(env, config_file)
    training, validation, init_from = read_channels(env, base / "input/data")
    gpus = env.get("SM_NUM_GPUS", "")
    return Container(
        inside=True,
        hosts=tuple(hosts),
        current_host=current_host,
        num_gpus=int(gpus) if gpus.isdecimal() else None,
        interface=interface,
        training=training,
        validation=validation,
        init_from=init_from,
        model_dir=Path(env.get("SM_MODEL_DIR") or base / "model"),
        output_dir=Path(env.get("SM_OUTPUT_DATA_DIR") or base / "output/data"),
        checkpoint_dir=base / "checkpoints",
    )


# ------------------------------------------------------------------------------------------------
# The group: one process per GPU, over all hosts, or failure; never two groups


@dataclass(frozen=True)
class Ranks:
    """The place of this process in the group, as its launcher gave it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str


def read_ranks(env: Mapping[str, str], n_hosts: int) -> Ranks | None:
    """torchrun's variables, else Open MPI's; None when nothing launched this process.

    Raises:
        TopologyError: the variables contradict themselves or the number of hosts.
    """

    def number(name: str) -> int:
        try:
            return int(env[name])
        except (KeyError, ValueError):
            raise TopologyError(f"{name}={env.get(name)!r} must be a whole number") from None

    mpi = [f"OMPI_COMM_WORLD_{word}" for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if "RANK" in env and "WORLD_SIZE" in env:
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
        names += ["LOCAL_WORLD_SIZE"] if "LOCAL_WORLD_SIZE" in env else []
    elif mpi[1] in env:
        names = mpi
    else:
        return None
    rank, world_size, local_rank, *rest = map(number, names)
    local_world_size = rest[0] if rest else max(1, world_size // n_hosts)
    launcher = env.get("SM_NANOGPT_LAUNCHER", "mpirun" if mpi[1] in env else "torchrun")
    ranks = Ranks(rank, world_size, local_rank, local_world_size, launcher)
    if not 0 <= ranks.rank < ranks.world_size or not 0 <= ranks.local_rank < ranks.local_world_size:
        raise TopologyError(f"{ranks.launcher} gave an impossible place: {ranks}")
    if n_hosts > 1 and ranks.world_size != n_hosts * ranks.local_world_size:
        raise TopologyError(
            f"{ranks.launcher} made a group of {ranks.world_size} with"
            f" {ranks.local_world_size} on this host, but the job has {n_hosts} hosts:"
            " each would train a model of its own"
        )
    return ranks


def in_one_line(error: Exception) -> str:
    """torch's message about a connection, as one line."""
    # NCCL gives its cause in a later line; C++ frames follow these words.
    return " ".join(str(error).split("Exception raised from")[0].split())


JOIN_TIMEOUT = timedelta(minutes=10)  # for all ranks to find the store
# No rank waits longer for another: one may compile, evaluate or write a large model meanwhile.
LONGEST_WAIT = timedelta(minutes=30)
STOP_SECONDS = 5.0  # takes the place of hang_seconds once a run is to stop, and 5 more in a parent
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def master_port() -> int:
    """MASTER_PORT, or torch's default. Raises TopologyError if it is not a port."""
    port = os.environ.get("MASTER_PORT", "7777")
    if not port.isdecimal() or int(port) >= 1 << 16:
        raise TopologyError(f"MASTER_PORT={port!r}: must be a port, up to 65535")
    return int(port)


def is_loopback(address: str) -> bool:
    return address == "localhost" or address == "::1" or address.startswith("127.")


def interface_towards(host: str) -> str | None:
    """The network interface whose address this host has on its way to another (Linux, IPv4).

    gloo would use the address of this host's name, which on Debian is 127.0.1.1.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # which sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface may have no address
                found = fcntl.ioctl(probe, 0x8915, name.encode().ljust(40, b"\0"))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == own and not is_loopback(own):
                    return name
    return None


def listen(address: str, port: int) -> socket.socket:
    """The socket at which the store of the ranks is served; port 0 takes any that is free.

    At a loopback address it listens only there, else at all addresses, as torch does.

    Raises:
        TopologyError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        if is_loopback(address):
            return socket.create_server((address, port), family=family)
        dual = socket.has_dualstack_ipv6()
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
        )
    except OSError as error:
        raise TopologyError(
            f"cannot serve the ranks at {address}:{port}: {in_one_line(error)}"
            " (MASTER_PORT names another port)"
        ) from None


def serve_store(address: str, listener: socket.socket) -> dist.TCPStore:
    """The store at which the ranks meet, served by this process."""
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=JOIN_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class Watch:
    """Finds the rank that hangs, from what each rank reports in the store every second.

    A rank reports how many operations with the others it has begun (`beats`), and how many seconds
    it may take to the next one (`patience`). Two kinds of rank hang: one that has not reported for
    hang_seconds, because its process is stopped or its host unreachable; and those with the fewest
    beats, for which all others wait, when their patience (at least hang_seconds) is over. A rank
    that is slow within its patience does not hang, nor do those that wait for it. A rank may take
    JOIN_TIMEOUT until its first report; one from before torchrun's restart, which the store still
    has, does not count. Ranks that reported until the store stopped answering do not hang.

    Only seconds awake count: after Ctrl-Z and `fg`, or a closed lid, the others do not hang.
    """

    def __init__(
        self,
        place: tuple[str, int],
        world_size: int,
        rank: int | None,
        host: str,
        hang_seconds: float,
        on_hang: Callable[[str], object],
    ) -> None:
        self.place, self.rank, self.host, self.on_hang = place, rank, host, on_hang
        self.world_size, self.hang_seconds = world_size, hang_seconds
        self.beats, self.patience = 0, LONGEST_WAIT.total_seconds()
        # For each rank: number of reports, beats, patience, host.
        self.heard: list[list[Any]] = []
        self.talks = 0
        self.joined = False  # whether each rank is known to have come
        self.ended = threading.Event()
        self.talker = threading.Thread(target=self.talk, daemon=True)
        self.talker.start()
        threading.Thread(target=self.judge, daemon=True).start()

    def expect(self, seconds: float) -> None:
        """Sets how long this rank may take to its next beat, up to LONGEST_WAIT."""
        self.patience = min(seconds, LONGEST_WAIT.total_seconds())

    def talk(self) -> None:
        with suppress(
            RuntimeError
        ):  # the store is gone; the process that served it ends the others
            # Older torch would block all threads while it waits for a host that starts later.
            while not self.ended.wait(0.1):
                with suppress(OSError):
                    socket.create_connection(self.place, timeout=5).close()
                    break
            # A connection of its own, since the main thread may wait on the other one.
            store = dist.TCPStore(*self.place, is_master=False, timeout=LONGEST_WAIT)
            keys = [f"sm-nanogpt/watch/{rank}" for rank in range(self.world_size)]
            for key in keys:
                store.compare_set(key, "", json.dumps([0, 0, self.patience, "some host"]))
            while not self.ended.is_set():
                self.talks += 1
                if self.rank is not None:
                    report = [self.talks, self.beats, self.patience, self.host]
                    store.set(keys[self.rank], json.dumps(report))
                self.heard = [json.loads(report) for report in store.multi_get(keys)]
                self.ended.wait(1)

    def judge(self) -> None:
        before, talks, unheard = self.heard, 0, 0
        quiet, still = [0] * self.world_size, [0] * self.world_size  # seconds without a change
        came = [False] * self.world_size  # whether a report has changed
        more = 5 if self.rank is None else 0  # the parent reports only if no rank can
        while not self.ended.wait(1):
            unheard = unheard + 1 if talks == self.talks else 0
            talks, now = self.talks, self.heard
            before = before or now
            for rank, (was, report) in enumerate(zip(before, now, strict=True)):
                # A parent's store is new, and so is each report in it.
                came[rank] |= report != was or (self.rank is None and report[0] > 0)
                quiet[rank] = quiet[rank] + 1 if report == was else 0
                still[rank] = still[rank] + (not unheard) if report[1] == was[1] else 0
            before, names = now, [f"rank {rank} on {report[3]}" for rank, report in enumerate(now)]
            joining = JOIN_TIMEOUT.total_seconds()
            limits = [self.hang_seconds if self.joined or known else joining for known in came]
            silent = [
                rank
                for rank, limit in enumerate(limits)
                if quiet[rank] > max(limit + more, unheard + 2)
            ]
            last = [rank for rank, report in enumerate(now) if report[1] == min(s[1] for s in now)]
            patience = [max(report[2], self.hang_seconds) for report in now]
            if not now:
                continue
            if unheard > self.hang_seconds + more:
                hung = f"{names[0]}, or what serves the store of the ranks, does not answer"
            elif silent:
                hung = f"{', '.join(names[rank] for rank in silent)} gave no sign of life"
            elif all(still[rank] > patience[rank] + more for rank in last):
                hung = f"{', '.join(names[rank] for rank in last)} made no progress"
                hung += " while the others waited" * (len(last) < len(now))
            else:
                continue
            seconds = max(*quiet, *still, unheard)
            self.on_hang(f"{hung} for {seconds} s (a larger hang_seconds allows more)")
            return

    def end(self) -> None:
        self.ended.set()
        self.talker.join(10)


def end_hung(why: str) -> NoReturn:
    """Ends a rank whose main thread waits for a hung one; its launcher then ends all others."""
    with suppress(OSError):  # the reader may be gone
        report(failure_report(HangError(why)))
    os._exit(1)


class Group:
    """The processes that train together, and their collective operations.

    With one process, each method returns at once.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        container: Container,
        hang_seconds: float = Config.hang_seconds,
    ) -> None:
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.local_rank, self.local_world_size = ranks.local_rank, ranks.local_world_size
        # torchrun may have joined hosts that no container names. Each is then known by its first
        # rank, because they may have different numbers of ranks.
        named = len(container.hosts) > 1
        self.host_index = container.host_index if named else ranks.rank - ranks.local_rank
        self.device = device
        self.store: dist.Store | None = None
        self.shared = 0
        self.watch: Watch | None = None
        if ranks.world_size == 1:
            return
        served = (
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        )  # by torchrun, or by spawn
        address, port = os.environ.get("MASTER_ADDR", container.hosts[0]), master_port()
        alone = len(container.hosts) == 1 and (
            container.inside
            or is_loopback(address)
            or os.environ.get("LOCAL_WORLD_SIZE") == str(ranks.world_size)
        )
        if not served and (address == "localhost" or (alone and container.inside)):
            address = "127.0.0.1"
        interface = LOOPBACK if alone else container.interface
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            interface = interface or interface_towards(address)
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if interface == LOOPBACK:  # NCCL uses it only if it is named
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        try:
            if ranks.rank == 0 and not served:
                self.store = serve_store(address, listen(address, port))
            else:
                self.store = dist.TCPStore(address, port, is_master=False, timeout=JOIN_TIMEOUT)
            host = container.current_host if container.inside else socket.gethostname()
            self.watch = Watch(
                (address, port),
                ranks.world_size,
                ranks.rank,
                host,
                hang_seconds,
                on_hang=end_hung,
            )
            if ranks.local_world_size == ranks.world_size:
                # torchrun's store outlives the ranks, and still has entries from before a restart.
                # (With several hosts, each counts its own restarts, so no count is common.)
                attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                self.store = dist.PrefixStore(f"attempt{attempt}", self.store)
            cuda = device.type == "cuda"
            with nullcontext() if cuda else mute_stdout():
                dist.init_process_group(
                    "nccl" if cuda else "gloo",
                    store=self.store,
                    rank=ranks.rank,
                    world_size=ranks.world_size,
                    timeout=LONGEST_WAIT + timedelta(minutes=5),  # for the watch to name a rank
                    device_id=device if cuda else None,
                )
            with mute_stdout():
                # Flags travel on the host's side, so that asking never waits for a GPU.
                self.flags = dist.new_group(backend="gloo") if cuda else None
        except (RuntimeError, ValueError) as error:
            raise TopologyError(
                f"rank {ranks.rank} could not join the group of {ranks.world_size} at"
                f" {address}:{port}:"
                f" {in_one_line(error)} (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network"
                " interface to use)"
            ) from None
        # The store also holds keys of earlier groups, so this group uses a prefix of its own.
        began = torch.tensor(time.time_ns(), device=device)
        self.broadcast_([began])
        self.watch.joined = True
        self.store = dist.PrefixStore(str(int(began)), self.store)
        self.check_hosts(container, ranks)

    def check_hosts(self, container: Container, ranks: Ranks) -> None:
        """Raises TopologyError unless the ranks are numbered host by host.

        Where the container names the hosts, each must have the same number of ranks instead.
        """
        places = torch.zeros(self.world_size, 3, dtype=torch.int64, device=self.device)
        for column, value in enumerate((self.host_index, ranks.local_rank, ranks.local_world_size)):
            places[self.rank, column] = value
        hosts, locals_, sizes = self.sum_(places).T.tolist()
        if len(container.hosts) > 1:
            counts = [hosts.count(index) for index in range(len(container.hosts))]
            if len(set(counts)) > 1:
                named = zip(container.hosts, counts, strict=True)
                found = ", ".join(f"{host}: {count}" for host, count in named)
                raise TopologyError(f"the hosts have different numbers of ranks ({found})")
            return
        for rank, (local, size) in enumerate(zip(locals_, sizes, strict=True)):
            first = rank - local
            known = (
                size if size < self.world_size else local + 1
            )  # otherwise the size may be a guess
            if first < 0 or locals_[first : first + known] != list(range(known)):
                raise TopologyError(
                    f"the ranks are not numbered host by host: rank {rank} is number {local} on its"
                    " host (`mpirun --map-by slot` and `srun --distribution=block` number them so)"
                )

    def beat(self) -> None:
        """Every rank calls it at the same points, before it waits for others."""
        if self.watch is not None:
            self.watch.beats += 1

    def expect(self, seconds: float) -> None:
        """Bounds the time until the next beat, as Watch.expect; at first it is LONGEST_WAIT."""
        if self.watch is not None:
            self.watch.expect(seconds)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks, in place; every rank gets the same bits."""
        self.beat()
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def every(self, value: bool) -> bool:
        """Whether the value is true on every rank."""
        true = torch.tensor(float(value), device=self.device)
        return int(self.sum_(true)) == self.world_size

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors [n] of all ranks, by rank: [world_size, n]."""
        self.beat()
        gathered = tensor.new_empty(self.world_size * len(tensor))
        # torch has renamed it, and warns of the old name.
        new = hasattr(dist, "all_gather_single")
        gather = dist.all_gather_single if new else dist.all_gather_into_tensor
        gather(gathered, tensor)
        return gathered.view(self.world_size, -1)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites each tensor with rank 0's."""
        self.beat()
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def largest_soon(self, value: int) -> Callable[[], int]:
        """Starts to find the largest value (0 to 255) of any rank; call the result for the answer.

        Computation in between hides the time that this takes.
        """
        if self.world_size == 1:
            return lambda: value
        self.beat()
        tensor = torch.tensor(value, dtype=torch.uint8)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.flags, async_op=True)

        def answer() -> int:
            work.wait()
            return int(tensor)

        return answer

    def average_soon(
        self, dtype: torch.dtype, bucket: dist.GradBucket
    ) -> torch.futures.Future[Tensor]:
        """Starts to average gradients over the ranks, in a 16-bit type; the result stays float32.

        Half the bytes travel: two processes on a CPU train `baby` a fiftieth faster, and by
        arithmetic four GPUs without NVLink save up to a sixth of a step. torch's own hooks do the
        same, but that for bfloat16 asks for CUDA, and in older versions their import takes NumPy.
        """
        gradients = bucket.buffer()
        sent = gradients.to(dtype).div_(self.world_size)

        def arrived(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            return gradients.copy_(future.value()[0])

        return dist.all_reduce(sent, async_op=True).get_future().then(arrived)

    def share(self, value: Any = None, *, source: bool, within: str = "group") -> Any:
        """Gives the source's value (JSON) to the other ranks; all of them call this in step."""
        if self.store is None:
            return value
        self.beat()
        self.shared += 1
        key = f"sm-nanogpt/{within}/{self.shared}"
        if source:
            self.store.set(key, json.dumps(value))
            return value
        return json.loads(self.store.get(key))

    def settle(self) -> None:
        """Waits until the device has finished its work, so that a clock may be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def barrier(self) -> None:
        self.beat()
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        self.barrier()
        if self.watch is not None:
            self.watch.end()
            self.barrier()  # no rank leaves before, as another may still use its store
            dist.destroy_process_group()


@contextmanager
def mute_stdout() -> Iterator[None]:
    """Hides what C++ prints to stdout: gloo in torch 2.8 logs each connection on every rank.

    NCCL is not muted: it logs on request, by NCCL_DEBUG.
    """
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def spawn(config: Config, container: Container, n_local: int) -> int:
    """Runs the host's ranks as children of this process, and returns their exit status.

    This does what torchrun does, without elasticity: the first host's parent serves the store
    at which all ranks meet, so a host started alone waits for the others. On Linux, CPU ranks are
    forked, so that torch is imported once for all of them.
    """
    n_hosts = len(container.hosts)
    world_size = n_local * n_hosts
    address, port = "127.0.0.1", 0
    if n_hosts > 1:
        address, port = os.environ.get("MASTER_ADDR", container.hosts[0]), master_port()
    serves = container.host_index == 0
    if serves:
        listener = listen(address, port)
        port = listener.getsockname()[1]
    forks = sys.platform == "linux" and choose_device(config, container, n_local) == "cpu"
    if forks:
        import_module("torch._dynamo")  # which takes a second; DistributedDataParallel imports it
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
    children = []
    for local_rank in range(n_local):
        env = dict(
            RANK=str(container.host_index * n_local + local_rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(n_local),
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",  # the store is served by the parent
            TORCHELASTIC_RESTART_COUNT="0",
            SM_NANOGPT_LAUNCHER=os.environ.get("SM_NANOGPT_LAUNCHER", "train.py"),
        )
        children.append(context.Process(target=run_rank, args=(env, sys.argv[1:])))
        children[-1].start()
    end_with_parent()  # from here on, threads start, which must not exist before a fork
    if serves:
        _store = serve_store(address, listener)  # it lives as long as the variable

    stop_signal, stopped_at, deadline = 0, 0.0, math.inf
    hung: list[str] = []

    def terminate(number: int = signal.SIGTERM) -> None:
        for child in children:
            if child.exitcode is None:
                os.kill(child.pid, number)

    def forward(signum: int, frame: Any) -> None:
        nonlocal stop_signal, stopped_at, deadline
        if not stop_signal:
            stop_signal, stopped_at = signum, time.monotonic()
            watch.hang_seconds = min(watch.hang_seconds, STOP_SECONDS)
            terminate()
        elif is_second(stopped_at):
            sys.stderr.write("ending now; steps after the newest checkpoint are lost\n")
            deadline = min(deadline, time.monotonic() + 2)
            terminate(signal.SIGINT)

    watch = Watch((address, port), world_size, None, "", config.hang_seconds, on_hang=hung.append)
    on_stop_signals(forward)
    dead, status = 0, 0  # the rank that failed first, and how
    while True:
        codes = [child.exitcode for child in children]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if (
            hung and None in codes and not failed
        ):  # the only rank on this host hangs, so it cannot report that
            report(failure_report(HangError(hung[0])))
            failed = [(0, 128 + stop_signal if stop_signal else 1)]
        if failed and not status:
            (dead, status), deadline = failed[0], min(deadline, time.monotonic() + 2)
            terminate()
        if None not in codes:
            break
        if time.monotonic() > deadline:
            for child in children:
                child.kill()
        if any(code is not None for code in codes):
            watch.ended.set()  # the store may end with the first host
        time.sleep(0.05)
    watch.end()
    if stop_signal and (status < 0 or status > 128):
        return 128 + stop_signal
    if status >= 0:
        return status
    # A killed rank cannot report its own end.
    dead += container.host_index * n_local
    killed = f"rank {dead} on {container.current_host} was killed by {signal.Signals(-status).name}"
    killed += " (was there too little memory?)" * (-status == signal.SIGKILL)
    report(failure_report(TrainingError(killed)))
    return 128 - status


def is_second(stopped_at: float) -> bool:
    """Whether this is a second signal, not an echo of the first: a terminal signals the parent and
    its ranks."""
    return time.monotonic() - stopped_at > 1


def on_stop_signals(handler: Callable[[int, Any], None] | signal.Handlers) -> None:
    """Sets the handler of the signals that end this process, or its terminal.

    Under nohup, the process continues to ignore the end of its terminal.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Ends this process when the one that started it ends, however that ends.

    Orphans would continue, and write into the checkpoints of the next run.
    """
    parent = multiprocessing.parent_process()
    # A pipe to which the parent never writes.
    lifeline = parent.sentinel if parent else int(os.environ.get("SM_NANOGPT_LIFELINE", -1))

    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    if lifeline >= 0:
        threading.Thread(target=watch, daemon=True).start()


# ------------------------------------------------------------------------------------------------
# Errors and the log. Each error is reported as one last line, `ErrorName: cause`, which SageMaker
# shows.


class TrainingError(Exception):
    """A failure that the user can act on."""


class ConfigError(TrainingError):
    """A hyperparameter or option is unknown, impossible, or differs from the checkpoint's."""


class DataError(TrainingError):
    """The text is missing, unreadable or too short."""


class TopologyError(TrainingError):
    """Hosts, GPUs and processes do not form one group."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be written, or no intact one exists."""


class FormatError(TrainingError):
    """A file is damaged, truncated or of another kind."""


class OutOfMemoryError(TrainingError):
    """A step needs more memory than the device or the machine has."""


class HangError(TrainingError):
    """A rank makes no progress while the others wait for it."""


class ModelError(TrainingError):
    """A model cannot be trained, or differs from its export."""


class NonFiniteLossError(TrainingError):
    """The loss, the gradients or the weights became infinite or not a number."""


def is_out_of_memory(error: Exception) -> bool:
    """CUDA raises a class of its own; CPUs and MPS only have a message."""
    words = "out of memory|can't allocate memory|ALLOC_FAILED"
    return isinstance(error, MemoryError) or bool(re.search(words, str(error)))


def failure_report(error: BaseException) -> str:
    """The text to print for an error. Its last line is `ErrorName: cause`.

    SageMaker's toolkit takes the failure reason from the first line that names an exception it
    knows. There the frames of an unexpected error come without their source text.
    """
    toolkit = "SM_FRAMEWORK_MODULE" in os.environ
    cause = " ".join(str(error).split()) or "no message"
    line = f"{type(error).__name__}: {cause}"
    known = next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")
    if toolkit and known not in line:
        line += f" [{known}]"  # SageMaker's toolkit knows only the names of Python's own errors
    if isinstance(error, (TrainingError, KeyboardInterrupt)):
        return line
    if not toolkit:
        return "".join(traceback.format_tb(error.__traceback__)) + line
    frames = traceback.extract_tb(error.__traceback__)
    return "\n".join(
        [*(f"  at {Path(f.filename).name}:{f.lineno} in {f.name}" for f in frames), line]
    )


def report(failure: str) -> None:
    """Prints a failure_report, and leaves its last line where SageMaker reads the reason.

    The first rank to fail knows it; others may say that they were asked to stop.
    """
    line = failure.rpartition("\n")[2]
    if "SM_CURRENT_HOST" in os.environ and re.match(r"\w+: ", line):
        base = Path(os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml")
        with suppress(OSError), (base / "output/failure").open("x") as file:
            file.write(line)
    sys.stderr.write(failure + "\n")
    sys.stderr.flush()


def log(line: str) -> None:
    """Writes one line of the log in one write, so that lines of several ranks do not mix.

    If the reader is gone (`| head`, a closed terminal), the run stops as on SIGTERM.
    """
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
            try:
                sys.stderr.write("the reader of the log is gone; stopping the run\n")
            except (
                OSError
            ):  # it has the same reader; Python would try again at the end, and exit with 120
                os.dup2(nowhere.fileno(), sys.stderr.fileno())
        signal.raise_signal(signal.SIGTERM)


# ------------------------------------------------------------------------------------------------
# The command line


def counted(n: int, word: str) -> str:
    """'1 host', '2 hosts', '2 processes'."""
    return f"{n} {word}" + ("es" if word.endswith("s") else "s") * (n != 1)


def nearest_multiples(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def nearest_name(name: str, known: Sequence[str]) -> str:
    """', did you mean X?' for the known name most like `name`, or ', known are ...'."""
    short = {"".join(word[0] for word in other.split("_")): other for other in known}
    close = [short[name]] if name in short else difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]}?" if close else f", known are {', '.join(known)}"


def choices_for(value: str, choices: Sequence[str]) -> str:
    """'one of ...' with the choice most like `value`, if any is: `gpu` is not like `cpu`."""
    close = difflib.get_close_matches(value, choices, n=1, cutoff=0.7)
    return f"one of {', '.join(choices)}{f', did you mean {close[0]}?' if close else ''}"


def allowed(f: dataclasses.Field[Any]) -> str:
    """The values that the field accepts, in words."""
    m = f.metadata
    if m["choices"]:
        return "one of " + ", ".join(m["choices"])
    if f.type == "bool":
        return "True or False"
    kind = "a whole number" if f.type == "int" else "a number"
    if m["most"] is not None:
        return f"{kind} from {m['least']} to {m['most']}"
    return kind if m["least"] is None else f"{kind}, at least {m['least']}"


FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}


def check_range(f: dataclasses.Field[Any], value: Any) -> None:
    m = f.metadata
    wrong = (
        type(value) not in FIELD_TYPES[str(f.type)]
        or (isinstance(value, float) and not math.isfinite(value))
        or (m["choices"] and value not in m["choices"])
        or (m["least"] is not None and value < m["least"])
        or (m["most"] is not None and value > m["most"])
    )
    if wrong:
        must = choices_for(str(value), m["choices"]) if m["choices"] else allowed(f)
        raise ConfigError(f"{f.name}={value!r}: must be {must}")


def parse_value(f: dataclasses.Field[Any], text: str) -> Any:
    """The value of a field from its text form, as on a command line."""
    try:
        if f.type == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if f.type == "float":
            return float(text)
        if f.type == "int":
            try:
                return int(text)
            except ValueError:
                if float(text).is_integer():  # 1e5
                    return int(float(text))
                raise
    except (ValueError, KeyError):
        raise ConfigError(f"{f.name}={text!r}: must be {allowed(f)}") from None
    return text


def make_config(
    values: Mapping[str, Any], preset: str | None = None, base: Mapping[str, Any] | None = None
) -> Config:
    """A Config from names and values (text or typed) over a preset over a base over the defaults.

    A name may have `-` instead of `_`. An empty value counts as not given, since SageMaker turns
    an unset hyperparameter into that.

    Raises:
        ConfigError: an unknown name or preset, or a value that is not allowed.
    """
    if preset is not None and preset not in PRESETS:
        raise ConfigError(f"preset={preset!r}: must be {choices_for(preset, list(PRESETS))}")
    known = {f.name: f for f in dataclasses.fields(Config)}
    base, of_preset = base or {}, PRESETS[preset].copy() if preset else {}
    if (values.get("optimizer") or base.get("optimizer")) == "adamw":
        of_preset.pop("learning_rate", None)  # which is for Muon
    chosen = {**base, **of_preset}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(
                f"{key}={value!r}: there is no such hyperparameter{nearest_name(name, list(known))}"
            )
        if value is None or value == "":
            continue
        chosen[name] = parse_value(known[name], value) if isinstance(value, str) else value
    return Config(**chosen)


def option(default: Any, help: str) -> Any:
    """A field of Options."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Options:
    """The options besides hyperparameters; in a container, only `processes` and `preset`."""

    data: str = option("", "a text file, or a directory of *.txt files")
    validation: str = option("", "a text file or directory for validation alone")
    out: str = option("", "directory for the results (default: a new one in runs/)")
    init_from: str = option("", "directory of a model to start from: ours, or of the Qwen3 family")
    resume: str = option("", "directory of an earlier run (on every host) to continue")
    processes: int = option(0, "processes of a host without GPUs (default: 1, or as before)")
    preset: str = option("", "a set of hyperparameters: " + ", ".join(PRESETS))
    processes_before: int = (
        0  # not an option: of the checkpoint that --resume continues from, on a CPU
    )


OPTIONS = [f for f in dataclasses.fields(Options) if f.metadata]


def read_words(argv: Sequence[str]) -> dict[str, str]:
    """Values by name, from `--name value`, `--name=value`, or a bare `--flag`.

    Raises:
        ConfigError: a name is unknown or given twice, or its value is missing.
    """
    known = [f.name for f in (*OPTIONS, *dataclasses.fields(Config))]
    flags = {f.name for f in dataclasses.fields(Config) if f.type == "bool"}
    given: dict[str, str] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        name = key.replace("-", "_")
        if not word.startswith("-"):
            raise ConfigError(f"{word}: there is no such option; name a text with --data {word}")
        if not word.startswith("--") or name not in known:
            whole = word if equals or not rest or rest[0].startswith("--") else f"{word}={rest[0]}"
            raise ConfigError(f"{whole}: there is no such option{nearest_name(name, known)}")
        if not equals:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif name in flags:
                value = "True"
            else:
                raise ConfigError(f"{word}: a value is missing")
        if name in given:
            raise ConfigError(f"{word}: given twice ({given[name]!r} and {value!r})")
        given[name] = value
    return given


def parse_argv(argv: Sequence[str]) -> tuple[Config, Options]:
    """Hyperparameters and options from a command line.

    A resumed run takes missing ones from its checkpoint.

    Raises:
        ConfigError: as read_words; or a value is not allowed, or --resume names a directory without
            a checkpoint that this script can continue from.
    """
    given = read_words(argv)
    words: dict[str, Any] = {f.name: given.pop(f.name, "") for f in OPTIONS}
    processes = words.pop("processes")
    if processes and not (processes.isdecimal() and int(processes)):
        raise ConfigError(f"processes={processes!r}: must be a whole number, at least 1")
    options = Options(**words, processes=int(processes or 0))
    if options.resume and options.out:
        raise ConfigError(
            f"--out {options.out}: --resume continues in its own directory; to keep that"
            " unchanged, resume a copy"
        )
    base: dict[str, Any] = {}
    if options.init_from and not options.resume:
        given = starting_values(Path(options.init_from), given)
    if options.resume:
        try:
            saved = Checkpoints(Path(options.resume) / "checkpoints").latest_state()
        except CheckpointError as error:
            raise ConfigError(f"--resume {options.resume}: {error}") from None
        base = saved["config"]
        if foreign := sorted(base.keys() - {f.name for f in dataclasses.fields(Config)}):
            raise ConfigError(
                f"{options.resume} was trained by a script with other hyperparameters"
                f" ({', '.join(foreign)}); resume it with that script"
            )
        options = dataclasses.replace(
            options,
            data=options.data or saved["data"],
            validation=options.validation or saved["validation"],
            init_from=saved.get("init_from", ""),
            processes_before=saved.get("processes", 0),  # older checkpoints have none
        )
    return make_config(given, options.preset or None, base), options


def usage() -> str:
    """The text of --help."""
    lines = [__doc__ or "", "options:"]
    lines += [f"  --{f.name:<28} {f.metadata['help']}" for f in OPTIONS]
    return "\n".join(lines) + hyperparameter_table()


def hyperparameter_table() -> str:
    """A line for each hyperparameter, in groups, with its meaning, range and default."""
    lines = []
    for f in dataclasses.fields(Config):
        if f.metadata["group"]:
            lines += ["", f"hyperparameters of the {f.metadata['group']}:"]
        kept = "; --resume keeps it" * f.metadata["fixed"]
        help, default = f.metadata["help"], repr(f.default)
        if f.default == 0 and " (0: " in help:
            help, _, meaning = help.removesuffix(")").partition(" (0: ")
            default = f"0, which means {meaning}"
        lines.append(f"  --{f.name:<28} {help}; {allowed(f)}{kept} (default: {default})")
    return "\n".join(["", *lines])


def end_at_once(signum: int, frame: Any) -> NoReturn:
    """Ends this process with its cleanup, which a second signal must not interrupt."""
    on_stop_signals(signal.SIG_IGN)
    raise SystemExit(128 + signum)


def train(config: Config, options: Options, container: Container, ranks: Ranks) -> int:
    """Runs one rank from start to end; returns its exit status."""
    device = rank_device(config, container, ranks)
    config.check_world_size(ranks.world_size)

    checkpoints = Checkpoints(container.checkpoint_dir)
    by_hand, restarted = not container.inside, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if by_hand and restarted != "0" and not (options.out or options.resume):
        raise ConfigError("torchrun restarted this run: only with --out DIRECTORY can it continue")
    fresh = ranks.rank == 0 and by_hand and restarted == "0" and not options.resume
    if fresh:
        checkpoints.check_fresh()

    group = Group(ranks, device, container, config.hang_seconds)
    if ranks.local_rank == 0:  # other ranks wait in C++, where no handlers run
        on_stop_signals(end_at_once)
    threads = torch.get_num_threads()  # OMP_NUM_THREADS, if it is set
    if not os.environ.get("OMP_NUM_THREADS"):  # some builds of torch take 1 under mpirun
        threads = max(1, available_cores() // ranks.local_world_size)
    torch.set_num_threads(1)  # the chunks of a text are too small to share
    corpus = load_corpus(container, config, group)
    torch.set_num_threads(threads)
    if device.type == "cpu":
        keep_freed_memory()  # for the steps; the memory for reading the text was already returned
    trainer = Trainer(config, container, group, corpus)
    if trainer.chief:
        checkpoints.claim()
        if fresh:
            checkpoints.check_fresh()  # another run may have ended there in the meantime

    stopped_at = math.inf

    def on_signal(signum: int, frame: Any) -> None:
        nonlocal stopped_at
        if signum == signal.SIGINT and is_second(stopped_at):
            os._exit(128 + signum)  # a second Ctrl-C does not wait for the step to end
        stopped_at = min(stopped_at, time.monotonic())
        received.append(signum)
        trainer.stop_signal = trainer.stop_signal or signum

    on_stop_signals(on_signal)
    trainer.introduce(ranks)
    done = trainer.run()
    group.close()
    return 0 if done else 128 + (trainer.stop_signal or signal.SIGTERM)


def main(argv: Sequence[str]) -> int:
    if "--help" in argv or "-h" in argv:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it silently
        print(usage())
        return 0
    # The log's encoding may lack characters of a sample.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    # A warning would name an exception class, and SageMaker would take it for the failure.
    once = functools.cache(log)
    warnings.showwarning = lambda message, *_, **__: once(f"note: {' '.join(str(message).split())}")
    config, options = parse_argv(argv)
    container = read_container(os.environ, options)
    ranks = read_ranks(os.environ, len(container.hosts))
    if ranks is None:
        n_local = local_processes(config, container, options)
        config.check_world_size(n_local * len(container.hosts))
        if n_local * len(container.hosts) > 1:
            return spawn(config, container, n_local)
        ranks = Ranks(0, 1, 0, 1, os.environ.get("SM_NANOGPT_LAUNCHER", "hand"))
    elif options.processes not in (0, ranks.local_world_size):
        raise TopologyError(
            f"processes={options.processes}, but {ranks.launcher} started {ranks.local_world_size}"
        )
    end_with_parent()
    try:
        return train(config, options, container, ranks)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        first = (str(error).strip() or "MemoryError").splitlines()[0]
        raise OutOfMemoryError(
            "set a larger gradient_accumulation_steps (now"
            f" {config.passes(ranks.world_size)}), or a smaller batch_size, block_size or"
            f" n_embd; torch says: {first}"
        ) from None


def run_rank(env: Mapping[str, str], argv: Sequence[str]) -> NoReturn:
    """The whole life of a process that `spawn` starts."""
    os.environ.update(env)
    run(argv)


received: list[int] = []  # signals to stop, while it trains


def run(argv: Sequence[str]) -> NoReturn:
    """Runs `main` and ends the process with its status, or with the report of an error.

    It leaves out the interpreter's teardown, in which threads of gloo may abort.
    """
    try:
        status = main(argv)
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException as error:
        frames, newline, line = failure_report(error).rpartition("\n")
        if dist.is_initialized() and isinstance(error, RuntimeError):
            # This may be an echo of another rank's failure: torch's own errors are RuntimeErrors.
            if received and not multiprocessing.parent_process():
                # torchrun has asked this rank to stop, knows the failure, and waits for this rank.
                line = f"asked to stop, this rank then failed: {line}"
            else:
                # The rank that failed reports first; its launcher then ends this one within 2
                # seconds, its Watch within 3.
                on_stop_signals(signal.SIG_DFL)
                time.sleep(5)
        sys.stdout.flush()
        report(f"{frames}{newline}{line}")
        status = 2 if isinstance(error, (ConfigError, DataError)) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run(sys.argv[1:])
