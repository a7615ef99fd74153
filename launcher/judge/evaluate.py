"""What a model is worth on a text: its loss, what stands beside it, and what it gives away."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sm_nanogpt.entry_point.errors import TrainingError
from sm_nanogpt.entry_point.text import Corpus
from sm_nanogpt.launcher.errors import LauncherError
from sm_nanogpt.launcher.files.progress import Progress, expect
from sm_nanogpt.launcher.job import FULL_ID
from sm_nanogpt.launcher.judge import anchors
from sm_nanogpt.launcher.judge.causality import CUTS, PACKAGED_CUTS, check_causal
from sm_nanogpt.launcher.judge.evaluation import (
    BITS,
    Evaluation,
    Passage,
    margin,
    save_evaluation,
    total,
)
from sm_nanogpt.launcher.judge.probes import (
    count_right_answers,
    measure_exposure,
    read_canaries,
    read_questions,
)
from sm_nanogpt.launcher.judge.score import MANY, PASSAGE, WORST, losses, passages, whole_document
from sm_nanogpt.launcher.judge.texts import (
    Encoded,
    Text,
    TrainingText,
    corpus_of_job,
    encode,
    encode_known,
    training_of,
)
from sm_nanogpt.launcher.judge.worker import Worker
from sm_nanogpt.launcher.models.load import is_packaged
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.ids import content_of

logger = logging.getLogger(__name__)

SAMPLE_TOKENS = 500
MEMORY = 0.5  # overlap from which a loss measures memory


@dataclass(frozen=True)
class Effort:
    """How much an evaluation computes: in so many processes, losses once more at so many cuts in
    all; and so many samples."""

    n_processes: int
    n_cuts: int
    n_samples: int


PACKAGED = Effort(n_processes=1, n_cuts=PACKAGED_CUTS, n_samples=100)
EDITED = Effort(n_processes=4, n_cuts=CUTS, n_samples=10)  # it keeps no keys and values


def evaluate(
    model: str,
    directory: Path,
    text: str,
    texts: Sequence[Text],
    settings: Settings,
    entry_point: Path | None = None,
    find: Path | None = None,
    questions: Path | None = None,
    progress: Progress = lambda n: None,
) -> Evaluation:
    """Judge the model in a directory, and keep the evaluation of a job's model for reports.

    Args:
        model: the id of its job, or the name of one of another tool.
        text: what to call the texts, such as their paths.
        find: a file of canaries.
        questions: a file of conversations.

    Raises:
        InputError: a file cannot be read, the model knows no character of a document, or its
            tokenizer has no tokens for conversations.
        ServiceError: it looks ahead, learns between windows, or fails.
    """
    canaries = read_canaries(find) if find else []
    conversations = read_questions(questions) if questions else []
    is_edited = entry_point is not None or not is_packaged(directory)
    effort = EDITED if is_edited else PACKAGED
    n_cuts = effort.n_cuts // effort.n_processes

    with Worker(directory, settings, entry_point) as worker:
        encoded = encode_known(texts, worker.tokenizer)
        exposures = measure_exposure(worker, canaries)
        answers = count_right_answers(worker, conversations)
        training = training_text(model, directory, settings)
        n_tokens = sum(len(document.ids) for document in encoded)
        expect(progress, n_tokens + effort.n_processes * min(n_tokens, n_cuts))
        nats = losses(worker, encoded, progress)
        comparison = {}
        if training is not None:
            comparison = compare(worker, training, encoded, effort.n_samples)

    n_compared = 0
    for _ in range(effort.n_processes):  # of which none learns anything from those before
        with Worker(directory, settings, entry_point) as other:
            n_compared += check_causal(other, encoded, nats, n_cuts, progress)

    n_unknown = sum(document.n_unknown for document in encoded)
    nats_of_known = sum(float(nats_of_document.sum()) for nats_of_document in nats)
    nats = tuple(map(Encoded.with_unknown, encoded, nats))
    contents = [document.content for document in encoded]
    documents = list(map(whole_document, encoded, nats))
    parts = documents
    if len(documents) < MANY:
        parts = all_passages(encoded, nats, PASSAGE)
    whole = total(documents)
    loss = torch.tensor(whole.nats / (whole.tokens + n_unknown), dtype=torch.float64)
    evaluation = Evaluation(
        model=model,
        text=text,
        size=whole.size,
        tokens=whole.tokens,
        bits_per_byte=whole.bits_per_byte,
        half=margin(parts),
        n_unknown=n_unknown,
        unknown_bits=BITS * (whole.nats - nats_of_known) / whole.size if n_unknown else 0.0,
        unit="documents" if len(parts) == len(documents) else f"passages of {PASSAGE:,} bytes",
        perplexity=float(loss.exp()),  # infinite where math.exp raises
        xz=None if has_chats(encoded) else anchors.xz(b"".join(contents)),
        samples=f"{effort.n_samples} samples of {SAMPLE_TOKENS} {worker.tokenizer.unit}",
        worst=worst_first(all_passages(encoded, nats, WORST))[:3],
        canaries=exposures,
        answers=answers,
        cuts=n_compared,
        parts=parts,
        documents=worst_first(documents),
        **comparison,
    )
    digest = hashlib.sha256(b"\0".join(contents)).hexdigest()
    try:
        save_evaluation(evaluation, digest[:12], settings)
    except LauncherError as error:
        logger.warning(f"this evaluation will not be in reports: {error}")
    return evaluation


def training_text(model: str, directory: Path, settings: Settings) -> TrainingText | None:
    """The text that a model has learned from; None, and a warning, if it cannot be had."""
    unmeasured = "no 5-gram, own validation text, overlap, or copied run"
    corpus = training_corpus(model, directory, settings, unmeasured)
    return None if corpus is None else training_of(corpus)


def training_corpus(
    model: str, directory: Path, settings: Settings, unmeasured: str
) -> Corpus | None:
    """The text that a model has learned from, as token ids; None, and a warning, if it cannot be
    had. The warning begins with `unmeasured`: what the caller cannot measure without the text."""
    # A model that was fetched is in a directory of its job's id.
    names = (model, directory.absolute().parent.name)
    job_ids = [name for name in names if FULL_ID.fullmatch(name)]
    problem = "no job of this machine made this model"
    if job_ids:
        try:
            return corpus_of_job(job_ids[0], directory, settings)
        except (LauncherError, TrainingError, ValueError) as error:
            problem = str(error)
    logger.warning(f"{model}: {unmeasured}, as its training text is not here ({problem})")
    return None


def compare(
    worker: Worker, training: TrainingText, encoded: Sequence[Encoded], n_samples: int
) -> dict[str, Any]:
    """The fields of Evaluation that need the training text: validation, ngram, overlap, copied."""
    validation = None
    if training.validation is not None:
        [document] = encode([training.validation], worker.tokenizer)
        [nats] = losses(worker, [document])
        validation = whole_document(document, nats).bits_per_byte
    samples = worker.sample([None], num_samples=n_samples, max_new_tokens=SAMPLE_TOKENS)
    sample_contents = [anchors.as_tensor(sample.encode()) for sample in samples]
    contents = []
    for document in encoded:
        content: bytes | bytearray = document.content
        if document.text.is_chat:  # as the training text, with the tokens that begin its turns
            content = content_of(document.ids, worker.tokenizer.words)
        contents.append(anchors.as_tensor(content))
    ngram = None
    if not has_chats(encoded):
        ngram = anchors.ngram(training.content, torch.cat(contents))
    overlap = anchors.overlap(training.content, contents)
    if overlap > MEMORY:
        logger.warning(f"{overlap:.0%} of the bytes stand in the training text: this tests memory")
    return dict(
        validation=validation,
        ngram=ngram,
        overlap=overlap,
        copied=anchors.longest_run(training.content, sample_contents),
    )


def has_chats(encoded: Sequence[Encoded]) -> bool:
    """True if a text is a conversation: only its answers are scored, so a compressor of all bytes
    is no comparison."""
    return any(document.text.is_chat for document in encoded)


def all_passages(encoded: Sequence[Encoded], nats: Sequence[Tensor], size: int) -> list[Passage]:
    parts = list[Passage]()
    for document, nats_of_document in zip(encoded, nats, strict=True):
        parts += passages(document, nats_of_document, size)
    return parts


def worst_first(parts: Sequence[Passage]) -> list[Passage]:
    """The parts of most bits per byte first; then those that are too short to tell."""
    return sorted(parts, key=lambda part: (part.size < WORST // 2, -part.bits_per_byte))
