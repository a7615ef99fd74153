"""Encode documents as tokens, in shards that train.py maps into memory.

An upload of tokens has these files:

    tokenizer.json          for the `tokenizers` library, with tokenizer_config.json
    train-00000.bin, ...    ids, uint16 or uint32, each document ended by the end-of-text token;
                            of conversations int32, as launcher/models/chat.py says
    val-00000.bin, ...      whole documents, which are not in train
    meta.json               what there is; its SHA-256 stands for the upload

The order of the documents is random but fixed by a seed, so that neighbors in a sorted collection
do not share a batch, and the last of them are those for validation, with all their copies.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import random
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from entry_point.config import Config
from entry_point.conversations import END_OF_TURN
from entry_point.files import file_sha256
from entry_point.text import Tokenizer, read_tokens
from launcher.errors import InputError, unknown_characters
from launcher.files.progress import Progress, expect
from launcher.files.storage import json_bytes
from launcher.models.chat import SPEAKS, ChatEncoder
from launcher.models.encoder import Encoder
from launcher.text import repeats
from launcher.text.formats import Counts, File, documents
from launcher.text.ids import IDS_AT_ONCE, content_of
from launcher.text.tokenizer import KNOWN_ENDS

logger = logging.getLogger(__name__)

BATCH = 1 << 22  # characters encoded at once
PIECE_OVERHEAD = 256  # characters that a piece of a batch counts for besides its own
SHARD_BYTES = 1 << 28
# The part kept for validation: a tenth, but no more tokens than an evaluation can use.
VALIDATION_FRACTION, VALIDATION_TOKENS = 0.1, 5_000_000
SEED = 1337
Batches = Iterator[list[str | None]]


def survey(files: Sequence[File]) -> Counts:
    counts = Counts()
    deque(documents(files, counts), maxlen=0)
    if counts.empty:
        total = counts.documents + counts.empty
        logger.warning(f"{counts.empty:,} of {total:,} documents left out: no text")
    return counts


def encode(
    files: Sequence[File], counts: Counts, tokenizer: Tokenizer, directory: Path, progress: Progress
) -> dict[str, Any]:
    """Write the documents as tokens into an empty directory; returns fields of their Upload.

    A single document is cut, its last tenth is the one for validation. Raises InputError if the
    text has changed since it was surveyed, or does not come back from the tokenizer.
    """
    tokenizer = separated(tokenizer) if counts.chats else tokenizer
    content = json.dumps(tokenizer.document, ensure_ascii=False, separators=(",", ":"))
    size = len(tokenizer)
    code = "i" if counts.chats else "H" if size <= 1 << 16 else "I"
    again = Counts()
    if counts.chats == 1:
        raise InputError("one conversation is too little to train and validate on")
    cut = int(counts.characters * (1 - VALIDATION_FRACTION)) if counts.documents == 1 else 0
    expect(progress, counts.size)
    unsorted = directory / "unsorted"
    with unsorted.open("wb") as file:
        ends, needed = write_documents(
            batches(documents(files, again), cut), tokenizer, code, file, progress
        )
    if again.sha256 != counts.sha256:
        raise InputError("the text changed while it was read; upload it again")
    meta: dict[str, Any] = {
        "dtype": {"H": "uint16", "I": "uint32", "i": "int32"}[code],
        "end_of_text": tokenizer.end_of_text,
        "tokenizer_sha256": hashlib.sha256(content.encode()).hexdigest(),
    }
    with (
        unsorted.open("rb") as written,
        mmap.mmap(written.fileno(), 0, access=mmap.ACCESS_READ) as ids,
    ):
        width = array(code).itemsize
        hashes = array("q", map(hash, contents(ids, ends, range(len(ends)), width)))
        parts = {"train": [0], "val": [1]} if counts.documents == 1 else split(ends, hashes)
        if copies := len(hashes) - len(set(hashes)):
            kind = "conversations" if counts.chats else "documents"
            what = "are copies; each is in the same part as its original"
            logger.info(f"{copies:,} of {counts.documents:,} {kind} {what}")
        for name, part in parts.items():
            shards = write_shards(directory, name, ids, ends, part, width)
            meta[name] = {"tokens": sum(s["tokens"] for s in shards), "shards": shards}
    unsorted.unlink()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": tokenizer.end_of_text,
    }
    (directory / "tokenizer.json").write_text(content, encoding="utf-8")
    (directory / "tokenizer_config.json").write_bytes(json_bytes(config))
    (directory / "meta.json").write_bytes(json_bytes(meta))
    train, val = meta["train"]["tokens"], meta["val"]["tokens"]
    logger.info(f"tokenizer: {train:,} tokens to train on, {val:,} to validate on")
    if (share := val / (train + val)) > 2 * VALIDATION_FRACTION:
        why = "each document is whole, and longer than a tenth of the text"
        logger.warning(f"{share:.0%} of the tokens are for validation: {why}")
    return {
        "files": tuple(sorted(path.name for path in directory.iterdir())),
        "train_tokens": train,
        "val_tokens": val,
        "vocabulary_size": size,
        "contexts": dict(Counter(length(ends, n) - 2 for n in range(len(needed)))),
        "answers": {name: min(needed[n] for n in part) for name, part in parts.items() if needed},
    }


def share_within(directory: Path) -> float:
    """The share of the validation tokens whose text stands in that of the training tokens."""
    corpus = read_tokens(directory, Config())
    words = corpus.tokenizer.words
    width = max(1, sum(map(len, words)) // len(words))  # of a token, in bytes
    ranges = repeats.sampled_ranges(len(corpus.val), repeats.SAMPLE // width)
    sample = b"".join(content_of(corpus.val[begin:end], words) for begin, end in ranges)
    n_train = min(len(corpus.train), repeats.TRAINING // width)
    training = (
        bytes(content_of(corpus.train[begin : min(begin + IDS_AT_ONCE, n_train)], words))
        for begin in range(0, n_train, IDS_AT_ONCE)
    )
    return repeats.repeated_share(training, bytes(sample), n_train * width)


def separated(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with an end of text that does not end a turn, as Qwen's own does."""
    if tokenizer.end_of_text != END_OF_TURN:
        return tokenizer
    if end := next((name for name in KNOWN_ENDS if name in tokenizer.special), None):
        return Tokenizer(tokenizer.document, end)
    raise InputError(f"the tokenizer has no token but {END_OF_TURN} that ends a text")


