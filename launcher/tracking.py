"""Find a job by its id, wherever it runs; list, price, follow, stop and wait for jobs."""

from __future__ import annotations

import logging
import math
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from launcher.aws import CAPACITY, aws_session, check_region, patiently
from launcher.curve import Curve, Row, samples_of_log
from launcher.errors import InputError, ServiceError
from launcher.files import storage
from launcher.job import JOB_ID, JobDescription, Price, TrainingJob, UnreadableJob, log_pending
from launcher.local.backend import LocalBackend
from launcher.machines import has_local_storage
from launcher.sagemaker import cost
from launcher.sagemaker.backend import SageMakerBackend
from launcher.sagemaker.cost import Prices
from launcher.settings import Settings, load_settings

logger = logging.getLogger(__name__)

# As launch.new_job_id makes it, with the numbers of a sweep's jobs.
FULL_ID = re.compile(r"sm-nanogpt-(\d{8}-\d{6})-[0-9a-f]{6}(-\d+(-try\d+)?)?")

REMEDIES = {
    "CapacityError": CAPACITY,
    "Data download failed": "allow the execution role to read the store",
    "MaxRuntimeExceeded": "raise --max-run, or --max-cost if that set the limit",
    "MaxWaitTimeExceeded": "raise --max-wait, or use --on-demand",
}


class Backend(Protocol):
    """Runs jobs in one place."""

    @property
    def place(self) -> str:
        """Where that is, as in `job ID is ...`."""

    @property
    def poll_seconds(self) -> float:
        """Seconds between questions about a job that a command waits for."""

    def plan(self, job_id: str, job: TrainingJob) -> tuple[TrainingJob, Any]:
        """Check a job and limit it to its cost ceiling; log what it may cost.

        Returns:
            The job, and what `submit` needs besides.

        Raises:
            InputError: this backend cannot run the job, or the ceiling is too low.
        """

    def submit(self, job_id: str, job: TrainingJob, plan: Any) -> None:
        """Start a job, as `plan` returned it."""

    def describe(self, job_id: str) -> JobDescription | None:
        """Describe a job; None if it is not here."""

    def job(self, job_id: str) -> TrainingJob:
        """The job as it was submitted."""

    def list(self) -> Iterator[JobDescription | UnreadableJob]:
        """Yield the jobs, newest first."""

    def stop(self, job_id: str) -> None:
        """Ask a job to stop, and return at once."""

    def places(self, job_id: str) -> Sequence[str]:
        """URIs of the directories or prefixes with the files of a job."""

    def forget(self, job_id: str) -> None:
        """Remove a job whose files are deleted from the list of jobs."""

    def console_link(self, job_id: str) -> str | None:
        """URL of the job in a web console, if there is one."""

    def curve(self, job_id: str) -> tuple[Sequence[Row], str]:
        """The rows of a job's training curve so far, and where they were read."""

    def logs(
        self, job_id: str, follow: bool, raw: bool = False, tail: int | None = None
    ) -> Iterator[str]:
        """Yield the lines that the script printed; with follow, until the job ends.

        raw includes the lines of the SageMaker toolkit. With tail, only so many of the last.
        """


def remedies(instance: str) -> dict[str, str]:
    """What to do about each failure reason; for a full disk it depends on the instance."""
    if instance == "local":
        disk = "`sm-nanogpt delete` old jobs, or set SM_NANOGPT_HOME to a larger disk"
    elif has_local_storage(instance):
        disk = "use a larger --instance"
    else:
        disk = "raise --volume-size"
    return {**REMEDIES, "No space left on device": disk}


def all_backends(settings: Settings) -> Iterator[Backend]:
    """Yield the backends, this machine first. SageMaker is set up only when it is reached."""
    yield LocalBackend(settings)
    if settings.reaches_aws:
        yield SageMakerBackend(settings)


def backend_for(instance: str, settings: Settings) -> Backend:
    """The backend that runs an instance type."""
    return LocalBackend(settings) if instance == "local" else SageMakerBackend(settings)


