"""Numbers to compare a model's loss with: a compressor, an n-gram model, and what was copied.

All functions work on bytes, uint8 [n].
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sm_nanogpt.launcher.text.repeats import RUN_BYTES

NGRAM_ORDER = 5  # the largest n of an n-gram
LEARNED_BYTES = 1 << 23  # bytes of the training text from which the n-gram model learns
BLOCK_BYTES = 1 << 16  # bytes of a block that is sampled from a longer text


def as_tensor(content: bytes | bytearray) -> Tensor:
    """The bytes of a text, uint8 [n]."""
    if not content:  # a model may write an empty text, which frombuffer refuses
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def xz_bits_per_byte(content: bytes) -> float:
    """Bits per byte of a text that `xz -9e` packs. The header of the file does not count."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    packed = lzma.compress(content, lzma.FORMAT_RAW, filters=filters)
    return 8 * len(packed) / len(content)


def grams(content: Tensor, n: int) -> Tensor:
    """The n-gram that ends at each byte, as one number, int64 [len(content)].

    The text counts as if line breaks came before it.
    """
    padded = F.pad(content.long(), (n - 1, 0), value=ord("\n"))
    codes = torch.zeros(len(content), dtype=torch.int64)
    for first in range(n):
        codes = (codes << 8) | padded[first : first + len(content)]
    return codes


