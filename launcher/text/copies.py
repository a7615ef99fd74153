"""Copies of texts that are not files of this machine: standard input, the Hub's, S3's, and tiny
Shakespeare."""

from __future__ import annotations

import hashlib
import logging
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from launcher.errors import InputError, ServiceError, not_installed
from launcher.files import storage
from launcher.files.progress import Progress, expect, no_progress
from launcher.files.s3 import fsspec_callback, in_parts
from launcher.files.scratch import scratch
from launcher.settings import Settings, load_settings

logger = logging.getLogger(__name__)
readers = logging.getLogger("launcher.text")  # of the modules that read the copies

HUB = re.compile(r"hf://datasets/(?P<id>[\w.-]+/(?P<name>[\w.-]+))(@[^/]+)?(/.*)?")
Fill = Callable[[Collection[Path]], None]
LOGIN = "run `hf auth login`, or set HF_TOKEN"
T = TypeVar("T")


@dataclass
class Copy:
    """What stands here for a path that a user gave: empty files, until they are filled."""

    given: str
    path: Path
    get: Any = None  # fsspec's, which copies a file by its key
    files: dict[Path, tuple[str, int]] = field(default_factory=dict)  # with their keys and sizes

    def fill(self, wanted: Collection[Path], progress: Progress) -> None:
        """Copy some of the files. Raises ServiceError if that fails, or the disk is too small."""
        from tqdm import tqdm

        files = {path: self.files[path] for path in wanted if path in self.files}
        if not files:
            return
        size = sum(size for _, size in files.values())
        amount = f"{tqdm.format_sizeof(size)}B in {len(files):,} file{'s' * (len(files) != 1)}"
        if size > shutil.disk_usage(self.path).free:
            raise ServiceError(f"{self.given}: {amount} do not fit on this machine's disk")
        logger.info(f"{self.given}: copying {amount}")
        expect(progress, size)
        with reported(self.given):
            for path, (key, _) in files.items():
                self.get(key, str(path))


@contextmanager
def copied(
    given: Sequence[str | Path],
    settings: Settings,
    progress: Progress = no_progress,
    code: str = "",
) -> Iterator[tuple[list[Path], Fill]]:
    """The paths of texts on this machine, and what fills those that are empty copies.

    `-` is standard input. `hf://datasets/OWNER/NAME[@REVISION][/PATH]` and `s3://bucket/key` name a
    file, a folder with all that is below it, or by `*` several files. Errors and warnings give the
    names as here. code: that of what to do about a path that does not exist.
    """
    copies = list[Copy]()

    def named(value: Any) -> Any:
        for copy in copies:
            value = value.replace(str(copy.path), copy.given) if isinstance(value, str) else value
        return value

    def rename(record: logging.LogRecord) -> bool:
        vars(record).update({name: named(value) for name, value in vars(record).items()})
        return True

    def fill(wanted: Collection[Path]) -> None:
        for copy in copies:
            copy.fill(wanted, progress)

    if [*map(str, given)].count("-") > 1:
        raise InputError("- can be given once: it is standard input")
    with ExitStack() as stack:
        readers.addFilter(rename)
        stack.callback(readers.removeFilter, rename)
        paths = [local(each, code) for each in given]
        for index, path in enumerate(paths):
            if path is None:
                directory = stack.enter_context(temporary(settings))
                copies.append(copy_of(str(given[index]), directory, settings, progress))
                paths[index] = copies[-1].path
        try:
            yield [path for path in paths if path], fill
        except InputError as error:
            error.problem, error.args = named(error.problem), (named(str(error)),)
            error.facts = {name: named(fact) for name, fact in error.facts.items()}
            raise


@contextmanager
def temporary(settings: Settings) -> Iterator[Path]:
    """A temporary directory in the cache. Raises ServiceError if the disk is full."""
    cache = settings.home / "cache"
    with storage.reported(str(cache)), scratch(cache, "text-") as directory:
        yield directory


def local(given: str | Path, code: str = "") -> Path | None:
    """The path of a text on this machine; None: it is elsewhere."""
    word = str(given)
    if re.fullmatch(rf"-|s3://.*|{HUB.pattern}", word):
        return None
    if word.startswith(("http://", "https://")):
        error = InputError(f"{word}: a web address is not read", "download", url=shlex.quote(word))
    elif "://" in word.removeprefix("file://"):
        what = "a path, -, hf://datasets/OWNER/NAME/PATH, or s3://bucket/prefix"
        error = InputError(f"{word}: use {what}")
    else:
        path = storage.local_path(word) if word.startswith("file://") else storage.path_of(given)
        error = InputError(f"{word}: no such file or directory", code)
        with suppress(OSError):  # who reads it names it
            if path and path.exists():
                return path
    raise error


def name_of(given: str | Path) -> str:
    """The name of what a user gave, such as that of a data set of the Hub."""
    found = HUB.fullmatch(str(given))
    return "stdin" if given == "-" else found["name"] if found else Path(given).absolute().name


