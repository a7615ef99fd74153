"""What a batch is, and what an evaluation is."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import torch
import torch.nn as nn
from torch import Tensor

from .config import Config, derive_seed
from .conversations import IGNORED, Packed
from .distributed import Group
from .text import Corpus, Ids, Shards, unsigned

NEIGHBORS = 1 << 16  # windows read from one place: 128 MB where each has 1024 tokens of 2 bytes
SHUFFLED = 16 * NEIGHBORS  # windows that are shuffled at once; their order takes 8 MB


class Batches:
    """Training windows. The batch of a step is a pure function of (seed, step).

    Each epoch starts at a random offset, splits the text into adjacent windows, and visits each
    once, in random order. The few tokens that an epoch leaves out at either end are seen in other
    epochs. A text of more than SHUFFLED windows is shuffled by pieces first, and then within a pool
    of 16 of them, so that a disk reads a few places at a time. Packed conversations are visited row
    by row.
    """

    def __init__(self, tokens: Ids, config: Config, device: torch.device) -> None:
        self.tokens = tokens
        self.device = device
        self.block_size = config.block_size
        self.batch_size = config.batch_size
        self.seed = config.seed
        self.stride = stride(tokens, config)
        if isinstance(tokens, Packed):
            self.windows_per_epoch = len(tokens) // self.stride
            self.offsets = 1
        else:
            n_inputs = len(tokens) - 1  # the last token is only ever a target
            n_windows = max(1, (n_inputs - self.block_size + 1) // self.block_size)
            self.windows_per_epoch = n_windows
            self.offsets = min(self.block_size, n_inputs - n_windows * self.block_size + 1)
        self.newest = lru_cache(1)(self.shuffled)
        self.thread = ThreadPoolExecutor(1)  # it begins with its first call
        self.pending: dict[tuple[int, int, int], Future[Tensor]] = {}

    def rows(self, step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        """This rank's slice of the step's batch: inputs and targets, int64 [rows, block_size]."""
        if isinstance(self.tokens, Shards):
            windows = self.read_ahead(step, rank, world_size)
        else:
            windows = self.read(step, rank, world_size)
        return inputs_and_targets(windows, self.device)

    def read(self, step: int, rank: int, world_size: int) -> Tensor:
        """The ids of these rows, as they are stored: [rows, block_size + 1]."""
        rows = self.batch_size // world_size
        starts = self.window_starts(step)[rank * rows : (rank + 1) * rows]
        return read_windows(self.tokens, starts, self.block_size)

    def read_ahead(self, step: int, rank: int, world_size: int) -> Tensor:
        """As `read`. A thread goes on to read the rows of the next step while this one computes.

        It makes no CUDA call, which would break the recording of a graph. What it raises is raised
        in the step that needs the rows.
        """
        reading = self.pending.get((step, rank, world_size))
        if reading is None:
            reading = self.thread.submit(self.read, step, rank, world_size)
        next_reading = self.thread.submit(self.read, step + 1, rank, world_size)
        self.pending = {(step + 1, rank, world_size): next_reading}
        return reading.result()

    def window_starts(self, step: int) -> Tensor:
        """Where each window of the global batch begins: int64 [batch_size]."""
        parts = []
        index, end = step * self.batch_size, (step + 1) * self.batch_size
        while index < end:
            epoch, index_in_epoch = divmod(index, self.windows_per_epoch)
            pool, index_in_pool = divmod(index_in_epoch, SHUFFLED)
            part = self.newest(epoch, pool)[index_in_pool : index_in_pool + end - index]
            parts.append(part)
            index += len(part)
        return torch.cat(parts)

    def shuffled(self, epoch: int, pool: int) -> Tensor:
        """Where the windows of a pool begin, in random order: int64 [at most SHUFFLED]."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "epoch", epoch))
        offset = torch.randint(self.offsets, (), generator=generator)
        n_windows = self.windows_per_epoch
        if n_windows <= SHUFFLED:
            windows = torch.arange(n_windows)
        else:
            windows = self.windows_of_pool(pool, generator)
            generator.manual_seed(derive_seed(self.seed, "epoch", epoch, pool))
        order = torch.randperm(len(windows), generator=generator)
        return windows[order] * self.stride + offset

    def windows_of_pool(self, pool: int, generator: torch.Generator) -> Tensor:
        """The numbers of a pool's windows, in order within each piece: int64 [at most SHUFFLED].

        The pieces begin at a random window, and the last of them, which comes last, may be short.
        """
        n_windows = self.windows_per_epoch
        n_whole = n_windows // NEIGHBORS
        first = torch.randint(n_windows, (), generator=generator)
        pieces = torch.randperm(n_whole, generator=generator)
        pieces = torch.cat([pieces, torch.tensor([n_whole])])
        pieces_per_pool = SHUFFLED // NEIGHBORS
        pieces = pieces[pool * pieces_per_pool : (pool + 1) * pieces_per_pool]
        windows = (pieces[:, None] * NEIGHBORS + torch.arange(NEIGHBORS)).flatten()
        return (windows[windows < n_windows] + first) % n_windows


