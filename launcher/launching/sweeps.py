"""Sweeps: a grid of jobs, a few at a time, under one cost ceiling.

A sweep has an id like a job's, GROUP; its jobs are GROUP-1, GROUP-2, ..., and GROUP-1-try2 is the
second try of the first. So the jobs of a sweep are known by their ids alone. What is still to run
is in `sweeps/GROUP.json` below the home of the machine that launched it.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from launcher.aws import PATIENCE_SECONDS, OverQuota, patiently
from launcher.errors import InputError, ServiceError
from launcher.files import storage
from launcher.files.documents import Count, Document, Scalar
from launcher.finding import Backend, Listing, backend_for, is_part, not_asked
from launcher.job import FULL_ID, JobDescription, Request, UnreadableJob
from launcher.launching.launch import Ready, prepare
from launcher.launching.records import record_of
from launcher.sagemaker.cost import CeilingTooLow, usd
from launcher.settings import Settings
from launcher.tracking import with_costs

logger = logging.getLogger(__name__)

MEMBER = re.compile(r"(sm-nanogpt-\d{8}-\d{6}-[0-9a-f]{6})-(\d+)(?:-try(\d+))?")

RETRY_SECONDS = 60.0  # until a job that a quota refused is sent again

Tries = dict[int, list[JobDescription]]  # the jobs of each member by its number, the newest last


class Sweep(Document):
    """job is what all jobs of the sweep share, members what each has of its own."""

    job: Request
    members: list[dict[str, Scalar]]
    parallel: Annotated[Count, Field(ge=1)]

    def left(self, tries: Tries) -> list[int]:
        """The numbers of the members that have to be started, for the first time or again."""
        newest = {number: each[-1] for number, each in tries.items() if each}
        done = {n for n, job in newest.items() if job.is_running or job.status == "Completed"}
        return [number for number in range(1, len(self.members) + 1) if number not in done]

    def ready(
        self, number: int, settings: Settings, job_id: str, tries: Sequence[JobDescription] = ()
    ) -> Ready:
        """The member's next job, checked. It continues the last try if that left a checkpoint.

        Its cost ceiling is its share of that of the sweep, which includes all its tries.

        Raises:
            CeilingTooLow: its tries have used up its share.
        """
        given = self.job.given()
        given["hyperparameters"] = {**self.job.hyperparameters, **self.members[number - 1]}
        others = {job.job_id: job for job in tries}  # whose cost `prepare` does not count
        if tries:
            backend = backend_for(self.job.instance or "local", settings)
            last = backend.describe(tries[-1].job_id)
            if last is not None and last.checkpoint_uri:
                given = {"resume": last.job_id}
                earlier = last.job_id
                while self.job.max_cost is not None and earlier in others:
                    del others[earlier]
                    earlier = backend.job(earlier).resume or ""
        if self.job.max_cost is not None:
            spent = sum(each.cost or 0.0 for each in with_costs([*others.values()], settings))
            share = self.job.max_cost / len(self.members)
            if share <= spent:
                raise CeilingTooLow(f"its tries cost {usd(spent)}, and its share is {usd(share)}")
            given["max_cost"] = share - spent
        if self.job.name is not None:
            given["name"] = f"{self.job.name}{tail_of(job_id)}"
        return prepare(Request(**given), settings, job_id)


def grid(
    sweep: Mapping[str, Sequence[Scalar]], seeds: int, first_seed: int
) -> list[dict[str, Scalar]]:
    """Each combination of the values, with each of `seeds` seeds."""
    values = dict(sweep)
    if seeds > 1:
        values["seed"] = range(first_seed, first_seed + seeds)
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def write_record(group: str, sweep: Sweep, settings: Settings) -> None:
    record = {
        **sweep.model_dump(mode="json"),
        "job": sweep.job.model_dump(mode="json", exclude_unset=True),
    }
    storage.write_json(str(record_of(group, settings)), record)


def read_record(group: str, settings: Settings) -> Sweep | None:
    """The record of a sweep that was launched from this machine."""
    return storage.read_document(str(record_of(group, settings)), Sweep)


@contextmanager
def alone(group: str, settings: Settings) -> Iterator[None]:
    """Keep a second command of this machine from running the sweep, which would start each job
    twice.
    """
    path = record_of(group, settings).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServiceError(
                f"another command runs sweep {group}: let it end, or stop it with"
                f" `sm-nanogpt stop --group {group}`"
            ) from None
        yield


def stop_mark(job_id: str, group: str, place: str, settings: Settings) -> str:
    """The file that says whether a sweep may start jobs. `run`: it may; any other content, or no
    file: it may not. It is deleted with the sweep. Any machine may stop or delete a sweep, so for
    SageMaker the file is in the store.

    place: where the files of a job of the sweep are.
    """
    if not place.startswith("s3://"):
        return str(record_of(group, settings).with_suffix(".stop"))
    return storage.join(place.removesuffix(job_id), group, "stop")


def tries_of(found: Iterable[JobDescription | UnreadableJob], group: str) -> Tries:
    """The jobs of a sweep among these."""
    tries: Tries = defaultdict(list)
    for job in found:
        if isinstance(job, JobDescription):
            name = MEMBER.fullmatch(job.job_id)
            if name and name[1] == group:
                tries[int(name[2])].append(job)
    for each in tries.values():
        each.sort(key=lambda job: attempt_of(job.job_id))
    return tries


def tail_of(job_id: str) -> str:
    """What tells a job of a sweep from the others: `-3` or `-3-try2`. Its name ends so too."""
    member = MEMBER.fullmatch(job_id)
    return job_id.removeprefix(member[1]) if member else ""


def attempt_of(job_id: str) -> int:
    name = MEMBER.fullmatch(job_id)
    return int(name[3] or 1) if name else 0


def next_id(group: str, number: int, tries: Sequence[JobDescription]) -> str:
    """The id of a member's next try."""
    again = f"-try{attempt_of(tries[-1].job_id) + 1}" if tries else ""
    return f"{group}-{number}{again}"


