"""Find jobs on this machine and on SageMaker: which there are, and which one a word means.

The caller's jobs are all jobs of this machine, and those on SageMaker whose tag names the caller as
their owner. Names, parts of ids and `latest` mean these alone; a whole id means anyone's job.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator

from launcher.errors import InputError, ServiceError
from launcher.job import FULL_ID, JOB_ID, WORD, JobDescription, UnreadableJob
from launcher.local.backend import LocalBackend
from launcher.sagemaker import caller
from launcher.sagemaker.backend import SageMakerBackend
from launcher.settings import Settings

logger = logging.getLogger(__name__)

SHORTEST_PART = 4  # characters of an id
Backend = LocalBackend | SageMakerBackend  # one place where jobs run; both do the same


def all_backends(settings: Settings) -> Iterator[Backend]:
    """Yield the backends, this machine first. SageMaker is set up only when it is reached."""
    yield LocalBackend(settings)
    if settings.reaches_aws:
        yield SageMakerBackend(settings)


def backend_for(instance: str, settings: Settings) -> Backend:
    """The backend that runs an instance type."""
    return LocalBackend(settings) if instance == "local" else SageMakerBackend(settings)


def not_asked(settings: Settings) -> str:
    """What a message adds about jobs if SageMaker was left out."""
    hint = " (SageMaker was not asked: set --region or AWS_REGION to ask it)"
    return "" if settings.reaches_aws else hint


class Listing:
    """The caller's jobs, or everyone's, newest first; a backend reads them as they are asked for.

    unreadable and failure say what is missing among those that were asked for.
    """

    def __init__(self, settings: Settings, everyone: bool = False, name: str | None = None) -> None:
        self.unreadable: list[UnreadableJob] = []
        self.failure: InputError | ServiceError | None = None
        self.settings, self.everyone, self.name = settings, everyone, name

    def __iter__(self) -> Iterator[JobDescription]:
        cloud = self.read(SageMakerBackend) if self.settings.reaches_aws else iter(())
        return heapq.merge(self.here(), cloud, key=lambda job: job.launched, reverse=True)

    def here(self) -> Iterator[JobDescription]:
        """Those of this machine alone."""
        return self.read(LocalBackend)

    def read(self, backend: Callable[[Settings], Backend]) -> Iterator[JobDescription]:
        try:
            for job in backend(self.settings).list(self.everyone, self.name):
                if isinstance(job, UnreadableJob):
                    self.unreadable.append(job)
                else:
                    yield job
        except InputError as error:  # for example no region, which does not mention SageMaker
            self.failure = InputError(f"{error}; jobs on SageMaker are not listed")
        except ServiceError as error:
            self.failure = error


def find(job_id: str, settings: Settings) -> tuple[Backend, JobDescription]:
    """The backend of the job with this full id, and its description."""
    known = "`sm-nanogpt jobs` lists the jobs, and `sm-nanogpt data` the uploads"
    if not JOB_ID.fullmatch(job_id):
        raise ServiceError(f"there is no job {job_id!r}; {known}")
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


def full_id(word: str, settings: Settings, acts: bool = False, trained: bool = False) -> str:
    """The id of the job that a word means: a whole id, a name, a part of an id, or `latest`.

    A part is the start, the end or the time of an id. Only a whole id may mean somebody else's job.
    acts: the command changes the job. It is named first, and SageMaker is always asked.
    trained: the command reads a model, so `latest` is the newest job that has one. A word that
    means no job is returned unchanged.

    Raises:
        InputError: several jobs match, or the part is too short.
        InputError, ServiceError: SageMaker does not answer, so another job may be meant.
        ServiceError: `latest`, and there are no jobs, or the newest one cannot be read.
    """
    if FULL_ID.fullmatch(word) or not WORD.fullmatch(word):
        return word
    if LocalBackend(settings).describe(word) is not None:
        return word
    listing, found = Listing(settings), None
    if not acts and not caller.remembered(settings):  # nothing of this home runs on SageMaker
        found = choose(word, listing.here(), trained, settings)
        if found and word == "latest" and settings.reaches_aws:
            why = "SageMaker was not asked, since no job was launched there from here"
            logger.info(f"latest is {found.named}; {why}")
    found = found or choose(word, iter(listing), trained, settings)
    for job in listing.unreadable:
        if word == "latest" and (acts or found is None):  # it may be the one
            raise job.error
        logger.info(f"job {job.job_id} is left out: {job.error}")
    if listing.failure is not None:
        if found is None or not is_certain(word, found, settings, acts):
            problem = f"cannot resolve {word!r}: {listing.failure}"
            raise type(listing.failure)(f"{problem}; give a full job id")
        logger.info(f"{listing.failure}; of the jobs of this machine, {word} is {found.named}")
    elif found is None:
        return unmatched(word, settings)
    else:
        check_no_later(word, found, settings, acts)
        if acts:
            logger.info(f"{word} is job {found.named}")
    return found.job_id


def unmatched(word: str, settings: Settings) -> str:
    """The word, as that of no job known here. Raises as full_id."""
    if word == "latest":
        begin = "`sm-nanogpt launch --instance local` starts one"
        raise ServiceError(f"you have no jobs yet{not_asked(settings)}; {begin}")
    if len(word) < SHORTEST_PART:
        raise InputError(
            f"no job of yours is named {word!r}, and a part of an id has at least {SHORTEST_PART}"
            " characters"
        )
    return word


def check_no_later(word: str, found: JobDescription, settings: Settings, acts: bool) -> None:
    """Tell of a later job in another region; raise InputError if the command changes the job."""
    later = [each for each in caller.remembered(settings) if each.job_id > found.job_id]
    for last in later if word == "latest" else ():
        here = SageMakerBackend(settings)
        there = SageMakerBackend(settings.model_copy(update={"region": last.region}))
        elsewhere = last.caller == here.caller() and last.region != here.region
        if not elsewhere or there.raw(last.job_id) is None:
            continue
        problem = f"{last.job_id} was launched after {found.job_id}, in {last.region}"
        if acts:
            raise InputError(f"{problem}: give a whole id, or --region {last.region}")
        logger.info(f"{problem}; --region {last.region} finds it")


def choose(
    word: str, jobs: Iterator[JobDescription], trained: bool, settings: Settings
) -> JobDescription | None:
    """The job among these that a word means. Raises InputError if there are several."""
    if word == "latest":
        return newest(jobs, trained, settings)
    every = list(jobs)
    matches = [job for job in every if job.name == word]
    matches = matches or [job for job in every if is_part(word, job.job_id)]
    if len(matches) > 1:
        raise InputError(
            f"{word!r} matches {len(matches)} jobs: {', '.join(job.named for job in matches[:3])}"
            f"{' and more' * (len(matches) > 3)}; give more of the id"
        )
    return matches[0] if matches else None


def is_part(word: str, job_id: str) -> bool:
    moment = found[1] if (found := FULL_ID.fullmatch(job_id)) else ""
    ends = job_id.startswith(word) or job_id.endswith(word)
    return len(word) >= SHORTEST_PART and (ends or word in (moment, moment[9:]))


def newest(
    jobs: Iterator[JobDescription], trained: bool, settings: Settings
) -> JobDescription | None:
    """The first of these jobs; if `trained`, the first that has a model, where one has."""
    first = None
    for job in jobs:
        if not trained or has_model(job, settings):
            if first is not None:
                why = f"{first.job_id} is {first.state} and has no model"
                logger.info(f"{why}; the newest job with a model is {job.named}")
            return job
        first = first or job
    return first


def has_model(job: JobDescription, settings: Settings) -> bool:
    """Whether a listed job ended with a model, or was stopped and left a checkpoint."""
    if job.status == "Stopped" and job.instance != "local":  # a list does not tell
        job = SageMakerBackend(settings).describe(job.job_id) or job
    return job.model_uri is not None or (job.status == "Stopped" and job.checkpoint_uri is not None)


def is_certain(word: str, found: JobDescription, settings: Settings, acts: bool) -> bool:
    """Whether a job of this machine is meant, although SageMaker does not answer."""
    launched = [each.job_id for each in caller.remembered(settings)]
    newer = word == "latest" and max(launched, default="") > found.job_id
    return found.instance == "local" and not newer and not (acts and launched)
