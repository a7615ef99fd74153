"""The files that a text is made of: their formats, compressions, and encodings; their documents."""

from __future__ import annotations

import codecs
import errno
import gzip
import hashlib
import io
import logging
import re
import shlex
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from entry_point.files import open_file
from launcher.errors import InputError, ServiceError
from launcher.files.storage import CHUNK_BYTES
from launcher.models.encoder import LONGEST as PIECE
from launcher.text.encodings import as_utf8, read_text
from launcher.text.skipped import Skipped, Unlearnable
from launcher.text.tables import names_in
from launcher.text.unpacking import bounded

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


logger = logging.getLogger("launcher.text")

# The shortest context of any preset. Shorter text cannot fill one window for training and one in
# its last tenth for validation. A launch checks against the context of its job.
SHORTEST_BLOCK_SIZE = 64

Content = io.BufferedReader | io.BufferedRandom


@dataclass(frozen=True)
class Format:
    """A kind of files: how to recognize it, and who reads it or what to do with it."""

    name: str
    suffixes: str
    magic: bytes = b""  # a pattern of its first bytes
    read: str = ""  # the reader in `documents_of`, or "text"; "": the file is refused
    advice: str = ""  # what to do with a file that is refused
    is_text: bool = False  # of these, `include` takes any as plain text


PLAIN = Format("plain text", ".txt .md", read="text", is_text=True)
JSON_LINES = Format("JSON lines", ".jsonl .ndjson", read="json_lines", is_text=True)
JSON = Format("JSON", ".json", read="json_array", is_text=True)
JSON_OBJECTS = replace(JSON, suffixes="", read="json_lines")  # a .json that holds no array
TABLE = Format("a table", ".csv .tsv", read="table", is_text=True)
PARQUET = Format("Parquet", ".parquet", b"PAR1", read="parquet")
HTML = Format(
    "an HTML page",
    ".html .htm .xhtml",
    rb"(?i)(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype\s+html|html)\b",
    advice="`pandoc -f html -t plain -o {stem}.txt {path}` makes text of it",
    is_text=True,
)
NOTEBOOK = Format(
    "a notebook",
    ".ipynb",
    advice="`jupyter nbconvert --to script {path}` makes code of it, `--to markdown` a text",
    is_text=True,
)
ARROW = Format(
    "an Arrow file",
    ".arrow",
    advice='`python -c "import datasets as d;'
    " d.Dataset.from_file('{path}').to_parquet('{stem}.parquet')\"` makes Parquet of it",
)
FEATHER = Format(
    "a Feather file",
    ".feather",
    rb"ARROW1|FEA1",
    advice='`python -c "import pandas as p;'
    " p.read_feather('{path}').to_parquet('{stem}.parquet')\"` makes Parquet of it",
)
PANDOC = "`pandoc -t plain -o {stem}.txt {path}` makes text of it"
OFFICE = "save a text as .txt or .docx, and a table as .csv"
PICKLE = "let the program that wrote it write its texts, as .txt or .jsonl"
IMAGE = rb"\x89PNG|\xff\xd8\xff|GIF8|II\*\0"
TESSERACT = "`tesseract {path} {stem}` reads the text in it"
TAR = Format("an archive", ".tar .tgz", rb".{257}ustar", advice="unpack it: `tar -xf {path}`")
FORMATS = (
    *(PLAIN, JSON_LINES, JSON, TABLE, PARQUET, HTML, NOTEBOOK, ARROW, FEATHER, TAR),
    Format("a PDF", ".pdf", b"%PDF-", "", "`pdftotext {path}` makes text of it"),
    Format("a document", ".docx .odt .epub .rtf", rb"\{\\rtf", "", PANDOC),
    Format("an Office file", ".doc .ppt .pptx .xls .xlsx .ods", rb"\xd0\xcf\x11\xe0", "", OFFICE),
    Format("a zip archive", ".zip", rb"PK\x03\x04", "", "unpack it: `unzip {path}`"),
    Format("a bzip2 file", ".bz2", rb"BZh", "", "unpack it: `bunzip2 {path}`"),
    Format("an xz file", ".xz", rb"\xfd7zXZ", "", "unpack it: `unxz {path}`"),
    Format("a pickle", ".pkl .pickle .pt .pth", rb"\x80[\x02-\x05]", "", PICKLE),
    Format("an image", ".png .jpg .jpeg .gif .tif .tiff", IMAGE, "", TESSERACT),
)
BY_SUFFIX = {suffix: format for format in FORMATS for suffix in format.suffixes.split()}
UNPACK = {".gz": "`gunzip -k {path}`", ".zst": "`zstd -d {path}`"}
MENDS = ("mend-utf8", "mend-surrogates", "leave-out-zeros")  # codes of what reads a plain FILE
COMPRESSIONS: dict[str, tuple[bytes, Any]] = {
    ".gz": (b"\x1f\x8b", gzip.open),
    ".zst": (b"\x28\xb5\x2f\xfd", zstd.open),
}
MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16's, with which it begins
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_BE: "utf-16",
}


