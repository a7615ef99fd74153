"""Where a job reads its texts, and whether a run would take them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.aws import NotAsked
from launcher.errors import InputError
from launcher.files import storage
from launcher.job import Request
from launcher.settings import Settings
from launcher.text import corpus
from launcher.text.files import find_files
from launcher.text.formats import File

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Channel:
    """The text or model of one channel: the name that the user gave, its URI, files to upload.

    upload is None for text on S3 that `upload-data` did not put there; its length is unknown.
    """

    named: str
    uri: str
    upload: corpus.Upload | None
    sources: list[File]


def is_text(name: str) -> bool:
    """Whether train.py reads a file of a folder, or SageMaker is asked for a single file."""
    return name.lower().endswith((".txt", ".md"))


def find_channel(location: str, settings: Settings) -> Channel:
    """Find where the job reads a text; survey a local one for its upload."""
    uri, path = storage.to_uri(location), storage.local_path(location)
    try:
        known = corpus.find_upload(uri, settings)
    except NotAsked:
        return Channel(location, uri, None, [])
    if known is None and corpus.read_manifest(uri, settings) is not None:
        raise InputError(f"{location}: a file of this upload is missing; upload the text again")
    stays = storage.local_path(settings.data_store) is not None  # the job runs on this machine
    if known is not None and (path is None or stays):
        return Channel(location, uri, replace(known, uploaded=False), [])
    if path is None:
        there = storage.list_files(uri, settings)
        if "meta.json" not in there and not any(map(is_text, there)):
            what = "no *.txt or *.md file is there" if there else "nothing is there"
            raise InputError(f"{location}: {what}")
        # SageMaker copies all objects whose keys begin with the URI of a channel.
        if is_text(uri) and not stays and (others := storage.namesakes(uri, settings)):
            raise InputError(
                f"{location}: SageMaker would also copy {others[0]}, whose name begins the same;"
                f" copy the text to {uri.rpartition('.')[0]}/ and name that prefix instead"
            )
        return Channel(location, uri, None, [])
    # Tokens encoded on this machine before a store on S3 was set.
    if known is not None and known.train_tokens:
        sources = [File(name, path / name) for name in known.files]
        uri = storage.join(settings.data_store, "data", path.name)
        upload = replace(known, uri=uri, uploaded=not corpus.is_there(uri, settings))
    else:
        upload, sources = corpus.survey(path.name, find_files([path]), settings)
    return Channel(location, upload.uri, upload, sources)


def find_texts(request: Request, settings: Settings, near: Settings) -> dict[str, Channel]:
    """Where the job, whose store is that of `near`, reads its texts, by the job's fields."""
    data = request.data or corpus.last_upload(settings)
    named = {
        name: text for name, text in (("data", data), ("validation", request.validation)) if text
    }
    return {n: find_channel(corpus.located(text, settings), near) for n, text in named.items()}


def n_training(upload: corpus.Upload) -> int:
    """The tokens to train on, or characters."""
    return upload.train_tokens or int(0.9 * upload.characters)


def size_of(channel: Channel) -> tuple[int, int, bool]:
    """Tokens to train on, or characters; how many different ones; whether of conversations."""
    if (upload := channel.upload) is not None:
        return n_training(upload), upload.vocabulary_size, upload.chats
    raise InputError(
        f"{channel.named}: preset=auto needs the length of the text, and knows that of local texts,"
        " and of uploads unless this is a dry run; name a preset"
    )


def check_texts(channels: Mapping[str, Channel], config: Any) -> None:
    """Raise InputError if a run of this config would refuse the texts. Warn of equal ones."""
    texts = {text.upload.sha256 if text.upload else text.uri for text in channels.values()}
    if len(texts) < len(channels):
        logger.warning("--validation is the text to train on: val_loss will not show memorizing")
    for name, channel in channels.items():
        if (text := channel.upload) is None:
            continue
        unit = "tokens" if text.train_tokens else "characters"
        if text.train_tokens and len(channels) > 1:
            raise InputError(
                f"{channel.named}: it holds tokens, with their own validation part; leave out"
                " --validation, or give two texts"
            )
        if not text.train_tokens and getattr(config, "mask_documents", False):
            raise InputError(
                f"{channel.named}: mask_documents needs tokens, whose documents have an end; leave"
                " it out, or encode the text with `upload-data --tokenizer`"
            )
        if 0 < getattr(config, "vocab_size", 0) < text.vocabulary_size:
            raise InputError(
                f"{channel.named}: it has {text.vocabulary_size} different {unit}, more than"
                f" vocab_size={config.vocab_size}"
            )
        if text.chats:
            if getattr(config, "short_windows", False):
                raise InputError(f"{channel.named}: short_windows cuts conversations; leave it out")
            check_context(channel.named, text, config.block_size)
        if text.train_tokens:
            parts = {"training": text.train_tokens, "validation": text.val_tokens}
        elif len(channels) == 1:
            n_train = int(text.characters * (1 - config.validation_fraction))
            parts = {"training": n_train, "validation": text.characters - n_train}
        else:
            parts = {"training" if name == "data" else name: text.characters}
        for part, length in parts.items():
            if length < config.block_size + 1 and not text.chats:
                raise InputError(
                    f"{channel.named}: the {part} text has {length} {unit}, and one window of"
                    f" block_size={config.block_size} needs {config.block_size + 1}; use more text"
                    " or a smaller block_size"
                )


def check_context(named: str, chats: corpus.Upload, block_size: int) -> None:
    """Warn of conversations that are longer than the context. Raise InputError if none fits."""
    for part, needed in chats.answers.items():
        if needed > block_size:
            raise InputError(
                f"{named}: no conversation in {part} has an answer within block_size={block_size}"
                f" tokens; it needs block_size={needed} or more; train the base model with that too"
            )
    if longer := sum(n for context, n in chats.contexts.items() if context > block_size):
        logger.warning(
            f"{longer:,} of {chats.documents:,} conversations are longer than"
            f" block_size={block_size}: they end with the last answer that fits, or are left out"
        )


def with_whole_windows(request: Request, text: Channel) -> Request:
    """The request without a preset's short windows, if the text is of conversations."""
    given = {name.replace("-", "_") for name in request.hyperparameters}
    chats = text.upload is not None and text.upload.chats
    short = getattr(request.config(1), "short_windows", 0)
    if not chats or "short_windows" in given or not short:
        return request
    logger.info(f"short_windows=0 (the preset's {short} would cut conversations)")
    values = {**request.hyperparameters, "short_windows": 0}
    return request.model_copy(update={"hyperparameters": values})
