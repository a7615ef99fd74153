"""Extract the plain text of web pages, subtitles, and mailboxes."""

from __future__ import annotations

import codecs
import io
import logging
import re
from collections import Counter
from collections.abc import Iterator
from email import message_from_bytes, policy
from email.message import EmailMessage
from html.parser import HTMLParser
from typing import IO

from sm_nanogpt.launcher.files.progress import CHUNK_BYTES
from sm_nanogpt.launcher.text.talks import list_counts

logger = logging.getLogger(__name__)

BLOCK_ELEMENTS = set(  # elements of HTML that begin a line and end it
    re.findall(
        r"\w+",
        """
        address article aside blockquote body br caption dd details dialog div dl dt figcaption
        figure footer form h1 h2 h3 h4 h5 h6 header hr html li main nav ol option p pre section
        summary table tbody td tfoot th thead title tr ul
        """,
    )
)
UNSEEN_ELEMENTS = {"script", "style", "template", "noscript", "head", "svg", "iframe", "object"}
LINE_OF_TIMES = re.compile(r"^(\d+:)?\d\d:\d\d[.,]\d{3} +--> ")
NO_CUE_START = re.compile(r"^(WEBVTT|NOTE|STYLE|REGION)\b")  # of a block without speech
MARKUP = re.compile(r"</?[a-zA-Z][^<>]*>|<\d[\d:.]*>|\{\\[^{}]*\}")  # in subtitles
FIRST_LINE_OF_MAIL = re.compile(rb"From \S+.* \d{4}\r?\n")
QUOTED = re.compile(r"^\s*>")
SIGNATURE = re.compile(r"^-- ?$")
# The line before a quoted mail, in some languages, such as `On Monday, Ann wrote:`.
ATTRIBUTION = re.compile(
    r"^\s*(on|am|le|el|em|il|op)\b.{0,200}\b(wrote|schrieb|a écrit|escribió|escreveu|ha scritto"
    r"|schreef)\b.{0,80}:\s*$",
    re.IGNORECASE,
)


