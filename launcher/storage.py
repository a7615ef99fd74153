"""Bytes in and out of a store: `s3://bucket/prefix` or a local directory, through one code path.

The settings say as whom and where S3 is asked; None stands for those in force.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, unquote

import fsspec
from pydantic_core import to_jsonable_python

from launcher.aws.session import failure, max_attempts
from launcher.documents import LARGEST, check_size, open_file, parse, read_file
from launcher.errors import InputError, ServiceError
from launcher.settings import Settings, check_location, load_settings

T = TypeVar("T")

CHUNK_BYTES = 1 << 22
PART_BYTES = 1 << 24
PARALLEL_PARTS = 8
TEMPORARY = ".tmp"  # ends the names of files that are being written

Progress = Callable[[int], object]  # told the number of bytes that were moved since the last call


def to_uri(location: str | Path) -> str:
    """A URI for a path; one on S3 stays as it is. Raises InputError as local_path."""
    path = local_path(str(location))
    return str(location) if path is None else path.as_uri()


def path_of(word: str | Path) -> Path:
    """The path that somebody names; `~` is the home directory.

    Raises:
        InputError: the word is empty, which would mean the current directory, `~NAME` is nobody,
            it is too long for a path, as a text is, or it holds a zero.
    """
    if word == "":
        raise InputError("an empty word names no place: give a path, or s3://bucket/prefix")
    try:
        path = Path(word).expanduser()
    except RuntimeError:
        raise InputError(
            f"{word}: there is no such user's home directory; a file of that name is ./{word}"
        ) from None
    try:
        path.lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            start = " ".join(str(word)[:60].split())
            raise InputError(
                f"{start}...: too long for a path; a text is read from a file"
            ) from None
    except ValueError as error:
        raise InputError(f"{word!r}: {error}") from None
    return path


def local_path(location: str) -> Path | None:
    """The path behind a local location, or None for one on S3.

    Raises:
        InputError: it is neither, or as path_of.
    """
    try:
        check_location(location)
    except ValueError as error:
        raise InputError(f"{location}: {error}") from None
    if location.startswith("file://"):
        return Path(unquote(location.removeprefix("file://")))
    if location.startswith("s3://"):
        return None
    return path_of(location).absolute()


def join(location: str, *parts: str) -> str:
    """The location of what lies below. A file URI, unlike a path or a key, is percent-encoded."""
    names = [quote(part) for part in parts] if location.startswith("file://") else parts
    return "/".join([location.rstrip("/"), *names])


@contextmanager
def reported(uri: str) -> Iterator[None]:
    """Turns what a file system raises into one line about `uri`."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"{uri}: {error}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # S3 is never full
            raise ServiceError(
                f"{uri}: this machine's disk is full ({error.strerror}); make room and try again"
            ) from None
        if error.strerror and not error.__cause__:
            raise ServiceError(f"{uri}: {error.strerror}") from None
        if isinstance(error, FileNotFoundError) and not error.__cause__:  # of a bucket it has
            raise ServiceError(f"{uri}: nothing is there") from None
        raise failure(uri, error) from None
    except Exception as error:
        # botocore's errors share no base with anything in fsspec, and importing botocore to name
        # it would cost every local command a quarter of a second.
        if type(error).__module__.partition(".")[0] not in ("botocore", "aiobotocore", "aiohttp"):
            raise
        raise failure(uri, error) from None


def file_system(uri: str, settings: Settings | None = None) -> tuple[Any, str]:
    """The fsspec file system of a URI and the path in it.

    fsspec would take `::` in a URI for a chain of several; here it belongs to the name.

    Raises:
        InputError: as local_path, or a setting of AWS cannot be used.
    """
    path = local_path(uri)
    if path is not None:
        return fsspec.filesystem("file"), str(path)
    options = s3_options(settings or load_settings())
    max_attempts()  # which the file system reads as well
    kind = fsspec.get_filesystem_class("s3")
    return kind(use_listings_cache=False, **options), kind._strip_protocol(uri)


