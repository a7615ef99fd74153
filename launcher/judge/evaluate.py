"""What a model is worth on a text: its loss, what stands beside it, and what it gives away."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entry_point.errors import TrainingError
from launcher.errors import LauncherError
from launcher.files.progress import Progress, expect
from launcher.job import FULL_ID
from launcher.judge import anchors
from launcher.judge.causality import CUTS, PACKAGED_CUTS, check_causal
from launcher.judge.evaluation import Evaluation, Passage, keep, spread, total
from launcher.judge.probes import asked, exposed, read_canaries, read_questions
from launcher.judge.score import MANY, PASSAGE, WORST, document, losses, passages
from launcher.judge.texts import Encoded, Text, Training, encode, training_of
from launcher.judge.worker import Worker
from launcher.models.load import is_packaged
from launcher.settings import Settings
from launcher.text.ids import content_of

logger = logging.getLogger(__name__)

PROCESSES = 4  # that compute an edited folder's losses again
SAMPLES, SLOW_SAMPLES, LENGTH = 100, 10, 500  # an edited model keeps no keys and values
MEMORY = 0.5  # overlap from which a loss measures memory


def evaluate(
    named: str,
    directory: Path,
    paths: str,
    texts: Sequence[Text],
    settings: Settings,
    entry_point: Path | None = None,
    find: Path | None = None,
    questions: Path | None = None,
    progress: Progress = lambda n: None,
) -> Evaluation:
    """Judge the model in a directory, which is that of the job `named`, or of another tool.

    find names a file of canaries. The evaluation of a job's model is kept beside it, for reports.

    Raises:
        InputError: a file cannot be read, the model does not know a character of the text, or its
            tokenizer has no tokens for conversations.
        ServiceError: it looks ahead, learns between windows, or fails.
    """
    canaries = read_canaries(find) if find else []
    conversations = read_questions(questions) if questions else []
    edited = entry_point is not None or not is_packaged(directory)
    n_processes, n_cuts = (PROCESSES, CUTS) if edited else (1, PACKAGED_CUTS)
    n_samples = SLOW_SAMPLES if edited else SAMPLES
    with Worker(directory, settings, entry_point) as worker:
        encoded = encode(texts, worker.tokenizer)
        found, answers = exposed(worker, canaries), asked(worker, conversations)
        training = text_behind(named, directory, settings)
        n_tokens = sum(len(each.ids) for each in encoded)
        expect(progress, n_tokens + n_processes * min(n_tokens, n_cuts // n_processes))
        nats = losses(worker, encoded, progress)
        beside = compared(worker, training, encoded, n_samples) if training else {}
    cuts = 0
    for _ in range(n_processes):  # of which none learns anything from those before
        with Worker(directory, settings, entry_point) as other:
            cuts += check_causal(other, encoded, nats, n_cuts // n_processes, progress)
    whole = [document(each, loss) for each, loss in zip(encoded, nats, strict=True)]
    parts = whole if len(whole) >= MANY else cut(encoded, nats, PASSAGE)
    everything = total(whole)
    loss = torch.tensor(everything.nats / everything.tokens, dtype=torch.float64)
    made = Evaluation(
        model=named,
        text=paths,
        size=everything.size,
        tokens=everything.tokens,
        bits_per_byte=everything.bits_per_byte,
        half=spread(parts),
        unit="documents" if len(parts) == len(whole) else f"passages of {PASSAGE:,} bytes",
        perplexity=float(loss.exp()),  # infinite where math.exp raises
        xz=None if has_chats(encoded) else anchors.xz(b"".join(e.content for e in encoded)),
        samples=f"{n_samples} samples of {LENGTH} {worker.tokenizer.unit}",
        worst=worst(cut(encoded, nats, WORST))[:3],
        canaries=found,
        answers=answers,
        cuts=cuts,
        parts=parts,
        documents=worst(whole),
        **beside,
    )
    content = b"\0".join(each.content for each in encoded)
    try:
        keep(made, hashlib.sha256(content).hexdigest()[:12], settings)
    except LauncherError as error:
        logger.warning(f"this evaluation will not be in reports: {error}")
    return made


def text_behind(named: str, directory: Path, settings: Settings) -> Training | None:
    """The text that a model has learned from; None, and a warning, if it cannot be had."""
    why = "no job of this machine made this model"
    names = (named, directory.absolute().parent.name)  # the latter for a model that was fetched
    try:
        for job_id in filter(FULL_ID.fullmatch, names):
            return training_of(job_id, directory, settings)
    except (LauncherError, TrainingError, ValueError) as error:
        why = str(error)
    lacking = "no 5-gram, own validation text, overlap, or copied run"
    logger.warning(f"{named}: {lacking}, as its training text is not here ({why})")
    return None


def compared(
    worker: Worker, training: Training, encoded: Sequence[Encoded], n_samples: int
) -> dict[str, Any]:
    """The fields of Evaluation that need the training text: validation, ngram, overlap, copied."""
    validation = None
    if training.validation:
        own = encode([training.validation], worker.tokenizer)
        validation = document(own[0], *losses(worker, own)).bits_per_byte
    samples = worker.sample([None], num_samples=n_samples, max_new_tokens=LENGTH)
    sample_contents = [anchors.as_tensor(sample.encode()) for sample in samples]
    # As the training text is decoded: of a conversation, with the tokens that begin its turns.
    words = worker.tokenizer.words
    contents = [anchors.as_tensor(content_of(each.ids, words)) for each in encoded]
    overlap = anchors.overlap(training.content, contents)
    if overlap > MEMORY:
        logger.warning(f"{overlap:.0%} of the bytes stand in the training text: this tests memory")
    return dict(
        validation=validation,
        ngram=None if has_chats(encoded) else anchors.ngram(training.content, torch.cat(contents)),
        overlap=overlap,
        copied=anchors.longest_run(training.content, sample_contents),
    )


def has_chats(encoded: Sequence[Encoded]) -> bool:
    """True if a text is a conversation: only its answers are scored, so a compressor of all bytes
    is no comparison."""
    return any(each.text.is_chat for each in encoded)


def cut(encoded: Sequence[Encoded], nats: Sequence[Tensor], least: int) -> list[Passage]:
    return [part for e, x in zip(encoded, nats, strict=True) for part in passages(e, x, least)]


def worst(parts: Sequence[Passage]) -> list[Passage]:
    """The parts of most bits per byte first; then those that are too short to tell."""
    return sorted(parts, key=lambda part: (part.size < WORST // 2, -part.bits_per_byte))
