"""Download, unpack and check the models and checkpoints of jobs.

A fetched model is a directory HOME/models/JOB-ID/WHICH, created atomically. Archives are not
trusted.
"""

from __future__ import annotations

import gzip
import io
import logging
import re
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from entry_point.errors import FormatError, TrainingError
from launcher.aws import Missing
from launcher.errors import InputError, ServiceError
from launcher.files import storage
from launcher.files.models import is_path, model_files
from launcher.files.progress import Progress, byte_progress
from launcher.files.scratch import scratch
from launcher.finding import find
from launcher.job import FULL_ID, JOB_ID, JobDescription, checkpoints_among
from launcher.settings import Settings, load_settings

logger = logging.getLogger(__name__)

# Weights hardly compress: by a factor of 1.1, or 1.5 if some are still zero. An archive that
# unpacks to much more is no model.
LARGEST_RATIO = 20
RATIO_FREE_BYTES = 1 << 26
LARGEST_COUNT, LARGEST_DEPTH = 1000, 8  # of an archive; a model has 6 files
# What tarfile raises for a damaged archive; IndexError if the header of a sparse file is cut off.
NOT_TAR = (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError, IndexError)


def model_directory(named: str, settings: Settings, entry_point: Path | None = None) -> Path:
    """The directory of a model that a user named, by itself or by its job. Raises as fetch_model,
    and InputError if it is neither."""
    directory = storage.path_of(named)
    if directory.is_dir() and (is_path(named) or not FULL_ID.fullmatch(named)):
        model_files(directory)
        return directory
    if not JOB_ID.fullmatch(named):  # no job has such an id
        problem = "a file; give the directory of a model"
        if not directory.exists():
            problem = "no such directory"
            if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", named):
                get = f"hf download {named} --local-dir {named.partition('/')[2]}"
                problem += f"; for that of the Hugging Face Hub, `{get}`"
        raise InputError(f"{named}: {problem}")
    return fetch_model(named, settings, entry_point)


def fetch_model(
    job_id: str, settings: Settings | None = None, entry_point: Path | None = None
) -> Path:
    """Download a job's model, unless it is here, and return its directory.

    For a job that failed or was stopped, this is the model of its newest checkpoint. entry_point
    names the folder that exports it, if its launch kept none here; without either, this raises
    InputError. If the job cannot be looked up, for example without a network or a login, this is
    the model that was fetched before. Raises ServiceError if there is no such job, it still runs
    or left nothing, or the archive is damaged.
    """
    settings, is_id = settings or load_settings(), FULL_ID.fullmatch(job_id)
    sums = [*(settings.models_dir / job_id).glob("*/SHA256SUMS")] if is_id else []
    try:
        _, description = find(job_id, settings, attempts=2 if sums else None)
        place = place_of(description, settings)
    except (InputError, ServiceError) as error:
        if not sums or error.code in (
            "model-not-yet",
            "no-model-left",
            "models-of-a-search",
        ):  # AWS has answered
            raise
        # The model of the end, and else that of the newest checkpoint.
        place = max(sums, key=lambda s: ("/step-" not in str(s), s.stat().st_mtime)).parent
        copy = f"this is the copy of its model on this machine, {place.name}"
        why = "is gone" if isinstance(error, Missing) else "cannot be looked up"
        logger.warning(f"job {job_id} {why} ({error}); {copy}", extra={"cause": error})
        return place
    return download(description, place, settings, entry_point)


def place_of(description: JobDescription, settings: Settings) -> Path:
    """Where the model of a job, or of its newest checkpoint, is kept here once it was fetched."""
    job_id, step = description.job_id, description.checkpoint_step
    if description.search:
        problem = f"job {job_id} made the runs of search {description.search}, and has no model"
        raise ServiceError(problem, "models-of-a-search", search=description.search)
    if description.model_uri is not None:
        return settings.models_dir / job_id / storage.fingerprint(description.model_uri, settings)
    if description.is_running:
        problem = f"job {job_id} is still {description.status}"
        raise ServiceError(problem, "model-not-yet", job_id=job_id)
    if step is not None:
        return settings.models_dir / job_id / f"step-{step:08d}"
    reason = f": {description.failure_reason}" if description.failure_reason else ""
    problem = f"job {job_id} is {description.status}{reason}"
    left = "it left neither a model nor a checkpoint"
    raise ServiceError(f"{problem}; {left}", "no-model-left", job_id=job_id)


