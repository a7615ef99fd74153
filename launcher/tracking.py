"""Describe, price, follow, stop, wait for, and delete a job by its id, wherever it runs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from sm_nanogpt.launcher.aws import patiently
from sm_nanogpt.launcher.backends import Backend, backend_class, backend_for
from sm_nanogpt.launcher.curve import Curve, samples_of_log
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.finding import find
from sm_nanogpt.launcher.sagemaker.cost import Prices, cost_of, find_prices
from sm_nanogpt.launcher.settings import Settings, load_settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobFiles:
    """The files of a job that has ended."""

    job: JobDescription
    # The bytes of each file, by the URI of its directory or prefix, and by its path below that.
    sizes: Mapping[str, Mapping[str, int]]

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(sum(files.values()) for files in self.sizes.values())


@dataclass(unsafe_hash=True)
class TrackedJob:
    """A job, by its full id, on this machine or on SageMaker, while it runs and afterwards.

    All methods raise Missing if there is no such job, and ServiceError if a service fails.
    """

    id: str
    settings: Settings = field(default_factory=load_settings, repr=False, compare=False)

    def __str__(self) -> str:
        return self.id

    def find(self, attempts: int | None = None) -> tuple[Backend, JobDescription]:
        """The backend that knows the job, and its description. attempts: as for `finding.find`."""
        return find(self.id, self.settings, attempts)

    def describe(self) -> JobDescription:
        """The state of the job now, with its cost, name, and settings."""
        return with_costs([self.identify()], self.settings)[0]

    def identify(self, attempts: int | None = None) -> JobDescription:
        """The state of the job now, with its name and settings.

        SageMaker has these only in lists of jobs, so they are read from the job's record.
        """
        backend, description = self.find(attempts)
        if description.summary is not None:
            return description
        try:
            job = backend.job(self.id)
        except ServiceError as error:
            logger.info(f"name and settings are not known: {error}")
            return description
        return replace(
            description,
            name=job.name,
            summary=job.summary,
            expected=job.expected,
            page_limit=job.page_limit,
        )

    def logs(
        self, follow: bool = False, tail: int | None = None, raw: bool = False
    ) -> Iterator[str]:
        """Yield the lines that the script printed, or the last `tail` lines.

        follow: wait for new lines until the job ends, also during a network outage. raw: include
        the lines of the SageMaker toolkit.
        """
        if follow and tail is not None:
            raise InputError("cannot be combined with follow", field="tail", value=tail)
        backend, _ = self.find()
        return backend.logs(self.id, follow, raw, tail)

    def curve(self, with_samples: bool = False) -> Curve:
        """The training curve so far. with_samples: with the samples of the log."""
        backend, _ = self.find()
        rows, source = backend.curve(self.id)
        samples = {}
        if with_samples:
            samples = samples_of_log(backend.logs(self.id, follow=False))
        return Curve(self.id, source, rows, samples)

    def stop(self, *, confirmed: bool = False) -> JobDescription:
        """Ask the running job to stop, and return its state before, without waiting.

        A local job first writes a checkpoint. SageMaker kills a job within two minutes and does not
        signal it, so only its last periodic checkpoint remains. Raises NotYours if the job is
        somebody else's, unless confirmed.
        """
        backend, description = self.find()
        if not description.is_running:
            raise ServiceError(f"job {description.named} has already ended: {description.status}")
        if not confirmed:
            check_yours(description, self.settings)
        backend.stop(self.id)
        return description

    def wait_for_end(self, timeout: float | None = None) -> JobDescription:
        """Wait until the job ends, and return its state. timeout: in seconds.

        Raises ServiceError if the job still runs after the timeout.
        """
        deadline = math.inf
        if timeout is not None:
            deadline = time.monotonic() + timeout
        backend, description = self.find()
        is_pending = False
        while description.is_running:
            if description.secondary_status == "Pending" and not is_pending:
                is_pending = True
                description.log_pending()
            if time.monotonic() > deadline:
                problem = f"job {self.id} is still {description.status} after {timeout} s"
                raise ServiceError(problem)
            time.sleep(backend.poll_seconds)
            description = self.poll(backend, deadline)
        return description

    def poll(self, backend: Backend, deadline: float) -> JobDescription:
        """The state of the job now. During an outage, a remote backend is asked until the deadline.

        deadline is in time.monotonic() seconds.
        """
        describe = partial(backend.describe, self.id)
        if backend.is_remote:
            description = patiently(
                describe,
                job_id=self.id,
                code="job-goes-on",
                bills=backend.bills,
                deadline=deadline,
            )
        else:
            description = describe()
        if description is None:
            _, description = self.find()  # raises Missing, with a better message
        return description

    # -- its files --------------------------------------------------------------------------------

    def files(self, keep_model: bool = False) -> JobFiles:
        """The files to delete with the job. The files of its fetched models come first.

        keep_model: without the files of its fetched models. Raises ServiceError if the job cannot
        be deleted, for example because it runs.
        """
        backend, description = self.find()
        if description.is_running:
            raise still_runs_error(description, self.settings)
        locations = list(backend.directories(self.id))
        if not keep_model:
            locations.insert(0, storage.to_uri(self.settings.models_dir / self.id))
        if description.has_open_pool(time.time()):  # AWS would refuse after the files are deleted
            pool = f"a warm pool for up to {description.keep_alive} s after its end"
            raise ServiceError(f"job {self.id} has {pool}; delete it then")
        for location in locations:
            path = storage.local_path(location)
            if path is not None and path.is_symlink():  # it may lead to files that are not ours
                raise ServiceError(f"{path} is a link; remove it by hand")

        sizes = {location: storage.list_files(location, self.settings) for location in locations}
        return JobFiles(description, sizes)

    def remove(self, uris: Iterable[str]) -> None:
        """Delete these directories of the job, and then the job.

        After an interruption, the job still exists, and can be deleted again.
        """
        backend, _ = self.find()
        for uri in uris:
            storage.remove(uri, self.settings)
        backend.forget(self.id)


def with_costs(jobs: Sequence[JobDescription], settings: Settings) -> list[JobDescription]:
    """The descriptions, with the cost of each job that is billed and has a known price."""
    instances = {job.instance for job in jobs if job.is_placed}
    billed = sorted(instance for instance in instances if backend_class(instance).bills)
    if not billed:
        return list(jobs)

    prices = Prices(settings)
    price_of = find_prices(billed, prices)
    unknown = [instance for instance in billed if instance not in price_of]
    if unknown:
        logger.info(f"the price of {' and '.join(unknown)} in {prices.region} is unknown")

    now = time.time()
    priced = []
    for job in jobs:
        price = price_of.get(job.instance)
        if price is not None:
            job = replace(job, cost=cost_of(job, price, now), price=price)
        priced.append(job)
    return priced


class NotYours(InputError):
    """Somebody else, `owner`, owns a job that would be stopped or deleted."""


def other_owner(job: JobDescription, settings: Settings) -> str:
    """Who owns a job, if that is not the caller; '' for the caller's jobs and those of this
    machine."""
    return backend_for(job.instance, settings).other_owner(job)


def still_runs_error(job: JobDescription, settings: Settings) -> ServiceError:
    """The error for a running job that has to end first, with its owner if that is another user."""
    problem = f"job {job.job_id} is {job.status}"
    owner = other_owner(job, settings)
    if owner:
        problem += f", and belongs to {owner}"
    return ServiceError(problem, "job-is-running", job_id=job.job_id)


def check_yours(job: JobDescription, settings: Settings) -> None:
    """Raise NotYours if somebody else owns a job."""
    owner = other_owner(job, settings)
    if owner:
        raise NotYours(f"job {job.named} belongs to {owner}", "not-yours", owner=owner)
