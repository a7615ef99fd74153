"""Texts that are not in files of this machine: standard input, data sets of the Hub, and S3."""

from __future__ import annotations

import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from launcher.errors import InputError, ServiceError, not_installed
from launcher.files import storage
from launcher.files.storage import Progress
from launcher.settings import Settings

logger = logging.getLogger(__name__)
readers = logging.getLogger("launcher.text")  # of the modules that read the copies

HUB = re.compile(r"hf://datasets/(?P<id>[\w.-]+/(?P<name>[\w.-]+))(@[^/]+)?(/.*)?")
LOGIN = "run `hf auth login`, or set HF_TOKEN"
Wanted = Callable[[Path, Path], bool]  # whether a file below a folder may be read


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
    if list(paths).count("-") > 1:
        raise InputError("- can be given once: it is standard input")
    given = [(path, here(path)) for path in paths]
    copies = dict[str, str]()  # their paths, and what they are copies of

    def renamed(text: str) -> str:
        for copied, source in copies.items():
            text = text.replace(copied, source)
        return text

    def rename(record: logging.LogRecord) -> bool:
        record.msg = renamed(str(record.msg))
        return True

    with ExitStack() as stack:
        readers.addFilter(rename)
        stack.callback(readers.removeFilter, rename)
        found = list[Path]()
        for path, local in given:
            if local:
                found.append(local)
                continue
            settings.cache_dir.mkdir(parents=True, exist_ok=True)
            directory = tempfile.TemporaryDirectory(prefix="sources-", dir=settings.cache_dir)
            place = Path(stack.enter_context(directory))
            found.append(copy(str(path), place, settings, progress, wanted))
            copies[str(found[-1])] = str(path)
        try:
            yield found
        except InputError as error:
            error.problem, error.args = renamed(error.problem), (renamed(str(error)),)
            raise


def here(source: str | Path) -> Path | None:
    """The path of a source on this machine; None: it is elsewhere."""
    word = str(source)
    if re.fullmatch(rf"-|s3://.*|{HUB.pattern}", word):
        return None
    if word.startswith(("http://", "https://")):
        raise InputError(f"{word}: download it, `curl -L {word} | sm-nanogpt upload-data -`")
    if "://" in word.removeprefix("file://"):
        what = "a path, -, hf://datasets/OWNER/NAME/PATH, or s3://bucket/prefix"
        raise InputError(f"{word}: use {what}")
    path = storage.local_path(word) if word.startswith("file://") else storage.path_of(source)
    with suppress(OSError):  # who reads it names it
        if path and not path.exists():
            what = "without a PATH, `sm-nanogpt upload-data` takes tiny Shakespeare"
            raise InputError(f"{word}: no such file or directory; {what}")
    return path


def named_by(source: str | Path) -> Path:
    """A path with the name of a source, such as that of a data set of the Hub."""
    found = HUB.fullmatch(str(source))
    return Path("stdin" if source == "-" else found["name"] if found else source)


def copy(
    source: str, directory: Path, settings: Settings, progress: Progress, wanted: Wanted
) -> Path:
    """Copy a file, or what is below a folder or fits a pattern; returns the file or folder."""
    with storage.reported(source):
        if source == "-":
            with (directory / "stdin").open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
            return directory / "stdin"
        if source.startswith("s3://"):
            fs, path = storage.file_system(source, settings)
            return fetch(source, fs, path, directory, storage.by_parts(progress), wanted)
        try:
            from huggingface_hub import HfFileSystem
        except ImportError as error:
            raise not_installed(error.name or "huggingface_hub", "data") from None
        fs, path = HfFileSystem(skip_instance_cache=True), source.removeprefix("hf://").rstrip("/")
        how = storage.told(progress) | {"block_size": 0}  # by one request for a file
        with hub_errors(source):
            return fetch(source, fs, path, directory, how, wanted)


def fetch(
    source: str, fs: Any, path: str, directory: Path, how: dict[str, Any], wanted: Wanted
) -> Path:
    """As copy, of a path in fs; how are arguments of fsspec's get_file."""
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
    amount = f"{tqdm.format_sizeof(size)}B in {len(chosen):,} file{'s' * (len(chosen) != 1)}"
    if size > shutil.disk_usage(directory).free:
        raise ServiceError(f"{source}: {amount} do not fit on the disk of {directory.parent}")
    logger.info(f"{source}: copying {amount}")
    storage.expect(how["callback"].relative_update, size)
    for key, target in targets.items():
        if not target.resolve().is_relative_to(directory.resolve()):
            raise ServiceError(f"{source}: {key!r} would be written outside of {directory}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        if key in chosen:
            fs.get_file(key, str(target), **how)
    return top


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
        why = " ".join(str(error).split())
        raise ServiceError(f"{source}: {why}; check the network, or {LOGIN}") from None
