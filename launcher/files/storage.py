"""Read and write a store: `s3://bucket/prefix` or a local directory.

Settings choose the AWS profile and region; None means those of `load_settings()`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, unquote

import fsspec
from pydantic_core import to_jsonable_python

from entry_point import files
from entry_point.files import check_size, file_sha256, open_file, read_file
from launcher.aws import raise_offline, service_error
from launcher.errors import InputError, ServiceError
from launcher.files.documents import LARGEST, parse
from launcher.files.locks import lock
from launcher.settings import Settings, expand_user, load_settings, location_problem

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHUNK_BYTES = 1 << 22
PART_BYTES = 1 << 24
PARALLEL_PARTS = 8
LONGEST_NAME, LONGEST_PATH = 255, 4095  # characters, on every system
TEMPORARY = ".tmp"  # suffix of files that are being written
# In /opt/ml/checkpoints, files that are being written end in *-ignore, which SageMaker does not
# upload. It makes the others beside a file that it uploads.
NO_CONTENT = (TEMPORARY, ".sagemaker-ignore", ".sagemaker-uploading", ".sagemaker-uploaded")

Progress = Callable[[int], object]  # gets the number of bytes since the last call


def expect(progress: Progress, n: int) -> None:
    """Tell a progress hook that has a method `expect` that n more bytes will come."""
    getattr(progress, "expect", lambda n: None)(n)


def to_uri(location: str | Path) -> str:
    path = local_path(str(location))
    return str(location) if path is None else path.as_uri()


def path_of(word: str | Path) -> Path:
    """The path that a user typed; `~` is the home directory. Raises InputError if it is empty, or
    so long that it is a text."""
    if word == "":
        raise InputError("the path is empty: give a path or s3://bucket/prefix")
    longest_name = max(map(len, str(word).split("/")))
    if longest_name > LONGEST_NAME or len(str(word)) > LONGEST_PATH:
        shown = " ".join(str(word)[:40].split())
        raise InputError(f"{shown!r}... is a text, not a path: write it to a file")
    return expand_user(word)


def local_path(location: str) -> Path | None:
    """The path of a local location, or None for S3."""
    if problem := location_problem(location):
        raise InputError(f"{location}: {problem}")
    if location.startswith("file://"):
        return Path(unquote(location.removeprefix("file://")))
    if location.startswith("s3://"):
        return None
    return path_of(location).absolute()


def join(location: str, *parts: str) -> str:
    """Append parts to a location. File URIs, unlike paths and keys, are percent-encoded."""
    names = [quote(part) for part in parts] if location.startswith("file://") else parts
    return "/".join([location.rstrip("/"), *names])


@contextmanager
def reported(uri: str) -> Iterator[None]:
    """Turn exceptions of a file system into one line about `uri`."""
    try:
        yield
    except Exception as error:
        # Compare names: importing botocore would take every local command a quarter of a second.
        room = type(error).__module__.partition(".")[0]
        if not isinstance(error, OSError) and room not in ("botocore", "aiobotocore", "aiohttp"):
            raise
        why = ""
        if isinstance(error, OSError) and not error.__cause__:  # a bucket's has one
            why = error.strerror or "nothing is there" * isinstance(error, FileNotFoundError)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                why = f"this machine's disk is full ({why}); free some space"
        raise (ServiceError(f"{uri}: {why}") if why else service_error(uri, error)) from None


def file_system(uri: str, settings: Settings | None = None) -> tuple[Any, str]:
    """The fsspec file system of a URI and the path in it, where `::` chains no URLs.

    For S3 it uses the same credentials and region as boto3: the options override fsspec's own
    configuration, which boto3 does not read; None means AWS's default.
    """
    if (path := local_path(uri)) is not None:
        return fsspec.filesystem("file"), str(path)
    settings = settings or load_settings()
    if settings.offline:
        raise_offline()
    encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": settings.kms_key}
    kind = fsspec.get_filesystem_class("s3")
    system = kind(
        **dict.fromkeys(("key", "secret", "token", "username", "password", "endpoint_url")),
        anon=False,
        profile=settings.profile or None,
        client_kwargs={"region_name": settings.aws_region} if settings.aws_region else {},
        config_kwargs={},
        s3_additional_kwargs=encryption if settings.kms_key else {},
        use_listings_cache=False,
    )
    return system, kind._strip_protocol(uri)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a local file to write atomically. Its lock shows that it is in use."""
    # With a random name, since threads share a process id, and containers may.
    name = f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}"
    with files.replacing(path, name) as file:
        with suppress(InputError):  # without locks, nobody removes it
            lock(file)
        yield file


