"""Locations of files: s3://bucket/prefix, paths of this machine, and their file URIs."""

from __future__ import annotations

import os
import pwd
import re
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from urllib.parse import quote, unquote

from sm_nanogpt.entry_point.errors import os_reason
from sm_nanogpt.launcher.errors import InputError, ServiceError, did_you_mean

MAX_NAME_CHARACTERS = 255  # on every system
MAX_PATH_CHARACTERS = 4095
MAX_NAMES_COMPARED = 2000  # with one that is mistyped, in a tenth of a second


def is_on_s3(location: str) -> bool:
    """True for `s3://bucket/prefix`; False for a path or a URI of this machine."""
    return location.startswith("s3://")


def file_at(location: str) -> Path | None:
    """The file of this machine that is at a location, or above it; None if there is no file."""
    if is_on_s3(location):
        return None
    path = expand_user(location)
    if location.startswith("file://"):
        path = Path(unquote(location.removeprefix("file://")))
    for ancestor in (path, *path.parents):
        if os.path.isfile(ancestor):  # noqa: PTH113  (also takes a text that is too long for a path)
            return ancestor
    return None


def location_problem(location: str) -> str:
    """What is wrong with a location, as the rest of a sentence on it; '' if nothing is."""
    scheme, _, path = location.partition(":")
    if scheme == "s3":
        # Buckets from before 2018 may have capitals and underscores.
        if not re.match(r"//[A-Za-z0-9][A-Za-z0-9._-]{2,254}(/|$)", path):
            return "names no bucket, which has three characters or more; use s3://bucket/prefix"
        if "//" in path[2:]:  # a valid key, but SageMaker cannot read it
            return "has an empty part, //, which SageMaker cannot read"
        return ""
    if location.startswith("file:///"):
        return ""
    if path.startswith("//") or scheme in ("arn", "file"):
        problem = "is no location of files; use s3://bucket/prefix or a local path"
        if scheme in ("http", "https"):
            problem += " (download it first)"
        return problem
    return ""


def to_uri(location: str | Path) -> str:
    path = local_path(str(location))
    if path is None:
        return str(location)
    return path.as_uri()


def expand_user(path: str | Path) -> Path:
    """Replace a leading `~` by the user's home directory.

    Raises InputError if HOME is unset or empty, and /etc/passwd has no line for the user, as in a
    container that runs as any number.
    """
    path = str(path)
    if not path.startswith("~/") or os.environ.get("HOME"):
        return Path(os.path.expanduser(path))  # noqa: PTH111  (Path's refuses ~notes.txt)
    home = home_in_passwd()
    if not home:
        problem = "there is no home directory; set SM_NANOGPT_HOME to a directory, or HOME"
        raise InputError(f"{path}: {problem}")
    return Path(home) / path.removeprefix("~/")


def home_in_passwd() -> str:
    """The home directory that /etc/passwd has for the user, or ''."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


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


def similar_files(path: Path, typed: str) -> str:
    """Return `did you mean A or B?` with files beside a path, at which nothing is; or ''.

    Their names are like that of the path, and they have the directory that the user typed.
    """
    names: list[str] = []
    with suppress(OSError), os.scandir(path.parent) as entries:
        names = sorted(entry.name for entry in islice(entries, MAX_NAMES_COMPARED))
    # A suffix in common makes no names alike.
    stems = [name.removesuffix(path.suffix) for name in names if name.endswith(path.suffix)]
    similar_names = [stem + path.suffix for stem in get_close_matches(path.stem, stems)]
    if not similar_names:
        other_names = [name for name in names if not name.endswith(path.suffix)]
        similar_names = get_close_matches(path.name, other_names)

    directory = typed.rstrip("/").removesuffix(path.name)
    return did_you_mean(typed, [directory + name for name in similar_names], cutoff=0)


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


def last_part(location: str) -> str:
    """The name of the file or directory at a location; that of an upload, for its URI."""
    return location.rstrip("/").rpartition("/")[2]


def path_below(directory: Path, name: str, uri: str) -> Path:
    """Return the path for a file of a location that other people can write to; make its directory.

    Raises ServiceError if the name leads out of the directory.
    """
    path = directory / name
    if not path.resolve().is_relative_to(directory.resolve()):
        raise ServiceError(f"{uri}: {name!r} would be written outside of {directory}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
