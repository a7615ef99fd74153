"""The texts that a model is judged on, as documents; and the text that it has learned from."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from entry_point.text import Tokenizer
from launcher.errors import InputError, unknown_characters
from launcher.finding import find
from launcher.judge.anchors import as_tensor
from launcher.models.chat import ChatEncoder
from launcher.models.encoder import Encoder
from launcher.models.load import known_config
from launcher.models.sample import unknown_in
from launcher.settings import Settings
from launcher.text.channels import Channel, corpus_of
from launcher.text.documents import documents_in
from launcher.text.files import FileOptions, find_files
from launcher.text.ids import content_of
from launcher.text.skipped import Skipped
from launcher.text.sources import open_sources

MOST_BYTES = 1 << 28  # of the text to train on, with which others are compared
VALIDATION_BYTES = 1 << 17  # of the model's own validation text that are scored


@dataclass(frozen=True)
class Text:
    """A document: its place, such as notes.txt, and its pieces or turns."""

    place: str
    pieces: Sequence[str]
    is_chat: bool = False

    @property
    def content(self) -> bytes:
        turn_end = "\n" if self.is_chat else ""  # as in what a model learns
        return "".join(piece + turn_end for piece in self.pieces).encode()


@dataclass(frozen=True)
class Encoded:
    """A document's ids [n], which of them count, bool [n], the bytes of each [n], and of all."""

    text: Text
    ids: Tensor
    counts: Tensor
    widths: Tensor
    content: bytes

    @property
    def size(self) -> int:
        """The bytes that count: of a conversation, those of the answers."""
        return int(self.widths[self.counts].sum()) if self.text.is_chat else len(self.content)


def read_texts(
    paths: Sequence[str], settings: Settings, encoding: str = "", column: str = "text"
) -> list[Text]:
    """The documents that `upload_data` would take of these paths. Raises InputError."""
    found, skipped = list[Text](), Skipped()
    options = FileOptions(records=True, encoding=encoding, column=column)
    with open_sources(paths, settings) as sources:
        for file in find_files(sources, options):
            for document in documents_in(file, skipped):
                pieces = list(document.pieces)
                if any(pieces):
                    found.append(Text(document.position, pieces, document.is_chat))
        skipped.check(sum(text.is_chat for text in found))
    if not found:
        raise InputError(f"{', '.join(paths)}: no text is there")
    return found


def encode(texts: Sequence[Text], tokenizer: Tokenizer) -> list[Encoded]:
    """The ids of each text. Raises InputError if the model does not know one of its characters."""
    check_all_known(texts, tokenizer)
    encoder = Encoder(tokenizer, "i")
    chat = ChatEncoder(encoder) if any(text.is_chat for text in texts) else encoder
    widths, encoded = torch.tensor([len(word) for word in tokenizer.words]), list[Encoded]()
    for text in texts:
        way = chat if text.is_chat else encoder
        ids = torch.tensor(array("i", b"".join(way.encode(text.pieces))), dtype=torch.int64)
        plain = ids ^ (ids >> 63)  # ~id does not count
        encoded.append(Encoded(text, plain, ids >= 0, widths[plain], text.content))
    return encoded


def check_all_known(texts: Sequence[Text], tokenizer: Tokenizer) -> None:
    """Raise InputError with all characters of the texts that a model of characters lacks."""
    unknown_by_place = {
        text.place: unknown
        for text in texts
        if (unknown := unknown_in(tokenizer, "".join(text.pieces)))
    }
    if not unknown_by_place:
        return
    name, *others = unknown_by_place
    if others:
        name = f"{name}, as {len(others)} other document{'s' if len(others) > 1 else ''},"
    raise unknown_characters(name, set().union(*unknown_by_place.values()))


# -- the text that a model has learned from --------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """The first MOST_BYTES of a text to train on, uint8 [n], and part of its validation text."""

    content: Tensor
    validation: Text | None  # None for conversations


def training_of(job_id: str, directory: Path, settings: Settings) -> Training:
    """The text of a job, whose model is in a directory, from its store."""
    job = find(job_id, settings)[0].job(job_id)
    values = json.loads((directory / "training.json").read_bytes())["config"]
    texts = {"data": job.data, "validation": job.validation}
    channels = {name: Channel(uri, uri, None, []) for name, uri in texts.items() if uri}
    corpus = corpus_of(channels, settings, known_config(values), begins_only=True)
    content = content_of(corpus.train, corpus.tokenizer.words, MOST_BYTES)
    own = content_of(corpus.val, corpus.tokenizer.words, VALIDATION_BYTES)
    validation = None if corpus.is_chat else Text("validation", [own.decode(errors="ignore")])
    return Training(as_tensor(content), validation)
