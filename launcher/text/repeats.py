"""How much of a validation text stands in its training text; where much does, val_loss is memory.

The measure is that of launcher/judge/anchors.py, without torch: bytes in runs of RUN or more that
both texts have, with each run of white space as one space.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from launcher.files.storage import CHUNK_BYTES
from launcher.text.encodings import read_text
from launcher.text.formats import File, opened

logger = logging.getLogger("launcher.text")

RUN = 50  # bytes of a run that is not there by chance
LIMIT = 0.2  # the share from which a user is warned
SAMPLE, N_SAMPLES = 1 << 18, 16  # of a validation text that are looked for: bytes, and from where
TRAINING = 1 << 28  # bytes of a training text that are searched for repeats
LOOKUPS = 1 << 21  # of runs of a training text
SPACES = bytes.maketrans(b"\t\n\v\f\r", b"     ")


def with_one_space(content: bytes) -> bytes:
    """The text with each run of white space as one space."""
    content = content.translate(SPACES)
    while b"  " in content:
        content = content.replace(b"  ", b" ")
    return content


def repeated_share(training: Iterable[bytes], validation: bytes, size: int) -> float:
    """The share of a validation text that stands in a training text of some `size` bytes, 0 to 1.

    Of a training text of over LOOKUPS bytes only every n-th run is looked up, n up to RUN. Then
    runs that are shorter than RUN + n may be missed.
    """
    sample = with_one_space(validation)
    hashes = [hash(sample[start : start + RUN]) for start in range(len(sample) - RUN + 1)]
    wanted, shared, rest = set(hashes), set[int](), b""
    step = min(RUN, 1 + size // LOOKUPS)
    for piece in training:
        text = with_one_space(rest + piece)
        starts = range(0, len(text) - RUN + 1, step)
        shared |= wanted.intersection(hash(text[start : start + RUN]) for start in starts)
        rest = text[len(starts) * step :]
    covered = end = 0
    for start, key in enumerate(hashes):
        if key in shared:
            covered += start + RUN - max(start, end)
            end = start + RUN
    return covered / max(1, len(sample))


def sampled_ranges(length: int, limit: int = SAMPLE) -> list[tuple[int, int]]:
    """Begin and end of what is looked for in a text of some length: all, or N_SAMPLES parts."""
    if length <= limit:
        return [(0, length)]
    begins = [length * number // N_SAMPLES for number in range(N_SAMPLES)]
    return [(begin, begin + limit // N_SAMPLES) for begin in begins]


# -- plain text ------------------------------------------------------------------------------------


def share_within(files: Sequence[File], characters: int, fraction: float = 0.1) -> float:
    """The repeated share of a text of so many characters whose last part, a fraction, validates."""
    n_train = int(characters * (1 - fraction))
    validation = sample_of(files, n_train, characters - n_train)
    return repeated_share(training_of(files, n_train), validation, size_of(files))


@cache  # all jobs of a sweep ask it
def share_between(files: tuple[File, ...], validation: tuple[File, ...], characters: int) -> float:
    """The repeated share of a validation text of so many characters in another text."""
    sample = sample_of(validation, 0, characters)
    return repeated_share(training_of(files, TRAINING), sample, size_of(files))


def size_of(files: Iterable[File]) -> int:
    return sum(file.path.stat().st_size for file in files)


def pieces_of(files: Iterable[File]) -> Iterator[str]:
    """The text of files in pieces, in the order in which train.py reads them."""
    for file in sorted(files, key=lambda file: Path(file.name)):
        with opened(file) as content:
            for _, text in read_text(content, file.path, CHUNK_BYTES):
                yield text


def training_of(files: Sequence[File], n_train: int) -> Iterator[bytes]:
    """The first characters of a text, in pieces, but at most some TRAINING bytes."""
    n_bytes = 0
    for text in pieces_of(files):
        piece = text[:n_train].encode()
        yield piece
        n_bytes += len(piece)
        n_train -= len(text)
        if n_train <= 0 or n_bytes >= TRAINING:
            return


def sample_of(files: Sequence[File], start: int, length: int) -> bytes:
    """What is looked for of the characters from start on."""
    ranges = [(start + begin, start + end) for begin, end in sampled_ranges(length)]
    sample, position = list[str](), 0
    for text in pieces_of(files):
        for begin, end in ranges:
            sample.append(text[max(0, begin - position) : max(0, end - position)])
        position += len(text)
    return "".join(sample).encode()


def warn_of_repeats(name: str, share: float | None) -> None:
    """Warn if so much of a validation text stands in its training text that val_loss is memory."""
    if share is not None and share >= LIMIT:
        what = f"{share:.0%} of the validation text stands in the training text"
        logger.warning(
            f"{name}: {what}, so val_loss measures memory", extra={"code": "text-repeats"}
        )
