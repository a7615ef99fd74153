"""Describe, price, follow, stop, wait for and delete jobs, wherever they run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from launcher.aws import patiently
from launcher.backends import backend_class, backend_for
from launcher.curve import Curve, samples_of_log
from launcher.errors import InputError, ServiceError
from launcher.files import storage
from launcher.finding import find
from launcher.job import JobDescription
from launcher.sagemaker import cost
from launcher.sagemaker.cost import Prices
from launcher.settings import Settings, load_settings

logger = logging.getLogger(__name__)
Places = dict[str, dict[str, int]]  # bytes by file, by directory or prefix


def describe(job_id: str, settings: Settings | None = None) -> JobDescription:
    """Describe a job, with its cost, name and settings."""
    settings = settings or load_settings()
    return with_costs([identify(job_id, settings)], settings)[0]


def identify(job_id: str, settings: Settings, attempts: int | None = None) -> JobDescription:
    """Describe a job, with its name and settings; attempts as for `find`.

    SageMaker tells these only in lists; they are in the job's record.
    """
    backend, description = find(job_id, settings, attempts)
    if description.summary is not None:
        return description
    try:
        job = backend.job(job_id)
    except ServiceError as error:
        logger.info(f"name and settings are not known: {error}")
        return description
    return replace(description, name=job.name, summary=job.summary, expected=job.expected)


def with_costs(found: Sequence[JobDescription], settings: Settings) -> list[JobDescription]:
    """The descriptions with the cost of each job that is billed and whose price is known."""
    placed = {job.instance for job in found if job.is_placed}
    placed = {instance for instance in placed if backend_class(instance).bills}
    if not placed:
        return list(found)
    prices = Prices(settings)
    known = {instance: prices.of(instance) for instance in sorted(placed)}
    priced, now = list[JobDescription](), time.time()
    for each in found:
        if (price := known.get(each.instance)) is not None:
            each = replace(each, cost=cost.cost_of(each, price, now), price=price)
        priced.append(each)
    if unknown := [name for name, price in known.items() if price is None]:
        logger.info(f"the price of {' and '.join(unknown)} in {prices.region} is unknown")
    return priced


def logs(
    job_id: str,
    follow: bool = False,
    settings: Settings | None = None,
    raw: bool = False,
    tail: int | None = None,
) -> Iterator[str]:
    """Yield the lines that a job's training script printed.

    With follow, wait for new lines until the job ends, also through a network outage. With raw,
    include the lines of the SageMaker toolkit. With tail, yield only so many of the last lines.
    """
    if follow and tail is not None:
        raise InputError("cannot be combined with follow", field="tail", value=tail)
    return find(job_id, settings or load_settings())[0].logs(job_id, follow, raw, tail)


def metrics(job_id: str, settings: Settings | None = None, with_samples: bool = False) -> Curve:
    """The training curve of a job so far, with the samples of its log if asked."""
    backend = find(job_id, settings or load_settings())[0]
    rows, source = backend.curve(job_id)
    samples = samples_of_log(backend.logs(job_id, follow=False)) if with_samples else {}
    return Curve(job_id, source, rows, samples)


class NotYours(InputError):
    """Somebody else owns a job that would be stopped or deleted: `owner`, None if not known."""


def other_owner(job: JobDescription, settings: Settings) -> str:
    """Who owns a job, if that is not the caller; '' for the caller's jobs and those of this
    machine."""
    return backend_for(job.instance, settings).other_owner(job)


def check_yours(job: JobDescription, settings: Settings) -> None:
    """Raise NotYours if somebody else owns a job."""
    if owner := other_owner(job, settings):
        raise NotYours(f"job {job.named} belongs to {owner}", "not-yours", owner=owner)


def stop(job_id: str, settings: Settings | None = None, confirmed: bool = False) -> JobDescription:
    """Ask a running job to stop, and return at once with its description.

    A local job first writes a checkpoint. SageMaker kills a job within two minutes and does not
    signal it, so its last periodic checkpoint remains. Raises NotYours if the job is somebody
    else's, unless confirmed.
    """
    settings = settings or load_settings()
    backend, description = find(job_id, settings)
    if not description.is_running:
        raise ServiceError(f"job {description.named} has already ended: {description.status}")
    if not confirmed:
        check_yours(description, settings)
    backend.stop(job_id)
    return description


def wait(
    job_id: str, settings: Settings | None = None, timeout: float | None = None
) -> JobDescription:
    deadline = time.monotonic() + (math.inf if timeout is None else timeout)
    settings = settings or load_settings()
    backend, description = find(job_id, settings)
    pending = False
    while description.is_running:
        if description.secondary_status == "Pending" and not pending:
            pending = True
            description.log_pending()
        if time.monotonic() > deadline:
            raise ServiceError(f"job {job_id} is still {description.status} after {timeout} s")
        time.sleep(backend.poll_seconds)
        ask = partial(backend.describe, job_id)
        if backend.is_remote:  # also through an outage
            ask = partial(patiently, ask, job_id=job_id, code="job-goes-on", deadline=deadline)
        description = ask() or find(job_id, settings)[1]  # which says that it is gone
    return description


def places_of(job_id: str, settings: Settings) -> tuple[JobDescription, Places]:
    """A job, and its files with their bytes by place, its fetched models first."""
    backend, description = find(job_id, settings)
    if description.is_running:
        raise ServiceError(f"job {job_id} is {description.status}", "job-is-running", job_id=job_id)
    locations = [storage.to_uri(settings.models_dir / job_id), *backend.directories(job_id)]
    problem = ""
    if description.has_open_pool(time.time()):  # AWS would refuse, after the files are gone
        limit = description.keep_alive
        problem = f"job {job_id} has a warm pool for up to {limit} s after its end; delete it then"
    for path in filter(None, map(storage.local_path, locations)):
        if path.is_symlink():  # it may lead to files that are not ours
            problem = f"{path} is a link; remove it by hand"
    if problem:
        raise ServiceError(problem)
    return description, {uri: storage.list_files(uri, settings) for uri in locations}


def delete(job_id: str, places: Iterable[str], settings: Settings) -> None:
    """Delete the files of a job in these places, and then the job.

    After an interruption the job is still there, and can be deleted again.
    """
    backend = find(job_id, settings)[0]
    for place in places:
        storage.remove(place, settings)
    backend.forget(job_id)
