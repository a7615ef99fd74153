"""Download, unpack, and check the models and checkpoints of jobs.

A fetched model is a directory HOME/models/JOB-ID/NAME, which appears when it is complete. NAME is
`step-N` for the model of a checkpoint, or a fingerprint of the archive. Archives are not trusted.
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

from sm_nanogpt.entry_point.errors import FormatError, TrainingError
from sm_nanogpt.launcher.aws import Missing
from sm_nanogpt.launcher.description import JobDescription, checkpoints_among
from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.models import is_path, model_files
from sm_nanogpt.launcher.files.progress import CHUNK_BYTES, Progress, byte_progress
from sm_nanogpt.launcher.files.scratch import scratch
from sm_nanogpt.launcher.finding import find, similar_jobs
from sm_nanogpt.launcher.job import FULL_ID, JOB_ID, WORD
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)

# Weights hardly compress: by a factor of 1.1, or 1.5 if some are still zero. An archive that
# unpacks to over MAX_UNPACK_RATIO times its size, and FREE_UNPACK_BYTES more, is no model.
MAX_UNPACK_RATIO = 20
FREE_UNPACK_BYTES = 1 << 26
MAX_MEMBERS = 1000  # a model has 6
MAX_DEPTH = 8
QUICK_ATTEMPTS = 2  # to look up a job of which a copy is here: without a network, the copy does
# Errors of tarfile for a damaged archive. IndexError: the header of a sparse file is cut off.
TAR_ERRORS = (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError, IndexError)


def model_directory(model: str, settings: Settings, entry_point: Path | None = None) -> Path:
    """Return the directory of a model that a user named by a path or by the id of its job.

    The model of a job is fetched unless it is here. Raises the errors of fetch_model, and
    InputError if `model` can be neither a path nor an id.
    """
    directory = storage.path_of(model)
    if directory.is_dir() and (is_path(model) or not FULL_ID.fullmatch(model)):
        model_files(directory)
        return directory
    if JOB_ID.fullmatch(model):
        return fetch_model(model, settings, entry_point)

    problem = "no such directory"
    if directory.exists():
        problem = "a file; give the directory of a model"
    elif re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model):
        download_command = f"hf download {model} --local-dir {model.partition('/')[2]}"
        problem += f"; for that of the Hugging Face Hub, `{download_command}`"
    elif WORD.fullmatch(model):  # the name of a job may have dots and underscores
        suggestion = similar_jobs(model, settings)
        if suggestion:
            problem += f"; {suggestion}"
    raise InputError(f"{model}: {problem}")


def fetch_model(job_id: str, settings: Settings, entry_point: Path | None = None) -> Path:
    """Download a job's model, unless it is here, and return its directory.

    If a job failed or was stopped, its model is made of the newest checkpoint. If the job cannot be
    looked up, for example without a network or a login, this returns the model that was fetched
    before. entry_point: the training folder whose code exports a checkpoint, if the launch kept
    none here.

    Raises InputError if there is no folder to export a checkpoint, and ServiceError if there is no
    such job, if it still runs or left nothing, or if the archive is damaged.
    """
    copies = fetched_copies(job_id, settings)
    attempts = QUICK_ATTEMPTS if copies else None
    try:
        _, description = find(job_id, settings, attempts)
        directory = target_directory(description, settings)
    except (InputError, ServiceError) as error:
        backend_answered = error.code in ("model-not-yet", "no-model-left", "models-of-a-search")
        if not copies or backend_answered:
            raise
        return fall_back(job_id, copies, error)
    return download(description, directory, settings, entry_point)


def fetched_copies(job_id: str, settings: Settings) -> list[Path]:
    """Return the directories of the models that were fetched of a job; [] for a part of an id."""
    if not FULL_ID.fullmatch(job_id):
        return []
    sums = (settings.models_dir / job_id).glob("*/SHA256SUMS")
    return [path.parent for path in sums]


def fall_back(job_id: str, copies: list[Path], error: InputError | ServiceError) -> Path:
    """Return the copy to use of a job that was not found, and warn of the error."""
    directory = preferred_copy(copies)
    problem = "is gone" if isinstance(error, Missing) else "cannot be looked up"
    substitute = f"this is the copy of its model on this machine, {directory.name}"
    logger.warning(f"job {job_id} {problem} ({error}); {substitute}", extra={"cause": error})
    return directory


def preferred_copy(copies: list[Path]) -> Path:
    """Return the newest copy of the final model of a job, or else of the model of a checkpoint."""
    final_copies = [copy for copy in copies if not copy.name.startswith("step-")]
    return max(final_copies or copies, key=lambda copy: (copy / "SHA256SUMS").stat().st_mtime)


def target_directory(description: JobDescription, settings: Settings) -> Path:
    """Return the directory that the model of a job, or of its newest checkpoint, has when fetched.

    Raises ServiceError if the job has neither a model nor a checkpoint.
    """
    job_id = description.job_id
    if description.search:
        problem = f"job {job_id} made the runs of search {description.search}, and has no model"
        raise ServiceError(problem, code="models-of-a-search", search=description.search)
    if description.model_uri is not None:
        return settings.models_dir / job_id / storage.fingerprint(description.model_uri, settings)
    if description.is_running:
        problem = f"job {job_id} is still {description.status}"
        raise ServiceError(problem, code="model-not-yet", job_id=job_id)
    if description.checkpoint_step is not None:
        return settings.models_dir / job_id / step_directory_name(description.checkpoint_step)
    problem = f"job {job_id} is {description.status}"
    if description.failure_reason:
        problem += f": {description.failure_reason}"
    problem += "; it left neither a model nor a checkpoint"
    raise ServiceError(problem, code="no-model-left", job_id=job_id)


def step_directory_name(step: int) -> str:
    """Return the name of the directory of a checkpoint's model."""
    return f"step-{step:08d}"


