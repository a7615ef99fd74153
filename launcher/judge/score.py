"""The loss of each token, by the judge's own softmax, and that of documents and passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from entry_point.conversations import IGNORED
from launcher.errors import ServiceError
from launcher.files.storage import Progress
from launcher.judge.evaluation import Passage
from launcher.judge.texts import Encoded
from launcher.judge.worker import Worker

SEEN = 64  # tokens that come before each one that counts, or half of the context, if that is less
MANY = 20  # documents that are parts enough of a text
SHOWN = 30  # bytes before and after its worst token
PASSAGE = 1000  # bytes of the parts of fewer documents
WORST = 200  # bytes of a passage that is shown


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


@dataclass(frozen=True)
class Window:
    """Inputs [T] of a document, and the targets [n] of the last n of them."""

    document: int
    inputs: Tensor
    targets: Tensor


def windows(encoded: Sequence[Encoded], start: int, size: int) -> list[Window]:
    """The windows of each document, which stands after the token `start`, in order."""
    found = list[Window]()
    for index, each in enumerate(encoded):
        inputs = torch.cat([torch.tensor([start]), each.ids])[:-1]
        for begin, end, counted in windows_of(len(inputs), size):
            found.append(Window(index, inputs[begin:end], each.ids[counted:end]))
    return found


def score(
    worker: Worker, windows: Sequence[Window], progress: Progress = lambda n: None
) -> list[Tensor]:
    """The loss of the targets of each window in nats, float64 [n].

    Raises ServiceError if logits are not finite.
    """
    found = [torch.empty(0)] * len(windows)
    for indices, logits in worker.passes([window.inputs for window in windows]):
        targets = torch.full(logits.shape[:2], IGNORED)
        ends = [len(windows[index].inputs) for index in indices]
        for row, index, end in zip(targets, indices, ends, strict=True):
            row[end - len(windows[index].targets) : end] = windows[index].targets
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        if not nats.isfinite().all():
            raise ServiceError(f"{worker.directory}: its logits are not finite")
        for row, index, end in zip(nats.double().view_as(targets), indices, ends, strict=True):
            found[index] = row[end - len(windows[index].targets) : end]
            progress(len(found[index]))
    return found


def by_document(windows: Sequence[Window], nats: Sequence[Tensor], n: int) -> list[Tensor]:
    """The losses of the tokens of each of n documents."""
    parts: list[list[Tensor]] = [[] for _ in range(n)]
    for window, each in zip(windows, nats, strict=True):
        parts[window.document].append(each)
    return [torch.cat(each) for each in parts]


def loss_of(worker: Worker, encoded: Sequence[Encoded], start: int) -> list[Tensor]:
    """The loss of each token of each document, in nats."""
    parts = windows(encoded, start, worker.block_size)
    return by_document(parts, score(worker, parts), len(encoded))


def document(each: Encoded, nats: Tensor) -> Passage:
    """A document as one passage."""
    counted = nats[each.counts]
    return Passage(each.text.place, float(counted.sum()), each.size, len(counted))


def passages(each: Encoded, nats: Tensor, least: int) -> list[Passage]:
    """A document in parts of some `least` bytes, which end at line breaks if there are any.

    A conversation is one passage.
    """
    if each.text.is_chat:
        return [document(each, nats)]
    content, ends = each.content, each.widths.cumsum(0)
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), nats.cumsum(0)])
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
