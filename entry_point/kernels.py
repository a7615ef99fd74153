"""What model.py computes with: norms and attention, fast on CPUs too, and the loss in chunks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import Config

NORM_EPS = 1e-6
# addcmul needs a tensor here; creating one per call would cost as much as the operation itself.
NORM_EPS_TENSOR = torch.tensor(NORM_EPS, device="cpu")


def norm_scale(x: Tensor) -> Tensor:
    """1 / root mean square of the rows of x [..., n], [..., 1], in few operations of a CPU.

    In bf16 it is rounded by up to 0.4 %, twice.
    """
    lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True).float()
    mean_square = torch.addcmul(NORM_EPS_TENSOR, lengths, lengths, value=1 / x.size(-1))
    return mean_square.rsqrt_().to(x.dtype)


class Norm(torch.autograd.Function):
    """The norm with its gradient on a CPU, where torch's takes three times as long."""

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


def rms_norm(x: Tensor) -> Tensor:
    """x [..., n] over its root mean square (arXiv:1910.07467)."""
    plain = x.device.type == "cpu" and x.dtype != torch.float16  # in which a length may be infinite
    if not plain or torch.compiler.is_compiling():
        return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)
    if torch.is_grad_enabled():
        return Norm.apply(x)
    return x * norm_scale(x)  # to call a Function takes almost as long as the norm of one token


def repeat_kv(heads: Tensor, n: int) -> Tensor:
    """Keys or values [B, n_kv_head, T, head_dim], repeated for n heads (arXiv:2305.13245)."""
    repeats = n // heads.size(1)
    return heads if repeats == 1 else heads.repeat_interleave(repeats, dim=1)


QUERIES_AT_ONCE = 256
Mask = Any  # None, bool [B, 1, T, T], or a BlockMask, whose import takes a second


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask = None) -> Tensor:
    """Causal scaled dot-product attention of q [B, n_head, T, head_dim] over k, v of n_kv_head.

    A mask of document_mask takes the place of the causal one.
    """
    if mask is not None and not isinstance(mask, Tensor):
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    B, H, T, D = q.shape
    k, v = repeat_kv(k, H), repeat_kv(v, H)
    slow = q.device.type == "cpu" and q.dtype == torch.bfloat16 and torch.is_grad_enabled()
    if not slow or mask is not None:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None)
    # There, the backward pass of torch's kernel takes several times as long as two products.
    q, k, v = (heads.reshape(B * H, T, D) for heads in (q, k, v))
    rows = []
    for begin in range(0, T, QUERIES_AT_ONCE):
        queries = q[:, begin : begin + QUERIES_AT_ONCE]
        end = begin + queries.size(1)  # no query looks ahead
        ahead = q.new_full((queries.size(1), end), float("-inf")).triu_(begin + 1)
        scores = torch.baddbmm(ahead, queries, k[:, :end].mT, alpha=D**-0.5)
        rows.append(F.dropout(scores.softmax(dim=-1), dropout) @ v[:, :end])
    return torch.cat(rows, dim=1).view(B, H, T, D)


FLEX_DEVICE = "cuda"  # the one whose FlexAttention has a gradient


