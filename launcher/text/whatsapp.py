"""Read the text of a chat that WhatsApp has exported, of Android or of iOS."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO

from sm_nanogpt.launcher.text.encodings import read_text
from sm_nanogpt.launcher.text.talks import Talk
from sm_nanogpt.launcher.text.unpacking import CHUNK

WHATSAPP_LINE = re.compile(
    r"\u200e?\[?(?P<date>\d{1,4}[./-]\d{1,2}[./-]\d{1,4}),? "
    r"(?P<hour>\d{1,2})[:.](?P<minute>\d\d)(?:[:.](?P<second>\d\d))?"
    r"(?:[ \u00a0\u202f]?(?P<half>[AaPp])\.?[ \u00a0]?[Mm]\.?)?(?:\]| -) (?P<message>.*)",
    re.DOTALL,
)
WHATSAPP_START = (  # of a file, in bytes, as formats.py knows formats
    rb"(\xef\xbb\xbf)?(\xe2\x80\x8e)?"
    rb"(\[?\d{1,4}[./-]\d{1,2}[./-]\d{1,4}, \d{1,2}[:.]\d\d([:.]\d\d)?"
    rb"(( |\xc2\xa0|\xe2\x80\xaf)?[AaPp]\.?( |\xc2\xa0)?[Mm]\.?)?(\]| -) "
    # Logs have dates without a comma, too: a name follows, or the note on how safe WhatsApp is.
    rb"|\d\d/\d\d/\d{4} \d\d:\d\d - ([^\n:]{1,60}: |[^\n]*WhatsApp))"
)
WHATSAPP_FILE = re.compile(  # a photo, a recording, or a file, beside which a caption may stand
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


def read_whatsapp(file: IO[bytes], name: str, column: str) -> Iterator[tuple[str, Talk]]:
    """Yield the one talk of a text that WhatsApp has exported, of Android or of iOS."""
    talk = Talk()
    text = "".join(part for _, part in read_text(file, name, CHUNK))
    lines: list[str] = []  # of a message
    day = 0
    date = ""
    for line in text.removeprefix("\ufeff").splitlines():
        match = WHATSAPP_LINE.match(line)
        if match is None:
            lines.append(line)
            continue
        add_whatsapp_message(talk, lines, day)
        if match["date"] != date:  # whose order of day and month is not known
            day += 1
            date = match["date"]
        lines = [line]
    add_whatsapp_message(talk, lines, day)
    talk.left_out = +talk.left_out  # without those that are 0
    yield name, talk


def add_whatsapp_message(talk: Talk, lines: list[str], day: int) -> None:
    match = WHATSAPP_LINE.match("\n".join(lines))
    if match is None:
        return
    author, colon, text = match["message"].partition(": ")
    text, n_files = WHATSAPP_FILE.subn("", WHATSAPP_EDITED.sub("", text))
    talk.left_out["photo, recording, or file"] += n_files
    text = text.strip()
    if not colon:
        talk.left_out["note of the service"] += 1
    elif WHATSAPP_DELETED.fullmatch(text.strip("\u200e ")):
        talk.left_out["deleted message"] += 1
    elif n_files and "\u200e" in text:  # the name and the pages of a file, which is counted
        return
    elif text.startswith("\u200e"):  # the mark before what the program writes
        talk.left_out["note of the service"] += 1
    elif text or not n_files:
        seconds = day * 86_400 + time_of_day(match)
        talk.add(author.strip("\u200e\u202a\u202c~ \u202f"), text, seconds)


def time_of_day(match: re.Match[str]) -> int:
    """Seconds."""
    hour = int(match["hour"])
    if match["half"]:
        hour %= 12
        if match["half"].lower() == "p":
            hour += 12
    return hour * 3600 + int(match["minute"]) * 60 + int(match["second"] or 0)
