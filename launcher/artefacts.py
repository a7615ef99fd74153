"""What a job leaves, on its way back: fetched, unpacked with suspicion, and checked.

A fetched model is a directory HOME/models/JOB-ID/WHICH: it appears whole or not at all.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import socket
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from launcher import storage
from launcher.errors import ServiceError
from launcher.job import JobDescription
from launcher.settings import Settings, load_settings
from launcher.storage import Progress
from launcher.tracking import backend_for, describe

if TYPE_CHECKING:
    from launcher.model import FindScript

# Weights hardly compress (by 1.1; up to 1.5 where some are still zero). What unpacks to much more
# than it was is not a model.
LARGEST_RATIO = 20
RATIO_FREE_BYTES = 1 << 26
LARGEST_COUNT, LARGEST_DEPTH = 1000, 8  # of what an archive holds; a model is 6 files side by side


def fetch_model(
    job_id: str,
    settings: Settings | None = None,
    progress: Progress = lambda n: None,
    entry_point: Path | None = None,
) -> Path:
    """The directory of a job's model, fetched unless it is here already.

    A job that failed or was stopped gives the model of its newest checkpoint; `describe` tells
    which. entry_point is the edited script that trained it, where that is not found by itself.

    Raises:
        InputError: only the script that trained the model can compute it, and it is not here.
        ServiceError: no such job, it still runs or left nothing, or the archive is not a model.
    """
    settings = settings or load_settings()
    return fetch_described(describe(job_id, settings), settings, progress, entry_point)


def script_finder(
    description: JobDescription, settings: Settings, entry_point: Path | None
) -> FindScript:
    """Finds the script that trained a job's model: the one that is named, else the job's own."""
    if entry_point is not None:
        return lambda sha256: entry_point
    backend = backend_for(description.instance, settings)
    return lambda sha256: backend.script(description.job_id, sha256)


def fetch_described(
    description: JobDescription,
    settings: Settings,
    progress: Progress = lambda n: None,
    entry_point: Path | None = None,
) -> Path:
    """The model of a job that stands like this: a checkpoint's where it has no `model_uri`."""
    find_script = script_finder(description, settings, entry_point)
    if description.model_uri is not None:
        return fetch_archive(description, settings, progress, find_script)
    job_id = description.job_id
    if description.is_running:
        raise ServiceError(
            f"job {job_id} is still {description.status}:"
            f" `{settings.command(f'logs {job_id} --follow')}` shows how far it is,"
            f" `{settings.command(f'stop {job_id}')}` ends it early"
        )
    if description.checkpoint_uri is not None:
        return fetch_checkpoint(description, settings, progress, find_script)
    reason = f": {description.failure_reason}" if description.failure_reason else ""
    raise ServiceError(
        f"job {job_id} is {description.status}{reason}; it left neither a model nor a checkpoint;"
        f" `{settings.command(f'logs {job_id}')}` shows what happened"
    )


def fetch_archive(
    description: JobDescription, settings: Settings, progress: Progress, find_script: FindScript
) -> Path:
    """Fetches and unpacks model.tar.gz."""
    assert description.model_uri is not None
    parent = settings.models_dir / description.job_id
    target = parent / storage.fingerprint(description.model_uri, settings)
    if target.exists():
        return target
    with scratch(settings.models_dir) as directory:
        (archive,) = storage.fetch(description.model_uri, directory / "archive", progress, settings)
        try:
            extract(archive, directory / "model", description.model_uri)
            check_model(directory / "model", description.model_uri, find_script)
        except ServiceError as error:
            raise ServiceError(f"{error}; {another_model(description, settings)}") from None
        keep(directory / "model", target)
    return target


def another_model(description: JobDescription, settings: Settings) -> str:
    """What to do where a finished job's model is of no use."""
    if description.checkpoint_uri is None:
        return "train again"
    command = settings.command(f"launch --resume {description.job_id} --set max_steps=N")
    return f"`{command}`, N above {description.checkpoint_step}, makes another from its checkpoint"


def fetch_checkpoint(
    description: JobDescription, settings: Settings, progress: Progress, find_script: FindScript
) -> Path:
    """Fetches the newest checkpoint and writes it out as a model directory.

    It is the one before where the newest is broken.
    """
    from entry_point import train
    from launcher import model

    def place(step: int) -> Path:
        return settings.models_dir / description.job_id / f"step-{step:08d}"

    assert description.checkpoint_uri is not None
    assert description.checkpoint_step is not None
    if (newest := place(description.checkpoint_step)).exists():
        return newest
    with scratch(settings.models_dir) as directory:
        storage.fetch(description.checkpoint_uri, directory / "checkpoints", progress, settings)
        try:
            step = model.export_checkpoint(
                directory / "checkpoints", directory / "model", find_script
            )
        except train.TrainingError as error:
            raise ServiceError(f"{description.checkpoint_uri}: {error}") from None
        check_model(directory / "model", description.checkpoint_uri, find_script)
        keep(directory / "model", place(step))
    return place(step)


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A directory to work in, near where the result will lie, that leaves no trace.

    Raises:
        ServiceError: work there ended in an OSError.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        mine = f".fetch-{socket.gethostname()}-"
        for old in parent.glob(".fetch-*"):
            named = re.fullmatch(rf"{re.escape(mine)}(\d+)-\w+", old.name)
            if named and not is_alive(int(named[1])):  # it was killed
                shutil.rmtree(old, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=f"{mine}{os.getpid()}-", dir=parent, ignore_cleanup_errors=True
        ) as directory:
            yield Path(directory)
    except OSError as error:
        raise ServiceError(
            f"{parent}: {error.strerror or error}; SM_NANOGPT_HOME names another place to work in"
        ) from None


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another person's
        pass
    return True


def keep(directory: Path, target: Path) -> None:
    """Moves a finished directory into place; who comes second finds the same content there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def extract(archive: Path, target: Path, uri: str) -> None:
    """Unpacks regular files and directories; anything else in the archive refuses it whole.

    Raises:
        ServiceError: the archive, which came from `uri`, is damaged, or holds what a model archive
            never holds: absolute paths, `..`, links, devices, or far more bytes than its size
            allows.
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
                stream.check(member.size)
                path = target / place
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None
                with path.open("xb") as out:
                    shutil.copyfileobj(source, out)
            while stream.read(storage.CHUNK_BYTES):  # the checksum comes last
                pass
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, RecursionError) as error:
        raise ServiceError(f"{uri} is damaged: {error}") from None
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise ServiceError(
            f"{uri} is refused: {member.name!r} is in it twice, or below a file"
        ) from None
    except ValueError as error:
        raise ServiceError(f"{uri} is refused: {error}") from None


class Bounded(io.RawIOBase):
    """What an archive unpacks to, headers included, up to as much as a model may have."""

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
    if member.issparse() or not (member.isreg() or member.isdir()):  # holes take no room inside
        kind = "a link" if member.issym() or member.islnk() else "not a regular file"
        raise ServiceError(f"{uri} is refused: {member.name!r} is {kind}")
    return place


def check_model(directory: Path, uri: str, find_script: FindScript) -> None:
    """Raises ServiceError unless the directory holds a model that loads."""
    from entry_point import train
    from launcher import model

    try:
        model.load_artefact(directory, find_script)
    except train.TrainingError as error:
        raise ServiceError(f"{uri}: {error}") from None