def write_file(
    source: Path, uri: str, progress: Progress = lambda n: None, settings: Settings | None = None
) -> None:
    """Upload a local file atomically.

    In a store on this machine it is as private and as old as before, and cannot be written again,
    since jobs link it. S3 receives parallel parts, each with a checksum; the object's metadata
    holds the SHA-256 of the file.
    """
    place = local_path(uri)
    if place is None:
        fs, path = file_system(uri, settings)
        sha256 = file_sha256(source)
        with reported(uri):
            fs.put_file(str(source), path, Metadata={"sha256": sha256}, **by_parts(progress))
        return
    with reported(uri):
        place.parent.mkdir(parents=True, exist_ok=True)
        with open_file(source) as file, replacing(place) as out:
            while chunk := file.read(CHUNK_BYTES):
                out.write(chunk)
                progress(len(chunk))
            out.flush()
            with suppress(OSError):  # of a file system without times
                shutil.copystat(source, out.name)
            with suppress(OSError):  # of one without modes
                os.fchmod(out.fileno(), os.fstat(file.fileno()).st_mode & 0o555)


def by_parts(progress: Progress) -> dict[str, Any]:
    """What makes s3fs move a file by parallel parts, and tell of them."""
    return dict(**told(progress), chunksize=PART_BYTES, max_concurrency=PARALLEL_PARTS)


def told(progress: Progress) -> dict[str, Any]:
    """What makes fsspec tell of the bytes that it moves."""
    callback = fsspec.Callback()
    callback.relative_update = progress
    return dict(callback=callback)


def write_json(uri: str, value: Any, settings: Settings | None = None) -> None:
    write_bytes(uri, json_bytes(value), settings)


def json_bytes(value: Any) -> bytes:
    return (json.dumps(to_jsonable_python(value), indent=2) + "\n").encode()


def write_bytes(uri: str, content: bytes, settings: Settings | None = None) -> None:
    """Write a small document atomically."""
    with reported(uri):
        if (place := local_path(uri)) is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place) as file:
                file.write(content)
        else:
            fs, path = file_system(uri, settings)
            fs.pipe_file(path, content)  # creates no bucket


def remove(uri: str, settings: Settings | None = None) -> None:
    """Delete a file, or a directory or prefix with all below it; nothing if it is missing."""
    with reported(uri):
        if (place := local_path(uri)) is not None:
            if place.is_file() or place.is_symlink():
                place.unlink()
            with suppress(FileNotFoundError):
                for path in place.iterdir():  # first, so that job.json still lists the job
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                shutil.rmtree(place)
            return
        fs, key = file_system(uri, settings)
        for name in fs.find(key):
            fs.rm_file(name)  # one by one: a policy judges each by its key


def copy(source: str, target: str, settings: Settings | None = None) -> int:
    """Copy all files from one S3 prefix to another, on S3. Returns their number."""
    fs, path = file_system(source, settings)
    _, to = file_system(target, settings)
    names = list_files(source, settings)
    with reported(source):
        for name in names:
            fs.copy(f"{path}/{name}", f"{to}/{name}")
    return len(names)


def fingerprint(uri: str, settings: Settings | None = None) -> str:
    """Twelve characters that identify a file's content, from its SHA-256 or its ETag."""
    with reported(uri):
        if (path := local_path(uri)) is not None:
            return file_sha256(path)[:12]
        fs, key = file_system(uri, settings)
        return hashlib.sha256(str(fs.info(key, refresh=True)["ETag"]).encode()).hexdigest()[:12]


def read_document(uri: str, kind: type[T], settings: Settings | None = None) -> T | None:
    """Read a JSON document; None if there is none. Raises Damaged if it does not fit `kind`."""
    content = read_bytes(uri, settings)
    return None if content is None else parse(content, kind, uri)