def s3_options(settings: Settings) -> dict[str, Any]:
    """What s3fs is given, so that it acts as boto3 does: the same person in the same place.

    fsspec's own configuration of these is not taken, as boto3 knows nothing of it; None leaves it
    to AWS's.
    """
    encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": settings.kms_key}
    return {
        **dict.fromkeys(("key", "secret", "token", "username", "password", "endpoint_url")),
        "anon": False,
        "profile": settings.profile or None,
        "client_kwargs": {"region_name": settings.aws_region} if settings.aws_region else {},
        "config_kwargs": {},
        "s3_additional_kwargs": encryption if settings.kms_key else {},
    }


@contextmanager
def replacing(path: Path, make_directory: bool = False) -> Iterator[BinaryIO]:
    """Open a local file to write atomically.

    The content is on the disk before the file gets its name: a power loss leaves no empty file.
    """
    # In the same directory, since a rename across file systems would copy; with a random name,
    # since threads share a process id, and containers may.
    if make_directory:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_file(
    source: Path,
    uri: str,
    progress: Progress = lambda n: None,
    settings: Settings | None = None,
) -> None:
    """Copies a local file into the store, whole or not at all.

    To S3 it goes in parallel parts, each checked on arrival by the checksum that botocore sends
    along; the SHA-256 of the whole lies in the object's metadata, and the object is asked for
    afterwards.

    Raises:
        ServiceError: the store refuses, or what arrived is not what was sent.
    """
    if (place := local_path(uri)) is not None:
        with (
            reported(uri),
            open_file(source) as file,
            replacing(place, make_directory=True) as target,
        ):
            while chunk := file.read(CHUNK_BYTES):
                target.write(chunk)
                progress(len(chunk))
        return
    fs, path = file_system(uri, settings)
    sha256 = file_sha256(source)
    with reported(uri):
        fs.put_file(
            str(source),
            path,
            callback=Told(progress),
            chunksize=PART_BYTES,
            max_concurrency=PARALLEL_PARTS,
            Metadata={"sha256": sha256},
        )
        arrived = fs.info(path, refresh=True)
        there = (arrived["size"], fs.metadata(path, refresh=True).get("sha256"))
    if there != (source.stat().st_size, sha256):
        raise ServiceError(f"{uri}: what arrived is not what was sent; upload it again")