def document_mask(idx: Tensor, end: int, own_end: bool, config: Config) -> Mask:
    """True where a query may attend, bool [B, 1, T, T]: within its own document, not ahead.

    With `own_end`, an `end` closes the document before it; without, it opens the next. Compiled, it
    is a BlockMask of FlexAttention instead (arXiv:2412.05496), which has no dropout, skips blocks
    of 128 x 128 that are all false, and in torch 2.6 takes widths of a power of two.
    """
    (B, T), ends = idx.shape, idx == end
    documents = ends.cumsum(dim=1) - ends.long() * own_end
    mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    fits = T % 128 == 0 and config.head_width in (16, 32, 64, 128, 256) and not config.dropout
    if not (fits and torch.compiler.is_compiling() and idx.device.type == FLEX_DEVICE):
        return mask
    from torch.nn.attention.flex_attention import BlockMask

    def may_attend(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (documents[b, query] == documents[b, key])

    seen = mask.view(B, 1, T // 128, 128, T // 128, 128).sum(dim=(3, 5))
    blocks = (seen > 0) & (seen < 128 * 128), seen == 128 * 128
    n, n_full = (which.sum(dim=-1, dtype=torch.int32) for which in blocks)
    sort = partial(torch.argsort, dim=-1, descending=True, stable=True)
    at, full = (sort(which.int()).int() for which in blocks)
    return BlockMask.from_kv_blocks(n, at, n_full, full, BLOCK_SIZE=128, mask_mod=may_attend)


LOGITS_AT_ONCE = 1 << 28  # a gigabyte in float32, which compiled kernels never hold


def logits_at_once(device: torch.device) -> int:
    if device.type == "cuda":
        return LOGITS_AT_ONCE >> (0 if torch.compiler.is_compiling() else 2)
    return LOGITS_AT_ONCE >> 4


def chunk_size(rows: int, most: int) -> int:
    """The size of the fewest even chunks of at most `most` rows, in whole tiles of 128."""
    chunks = math.ceil(rows / max(128, most // 128 * 128))
    return math.ceil(rows / chunks / 128) * 128


def taught_by(logits: Tensor, targets: Tensor, share: float, temperature: float) -> Tensor:
    """The probabilities that are learned, float32 [N, V], of a teacher's logits and targets [N].

    They are a share of the teacher's, of its logits over the temperature, and the rest of the
    targets (arXiv:1503.02531, section 2, with the temperature of the student at 1). Targets below 0
    count as token 0.
    """
    p = (logits.float() / temperature).softmax(dim=-1) * share
    share_of_target = p.new_full((len(targets), 1), 1 - share)
    return p.scatter_add_(1, targets.clamp_min(0)[:, None], share_of_target)


def taught_loss(
    logits: Tensor, targets: Tensor, teacher: Tensor, share: float, temperature: float
) -> Tensor:
    """The mean cross-entropy of logits [N, V] with what taught_by says of the targets [N]; those
    below 0 are not learned."""
    p, learned = taught_by(teacher, targets, share, temperature), targets >= 0
    losses = F.cross_entropy(logits, p, reduction="none")
    return (losses * learned).sum() / learned.sum()


class ChunkedLoss(torch.autograd.Function):
    """The mean cross-entropy of head(x). Uncompiled, it holds the logits of one chunk at a time.

    Each chunk of rows is turned into its gradients at once (Liger Kernel, arXiv:2410.10989, section
    3.2), so nothing is computed twice. Inputs: x [N, C], the head's weight [V, C], targets [N];
    `some_ignored`: negative ones are not learned, and do not count; a teacher's logits [N, V]
    with the share and temperature of taught_by. The products have a multiple of 64 columns, as GPUs
    are slow at others (nanoGPT pads its vocabulary for it); those beyond V have no probability.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        some_ignored: bool = False,
        teacher: Tensor | None = None,
        share: float = 0.0,
        temperature: float = 1.0,
    ) -> Tensor:
        learns = any(ctx.needs_input_grad)
        total, V = x.new_zeros((), dtype=torch.float32), len(weight)
        dx, cast = torch.empty_like(x), weight.to(x.dtype)
        if V % 64:
            cast = F.pad(cast, (0, 0, 0, -V % 64))
        dw = torch.zeros_like(cast, dtype=weight.dtype) if learns else None
        n = chunk_size(len(x), logits_at_once(x.device) // len(cast))
        columns = torch.arange(len(cast), device=x.device)
        learned = targets >= 0 if some_ignored else None  # MPS of some versions has no >= of int64
        ctx.count = len(x) if learned is None else learned.sum()
        for begin in range(0, len(x), n):
            rows, ids = x[begin : begin + n], targets[begin : begin + n, None]
            logits = (rows @ cast.mT).float()
            logits[:, V:] = float("-inf")
            sums = logits.logsumexp(dim=-1, keepdim=True)
            p: Tensor | None = None
            if teacher is not None:
                p = taught_by(teacher[begin : begin + n], ids[:, 0], share, temperature)
            if learned is not None:
                ids, counts = ids.clamp_min(0), learned[begin : begin + n, None]
            right = logits.gather(1, ids) if p is None else (p * logits[:, :V]).sum(1, keepdim=True)
            losses = sums - right
            total += (losses if learned is None else losses * counts).sum()
            if dw is not None:  # not yet divided by N, which float16 would round to 0
                if p is not None:
                    d = logits.sub_(sums).exp_()
                    d[:, :V] -= p
                elif torch.compiler.is_compiling():  # one kernel, which keeps no float32
                    d = (logits - sums).exp() - (columns == ids).float()
                else:
                    d = logits.sub_(sums).exp_()
                    d.scatter_add_(1, ids, d.new_full(ids.shape, -1.0))
                d = (d if learned is None else d * counts).to(x.dtype)
                dx[begin : begin + n] = d @ cast
                dw += d.mT @ rows
        ctx.save_for_backward(dx, dw if dw is None else dw[:V])
        return total / ctx.count

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        scale = dy / ctx.count
        return dx * scale, dw * scale, None, None, None, None, None
