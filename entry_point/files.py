"""Opening files that somebody else may have made, and writing files whole. Imports no torch."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from .errors import DataError, os_reason

T = TypeVar("T")

LARGEST_TEXT = 2 * 10**9  # bytes; each rank holds the characters of a text in memory
TOO_MUCH_TEXT = "over 2 GB of characters; make tokens of them: upload-data --tokenizer bpe"


def is_text_name(name: str) -> bool:
    """Returns True for the name of a file of characters, as train.py reads them."""
    return name.lower().endswith((".txt", ".md"))


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


LARGEST_JSON = 1 << 25  # bytes; a tokenizer of 150,000 ids has a third of that


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises DataError."""
    try:
        document = json.loads(read_file(path, LARGEST_JSON))
        problem = "" if isinstance(document, dict) else "holds no JSON object"
    except OSError as error:
        problem = os_reason(error)
    except (ValueError, RecursionError) as error:
        problem = f"is no JSON: {error}"
    if problem:
        raise DataError(f"{path}: {problem}")
    return document


JSON_TYPES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a whole number",
    bool: "true or false",
}


def member(document: Any, name: str, kind: type[T]) -> T:
    """The value of a name in a JSON object. Raises ValueError unless it is of a type of JSON."""
    if not isinstance(document, Mapping) or name not in document:
        raise ValueError(f"{name} is missing")
    value = document[name]
    if type(value) is not kind:
        raise ValueError(f"{name} is {json.dumps(value)[:40]}, and not {JSON_TYPES[kind]}")
    return value


def check_size(content: bytes, largest: int, name: object) -> bytes:
    """The content. Raises OSError if it has more than `largest` bytes."""
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"larger than {largest >> 20} MiB", str(name))
    return content


def flush_to_disk(descriptor: int) -> None:
    """As os.fsync, where the file system has it: network drives and FUSE may not."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise


@contextmanager
def replacing(path: Path, temporary: str = "unfinished.sagemaker-ignore") -> Iterator[BinaryIO]:
    """A file that gets the name `path` when the body succeeds; a power loss leaves no part of it.

    SageMaker uploads all new files in /opt/ml/checkpoints but those with this suffix. All files of
    a directory have one temporary name, so what a killed process leaves is overwritten.
    """
    unfinished = path.with_name(temporary)
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            flush_to_disk(file.fileno())
            unfinished.replace(path)  # before it is closed, which would end a lock
    finally:
        unfinished.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        flush_to_disk(directory)
    finally:
        os.close(directory)