def stride(tokens: Ids, config: Config) -> int:
    """Tokens from one window to the next: in text they share one, and packed rows share none."""
    if isinstance(tokens, Packed):
        return config.block_size + 1
    return config.block_size


def read_windows(tokens: Ids, starts: Tensor, block_size: int) -> Tensor:
    """The ids from each of `starts` [n] on, as they are stored: [n, block_size + 1]."""
    length = block_size + 1
    if isinstance(tokens, Shards):
        return torch.stack([tokens[start : start + length] for start in starts.tolist()])
    all_windows = tokens[0 : len(tokens)].unfold(0, length, 1)  # a view
    return all_windows.index_select(0, starts)


def inputs_and_targets(windows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The inputs and targets of stored windows: int64 [n, block_size] on the device."""
    if device.type == "cuda":  # the host does not wait for the copy
        windows = windows.pin_memory().to(device, non_blocking=True)
    else:
        windows = windows.to(device)
    ids = unsigned(windows)
    if windows.dtype != torch.int32:
        return ids[:, :-1], ids[:, 1:]
    ignored = ids < 0  # conversations have ~id for what is not learned
    inputs = torch.where(ignored, ~ids, ids)[:, :-1]
    targets = ids.masked_fill(ignored, IGNORED)[:, 1:]
    return inputs, targets


def eval_windows(val: Ids, config: Config) -> tuple[Tensor, ...]:
    """Where the windows of an evaluation begin, in chunks. They are spread evenly, not overlapping.

    There is at least one, and the chunks do not depend on the number of ranks.
    """
    step = stride(val, config)
    # The last token of a text is only ever a target.
    n_ids = len(val) if isinstance(val, Packed) else len(val) - 1
    available = n_ids // step
    count = available
    if config.eval_tokens:
        count = min(available, max(1, config.eval_tokens // config.block_size))
    starts = torch.arange(count) * available // count * step
    return starts.split(max(1, 8192 // config.block_size))


@torch.no_grad()
def evaluate(
    model: nn.Module, val: Ids, config: Config, group: Group, end: int | None = None
) -> float:
    """Mean loss in nats per learned token of the eval_windows; end is as in GPT.forward.

    Each chunk is computed by one rank, and the chunks are added up in order, so any number of
    ranks gets the same loss from the same weights.
    """
    chunks = eval_windows(val, config)
    sums = torch.zeros(2, len(chunks), device=group.device)
    model.eval()
    for first in range(0, len(chunks), group.world_size):
        group.heartbeat()  # of every rank, also of one that the last chunks do not reach
        index = first + group.rank
        if index < len(chunks):
            windows = read_windows(val, chunks[index], config.block_size)
            x, y = inputs_and_targets(windows, group.device)
            sums[0, index] = model(x, y, end=end, chats=isinstance(val, Packed))
            sums[1, index] = (y != IGNORED).sum()
    model.train()
    losses, counts = group.sum_(sums).tolist()
    total = sum(loss * n for loss, n in zip(losses, counts, strict=True))
    return float(total / sum(counts))


def bytes_per_token(corpus: Corpus, config: Config) -> float:
    """The mean number of UTF-8 bytes of the learned tokens of the eval_windows.

    End-of-document tokens count zero bytes, but their loss still counts.
    """
    lengths = torch.tensor([len(word) for word in corpus.tokenizer.words])
    n_bytes = 0
    n_tokens = 0
    for starts in eval_windows(corpus.val, config):
        windows = read_windows(corpus.val, starts, config.block_size)
        _, targets = inputs_and_targets(windows, torch.device("cpu"))
        learned = targets[targets != IGNORED]
        n_bytes += int(lengths[learned].sum())
        n_tokens += len(learned)
    return n_bytes / n_tokens