def keep_model(description: JobDescription, settings: Settings) -> Path:
    """Download the model of a job that will be deleted, and check it: it will be the only copy."""
    from launcher.models.load import check_sums

    place = download(description, place_of(description, settings), settings)
    try:
        check_sums(place)
    except (FormatError, OSError) as error:
        raise ServiceError(f"{place}: {error}; delete this directory, to fetch it again") from None
    return place


def download(
    description: JobDescription, place: Path, settings: Settings, entry_point: Path | None = None
) -> Path:
    """Download a job's model to its place, unless it is there; return the place.

    If the newest checkpoint is damaged, this is the place of an earlier one.
    """
    models_dir = settings.models_dir
    if not place.exists():
        with (
            storage.reported(str(models_dir)),
            byte_progress("fetch") as progress,
            scratch(models_dir, ".fetch-") as directory,  # on the file system of the result
        ):
            made = directory / "model"
            if uri := description.model_uri:
                (archive,) = storage.fetch(uri, made.with_name("tar"), progress, settings)
                extract(archive, made, uri)
            else:
                step = export(description, made, settings, progress, entry_point)
                place = place.with_name(f"step-{step:08d}")
            place.parent.mkdir(exist_ok=True)
            try:
                made.rename(place)
            except OSError:
                if not place.is_dir():  # by another process, which was first
                    raise
    if description.model_uri is None:
        state = f"job {description.job_id} is {description.status}"
        logger.warning(f"{state}; this is its last checkpoint, {place.name}")
    return place


def export(
    description: JobDescription,
    target: Path,
    settings: Settings,
    progress: Progress,
    entry_point: Path | None,
) -> int:
    """Write the newest checkpoint that is intact as a model directory; return its step."""
    from launcher.models.load import export_checkpoint, read_checkpoint

    uri, problem = str(description.checkpoint_uri), "no checkpoint is there"
    for _, name in sorted(checkpoints_among(storage.list_files(uri, settings)).items())[::-1]:
        directory, checkpoint = target.with_name(name), None
        storage.fetch(storage.join(uri, name), directory, progress, settings)
        try:
            checkpoint = read_checkpoint(directory)
            return export_checkpoint(checkpoint, target, settings, entry_point)
        except TrainingError as error:
            problem = str(error)
        if checkpoint is not None:  # an earlier one would be no better
            break
    raise ServiceError(f"{uri}: {problem}")


def extract(archive: Path, target: Path, uri: str) -> None:
    """Unpack an archive, from `uri`, of regular files and directories.

    Raises ServiceError if it is damaged, or has absolute paths, `..`, links, devices, too many or
    too deep members, or far more bytes than its size allows.
    """
    allowed = LARGEST_RATIO * archive.stat().st_size + RATIO_FREE_BYTES
    target.mkdir()
    try:
        with (
            gzip.open(archive) as file,
            Bounded(file, allowed) as stream,
            tarfile.open(fileobj=stream, mode="r|") as tar,
        ):
            for count, member in enumerate(tar):
                if problem := objection(member, count):
                    raise ValueError(problem)
                path = target / member.name
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
        raise ServiceError(f"{uri} is damaged, or no model: {error}") from None


class Bounded(io.RawIOBase):
    """A gzip stream, headers included, that refuses more bytes than a model may have."""

    def __init__(self, file: gzip.GzipFile, allowed: int) -> None:
        self.file, self.left = file, allowed

    def read(self, n: int = -1) -> bytes:
        content = self.file.read(n)  # tarfile reads by 10 kB
        self.left -= len(content)
        if self.left < 0:
            raise ValueError(f"it unpacks to over {LARGEST_RATIO} times its size")
        return content


def objection(member: tarfile.TarInfo, count: int) -> str:
    """Why a member does not belong to a model, or ''. count members came before it."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name or ":" in member.name:
        return f"{member.name!r} would lie outside of the model"
    if member.issym() or member.islnk():
        return f"{member.name!r} is a link"
    # The holes of a sparse file take no space in the archive.
    if member.issparse() or member.size < 0 or not (member.isreg() or member.isdir()):
        return f"{member.name!r} is not a regular file"
    if count >= LARGEST_COUNT or len(path.parts) > LARGEST_DEPTH:
        return "too many files, or too deep directories"
    return ""
