"""The loss of each token, by the judge's own softmax, and that of documents and passages."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from entry_point.conversations import IGNORED
from launcher.errors import ServiceError
from launcher.files.progress import Progress
from launcher.judge.evaluation import Passage
from launcher.judge.texts import Encoded
from launcher.judge.worker import Worker

SEEN = 64  # tokens that come before each one that counts, or half of the context, if that is less
MANY = 20  # documents that are parts enough of a text
SHOWN = 30  # bytes before and after its worst token
PASSAGE = 1000  # bytes of the parts of fewer documents
WORST = 200  # bytes of a passage that is shown

Window = tuple[Tensor, Tensor]  # ids, int64 [T], and the token that follows each


def windows_of(n: int, size: int) -> list[tuple[int, int, int]]:
    """Where windows of at most `size` of n inputs begin and end, and where what counts begins.

    Each input counts once, and has min(SEEN, size // 2) others before it, but for the first ones.
    """
    found, counted = list[tuple[int, int, int]](), 0
    while counted < n:
        end = min(n, size if not counted else counted + size - min(SEEN, size // 2))
        found.append((max(0, end - size), end, counted))
        counted = end
    return found


def windows(encoded: Sequence[Encoded], start: int, size: int) -> list[Window]:
    """The windows of each document, which stands after `start`.

    A target that another window counts is IGNORED.
    """
    found = list[Window]()
    for each in encoded:
        inputs = F.pad(each.ids, (1, 0), value=start)
        for begin, end, counted in windows_of(len(each.ids), size):
            targets = each.ids[begin:end].clone()
            targets[: counted - begin] = IGNORED
            found.append((inputs[begin:end], targets))
    return found


def nats_of(logits: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
    """The losses of the targets of each row that are not IGNORED, in nats, float64.

    logits is float32 [n, T, V], and each of the n targets int64 [at most T].
    """
    padded = pad_sequence([*targets], batch_first=True, padding_value=IGNORED)
    padded = F.pad(padded, (0, logits.size(1) - padded.size(1)), value=IGNORED).flatten()
    nats = F.cross_entropy(logits.flatten(0, 1), padded, reduction="none").double()
    counts = [int((row != IGNORED).sum()) for row in targets]
    return [*nats[padded != IGNORED].split(counts)]


def score(
    worker: Worker, windows: Sequence[Window], progress: Progress = lambda n: None
) -> list[Tensor]:
    """The losses of the targets that each window counts, in nats, float64 [n].

    Windows of one length come in a random order, so that a model which learns from those before
    cannot come to the same losses twice.
    """
    order = list(range(len(windows)))
    secrets.SystemRandom().shuffle(order)
    found = [torch.empty(0)] * len(windows)
    for places, logits in worker.passes([windows[index][0] for index in order]):
        indices = [order[place] for place in places]
        nats = nats_of(logits, [windows[index][1] for index in indices])
        if not torch.cat(nats).isfinite().all():
            raise ServiceError(f"{worker.directory}: its logits are not finite")
        for index, each in zip(indices, nats, strict=True):
            found[index] = each
        progress(sum(map(len, nats)))
    return found


def losses(
    worker: Worker, encoded: Sequence[Encoded], progress: Progress = lambda n: None
) -> tuple[Tensor, ...]:
    """The loss of each token of each document, in nats, float64 [n]."""
    nats = score(worker, windows(encoded, worker.tokenizer.start, worker.block_size), progress)
    return torch.cat(nats).split([len(each.ids) for each in encoded])


def document(each: Encoded, nats: Tensor) -> Passage:
    counted = nats[each.counts]
    return Passage(each.text.place, float(counted.sum()), each.size, len(counted))


def passages(each: Encoded, nats: Tensor, least: int) -> list[Passage]:
    """A document in parts of some `least` bytes, which end at line breaks if there are any."""
    if each.text.is_chat:
        said = " ".join(" ".join(each.text.pieces).split())
        return [replace(document(each, nats), excerpt=said[-2 * SHOWN :])]
    content, ends = each.content, each.widths.cumsum(0)
    sums = F.pad(nats.cumsum(0), (1, 0))
    cuts, line, found = [0], 1, list[Passage]()
    while cuts[-1] + 2 * least <= len(content):
        begin = cuts[-1]
        cuts.append(content.find(b"\n", begin + least - 1, begin + 2 * least) + 1 or begin + least)
    if cuts[-1] < len(content):
        cuts.append(len(content))
    first = torch.searchsorted(ends, torch.tensor(cuts), right=True).tolist()  # token of each cut
    for (begin, end), (a, b) in zip(pairwise(cuts), pairwise(first), strict=True):
        at = int(ends[a + int(nats[a:b].argmax())]) if a < b else begin
        near = content[max(begin, at - SHOWN) : min(end, at + SHOWN)].decode(errors="ignore")
        place, loss = f"{each.text.place}, line {line}", float(sums[b] - sums[a])
        found.append(Passage(place, loss, end - begin, b - a, " ".join(near.split())))
        line += content.count(b"\n", begin, end)
    return found
