"""Chats in zip archives, in which programs export them; a file is known by what is in it."""

from __future__ import annotations

import io
import json
import logging
import posixpath
import re
import shlex
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.text.messengers import names_of_people, talks_in
from sm_nanogpt.launcher.text.records import number_talks
from sm_nanogpt.launcher.text.talks import Talk
from sm_nanogpt.launcher.text.unpacking import Unpacking
from sm_nanogpt.launcher.text.whatsapp import WHATSAPP_START, read_whatsapp

logger = logging.getLogger(__name__)

SNIFF_BYTES = 512
JSON_START = rb"(\xef\xbb\xbf)?\s*[\[{]"
EMPTY_LIST_BYTES = 2  # of [], as Slack has for what a workspace lacks
OTHER_FILE = "other file of the archive"
UNPACK = "unpack it: `unzip {path}`"


def read_zip(file: IO[bytes], name: str, column: str) -> Iterator[tuple[str, Talk]]:
    """Yield the talks of the exports in an archive, by the names of their files.

    Raises InputError if there is none, or the archive is damaged or encrypted.
    """
    archive = Archive(file, name)
    other_files = Talk()
    n_exports = 0
    for entry in archive.entries:
        talks = archive.talks_of(entry, column)
        if talks is None:
            if entry.file_size > EMPTY_LIST_BYTES:
                other_files.left_out[OTHER_FILE] += 1
            continue
        n_exports += 1
        yield from talks
    if not n_exports and archive.unreadable:
        raise InputError(archive.unreadable[0])
    if not n_exports:
        raise archive.error("has no chat that a known program exported", UNPACK)
    for problem in archive.unreadable:
        logger.warning(f"{problem}; it is left out")
    yield name, other_files


class Archive:
    """A zip archive, whose files are read one by one.

    unreadable has a sentence about each file that should be JSON by its name, and is none.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        self.name = name
        self.unreadable: list[str] = []
        try:
            self.archive = zipfile.ZipFile(file)
        except zipfile.BadZipFile as error:
            raise self.error(f"damaged: {error}") from None

    def error(self, problem: str, advice: str = "") -> InputError:
        text = f"{self.name}: {problem}"
        if advice:
            text += f"; {advice.format(path=shlex.quote(self.name))}"
        return InputError(text)

    @property
    def entries(self) -> list[zipfile.ZipInfo]:
        """The files in the archive, by their names."""
        entries = [entry for entry in self.archive.infolist() if not entry.is_dir()]
        return sorted(entries, key=lambda entry: entry.filename)

    def talks_of(self, entry: zipfile.ZipInfo, column: str) -> list[tuple[str, Talk]] | None:
        """The talks of a file and their positions; None if no known program exported it."""
        shown = f"{self.name}, {entry.filename}"
        beginning = self.read(entry, SNIFF_BYTES)
        if re.match(WHATSAPP_START, beginning):
            return list(read_whatsapp(io.BytesIO(self.read(entry)), shown, column))
        if not re.match(JSON_START, beginning):
            return None
        talks = talks_in(self.read_json(entry, shown), shown)
        if talks is None:
            return None
        for talk in talks:
            if talk.people_file:
                talk.name_people(self.people_beside(entry, talk.people_file))
        return list(number_talks(talks, shown))

    def read(self, entry: zipfile.ZipInfo, size: int = -1) -> bytes:
        """The first bytes of a file, or all."""
        if size < 0:
            Unpacking(self.name, entry.compress_size).add(entry.file_size)
        try:
            with self.archive.open(entry) as content:
                return content.read(size)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise self.error(f"damaged: {error}") from None
        except (NotImplementedError, RuntimeError):  # encrypted, or compressed in another way
            problem = "is encrypted, or compressed in a way that Python does not know"
            raise self.error(problem, UNPACK) from None

    def read_json(self, entry: zipfile.ZipInfo, shown: str) -> object:
        """The value of a file; None if it is no JSON."""
        try:
            return json.loads(self.read(entry))
        except (ValueError, RecursionError) as error:
            if entry.filename.lower().endswith(".json"):
                self.unreadable.append(f"{shown}: not JSON that can be read ({error})")
            return None

    def people_beside(self, entry: zipfile.ZipInfo, people_file: str) -> dict[str, str]:
        """The names of people by their ids, from the file that Slack exports for them."""
        path = posixpath.join(posixpath.dirname(entry.filename), people_file)
        try:
            people = self.archive.getinfo(posixpath.normpath(path))
        except KeyError:
            return {}
        return names_of_people(self.read(people))