def read_bytes(uri: str, settings: Settings | None = None, largest: int = LARGEST) -> bytes | None:
    """Read a file of at most `largest` bytes; None if there is none."""
    with reported(uri):
        try:
            if (place := local_path(uri)) is not None:
                return read_file(place, largest)
            fs, path = file_system(uri, settings)
            return check_size(bytes(fs.cat_file(path, start=0, end=largest + 1)), largest, uri)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if "InvalidRange" not in str(error.__cause__):
                raise
            return b""  # an empty object has no range of bytes


def read_cache(file: Path, kind: type[T]) -> T:
    """Read a cached dict or list; empty if it is missing or damaged."""
    with suppress(ServiceError):
        return read_document(str(file), kind) or kind()
    return kind()


def write_cache(file: Path, known: object) -> None:
    """Cache a dict or list, if possible."""
    with suppress(ServiceError):
        write_json(str(file), known)


def list_files(uri: str, settings: Settings | None = None) -> dict[str, int]:
    """The files at or below a URI: relative path to size in bytes."""
    return {name: facts["size"] for name, facts in list_entries(uri, settings).items()}


def list_entries(uri: str, settings: Settings | None = None) -> dict[str, dict[str, Any]]:
    """As list_files, with all that fsspec tells of each file.

    A folder made by the S3 console is an empty object whose name ends in a slash; it is skipped.
    """
    fs, path = file_system(uri, settings)
    with reported(uri):
        try:
            found = fs.find(path, detail=True)
        except FileNotFoundError:
            return {}
    if set(found) == {path}:
        return {path.rsplit("/", 1)[-1]: found[path]}
    return {
        name[len(path) :].lstrip("/"): facts
        for name, facts in sorted(found.items())
        if not name.endswith(("/", *NO_CONTENT))
    }


def namesakes(uri: str, settings: Settings | None = None) -> list[str]:
    """The URIs of the other S3 objects whose keys begin with the key of this one."""
    fs, path = file_system(uri, settings)
    parent, _, name = path.rpartition("/")
    with reported(uri):
        return [f"s3://{each}" for each in fs.find(parent, prefix=name) if each != path]


def fetch(
    uri: str, directory: Path, progress: Progress = lambda n: None, settings: Settings | None = None
) -> list[Path]:
    """Download a file, or all files below a prefix, into a directory; return their paths.

    Those of this machine are linked to, or copied where the file system has no links.
    """
    fs, path = file_system(uri, settings)
    files = list_files(uri, settings)
    if not files:
        raise ServiceError(f"{uri}: nothing is there")
    expect(progress, sum(files.values()))
    with reported(uri):
        single = fs.isfile(path)
        targets = {name: place_below(directory, name, uri) for name in files}
        for name, target in targets.items():
            source = path if single else f"{path}/{name}"
            if local_path(uri) is None:
                fs.get_file(source, str(target), **by_parts(progress))
                size, sha256 = fs.info(source)["size"], fs.metadata(source).get("sha256")
                if target.stat().st_size != size or (sha256 and file_sha256(target) != sha256):
                    raise ServiceError(f"s3://{source}: the download is damaged; fetch it again")
            else:
                link_or_copy(Path(source), target, settings)
                progress(files[name])
    return list(targets.values())


def link_or_copy(source: Path, target: Path, settings: Settings | None = None) -> None:
    """Link to a file, or copy it, which is logged, where the file system has no links.

    Inside the home a link is relative, so that it holds when the home is moved.
    """
    directory = target.parent.resolve()
    link = source
    if settings is not None:
        home = settings.home.resolve()
        if directory.is_relative_to(home) and source.resolve().is_relative_to(home):
            link = Path(os.path.relpath(source.resolve(), directory))
    try:
        target.symlink_to(link)
    except FileExistsError:
        raise
    except OSError as error:
        why = f"its file system has no links ({error.strerror})"
        logger.info(f"{target}: a copy of {source}, as {why}")
        shutil.copyfile(source, target)


def place_below(directory: Path, name: str, uri: str) -> Path:
    """Where a file of a place that others write to goes; its directory is made."""
    target = directory / name
    if not target.resolve().is_relative_to(directory.resolve()):
        raise ServiceError(f"{uri}: {name!r} would be written outside of {directory}")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target