@dataclass(frozen=True)
class File:
    """A file of an upload, and how to read it; by default its bytes as they are."""

    name: str  # in the upload
    path: Path
    format: Format = PLAIN
    compression: str = ""  # one of COMPRESSIONS
    encoding: str = ""  # a codec of Python
    column: str = "text"  # the field of its records that holds the text

    @property
    def is_converted(self) -> bool:
        """Whether the upload has other bytes than the file."""
        return bool(self.compression or self.encoding)


def bare(path: Path) -> Path:
    """The path without the suffix of a compression."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path


def named(path: Path) -> Format | None:
    """The format that a file's name promises."""
    return BY_SUFFIX.get(bare(path).suffix.lower())


def look(path: Path, encoding: str = "", column: str = "text", plain: bool = False) -> File:
    """How to read a file, by its name and its first bytes.

    plain takes it as plain text whatever its name. An encoding is for what is not UTF-8. Raises
    InputError if it cannot be read, or is of a format that is refused.
    """
    with opened(File(path.name, path)) as file:
        begins = file.read(4)
    compression = next((c for c, (m, _) in COMPRESSIONS.items() if begins.startswith(m)), "")
    raw = File(path.name, path, compression=compression, column=column)
    with opened(raw) as file:
        begins = file.read(1 << 12)
    format = format_of(path, begins, plain)
    if not format.read or (format is PARQUET and compression):
        raise InputError(f"{path}: is {format.name}; {advice_for(format, path, compression)}")
    codec = next((codec for mark, codec in MARKS.items() if begins.startswith(mark)), "")
    if encoding and not codec and format is not PARQUET and not is_utf8(raw, encoding):
        codec = encoding
    text = begins.decode(codec or "utf-8", "ignore").lstrip("\ufeff\r\n")
    if format is PLAIN and not plain:
        format = told_by(text, path, column)
    if format is JSON and not text.lstrip().startswith("["):
        format = JSON_OBJECTS
    return replace(raw, format=format, encoding=codec)


def format_of(path: Path, begins: bytes, plain: bool) -> Format:
    """The format of a file that begins so. plain: it is text, if it may be."""
    format = PLAIN if plain else named(path) or PLAIN
    if format.read:  # else it is what its name says: a .docx begins as a .zip
        format = first_with_magic(begins) or format
    if plain and format.is_text:
        return PLAIN
    return format


def first_with_magic(begins: bytes) -> Format | None:
    """The format whose files have such first bytes, if it has a magic."""
    return next((f for f in FORMATS if f.magic and re.match(f.magic, begins, re.S)), None)


def advice_for(format: Format, path: Path, compression: str = "") -> str:
    """What to do with a file that is refused."""
    shown = str(path) if path.suffix else "FILE"  # such as standard input
    if not compression or format is TAR:
        return format.advice.format(path=shlex.quote(shown), stem=shlex.quote(path.stem))
    unpack = UNPACK[compression].format(path=shlex.quote(shown))
    unpacked = bare(path)
    advice = format.advice.format(path=shlex.quote(str(unpacked)), stem=shlex.quote(unpacked.stem))
    return f"{unpack} unpacks it; then {advice}" if advice else f"{unpack} unpacks it"


