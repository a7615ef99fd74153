"""Check that each loss depends only on the text before its token: compute it without the rest.

One process scores whole windows, so its model could see each token that it has to predict, or learn
from the windows before. A second process then gets parts of the same windows. Each part is cut at a
secret position, and random ids follow. Its losses have to equal the losses of the first process.
The second process has not seen the token at the cut, nor the text behind it. So it can agree with
the first process only if the first process did not use them. A model gains nothing if it knows in
which process it is: in the first it does not know where the cuts will be, and in the second it does
not know the text behind.
"""

from __future__ import annotations

import math
import secrets
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from sm_nanogpt.entry_point.causality import MIN_LOG_PROBABILITY, TOLERANCE, find_leak
from sm_nanogpt.entry_point.conversations import IGNORED
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.files.progress import Progress, no_progress
from sm_nanogpt.launcher.judge.score import cut_windows, nats_of
from sm_nanogpt.launcher.judge.texts import EncodedDocument
from sm_nanogpt.launcher.judge.worker import Worker

# So many cuts check a model that an edited folder computes. If it looks ahead at one of 2,000
# positions and gains 10 nats at each, it gains 0.005 nats. These cuts miss it in one of 1,000
# evaluations.
TOTAL_CUTS = 14_336
MAX_LANES = 64
MIN_LANE_LENGTH = 8  # windows
# So many first rows come one by one, while the process has seen little of the text.
MIN_SINGLE_ROWS = 64
MAX_ROUNDING_NATS = 1e-3  # nats by which a loss may differ
MAX_RELATIVE_ROUNDING = 1e-5  # the share of a large loss by which it may differ


class NotCausal(ServiceError):
    """The losses of a model depend on later tokens, or on other windows."""


@dataclass(frozen=True)
class Cut:
    """The first `length` ids of a window, whose losses are computed again.

    The last token that they have to predict follows them in the text.
    """

    window: int  # its index
    length: int


