"""From files to documents: formats, compressions, and pieces of text."""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

from launcher.errors import InputError
from launcher.files.documents import read_text
from launcher.text.records import PIECE, document_of, json_lines

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SUFFIXES = (".txt", ".jsonl")
COMPRESSIONS = ("", ".gz", ".zst")


def is_text(path: Path) -> bool:
    """Whether a file in a directory holds documents: *.txt or *.jsonl, perhaps compressed."""
    return path.name.lower().endswith(tuple(s + c for s in SUFFIXES for c in COMPRESSIONS))


def is_json_lines(path: Path) -> bool:
    return path.name.lower().removesuffix(".gz").removesuffix(".zst").endswith(".jsonl")


@dataclass
class Source:
    """What reading the documents once found: the counts, and a SHA-256 of names and contents."""

    documents: int = 0
    chats: int = 0  # of the documents, those that are conversations
    characters: int = 0
    size: int = 0
    sha256: str = ""


def documents(files: Sequence[tuple[str, Path]], found: Source) -> Iterator[Iterator[str]]:
    """Each document, as pieces of at most PIECE characters. Fills in `found` on the way.

    A file is a document, or of *.jsonl each line, in its field `text`; empty ones are left out. The
    pieces of a conversation, in the field `messages`, are its turns.

    Raises:
        InputError: a file cannot be read, or is not UTF-8, or a line is no such JSON, or only some
            are conversations.
    """
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(f"{name}\0".encode())
        found_in = lines_of(path) if is_json_lines(path) else [(str(path), False, pieces_of(path))]
        for place, chats, document in found_in:
            if (first := next(document, None)) is None:
                continue
            found.documents += 1
            found.chats += chats
            if found.chats not in (0, found.documents):
                raise InputError(f"{place}: some documents are conversations, and others are text")
            yield counted(chain([first], document), digest, found, chats)
            digest.update(b"\0")
    found.sha256 = digest.hexdigest()


def counted(pieces: Iterator[str], digest: Any, found: Source, chats: bool) -> Iterator[str]:
    for piece in pieces:
        content = piece.encode()
        if chats:  # where a turn ends counts too
            digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
        found.characters += len(piece)
        found.size += len(content)
        yield piece


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's content, uncompressed. Raises InputError where that or the body fails."""
    way: Any = {".gz": gzip.open, ".zst": zstd.open}.get(path.suffix.lower(), open)
    try:
        with way(path, "rb") as file:
            yield io.BufferedReader(file)
    except OSError as error:
        damaged = isinstance(error, gzip.BadGzipFile)
        raise InputError(f"{path}: {error if damaged else error.strerror or error}") from None
    except (EOFError, zlib.error, zstd.ZstdError) as error:
        raise InputError(f"{path}: damaged: {error}") from None


def pieces_of(path: Path) -> Iterator[str]:
    """Yield a text in pieces, which end at a line break if their second half has one."""
    text = ""
    with opened(path) as file:
        for _, part in read_text(file, path, PIECE):
            text += part
            while len(text) > PIECE:
                end = text.rfind("\n", PIECE // 2, PIECE) + 1 or PIECE
                yield text[:end]
                text = text[end:]
    if text:
        yield text


def lines_of(path: Path) -> Iterator[tuple[str, bool, Iterator[str]]]:
    """The name of each line, whether it is a conversation, and its turns or pieces of its text."""
    with opened(path) as file:
        for place, found in json_lines(file, str(path)):
            yield (place, *document_of(found, place))
