"""Batches, and evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch import Tensor

from .config import Config, derive_seed
from .conversations import IGNORED, Packed
from .text import Corpus, Shards, unsigned

if TYPE_CHECKING:
    from .distributed import Group


class Batches:
    """Training windows. The batch of a step is a pure function of (seed, step).

    Each epoch starts at a random offset, splits the text into adjacent windows, and visits them in
    random order. The few tokens that an epoch leaves out at either end are seen in other epochs.
    Packed conversations are visited row by row.
    """

    def __init__(
        self, tokens: Tensor | Shards | Packed, config: Config, device: torch.device
    ) -> None:
        self.tokens, self.device = tokens, device
        self.block_size, self.batch_size = config.block_size, config.batch_size
        self.seed = config.seed
        self.stride = stride(tokens, config)
        n = len(tokens) - 1  # the last character is only ever a target
        self.windows_per_epoch = max(1, (n - self.block_size + 1) // self.block_size)
        self.offsets = min(self.block_size, n - self.windows_per_epoch * self.block_size + 1)
        if isinstance(tokens, Packed):
            self.windows_per_epoch, self.offsets = len(tokens) // self.stride, 1
        self.epoch, self.starts = -1, torch.empty(0, dtype=torch.long)

    def window_starts(self, step: int) -> Tensor:
        """Where each window of the global batch begins: int64 [batch_size]."""
        parts, index, end = [], step * self.batch_size, (step + 1) * self.batch_size
        while index < end:
            epoch, place = divmod(index, self.windows_per_epoch)
            if epoch != self.epoch:
                generator = torch.Generator().manual_seed(derive_seed(self.seed, "epoch", epoch))
                offset = torch.randint(self.offsets, (), generator=generator)
                order = torch.randperm(self.windows_per_epoch, generator=generator)
                self.epoch, self.starts = epoch, order.mul_(self.stride).add_(offset)
            parts.append(self.starts[place : place + end - index])
            index += len(parts[-1])
        return torch.cat(parts)

    def rows(self, step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        """This rank's slice of the step's batch: inputs and targets, int64 [rows, block_size]."""
        rows = self.batch_size // world_size
        starts = self.window_starts(step)[rank * rows : (rank + 1) * rows]
        return gather_windows(self.tokens, starts, self.block_size, self.device)


def stride(tokens: Tensor | Shards | Packed, config: Config) -> int:
    """Tokens between the starts of adjacent windows.

    That is block_size for text, where the last target of a window is the first input of the next,
    and one more for packed rows.
    """
    return config.block_size + isinstance(tokens, Packed)


def gather_windows(
    tokens: Tensor | Shards | Packed, starts: Tensor, block_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the windows at `starts` [n]: int64 [n, block_size] on the device."""
    windows = tokens[starts[:, None] + torch.arange(block_size + 1)]
    pinned = device.type == "cuda"  # then the host does not wait for the copy
    windows = (windows.pin_memory() if pinned else windows).to(device, non_blocking=pinned)
    if isinstance(tokens, Packed):
        ids = torch.where(windows < 0, ~windows, windows).long()
        return ids[:, :-1], ids.masked_fill(windows < 0, IGNORED)[:, 1:]
    windows = unsigned(windows)
    return windows[:, :-1], windows[:, 1:]


def eval_windows(val: Tensor | Shards | Packed, config: Config) -> tuple[Tensor, ...]:
    """Where the windows of an evaluation begin, in chunks. They are spread evenly, not overlapping.

    There is at least one, and the chunks do not depend on the number of ranks.
    """
    step = stride(val, config)
    available = (len(val) - (step == config.block_size)) // step
    limit = max(1, config.eval_tokens // config.block_size) if config.eval_tokens else available
    count = min(limit, available)
    starts = torch.arange(count) * available // count * step
    return starts.split(max(1, 8192 // config.block_size))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    val: Tensor | Shards | Packed,
    config: Config,
    group: Group,
    end: int | None = None,
) -> float:
    """Mean loss in nats per learned token over eval_windows; end is as in GPT.forward.

    Each chunk is computed by one rank, and the chunks are added up in order, so any number of
    ranks gets the same loss from the same weights.
    """
    chunks = eval_windows(val, config)
    if isinstance(val, Packed):
        counts = [int(val.learned[chunk // stride(val, config)].sum()) for chunk in chunks]
    else:
        counts = [len(chunk) for chunk in chunks]
    losses = torch.zeros(len(chunks), dtype=torch.float32, device=group.device)
    model.eval()
    for index in range(group.rank, len(chunks), group.world_size):
        x, y = gather_windows(val, chunks[index], config.block_size, group.device)
        losses[index] = model(x, y, end=end, chats=isinstance(val, Packed))
    model.train()
    per_chunk = group.sum_(losses).tolist()
    return sum(loss * n for loss, n in zip(per_chunk, counts, strict=True)) / sum(counts)


def bytes_per_token(corpus: Corpus, config: Config) -> float:
    """The mean number of UTF-8 bytes per token that an evaluation predicts and that is learned.

    End-of-document tokens count zero bytes, but their loss still counts.
    """
    lengths = torch.tensor([len(word) for word in corpus.tokenizer.words])
    chunks = eval_windows(corpus.val, config)
    cpu = torch.device("cpu")
    targets = (gather_windows(corpus.val, c, config.block_size, cpu)[1] for c in chunks)
    if isinstance(corpus.val, Packed):
        learned = torch.cat([lengths[ids[ids >= 0]] for ids in targets])
        return learned.double().mean().item()
    means = [(lengths[ids].double().mean().item(), len(ids)) for ids in targets]
    return sum(mean * n for mean, n in means) / sum(n for _, n in means)
