"""Opening files that somebody else may have made. Imports no torch."""

from __future__ import annotations

import errno
import hashlib
import stat
from io import BufferedReader
from pathlib import Path

LARGEST_TEXT = 2 * 10**9  # bytes; each rank holds the characters of a text in memory
TOO_MUCH_TEXT = "over 2 GB of characters; make tokens of them: upload-data --tokenizer bpe"


def open_file(path: Path) -> BufferedReader:
    """Opens a regular file to read. Raises OSError if it is of another kind, or cannot be opened.

    A named pipe would block, and a device may never end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.open("rb")


def file_sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_file(path: Path, largest: int) -> bytes:
    """The content of a regular file. Raises OSError, also if it has more than `largest` bytes."""
    with open_file(path) as file:
        return check_size(file.read(largest + 1), largest, path)


def check_size(content: bytes, largest: int, name: object) -> bytes:
    """The content. Raises OSError if it has more than `largest` bytes."""
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"larger than {largest >> 20} MiB", str(name))
    return content
