"""Read and write a store: `s3://bucket/prefix` or a local directory.

Settings have the AWS profile and region. None stands for those of `load_settings()`.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import to_jsonable_python

from sm_nanogpt.entry_point.errors import os_reason
from sm_nanogpt.launcher.aws import service_error
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.files.documents import MAX_BYTES, parse
from sm_nanogpt.launcher.files.local import TEMPORARY_SUFFIX, LocalLocation, replacing
from sm_nanogpt.launcher.files.progress import Progress, expect, no_progress
from sm_nanogpt.launcher.files.s3 import S3Location
from sm_nanogpt.launcher.locations import join, local_path, path_below, path_of, to_uri
from sm_nanogpt.launcher.settings import Settings, load_settings

__all__ = ["join", "path_of", "replacing", "to_uri"]  # from here for other rooms

T = TypeVar("T")

# The ends of the names of files that do not belong to the content of a store.
UNFINISHED_SUFFIXES = (
    TEMPORARY_SUFFIX,
    ".sagemaker-ignore",  # in /opt/ml/checkpoints: written by a job now, and not to be uploaded
    ".sagemaker-uploading",  # made by SageMaker while it uploads, and so is the next one
    ".sagemaker-uploaded",
)
AWS_PACKAGES = ("botocore", "aiobotocore", "aiohttp")


def locate(uri: str, settings: Settings | None = None) -> LocalLocation | S3Location:
    """Return the object that reads and writes at a location, which is a path or a URI."""
    path = local_path(uri)
    if path is None:
        return S3Location(uri, settings or load_settings())
    return LocalLocation(path, settings.home if settings else None)


@contextmanager
def errors_about(uri: str) -> Iterator[None]:
    """Turn exceptions of a file system into a ServiceError of one line about `uri`."""
    try:
        yield
    except Exception as error:
        # Compare names: importing botocore would take every local command a quarter of a second.
        package = type(error).__module__.partition(".")[0]
        problem = ""
        # s3fs raises an OSError from the error of AWS, its cause.
        if isinstance(error, OSError) and error.__cause__ is None:
            problem = os_problem(error)
        if problem:
            raise ServiceError(f"{uri}: {problem}") from None
        if isinstance(error, OSError) or package in AWS_PACKAGES:
            raise service_error(uri, error) from None
        raise


def os_problem(error: OSError) -> str:
    """The message for an error of this machine's file system, or ''."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"this machine's disk is full ({os_reason(error)}); free some space"
    if error.strerror:
        return os_reason(error)
    if isinstance(error, FileNotFoundError):
        return "nothing is there"
    return ""


# -- write -----------------------------------------------------------------------------------------


def write_json(uri: str, value: Any, settings: Settings | None = None) -> None:
    write_bytes(uri, json_bytes(value), settings)


def json_bytes(value: Any) -> bytes:
    return (json.dumps(to_jsonable_python(value), indent=2) + "\n").encode()


def write_bytes(uri: str, content: bytes, settings: Settings | None = None) -> None:
    """Write a small document atomically."""
    with errors_about(uri):
        locate(uri, settings).write_bytes(content)


def write_file(
    source: Path, uri: str, progress: Progress = no_progress, settings: Settings | None = None
) -> None:
    """Copy a local file into a store atomically."""
    with errors_about(uri):
        locate(uri, settings).write_file(source, progress)


def remove(uri: str, settings: Settings | None = None) -> None:
    """Delete a file, or a directory or prefix with all below it, if it exists."""
    with errors_about(uri):
        locate(uri, settings).remove()


def copy(source: str, target: str, settings: Settings | None = None) -> int:
    """Copy all files from one S3 prefix to another, without a download; return their number."""
    fs, source_prefix = locate(source, settings).file_system
    _, target_prefix = locate(target, settings).file_system
    names = list_files(source, settings)
    with errors_about(source):
        for name in names:
            fs.copy(f"{source_prefix}/{name}", f"{target_prefix}/{name}")
    return len(names)


# -- read ------------------------------------------------------------------------------------------


def fingerprint(uri: str, settings: Settings | None = None) -> str:
    """Twelve characters that identify a file's content, from its SHA-256 or its ETag."""
    with errors_about(uri):
        return locate(uri, settings).fingerprint()[:12]


def read_document(uri: str, kind: type[T], settings: Settings | None = None) -> T | None:
    """Read a JSON document; None if there is none. Raises Damaged if it does not fit `kind`."""
    content = read_bytes(uri, settings)
    if content is None:
        return None
    return parse(content, kind, uri)


def read_bytes(
    uri: str, settings: Settings | None = None, max_bytes: int = MAX_BYTES
) -> bytes | None:
    """Read a file of at most `max_bytes`; None if there is none."""
    with errors_about(uri):
        try:
            return locate(uri, settings).read_bytes(max_bytes)
        except (FileNotFoundError, NotADirectoryError):
            return None


@dataclass(frozen=True)
class Entry:
    """A file in a store."""

    size: int  # bytes
    written: float  # seconds since the epoch

    @classmethod
    def of(cls, info: dict[str, Any]) -> Entry:
        """The entry of a file, by its information in fsspec."""
        written = info.get("mtime") or info["LastModified"].timestamp()
        return cls(info["size"], written)


def list_files(uri: str, settings: Settings | None = None) -> dict[str, int]:
    """Return the size in bytes of each file at or below a URI, by its relative path."""
    return {name: entry.size for name, entry in list_entries(uri, settings).items()}


def list_entries(uri: str, settings: Settings | None = None) -> dict[str, Entry]:
    """Return the files at or below a URI, by their relative paths; a single file by its name.

    For a folder, the S3 console makes an empty object whose name ends in a slash. It is skipped.
    """
    fs, path = locate(uri, settings).file_system
    with errors_about(uri):
        try:
            infos = fs.find(path, detail=True)
        except FileNotFoundError:
            return {}
    if set(infos) == {path}:
        return {path.rsplit("/", 1)[-1]: Entry.of(infos[path])}
    return {
        name.removeprefix(path).lstrip("/"): Entry.of(info)
        for name, info in sorted(infos.items())
        if not name.endswith(("/", *UNFINISHED_SUFFIXES))
    }


def namesakes(uri: str, settings: Settings | None = None) -> list[str]:
    """Return the URIs of the other S3 objects whose keys begin with the key of this one."""
    fs, key = locate(uri, settings).file_system
    parent, _, name = key.rpartition("/")
    with errors_about(uri):
        keys = fs.find(parent, prefix=name)
    return [f"s3://{other}" for other in keys if other != key]


def fetch(
    uri: str,
    directory: Path,
    progress: Progress = no_progress,
    settings: Settings | None = None,
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> list[Path]:
    """Download a file, or the files below a prefix, into a directory; return their paths.

    is_wanted decides by the name of a file whether it is downloaded. Files of this machine are
    linked to, or copied if the file system has no links.
    """
    location = locate(uri, settings)
    sizes = {name: size for name, size in list_files(uri, settings).items() if is_wanted(name)}
    if not sizes:
        raise ServiceError(f"{uri}: nothing is there")
    expect(progress, sum(sizes.values()))
    with errors_about(uri):
        fs, root = location.file_system
        is_file = fs.isfile(root)
        targets = {name: path_below(directory, name, uri) for name in sizes}
        for name, target in targets.items():
            location.fetch_file("" if is_file else name, target, progress)
    return list(targets.values())