class Told(fsspec.Callback):
    """fsspec's way to tell of progress, as ours."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress

    def relative_update(self, inc: int = 1) -> None:
        self.progress(inc)


def file_sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(uri: str, value: Any, settings: Settings | None = None) -> None:
    write_bytes(uri, json_bytes(value), settings)


def json_bytes(value: Any) -> bytes:
    return (json.dumps(to_jsonable_python(value), indent=2) + "\n").encode()


def write_text(uri: str, text: str, settings: Settings | None = None) -> None:
    write_bytes(uri, text.encode(), settings)


def write_bytes(uri: str, content: bytes, settings: Settings | None = None) -> None:
    """Writes a small document, whole or not at all."""
    with reported(uri):
        if (place := local_path(uri)) is not None:
            with replacing(place, make_directory=True) as file:
                file.write(content)
        else:
            fs, path = file_system(uri, settings)
            fs.pipe_file(path, content)  # one request; it makes no bucket, so no misspelt one


def copy(source: str, target: str, settings: Settings | None = None) -> int:
    """Copies all files below one prefix of S3 to another, without bringing them here.

    Returns how many there were.
    """
    fs, path = file_system(source, settings)
    _, to = file_system(target, settings)
    names = list_files(source, settings)
    with reported(source):
        for name in names:
            fs.copy(f"{path}/{name}", f"{to}/{name}")
    return len(names)


def fingerprint(uri: str, settings: Settings | None = None) -> str:
    """Twelve characters that change when the content of a file does: of its SHA-256 or its ETag."""
    path = local_path(uri)
    with reported(uri):
        if path is not None:
            return file_sha256(path)[:12]
        fs, key = file_system(uri, settings)
        return hashlib.sha256(str(fs.info(key, refresh=True)["ETag"]).encode()).hexdigest()[:12]


def read_document(uri: str, kind: type[T], settings: Settings | None = None) -> T | None:
    """A JSON document as its kind (see launcher.documents), or None where there is none.

    Raises:
        Damaged: it is not of this kind.
        ServiceError: it cannot be read.
    """
    content = read_bytes(uri, settings)
    return None if content is None else parse(content, kind, uri)


def read_bytes(uri: str, settings: Settings | None = None) -> bytes | None:
    """A file of at most LARGEST bytes, or None where there is none."""
    with reported(uri):
        try:
            if (place := local_path(uri)) is not None:
                return read_file(place)
            fs, path = file_system(uri, settings)
            return check_size(bytes(fs.cat_file(path, start=0, end=LARGEST + 1)))
        except (FileNotFoundError, NotADirectoryError):
            return None


def read_cache(file: Path, kind: type[T]) -> T:
    """A dict that was kept for the next time; an empty one where it is missing or damaged."""
    try:
        return read_document(str(file), kind) or kind()
    except ServiceError:
        return kind()


def write_cache(file: Path, known: Mapping[str, Any]) -> None:
    """Keeps a dict for the next time, where that can be."""
    with suppress(ServiceError):
        write_json(str(file), known)


def list_files(uri: str, settings: Settings | None = None) -> dict[str, int]:
    """The files at or below a URI, by path relative to it, with their sizes in bytes.

    A "folder" that S3's console made is an empty object whose name ends in a slash, and no file.
    """
    fs, path = file_system(uri, settings)
    with reported(uri):
        try:
            found = fs.find(path, detail=True)
        except FileNotFoundError:
            return {}
    if set(found) == {path}:
        return {path.rsplit("/", 1)[-1]: found[path]["size"]}
    return {
        name[len(path) :].lstrip("/"): info["size"]
        for name, info in sorted(found.items())
        if not name.endswith(("/", TEMPORARY))
    }


def fetch(
    uri: str,
    directory: Path,
    progress: Progress = lambda n: None,
    settings: Settings | None = None,
) -> list[Path]:
    """Copies the file, or all files below a prefix, into a local directory; returns their paths.

    Raises:
        ServiceError: nothing is there, or the store refuses.
    """
    fs, path = file_system(uri, settings)
    files = list_files(uri, settings)
    if not files:
        raise ServiceError(f"{uri}: nothing is there")
    copied = []
    with reported(uri):
        single = fs.isfile(path)
        for name in files:
            target = directory / name
            if not target.resolve().is_relative_to(directory.resolve()):
                raise ServiceError(f"{uri}: refuses to write {name!r} outside of {directory}")
            target.parent.mkdir(parents=True, exist_ok=True)
            source = path if single else f"{path}/{name}"
            if local_path(uri) is None:
                fs.get_file(
                    source,
                    str(target),
                    callback=Told(progress),
                    chunksize=PART_BYTES,
                    max_concurrency=PARALLEL_PARTS,
                )
                check_arrival(fs, source, target)
            else:
                with open_file(Path(source)) as file, target.open("wb") as out:
                    while chunk := file.read(CHUNK_BYTES):
                        out.write(chunk)
                        progress(len(chunk))
            copied.append(target)
    return copied


def check_arrival(fs: Any, source: str, target: Path) -> None:
    """Raises ServiceError unless a fetched file has the size, and SHA-256 if any, of its source."""
    size, sha256 = fs.info(source)["size"], fs.metadata(source).get("sha256")
    if target.stat().st_size != size or (sha256 and file_sha256(target) != sha256):
        raise ServiceError(f"s3://{source}: what arrived is not what is there; fetch it again")