def split(ends: array[int], hashes: Sequence[int]) -> dict[str, list[int]]:
    """The documents of each part, in random order; all copies of one are in the same part.

    Those that are together longer than the whole validation part should be are for training, unless
    all are.
    """
    order = list(range(len(ends)))
    random.Random(SEED).shuffle(order)
    lengths = Counter[int]()
    for index, copy in enumerate(hashes):
        lengths[copy] += length(ends, index)
    if len(lengths) == 1:
        raise InputError(f"all {len(ends):,} documents are equal; give one of them")
    wanted = min(int(ends[-1] * VALIDATION_FRACTION), VALIDATION_TOKENS)
    val, tokens = set[int](), 0
    for copy in map(hashes.__getitem__, reversed(order)):
        if tokens < wanted and lengths[copy] <= wanted and copy not in val:
            val.add(copy)
            tokens += lengths[copy]
    val = val or {min(lengths, key=lengths.__getitem__)}
    return {
        "train": [index for index in order if hashes[index] not in val],
        "val": [index for index in order if hashes[index] in val],
    }


def write_documents(
    batched: Batches, tokenizer: Tokenizer, code: str, file: IO[bytes], progress: Progress
) -> tuple[array[int], array[int]]:
    """Write the ids of each document and of its end.

    Returns where each ends, counted in ids, and for each conversation the context that holds it up
    to its first answer.
    """
    encoder = Encoder(tokenizer, code)
    chat = ChatEncoder(encoder) if code == "i" else None
    end = array(code, [] if tokenizer.end is None else [~tokenizer.end if chat else tokenizer.end])
    known = {w.decode() for w in tokenizer.words} if tokenizer.unit == "characters" else None
    ends, needed, position = array("Q"), array("Q"), 0
    for batch in batched:
        pieces = [piece for piece in batch if piece is not None]
        unknown = set().union(*pieces) - known if known else set()
        if unknown:
            raise unknown_characters("the text", unknown)
        each = iter(chat.encode(pieces) if chat else encoder.encode(pieces))
        for piece in batch:
            ids = end.tobytes() if piece is None else next(each)
            position += len(ids) // end.itemsize
            file.write(ids)
            if chat and piece and piece.startswith(SPEAKS) and len(needed) == len(ends):
                begin = ends[-1] if ends else 0
                needed.append(position - begin - len(chat.line_break) - 1)  # the last is a target
            if piece is None:
                ends.append(position)
        progress(sum(len(piece.encode()) for piece in pieces))
    return ends, needed


def batches(pieces: Iterator[str | None], cut: int) -> Batches:
    """Those of `documents`, some BATCH characters together.

    The first document ends after `cut` characters too, if that is not 0.
    """
    batch, size = list[str | None](), 0
    for piece in pieces:
        if piece is None:
            batch.append(None)
            continue
        batch += [piece[:cut], None, piece[cut:]] if 0 < cut <= len(piece) else [piece]
        cut -= len(piece)
        size += len(piece) + PIECE_OVERHEAD
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def length(ends: array[int], index: int) -> int:
    return ends[index] - (ends[index - 1] if index else 0)


def contents(ids: mmap.mmap, ends: array[int], order: Sequence[int], width: int) -> Iterator[bytes]:
    return (ids[(ends[i] - length(ends, i)) * width : ends[i] * width] for i in order)


def write_shards(
    directory: Path, name: str, ids: mmap.mmap, ends: array[int], order: Sequence[int], width: int
) -> list[dict[str, Any]]:
    """Write documents, in this order, to files of SHARD_BYTES; returns what meta.json says."""
    shards: list[dict[str, Any]] = []
    chunks = contents(ids, ends, order, width)
    pending, left = b"", width * sum(length(ends, i) for i in order)
    while left:
        path = directory / f"{name}-{len(shards):05d}.bin"
        size = here = min(left, SHARD_BYTES)
        with path.open("wb") as file:
            while here:
                pending = pending or next(chunks)
                part, pending = pending[:here], pending[here:]
                here -= file.write(part)
        left -= size
        shards.append({"name": path.name, "tokens": size // width, "sha256": file_sha256(path)})
    return shards
