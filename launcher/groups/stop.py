"""Let only one command run a sweep, and let any machine stop it."""

from __future__ import annotations

from typing import IO

from sm_nanogpt.launcher.backends import Backend, backend_for
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.files import locks, storage
from sm_nanogpt.launcher.groups.find import JobGroup
from sm_nanogpt.launcher.launching.names import ledger_path
from sm_nanogpt.launcher.locations import is_on_s3
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.tracking import check_yours


def lock_sweep(sweep_id: str, settings: Settings) -> IO[str]:
    """Open a file that, until it is closed, keeps other commands here from running a sweep.

    Two commands would start each job twice. Raises ServiceError if another command runs the sweep.
    """
    path = ledger_path(sweep_id, settings).with_suffix(".running")
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w")
    if not locks.lock(file, wait=False):
        problem = f"another command runs sweep {sweep_id}"
        raise ServiceError(problem, code="sweep-is-running", group=sweep_id)
    return file


def stop_mark(sweep_id: str, job_directory: str, settings: Settings) -> str:
    """The path or URI of the file that says whether a sweep may start jobs.

    The sweep may start jobs while the file holds `run`. Whoever deletes the sweep deletes the file.
    Any machine may stop or delete a sweep on SageMaker, so its file is in the store. job_directory:
    the directory or S3 prefix of one of its jobs.
    """
    if not is_on_s3(job_directory):
        return str(ledger_path(sweep_id, settings).with_suffix(".stop"))
    parent = job_directory.rstrip("/").rpartition("/")[0]
    return storage.join(parent, sweep_id, "stop")


def write_mark(mark: str, settings: Settings, *, may_run: bool) -> None:
    storage.write_bytes(mark, b"run" if may_run else b"stop", settings)


def may_run(mark: str, settings: Settings) -> bool:
    """False if somebody stopped or deleted the sweep."""
    return storage.read_bytes(mark, settings) == b"run"


def stop_group(
    group: JobGroup, settings: Settings, confirmed: bool = False
) -> list[JobDescription]:
    """Stop the running jobs of a group, and return them. A sweep starts no more jobs.

    If the command that runs the sweep starts a job meanwhile, it stops it. Raises NotYours if the
    jobs are somebody else's, unless confirmed.
    """
    newest = group.newest
    if not newest:
        return []
    if not confirmed:  # this machine knows the owner of the newest job before AWS does
        check_yours(max(newest, key=lambda job: job.launched), settings)
    backend = backend_for(newest[0].instance, settings)
    stopped = []
    try:
        for job in newest:
            if not job.is_running:
                continue
            current = backend.describe(job.job_id)
            if current is None or not current.is_running:
                continue
            stopped.append(current)
            if current.status == "InProgress":  # a second stop would not wait for a checkpoint
                backend.stop(current.job_id)
    finally:
        if not group.is_search:
            write_mark(mark_of(group, backend, settings), settings, may_run=False)
    return stopped


def mark_of(group: JobGroup, backend: Backend, settings: Settings) -> str:
    """The mark of a sweep that has jobs."""
    directories = backend.directories(group.newest[0].job_id)
    return stop_mark(group.id, directories[0], settings)
