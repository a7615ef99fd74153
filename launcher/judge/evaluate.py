"""What a model is worth on a text: its loss, what stands beside it, and what it gives away."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entry_point.causality import find_leak
from entry_point.conversations import IGNORED
from entry_point.errors import TrainingError
from launcher.errors import LauncherError, ServiceError
from launcher.files.progress import Progress, expect
from launcher.job import FULL_ID
from launcher.judge import anchors
from launcher.judge.evaluation import Evaluation, Passage, keep, spread, total
from launcher.judge.probes import asked, exposed, read_canaries, read_questions
from launcher.judge.score import MANY, PASSAGE, WORST, document, losses, passages, score, windows
from launcher.judge.texts import Encoded, Text, Training, encode, training_of
from launcher.judge.worker import Worker
from launcher.settings import Settings
from launcher.text.ids import content_of

logger = logging.getLogger(__name__)

CUTS, LONG_CUTS, SHORT = 448, 64, 256  # of windows of SHORT tokens, and of the whole context
AGAIN, FEWEST = 1 << 14, 16  # tokens, and windows, that another process computes again
ROUNDING = 1e-3  # nats by which it may differ
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
    with Worker(directory, settings, entry_point) as worker:
        encoded = encode(texts, worker.tokenizer)
        found, answers = exposed(worker, canaries), asked(worker, conversations)
        training = text_behind(named, directory, settings)
        start = torch.tensor([worker.tokenizer.start])
        check_causal(worker, torch.cat([ids for each in encoded for ids in (start, each.ids)]))
        expect(progress, sum(len(each.ids) for each in encoded))
        nats = losses(worker, encoded, progress)
        with Worker(directory, settings, entry_point) as other:
            check_memory(other, encoded, torch.cat(nats))
        n = SLOW_SAMPLES if worker.edited else SAMPLES
        beside = compared(worker, training, encoded, n) if training else {}
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
        samples=f"{n} samples of {LENGTH} {worker.tokenizer.unit}",
        worst=worst(cut(encoded, nats, WORST))[:3],
        canaries=found,
        answers=answers,
        cuts=CUTS + LONG_CUTS,
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


def check_causal(worker: Worker, ids: Tensor) -> None:
    """Raise ServiceError if the logits depend on later tokens."""
    seed = secrets.randbits(32)  # which no folder can know
    for longest, cuts in ((SHORT, CUTS), (worker.block_size, LONG_CUTS)):
        size = min(longest, worker.block_size)
        n = max(2, len(ids) // size)
        rows = ids.repeat(-(-n * size // len(ids)))[: n * size].view(n, size)
        if leak := find_leak(worker.logits, rows, len(worker.tokenizer), seed, cuts):
            raise ServiceError(f"not causal: {leak}; its val_loss means nothing")


def check_memory(other: Worker, encoded: Sequence[Encoded], nats: Tensor) -> None:
    """Raise ServiceError if another process does not come to these losses.

    It gets some of the windows, in another order, and from a random place on other ids.
    """
    parts = windows(encoded, other.tokenizer.start, other.block_size)
    known = nats.split([int((targets != IGNORED).sum()) for _, targets in parts])
    generator, changed, wanted = torch.Generator().manual_seed(0), [], []
    n_again = max(FEWEST, AGAIN // other.block_size)
    for index in range(len(parts) - 1, -1, -max(1, len(parts) // n_again)):
        (inputs, targets), n = parts[index], len(known[index])
        left = int(torch.randint(n, (), generator=generator))
        later = torch.arange(len(inputs)) >= len(inputs) - left
        ids = torch.randint(len(other.tokenizer), inputs.shape, generator=generator)
        changed.append((inputs.where(~later, ids), targets.masked_fill(later, IGNORED)))
        wanted.append(known[index][: n - left])
    by = float((torch.cat(score(other, changed)) - torch.cat(wanted)).abs().max())
    if by > ROUNDING:
        what = f"losses depend on other windows, or on later tokens (by {by:.2g} nats)"
        raise ServiceError(f"not causal: {what}; its val_loss means nothing")


def compared(
    worker: Worker, training: Training, encoded: Sequence[Encoded], n_samples: int
) -> dict[str, Any]:
    """What the training text tells: of the text, of the model's validation text, and of samples."""
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
    """Whether not all bytes count, but those of answers: then no compressor compares."""
    return any(each.text.is_chat for each in encoded)


def cut(encoded: Sequence[Encoded], nats: Sequence[Tensor], least: int) -> list[Passage]:
    return [part for e, x in zip(encoded, nats, strict=True) for part in passages(e, x, least)]


def worst(parts: Sequence[Passage]) -> list[Passage]:
    """The parts of most bits per byte first; then those that are too short to tell."""
    return sorted(parts, key=lambda part: (part.size < WORST // 2, -part.bits_per_byte))
