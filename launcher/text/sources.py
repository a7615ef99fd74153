"""Texts that are not in files of this machine: standard input, data sets of the Hub, and S3."""

from __future__ import annotations

import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from launcher.errors import InputError, ServiceError, not_installed
from launcher.files import storage
from launcher.files.storage import Progress
from launcher.settings import Settings

logger = logging.getLogger(__name__)

LOGIN = "run `hf auth login`, or set HF_TOKEN"
HUB = re.compile(r"hf://datasets/(?P<id>[\w.-]+/(?P<name>[\w.-]+))(@[^/]+)?(/.*)?")


Wanted = Callable[[Path, Path], bool]  # whether a file below a folder will be read


@contextmanager
def local_paths(
    paths: Sequence[str | Path],
    settings: Settings,
    progress: Progress = lambda n: None,
    wanted: Wanted = lambda path, root: True,
) -> Iterator[list[Path]]:
    """The paths; what is not on this machine is copied into a temporary directory first.

    `-` is standard input. `hf://datasets/OWNER/NAME[@REVISION][/PATH]` and `s3://bucket/key` name a
    file, a folder with all that is below it, or by `*` several files. Of a folder, files that are
    not wanted are empty. Errors and warnings give the names as here.

    Raises:
        InputError: nothing is there, or it is another kind of URL.
        ServiceError: the Hub or S3 refuses, or cannot be reached, or the disk is full.
    """
    for path in paths:
        check_path(path)
    if not any(map(is_elsewhere, paths)):
        yield [storage.path_of(path) for path in paths]
        return
    copies = dict[Path, str | Path]()

    def renamed(text: str) -> str:
        for copy, source in copies.items():
            text = text.replace(str(copy), str(source))
        return text

    def rename(record: logging.LogRecord) -> bool:
        record.msg = renamed(str(record.msg))
        return True

    readers = [logging.getLogger(f"launcher.text.{name}") for name in ("files", "formats")]
    cache, found = settings.cache_dir, list[Path]()
    with storage.reported(str(cache)):
        cache.mkdir(parents=True, exist_ok=True)
        directory = tempfile.mkdtemp(prefix="sources-", dir=cache)
    try:
        for reader in readers:
            reader.addFilter(rename)
        for number, path in enumerate(paths):
            if not is_elsewhere(path):
                found.append(storage.path_of(path))
                continue
            found.append(copy(str(path), Path(directory, str(number)), settings, progress, wanted))
            copies[found[-1]] = path
        yield found
    except InputError as error:
        raise InputError(renamed(str(error))) from None
    finally:
        for reader in readers:
            reader.removeFilter(rename)
        shutil.rmtree(directory)


def named_by(source: str | Path) -> Path:
    """A path with the name of a source, such as that of a data set of the Hub."""
    found = HUB.fullmatch(str(source))
    return Path("stdin" if source == "-" else found["name"] if found else source)


def is_elsewhere(source: str | Path) -> bool:
    return source == "-" or "://" in str(source)


def check_path(source: str | Path) -> None:
    """Raise InputError for what is no source."""
    word = str(source)
    kind, is_url, _ = word.partition("://")
    if kind in ("http", "https"):
        raise InputError(f"{word}: download it, `curl -L {word} | sm-nanogpt upload-data -`")
    if is_url and kind not in ("hf", "s3"):
        raise InputError(f"{word}: use a path, -, hf://datasets/OWNER/NAME, or s3://bucket/prefix")
    with suppress(OSError):  # the one who reads it names it
        if not is_elsewhere(source) and not storage.path_of(source).exists():
            raise InputError(
                f"{word}: no such file or directory; without a PATH, `sm-nanogpt upload-data` takes"
                " tiny Shakespeare"
            )


def copy(
    source: str, directory: Path, settings: Settings, progress: Progress, wanted: Wanted
) -> Path:
    """Copy a source into a new directory; returns the file or folder."""
    if source == "-":
        return saved_input(directory)
    if source.startswith("s3://"):
        with storage.reported(source):
            fs, path = storage.file_system(source, settings)
            how = storage.by_parts(progress)
            return copied(source, fs, path, directory, how, progress, wanted)
    fs, path = hub(source)
    how = storage.told(progress) | {"block_size": 0}  # by one request for a file
    with storage.reported(source), hub_errors(source):
        return copied(source, fs, path, directory, how, progress, wanted)


