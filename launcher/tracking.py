"""Jobs, wherever they run: found by their id, listed, priced, followed, stopped, waited for."""

from __future__ import annotations

import logging
import math
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from launcher.aws import money
from launcher.aws.instances import has_local_storage
from launcher.aws.prices import Price, Prices
from launcher.aws.session import CAPACITY, aws_session, check_region, patiently
from launcher.backends import Backend
from launcher.backends.local import LocalBackend
from launcher.backends.sagemaker import SageMakerBackend
from launcher.errors import InputError, ServiceError
from launcher.job import JOB_ID, JobDescription, UnreadableJob
from launcher.settings import Settings, load_settings

logger = logging.getLogger(__name__)

FULL_ID = re.compile(r"sm-nanogpt-\d{8}-\d{6}-[0-9a-f]{6}")  # as submission.new_job_id makes it

REMEDIES = {
    "CapacityError": CAPACITY,
    "Data download failed": "the execution role has to be allowed to read the store",
    "MaxRuntimeExceeded": "--max-run gives more time, a larger --max-cost where that set the limit",
    "MaxWaitTimeExceeded": "--max-wait gives more time, --on-demand waits for no spot capacity",
}


def remedies(instance: str) -> dict[str, str]:
    """REMEDIES, and what to do about a full disk, which depends on whose it is."""
    if instance == "local":
        disk = "delete old jobs, or SM_NANOGPT_HOME names a place with more room"
    elif has_local_storage(instance):
        disk = "a larger --instance has more disk"
    else:
        disk = "--volume-size gives more disk"
    return {**REMEDIES, "No space left on device": disk}


def all_backends(settings: Settings) -> Iterator[Backend]:
    """The places for jobs, this machine first; the next is not touched before it is asked for."""
    yield LocalBackend(settings)
    if settings.reaches_aws:
        yield SageMakerBackend(settings)


def backend_for(instance: str, settings: Settings) -> Backend:
    """The place that runs such an instance."""
    return LocalBackend(settings) if instance == "local" else SageMakerBackend(settings)


def find(job_id: str, settings: Settings) -> tuple[Backend, JobDescription]:
    """The place of a job, and the job as it stands.

    Raises:
        InputError: it is none of this machine's, and SageMaker cannot be asked with these settings.
        ServiceError: no place knows the id.
    """
    known = f"`{settings.command('jobs')}` lists those there are"
    if not JOB_ID.fullmatch(job_id):
        raise ServiceError(
            f"there is no job {job_id!r}, as an id is of letters, digits and dashes, 63 at most:"
            f" {known}"
        )
    asked: list[str] = []
    try:
        for backend in all_backends(settings):
            if (description := backend.describe(job_id)) is not None:
                return backend, description
            asked.append(backend.place)
    except InputError as error:
        raise InputError(
            f"there is no job {job_id!r} on this machine, and SageMaker cannot be asked: {error}"
        ) from None
    where = " or ".join(asked)
    if not settings.reaches_aws:
        where += " (SageMaker was not asked; --region or AWS_REGION names where it is)"
    raise ServiceError(f"there is no job {job_id!r} {where}: {known}")


def full_id(word: str, settings: Settings) -> str:
    """The id of the job that a word means: an id, its unique beginning or end, or `latest`.

    A word that means none is given back as it is.

    Raises:
        InputError: it means several.
    """
    if FULL_ID.fullmatch(word) or not JOB_ID.fullmatch(word):
        return word
    described, _, _ = list_jobs(settings)
    found = [description.job_id for description in described]
    if word == "latest":
        return found[0] if found else word
    matches = [job_id for job_id in found if job_id.startswith(word) or job_id.endswith(word)]
    if word in matches or not matches:
        return word
    if len(matches) > 1:
        raise InputError(
            f"{word!r} means {len(matches)} jobs: {', '.join(matches[:3])}"
            f"{' and more' * (len(matches) > 3)}; give more of the id"
        )
    return matches[0]


def describe(job_id: str, settings: Settings | None = None) -> JobDescription:
    """A job as it stands. Raises ServiceError when there is no such job."""
    return find(job_id, settings or load_settings())[1]


def jobs(settings: Settings | None = None) -> list[JobDescription]:
    """All jobs, newest first. Warns if SageMaker or the record of a job cannot be read."""
    found, unreadable, failure = list_jobs(settings or load_settings())
    for job in unreadable:
        warnings.warn(f"job {job.job_id} is left out: {job.error}", stacklevel=2)
    if failure is not None:
        warnings.warn(f"not all jobs are listed: {failure}", stacklevel=2)
    return found


