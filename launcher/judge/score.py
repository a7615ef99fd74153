"""Compute the losses of tokens, by the judge's own softmax, and those of documents and passages."""

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
from sm_nanogpt.launcher.judge.texts import EncodedDocument
from sm_nanogpt.launcher.judge.worker import Worker

CONTEXT_TOKENS = 64  # tokens before each one that counts; half of the context, if that is less
# So many documents are the parts of a text; fewer documents are cut into passages.
MIN_DOCUMENTS = 20
EXCERPT_BYTES = 30  # bytes that are shown before and behind the worst token of a passage
PASSAGE_BYTES = 1000  # bytes of a passage that is a part of the text
WORST_PASSAGE_BYTES = 200  # bytes of a passage that is shown as one of the worst


class ScoredSpan(NamedTuple):
    """Where a window of inputs begins and ends, and the first position whose loss counts."""

    begin: int
    end: int
    counted_from: int


class Window(NamedTuple):
    """Ids, int64 [T], and the token that follows each id, int64 [T].

    A target is IGNORED where the loss counts in another window.
    """

    ids: Tensor
    targets: Tensor


def window_spans(n_inputs: int, window_size: int) -> list[ScoredSpan]:
    """Divide n_inputs into windows of at most window_size, in which each input counts once.

    At least min(CONTEXT_TOKENS, window_size // 2) inputs of its window come before each input that
    counts, except at the beginning.
    """
    spans = []
    counted_from = 0
    while counted_from < n_inputs:
        n_before = min(CONTEXT_TOKENS, window_size // 2) if counted_from else 0
        end = min(n_inputs, counted_from + window_size - n_before)
        spans.append(ScoredSpan(max(0, end - window_size), end, counted_from))
        counted_from = end
    return spans


def cut_windows(encoded: Sequence[EncodedDocument], start: int, window_size: int) -> list[Window]:
    """The windows of all documents. The token `start` comes before each document."""
    windows = []
    for document in encoded:
        inputs = F.pad(document.ids, (1, 0), value=start)
        for begin, end, counted_from in window_spans(len(document.ids), window_size):
            targets = document.ids[begin:end].clone()
            targets[: counted_from - begin] = IGNORED
            windows.append(Window(inputs[begin:end], targets))
    return windows


def nats_of(logits: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
    """The losses, in nats, of the targets that are not IGNORED, float64 [n] for each row.

    logits is float32 [n, T, V]; each of the n targets is int64 [T or fewer].
    """
    rows = pad_sequence([*targets], batch_first=True, padding_value=IGNORED)
    rows = F.pad(rows, (0, logits.size(1) - rows.size(1)), value=IGNORED)  # [n, T]
    nats = F.cross_entropy(logits.flatten(0, 1), rows.flatten(), reduction="none").double()
    counted = nats[rows.flatten() != IGNORED]
    return [*counted.split([int((row != IGNORED).sum()) for row in targets])]


def losses_of_windows(
    worker: Worker, windows: Sequence[Window], progress: Progress = no_progress
) -> list[Tensor]:
    """Compute the losses of the targets that count, in nats, float64 [n] for each window.

    Windows of one length come in a random order: a model that learns from the windows before gets
    other losses each time, which check_causal sees.
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


def losses_of_documents(
    worker: Worker, encoded: Sequence[EncodedDocument], progress: Progress = no_progress
) -> tuple[Tensor, ...]:
    """The losses of the tokens of each document, in nats, float64 [n] for each."""
    windows = cut_windows(encoded, worker.tokenizer.start, worker.block_size)
    nats = torch.cat(losses_of_windows(worker, windows, progress))
    return nats.split([len(document.ids) for document in encoded])


# -- documents and their parts ---------------------------------------------------------------------


def whole_document(document: EncodedDocument, nats: Tensor, excerpt: str = "") -> Passage:
    """A document as one passage. nats: the losses of its tokens, float64 [n]."""
    counted = (nats + document.unknown_nats)[document.is_scored]
    return Passage(
        place=document.text.place,
        nats=float(counted.sum()),
        size=document.size,
        tokens=len(counted),
        excerpt=excerpt,
    )


def passages(document: EncodedDocument, nats: Tensor, part_bytes: int) -> list[Passage]:
    """A document in parts of about part_bytes bytes, which end at line breaks if there are any.

    A conversation is one part. nats: the losses of the document's tokens, float64 [n].
    """
    if document.text.is_chat:
        conversation = one_line(" ".join(document.text.pieces))
        return [whole_document(document, nats, conversation[-2 * EXCERPT_BYTES :])]

    nats_with_unknown = nats + document.unknown_nats
    content = document.text.content
    cuts = cut_at_lines(content, part_bytes)
    token_ends = document.widths.cumsum(0)  # in bytes
    first_tokens = torch.searchsorted(token_ends, torch.tensor(cuts), right=True).tolist()

    parts = []
    line = 1
    for (begin, end), (first, stop) in zip(pairwise(cuts), pairwise(first_tokens), strict=True):
        nats_of_part = nats_with_unknown[first:stop]
        worst = begin  # the byte behind the token with the highest loss
        if len(nats_of_part):
            worst = int(token_ends[first + int(nats_of_part.argmax())])
        excerpt_begin = max(begin, worst - EXCERPT_BYTES)
        excerpt_end = min(end, worst + EXCERPT_BYTES)
        excerpt = content[excerpt_begin:excerpt_end].decode(errors="ignore")
        part = Passage(
            place=f"{document.text.place}, line {line}",
            nats=float(nats_of_part.sum()),
            size=end - begin,
            tokens=len(nats_of_part),
            excerpt=one_line(excerpt),
        )
        parts.append(part)
        line += content.count(b"\n", begin, end)
    return parts


def cut_at_lines(content: bytes, part_bytes: int) -> list[int]:
    """The positions at which parts of a text begin and end, with 0 and the length of the text.

    Each part has part_bytes bytes, and then the rest of its line, if that is shorter than a part.
    """
    cuts = [0]
    while cuts[-1] + 2 * part_bytes <= len(content):
        begin = cuts[-1]
        line_break = content.find(b"\n", begin + part_bytes - 1, begin + 2 * part_bytes)
        cuts.append(begin + part_bytes if line_break < 0 else line_break + 1)
    if cuts[-1] < len(content):
        cuts.append(len(content))
    return cuts


def one_line(text: str) -> str:
    return " ".join(text.split())
