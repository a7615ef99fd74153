"""Where a job reads its texts, and these as it reads them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from launcher.aws import Offline
from launcher.errors import InputError
from launcher.files import storage
from launcher.files.progress import byte_progress
from launcher.settings import Settings
from launcher.text import corpus
from launcher.text.copies import temporary
from launcher.text.files import find_files, warn_of_held_out
from launcher.text.formats import File, opened

if TYPE_CHECKING:  # they import torch
    from entry_point.config import Config
    from entry_point.text import Corpus


@dataclass(frozen=True)
class Channel:
    """The text or model of one channel: the name that the user gave, its URI, files to upload.

    upload is None for text on S3 that was not uploaded from here; its length is unknown.
    """

    named: str
    uri: str
    upload: corpus.Upload | None
    sources: list[File]


Texts = Mapping[str, Channel]  # those of a job, by its fields: data, validation


def is_text(name: str) -> bool:
    """Whether train.py reads a file of a folder, or SageMaker is asked for a single file."""
    return name.lower().endswith((".txt", ".md"))


def find_channel(location: str, settings: Settings) -> Channel:
    """Find where the job reads a text; survey a local one for its upload."""
    uri, path = storage.to_uri(location), storage.local_path(location)
    try:
        known = corpus.find_upload(uri, settings)
    except Offline:
        return Channel(location, uri, None, [])
    problem = ""
    if known is None and corpus.read_manifest(uri, settings) is not None:
        problem = "a file of this upload is missing; upload the text again"
    stays = storage.local_path(settings.data_store) is not None  # the job runs on this machine
    if known is not None and (path is None or stays):
        return Channel(location, uri, replace(known, uploaded=False), [])
    if path is None and not problem:
        there = storage.list_files(uri, settings)
        if "meta.json" not in there and not any(map(is_text, there)):
            problem = "no *.txt or *.md file is there" if there else "nothing is there"
        # SageMaker copies all objects whose keys begin with the URI of a channel.
        elif is_text(uri) and not stays and (others := storage.namesakes(uri, settings)):
            problem = f"SageMaker would also copy {others[0]}, whose name begins the same"
            prefix = f"{uri.rpartition('.')[0]}/"
            problem += f"; copy the text to {prefix} and name that prefix instead"
    if problem:
        raise InputError(f"{location}: {problem}")
    if path is None:
        return Channel(location, uri, None, [])
    # Tokens encoded on this machine before a store on S3 was set.
    if known is not None and known.train_tokens:
        sources = [File(name, path / name) for name in known.files]
        uri = storage.join(settings.data_store, "data", path.name)
        upload = replace(known, uri=uri, uploaded=not corpus.is_there(uri, settings))
    else:
        files = find_files([path])
        warn_of_held_out(files)
        upload, sources = corpus.survey(path.name, files, settings)
    return Channel(location, upload.uri, upload, sources)


def corpus_of(texts: Texts, settings: Settings, config: Config | None = None) -> Corpus:
    """The texts as a job would read them, of this config or the default one."""
    from entry_point.config import Config
    from entry_point.container import Container
    from entry_point.errors import DataError
    from entry_point.text import read_corpus

    with temporary(settings) as directory:
        for name, channel in texts.items():
            (directory / name).mkdir()
            for file in channel.sources:
                target = directory / name / file.name
                target.parent.mkdir(parents=True, exist_ok=True)
                in_one_line = storage.reported(str(target))
                with opened(file) as content, in_one_line, target.open("wb") as copy:
                    shutil.copyfileobj(content, copy, storage.CHUNK_BYTES)
            if not channel.sources:
                with byte_progress("fetch") as progress:
                    storage.fetch(channel.uri, directory / name, progress, settings)
        validation = directory / "validation" if "validation" in texts else None
        channels = directory / "data", validation, None
        here = Container(False, *channels, directory, directory, directory)
        try:
            return read_corpus(here, config or Config())
        except DataError as error:
            raise InputError(str(error)) from None
