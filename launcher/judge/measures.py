"""Measure each anchor of evaluation.py, by the function that has the name of its field."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sm_nanogpt.launcher.judge import anchors
from sm_nanogpt.launcher.judge.score import losses_of_documents, whole_document
from sm_nanogpt.launcher.judge.texts import EncodedDocument, TrainingText, encode_texts
from sm_nanogpt.launcher.judge.worker import Worker
from sm_nanogpt.launcher.text.ids import content_of

logger = logging.getLogger(__name__)

SAMPLE_TOKENS = 500
MAX_OVERLAP = 0.5  # the fraction of a text; with more overlap, a loss measures memory


@dataclass(frozen=True)
class Subject:
    """A model, the texts that it is judged on, and the text that it has learned from."""

    worker: Worker
    encoded: Sequence[EncodedDocument]
    training: TrainingText | None  # None: it is not on this machine
    n_samples: int  # samples in which copies of the training text are looked for

    @property
    def has_chats(self) -> bool:
        """True if a text is a conversation.

        Only its answers are scored, so its loss does not compare with a compressor, which packs all
        bytes.
        """
        return any(document.text.is_chat for document in self.encoded)

    @cached_property
    def contents(self) -> list[Tensor]:
        """The bytes of each text, in the form that the training text has, uint8 [n]."""
        contents = []
        for document in self.encoded:
            content: bytes | bytearray = document.text.content
            if document.text.is_chat:  # the training text has the tokens that begin a turn
                content = content_of(document.ids, self.worker.tokenizer.words)
            contents.append(anchors.as_tensor(content))
        return contents


def measure_anchors(subject: Subject) -> dict[str, Any]:
    """Measure each anchor; return the values by their fields of Evaluation."""
    return {
        "xz": xz(subject),
        "ngram": ngram(subject),
        "validation": validation(subject),
        "overlap": overlap(subject),
        "copied": copied(subject),
    }


def xz(subject: Subject) -> float | None:
    """Bits per byte of a compressor on the texts; None for conversations."""
    if subject.has_chats:
        return None
    return anchors.xz_bits_per_byte(b"".join(document.text.content for document in subject.encoded))


def ngram(subject: Subject) -> float | None:
    """Bits per byte of a 5-gram model of the training text on the texts.

    None for conversations, or if the training text is not here.
    """
    if subject.training is None or subject.has_chats:
        return None
    return anchors.ngram_bits_per_byte(subject.training.content, torch.cat(subject.contents))


def validation(subject: Subject) -> float | None:
    """Bits per byte of the model on its own validation text; None if that text is not here."""
    if subject.training is None or subject.training.validation is None:
        return None
    [document] = encode_texts([subject.training.validation], subject.worker.tokenizer)
    [nats] = losses_of_documents(subject.worker, [document])
    return whole_document(document, nats).bits_per_byte


def overlap(subject: Subject) -> float | None:
    """The fraction of the texts that the training text contains; None if that is not here.

    Warns if the fraction is over MAX_OVERLAP.
    """
    if subject.training is None:
        return None
    fraction = anchors.shared_fraction(subject.training.content, subject.contents)
    if fraction > MAX_OVERLAP:
        logger.warning(f"{fraction:.0%} of the bytes stand in the training text: this tests memory")
    return fraction


def copied(subject: Subject) -> int | None:
    """The bytes of the longest run of the model's samples that the training text contains.

    None if the training text is not here.
    """
    if subject.training is None:
        return None
    samples = subject.worker.sample(
        [None], num_samples=subject.n_samples, max_new_tokens=SAMPLE_TOKENS
    )
    return anchors.longest_copy(subject.training.content, samples)
