"""Whether losses come from the text before each token alone: they are computed again without it.

One process scores whole windows, so its model could see each token that it has to predict, or learn
from the windows before. Another process then gets parts of the same windows. Each part is cut at a
secret position and ends in random ids, and its losses have to be those of the first process. This
process has not seen the token at the cut, nor what follows it in the text, so it can agree only if
the first one did not use them. It does not help a model to know which process it is in: the one
that scores cannot know where the other will be asked, and the other cannot know the answer.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from random import Random

import torch
from torch import Tensor

from entry_point.causality import LEAST, TOLERANCE, find_leak
from entry_point.conversations import IGNORED
from launcher.errors import ServiceError
from launcher.files.progress import Progress
from launcher.judge.score import nats_of, windows
from launcher.judge.texts import Encoded
from launcher.judge.worker import Worker

# Cuts of a model that an edited folder computes. If it looks ahead at one of 2,000 positions, which
# gains 0.005 nats if each gains 10, they miss it in one of 1,000 evaluations. The packaged model
# does what this repository says; there, a few show that nothing is broken.
CUTS, PACKAGED_CUTS = 14_336, 512
LANES, LANE_LENGTH = 64, 8  # at most so many lanes, of at least so many windows
ALONE = 64  # rows that come one by one, before the process has seen much of the text
ROUNDING, RELATIVE = 1e-3, 1e-5  # nats by which a loss may differ, and the share of a large one


class NotCausal(ServiceError):
    """Losses depend on later tokens, or on other windows."""


@dataclass(frozen=True)
class Cut:
    """A part of a window that is computed again: its first `length` ids. The token that follows
    them in the text is the last that the part has to predict."""

    window: int
    length: int


def draw_cuts(scored: Sequence[range], n_cuts: int, chance: Random) -> list[list[Cut]]:
    """The cuts of each window, the shortest first.

    `scored` has the positions of each window whose losses count. All of them together are divided
    into equal strata; a random position of each has a cut.
    """
    n_positions = sum(map(len, scored))
    n_strata = min(n_cuts, n_positions)
    edges = [n_positions * stratum // n_strata for stratum in range(n_strata + 1)]
    ends = list(accumulate(map(len, scored)))
    cuts: list[list[Cut]] = [[] for _ in scored]
    for drawn in map(chance.randrange, edges, edges[1:]):
        window = bisect_right(ends, drawn)
        from_end = ends[window] - drawn
        cuts[window].append(Cut(window, scored[window].stop - from_end + 1))
    return cuts


def in_passes(cuts: Sequence[Sequence[Cut]], chance: Random) -> Iterator[list[Cut]]:
    """The cuts of all windows in passes, none of which shows what a later one has to predict.

    The windows, from a random one on, are divided into lanes, and a pass takes a cut of each lane.
    In a lane, windows follow each other as in the text, each with its shortest cut first. Only the
    last window of a lane is followed by one that was shown before, and where that is, is secret.
    """
    begin = chance.randrange(len(cuts))
    rotated = [*cuts[begin:], *cuts[:begin]]
    n_lanes = max(1, min(LANES, len(cuts) // LANE_LENGTH))
    lane_length = -(-len(cuts) // n_lanes)
    lanes = [rotated[at : at + lane_length] for at in range(0, len(cuts), lane_length)]
    n_alone = 0
    for windows_of_lanes in zip_longest(*lanes, fillvalue=()):
        for column in zip_longest(*windows_of_lanes):
            together = [cut for cut in column if cut is not None]
            if n_alone < ALONE:
                n_alone += len(together)
                yield from ([cut] for cut in together)
            else:
                yield together


@dataclass(frozen=True)
class Scored:
    """A window that the first process scored: its ids and the tokens that follow each, int64 [T],
    the positions whose losses count, and these losses, float64."""

    ids: Tensor
    targets: Tensor
    positions: range
    nats: Tensor


def scored_windows(
    other: Worker, encoded: Sequence[Encoded], nats: Sequence[Tensor]
) -> list[Scored]:
    parts = windows(encoded, other.tokenizer.start, other.block_size)
    counts = [int((targets != IGNORED).sum()) for _, targets in parts]
    losses = torch.cat([*nats]).split(counts)
    return [
        Scored(ids, targets, range(len(ids) - len(own), len(ids)), own)
        for (ids, targets), own in zip(parts, losses, strict=True)
    ]


def check_causal(
    other: Worker,
    encoded: Sequence[Encoded],
    nats: Sequence[Tensor],
    n_cuts: int = CUTS,
    progress: Progress = lambda n: None,
) -> int:
    """Compute losses again in another process, without what follows; returns the number of cuts.

    nats has the losses of each token of each document, float64 [n], as the first process gave them.
    Raises NotCausal if a loss differs.
    """
    chance = secrets.SystemRandom()
    scored = scored_windows(other, encoded, nats)
    cuts = draw_cuts([window.positions for window in scored], n_cuts, chance)
    longest = max(len(window.ids) for window in scored)
    length = longest if rounds_by_length(other, longest) else 1
    for together in in_passes(cuts, chance):
        for indices in other.batches([max(length, cut.length) for cut in together]):
            compare(other, encoded, scored, [together[index] for index in indices], length)
        progress(len(together))
    return sum(map(len, cuts))


def rounds_by_length(other: Worker, longest: int) -> bool:
    """Whether the logits of a row change with the length of what follows by more than float32
    rounds, as those of bfloat16 do: then rows have to be as long as those that were scored.

    It asks for rows of random ids. If cuts were asked for twice instead, the second request would
    tell the model that its first answer was wrong.
    """

    def scores(ids: Tensor) -> Tensor:
        return other.logits(ids).log_softmax(-1).clamp_min(LEAST)

    ids = torch.randint(len(other.tokenizer), (1, longest))
    whole = scores(ids)
    for part in {longest // 8, longest // 3, longest // 2} - {0}:
        difference = (scores(ids[:, :part]) - whole[:, :part]).abs().max()
        if not difference <= TOLERANCE:
            return True
    return False


def compare(
    other: Worker,
    encoded: Sequence[Encoded],
    scored: Sequence[Scored],
    cuts: Sequence[Cut],
    length: int,
) -> None:
    """Raise NotCausal if a loss of these cuts, in rows of at least this length, is another."""
    logits = other.logits(filled(cuts, scored, len(other.tokenizer), length))
    targets = [scored[cut.window].targets[: cut.length] for cut in cuts]
    for cut, losses in zip(cuts, nats_of(logits, targets), strict=True):
        expected = scored[cut.window].nats[: len(losses)]
        difference = (losses - expected).abs()
        if not bool((difference <= ROUNDING + RELATIVE * expected).all()):  # NaN is not
            raise NotCausal(f"not causal: {reason(other, encoded, float(difference.max()))}")


def filled(cuts: Sequence[Cut], scored: Sequence[Scored], vocabulary: int, length: int) -> Tensor:
    """The ids of the cuts, int64 [n, T], with random ones after each.

    The first of these is not the token that follows in the text, which a model that looks ahead
    would else find there.
    """
    longest = max(length, *(cut.length for cut in cuts))
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    table = torch.randint(vocabulary, (len(cuts), longest), generator=generator)
    for row, cut in zip(table, cuts, strict=True):
        window = scored[cut.window]
        row[: cut.length] = window.ids[: cut.length]
        following = window.targets[cut.length - 1]
        if cut.length < longest and row[cut.length] == following:
            row[cut.length] = (following + 1) % vocabulary
    return table


def reason(other: Worker, encoded: Sequence[Encoded], nats: float) -> str:
    """Why losses differ by so many nats: the position that looks ahead, if one is found."""
    start = torch.tensor([other.tokenizer.start])
    ids = torch.cat([part for document in encoded for part in (start, document.ids)])
    size = other.block_size
    n_rows = max(2, len(ids) // size)
    rows = ids.repeat(-(-n_rows * size // len(ids)))[: n_rows * size].view(n_rows, size)
    leak = find_leak(other.logits, rows, len(other.tokenizer), secrets.randbits(32))
    cause = f"losses depend on other windows, or on later tokens (by {nats:.2g} nats)"
    if "depend on token" in leak:  # else the logits change from call to call
        cause = leak
    return f"{cause}; its val_loss means nothing"
