"""A job by its id, wherever it runs: describe, price, follow, stop, wait for and delete it."""

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
from sm_nanogpt.launcher.sagemaker import cost
from sm_nanogpt.launcher.sagemaker.cost import Prices
from sm_nanogpt.launcher.settings import Settings, load_settings

logger = logging.getLogger(__name__)

FileSizes = Mapping[str, Mapping[str, int]]  # bytes by file, by directory or prefix


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
        """The backend that knows the job, and its description; attempts as for `finding.find`."""
        return find(self.id, self.settings, attempts)

    def describe(self) -> JobDescription:
        """The state of the job now, with its cost, name and settings."""
        return with_costs([self.identify()], self.settings)[0]

    def identify(self, attempts: int | None = None) -> JobDescription:
        """The state of the job now, with its name and settings.

        SageMaker tells these only in lists; they are in the job's record.
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
        """The lines that the script printed, or the last ones; with follow, until the job ends.

        To follow lasts through a network outage. With raw, include the lines of the SageMaker
        toolkit.
        """
        if follow and tail is not None:
            raise InputError("cannot be combined with follow", field="tail", value=tail)
        return self.find()[0].logs(self.id, follow, raw, tail)

    def curve(self, with_samples: bool = False) -> Curve:
        """The training curve so far, with the samples of the log if asked."""
        backend = self.find()[0]
        rows, source = backend.curve(self.id)
        samples = samples_of_log(backend.logs(self.id, follow=False)) if with_samples else {}
        return Curve(self.id, source, rows, samples)

    def stop(self, *, confirmed: bool = False) -> JobDescription:
        """Ask the running job to stop, and return at once with its state before.

        A local job first writes a checkpoint. SageMaker kills a job within two minutes and does not
        signal it, so its last periodic checkpoint remains. Raises NotYours if the job is somebody
        else's, unless confirmed.
        """
        backend, description = self.find()
        if not description.is_running:
            raise ServiceError(f"job {description.named} has already ended: {description.status}")
        if not confirmed:
            check_yours(description, self.settings)
        backend.stop(self.id)
        return description

    def wait_for_end(self, timeout: float | None = None) -> JobDescription:
        """The state in which the job has ended, however that was; timeout is in seconds.

        Raises ServiceError if it still runs then.
        """
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        backend, description = self.find()
        is_pending = False
        while description.is_running:
            if description.secondary_status == "Pending" and not is_pending:
                is_pending = True
                description.log_pending()
            if time.monotonic() > deadline:
                still = f"job {self.id} is still {description.status}"
                raise ServiceError(f"{still} after {timeout} s")
            time.sleep(backend.poll_seconds)
            ask = partial(backend.describe, self.id)
            if backend.is_remote:  # also through an outage
                ask = partial(
                    patiently,
                    ask,
                    job_id=self.id,
                    code="job-goes-on",
                    bills=backend.bills,
                    deadline=deadline,
                )
            description = ask() or self.find()[1]  # which says that it is gone
        return description

    # -- its files --------------------------------------------------------------------------------

    @property
    def models_uri(self) -> str:
        """The directory of its fetched models."""
        return storage.to_uri(self.settings.models_dir / self.id)

    def files(self) -> tuple[JobDescription, FileSizes]:
        """The ended job, and its files, of which those of its fetched models come first.

        Raises ServiceError if they cannot be deleted, for example since it runs.
        """
        backend, description = self.find()
        if description.is_running:
            raise still_runs(description, self.settings)
        locations = [self.models_uri, *backend.directories(self.id)]
        problem = ""
        if description.has_open_pool(time.time()):  # AWS would refuse, after the files are gone
            limit = description.keep_alive
            problem = f"job {self.id} has a warm pool for up to {limit} s after its end"
            problem += "; delete it then"
        for path in filter(None, map(storage.local_path, locations)):
            if path.is_symlink():  # it may lead to files that are not ours
                problem = f"{path} is a link; remove it by hand"
        if problem:
            raise ServiceError(problem)
        return description, {uri: storage.list_files(uri, self.settings) for uri in locations}

    def remove(self, uris: Iterable[str]) -> None:
        """Delete these directories of the job, and then the job.

        After an interruption the job is still there, and can be deleted again.
        """
        backend = self.find()[0]
        for uri in uris:
            storage.remove(uri, self.settings)
        backend.forget(self.id)


def with_costs(jobs: Sequence[JobDescription], settings: Settings) -> list[JobDescription]:
    """The descriptions with the cost of each job that is billed and whose price is known."""
    instances = {job.instance for job in jobs if job.is_placed}
    billed = sorted(instance for instance in instances if backend_class(instance).bills)
    if not billed:
        return list(jobs)
    prices = Prices(settings)
    price_of = {instance: prices.of(instance) for instance in billed}
    now = time.time()
    priced = list[JobDescription]()
    for job in jobs:
        price = price_of.get(job.instance)
        if price is not None:
            job = replace(job, cost=cost.cost_of(job, price, now), price=price)
        priced.append(job)
    unknown = [instance for instance, price in price_of.items() if price is None]
    if unknown:
        logger.info(f"the price of {' and '.join(unknown)} in {prices.region} is unknown")
    return priced


class NotYours(InputError):
    """Somebody else owns a job that would be stopped or deleted: `owner`, None if not known."""


def other_owner(job: JobDescription, settings: Settings) -> str:
    """Who owns a job, if that is not the caller; '' for the caller's jobs and those of this
    machine."""
    return backend_for(job.instance, settings).other_owner(job)


def still_runs(job: JobDescription, settings: Settings) -> ServiceError:
    """The error for a running job that has to end first, with its owner if that is another user."""
    problem = f"job {job.job_id} is {job.status}"
    if owner := other_owner(job, settings):
        problem += f", and belongs to {owner}"
    return ServiceError(problem, "job-is-running", job_id=job.job_id)


def check_yours(job: JobDescription, settings: Settings) -> None:
    """Raise NotYours if somebody else owns a job."""
    if owner := other_owner(job, settings):
        raise NotYours(f"job {job.named} belongs to {owner}", "not-yours", owner=owner)
