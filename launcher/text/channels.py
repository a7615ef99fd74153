"""Find where a job reads its texts, and read them as the job will."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm_nanogpt.entry_point.files import is_text_name
from sm_nanogpt.launcher.aws import Offline
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.moved import UPLOAD_NAME
from sm_nanogpt.launcher.files.progress import Progress, byte_progress, expect
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text import corpus
from sm_nanogpt.launcher.text.files import find_files, warn_of_held_out
from sm_nanogpt.launcher.text.reading import File, open_text
from sm_nanogpt.launcher.text.sources import TextSource, temporary
from sm_nanogpt.launcher.text.store import Upload, is_uploaded, read_manifest
from sm_nanogpt.launcher.values import in_units

if TYPE_CHECKING:  # they import torch
    from sm_nanogpt.entry_point.config import Config
    from sm_nanogpt.entry_point.text import Corpus

logger = logging.getLogger(__name__)

# A file of the tokens of a part, other than the first file of that part.
LATER_SHARD = re.compile(r"(train|val)-(?!0+\.)\d+\.bin")


@dataclass(frozen=True)
class Channel:
    """Where a job reads a text or a model, and what has to be uploaded before."""

    shown: str  # the location as the user wrote it
    uri: str
    upload: Upload | None = None  # None: another program put the text on S3; its length is unknown
    sources: list[File] = field(default_factory=list)  # files of this machine, to be uploaded

    @property
    def short_name(self) -> str:
        """What messages call the text: the name of an upload, or else the location."""
        name = self.shown.rstrip("/").rpartition("/")[2]
        if "://" in self.shown and UPLOAD_NAME.fullmatch(name):
            return name
        return self.shown


Texts = Mapping[str, Channel]  # the texts of a job, by its fields `data` and `validation`


def find_channel(location: str, settings: Settings) -> Channel:
    """Find where the job reads a text. A text on this machine is surveyed, so that it can be
    uploaded.

    Raises InputError if no text is there, or SageMaker would copy more than the text.
    """
    uri = storage.to_uri(location)
    path = storage.local_path(location)  # None: on S3
    runs_here = storage.local_path(settings.data_store) is not None
    try:
        upload = read_manifest(uri, settings)
        if upload is not None:
            check_whole(upload, location, settings)
    except Offline:
        return Channel(location, uri)

    if upload is not None and (path is None or runs_here):
        return Channel(location, uri, replace(upload, uploaded=False))
    if path is None:
        check_text_on_s3(location, uri, runs_here, settings)
        return Channel(location, uri)
    if upload is not None and upload.train_tokens:
        return channel_to_send(location, path, upload, settings)

    if UPLOAD_NAME.fullmatch(path.name) and not path.exists():  # as of a job that is resumed
        raise InputError(
            f"{location}: this upload is not there; was it deleted? Upload the text again"
        )
    files = find_files([TextSource(path)])
    warn_of_held_out(files)
    upload, files = corpus.survey_upload(path.name, files, settings)
    return Channel(location, upload.uri, upload, files)


def check_whole(upload: Upload, location: str, settings: Settings) -> None:
    """Raise InputError if a file of an upload is missing."""
    if not upload.is_whole(storage.list_files(upload.uri.rstrip("/"), settings)):
        problem = "a file of this upload is missing; upload the text again"
        raise InputError(f"{location}: {problem}")


def check_text_on_s3(location: str, uri: str, runs_here: bool, settings: Settings) -> None:
    """Raise InputError if no text is at a URI, or SageMaker would copy more than the text.

    SageMaker copies all objects whose keys begin with the URI of a channel.
    """
    files = storage.list_files(uri, settings)
    if not files:
        raise InputError(f"{location}: nothing is there")
    if "meta.json" not in files and not any(map(is_text_name, files)):
        raise InputError(f"{location}: no *.txt or *.md file is there")
    if runs_here or not is_text_name(uri):
        return
    others = storage.namesakes(uri, settings)
    if others:
        prefix = f"{uri.rpartition('.')[0]}/"
        raise InputError(
            f"{location}: SageMaker would also copy {others[0]}, whose name begins the same;"
            f" copy the text to {prefix} and name that prefix instead"
        )


def channel_to_send(location: str, path: Path, upload: Upload, settings: Settings) -> Channel:
    """The channel of tokens that were encoded here before a store on S3 was set."""
    uri = storage.join(settings.data_store, "data", path.name)
    is_missing = not is_uploaded(uri, settings)
    files = [File(name, path / name) for name in upload.files]
    return Channel(location, uri, replace(upload, uri=uri, uploaded=is_missing), files)


def corpus_of(texts: Texts, settings: Settings, config: Config | None = None) -> Corpus:
    """Read texts as a job would, with this config or the default one.

    If the texts are tokens, only the first file of each part is read: up to 256 MiB of ids. Raises
    InputError.
    """
    from sm_nanogpt.entry_point.config import Config
    from sm_nanogpt.entry_point.container import Container
    from sm_nanogpt.entry_point.errors import DataError
    from sm_nanogpt.entry_point.text import read_corpus

    with temporary(settings) as directory:
        for name, channel in texts.items():
            fetch_channel(channel, directory / name, settings)
        validation = directory / "validation" if "validation" in texts else None
        channels = (directory / "data", validation, None)
        container = Container(False, *channels, directory, directory, directory)
        try:
            return read_corpus(container, config or Config())
        except DataError as error:
            raise InputError(str(error)) from None


@dataclass(frozen=True)
class Announced:
    """A progress hook that first logs how many bytes will be copied."""

    progress: Progress
    name: str

    def __call__(self, n_bytes: int) -> None:
        self.progress(n_bytes)

    def expect(self, n_bytes: int) -> None:
        logger.info(f"{self.name}: copying {in_units(n_bytes)}")
        expect(self.progress, n_bytes)


def fetch_channel(channel: Channel, directory: Path, settings: Settings) -> None:
    """Copy the text of a channel into a new directory, as the files that its upload has."""
    directory.mkdir()
    if not channel.sources:
        fetch_stored_text(channel, directory, settings)
    for file in channel.sources:
        path = directory / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            open_text(file) as content,
            storage.errors_about(str(path)),
            path.open("wb") as copy,
        ):
            shutil.copyfileobj(content, copy, storage.CHUNK_BYTES)


def fetch_stored_text(channel: Channel, directory: Path, settings: Settings) -> None:
    """Copy the files at the URI of a channel into a directory; of tokens, only the first file of
    each part.

    The URI is that of an upload, or of a text that another program put on S3.
    """

    def is_wanted(name: str) -> bool:
        return LATER_SHARD.fullmatch(name) is None

    with byte_progress("fetch") as bar:
        is_remote = storage.local_path(channel.uri) is None
        progress: Progress = Announced(bar, channel.shown) if is_remote else bar
        storage.fetch(channel.uri, directory, progress, settings, is_wanted)
    meta = directory / "meta.json"
    if meta.exists():
        document = json.loads(meta.read_bytes())
        for part in ("train", "val"):
            del document[part]["shards"][1:]
        meta.unlink()  # it may be a link to the file in the store
        meta.write_text(json.dumps(document), encoding="utf-8")