def saved_input(directory: Path) -> Path:
    """Write standard input to a file."""
    if sys.stdin.isatty():
        logger.info("reading text from the terminal; Ctrl-D on a new line ends it")
    directory.mkdir()
    with storage.reported("standard input"), (directory / "stdin").open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return directory / "stdin"


def copied(
    source: str,
    fs: Any,
    path: str,
    directory: Path,
    how: dict[str, Any],
    progress: Progress,
    wanted: Wanted,
) -> Path:
    """Copy one file, or all below a folder, or all that fit a pattern; returns the file or folder.

    how are arguments of fsspec's get_file.
    """
    from tqdm import tqdm

    try:
        found = fs.find(path, detail=True) or fs.glob(path, detail=True)
    except ValueError as error:  # such as a pattern with **.txt
        raise InputError(f"{source}: {error}") from None
    sizes = {
        key: info["size"]
        for key, info in found.items()
        if info["type"] == "file" and not key.endswith("/")  # a folder made by the S3 console
    }
    if fs.protocol == "hf" and sizes.pop(f"{path}/README.md", None) is not None:
        logger.info(f"{source}: README.md left out; it describes the data set")
    if not sizes:
        raise InputError(f"{source}: nothing is there")
    root = path if set(sizes) == {path} else re.split(r"[^/]*[*?[]", path)[0].rstrip("/")
    top = directory / Path(root).name.partition("@")[0]
    targets = {key: top / key.removeprefix(root).lstrip("/") for key in sizes}
    chosen = {key for key, target in targets.items() if target == top or wanted(target, top)}
    size = sum(sizes[key] for key in chosen)
    amount = f"{tqdm.format_sizeof(size)}B in {len(chosen):,} file{'s' * (len(chosen) > 1)}"
    if size > shutil.disk_usage(directory.parent).free:
        raise ServiceError(f"{source}: {amount} do not fit on the disk of {directory.parent}")
    logger.info(f"{source}: copying {amount}")
    storage.expect(progress, size)
    for key, target in targets.items():
        if not target.resolve().is_relative_to(top.resolve()):
            raise ServiceError(f"{source}: {key!r} would be written outside of {top}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        if key in chosen:
            fs.get_file(key, str(target), **how)
            if target.stat().st_size != sizes[key]:
                raise ServiceError(f"{source}: the copy of {key} is damaged; try again")
    return top


def hub(source: str) -> tuple[Any, str]:
    """The fsspec file system of the Hub and the path in it."""
    try:
        from huggingface_hub import HfFileSystem
    except ImportError as error:
        raise not_installed(error.name or "huggingface_hub", "data") from None
    if not HUB.fullmatch(source):
        raise InputError(f"{source}: write it as hf://datasets/OWNER/NAME/PATH")
    return HfFileSystem(skip_instance_cache=True), source.removeprefix("hf://").rstrip("/")


@contextmanager
def hub_errors(source: str) -> Iterator[None]:
    """Turn exceptions of the Hub's client into one line about the source."""
    from huggingface_hub import errors

    page = HUB.sub(r"https://huggingface.co/datasets/\g<id>", source)
    try:
        yield
    except (FileNotFoundError, ConnectionError, errors.HTTPError) as error:
        cause = error if isinstance(error, errors.HfHubHTTPError) else error.__cause__
        if isinstance(cause, errors.GatedRepoError):
            raise ServiceError(f"{source}: ask for access on {page}, then {LOGIN}") from None
        if isinstance(cause, (errors.RepositoryNotFoundError, errors.HFValidationError)):
            what = f"the Hub has no such data set, or it is private: {LOGIN}"
            raise InputError(f"{source}: {what}") from None
        if isinstance(cause, errors.RevisionNotFoundError):
            raise InputError(f"{source}: there is no such revision; {page} lists them") from None
        if isinstance(cause, errors.HfHubHTTPError) and cause.response.status_code == 401:
            raise ServiceError(f"{source}: the Hub rejects the token; {LOGIN}") from None
        why = " ".join(str(error).split())
        raise ServiceError(f"{source}: {why}; check the network") from None