def copy_of(given: str, directory: Path, settings: Settings, progress: Progress) -> Copy:
    """What stands for a file, what is below a folder, or what fits a pattern."""
    if given == "-":
        with (directory / "stdin").open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        return Copy(given, directory / "stdin")
    if given.startswith("s3://"):
        (fs, path), how = storage.locate(given, settings).file_system, in_parts(progress)
    else:
        try:
            from huggingface_hub import HfFileSystem
        except ImportError as error:
            raise not_installed(error.name or "huggingface_hub", "data") from None
        fs, path = HfFileSystem(skip_instance_cache=True), given.removeprefix("hf://").rstrip("/")
        how = {"callback": fsspec_callback(progress), "block_size": 0}  # by one request for a file
    with reported(given):
        try:
            found, why = fs.find(path, detail=True) or fs.glob(path, detail=True), ""
        except ValueError as error:  # such as a pattern with **.txt
            found, why = {}, str(error)
    sizes = {
        key: info["size"]
        for key, info in found.items()
        if info["type"] == "file" and not key.endswith("/")  # a folder made by the S3 console
    }
    if given.startswith("hf:") and sizes.pop(f"{path}/README.md", None) is not None:
        logger.info(f"{given}: README.md left out; it describes the data set")
    if not sizes:
        raise InputError(f"{given}: {why or 'nothing is there'}")
    root = path if set(sizes) == {path} else re.split(r"[^/]*[*?[]", path)[0].rstrip("/")
    top = directory / Path(root).name.partition("@")[0]
    copy = Copy(given, top, lambda key, target: fs.get_file(key, target, **how))
    for key, size in sizes.items():
        target = storage.path_below(directory, f"{top.name}{key.removeprefix(root)}", given)
        target.touch()
        copy.files[target] = key, size
    return copy


@contextmanager
def reported(given: str) -> Iterator[None]:
    """Turn exceptions of S3, the Hub's client, and the disk into one line about what was given."""
    with storage.reported(given), hub_errors(given) if given[:3] == "hf:" else nullcontext():
        yield


@contextmanager
def hub_errors(given: str) -> Iterator[None]:
    from huggingface_hub import errors

    page = HUB.sub(r"https://huggingface.co/datasets/\g<id>", given)
    unknown = f"the Hub has no such data set, or it is private: {LOGIN}"
    known: dict[type[Exception], tuple[type[InputError | ServiceError], str]] = {
        errors.GatedRepoError: (ServiceError, f"ask for access on {page}, then {LOGIN}"),
        errors.RepositoryNotFoundError: (InputError, unknown),
        errors.HFValidationError: (InputError, unknown),
        errors.RevisionNotFoundError: (InputError, f"there is no such revision; {page} lists them"),
    }
    try:
        yield
    except (FileNotFoundError, ConnectionError, errors.HTTPError) as error:
        cause = error if isinstance(error, errors.HfHubHTTPError) else error.__cause__
        other = ServiceError, f"{' '.join(str(error).split())}; check the network, or {LOGIN}"
        kind, why = next((known[k] for k in known if isinstance(cause, k)), other)
        raise kind(f"{given}: {why}") from None


# -- a text for those who have none ----------------------------------------------------------------

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PATIENCE_SECONDS = 5.0


def first_text(settings: Settings | None = None) -> Path:
    """Tiny Shakespeare, as a file in the cache: downloaded once, and verified by its SHA-256.

    Many networks reach a package index and little else. There it is Python's language reference,
    which comes with Python; without it, this raises ServiceError.
    """
    cache = (settings or load_settings()).home / "cache"
    shakespeare = cache / "shakespeare.txt"
    if shakespeare.is_file() and is_shakespeare(shakespeare.read_bytes()):
        return shakespeare
    try:
        # A silent name server takes minutes, which no timeout of urllib bounds.
        content = in_thread(partial(download, SHAKESPEARE_URL)).result(PATIENCE_SECONDS)
        why = "" if is_shakespeare(content) else "the answer is another file"  # of a proxy
    except Exception as error:
        why = str(getattr(error, "reason", error)) or f"no answer within {PATIENCE_SECONDS:.0f} s"
    if not why:
        storage.write_bytes(str(shakespeare), content)
        return shakespeare
    try:
        from pydoc_data.topics import topics  # of `help()`: half a megabyte of the reference
    except ImportError:
        raise ServiceError(f"{SHAKESPEARE_URL}: {why}", "own-text") from None
    what = "took the language reference that comes with Python"
    logger.warning(f"{SHAKESPEARE_URL}: {why}; {what}", extra={"code": "own-text"})
    reference = cache / "python-reference.txt"
    storage.write_bytes(str(reference), "\n\n".join(topics.values()).encode())
    return reference


def is_shakespeare(content: bytes) -> bool:
    return hashlib.sha256(content).hexdigest() == SHAKESPEARE_SHA256


def download(url: str) -> bytes:
    import urllib.request

    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
        return bytes(response.read())


def in_thread(task: Callable[[], T]) -> Future[T]:
    """Start a task in a thread for which neither Ctrl-C nor the end of the process waits."""
    ended = Future[T]()

    def run() -> None:
        try:
            ended.set_result(task())
        except BaseException as error:
            ended.set_exception(error)

    Thread(target=run, daemon=True).start()
    return ended
