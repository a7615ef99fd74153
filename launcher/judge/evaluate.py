"""Evaluate a model on a text: its loss, numbers to compare it with, and what it has memorized."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sm_nanogpt.launcher.errors import LauncherError
from sm_nanogpt.launcher.files.progress import Progress, expect, no_progress, time_logged
from sm_nanogpt.launcher.judge.causality import TOTAL_CUTS, check_causal
from sm_nanogpt.launcher.judge.evaluation import (
    UNMEASURED,
    Evaluation,
    Passage,
    margin_of_bits,
    save_evaluation,
    total,
)
from sm_nanogpt.launcher.judge.measures import SAMPLE_TOKENS, Subject, measure_anchors
from sm_nanogpt.launcher.judge.probes import (
    count_right_answers,
    measure_exposure,
    read_canaries,
    read_questions,
)
from sm_nanogpt.launcher.judge.score import (
    MIN_DOCUMENTS,
    PASSAGE_BYTES,
    WORST_PASSAGE_BYTES,
    losses_of_documents,
    passages,
    whole_document,
)
from sm_nanogpt.launcher.judge.texts import (
    EncodedDocument,
    Text,
    TrainingText,
    encode_known_characters,
    training_corpus,
    training_of,
)
from sm_nanogpt.launcher.judge.worker import Worker
from sm_nanogpt.launcher.models.load import is_packaged
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Effort:
    """How much an evaluation computes."""

    n_processes: int  # processes that compute losses again, to check that none looks ahead
    n_cuts: int  # cuts at which they do, of all processes together
    n_samples: int  # samples that are searched for copies of the training text

    @property
    def cuts_per_process(self) -> int:
        return self.n_cuts // self.n_processes


# The packaged model is known not to look ahead; a few cuts show that nothing is broken.
PACKAGED = Effort(n_processes=1, n_cuts=128, n_samples=100)
# An edited model has no cache of keys and values, so it samples slowly.
EDITED = Effort(n_processes=4, n_cuts=TOTAL_CUTS, n_samples=10)


def evaluate(
    model: str,
    directory: Path,
    text: str,
    texts: Sequence[Text],
    settings: Settings,
    entry_point: Path | None = None,
    find: Path | None = None,
    questions: Path | None = None,
    progress: Progress = no_progress,
) -> Evaluation:
    """Evaluate the model in a directory. The evaluation of a job's model is kept for reports.

    Args:
        model: the id of the model's job, or what to call the model of another tool.
        text: what to call the texts, such as their paths.
        find: a file of canaries.
        questions: a file of conversations.

    Raises:
        InputError: a file cannot be read, the model knows no character of a document, or its
            tokenizer has no tokens for conversations.
        ServiceError: the model looks ahead, learns between windows, or fails.
    """
    canaries = read_canaries(find) if find else []
    conversations = read_questions(questions) if questions else []
    effort = effort_for(directory, entry_point)

    with time_logged(f"evaluating {model}"):
        with Worker(directory, settings, entry_point) as worker:
            encoded = encode_known_characters(texts, worker.tokenizer)
            exposures = measure_exposure(worker, canaries)
            answers = count_right_answers(worker, conversations)
            training = training_text(model, directory, settings)

            expect_losses(encoded, effort, progress)
            nats = losses_of_documents(worker, encoded, progress)
            anchors = measure_anchors(Subject(worker, encoded, training, effort.n_samples))

        n_compared = 0
        n_cuts = effort.cuts_per_process
        for _ in range(effort.n_processes):  # a new process knows nothing of the one before
            with Worker(directory, settings, entry_point) as checker:
                n_compared += check_causal(checker, encoded, nats, n_cuts, progress)

    evaluation = Evaluation(
        model=model,
        text=text,
        samples=f"{effort.n_samples} samples of {SAMPLE_TOKENS} {worker.tokenizer.unit}",
        canaries=exposures,
        answers=answers,
        cuts=n_compared,
        **loss_fields(encoded, nats),
        **anchors,
    )
    keep_evaluation(evaluation, encoded, settings)
    return evaluation


def effort_for(directory: Path, entry_point: Path | None) -> Effort:
    """How much to compute for the model in a directory, by the folder that computes it."""
    is_edited = entry_point is not None or not is_packaged(directory)
    return EDITED if is_edited else PACKAGED


def training_text(model: str, directory: Path, settings: Settings) -> TrainingText | None:
    """The text that the model has learned from; None if it is not on this machine."""
    corpus = training_corpus(model, directory, settings, UNMEASURED)
    return None if corpus is None else training_of(corpus)


def expect_losses(encoded: Sequence[EncodedDocument], effort: Effort, progress: Progress) -> None:
    """Announce the tokens whose losses are computed, and computed again at cuts."""
    n_tokens = sum(len(document.ids) for document in encoded)
    n_tokens_again = effort.n_processes * min(n_tokens, effort.cuts_per_process)
    expect(progress, n_tokens + n_tokens_again)


def loss_fields(encoded: Sequence[EncodedDocument], nats: Sequence[Tensor]) -> dict[str, Any]:
    """The fields of Evaluation that follow from the losses of the tokens of each document, in
    nats, float64 [n]."""
    documents = list(map(whole_document, encoded, nats))
    parts = documents
    if len(documents) < MIN_DOCUMENTS:
        parts = all_passages(encoded, nats, PASSAGE_BYTES)
    unit = "documents"
    if len(parts) > len(documents):  # else each document is one passage
        unit = f"passages of {PASSAGE_BYTES:,} bytes"

    whole = total(documents)
    n_unknown = sum(document.n_unknown for document in encoded)
    unknown_nats = sum(float(document.unknown_nats.sum()) for document in encoded)
    loss = torch.tensor(whole.nats / (whole.tokens + n_unknown), dtype=torch.float64)
    passages_by_loss = worst_first(all_passages(encoded, nats, WORST_PASSAGE_BYTES))
    return {
        "size": whole.size,
        "tokens": whole.tokens,
        "bits_per_byte": whole.bits_per_byte,
        "half": margin_of_bits(parts),
        "unit": unit,
        "perplexity": float(loss.exp()),  # math.exp would raise for a large loss
        "n_unknown": n_unknown,
        "unknown_bits": replace(whole, nats=unknown_nats).bits_per_byte,
        "worst": passages_by_loss[:3],
        "parts": parts,
        "documents": worst_first(documents),
    }


def keep_evaluation(
    evaluation: Evaluation, encoded: Sequence[EncodedDocument], settings: Settings
) -> None:
    """Write an evaluation for reports, by a digest of its texts. Warn if that fails."""
    contents = b"\0".join(document.text.content for document in encoded)
    digest = hashlib.sha256(contents).hexdigest()
    try:
        save_evaluation(evaluation, digest[:12], settings)
    except LauncherError as error:
        logger.warning(f"this evaluation will not be in reports: {error}")


def all_passages(
    encoded: Sequence[EncodedDocument], nats: Sequence[Tensor], part_bytes: int
) -> list[Passage]:
    """The passages of all documents, each of about part_bytes bytes."""
    parts = list[Passage]()
    for document, nats_of_document in zip(encoded, nats, strict=True):
        parts += passages(document, nats_of_document, part_bytes)
    return parts


def worst_first(parts: Sequence[Passage]) -> list[Passage]:
    """Sort parts by bits per byte, the highest first.

    Very short parts, whose bits vary by chance, come last.
    """
    return sorted(
        parts, key=lambda part: (part.size < WORST_PASSAGE_BYTES // 2, -part.bits_per_byte)
    )
