"""The loss of each token, by the judge's own softmax, and that of documents and passages."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sm_nanogpt.entry_point.conversations import IGNORED
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.files.progress import Progress, no_progress
from sm_nanogpt.launcher.judge.evaluation import Passage
from sm_nanogpt.launcher.judge.texts import Encoded
from sm_nanogpt.launcher.judge.worker import Worker

CONTEXT = 64  # tokens that come before each one that counts, or half of a shorter context
MANY = 20  # documents that are parts enough of a text
EXCERPT_MARGIN = 30  # bytes before and after the worst token of a passage
PASSAGE = 1000  # bytes of the parts of fewer documents
WORST = 200  # bytes of a passage that is shown


class ScoredSpan(NamedTuple):
    """Where a window of inputs begins and ends, and from where on its losses count."""

    begin: int
    end: int
    counted_from: int


class Window(NamedTuple):
    """Ids, int64 [T], and the token that follows each, IGNORED where another window counts it."""

    ids: Tensor
    targets: Tensor


def window_spans(n: int, size: int) -> list[ScoredSpan]:
    """The windows of n inputs, of at most `size` each, so that each input counts once.

    Before each input stand min(CONTEXT, size // 2) others of its window, but for the first ones.
    """
    spans = []
    counted_from = 0
    while counted_from < n:
        n_before = min(CONTEXT, size // 2) if counted_from else 0
        end = min(n, counted_from + size - n_before)
        spans.append(ScoredSpan(max(0, end - size), end, counted_from))
        counted_from = end
    return spans


def cut_windows(encoded: Sequence[Encoded], start: int, size: int) -> list[Window]:
    """The windows of each document, which stands after the token `start`."""
    windows = []
    for document in encoded:
        inputs = F.pad(document.ids, (1, 0), value=start)
        for begin, end, counted_from in window_spans(len(document.ids), size):
            targets = document.ids[begin:end].clone()
            targets[: counted_from - begin] = IGNORED
            windows.append(Window(inputs[begin:end], targets))
    return windows


def nats_of(logits: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
    """The losses of the targets of each row that are not IGNORED, in nats, float64.

    logits is float32 [n, T, V], and each of the n targets int64 [at most T].
    """
    rows = pad_sequence([*targets], batch_first=True, padding_value=IGNORED)
    rows = F.pad(rows, (0, logits.size(1) - rows.size(1)), value=IGNORED)  # [n, T]
    nats = F.cross_entropy(logits.flatten(0, 1), rows.flatten(), reduction="none").double()
    counted = nats[rows.flatten() != IGNORED]
    return [*counted.split([int((row != IGNORED).sum()) for row in targets])]


def score(
    worker: Worker, windows: Sequence[Window], progress: Progress = no_progress
) -> list[Tensor]:
    """The losses of the targets that each window counts, in nats, float64 [n].

    Windows of one length come in a random order, so that a model which learns from those before
    cannot come to the same losses twice.
    """
    shuffled = list(range(len(windows)))  # indices of windows
    secrets.SystemRandom().shuffle(shuffled)
    nats_of_windows = [torch.empty(0)] * len(windows)
    for batch, logits in worker.passes([windows[index].ids for index in shuffled]):
        indices = [shuffled[position] for position in batch]
        nats_of_batch = nats_of(logits, [windows[index].targets for index in indices])
        if not torch.cat(nats_of_batch).isfinite().all():
            raise ServiceError(f"{worker.directory}: its logits are not finite")
        for index, nats in zip(indices, nats_of_batch, strict=True):
            nats_of_windows[index] = nats
        progress(sum(map(len, nats_of_batch)))
    return nats_of_windows


def losses(
    worker: Worker, encoded: Sequence[Encoded], progress: Progress = no_progress
) -> tuple[Tensor, ...]:
    """The loss of each token of each document, in nats, float64 [n]."""
    windows = cut_windows(encoded, worker.tokenizer.start, worker.block_size)
    nats = torch.cat(score(worker, windows, progress))
    return nats.split([len(document.ids) for document in encoded])


# -- documents and their parts ---------------------------------------------------------------------


def whole_document(document: Encoded, nats: Tensor, excerpt: str = "") -> Passage:
    """A document as one passage. nats are the losses of its tokens, float64 [n]."""
    counted = (nats + document.unknown_nats)[document.counts]
    return Passage(
        place=document.text.position,
        nats=float(counted.sum()),
        size=document.size,
        tokens=len(counted),
        excerpt=excerpt,
    )


def passages(document: Encoded, nats: Tensor, size: int) -> list[Passage]:
    """A document in parts of some `size` bytes, which end at line breaks if there are any.

    A conversation is one part. nats are the losses of the document's tokens, float64 [n].
    """
    if document.text.is_chat:
        conversation = one_line(" ".join(document.text.pieces))
        return [whole_document(document, nats, conversation[-2 * EXCERPT_MARGIN :])]

    nats = nats + document.unknown_nats
    content = document.text.content
    cuts = cut_at_lines(content, size)
    token_ends = document.widths.cumsum(0)  # in bytes
    first_tokens = torch.searchsorted(token_ends, torch.tensor(cuts), right=True).tolist()

    parts = []
    line = 1
    for (begin, end), (first, stop) in zip(pairwise(cuts), pairwise(first_tokens), strict=True):
        nats_of_part = nats[first:stop]
        worst = begin  # the byte behind the token that loses most
        if len(nats_of_part):
            worst = int(token_ends[first + int(nats_of_part.argmax())])
        excerpt_begin = max(begin, worst - EXCERPT_MARGIN)
        excerpt_end = min(end, worst + EXCERPT_MARGIN)
        excerpt = content[excerpt_begin:excerpt_end].decode(errors="ignore")
        part = Passage(
            place=f"{document.text.position}, line {line}",
            nats=float(nats_of_part.sum()),
            size=end - begin,
            tokens=len(nats_of_part),
            excerpt=one_line(excerpt),
        )
        parts.append(part)
        line += content.count(b"\n", begin, end)
    return parts


def cut_at_lines(content: bytes, size: int) -> list[int]:
    """Where parts of a text begin and end: each has `size` bytes, and the rest of its line if that
    is shorter than a part."""
    cuts = [0]
    while cuts[-1] + 2 * size <= len(content):
        begin = cuts[-1]
        line_break = content.find(b"\n", begin + size - 1, begin + 2 * size)
        cuts.append(begin + size if line_break < 0 else line_break + 1)
    if cuts[-1] < len(content):
        cuts.append(len(content))
    return cuts


def one_line(text: str) -> str:
    return " ".join(text.split())
