"""Whether a model looks ahead, as an edit may make it: its loss would then mean nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .model import GPT
    from .text import Tokenizer

# Nats by which the logarithm of a probability may move. Measured: 0 in float32 and bfloat16, 1.3e-5
# with convolutions by Fourier transforms; the mildest leak tried, a thousandth of a value, 3e-4.
TOLERANCE = 1e-4
LONGEST_WINDOW = 1024  # tokens, as the logits of longer windows can fill the memory
LEAST = -100.0  # such a logarithm, as a masked one is -inf


@torch.inference_mode()
def find_leak(
    logits: Callable[[Tensor], Tensor],
    windows: Tensor,
    vocabulary_size: int,
    seed: int,
    n_cuts: int = 512,
) -> str:
    """How logits depend on later tokens, or '' if none of `n_cuts` random cuts shows it.

    From its cut on, a window is replaced: by random ids, or by another part of the windows, so that
    no model can tell the test from text. What `logits` gives before the cut must then stay. What
    moves without a token to blame depends on other windows, or changes from call to call.

    Args:
        logits: from ids, int64 [n, T], to float32 [n, T, V].
        windows: ids, int64 [any number, longest T]. Each fourth batch of them is cut shorter.
        vocabulary_size: random ids are below it.
    """

    def scores(ids: Tensor) -> Tensor:
        return logits(ids).log_softmax(dim=-1).clamp_min_(LEAST)

    def moves(end: int) -> bool:
        """Whether the logits found move if the tokens from the cut to this one are replaced."""
        ids = before.clone()
        ids[row, cut:end] = after[row, cut:end]
        difference = (scores(ids)[row, position] - known[row, position]).abs().max()
        return not bool(difference <= TOLERANCE)

    generator, longest = torch.Generator().manual_seed(seed), windows.size(1)
    others = windows.flatten().roll(windows.numel() // 2).view_as(windows)
    # A cut in each of n_cuts equal parts of the depth.
    depths = torch.randperm(n_cuts, generator=generator) + torch.rand(n_cuts, generator=generator)
    at_once = max(1, min(4096, (1 << 26) // vocabulary_size) // longest)
    for index, cuts in enumerate(depths.div(n_cuts).split(at_once)):
        T = longest
        if index % 4 == 3:
            T = int(torch.randint(2, longest + 1, (), generator=generator))
        cuts = 1 + (cuts * (T - 1)).long()
        rows = torch.randint(len(windows), cuts.shape, generator=generator)
        before = windows[rows, :T]
        ids = torch.randint(1, max(2, vocabulary_size), before.shape, generator=generator)
        ids = (before + ids) % vocabulary_size  # each differs
        kind = torch.randint(2, (len(cuts), 1), generator=generator)
        later = torch.arange(T) >= cuts[:, None]
        after = torch.where(later, torch.where(kind == 1, ids, others[rows, :T]), before)
        known = scores(before)
        difference = scores(after).sub_(known).abs_().amax(dim=-1).cpu()  # NaN stays
        moved = (difference <= TOLERANCE).logical_not() & ~later
        if moved.any():
            row, position = divmod(int(difference.masked_fill(~moved, -1).argmax()), T)
            cut = int(cuts[row])
            end = cut + bisect_left(range(cut, T + 1), True, key=moves)
            source = f"token {end - 1}" if cut < end <= T else "more than earlier tokens"
            nats = float(difference[row, position])
            return f"logits at {position} depend on {source} (by {nats:.2g})"
    return ""


def leak_of(model: GPT, tokenizer: Tokenizer, chats: bool) -> str:
    """Why a model (CPU, float32) is not causal, or '', as a few cuts in random ids show.

    It makes as many cuts as there are windows, in 2,048 tokens or two windows. That shows a leak at
    many positions, as an edit by mistake makes it, and takes about a second in `laptop`.
    """
    T = min(model.config.block_size, LONGEST_WINDOW)
    n_cuts = max(2, 2048 // T)
    end = tokenizer.end if chats or model.config.mask_documents else None
    windows = torch.randint(len(tokenizer), (n_cuts, T), generator=torch.Generator().manual_seed(1))
    logits = partial(model, end=end, chats=chats)
    leak = find_leak(logits, windows, len(tokenizer), seed=1, n_cuts=n_cuts)
    return f"not causal: {leak}; val_loss means nothing" if leak else ""