def characters_in(file: IO[bytes]) -> Iterator[str]:
    """Yield the characters of a file. Bytes that are not UTF-8 become surrogates, which open_text
    turns into the same bytes: the reader of the text reports them."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    while chunk := file.read(CHUNK_BYTES):
        yield decoder.decode(chunk)
    yield decoder.decode(b"", True)


# -- HTML ------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects the text that a browser would show, a line for each block."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.unseen: list[str] = []  # elements that are open and show nothing
        self.n_preformatted = 0
        self.is_line_empty = True

    def handle_starttag(self, tag: str, attributes: object) -> None:
        if tag in UNSEEN_ELEMENTS:
            self.unseen.append(tag)
        elif tag in BLOCK_ELEMENTS:
            self.end_line()
        if tag == "pre":
            self.n_preformatted += 1

    def handle_endtag(self, tag: str) -> None:
        if tag in self.unseen:
            del self.unseen[self.unseen.index(tag) :]
        elif tag in BLOCK_ELEMENTS:
            self.end_line()
        if tag == "pre" and self.n_preformatted:
            self.n_preformatted -= 1

    def handle_data(self, data: str) -> None:
        if self.unseen:
            return
        if not self.n_preformatted:
            data = re.sub(r"[ \t\r\n\f]+", " ", data)
            if self.is_line_empty or self.text.endswith(" "):
                data = data.lstrip(" ")
        if data:
            self.text += data
            self.is_line_empty = data.endswith("\n")

    def end_line(self) -> None:
        if not self.unseen and not self.is_line_empty:
            self.text = self.text.rstrip(" ") + "\n"
            self.is_line_empty = True

    def pop_lines(self) -> str:
        """Return the complete lines, and remove them; an incomplete last line stays."""
        end = self.text.rfind("\n") + 1
        text = self.text[:end]
        self.text = self.text[end:]
        return text


def texts_of_page(file: IO[bytes]) -> Iterator[str]:
    """Yield the lines of a page as a browser would show them, some at once."""
    page = Page()
    for characters in characters_in(file):
        page.feed(characters)
        yield page.pop_lines()
    page.close()
    page.end_line()
    yield page.pop_lines()


# -- subtitles -------------------------------------------------------------------------------------


def texts_of_subtitles(file: IO[bytes]) -> Iterator[str]:
    """Yield the spoken lines of SubRip or WebVTT. A line shown twice in a row comes once."""
    block: list[str] = []
    last = ""
    for line in lines_in(file):
        if line:
            block.append(line)
            continue
        for text in spoken_lines(block):
            if text != last:
                yield f"{text}\n"
            last = text
        block = []


def lines_in(file: IO[bytes]) -> Iterator[str]:
    """Yield each line without white space around it, and an empty line at the end."""
    pending = ""
    for characters in characters_in(file):
        *lines, pending = (pending + characters).split("\n")
        for line in lines:
            yield line.strip()
    yield pending.strip()
    yield ""


def spoken_lines(block: list[str]) -> list[str]:
    """The spoken lines of a block, which come after the line of times."""
    for number, line in enumerate(block):
        if LINE_OF_TIMES.match(line):
            texts = [MARKUP.sub("", text).strip() for text in block[number + 1 :]]
            return [text for text in texts if text]
        if NO_CUE_START.match(line):
            return []
    return []


# -- mailboxes -------------------------------------------------------------------------------------


def texts_of_mailbox(file: IO[bytes]) -> Iterator[str]:
    """Yield the text of each mail, with an empty line after it. What is left out is logged."""
    left_out: Counter[str] = Counter()
    for content in mails_in(file):
        text = text_of_mail(content, left_out)
        if text:
            yield f"{text}\n\n"
        else:
            left_out["mail without text"] += 1
    left_out = +left_out  # drops the kinds of which nothing was left out
    if left_out:
        logger.warning(f"left out of mail: {list_counts(left_out)}")


def mails_in(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of each mail. A mail begins with a line `From ` after an empty line."""
    lines: list[bytes] = []
    is_after_empty_line = True
    for line in file:
        if is_after_empty_line and FIRST_LINE_OF_MAIL.match(line):
            if lines:
                yield b"".join(lines)
            lines = []
        else:
            lines.append(re.sub(rb"^>(>*From )", rb"\1", line))  # a mailbox marks `From ` so
        is_after_empty_line = not line.strip()
    if lines:
        yield b"".join(lines)


def text_of_mail(content: bytes, left_out: Counter[str]) -> str:
    """The text of a mail, without quoted mails, its signature, and its attachments."""
    mail = message_from_bytes(content, policy=policy.default)
    assert isinstance(mail, EmailMessage)
    left_out["attachment"] += len(list(mail.iter_attachments()))
    body = mail.get_body(("plain", "html"))
    if body is None:
        return ""
    try:
        text = body.get_content()
    except (LookupError, ValueError):  # an encoding that Python does not know
        payload = body.get_payload(decode=True)
        text = payload.decode("utf-8", "replace") if isinstance(payload, bytes) else ""
    if body.get_content_subtype() == "html":
        text = "".join(texts_of_page(io.BytesIO(text.encode("utf-8", "surrogateescape"))))
    lines = text.splitlines()
    new_lines = without_quotes(lines)
    left_out["line of quotes and signatures"] += count_with_text(lines) - count_with_text(new_lines)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(new_lines)).strip()


def count_with_text(lines: list[str]) -> int:
    return sum(bool(line.strip()) for line in lines)


def without_quotes(lines: list[str]) -> list[str]:
    """The lines of a mail up to its signature or a forwarded mail, without quoted lines."""
    new_lines: list[str] = []
    for line in lines:
        if SIGNATURE.match(line) or is_forward(line):
            break
        if not QUOTED.match(line) and not ATTRIBUTION.match(line):
            new_lines.append(line.rstrip())
    return new_lines


def is_forward(line: str) -> bool:
    """True for the line after which Outlook and other programs put the mail that is answered."""
    return bool(re.match(r"\s*-{2,} ?(original message|forwarded message)", line, re.IGNORECASE))
