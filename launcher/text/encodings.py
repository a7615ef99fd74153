"""Read bytes as text, in UTF-8 and other encodings, and guess the encoding of a text."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import IO

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.progress import CHUNK_BYTES
from sm_nanogpt.launcher.text.unpacking import buffered_file

SAMPLE_BYTES = 1 << 22  # that are read behind a fault to judge it
GUESS_BYTES = 1 << 16  # by which an encoding is guessed

# The encodings that people use, by Python's names. If charset_normalizer may choose among all that
# it knows, it often prefers a rare one.
ENCODINGS = (
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp866", "cp1253", "cp1254", "cp1255", "cp1256"),
    *("mac_roman", "gb18030", "big5", "cp932", "euc_jp", "cp949", "utf_16_le", "utf_16_be"),
)
# Python's codecs for names of hosts, and the one that refuses everything.
NOT_FOR_FILES = {"idna", "punycode", "undefined"}
CONTROLS = bytes({*range(32)} - {*b"\t\n\f\r\x1b"})
FEW_BYTES = 3  # beyond ASCII in a text that may be of any encoding
# Encodings of several bytes a character, which a short text of Western Europe may resemble.
WIDE_ENCODINGS = {"gb18030", "big5", "cp932", "euc_jp", "cp949", "utf_16_le", "utf_16_be"}
SURROGATE = rb"\xed[\xa0-\xbf][\x80-\xbf]"  # half of a pair, as CESU-8 writes it


def is_encoding(name: str) -> bool:
    """True if Python can read files in an encoding of this name."""
    try:
        codec = codecs.lookup(name)
        "".encode(name)  # refuses codecs from bytes to bytes
    except (LookupError, UnicodeError, ValueError):
        return False
    return codec.name not in NOT_FOR_FILES


@dataclass
class Cursor:
    """A position in a text. Both numbers count from 1; a column is a character."""

    line: int = 1
    column: int = 1

    def advance(self, text: str) -> None:
        """Move on by a text."""
        line_breaks = text.count("\n")
        if line_breaks:
            self.line += line_breaks
            self.column = len(text) - text.rfind("\n")
        else:
            self.column += len(text)

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


class TextDecoder:
    """Decodes a file chunk by chunk, and knows where in the text it is."""

    def __init__(self, file: IO[bytes], name: str, encoding: str) -> None:
        self.file = file
        self.name = name  # of the file in errors
        self.codec = codecs.lookup(encoding).name
        self.decoder = codecs.getincrementaldecoder(self.codec)()
        self.cursor = Cursor()
        self.n_bytes = 0  # of the text so far
        self.n_beyond_ascii = 0  # bytes of a text in UTF-8

    def decode(self, chunk: bytes, is_end: bool = False) -> str:
        """The characters that end in a chunk. Raises InputError where it is not in the encoding."""
        try:
            text = self.decoder.decode(chunk, is_end)
        except UnicodeDecodeError as error:  # its object begins with the rest of a character
            content = error.object + self.file.read(SAMPLE_BYTES)
            self.cursor.advance(content[: error.start].decode(self.codec, "ignore"))
            fault = EncodingFault(
                content, error.start, self.codec, self.cursor, self.n_beyond_ascii
            )
            raise encoding_error(self.name, fault) from None
        self.n_bytes += len(chunk)
        self.n_beyond_ascii += len(chunk) - len(text)
        self.cursor.advance(text)
        return text

    def zero_error(self, chunk: bytes) -> InputError:
        """The error for a next chunk with a zero: the text is UTF-16, has some zeros, or is binary.

        The file is read on, and the cursor moves to the zero.
        """
        zero = chunk.index(0)
        self.cursor.advance(chunk[:zero].decode(errors="ignore"))
        content = chunk + self.file.read(SAMPLE_BYTES)
        guesses = guess_encodings(content[:GUESS_BYTES])
        if guesses and guesses[0].startswith("utf_16"):
            problem = f"{self.name}: is not UTF-8 text ({self.cursor})"
            return other_encoding_error(problem, EncodingFault(content, 0), guesses)
        n_controls = len(content) - len(content.translate(None, CONTROLS))
        zero_at = f"a zero at byte {self.n_bytes + zero}"
        if n_controls * 100 > len(content):
            return InputError(f"{self.name}: is a binary file ({zero_at}), not text")
        problem = f"has {zero_at} ({self.cursor}), as texts of PDFs may"
        return InputError(f"{self.name}: {problem}", code="leave-out-zeros")

    def check_end(self, last_chunk: bytes) -> None:
        """Raise InputError if a UTF-8 text ends inside a character, or with a byte of another
        encoding."""
        incomplete, _ = self.decoder.getstate()
        if not incomplete:
            return
        is_nearly_ascii = self.n_beyond_ascii <= FEW_BYTES
        if len(incomplete) == 1 and is_nearly_ascii:
            fault = EncodingFault(last_chunk, len(last_chunk) - 1, cursor=self.cursor)
            raise encoding_error(self.name, fault)
        code = "" if is_nearly_ascii else "mend-utf8"
        problem = f"it ends inside a character, at {self.cursor}; was it cut?"
        raise InputError(f"{self.name}: is not UTF-8 text ({problem})", code=code)


def read_text(file: IO[bytes], name: str) -> Iterator[str]:
    """Yield the characters of a UTF-8 text, chunk by chunk.

    name: what errors call the file. Raises InputError if the text is not UTF-8, or has a zero.
    """
    decoder = TextDecoder(file, name, "utf-8")
    last_chunk = b""
    while chunk := file.read(CHUNK_BYTES):
        if 0 in chunk:
            raise decoder.zero_error(chunk)
        yield decoder.decode(chunk)
        last_chunk = chunk
    decoder.check_end(last_chunk)


def as_utf8(file: IO[bytes], name: str, encoding: str = "utf-8") -> io.BufferedReader:
    """A text of this encoding, as UTF-8. Reading raises InputError at bytes of another encoding."""

    def make_chunks(file: IO[bytes]) -> Iterator[bytes]:
        decoder = TextDecoder(file, name, encoding)
        while chunk := file.read(CHUNK_BYTES):
            text = decoder.decode(chunk)
            if text:
                yield text.encode()
        yield decoder.decode(b"", is_end=True).encode()

    return buffered_file(file, make_chunks)


# -- what is wrong with a text ---------------------------------------------------------------------


@dataclass(frozen=True)
class EncodingFault:
    """A byte at which a text is not in its encoding."""

    content: bytes  # a part of the text, which begins before the byte
    index: int  # of the byte in the content
    encoding: str = "utf-8"
    cursor: Cursor | None = None  # where the byte is; None: in the only line of the content
    n_beyond_ascii: int = 0  # bytes before the content that only UTF-8 has

    @property
    def line_begin(self) -> int:
        """The index of the first byte of its line."""
        return self.content.rfind(b"\n", 0, self.index) + 1

    def __str__(self) -> str:
        """Such as `line 3, column 7: byte 0xe9`."""
        position = str(self.cursor)
        if self.cursor is None:
            line = self.content[self.line_begin : self.index].decode(self.encoding, "ignore")
            position = f"column {len(line) + 1}"
        return f"{position}: byte 0x{self.content[self.index]:02x}"


def encoding_error(name: str, fault: EncodingFault) -> InputError:
    """The error for a text that is not in its encoding, with the one that it may have."""
    encoding = fault.encoding.removesuffix("-sig")
    if encoding == "utf-8":
        error = nearly_utf8_error(name, fault)
        if error is not None:
            return error
    begin = fault.line_begin
    line = replace(fault, content=fault.content[begin:], index=fault.index - begin)
    guesses = guess_encodings(line.content[:GUESS_BYTES])
    return other_encoding_error(f"{name}: is not {encoding.upper()} text ({fault})", line, guesses)


def nearly_utf8_error(name: str, fault: EncodingFault) -> InputError | None:
    """The error for a text that is UTF-8 except for a few bytes; None for any other text.

    To read such a text in another encoding would spoil it. A text with the byte order mark of
    UTF-8 counts as such, however many of its bytes are faulty.
    """
    text = fault.content.decode("utf-8", "surrogateescape")  # a faulty byte: \udc80 to \udcff
    faulty_parts = list(re.finditer("[\udc80-\udcff]+", text))
    n_faulty = sum(len(part[0]) for part in faulty_parts)  # bytes
    n_valid = fault.n_beyond_ascii + len(re.findall("[\x80-\ud7ff\ue000-\U0010ffff]", text))

    n_surrogates = len(re.findall(SURROGATE, fault.content))
    n_other_faults = n_faulty - 3 * n_surrogates  # a surrogate has three bytes
    if n_surrogates and n_other_faults <= n_valid:
        problem = f"has surrogates ({fault}), as databases and Java write in CESU-8"
        return InputError(f"{name}: {problem}", code="mend-surrogates")

    has_mark = fault.encoding == "utf-8-sig"
    is_mostly_valid = n_valid > n_faulty
    if not (has_mark or is_mostly_valid):
        return None
    n_lines = count_faulty_lines(text, faulty_parts)
    lines = "one line" if n_lines == 1 else f"{n_lines:,} lines, the first"
    mark = "has the byte order mark of UTF-8, and " if has_mark else ""
    return InputError(f"{name}: {mark}is UTF-8 except for {lines} ({fault})", code="mend-utf8")


def count_faulty_lines(text: str, faulty_parts: Sequence[re.Match[str]]) -> int:
    """Count the lines of a text that have faulty parts.

    A part at the end of the text does not count: the text is a sample, which may end inside a
    character.
    """
    n_lines = 1
    for previous, part in pairwise(faulty_parts):
        is_at_end = part.start() >= len(text) - 3
        if "\n" in text[previous.end() : part.start()] and not is_at_end:
            n_lines += 1
    return n_lines


def other_encoding_error(problem: str, fault: EncodingFault, guesses: list[str]) -> InputError:
    """The error for a text with the encoding that it may have, and how it reads in that one."""
    codec = codecs.lookup(fault.encoding.removesuffix("-sig")).name
    guesses = [guess for guess in guesses if codecs.lookup(guess).name != codec]
    if not guesses:
        return InputError(problem)
    guess = guesses[0]
    n_before = len(fault.content[: fault.index].decode(guess, "ignore"))
    text = fault.content[: fault.index + 80].decode(guess, "ignore")
    excerpt = " ".join(text[max(0, n_before - 20) : n_before + 20].split())
    names = " or ".join(guesses[:2])
    return InputError(
        f"{problem}, but perhaps {names}; in {guess} it reads {excerpt!r}",
        code="give-encoding",
        encoding=guess,
    )


def guess_encodings(content: bytes) -> list[str]:
    """The encodings that a text may have, the likeliest first."""
    import charset_normalizer

    matches = charset_normalizer.from_bytes(content, cp_isolation=[*ENCODINGS])
    names: list[str] = []
    for match in matches:
        names += match.could_be_from_charset
    # Western Europe's, by far the more frequent, decodes most bytes to letters of the same weight.
    if names[:1] == ["cp1250"] and "cp1252" in names:
        names.insert(0, "cp1252")
    elif is_like_western(content) and (not names or names[0] in WIDE_ENCODINGS):
        names = ["cp1252", *(name for name in names if name not in WIDE_ENCODINGS)]
    return list(dict.fromkeys(names))


def is_like_western(content: bytes) -> bool:
    """True if most bytes of a text are ASCII, and most others stand alone, as in Western Europe.

    In an encoding of several bytes a character, they stand in pairs, or are most of the text.
    """
    try:
        content.decode("cp1252")
    except UnicodeDecodeError:
        return False
    runs = re.findall(rb"[\x80-\xff]+", content)
    n_alone = sum(len(run) == 1 for run in runs)
    is_mostly_ascii = 2 * sum(map(len, runs)) < len(content)
    has_controls = len(content.translate(None, CONTROLS)) < len(content)
    return is_mostly_ascii and 2 * n_alone > len(runs) and not has_controls
