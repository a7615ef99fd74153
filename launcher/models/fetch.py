"""Download, unpack and check the models and checkpoints of jobs.

A fetched model is a directory HOME/models/JOB-ID/WHICH, created atomically. Archives are not
trusted.
"""

from __future__ import annotations

import gzip
import io
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from launcher.errors import InputError, ServiceError
from launcher.files import storage
from launcher.files.storage import Progress
from launcher.finding import find
from launcher.job import JobDescription, checkpoints_among
from launcher.settings import Settings, load_settings

if TYPE_CHECKING:
    from torch import Tensor

# Weights hardly compress: by a factor of 1.1, or 1.5 if some are still zero. An archive that
# unpacks to much more is no model.
LARGEST_RATIO = 20
RATIO_FREE_BYTES = 1 << 26
LARGEST_COUNT, LARGEST_DEPTH = 1000, 8  # of an archive; a model has 6 files
# What tarfile raises for a damaged archive; IndexError if the header of a sparse file is cut off.
NOT_TAR = (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError, IndexError)


def fetch_model(
    job_id: str,
    settings: Settings | None = None,
    progress: Progress = lambda n: None,
    entry_point: Path | None = None,
) -> Path:
    """Download a job's model, unless it is here, and return its directory.

    For a job that failed or was stopped, this is the model of its newest checkpoint. entry_point
    names the folder that exports it, if its launch kept none here.

    Raises:
        InputError: the folder that exports a checkpoint is not here.
        ServiceError: there is no such job, it still runs or left nothing, or the archive is
            damaged.
    """
    settings = settings or load_settings()
    return fetch_described(find(job_id, settings)[1], settings, progress, entry_point)


def fetch_described(
    description: JobDescription,
    settings: Settings,
    progress: Progress = lambda n: None,
    entry_point: Path | None = None,
) -> Path:
    """Download the model of a described job; from a checkpoint if it has no `model_uri`."""
    if description.model_uri is not None:
        return fetch_archive(description, settings, progress)
    job_id = description.job_id
    if description.is_running:
        raise ServiceError(
            f"job {job_id} is still {description.status}:"
            f" `sm-nanogpt logs {job_id} --follow` shows its progress,"
            f" `sm-nanogpt stop {job_id}` stops it"
        )
    if description.checkpoint_uri is not None:
        return fetch_checkpoint(description, settings, progress, entry_point)
    reason = f": {description.failure_reason}" if description.failure_reason else ""
    raise ServiceError(
        f"job {job_id} is {description.status}{reason}; it left neither a model nor a checkpoint;"
        f" `sm-nanogpt logs {job_id}` shows what happened"
    )


def fetch_archive(description: JobDescription, settings: Settings, progress: Progress) -> Path:
    """Download and unpack model.tar.gz."""
    assert description.model_uri is not None
    parent = settings.models_dir / description.job_id
    target = parent / storage.fingerprint(description.model_uri, settings)
    if target.exists():
        return target
    with scratch(settings.models_dir) as directory:
        (archive,) = storage.fetch(description.model_uri, directory / "archive", progress, settings)
        extract(archive, directory / "model", description.model_uri)
        keep(directory / "model", target)
    return target


def check_weights(directory: Path) -> None:
    """Raise InputError for a model directory without weights that can be read."""
    if not any(directory.glob("*.safetensors")):
        raise InputError(
            f"{directory}: no *.safetensors is there; `save_pretrained` of transformers writes them"
        )


def no_model(word: str) -> InputError:
    """The error for a word that names neither the directory of a model nor a job."""
    if storage.path_of(word).exists():
        return InputError(f"{word}: a file; give the directory of a model")
    hint = ""
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", word):
        name = word.partition("/")[2]
        hint = f"; for that of the Hugging Face Hub, `hf download {word} --local-dir {name}`"
    return InputError(f"{word}: no such directory{hint}")


