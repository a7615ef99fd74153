"""List jobs on this machine and on SageMaker, and find the one that a user names.

The caller's jobs are all jobs of this machine, and those on SageMaker whose tag names the caller as
their owner. Names, parts of ids, and `latest` only mean these jobs; a full id means anyone's job. A
job that resumes another one has its name, so a name means the newest job of that name.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

from sm_nanogpt.launcher.aws import Missing
from sm_nanogpt.launcher.backends import (
    Backend,
    all_backends,
    backend_class,
    backend_for,
    configured_backends,
)
from sm_nanogpt.launcher.description import JobDescription, UnreadableJob, end_of
from sm_nanogpt.launcher.errors import InputError, ServiceError, did_you_mean
from sm_nanogpt.launcher.files.models import is_path
from sm_nanogpt.launcher.files.storage import path_of
from sm_nanogpt.launcher.job import FULL_ID, JOB_ID, WORD
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)

SHORTEST_PART = 4  # characters of an id
Part = Literal["model", "curve"]  # the part of a job that a command reads
Jobs = Iterator[JobDescription]  # the newest job first


class NoJobs(ServiceError):
    """The caller has no jobs yet, so `latest` means none."""


def why_not_asked(settings: Settings) -> str:
    """Which backends were not asked for jobs, and why, as the end of a message; or ''."""
    notes = ""
    for backend in all_backends():
        reason = backend.why_not_configured(settings)
        if reason:
            notes += f" ({backend.title} was not asked: {reason})"
    return notes


class Listing:
    """The caller's jobs, or everyone's, newest first. A backend is asked while its jobs
    are iterated.

    unreadable and failure say what is missing among the jobs that were iterated.
    """

    def __init__(self, settings: Settings, everyone: bool = False, name: str | None = None) -> None:
        self.unreadable: list[UnreadableJob] = []
        self.failure: InputError | ServiceError | None = None
        self.settings = settings
        self.everyone = everyone
        self.name = name
        self.backends = configured_backends(settings)

    def __iter__(self) -> Jobs:
        return self.read(self.backends)

    def of_this_machine(self) -> Jobs:
        """The jobs of this machine, without those that need a network."""
        return self.read(without_network(self.backends))

    def read(self, backends: list[type[Backend]]) -> Jobs:
        lists = [self.read_backend(backend) for backend in backends]
        return heapq.merge(*lists, key=lambda job: job.launched, reverse=True)

    def read_backend(self, backend: type[Backend]) -> Jobs:
        try:
            for job in backend(self.settings).list(self.everyone, self.name):
                if isinstance(job, UnreadableJob):
                    self.unreadable.append(job)
                else:
                    yield job
        except InputError as error:  # for example no region, which does not mention SageMaker
            self.failure = error.within(f"jobs on {backend.title} are not listed")
        except ServiceError as error:
            self.failure = error


def find(
    job_id: str, settings: Settings, attempts: int | None = None
) -> tuple[Backend, JobDescription]:
    """Find the backend of the job with this full id, and its description. Raises Missing.

    attempts: as for make_client of launcher/aws.py.
    """
    searched: list[str] = []  # the backends that do not know the job, such as `on this machine`
    if JOB_ID.fullmatch(job_id):
        for backend_type in configured_backends(settings):
            try:
                backend = backend_type(settings, attempts)
                description = backend.describe(job_id)
                location = backend.location
            except InputError as error:
                problem = f"there is no job {job_id!r} {' or '.join(searched)}"
                raise error.within(f"{problem}, and {backend_type.title} cannot be asked") from None
            if description is not None:
                return backend, description
            searched.append(location)
    raise missing_job_error(job_id, searched, settings)


def missing_job_error(job_id: str, searched: Sequence[str], settings: Settings) -> Missing:
    """The error for a job that no backend knows.

    searched: where backends have searched, as phrases such as `on this machine`; it may be empty.
    """
    problem = f"there is no job {job_id!r}"
    if searched:
        problem += f" {' or '.join(searched)}{why_not_asked(settings)}"
        fetched_models = sorted((settings.models_dir / job_id).glob("*/"))
        if fetched_models:  # of a deleted job
            problem += f"; its model is in {fetched_models[0]}"
    suggestion = similar_jobs(job_id, settings)
    if suggestion:
        problem += f"; {suggestion}"
    has_remote = any(backend.is_remote for backend in configured_backends(settings))
    may_be_anothers = bool(searched) and has_remote and not FULL_ID.fullmatch(job_id)
    if may_be_anothers:
        return Missing(problem, "no-job-of-yours", job_id=job_id)
    return Missing(problem, "no-such-job", job_id=job_id)


def similar_jobs(reference: str, settings: Settings) -> str:
    """Return `did you mean A or B?` with jobs whose ids or names are like a reference, or ''.

    The jobs of this machine, and those that were launched from here, are compared. This needs no
    network.
    """
    jobs = list(Listing(settings).of_this_machine())
    job_ids = {job.job_id for job in jobs} | set(remote_launches(settings))
    names = {job.name for job in jobs if job.name is not None}
    return similar_to(reference, job_ids, names)


def similar_to(reference: str, ids: Collection[str], names: Collection[str]) -> str:
    """Return `did you mean A or B?` with the ids, ends of ids, or names that are like a reference,
    or ''. `latest` counts as a name if there are ids."""
    if reference.startswith("sm-nanogpt-"):  # all ids are alike for the most part
        return did_you_mean(reference, sorted(ids), cutoff=0.9)
    ends = {end_of(id) for id in ids}
    latest = {"latest"} if ids else set()
    # Of the six characters of an end, five have to agree: four may do so by chance.
    return did_you_mean(reference, sorted({*names, *ends, *latest}), cutoff=0.75)


def full_id(
    reference: str,
    settings: Settings,
    acts: bool = False,
    reads: Part | None = None,
) -> str:
    """Return the full id of the job that a reference means: an id, a name, a part of an id, or
    `latest`.

    A part is the start, the end, or the time of an id. Only a full id may mean somebody else's job.
    A path, and a reference to no job, are returned unchanged.

    acts: the job will be changed, so the log names it first, and SageMaker is always asked. reads:
    the part of the job that will be read. `latest` is then the newest job that has this part, a
    name is the newest one of its jobs that has it, and a path may stand for the model of a job.

    Raises InputError if several jobs match, and ServiceError if the reference may mean another job,
    which could not be listed.
    """
    if FULL_ID.fullmatch(reference) or not WORD.fullmatch(reference):
        return reference
    if reads == "model" and (is_path(reference) or path_of(reference).is_file()):
        return reference
    if is_id_of_this_machine(reference, settings):
        return reference
    listing = Listing(settings)
    why_not_meant = partial(why_without_part, reads=reads, settings=settings)
    job = resolve(reference, listing, why_not_meant, acts)
    is_latest = reference == "latest"
    for unreadable in listing.unreadable:
        if is_latest and (acts or job is None):  # it may be the latest job
            raise unreadable.error
        logger.info(f"job {unreadable.job_id} is left out: {unreadable.error}")
    if listing.failure is not None:
        return id_despite_failure(reference, job, listing.failure, settings, acts)
    if job is None:
        if is_latest:
            raise NoJobs(f"you have no jobs yet{why_not_asked(settings)}")
        return reference
    if is_latest:
        for backend in all_backends():
            backend.check_no_later(job, settings, acts)
    if acts:
        logger.info(f"{reference} is job {job.job_id if reference == job.name else job.named}")
    return job.job_id


def id_despite_failure(
    reference: str,
    job: JobDescription | None,
    failure: InputError | ServiceError,
    settings: Settings,
    acts: bool,
) -> str:
    """The id of the job that a reference means among the jobs that were listed.

    Raises the error of the backend that did not list its jobs, unless the reference surely means
    this job.
    """
    if job is None or not is_certain(reference, job, settings, acts):
        raise failure.within(f"cannot resolve {reference!r} to a full job id")
    note = f"of the jobs of this machine, {reference} is {job.named}"
    logger.info(f"{failure}; {note}", extra={"cause": failure})
    return job.job_id


# Returns why `latest` or a name does not mean a job, or ''.
WhyNotMeant = Callable[[JobDescription], str]


def why_without_part(job: JobDescription, reads: Part | None, settings: Settings) -> str:
    """Why a job does not have the part that a command reads, or ''."""
    if reads is None:
        return ""
    if job.search:  # its models and curves belong to the search
        return f"makes the runs of search {job.search}"
    if reads == "model" and not has_model(job, settings):
        return f"is {job.state} and has no model"
    return ""


def resolve(
    reference: str, listing: Listing, why_not_meant: WhyNotMeant, acts: bool
) -> JobDescription | None:
    """The job that a reference means; None if there is none.

    If this machine has the job, a command that changes no job does not ask remote backends, unless
    jobs were launched there from here.
    """
    if not acts and not remote_launches(listing.settings):
        job = choose_job(reference, listing.of_this_machine(), why_not_meant, acts)
        if job is not None:
            remote = [backend.title for backend in listing.backends if backend.is_remote]
            if reference == "latest" and remote:
                reason = f"{remote[0]} was not asked, since no job was launched there from here"
                logger.info(f"latest is {job.named}; {reason}")
            return job
    return choose_job(reference, iter(listing), why_not_meant, acts)


def is_id_of_this_machine(reference: str, settings: Settings) -> bool:
    """True if a reference is the id of a job that can be found without a network."""
    local_backends = without_network(configured_backends(settings))
    return any(backend(settings).describe(reference) is not None for backend in local_backends)


def without_network(backends: Iterable[type[Backend]]) -> list[type[Backend]]:
    """The backends, of these, that need no network."""
    return [backend for backend in backends if not backend.is_remote]


def remote_launches(settings: Settings) -> list[str]:
    """The ids of the jobs that this home launched last on remote backends."""
    job_ids: list[str] = []
    for backend in all_backends():
        job_ids += backend.launched_last(settings)
    return job_ids


def choose_job(
    reference: str, jobs: Jobs, why_not_meant: WhyNotMeant, acts: bool
) -> JobDescription | None:
    """Choose the one of these jobs that a reference means; None if it means none.

    If the job will be changed (`acts`), the log names the other running jobs of its name. Raises
    InputError if the reference is a part of several ids.
    """
    if reference == "latest":
        return newest(jobs, why_not_meant)
    all_jobs = list(jobs)
    of_name = [job for job in all_jobs if job.name == reference]
    if of_name:
        job = newest(iter(of_name), why_not_meant)
        for other in of_name:
            if acts and other.is_running and other is not job:
                logger.info(f"another job of the name {reference} is running: {other.job_id}")
        return job
    matches = [job for job in all_jobs if is_part(reference, job.job_id)]
    if len(matches) > 1:
        raise ambiguity_error(reference, [job.named for job in matches], "jobs", "id")
    return matches[0] if matches else None


def ambiguity_error(reference: str, matches: Sequence[str], kind: str, part: str) -> InputError:
    """The error for a reference that several jobs or uploads match.

    kind is what they are, such as `jobs`, and part is what to give more of: `id` or `name`.
    """
    shown = ", ".join(matches[:3])
    if len(matches) > 3:
        shown += " and more"
    return InputError(
        f"{reference!r} matches {len(matches)} {kind}: {shown}; give more of the {part}"
    )


def is_part(text: str, job_id: str) -> bool:
    """True if a text is the start, the end, or the time of a job's id, and is long enough."""
    if len(text) < SHORTEST_PART:
        return False
    match = FULL_ID.fullmatch(job_id)
    moment = match[1] if match else ""  # such as 20261128-215422
    times = (moment, moment[9:])
    return job_id.startswith(text) or job_id.endswith(text) or text in times


def newest(jobs: Jobs, why_not_meant: WhyNotMeant) -> JobDescription | None:
    """The first of these jobs that can be meant; if there is none, the first job."""
    first = None
    problem_of_first = ""
    for job in jobs:
        problem = why_not_meant(job)
        if not problem:
            if first is not None:
                other = f"the newest other job is {job.named}"
                logger.info(f"{first.job_id} {problem_of_first}; {other}")
            return job
        if first is None:
            first = job
            problem_of_first = problem
    return first


def has_model(job: JobDescription, settings: Settings) -> bool:
    """True if a job ended with a model, or was stopped and left a checkpoint."""
    backend = backend_for(job.instance, settings)
    if job.status == "Stopped" and backend.is_remote:  # its lists do not have checkpoints
        job = backend.describe(job.job_id) or job
    return job.model_uri is not None or (job.status == "Stopped" and job.checkpoint_uri is not None)


def is_certain(reference: str, job: JobDescription, settings: Settings, acts: bool) -> bool:
    """True if a reference surely means a job of this machine, although a backend gave no answer."""
    if backend_class(job.instance).is_remote:
        return False
    launched = remote_launches(settings)
    if acts and launched:
        return False
    return reference != "latest" or max(launched, default="") <= job.job_id
