"""What stands beside a model's loss: a compressor, an n-gram model, and what was copied.

All work on bytes, uint8 [n].
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from launcher.text.repeats import RUN

ORDER = 5  # of the n-gram model
MOST = 1 << 23  # bytes that it learns from


def as_tensor(content: bytes | bytearray) -> Tensor:
    """The bytes of a text, uint8 [n]. A model may give an empty one, which frombuffer refuses."""
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def xz(content: bytes) -> float:
    """Bits per byte of the text as `xz -9e` packs it, without a header."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    packed = lzma.compress(content, lzma.FORMAT_RAW, filters=filters)
    return 8 * len(packed) / len(content)


def grams(content: Tensor, n: int) -> Tensor:
    """The n-gram that ends at each byte, as one number, int64; before the text are line breaks."""
    padded = F.pad(content.long(), (n - 1, 0), value=ord("\n"))
    codes = torch.zeros(len(content), dtype=torch.int64)
    for first in range(n):
        codes = (codes << 8) | padded[first : first + len(content)]
    return codes


def looked_up(table: Tensor, values: Tensor, wanted: Tensor) -> Tensor:
    """The value of each wanted key in a sorted table, as float64; 0 for those that it lacks."""
    at = torch.searchsorted(table, wanted).clamp_(max=len(table) - 1)
    return torch.where(table[at] == wanted, values[at], 0).double()


def ngram(training: Tensor, content: Tensor) -> float:
    """Bits per byte by an n-gram model of the training text, with Witten-Bell interpolation.

    Each order gives the shorter one as much weight as it has seen different continuations (Chen and
    Goodman 1998, "An Empirical Study of Smoothing Techniques", section 2.4).
    """
    step = -(-len(training) // MOST)
    blocks = training[: len(training) // (step << 16) * (step << 16)].view(-1, step, 1 << 16)
    learned = training if step == 1 else blocks[:, 0].flatten()
    p = torch.full((len(content),), 1 / 256, dtype=torch.float64)
    for n in range(1, ORDER + 1):
        table, counts = grams(learned, n).unique(return_counts=True)
        contexts, where, kinds = (table >> 8).unique_consecutive(True, True)
        totals = torch.zeros(len(contexts), dtype=torch.int64).index_add_(0, where, counts)
        wanted = grams(content, n)
        seen = looked_up(table, counts, wanted)
        total, kind = (looked_up(contexts, each, wanted >> 8) for each in (totals, kinds))
        p = torch.where(total > 0, (seen + kind * p) / (total + kind).clamp_min(1), p)
    return float(-p.log2().mean())


# -- runs that stand in the training text too ------------------------------------------------------

# A polynomial hash modulo 2**64 of random numbers for the bytes; each power has an inverse.
POWER = 0x9E3779B97F4A7C15
TABLE = torch.randint(-(1 << 62), 1 << 62, (256,), generator=torch.Generator().manual_seed(1))
CHUNK = 1 << 22


def signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def hashes(content: Tensor, length: int) -> Tensor:
    """A hash, int64, of each run of `length` bytes, by the place where it begins."""
    factors = torch.full((len(content),), signed(POWER)).cumprod(0)
    back = torch.full((len(content),), signed(pow(POWER, -1, 1 << 64))).cumprod(0)
    sums = F.pad((TABLE[content.int()] * factors).cumsum(0), (1, 0))
    found = sums[length:] - sums[:-length]
    return found * back[: len(found)]


def found_in(training: Tensor, wanted: Tensor, length: int) -> Tensor:
    """Whether the training text has each run of `length` bytes, by its hash: bool."""
    table, places = wanted.unique(return_inverse=True)
    there = torch.zeros(len(table), dtype=torch.bool)
    for begin in range(0, len(training) if len(table) else 0, CHUNK):
        here = hashes(training[begin : begin + CHUNK + length - 1], length)
        at = torch.searchsorted(table, here).clamp_(max=len(table) - 1)
        there[at[table[at] == here]] = True
    return there[places]


def with_one_space(content: Tensor) -> tuple[Tensor, Tensor]:
    """A text with each run of white space as one space, and for each of its bytes whether it is
    the first of such a run, or no white space: uint8 [m], and bool [n]."""
    parts, firsts, before = list[Tensor](), list[Tensor](), False
    for part in content.split(CHUNK):
        is_space = (part == ord(" ")) | ((part >= ord("\t")) & (part <= ord("\r")))
        follows_space = F.pad(is_space[:-1], (1, 0), value=before)
        is_first = ~(is_space & follows_space)
        parts.append(part.masked_fill(is_space, ord(" "))[is_first])
        firsts.append(is_first)
        before = bool(is_space[-1:].any())
    return torch.cat(parts), torch.cat(firsts)


def overlap(training: Tensor, texts: Sequence[Tensor]) -> float:
    """The fraction of bytes in runs of RUN bytes or more that the training text has too.

    Both are compared with each run of white space as one space, which counts as many bytes as it
    has in the text.
    """
    training, _ = with_one_space(training)
    spaced = [with_one_space(text) for text in texts]
    runs, covered = [hashes(text, RUN) for text, _ in spaced], 0
    shared = found_in(training, torch.cat(runs), RUN).long()  # reads the training text once
    for (text, is_first), begins in zip(spaced, shared.split([*map(len, runs)]), strict=True):
        edges = torch.zeros(len(text) + 1, dtype=torch.int64)
        edges[: len(begins)] += begins
        edges[RUN : RUN + len(begins)] -= begins
        is_shared = edges.cumsum(0) > 0
        place_in_spaced = is_first.cumsum(0) - 1  # of each byte of the text
        covered += int(is_shared[place_in_spaced].sum())
    return covered / sum(map(len, texts))


def longest_run(training: Tensor, texts: Sequence[Tensor]) -> int:
    """The bytes of the longest run of any text that the training text has too, with each run of
    white space as one space."""
    training, _ = with_one_space(training)
    texts = [with_one_space(text)[0] for text in texts if len(text)]
    low, high = 0, min(max(map(len, texts), default=0), len(training))
    while low < high:
        length = (low + high + 1) // 2
        wanted = torch.cat([hashes(text, length) for text in texts])
        there = found_in(training, wanted, length).any()
        low, high = (length, high) if there else (low, length - 1)
    return low
