"""Deletes jobs with their files on this machine and on S3.

Called by the command `delete`.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher import storage
from launcher.errors import ServiceError
from launcher.job import JobDescription
from launcher.settings import Settings
from launcher.tracking import find


@dataclass(frozen=True)
class Place:
    """A directory or prefix, and the number and bytes of the files below it."""

    uri: str
    files: int
    size: int


def measured(uri: str, settings: Settings) -> Place:
    sizes = storage.list_files(uri, settings).values()
    return Place(uri, len(sizes), sum(sizes))


def places_of(job_id: str, settings: Settings) -> tuple[JobDescription, list[Place]]:
    """A job, and where its files are, its fetched models first.

    Raises:
        ServiceError: there is no such job, it cannot be deleted yet, or a link is in its place.
    """
    backend, description = find(job_id, settings)
    if description.is_running:
        raise ServiceError(
            f"job {job_id} is {description.status}; stop it first: `sm-nanogpt stop {job_id}`"
        )
    if description.has_open_pool:  # AWS would refuse to delete the job, after its files are gone
        raise ServiceError(
            f"job {job_id} still has its warm pool, which ends up to {description.keep_alive} s"
            " after the job; delete the job then"
        )
    locations = [storage.to_uri(settings.models_dir / job_id), *backend.places(job_id)]
    for path in filter(None, map(storage.local_path, locations)):
        if path.is_symlink():  # it may lead to files that are not ours
            raise ServiceError(f"{path} is a link; remove it by hand")
    return description, [measured(uri, settings) for uri in locations]


def delete(job_id: str, places: list[Place], settings: Settings) -> None:
    """Delete these files of a job, and then the job.

    After an interruption the job is still there, and can be deleted again.
    """
    backend, _ = find(job_id, settings)
    for place in places:
        storage.remove(place.uri, settings)
    backend.forget(job_id)
