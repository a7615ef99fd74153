"""Read zip archives of exported chats. The format of a file in them follows from its content."""

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
from typing import IO, TYPE_CHECKING

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.text.encodings import read_text
from sm_nanogpt.launcher.text.messengers import parse_slack_people, talks_in_json
from sm_nanogpt.launcher.text.records import with_positions
from sm_nanogpt.launcher.text.talks import Talk
from sm_nanogpt.launcher.text.unpacking import DETECT_BYTES, Unpacking
from sm_nanogpt.launcher.text.whatsapp import (
    DIARY_CHECK_BYTES,
    WHATSAPP_START,
    is_chat,
    parse_whatsapp,
)

if TYPE_CHECKING:  # it imports this module
    from sm_nanogpt.launcher.text.reading import File

logger = logging.getLogger(__name__)

JSON_START = rb"(\xef\xbb\xbf)?\s*[\[{]"
EMPTY_LIST_BYTES = 2  # the length of [], which Slack exports for what a workspace lacks
OTHER_FILE = "other file of the archive"
UNPACK = "unpack it: `unzip {path}`"


def read_zip(content: IO[bytes], file: File) -> Iterator[tuple[str, Talk]]:
    """Yield the talks of the exports in an archive, each with its position, in the order of file
    names.

    Raises InputError if there is no export, or the archive is damaged or encrypted.
    """
    archive = Archive(content, file.shown)
    other_files = Talk()
    n_exports = 0
    for entry in archive.entries:
        talks = archive.read_export(entry, file.me)
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
    yield file.shown, other_files  # a talk without messages, whose count is reported


class Archive:
    """A zip archive, whose files are read one by one.

    unreadable has a message about each file whose name ends in .json and which is no JSON.
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
        """The files in the archive, in the order of their names."""
        entries = [entry for entry in self.archive.infolist() if not entry.is_dir()]
        return sorted(entries, key=lambda entry: entry.filename)

    def read_export(self, entry: zipfile.ZipInfo, me: str) -> list[tuple[str, Talk]] | None:
        """Read the talks of a file, each with its position; None for any other file."""
        file_label = f"{self.name}, {entry.filename}"
        beginning = self.read(entry, DETECT_BYTES)
        if re.match(WHATSAPP_START, beginning):
            return self.read_whatsapp(entry, file_label, me)
        if not re.match(JSON_START, beginning):
            return None
        talks = talks_in_json(self.read_json(entry, file_label), file_label)
        if talks is None:
            return None
        for talk in talks:
            if talk.people_file:
                talk.name_people(self.people_beside(entry, talk.people_file))
        return list(with_positions(talks, file_label))

    def read_whatsapp(
        self, entry: zipfile.ZipInfo, file_label: str, me: str
    ) -> list[tuple[str, Talk]] | None:
        """Read the talk of a file that begins as a chat of WhatsApp; None for a diary."""
        beginning = self.read(entry, DIARY_CHECK_BYTES).decode(errors="ignore")
        if not is_chat(beginning, posixpath.basename(entry.filename), me):
            warning = f"{file_label}: has times as a chat of WhatsApp has, but is left out"
            logger.warning(warning, extra={"code": "read-as-chat"})
            return None
        text = "".join(read_text(io.BytesIO(self.read(entry)), file_label))
        return [(file_label, parse_whatsapp(text))]

    def read(self, entry: zipfile.ZipInfo, n_bytes: int = -1) -> bytes:
        """Read the first n_bytes of a file; by default all."""
        if n_bytes < 0:
            Unpacking(self.name, entry.compress_size).add(entry.file_size)
        try:
            with self.archive.open(entry) as content:
                return content.read(n_bytes)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise self.error(f"damaged: {error}") from None
        except (NotImplementedError, RuntimeError):  # encrypted, or compressed in another way
            problem = "is encrypted, or compressed in a way that Python does not know"
            raise self.error(problem, UNPACK) from None

    def read_json(self, entry: zipfile.ZipInfo, file_label: str) -> object:
        """Read a file as JSON; None if it is none. file_label: what errors call the file."""
        try:
            return json.loads(self.read(entry))
        except (ValueError, RecursionError) as error:
            if entry.filename.lower().endswith(".json"):
                self.unreadable.append(f"{file_label}: not JSON that can be read ({error})")
            return None

    def people_beside(self, entry: zipfile.ZipInfo, people_file: str) -> dict[str, str]:
        """Read the names of people, by id, from Slack's list of people.

        people_file is its path, relative to the directory of `entry`. {} if the archive lacks it.
        """
        path = posixpath.join(posixpath.dirname(entry.filename), people_file)
        try:
            people = self.archive.getinfo(posixpath.normpath(path))
        except KeyError:
            return {}
        return parse_slack_people(self.read(people))
