"""Encode documents as tokens, in shards that train.py maps into memory.

An upload of tokens has these files:

    tokenizer.json          for the `tokenizers` library, with tokenizer_config.json
    train-00000.bin, ...    ids, uint16 or uint32; each document ends with the end-of-text token.
                            Ids of conversations are int32, as launcher/models/chat.py says
    val-00000.bin, ...      the same, for whole documents that are not in train
    meta.json               the list of the shards; its SHA-256 stands for the upload

The order of the documents is random, and fixed by a seed, so that neighbors in a sorted collection
do not share a batch. The last documents are for validation, with all their copies.
"""

from __future__ import annotations

import logging
import mmap
import random
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.conversations import END_OF_TURN
from sm_nanogpt.entry_point.files import file_sha256
from sm_nanogpt.entry_point.text import Tokenizer, read_tokens
from sm_nanogpt.launcher.errors import InputError, unknown_characters_error
from sm_nanogpt.launcher.files.progress import Progress, expect
from sm_nanogpt.launcher.models.chat import ID_TYPE_CODE, ChatEncoder
from sm_nanogpt.launcher.models.encoder import ASSISTANT_PREFIX, Encoder
from sm_nanogpt.launcher.text import repeats
from sm_nanogpt.launcher.text.documents import Survey, read_documents
from sm_nanogpt.launcher.text.ids import IDS_AT_ONCE, content_of, write_meta, write_tokenizer
from sm_nanogpt.launcher.text.reading import File
from sm_nanogpt.launcher.text.store import VALIDATION_FRACTION
from sm_nanogpt.launcher.text.tokenizer import USUAL_ENDS

logger = logging.getLogger(__name__)

BATCH_CHARACTERS = 1 << 22  # that are encoded at once
PIECE_OVERHEAD = 256  # what each piece of a batch costs besides its characters, in characters
SHARD_BYTES = 1 << 28
# The most tokens for validation, which else gets a tenth: an evaluation uses no more.
MAX_VALIDATION_TOKENS = 5_000_000
SEED = 1337
TYPE_NAMES = {"H": "uint16", "I": "uint32", "i": "int32"}  # by the type codes of array

Batch = list[str | None]  # pieces of documents; None: a document ends