def fetch_checkpoint(
    description: JobDescription, settings: Settings, progress: Progress, entry_point: Path | None
) -> Path:
    """Download the newest checkpoint that is intact and export it as a model directory."""
    from entry_point.errors import TrainingError
    from launcher.models import load

    def place(step: int) -> Path:
        return settings.models_dir / description.job_id / f"step-{step:08d}"

    uri = description.checkpoint_uri
    assert uri is not None
    assert description.checkpoint_step is not None
    if (newest := place(description.checkpoint_step)).exists():
        return newest
    with scratch(settings.models_dir) as directory:
        try:
            checkpoint = fetch_intact(uri, directory, progress, settings)
            step = load.export_checkpoint(checkpoint, directory / "model", settings, entry_point)
        except TrainingError as error:
            raise ServiceError(f"{uri}: {error}") from None
        keep(directory / "model", place(step))
    return place(step)


def fetch_intact(
    uri: str, directory: Path, progress: Progress, settings: Settings
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Download checkpoints, the newest first, until one is intact; return what it holds.

    Raises TrainingError if none is.
    """
    from entry_point.errors import TrainingError
    from launcher.models.load import read_checkpoint

    damage = TrainingError("no checkpoint is there")
    for _, name in sorted(checkpoints_among(storage.list_files(uri, settings)).items())[::-1]:
        (path,) = storage.fetch(storage.join(uri, name), directory / name, progress, settings)
        try:
            return read_checkpoint(path.parent)
        except TrainingError as error:
            damage = error
        path.unlink()
    raise damage


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A temporary directory below `parent`, on the file system of the result."""
    with storage.reported(str(parent)):
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=".fetch-", dir=parent, ignore_cleanup_errors=True
        ) as directory:
            yield Path(directory)


def keep(directory: Path, target: Path) -> None:
    """Move a finished directory into place, unless another process was first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def extract(archive: Path, target: Path, uri: str) -> None:
    """Unpack an archive of regular files and directories.

    Raises:
        ServiceError: the archive, from `uri`, is damaged, or has absolute paths, `..`, links,
            devices, too many or too deep members, or far more bytes than its size allows.
        OSError: the target cannot be written.
    """
    allowed = LARGEST_RATIO * archive.stat().st_size + RATIO_FREE_BYTES
    target.mkdir()
    try:
        with (
            gzip.open(archive) as file,
            Bounded(file, allowed, uri) as stream,
            tarfile.open(fileobj=stream, mode="r|") as tar,
        ):
            for count, member in enumerate(tar):
                place = safe_place(member, uri)
                if count >= LARGEST_COUNT or len(place.parts) > LARGEST_DEPTH:
                    raise ServiceError(f"{uri} is refused: too many files, or too deep directories")
                path = target / place
                stream.check(member.size)
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None
                with path.open("xb") as out:
                    shutil.copyfileobj(source, out)
            while stream.read(storage.CHUNK_BYTES):  # reads the checksum at the end
                pass
    # The last two: a name is there twice, or below a file.
    except (*NOT_TAR, RecursionError, FileExistsError, NotADirectoryError) as error:
        raise ServiceError(f"{uri} is damaged: {error}") from None


class Bounded(io.RawIOBase):
    """A gzip stream, headers included, that refuses more bytes than a model may have."""

    def __init__(self, file: gzip.GzipFile, allowed: int, uri: str) -> None:
        self.file, self.left, self.uri = file, allowed, uri

    def check(self, n: int) -> None:
        if not 0 <= n <= self.left:
            raise ServiceError(
                f"{self.uri} is refused: it unpacks to over {LARGEST_RATIO} times its size"
            )

    def read(self, n: int = -1) -> bytes:
        content = self.file.read(n if 0 <= n <= storage.CHUNK_BYTES else storage.CHUNK_BYTES)
        self.check(len(content))
        self.left -= len(content)
        return content


def safe_place(member: tarfile.TarInfo, uri: str) -> PurePosixPath:
    """The member's path below the target."""
    place = PurePosixPath(member.name)
    if place.is_absolute() or ".." in place.parts or "\\" in member.name or ":" in member.name:
        raise ServiceError(f"{uri} is refused: {member.name!r} would lie outside of the model")
    # The holes of a sparse file take no space in the archive.
    if member.issparse() or not (member.isreg() or member.isdir()):
        kind = "a link" if member.issym() or member.islnk() else "not a regular file"
        raise ServiceError(f"{uri} is refused: {member.name!r} is {kind}")
    return place
