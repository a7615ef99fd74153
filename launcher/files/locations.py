"""Locations of files: s3://bucket/prefix, paths of this machine, and their file URIs."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, unquote

from sm_nanogpt.entry_point.errors import os_reason
from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.settings import expand_user, location_problem
from sm_nanogpt.launcher.values import is_on_s3

MAX_NAME_CHARACTERS = 255  # on every system
MAX_PATH_CHARACTERS = 4095


def to_uri(location: str | Path) -> str:
    path = local_path(str(location))
    if path is None:
        return str(location)
    return path.as_uri()


def path_of(typed: str | Path) -> Path:
    """Return the path that a user typed, with the home directory in place of `~`.

    Raises InputError if it is empty, or so long that it must be a text, or below a directory that
    the user may not read.
    """
    text = str(typed)
    if not text:
        raise InputError("the path is empty: give a path or s3://bucket/prefix")
    longest_name = max(map(len, text.split("/")))
    if longest_name > MAX_NAME_CHARACTERS or len(text) > MAX_PATH_CHARACTERS:
        beginning = " ".join(text[:40].split())
        raise InputError(f"{beginning!r}... is a text, not a path: write it to a file")
    path = expand_user(typed)
    try:
        path.stat()
    except PermissionError as error:
        raise InputError(f"{typed}: {os_reason(error)}") from None
    except OSError:  # there is nothing yet, or a command reads it and says what is wrong
        pass
    return path


def local_path(location: str) -> Path | None:
    """Return the path of a local location, or None for S3. Raises InputError if it is neither."""
    problem = location_problem(location)
    if problem:
        raise InputError(f"{location}: {problem}")
    if location.startswith("file://"):
        return Path(unquote(location.removeprefix("file://")))
    if is_on_s3(location):
        return None
    return path_of(location).absolute()


def join(location: str, *parts: str) -> str:
    """Append parts to a location. The parts of a file URI are quoted; those of others are not."""
    if location.startswith("file://"):
        parts = tuple(quote(part) for part in parts)
    return "/".join([location.rstrip("/"), *parts])


def path_below(directory: Path, name: str, uri: str) -> Path:
    """Return the path for a file of a location that other people can write to; make its directory.

    Raises ServiceError if the name leads out of the directory.
    """
    path = directory / name
    if not path.resolve().is_relative_to(directory.resolve()):
        raise ServiceError(f"{uri}: {name!r} would be written outside of {directory}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