def encode(
    files: Sequence[File],
    survey: Survey,
    tokenizer: Tokenizer,
    directory: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Write documents as tokens into an empty directory; return fields of their Upload.

    If there is one document, its last tenth is for validation. Raises InputError if the text has
    changed since it was surveyed, or if its tokens do not decode to it.
    """
    if survey.chats == 1:
        raise InputError("one conversation is too little to train and validate on")
    if survey.chats:
        tokenizer = with_end_of_text(tokenizer)
    expect(progress, survey.size)
    unsorted = directory / "unsorted"
    with unsorted.open("wb") as file:
        writer = DocumentWriter(tokenizer, survey.chats > 0, file, progress)
        encode_documents(files, survey, writer)
    with (
        unsorted.open("rb") as written,
        mmap.mmap(written.fileno(), 0, access=mmap.ACCESS_READ) as ids,
    ):
        documents = EncodedDocuments(ids, writer.ends, writer.width)
        parts = part_documents(documents, survey)
        shards = {
            name: write_shards(directory, name, documents, part) for name, part in parts.items()
        }
    unsorted.unlink()
    n_tokens = {name: sum(shard["tokens"] for shard in shards[name]) for name in parts}
    write_tokenizer(directory, tokenizer)
    meta = {name: {"tokens": n_tokens[name], "shards": shards[name]} for name in parts}
    write_meta(directory, tokenizer, TYPE_NAMES[writer.type_code], meta)
    report_parts(n_tokens["train"], n_tokens["val"])
    contexts = writer.answer_contexts
    return {
        "files": tuple(sorted(path.name for path in directory.iterdir())),
        "train_tokens": n_tokens["train"],
        "val_tokens": n_tokens["val"],
        "vocabulary_size": len(tokenizer),
        "contexts": dict(Counter(documents.length(n) - 2 for n in range(len(contexts)))),
        "answers": {
            name: min(contexts[n] for n in part) for name, part in parts.items() if contexts
        },
    }


def encode_documents(files: Sequence[File], survey: Survey, writer: DocumentWriter) -> None:
    """Encode and write the documents of files. Raises InputError if they are not those of the
    survey."""
    cut = 0  # position, in characters, at which a single document is cut; 0: nowhere
    if survey.documents == 1:
        cut = int(survey.characters * (1 - VALIDATION_FRACTION))
    survey_again = Survey()
    for batch in batches(read_documents(files, survey_again), cut):
        writer.write(batch)
    if survey_again.sha256 != survey.sha256:
        raise InputError("the text changed while it was read; upload it again")


def part_documents(documents: EncodedDocuments, survey: Survey) -> dict[str, list[int]]:
    """The indices of the documents for training and for validation, as `split` returns them."""
    if survey.documents == 1:  # it was cut in two
        return {"train": [0], "val": [1]}
    hashes = array("q", (hash(documents.content(index)) for index in range(len(documents))))
    n_copies = len(hashes) - len(set(hashes))
    if n_copies:
        kind = "conversations" if survey.chats else "documents"
        copies = "are copies; each is in the same part as its original"
        logger.info(f"{n_copies:,} of {survey.documents:,} {kind} {copies}")
    return split(documents.ends, hashes)


def report_parts(n_train: int, n_val: int) -> None:
    """Log the number of tokens for training and for validation."""
    logger.info(f"tokenizer: {n_train:,} tokens to train on, {n_val:,} to validate on")
    share = n_val / (n_train + n_val)
    if share > 2 * VALIDATION_FRACTION:
        reason = "each document is whole, and longer than a tenth of the text"
        logger.warning(f"{share:.0%} of the tokens are for validation: {reason}")


def share_within_tokens(directory: Path) -> float:
    """The share of the validation text, 0 to 1, that the training text contains, in an upload of
    tokens."""
    corpus = read_tokens(directory, Config())
    vocabulary = corpus.tokenizer.words
    width = max(1, sum(map(len, vocabulary)) // len(vocabulary))  # mean bytes of a token
    ranges = repeats.sampled_ranges(len(corpus.val), repeats.SAMPLE_BYTES // width)
    sample = b"".join(content_of(corpus.val[begin:end], vocabulary) for begin, end in ranges)
    n_train = min(len(corpus.train), repeats.MAX_TRAINING_BYTES // width)
    training = (
        bytes(content_of(corpus.train[begin : min(begin + IDS_AT_ONCE, n_train)], vocabulary))
        for begin in range(0, n_train, IDS_AT_ONCE)
    )
    return repeats.repeated_share(training, bytes(sample), n_train * width)


def with_end_of_text(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, with a token for the end of a text that does not also end a turn, as it does
    in Qwen's."""
    if tokenizer.end_of_text != END_OF_TURN:
        return tokenizer
    for name in USUAL_ENDS:
        if name in tokenizer.special:
            return Tokenizer(tokenizer.document, name)
    raise InputError(f"the tokenizer has no token but {END_OF_TURN} that ends a text")


def split(ends: array[int], hashes: Sequence[int]) -> dict[str, list[int]]:
    """Split documents into training and validation; return the indices of each part, in random
    order.

    ends are the positions of the documents' ends, counted in ids, and hashes those of their
    contents. Copies of a document are in one part. If together they are longer than the validation
    part may be, that is the training part, unless this holds for all documents. Raises InputError
    if all documents are equal.
    """
    order = list(range(len(ends)))
    random.Random(SEED).shuffle(order)
    lengths: Counter[int] = Counter()  # in tokens, of all copies together
    begin = 0
    for end, content_hash in zip(ends, hashes, strict=True):
        lengths[content_hash] += end - begin
        begin = end
    if len(lengths) == 1:
        raise InputError(f"all {len(ends):,} documents are equal; give one of them")

    max_tokens = min(int(ends[-1] * VALIDATION_FRACTION), MAX_VALIDATION_TOKENS)
    validation: set[int] = set()  # hashes
    n_validation_tokens = 0
    for index in reversed(order):
        content_hash = hashes[index]
        if n_validation_tokens >= max_tokens:
            break
        if lengths[content_hash] <= max_tokens and content_hash not in validation:
            validation.add(content_hash)
            n_validation_tokens += lengths[content_hash]
    if not validation:
        validation = {min(lengths, key=lengths.__getitem__)}
    return {
        "train": [index for index in order if hashes[index] not in validation],
        "val": [index for index in order if hashes[index] in validation],
    }


def batches(pieces: Iterator[str | None], cut: int) -> Iterator[Batch]:
    """Yield the pieces of read_documents in batches of about BATCH_CHARACTERS characters.

    If `cut` is not 0, the first document is cut in two after that many characters.
    """
    batch: Batch = []
    size = 0
    for piece in pieces:
        if piece is None:
            batch.append(None)
            continue
        if 0 < cut <= len(piece):
            batch += [piece[:cut], None, piece[cut:]]
        else:
            batch.append(piece)
        cut -= len(piece)
        size += len(piece) + PIECE_OVERHEAD
        if size >= BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    yield batch


class DocumentWriter:
    """Writes the ids of documents into a file, one document after the other, each with its end."""

    def __init__(
        self, tokenizer: Tokenizer, are_chats: bool, file: IO[bytes], progress: Progress
    ) -> None:
        self.tokenizer = tokenizer
        self.file = file
        self.progress = progress
        if are_chats:
            self.type_code = ID_TYPE_CODE
        elif len(tokenizer) <= 1 << 16:
            self.type_code = "H"
        else:
            self.type_code = "I"
        self.width = array(self.type_code).itemsize  # bytes of an id
        self.encoder = Encoder(tokenizer, self.type_code)
        self.chat_encoder = ChatEncoder(self.encoder) if are_chats else None
        self.end = self.encode_end()
        self.n_ids = 0
        self.ends = array("Q")  # where each document ends, counted in ids
        # The context that holds each conversation up to its first answer.
        self.answer_contexts = array("Q")

    def encode_end(self) -> bytes:
        """The bytes of the id that ends a text. In a conversation, the loss leaves it out."""
        end = self.tokenizer.end
        if end is None:
            return b""
        if self.chat_encoder is not None:
            end = ~end
        return array(self.type_code, [end]).tobytes()

    def write(self, batch: Batch) -> None:
        pieces = [piece for piece in batch if piece is not None]
        self.check_characters(pieces)
        encoder = self.encoder if self.chat_encoder is None else self.chat_encoder
        encoded = iter(encoder.encode(pieces))
        for piece in batch:
            if piece is None:
                self.write_ids(self.end)
                self.ends.append(self.n_ids)
            else:
                self.write_ids(next(encoded))
                self.note_answer(piece)
        self.progress(sum(len(piece.encode()) for piece in pieces))

    def write_ids(self, ids: bytes) -> None:
        self.file.write(ids)
        self.n_ids += len(ids) // self.width

    def check_characters(self, pieces: Sequence[str]) -> None:
        """Raise InputError if the tokenizer is of characters, and lacks one of the pieces'."""
        if self.tokenizer.unit != "characters":
            return
        unknown = set().union(*pieces) - self.characters
        if unknown:
            raise unknown_characters_error("the text", unknown)

    @cached_property
    def characters(self) -> set[str]:
        """The characters of a tokenizer of characters."""
        return {word.decode() for word in self.tokenizer.words}

    def note_answer(self, turn: str) -> None:
        """Note the length of a conversation up to this turn, if the turn is its first answer."""
        is_first = len(self.answer_contexts) == len(self.ends)
        if self.chat_encoder is None or not is_first or not turn.startswith(ASSISTANT_PREFIX):
            return
        begin = self.ends[-1] if self.ends else 0
        n_line_break = len(self.chat_encoder.line_break_ids)
        self.answer_contexts.append(self.n_ids - begin - n_line_break - 1)  # the last is a target


@dataclass(frozen=True)
class EncodedDocuments:
    """The ids of documents, one after the other."""

    ids: mmap.mmap
    ends: array[int]  # where each document ends, counted in ids
    width: int  # bytes of an id

    def __len__(self) -> int:
        return len(self.ends)

    def begin(self, index: int) -> int:
        """Where a document begins, counted in ids."""
        return self.ends[index - 1] if index else 0

    def length(self, index: int) -> int:
        """The number of ids of a document."""
        return self.ends[index] - self.begin(index)

    def content(self, index: int) -> bytes:
        """The ids of a document, as bytes."""
        return self.ids[self.begin(index) * self.width : self.ends[index] * self.width]


def write_shards(
    directory: Path, part: str, documents: EncodedDocuments, indices: Sequence[int]
) -> list[dict[str, Any]]:
    """Write the documents of a part, in the order of their indices, to files of SHARD_BYTES.

    Returns the entries of the files in meta.json. A document may extend over two files.
    """
    shards: list[dict[str, Any]] = []
    contents = map(documents.content, indices)
    n_pending = documents.width * sum(documents.length(index) for index in indices)  # bytes
    content = b""  # the part of a document that is not written yet
    while n_pending:
        path = directory / f"{part}-{len(shards):05d}.bin"
        n_bytes = min(n_pending, SHARD_BYTES)
        n_unwritten = n_bytes
        with path.open("wb") as file:
            while n_unwritten:
                content = content or next(contents)
                n_written = file.write(content[:n_unwritten])
                content = content[n_written:]
                n_unwritten -= n_written
        n_pending -= n_bytes
        n_tokens = n_bytes // documents.width
        shards.append({"name": path.name, "tokens": n_tokens, "sha256": file_sha256(path)})
    return shards
