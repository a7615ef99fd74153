"""Find where a job reads its texts.

This does not import the readers of all formats of texts: only a text of this machine is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm_nanogpt.entry_point.files import is_text_name
from sm_nanogpt.launcher.aws import Offline
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.moved import UPLOAD_NAME
from sm_nanogpt.launcher.locations import is_on_s3, last_part
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.store import Upload, is_uploaded, read_manifest

if TYPE_CHECKING:  # with the readers of all formats
    from sm_nanogpt.launcher.text.reading import File


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
        name = last_part(self.shown)
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
    runs_here = not is_on_s3(settings.data_store)
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
    from sm_nanogpt.launcher.text import corpus

    upload, files = corpus.survey_path(path, settings)
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
    from sm_nanogpt.launcher.text.reading import File

    uri = storage.join(settings.data_store, "data", path.name)
    is_missing = not is_uploaded(uri, settings)
    files = [File(name, path / name) for name in upload.files]
    return Channel(location, uri, replace(upload, uri=uri, uploaded=is_missing), files)
