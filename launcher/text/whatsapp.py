"""Read a chat that WhatsApp exported, on Android or iOS, and tell it from a diary.

The lines of a diary may also begin with a time and have a colon.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, TYPE_CHECKING

from sm_nanogpt.launcher.text.encodings import read_text
from sm_nanogpt.launcher.text.talks import PAUSE_SECONDS, Talk

if TYPE_CHECKING:  # it imports this module
    from sm_nanogpt.launcher.text.reading import File

WHATSAPP_LINE = re.compile(
    r"\u200e?\[?(?P<date>\d{1,4}[./-]\d{1,2}[./-]\d{1,4}),? "
    r"(?P<hour>\d{1,2})[:.](?P<minute>\d\d)(?:[:.](?P<second>\d\d))?"
    r"(?:[ \u00a0\u202f]?(?P<half>[AaPp])\.?[ \u00a0]?[Mm]\.?)?(?:\]| -) (?P<message>.*)"
)
WHATSAPP_START = (  # the magic of the format in formats.py
    rb"(\xef\xbb\xbf)?(\xe2\x80\x8e)?"
    rb"(\[?\d{1,4}[./-]\d{1,2}[./-]\d{1,4}, \d{1,2}[:.]\d\d([:.]\d\d)?"
    rb"(( |\xc2\xa0|\xe2\x80\xaf)?[AaPp]\.?( |\xc2\xa0)?[Mm]\.?)?(\]| -) "
    # Logs also have dates without a comma. In a chat, a name follows, or a note of WhatsApp.
    rb"|\d\d/\d\d/\d{4} \d\d:\d\d - ([^\n:]{1,60}: |[^\n]*WhatsApp))"
)
WHATSAPP_FILE = re.compile(  # a photo, recording, or file; a caption may follow it
    r"\A<[^<>\n]+>\Z|\A<\w+( \w+)+>\n"
    r"|\A[^\n]+ \((file attached|datei angehängt|fichier joint|archivo adjunto|arquivo anexado"
    r"|file allegato)\)(\n|\Z)"
    r"|\u200e<[^<>:]+: [^<>]+>"
    r"|\u200e\w+( \w+)? (omitted|weggelassen|omitid[ao]|omess[oa]|absente?)\Z"
    r"|\Anull\Z",
    re.IGNORECASE,
)
WHATSAPP_EDITED = re.compile(r"\s*\u200e?<[^<>]*(edited|bearbeitet|modifié|editado)[^<>]*>\s*$")
WHATSAPP_DELETED = re.compile(
    r"(this message was deleted|you deleted this message"
    r"|diese nachricht wurde gelöscht|du hast diese nachricht gelöscht)\.?",
    re.IGNORECASE,
)

MARKS = "\u200e\u202a\u202c\u202f "  # of directions, and spaces, around a name
DAY_SECONDS = 24 * 60 * 60
DIARY_CHECK_BYTES = 1 << 16  # the beginning by which a chat is told from a diary
FILE_NAME = re.compile(r"whatsapp|^_chat\.txt$", re.IGNORECASE)  # as WhatsApp names its exports
LOG_LEVELS = {"DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL"}  # before the colon in a log
MIN_REPEATED_SHARE = 0.8  # of the messages: their author wrote more than one
MIN_ANSWER_SHARE = 0.1  # of the messages: they follow one of another author within PAUSE_SECONDS


def is_chat(text: str, file_name: str, me: str) -> bool:
    """True if a text with the times of a WhatsApp chat is one, by its beginning.

    It is one if it has a sign of the program, or a message of `me`, whose messages are to be
    learned. Else the words before the colons have to look like names: there are at least two, which
    repeat and answer each other.
    """
    first_line = text.partition("\n")[0]
    is_note = "WhatsApp" in first_line and ": " not in first_line
    if is_note or "\u200e" in text or FILE_NAME.search(file_name):
        return True
    messages = [entry for entry in entries_in(text) if entry.author]
    counts = Counter(message.author for message in messages)
    if me in counts:
        return True
    if len(counts) < 2 or not LOG_LEVELS.isdisjoint(counts):
        return False
    n_repeated = sum(count for count in counts.values() if count > 1)
    is_repeated = n_repeated >= MIN_REPEATED_SHARE * len(messages)
    return is_repeated and count_answers(messages) >= MIN_ANSWER_SHARE * len(messages)


def count_answers(messages: Sequence[Entry]) -> int:
    """Count the messages that follow, within PAUSE_SECONDS, one of another author."""
    n_answers = 0
    for last, message in pairwise(messages):
        is_soon = abs(message.seconds - last.seconds) <= PAUSE_SECONDS
        if is_soon and message.author != last.author:
            n_answers += 1
    return n_answers


def name_of(author: str) -> str:
    """A name without the marks and signs that WhatsApp puts around it.

    It writes `~ ` before the name of a person who is not a contact, and only `~` if that person has
    set no name.
    """
    shown = author.strip(MARKS)
    return shown.strip(f"{MARKS}~") or shown


def read_whatsapp(content: IO[bytes], file: File) -> Iterator[tuple[str, Talk]]:
    """Yield the one talk of a file that WhatsApp exported, and before it the name of the file."""
    yield file.shown, parse_whatsapp("".join(read_text(content, file.shown)))


def parse_whatsapp(text: str) -> Talk:
    """Return the talk in a text that WhatsApp exported."""
    talk = Talk()
    for entry in entries_in(text):
        add_entry(talk, entry)
    return talk


def add_entry(talk: Talk, entry: Entry) -> None:
    """Add the message of an entry to a talk, or count what the entry is instead."""
    text = WHATSAPP_EDITED.sub("", "\n".join(entry.lines))
    text, n_files = WHATSAPP_FILE.subn("", text)
    talk.left_out["photo, recording, or file"] += n_files
    text = text.strip()
    if not entry.author:
        talk.left_out["note of the service"] += 1
    elif WHATSAPP_DELETED.fullmatch(text.strip("\u200e ")):
        talk.left_out["deleted message"] += 1
    elif n_files and "\u200e" in text:  # the name and the pages of the file, which was counted
        return
    elif text.startswith("\u200e"):  # WhatsApp marks its own notes so
        talk.left_out["note of the service"] += 1
    elif text or not n_files:
        talk.add(entry.author, text, entry.seconds)


@dataclass
class Entry:
    """A message, or a note of WhatsApp. seconds are counted from midnight before the first one."""

    author: str  # "" for a note
    lines: list[str]
    seconds: int


def entries_in(text: str) -> list[Entry]:
    """The entries of a text. Each begins with a time, and may have several lines."""
    entries: list[Entry] = []
    date = ""
    n_dates = 0
    for line in text.removeprefix("\ufeff").splitlines():
        match = WHATSAPP_LINE.match(line)
        if match is None:
            if entries:
                entries[-1].lines.append(line)
            continue
        if match["date"] != date:  # days are counted: the order of day and month is not known
            n_dates += 1
            date = match["date"]
        author, colon, message = match["message"].partition(": ")
        if not colon:
            author = ""
            message = match["message"]
        seconds = n_dates * DAY_SECONDS + time_of_day(match)
        entries.append(Entry(name_of(author), [message], seconds))
    return entries


def time_of_day(match: re.Match[str]) -> int:
    """The seconds since midnight of a line that WHATSAPP_LINE matches."""
    hour = int(match["hour"])
    if match["half"]:
        hour %= 12
        if match["half"].lower() == "p":
            hour += 12
    return hour * 3600 + int(match["minute"]) * 60 + int(match["second"] or 0)