def find_sweep(word: str, settings: Settings, everyone: bool = False) -> tuple[str, Tries]:
    """The id of a sweep and its jobs, from its name, the start or end of its id, the id or name of
    one of its jobs, or `latest`. Without everyone, only a whole id means somebody else's.
    """
    listing = Listing(settings, everyone or FULL_ID.fullmatch(word) is not None)
    found, failure = list(listing), listing.failure
    members = [job for job in found if tail_of(job.job_id)]
    recorded = (path.stem for path in record_of("*", settings).parent.glob("*.json"))
    ids = {*(job.job_id.removesuffix(tail_of(job.job_id)) for job in members), *recorded}
    groups = sorted(ids, reverse=True)
    part = word.removesuffix(tail_of(word))
    for job in members:
        tail = tail_of(job.job_id)
        if job.name is not None and word in (job.name, job.name.removesuffix(tail)):
            part = job.job_id.removesuffix(tail)
    if failure is not None and part not in groups:
        raise failure
    if word == "latest":
        if not groups:
            begin = "`sm-nanogpt launch --instance local --sweep ...` starts one"
            raise InputError(f"there are no sweeps yet{not_asked(settings)}; {begin}")
        part = groups[0]
    matches = [group for group in groups if is_part(part, group)]
    if len(matches) != 1:
        raise InputError(
            f"{word!r} matches {len(matches) or 'no'} sweep{'s' * (len(matches) != 1)}; the id of"
            " a sweep is the id of its jobs without the number at the end"
        )
    for left_out in listing.unreadable:
        if left_out.job_id.startswith(f"{matches[0]}-"):
            logger.info(f"job {left_out.job_id} is left out: {left_out.error}")
    group, tries = matches[0], tries_of(found, matches[0])
    sweep = None if tries else read_record(group, settings)
    instance = (sweep.job.instance or "local") if sweep else next(iter(tries.values()))[0].instance
    if instance != "local":
        if failure is not None:
            raise failure
        backend = backend_for(instance, settings)
        for number in itertools.count(1):  # the first tries are made in this order
            while unlisted := backend.describe(next_id(group, number, tries[number])):
                tries[number].append(unlisted)
            if not tries[number]:
                del tries[number]
                if number > max(tries, default=0):
                    break
    return group, tries


@dataclass
class Progress:
    """A job of a sweep for the screen: what it continues when it starts, or how it ended; or what
    keeps it from being started, its cost ceiling or a quota of the account."""

    number: int
    job_id: str
    description: JobDescription | None = None
    continued: str | None = None
    obstacle: CeilingTooLow | OverQuota | None = None


def run(group: str, sweep: Sweep, tries: Tries, settings: Settings) -> Iterator[Progress]:
    """Start the jobs that have not completed, `parallel` at a time, until all have ended.

    Yields each job when it starts and when it ends. A job that stopped or failed earlier continues
    from its checkpoint. A job that a quota of the account holds back waits until another job ends.
    tries gets the jobs that are started. After an error, the jobs that run keep running.
    """
    running = {n: each[-1].job_id for n, each in tries.items() if each[-1].is_running}
    left = sweep.left(tries)
    driver = Driver(group, sweep, tries, settings, running)
    for job, *_ in list(tries.values())[:1]:
        driver.write_mark(job.job_id, driver.backend.places(job.job_id)[0])
    retry_at, freed, waits = 0.0, -math.inf, False
    while left or running:
        if stopped := driver.is_stopped():
            left = []
        if left and len(running) < sweep.parallel and time.monotonic() >= retry_at:
            try:
                yield driver.start(left[0])
                left, waits = left[1:], False
            except OverQuota as quota:
                # SageMaker may count a job for a while after its end.
                if not running and time.monotonic() > freed + PATIENCE_SECONDS:
                    raise ServiceError(f"{quota}; `{driver.again}` continues the sweep") from None
                if not waits:
                    yield Progress(left[0], driver.next_id(left[0]), obstacle=quota)
                retry_at, waits = time.monotonic() + RETRY_SECONDS, True
            continue
        time.sleep(max(0.5, driver.backend.poll_seconds))
        for ended in driver.poll(stopped):
            retry_at, freed = 0.0, time.monotonic()
            yield ended


