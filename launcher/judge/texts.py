"""Read the texts on which a model is judged, and the text from which it has learned."""

from __future__ import annotations

import json
import logging
import math
from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from sm_nanogpt.entry_point.errors import TrainingError
from sm_nanogpt.entry_point.text import Corpus, Tokenizer
from sm_nanogpt.launcher.errors import (
    InputError,
    LauncherError,
    list_characters,
    unknown_characters_error,
)
from sm_nanogpt.launcher.finding import find
from sm_nanogpt.launcher.job import FULL_ID
from sm_nanogpt.launcher.judge.anchors import as_tensor
from sm_nanogpt.launcher.models.chat import ID_TYPE_CODE, ChatEncoder
from sm_nanogpt.launcher.models.encoder import Encoder
from sm_nanogpt.launcher.models.load import packaged_config
from sm_nanogpt.launcher.models.sample import unknown_characters
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.channels import Channel
from sm_nanogpt.launcher.text.documents import documents_in
from sm_nanogpt.launcher.text.files import FileOptions, find_files
from sm_nanogpt.launcher.text.ids import content_of
from sm_nanogpt.launcher.text.run_corpus import corpus_of
from sm_nanogpt.launcher.text.skipped import Skipped
from sm_nanogpt.launcher.text.sources import open_sources
from sm_nanogpt.launcher.values import counted

logger = logging.getLogger(__name__)

TRAINING_BYTES = 1 << 28  # bytes of the training text that texts and samples are compared with
VALIDATION_BYTES = 1 << 17  # bytes of the model's own validation text that are scored


@dataclass(frozen=True)
class Text:
    """A document on which a model is judged."""

    place: str  # where the document is, such as notes.txt, or chats.jsonl:3
    pieces: Sequence[str]  # of the text; or the turns of a conversation
    is_chat: bool = False

    @cached_property
    def characters(self) -> str:
        return "".join(self.pieces)

    @cached_property
    def content(self) -> bytes:
        """The bytes that a model learns. After each turn of a conversation comes a line break."""
        if not self.is_chat:
            return self.characters.encode()
        return "".join(f"{turn}\n" for turn in self.pieces).encode()


@dataclass(frozen=True)
class EncodedDocument:
    """A document as ids.

    A character that the model has never seen has no id. Its bytes, and what it costs, are added to
    the bytes and the cost of the id before it, or of the first id.
    """

    text: Text
    ids: Tensor  # int64 [n]
    is_scored: Tensor  # bool [n]: True where the loss of the id counts
    widths: Tensor  # int64 [n]: the bytes of each id
    unknown_nats: Tensor  # float64 [n]: what the unknown characters cost
    n_unknown: int = 0  # the number of unknown characters

    @property
    def size(self) -> int:
        """The number of bytes that count; of a conversation, only the answers count."""
        if self.text.is_chat:
            return int(self.widths[self.is_scored].sum())
        return len(self.text.content)


def read_texts(
    paths: Sequence[str],
    settings: Settings,
    encoding: str = "",
    column: str = "text",
    me: str = "",
) -> list[Text]:
    """Read the documents that `upload_data` would take from these paths, with its options.

    Raises InputError if a file cannot be read, or there is no text.
    """
    texts = list[Text]()
    skipped = Skipped()
    options = FileOptions(records=True, encoding=encoding, column=column, me=me)
    with open_sources(paths, settings) as sources:
        for file in find_files(sources, options):
            for document in documents_in(file, skipped):
                pieces = list(document.pieces)
                if any(pieces):
                    texts.append(Text(document.position, pieces, document.is_chat))
        skipped.check(sum(text.is_chat for text in texts))
        skipped.talks.check_name(me)
    if not texts:
        raise InputError(f"{', '.join(paths)}: no text is there")
    return texts


def encode_texts(texts: Sequence[Text], tokenizer: Tokenizer) -> list[EncodedDocument]:
    """Encode texts of which the model knows all characters, as ids.

    Raises InputError if it does not know a character, or if a text is a conversation and the
    tokenizer has no tokens for turns.
    """
    check_characters(texts, tokenizer)
    encoder = Encoder(tokenizer, ID_TYPE_CODE)
    token_widths = torch.tensor([len(word) for word in tokenizer.words])  # bytes, by id
    documents = []
    for text in texts:
        if text.is_chat:
            content = b"".join(ChatEncoder(encoder).encode(text.pieces))
        else:
            content = b"".join(encoder.encode(text.pieces))
        stored_ids = torch.tensor(array(ID_TYPE_CODE, content), dtype=torch.int64)
        is_scored = stored_ids >= 0  # an id that is not scored is stored as ~id
        ids = torch.where(is_scored, stored_ids, ~stored_ids)
        widths = token_widths[ids]
        unknown_nats = torch.zeros(len(ids), dtype=torch.float64)  # all characters are known
        documents.append(EncodedDocument(text, ids, is_scored, widths, unknown_nats))
    return documents