def told_by(text: str, path: Path, column: str) -> Format:
    """The format of a file by the beginning of its text, if its name has no suffix to tell it."""
    if re.match(r'\s*\[?\s*\{\s*"', text):
        if not path.suffix:  # such as standard input
            return JSON
        logger.warning(f"{path}: looks like JSON, but is read as text; rename it to *.json")
    names = names_in(text)
    is_column = column in names and (column != "text" or len(names) > 1)
    if is_column and not path.suffix:
        return TABLE
    if len(names) > 1 and text.count("\n") > 3:
        what = "looks like a table, but is read as text"
        if path.suffix:
            logger.warning(f"{path}: {what}; rename it to *.csv, or *.tsv")
        else:
            logger.warning(f"{path}: {what}", extra={"code": "name-column"})
    return PLAIN


def is_utf8(raw: File, encoding: str) -> bool:
    """Whether a file is UTF-8; ASCII alone may also stand for other characters.

    Raises InputError if it is UTF-8 but for a few places, which another encoding would spoil.
    """
    wide = re.match("utf.?(16|32)", encoding, re.I)  # it has zeros, which are no text here
    same = True
    try:
        with opened(raw) as file:
            for chunk, text in read_text(file, raw.path, CHUNK_BYTES):
                if not text.isascii():
                    return True
                same = same and (wide is not None or chunk.decode(encoding, "replace") == text)
    except InputError as error:
        if error.code in MENDS:
            raise
        return False
    return same


@contextmanager
def opened(file: File) -> Iterator[io.BufferedReader]:
    """A file's content, uncompressed, as UTF-8. Raises InputError where that or the body fails."""
    try:
        with (
            open_file(file.path) as raw,
            COMPRESSIONS.get(file.compression, (b"", nullcontext))[1](raw) as plain,
        ):
            content = plain
            if file.compression:
                content = bounded(content, file.path, file.path.stat().st_size)
            if file.encoding:
                content = as_utf8(content, file.path, file.encoding)
            yield content
    except InputError as error:
        if file.compression and error.code in MENDS:
            unpack = UNPACK[file.compression].format(path=shlex.quote(str(file.path)))
            raise InputError(f"{error}; unpack it first: {unpack}", error.code) from None
        raise
    except (UnicodeError, OSError, EOFError, zlib.error, zstd.ZstdError) as error:
        why = getattr(error, "strerror", "") or f"damaged: {error}"
        if isinstance(error, UnicodeError):  # no byte order mark
            why = f"{error}; give its encoding as {file.encoding}-le or {file.encoding}-be"
        elif file.path.is_fifo():
            why += "; for a pipe, give -"
        raise InputError(f"{file.path}: {why}") from None


@contextmanager
def stored(file: File) -> Iterator[Path]:
    """The file that S3 gets: this one, or a temporary copy, uncompressed and as UTF-8."""
    if not file.is_converted:
        yield file.path
        return
    with opened(file) as content, tempfile.NamedTemporaryFile() as copy:
        try:
            shutil.copyfileobj(content, copy, CHUNK_BYTES)
            copy.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            full = f"{tempfile.gettempdir()} is full, where {file.path} is unpacked"
            raise ServiceError(f"{full}; TMPDIR names another directory") from None
        yield Path(copy.name)


# -- what may be wrong with a text -----------------------------------------------------------------

CONTROLS = "control characters (U+0080 to U+009F), as of Windows-1252 that was read as Latin-1"
LATIN = "U+00C3 or U+00E2 before a sign, as of UTF-8 that was read as Windows-1252 ('Ã©' for 'é')"
RETURNS = r"carriage returns without line feeds; for line breaks: `tr '\r' '\n' < FILE > NEW-FILE`"
ESCAPES = (
    "escape sequences, as of a terminal's colors, which a model learns too; with NO_COLOR=1 most"
    " programs write none"
)
ODD = {  # with the encoding of the original, where another one may help
    rb"\xc2[\x80-\x9f]": (f"{CONTROLS}; upload the original", "cp1252"),
    rb"\xef\xbf\xbd": ("U+FFFD, the sign for lost characters; upload the original", "NAME"),
    rb"\xc3\x83\xc2[\x80-\xbf]|\xc3\xa2\xe2\x82\xac": (f"{LATIN}; upload the original", ""),
    rb"\r[^\n]": (RETURNS, ""),
    rb"\x1b[\[\]]": (ESCAPES, ""),
}