def list_jobs(
    settings: Settings,
) -> tuple[list[JobDescription], list[UnreadableJob], InputError | ServiceError | None]:
    """The jobs, newest first, those that cannot be read, and why a backend did not answer."""
    found: list[JobDescription] = []
    unreadable: list[UnreadableJob] = []
    failure: InputError | ServiceError | None = None
    try:
        for backend in all_backends(settings):
            for job in backend.list():
                if isinstance(job, UnreadableJob):
                    unreadable.append(job)
                else:
                    found.append(job)
    except InputError as error:  # which says nothing of SageMaker, as that no region is known
        failure = InputError(f"{error}; so jobs on SageMaker are missing from the list")
    except ServiceError as error:
        failure = error
    found.sort(key=lambda description: description.created, reverse=True)
    return found, unreadable, failure


def with_costs(found: Sequence[JobDescription], settings: Settings) -> list[JobDescription]:
    """The descriptions with what each job on SageMaker has cost, as far as prices are known."""
    if all(description.instance == "local" for description in found):
        return list(found)
    session = aws_session(settings)
    prices = Prices(settings, check_region(session), session)
    known: dict[str, Price | None] = {"local": None}
    told = []
    for description in found:
        if description.is_placed and description.instance not in known:
            known[description.instance] = prices.of(description.instance)
        price = known.get(description.instance)
        if price is not None:
            cost = money.cost_of(description, price, time.time())
            description = replace(description, cost=cost, price=price)
        told.append(description)
    if prices.trouble:
        logger.info(prices.trouble)
    unknown = sorted(name for name, price in known.items() if price is None and name != "local")
    if unknown:
        logger.info(f"what {' and '.join(unknown)} costs in {prices.region} is not known here")
    return told


def logs(
    job_id: str,
    follow: bool = False,
    settings: Settings | None = None,
    raw: bool = False,
) -> Iterator[str]:
    """What the script of a job printed, by lines; raw adds what its container printed besides.

    With follow, to the end of the job; an outage of the network is reported and waited out.

    Raises:
        ServiceError: there is no such job.
    """
    backend, _ = find(job_id, settings or load_settings())
    return backend.logs(job_id, follow, raw)


def stop(job_id: str, settings: Settings | None = None) -> JobDescription:
    """Asks a running job to stop, and returns at once.

    A local job writes a checkpoint first; SageMaker ends a job in two minutes without telling it,
    so that the newest checkpoint of its timer remains.

    Raises:
        ServiceError: there is no such job, or it has ended.
    """
    backend, description = find(job_id, settings or load_settings())
    if not description.is_running:
        raise ServiceError(f"job {job_id} has ended already: {description.status}")
    backend.stop(job_id)
    return description


def wait(
    job_id: str,
    settings: Settings | None = None,
    timeout: float | None = None,
) -> JobDescription:
    """Waits for a job's end and returns what became of it; tells of an outage of the network.

    Raises:
        ServiceError: there is no such job, or no longer, it still runs after `timeout` seconds, or
            SageMaker could not be asked for minutes.
    """
    deadline = time.monotonic() + (math.inf if timeout is None else timeout)
    settings = settings or load_settings()
    backend, description = find(job_id, settings)
    while description.is_running:
        if time.monotonic() > deadline:
            raise ServiceError(f"job {job_id} is still {description.status} after {timeout} s")
        time.sleep(backend.poll_seconds)
        ask = partial(backend.describe, job_id)
        local = description.instance == "local"
        again = settings.command(f"logs {job_id} --follow")
        now = ask() if local else patiently(ask, again, deadline)
        if now is None:
            raise ServiceError(
                f"job {job_id} was deleted before its end: `{settings.command('jobs')}` lists those"
                " there are"
            )
        description = now
    return description


def explain(description: JobDescription, settings: Settings) -> str:
    """What became of a job that has ended, why, and what to do next, in one line."""
    reason = reason_of(description)
    told = f"job {description.job_id} {description.status.lower()}"
    return f"{told}{f': {reason}' if reason else ''}; {next_step(description, settings)}"


def reason_of(description: JobDescription) -> str | None:
    """Why a job ended as it did, with the remedy where there is one."""
    reason = description.failure_reason
    for sign, remedy in remedies(description.instance).items():
        if reason and sign in reason:
            reason = f"{reason} ({remedy})"
    return reason


def next_step(description: JobDescription, settings: Settings) -> str:
    """The command that one is likely to want for a job that has ended."""
    job_id = description.job_id
    if description.status == "Completed":
        return f"next: {settings.command(f'fetch-and-sample {job_id}')}"
    if description.checkpoint_uri is not None:
        resume = settings.command(f"launch --resume {job_id}")
        return f"go on from its checkpoint of step {description.checkpoint_step}: `{resume}`"
    return f"no checkpoint is left; its log: `{settings.command(f'logs {job_id}')}`"