def keep_model(description: JobDescription, settings: Settings) -> Path:
    """Download the model of a job that will be deleted, and return its directory.

    The model is checked, since it will be the only copy.
    """
    from sm_nanogpt.launcher.models.load import check_sums

    directory = download(description, target_directory(description, settings), settings)
    try:
        check_sums(directory)
    except (FormatError, OSError) as error:
        problem = f"{directory}: {error}; delete this directory, to fetch it again"
        raise ServiceError(problem) from None
    return directory


def download(
    description: JobDescription,
    directory: Path,
    settings: Settings,
    entry_point: Path | None = None,
) -> Path:
    """Download a job's model, unless `directory` exists; return its directory.

    If the newest checkpoint is damaged, that is the directory of an earlier checkpoint.
    """
    models_dir = settings.models_dir
    if not directory.exists():
        with (
            storage.errors_about(str(models_dir)),
            byte_progress("fetch") as progress,
            scratch(models_dir, ".fetch-") as parent,  # on the file system of the result
        ):
            model = parent / "model"
            if description.model_uri is not None:
                (archive,) = storage.fetch(
                    description.model_uri, parent / "tar", progress, settings
                )
                extract(archive, model, description.model_uri)
            else:
                step = export(description, model, settings, progress, entry_point)
                directory = directory.with_name(step_directory_name(step))
            move_model(model, directory)
    if description.model_uri is None:
        state = f"job {description.job_id} is {description.status}"
        logger.warning(f"{state}; this is its last checkpoint, {directory.name}")
    return directory


def move_model(model: Path, directory: Path) -> None:
    """Move a complete model to its directory, unless another process was first."""
    directory.parent.mkdir(exist_ok=True)
    try:
        model.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise


def export(
    description: JobDescription,
    model_dir: Path,
    settings: Settings,
    progress: Progress,
    entry_point: Path | None,
) -> int:
    """Write the newest intact checkpoint of a job as a model directory; return its step.

    Raises ServiceError if no checkpoint is intact, or its training folder cannot export it.
    """
    from sm_nanogpt.launcher.models.load import export_checkpoint, read_checkpoint

    uri = str(description.checkpoint_uri)
    problem = "no checkpoint is there"
    names_by_step = checkpoints_among(storage.list_files(uri, settings))
    for step in sorted(names_by_step, reverse=True):
        name = names_by_step[step]
        directory = model_dir.with_name(name)
        storage.fetch(storage.join(uri, name), directory, progress, settings)
        try:
            checkpoint = read_checkpoint(directory)
        except TrainingError as error:
            problem = str(error)
            continue
        try:
            return export_checkpoint(checkpoint, model_dir, settings, entry_point)
        except TrainingError as error:
            problem = str(error)
            break  # the folder would also fail for an earlier checkpoint
    raise ServiceError(f"{uri}: {problem}")


def extract(archive: Path, target: Path, uri: str) -> None:
    """Unpack an archive of regular files and directories, which was fetched from `uri`.

    Raises ServiceError if it is damaged, or has absolute paths, `..`, links, devices, too many or
    too deep members, or far more bytes than its size allows.
    """
    max_bytes = MAX_UNPACK_RATIO * archive.stat().st_size + FREE_UNPACK_BYTES
    target.mkdir()
    try:
        with (
            gzip.open(archive) as file,
            BoundedStream(file, max_bytes) as stream,
            tarfile.open(fileobj=stream, mode="r|") as tar,
        ):
            for index, member in enumerate(tar):
                check_member(member, index)
                path = target / member.name
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None
                with path.open("xb") as out:
                    shutil.copyfileobj(source, out)
            while stream.read(CHUNK_BYTES):  # gzip compares the checksum at the end
                pass
    # FileExistsError: two members have one name. NotADirectoryError: a member lies below a file.
    except (*TAR_ERRORS, RecursionError, FileExistsError, NotADirectoryError) as error:
        raise ServiceError(f"{uri} is damaged, or no model: {error}") from None


class BoundedStream(io.RawIOBase):
    """An unpacked gzip file. To read more than max_bytes raises ValueError."""

    def __init__(self, file: gzip.GzipFile, max_bytes: int) -> None:
        self.file = file
        self.bytes_left = max_bytes

    def read(self, n: int = -1) -> bytes:
        content = self.file.read(n)  # tarfile reads 10 kB at a time
        self.bytes_left -= len(content)
        if self.bytes_left < 0:
            raise ValueError(f"it unpacks to over {MAX_UNPACK_RATIO} times its size")
        return content


def check_member(member: tarfile.TarInfo, index: int) -> None:
    """Raise ValueError if a member of an archive, with this index there, cannot be of a model."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name or ":" in member.name:
        raise ValueError(f"{member.name!r} would lie outside of the model")
    if member.issym() or member.islnk():
        raise ValueError(f"{member.name!r} is a link")
    # The holes of a sparse file take no space in the archive.
    if member.issparse() or member.size < 0 or not (member.isreg() or member.isdir()):
        raise ValueError(f"{member.name!r} is not a regular file")
    if index >= MAX_MEMBERS or len(path.parts) > MAX_DEPTH:
        raise ValueError("too many files, or too deep directories")
