"""Find out the format and the encoding of a file, and open its text as UTF-8."""

from __future__ import annotations

import codecs
import errno
import io
import logging
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from sm_nanogpt.entry_point.errors import os_reason
from sm_nanogpt.entry_point.files import open_file
from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.files.progress import CHUNK_BYTES
from sm_nanogpt.launcher.text.encodings import as_utf8, read_text
from sm_nanogpt.launcher.text.exports import REDIRECT
from sm_nanogpt.launcher.text.formats import (
    JSON,
    PLAIN,
    TABLE,
    WHATSAPP,
    Extractor,
    Format,
    advice_for,
    fill_in,
    format_of_content,
    format_of_name,
)
from sm_nanogpt.launcher.text.tables import columns_in
from sm_nanogpt.launcher.text.unpacking import (
    DETECT_BYTES,
    Compression,
    buffered_file,
    compression_of,
    limit_unpacking,
    zstd,
)
from sm_nanogpt.launcher.text.whatsapp import DIARY_CHECK_BYTES, is_chat

logger = logging.getLogger(__name__)

BYTE_ORDER_MARKS = {  # the codec of a file, by its mark
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # before the mark of UTF-16, with which it begins
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_BE: "utf-16",
}
# The codes of remedies that are for a file without compression.
PLAIN_FILE_CODES = ("mend-utf8", "mend-surrogates", "leave-out-zeros")


@dataclass(frozen=True)
class File:
    """A file of an upload, and how to read it. By default, its bytes are the text."""

    name: str  # of the file in the upload
    path: Path
    format: Format = PLAIN
    compression: Compression | None = None
    encoding: str = ""  # a codec of Python; "": UTF-8
    column: str = "text"  # the field of its records that holds the text
    me: str = ""  # the person in its chats whose messages a model learns
    source: str = ""  # what the user named, if the path is a copy of that

    @property
    def shown(self) -> str:
        """What messages call the file."""
        return self.source or str(self.path)

    @property
    def is_converted(self) -> bool:
        """True if the upload has other bytes than the file."""
        return bool(self.compression or self.encoding or self.format.extractor)


def files_in(directory: Path) -> list[File]:
    """The files in a directory, in the order of their names, each to be read as it is."""
    return [File(path.name, path) for path in sorted(directory.iterdir())]


def detect_file(
    path: Path,
    encoding: str = "",
    column: str = "text",
    as_plain: bool = False,
    source: str = "",
    me: str = "",
) -> File:
    """Find out how to read a file, by its name and its first bytes.

    encoding is used if the file is not UTF-8. as_plain: the file is plain text, whatever its name
    is. The other parameters are as in File. Raises InputError if the file cannot be read, or has a
    format that is refused.
    """
    file = File(path.name, path, column=column, me=me, source=source)
    file = replace(file, compression=compression_of(read_beginning(file)))
    beginning = read_beginning(file)
    format = detect_format(path, beginning, as_plain)
    if format.is_refused or (format.is_binary and file.compression):
        advice = advice_for(format, file.shown, file.compression)
        raise InputError(f"{file.shown}: is {format.name}; {advice}")

    codec = codec_of_mark(beginning)
    if encoding and not (codec or format.is_binary) and not is_utf8_file(file, encoding):
        codec = encoding
    text = beginning.decode(codec or "utf-8", "ignore").lstrip("\ufeff\r\n")
    if format is WHATSAPP and not holds_chat(file, codec):
        warning = f"{file.shown}: has times as a chat of WhatsApp has, but is read as text"
        logger.warning(warning, extra={"code": "read-as-chat"})
        format = PLAIN
    if format is PLAIN and not as_plain:
        format = guess_format(text, file)
    return replace(file, format=format, encoding=codec)


def read_beginning(file: File, n_bytes: int = DETECT_BYTES) -> bytes:
    with open_text(file) as content:
        return content.read(n_bytes)


def holds_chat(file: File, codec: str) -> bool:
    """True if a file that begins as a chat of WhatsApp is one. codec: its encoding; "": UTF-8."""
    beginning = read_beginning(file, DIARY_CHECK_BYTES)
    return is_chat(beginning.decode(codec or "utf-8", "ignore"), file.path.name, file.me)


def codec_of_mark(beginning: bytes) -> str:
    """The codec of a file that begins with a byte order mark, or ''."""
    for mark, codec in BYTE_ORDER_MARKS.items():
        if beginning.startswith(mark):
            return codec
    return ""


def detect_format(path: Path, beginning: bytes, as_plain: bool) -> Format:
    """The format of a file, by its name and its first bytes.

    as_plain: the format is PLAIN, unless it is binary or refused.
    """
    format = PLAIN
    if not as_plain:
        format = format_of_name(path) or PLAIN
    if not format.is_refused:  # a .docx, which is refused by its name, begins as a .zip
        format = format_of_content(beginning) or format
    if as_plain and not format.is_binary:
        return PLAIN
    return format


