"""Read the texts of a job as its run will read them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.progress import CHUNK_BYTES, byte_progress
from sm_nanogpt.launcher.locations import is_on_s3
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.channels import Channel, Texts
from sm_nanogpt.launcher.text.reading import open_text
from sm_nanogpt.launcher.text.sources import temporary

if TYPE_CHECKING:  # they import torch
    from sm_nanogpt.entry_point.config import Config
    from sm_nanogpt.entry_point.text import Corpus

# A file of the tokens of a part, other than the first file of that part.
LATER_SHARD = re.compile(r"(train|val)-(?!0+\.)\d+\.bin")


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
            shutil.copyfileobj(content, copy, CHUNK_BYTES)


def fetch_stored_text(channel: Channel, directory: Path, settings: Settings) -> None:
    """Copy the files at the URI of a channel into a directory; of tokens, only the first file of
    each part.

    The URI is that of an upload, or of a text that another program put on S3.
    """

    def is_wanted(name: str) -> bool:
        return LATER_SHARD.fullmatch(name) is None

    source = channel.shown if is_on_s3(channel.uri) else ""
    with byte_progress("fetch", source=source) as progress:
        storage.fetch(channel.uri, directory, progress, settings, is_wanted)
    meta = directory / "meta.json"
    if meta.exists():
        document = json.loads(meta.read_bytes())
        for part in ("train", "val"):
            del document[part]["shards"][1:]
        meta.unlink()  # it may be a link to the file in the store
        meta.write_text(json.dumps(document), encoding="utf-8")