@dataclass
class Driver:
    """Starts the jobs of a sweep and asks about those that run: their ids by number."""

    group: str
    sweep: Sweep
    tries: Tries
    settings: Settings
    running: dict[int, str]
    mark: str = ""

    @cached_property
    def backend(self) -> Backend:
        return backend_for(self.sweep.job.instance or "local", self.settings)

    @property
    def again(self) -> str:
        return f"sm-nanogpt launch --resume {self.group}"

    def next_id(self, number: int) -> str:
        return next_id(self.group, number, self.tries.get(number, []))

    def write_mark(self, job_id: str, place: str) -> None:
        self.mark = stop_mark(job_id, self.group, place, self.settings)
        storage.write_text(self.mark, "run", self.settings)

    def is_stopped(self) -> bool:
        """Whether somebody stopped or deleted the sweep."""
        read = partial(storage.read_bytes, self.mark, self.settings)
        return bool(self.mark) and patiently(read, self.again) != b"run"

    def start(self, number: int) -> Progress:
        """Start a member's next job. Raises OverQuota, or as `prepare` and `Ready.go`."""
        earlier, job_id = self.tries.get(number, []), self.next_id(number)
        try:
            ready = self.sweep.ready(number, self.settings, job_id, earlier)
        except CeilingTooLow as limit:
            if not earlier:
                raise
            return Progress(number, earlier[-1].job_id, obstacle=limit)
        if not self.mark:
            self.write_mark(job_id, ready.place)
        ready.go()
        self.running[number] = job_id
        return Progress(number, job_id, continued=ready.job.resume)

    def poll(self, stop: bool) -> Iterator[Progress]:
        """Ask about each job that runs, and stop it if asked. Yields those that have ended."""
        for number, job_id in list(self.running.items()):
            description = patiently(partial(self.backend.describe, job_id), self.again)
            if description is None:
                raise ServiceError(f"job {job_id} was deleted while it ran")
            if stop and description.status == "InProgress":
                self.backend.stop(job_id)
            others = [job for job in self.tries.get(number, []) if job.job_id != job_id]
            self.tries[number] = [*others, description]
            if not description.is_running:
                del self.running[number]
                yield Progress(number, job_id, description)


def stop_all(group: str, tries: Tries, settings: Settings) -> list[JobDescription]:
    """Stop the running jobs of a sweep, and keep it from starting others; returns those jobs.

    The command that runs the sweep stops a job that it starts meanwhile.
    """
    newest = [each[-1] for each in tries.values()]
    if not newest:
        return []
    backend, running = backend_for(newest[0].instance, settings), []
    try:
        for job in newest:
            now = backend.describe(job.job_id) if job.is_running else None
            if now is not None and now.is_running:
                running.append(now)
                if now.status == "InProgress":  # a second stop would not wait for a checkpoint
                    backend.stop(now.job_id)
    finally:
        place = backend.places(newest[0].job_id)[0]
        storage.write_text(stop_mark(newest[0].job_id, group, place, settings), "stop", settings)
    return running


@dataclass(frozen=True)
class Rank:
    """The jobs of one configuration, which differ only in their seed. losses are in nats; n counts
    the jobs that were not started too."""

    values: dict[str, Any]
    losses: list[float]
    jobs: list[JobDescription]
    n: int

    @property
    def loss(self) -> float:
        return fmean(self.losses) if self.losses else float("inf")


def ranking(
    found: Sequence[JobDescription | None], planned: Sequence[Mapping[str, Any]] | None = None
) -> list[Rank]:
    """The configurations of some jobs by their best validation loss, the lowest first.

    planned: what was varied, for each job; None: what differs. A job is None until it is started.
    """
    if planned is None:
        planned = [job.hyperparameters if job else {} for job in found]
        differing = differences(planned)
        planned = [{name: each.get(name) for name in differing} for each in planned]
    same: dict[tuple[Any, ...], list[JobDescription | None]] = defaultdict(list)
    for job, values in zip(found, planned, strict=True):
        same[tuple((n, value) for n, value in values.items() if n != "seed")].append(job)
    ranks = []
    for key, each in same.items():
        jobs = [job for job in each if job is not None]
        best = [(job.metrics or {}).get("best_loss") for job in jobs]
        losses = [loss for loss in best if loss is not None]
        ranks.append(Rank(dict(key), losses, jobs, len(each)))
    return sorted(ranks, key=lambda rank: rank.loss)


def differences(configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names whose values are not the same in all configurations."""
    names = dict.fromkeys(name for each in configurations for name in each)
    return [n for n in names if len({str(each.get(n)) for each in configurations}) > 1]