def guess_format(text: str, file: File) -> Format:
    """The format of a file without a suffix, by the beginning of its text.

    A file with a suffix of plain text stays plain text, with a warning if it looks like records.
    """
    has_suffix = bool(file.path.suffix)  # standard input has none
    if re.match(r'\s*\[?\s*\{\s*"', text):
        if not has_suffix:
            return JSON
        logger.warning(f"{file.shown}: looks like JSON, but is read as text; rename it to *.json")
    columns = columns_in(text)
    has_column = file.column in columns and (file.column != "text" or len(columns) > 1)
    if has_column and not has_suffix:
        return TABLE
    if len(columns) > 1 and text.count("\n") > 3:
        warning = f"{file.shown}: looks like a table, but is read as text"
        if has_suffix:
            logger.warning(f"{warning}; rename it to *.csv, or *.tsv")
        else:
            logger.warning(warning, extra={"code": "name-column"})
    return PLAIN


def is_utf8_file(file: File, encoding: str) -> bool:
    """True if a file is UTF-8. A file in ASCII is not, if it reads differently in `encoding`.

    Raises InputError if it is UTF-8 except for a few bytes: another encoding would spoil it.
    """
    has_zeros = re.match("utf.?(16|32)", encoding, re.IGNORECASE)  # zeros are not UTF-8 text here
    is_same = True
    try:
        with open_text(file) as content:
            for text in read_text(content, file.shown):
                if not text.isascii():
                    return True
                if not has_zeros and text.encode().decode(encoding, "replace") != text:
                    is_same = False
    except InputError as error:
        if error.code in PLAIN_FILE_CODES:
            raise
        return False
    return is_same


@contextmanager
def open_text(file: File) -> Iterator[io.BufferedReader]:
    """Open the text of a file, uncompressed and as UTF-8.

    Raises InputError if it cannot be opened, or if the body cannot read it.
    """
    try:
        with open_file(file.path) as packed:
            if file.compression is None:
                yield decode_and_extract(packed, file)
            else:
                with file.compression.open(packed) as unpacked:
                    size = file.path.stat().st_size
                    yield decode_and_extract(limit_unpacking(unpacked, file.shown, size), file)
    except InputError as error:
        if file.compression and advises_on_plain_file(error):
            unpack = fill_in(file.compression.advice, file.shown)
            raise InputError(f"{error}; unpack it first: {unpack}", code=error.code) from None
        raise
    except (UnicodeError, OSError, EOFError, zlib.error, zstd.ZstdError) as error:
        raise InputError(f"{file.shown}: {reading_problem(error, file)}") from None


def advises_on_plain_file(error: InputError) -> bool:
    """True if an error advises a command that reads the file, which has to be unpacked for it."""
    return error.code in PLAIN_FILE_CODES or REDIRECT in str(error)


def decode_and_extract(content: io.BufferedReader, file: File) -> io.BufferedReader:
    if file.encoding:
        content = as_utf8(content, file.shown, file.encoding)
    if file.format.extractor is not None:
        content = extract_text(content, file.format.extractor)
    return content


def extract_text(content: IO[bytes], extractor: Extractor) -> io.BufferedReader:
    """The plain text of a file, as UTF-8."""

    def make_chunks(content: IO[bytes]) -> Iterator[bytes]:
        for text in extractor(content):
            if text:
                yield text.encode("utf-8", "surrogateescape")

    return buffered_file(content, make_chunks)


def reading_problem(error: Exception, file: File) -> str:
    """Why a file cannot be read, and what to do."""
    if isinstance(error, UnicodeError):  # the file has no byte order mark
        return f"{error}; give its encoding as {file.encoding}-le or {file.encoding}-be"
    problem = f"damaged: {error}"
    if isinstance(error, OSError) and error.strerror:
        problem = os_reason(error)
    if file.path.is_fifo():
        return f"{problem}; for a pipe, give -"
    return problem


@contextmanager
def file_to_upload(file: File) -> Iterator[Path]:
    """Yield the file to send to S3: the file itself, or a temporary copy, uncompressed and as
    UTF-8."""
    if not file.is_converted:
        yield file.path
        return
    with open_text(file) as content, tempfile.NamedTemporaryFile() as copy:
        try:
            shutil.copyfileobj(content, copy, CHUNK_BYTES)
            copy.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            full = f"{tempfile.gettempdir()} is full, where {file.shown} is unpacked"
            raise ServiceError(f"{full}; TMPDIR names another directory") from None
        yield Path(copy.name)
