"""Measure how much of a validation text its training text contains.

If it is much, val_loss measures memory.

The measure is that of `overlap` in launcher/judge/anchors.py, without torch: the share of the bytes
that lie in runs of RUN_BYTES or more which both texts have. Each run of white space counts as one
space.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sm_nanogpt.launcher.text.encodings import read_text
from sm_nanogpt.launcher.text.store import VALIDATION_FRACTION

if TYPE_CHECKING:  # with the readers of all formats
    from sm_nanogpt.launcher.text.reading import File

logger = logging.getLogger(__name__)

RUN_BYTES = 50  # by chance, two texts share no run of so many bytes
MIN_SHARE_TO_WARN = 0.2  # of a validation text
SAMPLE_BYTES = 1 << 18  # of a validation text that are searched for in the training text
N_SAMPLES = 16  # parts that make the sample of a long text
MAX_TRAINING_BYTES = 1 << 28  # the rest of a training text is not searched
MAX_LOOKUPS = 1 << 21  # the most runs of a training text that are looked up
SPACES = bytes.maketrans(b"\t\n\v\f\r", b"     ")


def with_one_space(content: bytes) -> bytes:
    """The text with each run of white space as one space."""
    content = content.translate(SPACES)
    while b"  " in content:
        content = content.replace(b"  ", b" ")
    return content


def repeated_share(training: Iterable[bytes], validation: bytes, n_training_bytes: int) -> float:
    """The share of a validation text, 0 to 1, that a training text contains.

    `training` yields the training text in pieces, of about n_training_bytes in all. If a training
    text has more than MAX_LOOKUPS bytes, only every step-th run is looked up, so shared parts that
    are shorter than RUN_BYTES + step may be missed.
    """
    sample = with_one_space(validation)
    hashes = [
        hash(sample[start : start + RUN_BYTES]) for start in range(len(sample) - RUN_BYTES + 1)
    ]
    step = min(RUN_BYTES, 1 + n_training_bytes // MAX_LOOKUPS)
    shared = shared_hashes(set(hashes), training, step)

    n_repeated = 0  # bytes
    end = 0  # of the last run that is repeated
    for start, run_hash in enumerate(hashes):
        if run_hash in shared:
            first_new = max(start, end)  # runs overlap
            end = start + RUN_BYTES
            n_repeated += end - first_new
    return n_repeated / max(1, len(sample))


def shared_hashes(hashes: set[int], training: Iterable[bytes], step: int) -> set[int]:
    """The hashes that also a run of the training text has. Only every step-th run is hashed."""
    shared: set[int] = set()
    pending = b""  # the end of the text so far, in which a run may begin
    for piece in training:
        text = with_one_space(pending + piece)
        starts = range(0, len(text) - RUN_BYTES + 1, step)
        shared |= hashes.intersection(hash(text[start : start + RUN_BYTES]) for start in starts)
        pending = text[len(starts) * step :]
    return shared


def sampled_ranges(length: int, limit: int = SAMPLE_BYTES) -> list[tuple[int, int]]:
    """Begin and end of each part of a text that is sampled: all of it, or N_SAMPLES parts."""
    if length <= limit:
        return [(0, length)]
    begins = [length * number // N_SAMPLES for number in range(N_SAMPLES)]
    return [(begin, begin + limit // N_SAMPLES) for begin in begins]


# -- plain text ------------------------------------------------------------------------------------


def share_within_text(
    files: Sequence[File], n_characters: int, validation_fraction: float = VALIDATION_FRACTION
) -> float:
    """The share of the end of a text, which validates, that the part before contains.

    n_characters is the length of the text.
    """
    n_train = int(n_characters * (1 - validation_fraction))
    validation = sample_of(files, n_train, n_characters - n_train)
    return repeated_share(training_of(files, n_train), validation, size_of(files))


share_of_end = cache(share_within_text)  # all jobs of a sweep ask for it


@cache  # all jobs of a sweep ask for it
def share_between(
    files: tuple[File, ...], validation: tuple[File, ...], n_characters: int
) -> float:
    """The share of a validation text, of n_characters, that the text in `files` contains."""
    sample = sample_of(validation, 0, n_characters)
    return repeated_share(training_of(files, MAX_TRAINING_BYTES), sample, size_of(files))


def size_of(files: Iterable[File]) -> int:
    return sum(file.path.stat().st_size for file in files)


def read_chunks(files: Iterable[File]) -> Iterator[str]:
    """The text of files in chunks, in the order in which train.py reads them."""
    from sm_nanogpt.launcher.text.reading import open_text  # with the readers of all formats

    for file in sorted(files, key=lambda file: Path(file.name)):
        with open_text(file) as content:
            yield from read_text(content, file.shown)


def training_of(files: Sequence[File], n_train: int) -> Iterator[bytes]:
    """Yield the first n_train characters of a text, in chunks; about MAX_TRAINING_BYTES at most."""
    n_bytes = 0
    for text in read_chunks(files):
        chunk = text[:n_train].encode()
        yield chunk
        n_bytes += len(chunk)
        n_train -= len(text)
        if n_train <= 0 or n_bytes >= MAX_TRAINING_BYTES:
            return


def sample_of(files: Sequence[File], start: int, length: int) -> bytes:
    """Sample the part of a text that has `length` characters from `start` on."""
    ranges = [(start + begin, start + end) for begin, end in sampled_ranges(length)]
    parts: list[str] = []
    position = 0  # of the chunk in the text
    for text in read_chunks(files):
        for begin, end in ranges:
            parts.append(text[max(0, begin - position) : max(0, end - position)])
        position += len(text)
    return "".join(parts).encode()


def warn_of_repeats(name: str, share: float | None) -> None:
    """Warn if the training text contains so much of a validation text that val_loss measures
    memory. name: what the warning calls the text."""
    if share is None or share < MIN_SHARE_TO_WARN:
        return
    repeats = f"{share:.0%} of the validation text stands in the training text"
    warning = f"{name}: {repeats}, so val_loss measures memory"
    logger.warning(warning, extra={"code": "text-repeats"})
