"""The files that a text is made of: their formats, compressions, and encodings; their documents."""

from __future__ import annotations

import codecs
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
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from entry_point.files import open_file
from launcher.errors import InputError
from launcher.files.documents import not_text, read_text
from launcher.files.storage import CHUNK_BYTES
from launcher.models.encoder import LONGEST as PIECE
from launcher.text.skipped import Skipped, Unlearnable

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
    name: str
    suffixes: str
    magic: bytes = b""  # a pattern of its first bytes
    read: str = ""  # the reader in `documents_of`, or "text"; "": the file is refused
    advice: str = ""  # what to do with a file that is refused


PLAIN = Format("plain text", ".txt .md", read="text")
JSON_LINES = Format("JSON lines", ".jsonl .ndjson", read="json_lines")
JSON = Format("JSON", ".json", read="json_array")
TABLE = Format("a table", ".csv .tsv", read="table")
PANDOC = "`pandoc -t plain -o {stem}.txt {path}` makes text of it"
OFFICE = "save a text as .txt or .docx, and a table as .csv"
PICKLE = "let the program that wrote it write its texts, as .txt or .jsonl"
IMAGE = rb"\x89PNG|\xff\xd8\xff|GIF8|II\*\0"
TESSERACT = "`tesseract {path} {stem}` reads the text in it"
FORMATS = (
    *(PLAIN, JSON_LINES, JSON, TABLE),
    Format("Parquet", ".parquet", b"PAR1", "parquet"),
    Format("a PDF", ".pdf", b"%PDF-", "", "`pdftotext {path}` makes text of it"),
    Format("a document", ".docx .odt .epub .rtf", rb"\{\\rtf", "", PANDOC),
    Format("an Office file", ".doc .ppt .pptx .xls .xlsx .ods", rb"\xd0\xcf\x11\xe0", "", OFFICE),
    Format("a zip archive", ".zip", rb"PK\x03\x04", "", "unpack it: `unzip {path}`"),
    Format("an archive", ".tar .tgz", rb".{257}ustar", "", "unpack it: `tar -xf {path}`"),
    Format("a bzip2 file", ".bz2", rb"BZh", "", "unpack it: `bunzip2 {path}`"),
    Format("an xz file", ".xz", rb"\xfd7zXZ", "", "unpack it: `unxz {path}`"),
    Format("a pickle", ".pkl .pickle .pt .pth", rb"\x80[\x02-\x05]", "", PICKLE),
    Format("an image", ".png .jpg .jpeg .gif .tif .tiff", IMAGE, "", TESSERACT),
)
BY_SUFFIX = {suffix: each for each in FORMATS for suffix in each.suffixes.split()}
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
    found = PLAIN if plain else named(path) or PLAIN
    if found.read:  # else it is refused as what its name says: a .docx begins as a .zip
        found = next((f for f in FORMATS if f.magic and re.match(f.magic, begins, re.S)), found)
    if not found.read:
        where = str(path) if path.suffix else "FILE"  # such as standard input
        advice = found.advice.format(path=shlex.quote(where), stem=shlex.quote(path.stem))
        raise InputError(f"{path}: is {found.name}; {advice}")
    codec = next((codec for mark, codec in MARKS.items() if begins.startswith(mark)), "")
    if encoding and not codec and found.read != "parquet" and not is_utf8(raw, encoding):
        codec = encoding
    text = begins.decode(codec or "utf-8", "ignore").lstrip()
    if found is PLAIN and not plain:
        found = told_by(text, path, column)
    if found is JSON and not text.startswith("["):
        found = JSON_LINES
    return replace(raw, format=found, encoding=codec)


def told_by(text: str, path: Path, column: str) -> Format:
    """The format of a file by the beginning of its text, if its name has no suffix to tell it."""
    if re.match(r'\[?\s*\{\s*"', text):
        if not path.suffix:  # such as standard input
            return JSON
        logger.warning(f"{path}: looks like JSON, but is read as text; rename it to *.json")
    header = re.split("[,;\t]", text.partition("\n")[0])
    is_table = column != "text" and column in [name.strip('\r "') for name in header]
    return TABLE if is_table and not path.suffix else PLAIN


def is_utf8(raw: File, encoding: str) -> bool:
    """Whether a file is UTF-8; ASCII alone may also stand for other characters."""
    wide = re.match("utf.?(16|32)", encoding, re.I)  # it has zeros, which are no text here
    same = True
    with suppress(InputError), opened(raw) as file:
        for chunk, text in read_text(file, raw.path, CHUNK_BYTES):
            if not text.isascii():
                return True
            same = same and (wide is not None or chunk.decode(encoding, "replace") == text)
        return same
    return False


@contextmanager
def converted(file: io.BufferedReader, encoding: str) -> Iterator[Content]:
    """The file itself, or a temporary one with the same text as UTF-8."""
    if not encoding:
        yield file
        return
    with tempfile.TemporaryFile() as copy:
        text = io.TextIOWrapper(file, encoding, newline="")
        while part := text.read(CHUNK_BYTES):
            copy.write(part.encode())
        copy.seek(0)
        yield copy


@contextmanager
def opened(file: File) -> Iterator[Content]:
    """A file's content, uncompressed, as UTF-8. Raises InputError where that or the body fails."""
    try:
        with (
            open_file(file.path) as raw,
            COMPRESSIONS.get(file.compression, (b"", nullcontext))[1](raw) as plain,
            converted(io.BufferedReader(plain), file.encoding) as content,
        ):
            yield content
    except UnicodeDecodeError as error:
        raise not_text(file.path, error.object, error.start, error.encoding) from None
    except (UnicodeError, OSError, EOFError, zlib.error, zstd.ZstdError) as error:
        why = getattr(error, "strerror", "") or f"damaged: {error}"
        if isinstance(error, UnicodeError):  # no byte order mark
            why = f"{error}; give its encoding as {file.encoding}-le or {file.encoding}-be"
        elif file.path.is_fifo():
            why += "; for a pipe, give -"
        raise InputError(f"{file.path}: {why}") from None


@contextmanager
def stored(file: File) -> Iterator[Path]:
    """The file that a store gets: this one, or a temporary copy, uncompressed and as UTF-8."""
    if not file.compression and not file.encoding:
        yield file.path
        return
    with opened(file) as content, tempfile.NamedTemporaryFile() as copy:
        shutil.copyfileobj(content, copy, CHUNK_BYTES)
        copy.flush()
        yield Path(copy.name)


# -- what may be wrong with a text -----------------------------------------------------------------

CONTROLS = "control characters (U+0080 to U+009F), as of Windows-1252 that was read as Latin-1"
RETURNS = r"carriage returns without line feeds; for line breaks: `tr '\r' '\n' < FILE > NEW-FILE`"
ESCAPES = (
    "escape sequences, as of a terminal's colors, which a model learns too; with NO_COLOR=1 most"
    " programs write none"
)
ODD = {  # with the encoding of the original, where another one may help
    rb"\xc2[\x80-\x9f]": (f"{CONTROLS}; upload the original", "cp1252"),
    rb"\xef\xbf\xbd": ("U+FFFD, the sign for lost characters; upload the original", "NAME"),
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
        "table": records.table,
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