def look_up(keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    """The value of each query in a table with sorted keys, float64; 0 if the table lacks it."""
    index = torch.searchsorted(keys, queries).clamp_(max=len(keys) - 1)
    return torch.where(keys[index] == queries, values[index], 0).double()


def sample_blocks(training: Tensor) -> Tensor:
    """The text, if it has at most LEARNED_BYTES; else blocks of it at equal distances."""
    n_parts = math.ceil(len(training) / LEARNED_BYTES)
    if n_parts == 1:
        return training
    distance = n_parts * BLOCK_BYTES
    n_blocks = len(training) // distance
    return training[: n_blocks * distance].view(n_blocks, distance)[:, :BLOCK_BYTES].flatten()


def ngram_bits_per_byte(training: Tensor, content: Tensor) -> float:
    """Bits per byte of an n-gram model of the training text on a text.

    Orders are interpolated as by Witten and Bell: the more different continuations a context has,
    the more weight the next shorter context gets (Chen and Goodman 1998, "An Empirical Study of
    Smoothing Techniques", section 2.4).
    """
    learned = sample_blocks(training)
    p = torch.full((len(content),), 1 / 256, dtype=torch.float64)
    for n in range(1, NGRAM_ORDER + 1):
        keys, counts = grams(learned, n).unique(return_counts=True)
        contexts, context_of_gram, continuations = (keys >> 8).unique_consecutive(True, True)
        totals = torch.zeros(len(contexts), dtype=torch.int64)
        totals.index_add_(0, context_of_gram, counts)

        gram = grams(content, n)
        context = gram >> 8
        count = look_up(keys, counts, gram)
        total = look_up(contexts, totals, context)
        n_kinds = look_up(contexts, continuations, context)  # of bytes that follow the context
        interpolated = (count + n_kinds * p) / (total + n_kinds).clamp_min(1)
        p = torch.where(total > 0, interpolated, p)
    return float(-p.log2().mean())


# -- runs of bytes that the training text contains -------------------------------------------------

# The hash of a run is a polynomial modulo 2**64, with a random number for each value of a byte.
# HASH_BASE is odd, so that each of its powers has an inverse.
HASH_BASE = 0x9E3779B97F4A7C15
GENERATOR = torch.Generator().manual_seed(1)
BYTE_CODES = torch.randint(-(1 << 62), 1 << 62, (256,), generator=GENERATOR)
CHUNK_BYTES = 1 << 22  # bytes that are hashed at once


def powers(base: int, n: int) -> Tensor:
    """The first n powers of a number, modulo 2**64, as signed integers, int64 [n]."""
    signed = base - (1 << 64) if base >> 63 else base
    return torch.full((n,), signed).cumprod(0)


def hashes(content: Tensor, length: int) -> Tensor:
    """The hash of each run of `length` bytes, in the order of their beginnings, int64."""
    inverse = pow(HASH_BASE, -1, 1 << 64)
    terms = BYTE_CODES[content.int()] * powers(HASH_BASE, len(content))
    sums = F.pad(terms.cumsum(0), (1, 0))
    sums_of_runs = sums[length:] - sums[:-length]
    return sums_of_runs * powers(inverse, len(sums_of_runs))


def contains_hashes(training: Tensor, queries: Tensor, length: int) -> Tensor:
    """For each hash of a run of `length` bytes, True if the training text contains such a run.

    Returns bool [len(queries)].
    """
    keys, key_of_query = queries.unique(return_inverse=True)
    is_found = torch.zeros(len(keys), dtype=torch.bool)
    if not len(keys):
        return is_found
    for begin in range(0, len(training), CHUNK_BYTES):
        run_hashes = hashes(training[begin : begin + CHUNK_BYTES + length - 1], length)
        index = torch.searchsorted(keys, run_hashes).clamp_(max=len(keys) - 1)
        is_key = keys[index] == run_hashes
        is_found[index[is_key]] = True
    return is_found[key_of_query]


def with_one_space(content: Tensor) -> tuple[Tensor, Tensor]:
    """Replace each run of white space in a text [n] by one space; return uint8 [m].

    Also returns, for each byte of the original text, True if the result has the byte, or the space
    that replaces it, bool [n].
    """
    parts = []
    is_kept = []
    follows_space = False
    for part in content.split(CHUNK_BYTES):
        is_space = (part == ord(" ")) | ((part >= ord("\t")) & (part <= ord("\r")))
        is_repeated = is_space & F.pad(is_space[:-1], (1, 0), value=follows_space)
        parts.append(part.masked_fill(is_space, ord(" "))[~is_repeated])
        is_kept.append(~is_repeated)
        follows_space = bool(is_space[-1:].any())
    return torch.cat(parts), torch.cat(is_kept)


def shared_fraction(training: Tensor, texts: Sequence[Tensor]) -> float:
    """The fraction of the bytes of the texts, 0 to 1, that the training text also contains.

    A byte counts if it lies in a shared run of at least RUN_BYTES. Before the comparison, each run
    of white space becomes one space, but the fraction counts all bytes of the run.
    """
    training, _ = with_one_space(training)
    normalized_texts = [with_one_space(text) for text in texts]
    run_hashes = [hashes(text, RUN_BYTES) for text, _ in normalized_texts]
    # One call for all texts, as it reads the training text once.
    is_shared_run = contains_hashes(training, torch.cat(run_hashes), RUN_BYTES)  # by its begin
    begins_of_texts = is_shared_run.split([len(text_hashes) for text_hashes in run_hashes])

    n_shared = 0
    for (text, is_kept), begins in zip(normalized_texts, begins_of_texts, strict=True):
        is_shared = is_in_run(begins, len(text))
        normalized_index = is_kept.cumsum(0) - 1  # for each byte of the original text
        n_shared += int(is_shared[normalized_index].sum())
    return n_shared / sum(map(len, texts))


def is_in_run(begins: Tensor, n_bytes: int) -> Tensor:
    """For each of n_bytes bytes, True if a run of RUN_BYTES contains it, bool [n_bytes].

    begins: for each byte at which a run may begin, True if one does.
    """
    # A run adds 1 to the depth at its first byte, and takes it back after its last.
    depth_changes = torch.zeros(n_bytes + 1, dtype=torch.int64)
    depth_changes[: len(begins)] += begins.long()
    depth_changes[RUN_BYTES : RUN_BYTES + len(begins)] -= begins.long()
    return depth_changes[:n_bytes].cumsum(0) > 0


def longest_copy(training: Tensor, samples: Sequence[str]) -> int:
    """The number of bytes of the longest run of any sample that the training text contains.

    Samples are compared after each run of white space is replaced by one space.
    """
    training, _ = with_one_space(training)
    texts = [with_one_space(as_tensor(sample.encode()))[0] for sample in samples if sample]
    longest_text = max(map(len, texts), default=0)
    low = 0  # a run of so many bytes is shared
    high = min(longest_text, len(training))  # no longer run is shared
    while low < high:
        length = (low + high + 1) // 2
        run_hashes = torch.cat([hashes(text, length) for text in texts])
        if contains_hashes(training, run_hashes, length).any():
            low = length
        else:
            high = length - 1
    return low
