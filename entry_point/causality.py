"""Whether a model looks ahead, as an edit may make it: its loss would then mean nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
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
MIN_LOG_PROBABILITY = -100.0  # as that of a masked token is -inf


@dataclass(frozen=True)
class Leak:
    """How logits depend on more than the tokens before them."""

    position: int  # of the logits in their window
    token: int | None  # the later position on which they depend; None: no single one explains it
    nats: float  # by which a log-probability moved

    def __str__(self) -> str:
        source = "more than earlier tokens" if self.token is None else f"token {self.token}"
        return f"logits at {self.position} depend on {source} (by {self.nats:.2g})"


@torch.inference_mode()
def find_leak(
    logits: Callable[[Tensor], Tensor],
    windows: Tensor,
    vocabulary_size: int,
    seed: int,
    n_cuts: int = 512,
) -> Leak | None:
    """How logits depend on later tokens; None if none of `n_cuts` random cuts shows it.

    From its cut on, a window is replaced: by random ids, or by another part of the windows, so that
    no model can tell the test from text. What `logits` gives before the cut must then stay. What
    moves without a token to blame depends on other windows, or changes from call to call.

    Args:
        logits: from ids, int64 [n, T], to float32 [n, T, V].
        windows: ids, int64 [any number, longest T]. Each fourth batch of them is cut shorter.
        vocabulary_size: random ids are below it.
    """

    def log_probabilities(ids: Tensor) -> Tensor:
        return logits(ids).log_softmax(dim=-1).clamp_min_(MIN_LOG_PROBABILITY)

    generator = torch.Generator().manual_seed(seed)
    longest = windows.size(1)
    other_windows = windows.flatten().roll(windows.numel() // 2).view_as(windows)
    # A cut in each of n_cuts equal parts of the depth.
    depths = torch.randperm(n_cuts, generator=generator) + torch.rand(n_cuts, generator=generator)
    cuts_at_once = max(1, min(4096, (1 << 26) // vocabulary_size) // longest)
    for batch, batch_depths in enumerate(depths.div(n_cuts).split(cuts_at_once)):
        T = longest
        if batch % 4 == 3:
            T = int(torch.randint(2, longest + 1, (), generator=generator))
        cuts = 1 + (batch_depths * (T - 1)).long()  # [n], from 1 to T - 1
        n = len(cuts)

        rows = torch.randint(len(windows), (n,), generator=generator)
        original = windows[rows, :T]
        random = torch.randint(1, max(2, vocabulary_size), (n, T), generator=generator)
        random = (original + random) % vocabulary_size  # each id differs
        is_random = torch.randint(2, (n, 1), generator=generator) == 1
        is_later = torch.arange(T) >= cuts[:, None]  # [n, T]
        replacement = torch.where(is_random, random, other_windows[rows, :T])
        replaced = torch.where(is_later, replacement, original)

        expected = log_probabilities(original)  # [n, T, V]
        difference = log_probabilities(replaced).sub_(expected).abs_().amax(dim=-1).cpu()
        moved = (difference <= TOLERANCE).logical_not() & ~is_later  # NaN has moved, too
        if not moved.any():
            continue

        row, position = divmod(int(difference.masked_fill(~moved, -1).argmax()), T)
        cut = int(cuts[row])
        nats = float(difference[row, position])
        moves = partial(
            moves_logits, log_probabilities, original, replaced, expected, row, position, cut
        )
        end = cut + bisect_left(range(cut, T + 1), True, key=moves)
        token = end - 1 if cut < end <= T else None
        return Leak(position, token, nats)
    return None


def moves_logits(
    log_probabilities: Callable[[Tensor], Tensor],
    original: Tensor,
    replaced: Tensor,
    expected: Tensor,
    row: int,
    position: int,
    cut: int,
    end: int,
) -> bool:
    """Whether the logits at a position move if only tokens `cut` to `end` of a row are replaced.

    original, replaced: ids [n, T]. expected: the log-probabilities of the original, [n, T, V].
    """
    ids = original.clone()
    ids[row, cut:end] = replaced[row, cut:end]
    change = log_probabilities(ids)[row, position] - expected[row, position]
    return not bool(change.abs().max() <= TOLERANCE)


def leak_of(model: GPT, tokenizer: Tokenizer, chats: bool) -> str:
    """Why a model (CPU, float32) is not causal, or '', as a few cuts in random ids show.

    It makes as many cuts as there are windows, in 2,048 tokens or two windows. That shows a leak at
    many positions, as an edit by mistake makes it, and takes about a second in `laptop`.
    """
    T = min(model.config.block_size, LONGEST_WINDOW)
    n_cuts = max(2, 2048 // T)
    end = tokenizer.end if chats or model.config.mask_documents else None
    generator = torch.Generator().manual_seed(1)
    windows = torch.randint(len(tokenizer), (n_cuts, T), generator=generator)
    logits = partial(model, end=end, chats=chats)
    leak = find_leak(logits, windows, len(tokenizer), seed=1, n_cuts=n_cuts)
    return "" if leak is None else f"not causal: {leak}; val_loss means nothing"