def note_odd(content: bytes, place: str, odd: dict[bytes, str]) -> None:
    """Note where each of ODD is first met."""
    plain = content.isascii() and b"\r" not in content and b"\x1b" not in content
    if plain:  # a short way for many short turns
        return
    for pattern in ODD.keys() - odd.keys():
        if re.search(pattern, content):
            odd[pattern] = place


# -- documents -------------------------------------------------------------------------------------


@dataclass
class Counts:
    """What reading files once found, and a SHA-256 of their names and contents."""

    documents: int = 0
    empty: int = 0  # left out
    chats: int = 0  # of the documents, those that are conversations
    characters: int = 0
    size: int = 0
    sha256: str = ""
    vocabulary: str = ""  # of a run by characters
    odd: dict[bytes, str] = field(default_factory=dict)
    skipped: Skipped = field(default_factory=Skipped)

    def check(self, name: object) -> None:
        """Warn of odd characters, and of conversations that are left out. Raise InputError if those
        are too many, or there is too little text for any run."""
        self.skipped.check(self.chats)
        for pattern, place in self.odd.items():
            what, encoding = ODD[pattern]
            advice = dict(code="give-encoding", encoding=encoding) if encoding else {}
            logger.warning(f"{place}: has {what}", extra=advice)
        needed = 10 * (SHORTEST_BLOCK_SIZE + 1)
        if self.characters < needed:
            few = f"{self.characters} characters are too few to train and validate on"
            raise InputError(f"{name}: {few}; use at least {needed}, better a million")


def documents(files: Sequence[File], found: Counts) -> Iterator[str | None]:
    """Each document as pieces of at most PIECE characters, then None. Fills in `found` on the way.

    A file of plain text is a document, and so is each record of others. Empty ones are left out,
    and conversations from which no model can learn. The pieces of a conversation are its turns.
    Raises InputError.
    """
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0".encode())
        for place, chats, pieces in documents_of(file, found.skipped):
            before = found.size
            for piece in pieces:
                content = piece.encode()
                if chats:  # where a turn ends counts too
                    digest.update(len(content).to_bytes(8, "little"))
                digest.update(content)
                note_odd(content, place, found.odd)
                found.characters += len(piece)
                found.size += len(content)
                yield piece
            if found.size == before:
                found.empty += 1
                continue
            found.documents += 1
            found.chats += chats
            if found.chats not in (0, found.documents):
                what = "some documents are conversations, and others are text"
                raise InputError(f"{place}: {what}; leave out the files of one kind")
            digest.update(b"\0")
            yield None
    found.sha256 = digest.hexdigest()


def documents_of(file: File, skipped: Skipped) -> Iterator[tuple[str, bool, Iterator[str]]]:
    """The place of each document, whether it is a conversation, and its turns or pieces.

    Conversations from which no model can learn are added to `skipped`.
    """
    if file.format is PLAIN:
        yield str(file.path), False, pieces_of(file)
        return
    from launcher.text import records  # imports torch

    readers: dict[str, Any] = {
        "json_lines": records.json_lines,
        "json_array": records.json_array,
        "table": partial(records.table, column=file.column),
        "parquet": partial(records.parquet, column=file.column),
    }
    with opened(file) as content:
        for place, record in readers[file.format.read](content, str(file.path)):
            try:
                is_chat, pieces = records.document_of(record, place, file.column)
            except Unlearnable as error:
                skipped.add(error)
                continue
            yield place, is_chat, pieces


def pieces_of(file: File) -> Iterator[str]:
    """Yield a text in pieces, which end at a line break if their second half has one."""
    text = ""
    with opened(file) as content:
        for _, part in read_text(content, file.path, PIECE):
            text += part
            while len(text) > PIECE:
                end = text.rfind("\n", PIECE // 2, PIECE) + 1 or PIECE
                yield text[:end]
                text = text[end:]
    if text:
        yield text
