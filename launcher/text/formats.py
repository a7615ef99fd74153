"""The formats of files: how each is recognized, and read or turned into a text."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING

from sm_nanogpt.launcher.text.archives import read_zip
from sm_nanogpt.launcher.text.plain import texts_of_mailbox, texts_of_page, texts_of_subtitles
from sm_nanogpt.launcher.text.records import (
    Records,
    read_json,
    read_json_lines,
    read_parquet,
    read_table,
)
from sm_nanogpt.launcher.text.unpacking import Compression, compression_of, without_compression
from sm_nanogpt.launcher.text.whatsapp import WHATSAPP_START, read_whatsapp

if TYPE_CHECKING:  # it imports this module
    from sm_nanogpt.launcher.text.reading import File

# Both take the content of a file, unpacked and in UTF-8.
Reader = Callable[[IO[bytes], "File"], Records]
Extractor = Callable[[IO[bytes]], Iterator[str]]


@dataclass(frozen=True)
class Format:
    """A kind of files: plain text, records that a reader yields, or a kind that is refused.

    A row in FORMATS is all that a format needs: the help of upload-data is made from it too.
    """

    name: str
    suffixes: str
    magic: bytes = b""  # a pattern that the first bytes of a file match
    help: str = ""  # what is read of a file, for the help of upload-data and docs/tokens.md
    reader: Reader | None = None  # yields the records of a file
    extractor: Extractor | None = None  # yields the plain text of a file, in parts
    is_binary: bool = False  # False: `include` takes such a file as plain text
    advice: str = ""  # how to make a text of a file that is refused

    @property
    def is_plain(self) -> bool:
        return self.reader is None and not self.is_refused

    @property
    def is_refused(self) -> bool:
        return bool(self.advice) and self.reader is None

    @property
    def patterns(self) -> str:
        """Such as `*.csv, *.tsv`."""
        return ", ".join(f"*{suffix}" for suffix in self.suffixes.split())


PLAIN = Format(
    "plain text",
    ".txt .md",
    help="plain text; each file is a document",
)
JSON_LINES = Format(
    "JSON lines",
    ".jsonl .ndjson",
    help="JSON, one object a line",
    reader=read_json_lines,
)
JSON = Format(
    "JSON",
    ".json",
    help="JSON, an array of objects, or one",
    reader=read_json,
)
TABLE = Format(
    "a table",
    ".csv .tsv",
    help="tables with a header",
    reader=read_table,
)
PARQUET = Format(
    "Parquet",
    ".parquet",
    is_binary=True,
    magic=b"PAR1",
    help="tables, as those of the Hub",
    reader=read_parquet,
)
HTML = Format(
    "an HTML page",
    ".html .htm .xhtml",
    magic=(rb"(?i)(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype\s+html|html)\b"),
    help="web pages, without their tags",
    extractor=texts_of_page,
)
SUBTITLES = Format(
    "subtitles",
    ".srt .vtt",
    help="subtitles, without their times",
    extractor=texts_of_subtitles,
)
MAILBOX = Format(
    "a mailbox",
    ".mbox",
    magic=rb"From \S+[^\n]* \d{4}\r?\n[\w-]+:",
    help="mail, without quotes and attachments",
    extractor=texts_of_mailbox,
)
WHATSAPP = Format(
    "a chat of WhatsApp",
    ".txt",
    magic=WHATSAPP_START,
    help="chats that WhatsApp exported, by their lines",
    reader=read_whatsapp,
)
ZIP = Format(
    "a zip archive",
    ".zip",
    is_binary=True,
    magic=rb"PK\x03\x04",
    help="chats that a program exported",
    reader=read_zip,
    advice="unpack it: `unzip {path}`",
)
XML = Format(
    "XML",
    ".xml .rss .atom .svg",
    magic=rb"(\xef\xbb\xbf)?\s*<\?xml\b",
    advice='`python -c "import sys, xml.etree.ElementTree as e;'
    " print(*e.parse(sys.argv[1]).getroot().itertext(), sep='')\" {path} > {text}`"
    " makes text of it",
)
NOTEBOOK = Format(
    "a notebook",
    ".ipynb",
    advice="`jupyter nbconvert --to markdown --stdout {path} > {text}` makes text of it,"
    " `--to script` code",
)
TAR = Format(
    "an archive",
    ".tar .tgz",
    is_binary=True,
    magic=rb".{257}ustar",
    advice="unpack it: `tar -xkf {path}`",
)
FORMATS = (
    PLAIN,
    JSON_LINES,
    JSON,
    TABLE,
    PARQUET,
    ZIP,
    HTML,  # before XML, with which a page may begin
    SUBTITLES,
    MAILBOX,
    WHATSAPP,
    XML,
    NOTEBOOK,
    Format(
        "an Arrow file",
        ".arrow",
        is_binary=True,
        advice='`python -c "import sys, datasets as d;'
        ' d.Dataset.from_file(sys.argv[1]).to_parquet(sys.argv[2])" {path} {parquet}`'
        " makes Parquet of it",
    ),
    Format(
        "a Feather file",
        ".feather",
        is_binary=True,
        magic=rb"ARROW1|FEA1",
        advice='`python -c "import sys, pandas as p;'
        ' p.read_feather(sys.argv[1]).to_parquet(sys.argv[2])" {path} {parquet}`'
        " makes Parquet of it",
    ),
    TAR,
    Format(
        "a PDF",
        ".pdf",
        is_binary=True,
        magic=b"%PDF-",
        advice="`pdftotext {path} {text}` makes text of it",
    ),
    Format(
        "a document",
        ".docx .odt .epub .fb2 .rtf",
        is_binary=True,
        magic=rb"\{\\rtf",
        advice="`pandoc -t plain -o {text} {path}` makes text of it",
    ),
    Format(
        "an Office file",
        ".doc .ppt .pptx .xls .xlsx .ods",
        is_binary=True,
        magic=rb"\xd0\xcf\x11\xe0",
        advice="save a text as .txt or .docx, and a table as .csv",
    ),
    Format(
        "a bzip2 file",
        ".bz2",
        is_binary=True,
        magic=rb"BZh",
        advice="unpack it: `bunzip2 -k {path}`",
    ),
    Format(
        "an xz file",
        ".xz",
        is_binary=True,
        magic=rb"\xfd7zXZ",
        advice="unpack it: `unxz -k {path}`",
    ),
    Format(
        "a pickle",
        ".pkl .pickle .pt .pth",
        is_binary=True,
        magic=rb"\x80[\x02-\x05]",
        advice="let the program that wrote it write its texts, as .txt or .jsonl",
    ),
    Format(
        "an image",
        ".png .jpg .jpeg .gif .tif .tiff",
        is_binary=True,
        magic=rb"\x89PNG|\xff\xd8\xff|GIF8|II\*\0",
        advice="`tesseract {path} stdout > {text}` reads the text in it",
    ),
)


def format_of_name(path: Path) -> Format | None:
    """The format that the suffix of a file promises, or None."""
    suffix = without_compression(path).suffix.lower()
    for format in FORMATS:
        if suffix in format.suffixes.split():
            return format
    return None


def format_of_content(beginning: bytes) -> Format | None:
    """The format whose files begin with such bytes, or None."""
    for format in FORMATS:
        if format.magic and re.match(format.magic, beginning, re.DOTALL):
            return format
    return None


def is_packed(beginning: bytes) -> bool:
    """True if a file with this beginning is compressed, or matches the magic of a format."""
    return compression_of(beginning) is not None or format_of_content(beginning) is not None


def advice_for(format: Format, shown: str, compression: Compression | None = None) -> str:
    """How to make a text of a file that is refused. A compressed file is to be unpacked first.

    shown: what messages call the file.
    """
    if compression is None or format is TAR:
        return fill_in(format.advice, shown)
    unpack = f"{fill_in(compression.advice, shown)} unpacks it"
    if not format.advice:
        return unpack
    suffix = PurePath(shown).suffix
    if suffix.lower() == compression.suffix:
        shown = shown.removesuffix(suffix)
    return f"{unpack}; then {fill_in(format.advice, shown)}"


def fill_in(advice: str, shown: str) -> str:
    """Put the names of a file, and of a text and a Parquet file to make of it, into advice.

    A file without a suffix, such as standard input, is called FILE, and what is made of it
    NEW-FILE.
    """
    path = PurePath(shown)
    new_path = path
    if not path.suffix:
        shown = "FILE"
        new_path = PurePath("NEW-FILE")
    return advice.format(
        path=shlex.quote(shown),
        text=shlex.quote(unused_file_name(new_path, ".txt")),
        parquet=shlex.quote(unused_file_name(new_path, ".parquet")),
    )


def unused_file_name(path: PurePath, suffix: str) -> str:
    """The name of a file to make of another, in the current directory, where it does not exist."""
    name = f"{path.stem}{suffix}"
    number = 1
    while name == path.name or os.path.lexists(name):
        number += 1
        name = f"{path.stem}-{number}{suffix}"
    return name
