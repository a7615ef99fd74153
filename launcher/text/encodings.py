"""Bytes as text: read UTF-8 and other encodings, and say what a text may be that is neither."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import IO

from launcher.errors import InputError
from launcher.text.unpacking import CHUNK, Filter

SAMPLE = 1 << 22  # bytes after a fault that are looked at

# Those in which people have texts, by Python's names. Among all that it knows, charset_normalizer
# often prefers a rare one.
ENCODINGS = (
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp866", "cp1253", "cp1254", "cp1255", "cp1256"),
    *("mac_roman", "gb18030", "big5", "cp932", "euc_jp", "cp949", "utf_16_le", "utf_16_be"),
)
# Codecs of Python that are for names of hosts, or for nothing.
NOT_FOR_FILES = {"idna", "punycode", "undefined"}
CONTROLS = bytes({*range(32)} - {*b"\t\n\f\r\x1b"})
SURROGATE = rb"\xed[\xa0-\xbf][\x80-\xbf]"  # half of a pair, as CESU-8 writes it


def is_encoding(name: str) -> bool:
    """Whether Python can read files in an encoding of this name."""
    try:
        codec = codecs.lookup(name)
        "".encode(name)  # refuses codecs from bytes to bytes
    except (LookupError, UnicodeError, ValueError):
        return False
    return codec.name not in NOT_FOR_FILES


@dataclass
class Cursor:
    """A place in a text; both numbers count from 1, and a column is a character."""

    line: int = 1
    column: int = 1

    def advance(self, text: str) -> None:
        """Move behind a text."""
        line_breaks = text.count("\n")
        if line_breaks:
            self.line += line_breaks
            self.column = len(text) - text.rfind("\n")
        else:
            self.column += len(text)

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


def read_text(file: IO[bytes], name: object, size: int) -> Iterator[tuple[bytes, str]]:
    """Yield a UTF-8 text by `size` bytes, each with the characters that end in them.

    Raises InputError where it is not UTF-8, or has a zero.
    """
    decoder, cursor = codecs.getincrementaldecoder("utf-8")(), Cursor()
    position = n_beyond_ascii = 0  # bytes
    while chunk := file.read(size):
        zero = chunk.find(0)
        if zero >= 0:
            cursor.advance(chunk[:zero].decode(errors="ignore"))
            raise with_zero(name, chunk + file.read(SAMPLE), zero, cursor, position)
        try:
            text = decoder.decode(chunk)
        except UnicodeDecodeError as error:  # its object begins with the rest of a character
            content = error.object + file.read(SAMPLE)
            cursor.advance(content[: error.start].decode())
            raise not_text(name, content, error.start, "utf-8", cursor, n_beyond_ascii) from None
        position += len(chunk)
        n_beyond_ascii += len(chunk) - len(text)
        cursor.advance(text)
        yield chunk, text
    if decoder.getstate()[0]:
        code = "mend-utf8" if n_beyond_ascii > 3 else ""
        what = f"is not UTF-8 text (it ends inside a character, at {cursor}; was it cut?)"
        raise InputError(f"{name}: {what}", code)


def as_utf8(file: IO[bytes], name: object, encoding: str = "utf-8") -> io.BufferedReader:
    """A text in some encoding, as UTF-8. Reading raises InputError where it is not in it."""
    codec = codecs.lookup(encoding).name

    def chunks(file: IO[bytes]) -> Callable[[], bytes]:
        decoder, cursor, n_beyond_ascii = codecs.getincrementaldecoder(codec)(), Cursor(), 0

        def next_chunk() -> bytes:
            nonlocal n_beyond_ascii
            content, chunk = b"", b"x"
            while chunk and not content:
                chunk = file.read(CHUNK)
                try:
                    text = decoder.decode(chunk, not chunk)
                except UnicodeDecodeError as error:
                    rest = error.object + file.read(SAMPLE)
                    cursor.advance(rest[: error.start].decode(codec, "ignore"))
                    raise not_text(name, rest, error.start, codec, cursor, n_beyond_ascii) from None
                cursor.advance(text)
                content = text.encode()
                n_beyond_ascii += len(content) - len(text)
            return content

        return next_chunk

    return io.BufferedReader(Filter(file, chunks), CHUNK)


# -- what is wrong with a text ---------------------------------------------------------------------


def with_zero(name: object, content: bytes, zero: int, cursor: Cursor, position: int) -> InputError:
    """The error for content with a zero at a byte of it: UTF-16, some zeros in a text, or no text.

    position is that of the content in its file.
    """
    guesses = encodings_of(content[: 1 << 16])
    if guesses and guesses[0].startswith("utf_16"):
        return in_another_encoding(f"{name}: is not UTF-8 text ({cursor})", content, 0, guesses)
    controls = len(content) - len(content.translate(None, CONTROLS))
    where = f"a zero at byte {position + zero}"
    if controls * 100 > len(content):
        return InputError(f"{name}: is a binary file ({where}), not text")
    what = f"has {where} ({cursor}), as texts of PDFs may"
    return InputError(f"{name}: {what}", "leave-out-zeros")


def not_text(
    name: object,
    content: bytes,
    at: int,
    encoding: str = "utf-8",
    cursor: Cursor | None = None,
    n_before: int = 0,
) -> InputError:
    """The error for content that is not in its encoding, at a byte of it: what it may be instead.

    cursor is where that byte is; by default, the content is one line, which the name says.
    n_before counts bytes before the content that only UTF-8 has.
    """
    begin = content.rfind(b"\n", 0, at) + 1
    n_characters = len(content[begin:at].decode(encoding, "ignore"))
    place = f"{cursor or f'column {n_characters + 1}'}: byte 0x{content[at]:02x}"
    encoding = encoding.removesuffix("-sig")
    if encoding == "utf-8":
        error = nearly_utf8(name, content, place, n_before)
        if error:
            return error
    guesses = encodings_of(content[begin : begin + (1 << 16)])
    what = f"{name}: is not {encoding.upper()} text ({place})"
    return in_another_encoding(what, content[begin:], at - begin, guesses, encoding)


def nearly_utf8(name: object, content: bytes, place: str, n_before: int) -> InputError | None:
    """The error for a text that is UTF-8 but for a few bytes: another encoding would spoil it."""
    text = content.decode("utf-8", "surrogateescape")
    faults = list(re.finditer("[\udc80-\udcff]+", text))
    n_faulty = sum(len(fault[0]) for fault in faults)
    n_valid = n_before + len(re.findall("[\x80-\ud7ff\ue000-\U0010ffff]", text))
    n_surrogates = len(re.findall(SURROGATE, content))
    if n_surrogates and n_faulty - 3 * n_surrogates <= n_valid:
        what = f"has surrogates ({place}), as databases and Java write in CESU-8"
        return InputError(f"{name}: {what}", "mend-surrogates")
    if n_faulty >= n_valid:
        return None
    lines = 1 + sum(
        "\n" in text[before.end() : fault.start()] and fault.start() < len(text) - 3
        for before, fault in pairwise(faults)  # a sample may end inside a character
    )
    what = "one place" if lines == 1 else f"{lines:,} lines, the first"
    return InputError(f"{name}: is UTF-8 but for {what} ({place})", "mend-utf8")


def in_another_encoding(
    what: str, content: bytes, at: int, guesses: list[str], encoding: str = "utf-8"
) -> InputError:
    """The error with the encoding that content may have, and some words around a byte in it."""
    codec = codecs.lookup(encoding).name
    guesses = [guess for guess in guesses if codecs.lookup(guess).name != codec]
    if not guesses:
        return InputError(what)
    guess = guesses[0]
    before = len(content[:at].decode(guess, "ignore"))
    sample = content[: at + 80].decode(guess, "ignore")
    words = " ".join(sample[max(0, before - 20) : before + 20].split())
    perhaps = f"perhaps {' or '.join(guesses[:2])}; in {guess} it reads {words!r}"
    return InputError(f"{what}, but {perhaps}", "give-encoding", encoding=guess)


def encodings_of(content: bytes) -> list[str]:
    """The encodings that a text may have, the likeliest first."""
    import charset_normalizer

    matches = charset_normalizer.from_bytes(content, cp_isolation=[*ENCODINGS])
    names = [name for match in matches for name in match.could_be_from_charset]
    # Western Europe's, by far the more frequent, decodes most bytes to letters of the same weight.
    if names[:1] == ["cp1250"] and "cp1252" in names:
        names = ["cp1252", *names]
    return list(dict.fromkeys(names))