def draw_cuts(positions: Sequence[range], n_cuts: int, rng: Random) -> list[list[Cut]]:
    """Draw cuts behind random positions; return those of each window, the shortest first.

    positions has, for each window, the positions whose losses count. The positions of all windows,
    one after the other, are divided into n_cuts equal strata, or one for each position. One random
    position of each stratum gets a cut.
    """
    starts = [0, *accumulate(map(len, positions))]  # where the positions of each window begin
    n_positions = starts[-1]
    n_strata = min(n_cuts, n_positions)
    edges = [n_positions * stratum // n_strata for stratum in range(n_strata + 1)]
    cuts: list[list[Cut]] = [[] for _ in positions]
    for begin, end in pairwise(edges):
        index = rng.randrange(begin, end)  # among the positions of all windows
        window = bisect_right(starts, index) - 1
        position = positions[window][index - starts[window]]
        cuts[window].append(Cut(window, length=position + 1))
    return cuts


def in_passes(cuts: Sequence[Sequence[Cut]], rng: Random) -> Iterator[list[Cut]]:
    """Yield the cuts of all windows in passes. No pass shows a token that a later pass predicts.

    The order of the windows is rotated to a random first one, and divided into lanes. A pass takes
    one cut of each lane. In a lane, windows follow each other as in the text, and each window
    begins with its shortest cut. Only the text behind the last window of a lane was shown before,
    in another lane, and the model cannot know which window is the last.
    """
    begin = rng.randrange(len(cuts))
    rotated = [*cuts[begin:], *cuts[:begin]]
    n_lanes = max(1, min(MAX_LANES, len(cuts) // MIN_LANE_LENGTH))
    lane_length = math.ceil(len(cuts) / n_lanes)
    lanes = [rotated[first : first + lane_length] for first in range(0, len(cuts), lane_length)]
    n_single = 0
    # zip_longest gives the cuts of one window of each lane, and then one cut of each window.
    for cuts_of_windows in zip_longest(*lanes, fillvalue=()):
        for next_cuts in zip_longest(*cuts_of_windows):
            cuts_of_pass = [cut for cut in next_cuts if cut is not None]
            if n_single < MIN_SINGLE_ROWS:
                n_single += len(cuts_of_pass)
                yield from ([cut] for cut in cuts_of_pass)
            else:
                yield cuts_of_pass


@dataclass(frozen=True)
class ScoredWindow:
    """A window with its losses, as the first process computed them.

    ids, and targets, the token that follows each id, are int64 [T]. positions are the indices of
    the targets whose losses count, and nats are the losses there, float64 [len(positions)].
    """

    ids: Tensor
    targets: Tensor
    positions: range
    nats: Tensor


def scored_windows(
    worker: Worker, encoded: Sequence[EncodedDocument], nats: Sequence[Tensor]
) -> list[ScoredWindow]:
    """The windows of the documents, with their losses.

    nats has the losses of the tokens of each document, by the first process, float64 [n].
    """
    windows = cut_windows(encoded, worker.tokenizer.start, worker.block_size)
    counts = [int((window.targets != IGNORED).sum()) for window in windows]
    nats_of_windows = torch.cat([*nats]).split(counts)
    scored = []
    for window, counted in zip(windows, nats_of_windows, strict=True):
        length = len(window.ids)
        positions = range(length - len(counted), length)
        scored.append(ScoredWindow(window.ids, window.targets, positions, counted))
    return scored


def check_causal(
    worker: Worker,
    encoded: Sequence[EncodedDocument],
    nats: Sequence[Tensor],
    n_cuts: int,
    progress: Progress = no_progress,
) -> int:
    """Compute losses again, in the process of `worker`, at random cuts; return the number of cuts.

    nats has, for each document, the losses of its tokens by an earlier process, float64 [n]. Raises
    NotCausal if a loss differs.
    """
    rng = secrets.SystemRandom()
    windows = scored_windows(worker, encoded, nats)
    cuts = draw_cuts([window.positions for window in windows], n_cuts, rng)
    longest = max(len(window.ids) for window in windows)
    depends_on_length = logits_depend_on_length(worker, longest)
    for cuts_of_pass in in_passes(cuts, rng):
        lengths = [cut.length for cut in cuts_of_pass]
        if depends_on_length:
            lengths = [worker.row_length(len(windows[cut.window].ids)) for cut in cuts_of_pass]
        for indices in worker.batches(lengths, are_equal=depends_on_length):
            batch = [cuts_of_pass[index] for index in indices]
            difference = find_difference(worker, windows, batch, lengths[indices[0]])
            if difference is not None:
                raise NotCausal(f"not causal: {explain_difference(worker, encoded, difference)}")
        progress(len(cuts_of_pass))
    return sum(map(len, cuts))


def logits_depend_on_length(worker: Worker, longest: int) -> bool:
    """True if logits depend on the length of their row by more than float32 rounds.

    Those of a model in bfloat16 do. Then each row has to be as long as the window that was scored.
    The worker gets rows of random ids of up to `longest` for this. To repeat cuts instead would
    show the model that its first answer was wrong.
    """

    def scores(ids: Tensor) -> Tensor:
        return worker.logits(ids).log_softmax(-1).clamp_min(MIN_LOG_PROBABILITY)

    ids = torch.randint(len(worker.tokenizer), (1, longest))
    expected = scores(ids)
    for length in {longest // 8, longest // 3, longest // 2} - {0}:
        difference = (scores(ids[:, :length]) - expected[:, :length]).abs().max()
        # A difference of NaN is not at most TOLERANCE.
        if not difference <= TOLERANCE:
            return True
    return False


def find_difference(
    worker: Worker, windows: Sequence[ScoredWindow], cuts: Sequence[Cut], length: int
) -> float | None:
    """Compare the losses at cuts with the losses of whole windows, of another process.

    The worker gets rows of `length` ids. If a cut differs by more than rounding, returns the
    largest difference of the first such cut, in nats; else None.
    """
    logits = worker.logits(rows_of_cuts(cuts, windows, len(worker.tokenizer), length))
    targets = [windows[cut.window].targets[: cut.length] for cut in cuts]
    for cut, losses in zip(cuts, nats_of(logits, targets), strict=True):
        expected = windows[cut.window].nats[: len(losses)]
        difference = (losses - expected).abs()
        agrees = difference <= MAX_ROUNDING_NATS + MAX_RELATIVE_ROUNDING * expected  # NaN does not
        if not agrees.all():
            return float(difference.max())
    return None


def rows_of_cuts(
    cuts: Sequence[Cut], windows: Sequence[ScoredWindow], vocabulary_size: int, length: int
) -> Tensor:
    """A row for each cut, int64 [n, length]: the ids of the cut, and random ids behind them.

    The first random id is never the token that follows in the text, at which a model that looks
    ahead would look.
    """
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    rows = torch.randint(vocabulary_size, (len(cuts), length), generator=generator)
    for row, cut in zip(rows, cuts, strict=True):
        window = windows[cut.window]
        row[: cut.length] = window.ids[: cut.length]
        following = window.targets[cut.length - 1]
        if cut.length < length and row[cut.length] == following:
            row[cut.length] = (following + 1) % vocabulary_size
    return rows


def explain_difference(
    worker: Worker, encoded: Sequence[EncodedDocument], difference: float
) -> str:
    """The message for losses that differ by so many nats.

    It names the position that looks ahead, if find_leak finds one.
    """
    rows = rows_of_text(worker, encoded)
    leak = find_leak(worker.logits, rows, len(worker.tokenizer), seed=secrets.randbits(32))
    cause = f"losses depend on other windows, or on later tokens (by {difference:.2g} nats)"
    if leak is not None and leak.token is not None:  # else no single token explains the difference
        cause = str(leak)
    return f"{cause}; its val_loss means nothing"


def rows_of_text(worker: Worker, encoded: Sequence[EncodedDocument]) -> Tensor:
    """All documents, one after the other, in rows as long as the model's context, int64 [n, T].

    There are at least 2 rows: a short text is repeated.
    """
    start = worker.tokenizer.start
    ids = torch.cat([F.pad(document.ids, (1, 0), value=start) for document in encoded])
    length = worker.block_size
    n_rows = max(2, len(ids) // length)
    n_repeats = math.ceil(n_rows * length / len(ids))
    return ids.repeat(n_repeats)[: n_rows * length].view(n_rows, length)
