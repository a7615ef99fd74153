"""What model.py computes with: norms and attention, fast on CPUs too, and the loss in chunks."""

from __future__ import annotations

import math
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
        dot = (dy * y).sum(-1, keepdim=True)
        return torch.addcmul(dy, y, dot, value=-1 / y.size(-1)).mul_(scale)


def rms_norm(x: Tensor) -> Tensor:
    """x [..., n] over its root mean square (arXiv:1910.07467)."""
    may_overflow = x.dtype == torch.float16  # the length of a row
    if x.device.type != "cpu" or may_overflow or torch.compiler.is_compiling():
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
    n_head = q.size(1)
    k, v = repeat_kv(k, n_head), repeat_kv(v, n_head)
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout)
    # There, the backward pass of torch's kernel takes several times as long as two products.
    on_cpu = q.device.type == "cpu"
    if on_cpu and q.dtype == torch.bfloat16 and torch.is_grad_enabled():
        return attend_by_products(q, k, v, dropout)
    return F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True)


def attend_by_products(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """As attend, without a mask, of q, k, v [B, H, T, D]; some queries at once."""
    B, H, T, D = q.shape
    q = q.reshape(B * H, T, D)
    k = k.reshape(B * H, T, D)
    v = v.reshape(B * H, T, D)
    outputs = []
    for begin in range(0, T, QUERIES_AT_ONCE):
        queries = q[:, begin : begin + QUERIES_AT_ONCE]  # [B * H, n, D]
        n = queries.size(1)
        end = begin + n  # no query looks ahead
        keys, values = k[:, :end], v[:, :end]  # [B * H, end, D]
        mask = q.new_full((n, end), float("-inf")).triu_(begin + 1)
        scores = torch.baddbmm(mask, queries, keys.mT, alpha=D**-0.5)  # [B * H, n, end]
        weights = F.dropout(scores.softmax(dim=-1), dropout)
        outputs.append(weights @ values)
    return torch.cat(outputs, dim=1).view(B, H, T, D)


FLEX_DEVICE = "cuda"  # the one whose FlexAttention has a gradient


def document_mask(idx: Tensor, end: int, closes: bool, config: Config) -> Mask:
    """For each query, True for the keys that it may attend to, bool [B, 1, T, T].

    Those are the keys of its own document, up to itself. With `closes`, an `end` closes the
    document before it; without, it opens the next. Compiled, it is a BlockMask of FlexAttention
    instead (arXiv:2412.05496), which has no dropout, and skips blocks of 128 x 128 that are all
    false. Here it is used for widths of a power of two.
    """
    is_end = idx == end
    documents = is_end.cumsum(dim=1)  # the number of each token's document, [B, T]
    if closes:
        documents = documents - is_end.long()
    mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()

    has_flex = torch.compiler.is_compiling() and idx.device.type == FLEX_DEVICE
    has_width = config.head_width in (16, 32, 64, 128, 256)
    if not has_flex or not has_width or idx.size(1) % 128 or config.dropout:
        return mask
    return block_mask(mask, documents)


def block_mask(mask: Tensor, documents: Tensor) -> Any:
    """The BlockMask of a mask [B, 1, T, T] of documents [B, T]: which blocks of 128 x 128 count."""
    from torch.nn.attention.flex_attention import BlockMask

    def may_attend(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (documents[b, query] == documents[b, key])

    def count(blocks: Tensor) -> Tensor:  # of each row
        return blocks.sum(dim=-1, dtype=torch.int32)

    def indices(blocks: Tensor) -> Tensor:  # those of a row that are true come first
        return blocks.int().argsort(dim=-1, descending=True, stable=True).int()

    B, _, T, _ = mask.shape
    n_true = mask.view(B, 1, T // 128, 128, T // 128, 128).sum(dim=(3, 5))  # in each block
    full = n_true == 128 * 128
    partial = (n_true > 0) & ~full
    return BlockMask.from_kv_blocks(
        count(partial),
        indices(partial),
        count(full),
        indices(full),
        BLOCK_SIZE=128,
        mask_mod=may_attend,
    )


LOGITS_AT_ONCE = 1 << 28  # a gigabyte in float32, which compiled kernels never hold
LARGE_MEMORY = 60e9  # bytes of a GPU that holds four times as many


def logits_at_once(device: torch.device) -> int:
    if device.type != "cuda":
        return LOGITS_AT_ONCE >> 4
    if not torch.compiler.is_compiling():
        return LOGITS_AT_ONCE >> 2
    return LOGITS_AT_ONCE << (2 if has_large_memory(device) else 0)


def has_large_memory(device: torch.device) -> bool:
    return torch.cuda.get_device_properties(device).total_memory > LARGE_MEMORY


# What torch.compiler.assume_constant_result does, without its import of the compiler: seconds.
has_large_memory._dynamo_marked_constant = True  # type: ignore[attr-defined]


def chunk_size(n_rows: int, max_rows: int) -> int:
    """The size of the fewest even chunks of at most `max_rows` rows, in whole tiles of 128."""
    n_chunks = math.ceil(n_rows / max(128, max_rows // 128 * 128))
    return math.ceil(n_rows / n_chunks / 128) * 128


def mixed_targets(logits: Tensor, targets: Tensor, share: float, temperature: float) -> Tensor:
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
    """The mean cross-entropy of logits [N, V] with the mixed_targets of targets [N].

    Targets below 0 are not learned.
    """
    p = mixed_targets(teacher, targets, share, temperature)
    losses = F.cross_entropy(logits, p, reduction="none")
    is_learned = targets >= 0
    return (losses * is_learned).sum() / is_learned.sum()


class ChunkedLoss(torch.autograd.Function):
    """The mean cross-entropy of head(x). Uncompiled, it holds the logits of one chunk at a time.

    Each chunk of rows is turned into its gradients at once (Liger Kernel, arXiv:2410.10989, section
    3.2), so nothing is computed twice. Inputs: x [N, C], the head's weight [V, C], targets [N];
    `some_ignored`: negative ones are not learned, and do not count; a teacher's logits [N, V]
    with the share and temperature of mixed_targets. The products have a multiple of 64 columns, as
    GPUs are slow at others (nanoGPT pads its vocabulary); those beyond V have no probability.
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
        V = len(weight)
        head = weight.to(x.dtype)
        if V % 64:
            head = F.pad(head, (0, 0, 0, -V % 64))
        columns = torch.arange(len(head), device=x.device)
        # On MPS, some versions have no >= of int64.
        is_learned = targets >= 0 if some_ignored else None
        is_compiled = torch.compiler.is_compiling()
        ctx.n_learned = len(x) if is_learned is None else is_learned.sum()

        total = x.new_zeros((), dtype=torch.float32)
        dx = torch.empty_like(x)
        learns = any(ctx.needs_input_grad)
        dw = torch.zeros_like(head, dtype=weight.dtype) if learns else None
        n = chunk_size(len(x), logits_at_once(x.device) // len(head))
        for begin in range(0, len(x), n):
            rows = x[begin : begin + n]
            ids = targets[begin : begin + n, None]
            p: Tensor | None = None
            if teacher is not None:
                p = mixed_targets(teacher[begin : begin + n], ids[:, 0], share, temperature)
            if is_learned is not None:
                ids = ids.clamp_min(0)
                counts = is_learned[begin : begin + n, None]

            logits = (rows @ head.mT).float()
            if V % 64:
                logits[:, V:] = float("-inf")
            if is_compiled:  # it reads a row once less than with logsumexp (online softmax)
                largest = logits.amax(dim=-1, keepdim=True)
                log_sums = (logits - largest).exp().sum(dim=-1, keepdim=True).log() + largest
            else:
                log_sums = logits.logsumexp(dim=-1, keepdim=True)
            if p is not None:
                target_logits = (p * logits[:, :V]).sum(1, keepdim=True)
            elif is_compiled:  # with gather, it keeps the logits of all chunks
                target_logits = torch.where(columns == ids, logits, 0.0).sum(1, keepdim=True)
            else:
                target_logits = logits.gather(1, ids)
            losses = log_sums - target_logits
            if is_learned is not None:
                losses = losses * counts
            total += losses.sum()
            if dw is None:
                continue

            # The gradient of the chunk's logits. It is not yet divided by the number of targets,
            # which float16 would round to 0.
            if p is not None:
                d = logits.sub_(log_sums).exp_()
                d[:, :V] -= p
            elif is_compiled:  # one kernel, which keeps no float32
                d = (logits - log_sums).exp() - (columns == ids).float()
            else:
                d = logits.sub_(log_sums).exp_()
                d.scatter_add_(1, ids, d.new_full(ids.shape, -1.0))
            if is_learned is not None:
                d = d * counts
            d = d.to(x.dtype)
            dx[begin : begin + n] = d @ head
            dw += d.mT @ rows
        ctx.save_for_backward(dx, None if dw is None else dw[:V])
        return total / ctx.n_learned

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        scale = dy / ctx.n_learned
        return dx * scale, dw * scale, None, None, None, None, None