def find(job_id: str, settings: Settings) -> tuple[Backend, JobDescription]:
    """The backend of a job, and its description.

    Raises:
        InputError: the job is not on this machine, and SageMaker cannot be asked.
        ServiceError: there is no such job.
    """
    known = "`sm-nanogpt jobs` lists the jobs"
    if not JOB_ID.fullmatch(job_id):
        raise ServiceError(
            f"there is no job {job_id!r}: an id has at most 63 letters, digits and dashes; {known}"
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
    where = " or ".join(asked) + not_asked(settings)
    kept = sorted((settings.models_dir / job_id).glob("*"))  # by `delete --keep-model`
    model = f"; its model is in {kept[0]}" if kept else ""
    raise ServiceError(f"there is no job {job_id!r} {where}: {known}{model}")


def not_asked(settings: Settings) -> str:
    """What a message adds about jobs if SageMaker was left out."""
    hint = " (SageMaker was not asked: set --region or AWS_REGION to ask it)"
    return "" if settings.reaches_aws else hint


def full_id(word: str, settings: Settings) -> str:
    """Resolve a full id, its unique start or end, or `latest`, to the id of a job.

    Returns the word unchanged if no job matches.

    Raises:
        InputError: several jobs match.
        InputError, ServiceError: SageMaker cannot be asked, so another job may match.
        ServiceError: `latest`, and there are no jobs.
    """
    if FULL_ID.fullmatch(word) or not JOB_ID.fullmatch(word):
        return word
    described, unreadable, failure = list_jobs(settings)
    found = [description.job_id for description in described]
    if word in found:
        return word
    if failure is not None:
        raise type(failure)(f"cannot resolve {word!r}: {failure}; give a full job id")
    if word == "latest":
        if not (found or unreadable):
            begin = "`sm-nanogpt launch --instance local` starts one"
            raise ServiceError(f"there are no jobs yet{not_asked(settings)}; {begin}")
        return found[0] if found else word
    matches = [job_id for job_id in found if job_id.startswith(word) or job_id.endswith(word)]
    if not matches:
        return word
    if len(matches) > 1:
        raise InputError(
            f"{word!r} matches {len(matches)} jobs: {', '.join(matches[:3])}"
            f"{' and more' * (len(matches) > 3)}; give more of the id"
        )
    return matches[0]


def describe(job_id: str, settings: Settings | None = None) -> JobDescription:
    """Describe a job, with its cost. Raises ServiceError if there is no such job."""
    settings = settings or load_settings()
    return with_cost(find(job_id, settings)[1], settings)


def jobs(settings: Settings | None = None) -> list[JobDescription]:
    """All jobs with their costs, newest first.

    Warns if SageMaker or the record of a job cannot be read.
    """
    settings = settings or load_settings()
    found, unreadable, failure = list_jobs(settings)
    for job in unreadable:
        warnings.warn(f"job {job.job_id} is left out: {job.error}", stacklevel=2)
    if failure is not None:
        warnings.warn(f"not all jobs are listed: {failure}", stacklevel=2)
    return with_costs(found, settings)


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
    except InputError as error:  # for example no region, which does not mention SageMaker
        failure = InputError(f"{error}; jobs on SageMaker are not listed")
    except ServiceError as error:
        failure = error
    found.sort(key=launched, reverse=True)
    return found, unreadable, failure


def launched(description: JobDescription) -> tuple[str, float]:
    """When a job was launched, to order jobs. By its id first: this machine's clock wrote it,
    whereas SageMaker's clock wrote the time of creation of its jobs."""
    at = time.strftime("%Y%m%d-%H%M%S", time.gmtime(description.created))
    named = FULL_ID.fullmatch(description.job_id)
    return named[1] if named else at, description.created


def with_costs(found: Sequence[JobDescription], settings: Settings) -> list[JobDescription]:
    """The descriptions with the cost of each SageMaker job whose price is known."""
    if all(description.instance == "local" for description in found):
        return list(found)
    session = aws_session(settings)
    prices = Prices(settings, check_region(session), session)
    known: dict[str, Price | None] = {"local": None}
    priced = []
    for description in found:
        if description.is_placed and description.instance not in known:
            known[description.instance] = prices.of(description.instance)
        price = known.get(description.instance)
        if price is not None:
            spent = cost.cost_of(description, price, time.time())
            description = replace(description, cost=spent, price=price)
        priced.append(description)
    if prices.trouble:
        logger.info(prices.trouble)
    unknown = sorted(name for name, price in known.items() if price is None and name != "local")
    if unknown:
        logger.info(f"the price of {' and '.join(unknown)} in {prices.region} is unknown")
    return priced


def with_cost(description: JobDescription, settings: Settings) -> JobDescription:
    return with_costs([description], settings)[0]


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

    Raises:
        InputError: tail and follow are both given.
        ServiceError: there is no such job.
    """
    if follow and tail is not None:
        raise InputError("--tail and --follow cannot be combined")
    backend, _ = find(job_id, settings or load_settings())
    return backend.logs(job_id, follow, raw, tail)


def metrics(job_id: str, settings: Settings | None = None, with_samples: bool = False) -> Curve:
    """The training curve of a job so far, with the samples of its log if asked.

    Raises:
        ServiceError: there is no such job, or what holds its curve cannot be read.
    """
    backend, description = find(job_id, settings or load_settings())
    return curve_of(backend, description.job_id, with_samples)


def curve_of(backend: Backend, job_id: str, with_samples: bool = False) -> Curve:
    """As `metrics`, of a job that runs there. A backend reads no part of a log twice."""
    rows, source = backend.curve(job_id)
    samples = samples_of_log(backend.logs(job_id, follow=False)) if with_samples else {}
    return Curve(job_id, source, rows, samples)


def stop(job_id: str, settings: Settings | None = None) -> JobDescription:
    """Ask a running job to stop, and return at once with its description.

    A local job first writes a checkpoint. SageMaker kills a job within two minutes and does not
    signal it, so its last periodic checkpoint remains.

    Raises:
        ServiceError: there is no such job, or it has ended.
    """
    settings = settings or load_settings()
    backend, description = find(job_id, settings)
    if not description.is_running:
        raise ServiceError(f"job {job_id} has already ended: {description.status}")
    backend.stop(job_id)
    return with_cost(description, settings)


def wait(
    job_id: str, settings: Settings | None = None, timeout: float | None = None
) -> JobDescription:
    """Wait until a job ends and return its description.

    Raises:
        ServiceError: there is no such job, it was deleted, it still runs after `timeout` seconds,
            or SageMaker was unreachable for minutes.
    """
    deadline = time.monotonic() + (math.inf if timeout is None else timeout)
    settings = settings or load_settings()
    backend, description = find(job_id, settings)
    pending = False
    while description.is_running:
        if description.secondary_status == "Pending" and not pending:
            pending = True
            log_pending(description)
        if time.monotonic() > deadline:
            raise ServiceError(f"job {job_id} is still {description.status} after {timeout} s")
        time.sleep(backend.poll_seconds)
        ask = partial(backend.describe, job_id)
        local = description.instance == "local"
        again = f"sm-nanogpt logs {job_id} --follow"
        now = ask() if local else patiently(ask, again, deadline)
        if now is None:
            raise ServiceError(
                f"job {job_id} was deleted before it ended; `sm-nanogpt jobs` lists the jobs"
            )
        description = now
    return with_cost(description, settings)


def reason_of(description: JobDescription) -> str | None:
    """Why a job failed or stopped, with a remedy if one is known."""
    reason = description.failure_reason
    for sign, remedy in remedies(description.instance).items():
        if reason and sign in reason:
            reason = f"{reason} ({remedy})"
    return reason


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
    if description.has_open_pool(
        time.time()
    ):  # AWS would refuse to delete the job, after its files are gone
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
