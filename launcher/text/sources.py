"""Find the text of an upload: on this machine, in standard input, on the Hub, or on S3."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm_nanogpt.launcher.errors import InputError, ServiceError, not_installed_error
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.progress import Progress, expect
from sm_nanogpt.launcher.files.s3 import fsspec_callback, transfer_options
from sm_nanogpt.launcher.files.scratch import scratch
from sm_nanogpt.launcher.locations import is_on_s3, similar_files
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.values import counted, in_units

logger = logging.getLogger(__name__)

HUB = re.compile(r"hf://datasets/(?P<id>[\w.-]+/(?P<name>[\w.-]+))(@[^/]+)?(/.*)?")
LOGIN = "run `hf auth login`, or set HF_TOKEN"
STDIN = "-"


@dataclass(frozen=True)
class RemoteFile:
    """A file on the Hub or on S3."""

    key: str  # the path in its file system
    size: int  # bytes


@dataclass
class TextSource:
    """A file or a folder of text. If it is elsewhere, this machine has empty copies of its files,
    until fetch fills them."""

    path: Path  # on this machine
    location: str = ""  # `-` or a URI, if the text is elsewhere
    remote_files: dict[Path, RemoteFile] = field(default_factory=dict)  # by the path of the copy
    remote: RemoteFileSystem | None = None

    @property
    def name(self) -> str:
        """The name of the text: that of a data set of the Hub, or of a file."""
        if self.location == STDIN:
            return "stdin"
        match = HUB.fullmatch(self.location)
        if match:
            return match["name"]
        return Path(self.location or self.path).absolute().name

    def shown(self, path: Path) -> str:
        """What messages call a path of this source: what the user wrote, not the path of a copy."""
        if not self.location:
            return str(path)
        if not path.is_relative_to(self.path):
            return self.location
        relative_path = path.relative_to(self.path).as_posix()
        if relative_path == ".":
            return self.location
        return f"{without_pattern(self.location)}/{relative_path}"

    def fetch(self, paths: Collection[Path], progress: Progress) -> None:
        """Download the files whose empty copies are at these paths.

        Raises ServiceError if that fails, or if the disk has too little space.
        """
        if self.remote is None:
            return
        files = {path: self.remote_files[path] for path in paths if path in self.remote_files}
        if not files:
            return
        size = sum(file.size for file in files.values())
        amount = f"{in_units(size)} in {counted(len(files), 'file')}"
        if size > shutil.disk_usage(self.path).free:
            raise ServiceError(f"{self.location}: {amount} do not fit on this machine's disk")
        logger.info(f"{self.location}: copying {amount}")
        expect(progress, size)
        with remote_errors(self.location):
            for path, file in files.items():
                self.remote.download(file.key, path, progress)


@contextmanager
def open_sources(
    locations: Sequence[str | Path], settings: Settings, code: str = ""
) -> Iterator[list[TextSource]]:
    """Find the texts at locations that a user gave. Copies of remote texts exist during the body.

    `-` is standard input. `hf://datasets/OWNER/NAME[@REVISION][/PATH]` and `s3://bucket/key` name a
    file, a folder with all files below it, or, by `*`, several files. code: the remedy of the error
    for a path that does not exist. Raises InputError and ServiceError.
    """
    texts = [str(location) for location in locations]
    if texts.count(STDIN) > 1:
        raise InputError("- can be given once: it is standard input")
    # A wrong path is refused before anything is copied.
    paths = {text: find_path(text, code) for text in texts if not is_elsewhere(text)}
    with ExitStack() as stack:
        sources: list[TextSource] = []
        for text in texts:
            if text in paths:
                sources.append(TextSource(paths[text]))
            else:
                directory = stack.enter_context(temporary(settings))
                sources.append(open_source(text, directory, settings))
        yield sources


@contextmanager
def temporary(settings: Settings) -> Iterator[Path]:
    """A temporary directory in the cache. Raises ServiceError if the disk is full."""
    cache = settings.home / "cache"
    with storage.errors_about(str(cache)), scratch(cache, "text-") as directory:
        yield directory


def is_elsewhere(location: str) -> bool:
    """True for standard input, the Hub and S3."""
    return location == STDIN or is_on_s3(location) or HUB.fullmatch(location) is not None


def find_path(location: str, code: str = "") -> Path:
    """The path of a text on this machine.

    Raises InputError if nothing is there: with the files that have similar names, or else a code.
    """
    if location.startswith(("http://", "https://")):
        url = shlex.quote(location)
        raise InputError(f"{location}: a web address is not read", "download", url=url)
    if "://" in location.removeprefix("file://"):
        forms = "a path, -, hf://datasets/OWNER/NAME/PATH, or s3://bucket/prefix"
        raise InputError(f"{location}: use {forms}")
    is_uri = location.startswith("file://")
    path = storage.local_path(location) if is_uri else storage.path_of(location)
    with suppress(OSError):  # find_files reports it
        if path is not None and path.exists():
            return path
    problem = f"{location}: no such file or directory"
    suggestion = ""
    if path is not None:
        suggestion = similar_files(path, str(path) if is_uri else location)
    if suggestion:
        problem += f"; {suggestion}"
        code = ""  # a suggestion is advice enough
    raise InputError(problem, code=code)


def without_pattern(path: str) -> str:
    """A path or URI up to the folder before the first pattern, such as *.txt."""
    return re.split(r"[^/]*[*?[]", path)[0].rstrip("/")


# -- copies ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteFileSystem:
    """A file system of fsspec: that of S3, or of the Hub."""

    fs: Any
    path: str  # of the file, folder, or pattern that the user gave
    is_s3: bool

    def find(self, location: str) -> dict[str, RemoteFile]:
        """The files at the path, below it, or that match its pattern, by key.

        location: what errors call them. Raises InputError and ServiceError.
        """
        with remote_errors(location):
            try:
                infos = self.fs.find(self.path, detail=True)
                infos = infos or self.fs.glob(self.path, detail=True)
            except ValueError as error:  # such as a pattern with **.txt
                raise InputError(f"{location}: {error}") from None
        return {
            key: RemoteFile(key, info["size"])
            for key, info in infos.items()
            if info["type"] == "file" and not key.endswith("/")  # a folder made by the S3 console
        }

    def root_of(self, keys: Collection[str]) -> str:
        """The path with which all keys begin: the path without its pattern."""
        if set(keys) == {self.path}:
            return self.path
        return without_pattern(self.path)

    def download(self, key: str, target: Path, progress: Progress) -> None:
        if self.is_s3:
            self.fs.get_file(key, str(target), **transfer_options(progress))
        else:
            callback = fsspec_callback(progress)
            self.fs.get_file(key, str(target), callback=callback, block_size=0)  # in one request


def open_source(location: str, directory: Path, settings: Settings) -> TextSource:
    """Make empty copies of the files of a remote text in a directory. Standard input is read."""
    if location == STDIN:
        path = directory / "stdin"
        with path.open("wb") as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy)
        return TextSource(path, location)

    remote = remote_file_system(location, settings)
    files = remote.find(location)
    if not remote.is_s3 and files.pop(f"{remote.path}/README.md", None) is not None:
        logger.info(f"{location}: README.md left out; it describes the data set")
    if not files:
        raise InputError(f"{location}: nothing is there")
    root = remote.root_of(files)
    name = Path(root).name.partition("@")[0]
    source = TextSource(directory / name, location, remote=remote)
    for key, file in files.items():
        path = storage.path_below(directory, f"{name}{key.removeprefix(root)}", location)
        path.touch()
        source.remote_files[path] = file
    return source


def remote_file_system(location: str, settings: Settings) -> RemoteFileSystem:
    """The file system of a URI of S3 or of the Hub. Raises InputError if a package is missing."""
    if is_on_s3(location):
        fs, path = storage.locate(location, settings).file_system
        return RemoteFileSystem(fs, path, is_s3=True)
    try:
        from huggingface_hub import HfFileSystem
    except ImportError as error:
        raise not_installed_error(error.name or "huggingface_hub") from None
    path = location.removeprefix("hf://").rstrip("/")
    return RemoteFileSystem(HfFileSystem(skip_instance_cache=True), path, is_s3=False)


@contextmanager
def remote_errors(location: str) -> Iterator[None]:
    """Turn exceptions of S3, the Hub's client, and the disk into errors of one line."""
    with storage.errors_about(location), ExitStack() as stack:
        if location.startswith("hf:"):
            stack.enter_context(hub_errors(location))
        yield


@contextmanager
def hub_errors(location: str) -> Iterator[None]:
    """Turn exceptions of the Hub's client into errors of one line, with advice."""
    from huggingface_hub import errors

    try:
        yield
    except (FileNotFoundError, ConnectionError, errors.HTTPError) as error:
        cause = error if isinstance(error, errors.HfHubHTTPError) else error.__cause__
        page = HUB.sub(r"https://huggingface.co/datasets/\g<id>", location)
        if isinstance(cause, errors.GatedRepoError):
            raise ServiceError(f"{location}: ask for access on {page}, then {LOGIN}") from None
        if isinstance(cause, errors.RepositoryNotFoundError | errors.HFValidationError):
            problem = f"the Hub has no such data set, or it is private: {LOGIN}"
            raise InputError(f"{location}: {problem}") from None
        if isinstance(cause, errors.RevisionNotFoundError):
            raise InputError(f"{location}: there is no such revision; {page} lists them") from None
        message = " ".join(str(error).split())
        raise ServiceError(f"{location}: {message}; check the network, or {LOGIN}") from None