def encode_known_characters(texts: Sequence[Text], tokenizer: Tokenizer) -> list[EncodedDocument]:
    """Encode texts as ids, without the characters that a model of characters has never seen.

    An unknown character costs an escape and its bytes, of which all values are equally likely. The
    probability of an escape is the share of unknown characters in the texts; known characters have
    the rest. So the losses add up to the length of a code from which the texts can be decoded.

    Raises InputError if conversations have unknown characters, if the model knows no character of a
    text, and if a text ends its lines in CRLF where the model has only seen LF.
    """
    unknown = set[str]()
    for text in texts:
        unknown |= unknown_characters(tokenizer, text.characters)
    if not unknown or any(text.is_chat for text in texts):
        return encode_texts(texts, tokenizer)

    known_texts = [without_characters(text, unknown) for text in texts]
    n_characters = sum(len(text.characters) for text in texts)
    n_unknown = n_characters - sum(len(text.characters) for text in known_texts)
    share = n_unknown / n_characters
    encoded = []
    for text, document in zip(texts, encode_texts(known_texts, tokenizer), strict=True):
        encoded.append(with_unknown(document, text, unknown, share))

    names = list_characters(sorted(unknown))
    counts = f"{n_unknown:,} of {n_characters:,} characters"
    logger.warning(f"the model has never seen {counts}, which count as their bytes: {names}")
    return encoded


def without_characters(text: Text, unknown: Set[str]) -> Text:
    """A text without its unknown characters.

    Raises InputError if all are unknown, or if its lines end in CRLF and the model knows only LF.
    """
    if "\r" in unknown and "\r" in text.characters:
        raise unknown_characters_error(text.place, "\r")
    known = "".join(character for character in text.characters if character not in unknown)
    if not known:
        raise unknown_characters_error(text.place, text.characters)
    return replace(text, pieces=[known])


def with_unknown(
    document: EncodedDocument, text: Text, unknown: Set[str], share: float
) -> EncodedDocument:
    """Add what unknown characters cost to the document of the known characters of `text`.

    unknown: the unknown characters. share: the fraction of the characters of all texts that are
    unknown. Each id of the document stands for one character.
    """
    widths = document.widths.tolist()
    nats = [-math.log1p(-share)] * len(widths)
    last_known = -1  # the index of the last known character, and so of its id
    for character in text.characters:
        if character in unknown:
            n_bytes = len(character.encode())
            index = max(0, last_known)
            widths[index] += n_bytes
            nats[index] += n_bytes * math.log(256) - math.log(share)
        else:
            last_known += 1
    return replace(
        document,
        text=text,
        widths=torch.tensor(widths),
        unknown_nats=torch.tensor(nats, dtype=torch.float64),
        n_unknown=len(text.characters) - len(widths),
    )


def check_characters(texts: Sequence[Text], tokenizer: Tokenizer) -> None:
    """Raise InputError if a model has no ids for characters of the texts.

    The message lists them, with the first text that has any.
    """
    unknown = set[str]()
    places = []
    for text in texts:
        unknown_in_text = unknown_characters(tokenizer, text.characters)
        if unknown_in_text:
            unknown |= unknown_in_text
            places.append(text.place)
    if not places:
        return
    subject = places[0]
    if len(places) > 1:
        subject += f", as {counted(len(places) - 1, 'other document')},"
    raise unknown_characters_error(subject, unknown)


# -- the text from which a model has learned -------------------------------------------------------


@dataclass(frozen=True)
class TrainingText:
    """The beginning of the text from which a model has learned."""

    content: Tensor  # the first TRAINING_BYTES or fewer, uint8 [n]
    validation: Text | None  # the first VALIDATION_BYTES of that part; None for conversations


def training_corpus(
    model: str, directory: Path, settings: Settings, unmeasured: str
) -> Corpus | None:
    """Read the text from which the model in a directory has learned, as ids.

    model: the id of its job, or what the user calls it. If the text is not on this machine, returns
    None, and warns that the caller cannot measure `unmeasured`.
    """
    # A model that was fetched is in a directory with the id of its job.
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


def corpus_of_job(job_id: str, directory: Path, settings: Settings) -> Corpus:
    """Read the text of a job from its store, as ids. directory: that of the job's model."""
    backend, _ = find(job_id, settings)
    job = backend.job(job_id)
    training = json.loads((directory / "training.json").read_bytes())
    texts = {"data": Channel(job.data, job.data)}
    if job.validation is not None:
        texts["validation"] = Channel(job.validation, job.validation)
    return corpus_of(texts, settings, packaged_config(training["config"]))


def training_of(corpus: Corpus) -> TrainingText:
    """The beginnings of the training text and of the validation text of a corpus."""
    vocabulary = corpus.tokenizer.words
    content = as_tensor(content_of(corpus.train, vocabulary, TRAINING_BYTES))
    if corpus.is_chat:
        return TrainingText(content, None)
    validation = content_of(corpus.val, vocabulary, VALIDATION_BYTES)
    return TrainingText(content, Text("validation", [validation.decode(errors="ignore")]))
