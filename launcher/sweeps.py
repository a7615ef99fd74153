"""Sweeps: a grid of jobs, a few at a time, under one cost ceiling.

A sweep has an id like a job's, GROUP; its jobs are GROUP-1, GROUP-2, ..., and GROUP-1-2 is the
second try of the first. So the jobs of a sweep are known by their ids alone. What is still to run
is in `sweeps/GROUP.json` below the home of the machine that launched it. Called by the commands
`launch`, `jobs`, `stop` and `report`.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from launcher import storage
from launcher.aws.session import patiently
from launcher.documents import Count, Document, Scalar
from launcher.errors import InputError, ServiceError
from launcher.job import JobDescription, TrainingJob
from launcher.settings import Settings
from launcher.submission import Ready, naming, prepare
from launcher.tracking import backend_for, list_jobs, stop, with_costs

MEMBER = re.compile(r"(sm-nanogpt-\d{8}-\d{6}-[0-9a-f]{6})-(\d+)(?:-(\d+))?")


class Sweep(Document):
    """job is what all jobs of the sweep share, members what each has of its own."""

    job: TrainingJob
    members: list[dict[str, Scalar]]
    parallel: Count

    def ready(
        self, index: int, settings: Settings, dry_run: bool = False, spent: float = 0.0
    ) -> Ready:
        """The member's job, checked. Its cost ceiling is its share of that of the sweep, less the
        USD that it has spent on earlier tries."""
        ceiling = self.job.max_cost
        share = None if ceiling is None else ceiling / len(self.members) - spent
        given = {name: getattr(self.job, name) for name in self.job.model_fields_set}
        values = {**self.job.hyperparameters, **self.members[index]}
        if share is not None:
            given["max_cost"] = share
        job = TrainingJob(**{**given, "hyperparameters": values})
        return prepare(job, settings, dry_run)


@contextmanager
def quietly() -> Iterator[None]:
    """Hide INFO logs; those of the first job apply to the whole sweep."""
    logger = logging.getLogger("launcher")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def grid(
    sweep: Mapping[str, Sequence[Scalar]], seeds: int, first_seed: int
) -> list[dict[str, Scalar]]:
    """Each combination of the values, with each of `seeds` seeds."""
    values = dict(sweep)
    if seeds > 1:
        values["seed"] = range(first_seed, first_seed + seeds)
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def record_of(group: str, settings: Settings) -> Path:
    return settings.home / "sweeps" / f"{group}.json"


def write_record(group: str, sweep: Sweep, settings: Settings) -> None:
    record = {
        **sweep.model_dump(mode="json"),
        "job": sweep.job.model_dump(mode="json", exclude_unset=True),
    }
    storage.write_json(str(record_of(group, settings)), record)


def read_record(group: str, settings: Settings) -> Sweep | None:
    """The record of a sweep that was launched from this machine."""
    return storage.read_document(str(record_of(group, settings)), Sweep)


def stop_file(group: str, settings: Settings) -> Path:
    """While it exists, the command that runs the sweep starts no further job."""
    return record_of(group, settings).with_suffix(".stop")


def members(found: Iterable[JobDescription], group: str) -> dict[int, JobDescription]:
    """The newest job of each member of a sweep, by number, among these jobs."""
    newest: dict[int, tuple[int, JobDescription]] = {}
    for job in found:
        name = MEMBER.fullmatch(job.job_id)
        if name and name[1] == group:
            number, attempt = int(name[2]), int(name[3] or 1)
            if attempt > newest.get(number, (0,))[0]:
                newest[number] = (attempt, job)
    return {number: job for number, (_, job) in sorted(newest.items())}


def full_group(word: str, found: Iterable[JobDescription]) -> str:
    """The id of a sweep, from its start or end, the id of one of its jobs, or `latest`, among all
    jobs, newest first.

    Raises:
        InputError: no sweep, or several, have that id.
    """
    names = (MEMBER.fullmatch(description.job_id) for description in found)
    groups = list(dict.fromkeys(name[1] for name in names if name))
    if word == "latest" and groups:
        return groups[0]
    member = MEMBER.fullmatch(word)
    part = member[1] if member else word
    matches = [group for group in groups if group.startswith(part) or group.endswith(part)]
    if len(matches) != 1:
        raise InputError(
            f"{word!r} matches {len(matches) or 'no'} sweep{'s' * (len(matches) != 1)}; the id of"
            " a sweep is the id of its jobs without the number at the end"
        )
    return matches[0]


def all_tries(word: str, settings: Settings) -> tuple[str, tuple[str, ...]]:
    """The full id of a sweep, and the ids of all its jobs, earlier tries included.

    Raises:
        InputError: as full_group.
    """
    found = list_jobs(settings)[0]
    group = full_group(word, found)
    names = (MEMBER.fullmatch(description.job_id) for description in found)
    return group, tuple(name[0] for name in names if name and name[1] == group)


@dataclass
class Progress:
    """A job of a sweep that was started (ended: it has ended), for the screen."""

    number: int
    job_id: str
    description: JobDescription | None

    @property
    def ended(self) -> bool:
        return self.description is not None and not self.description.is_running


def run(group: str, sweep: Sweep, settings: Settings) -> Iterator[Progress]:
    """Start the jobs that have not completed, `parallel` at a time, until all have ended.

    Yields each job when it starts, about once a second while it runs, and when it ends. A job that
    stopped or failed earlier continues from its checkpoint.

    Raises:
        InputError: `prepare` refuses a job.
        ServiceError: the store or the service failed. The jobs that run keep running.
    """
    stop_file(group, settings).unlink(missing_ok=True)
    backend = backend_for(sweep.job.instance, settings)
    found = [job for job in backend.list() if isinstance(job, JobDescription)]
    started = members(found, group)
    running = {n: d.job_id for n, d in started.items() if d.is_running}
    done = {n for n, d in started.items() if d.status == "Completed"}
    waiting = [n for n in range(1, len(sweep.members) + 1) if n not in running and n not in done]
    while waiting or running:
        if stop_file(group, settings).exists():
            waiting = []
        while waiting and len(running) < sweep.parallel:
            number = waiting.pop(0)
            job_id = f"{group}-{number}"
            if earlier := started.get(number):
                name = MEMBER.fullmatch(earlier.job_id)
                assert name is not None
                job_id = f"{group}-{number}-{int(name[3] or 1) + 1}"
                earlier = backend.describe(earlier.job_id)
            with quietly():
                if earlier and earlier.checkpoint_uri:
                    ready = prepare(TrainingJob(resume=earlier.job_id), settings)
                else:
                    tries = [d for d in found if d.job_id.startswith(f"{group}-{number}-")]
                    tries += [d for d in found if d.job_id == f"{group}-{number}"]
                    spent = sum(d.cost or 0.0 for d in with_costs(tries, settings))
                    ready = sweep.ready(number - 1, settings, spent=spent)
            ready.upload()
            with naming(job_id, settings):
                ready.submit(job_id)
            running[number] = job_id
            yield Progress(number, job_id, None)
        time.sleep(max(0.5, backend.poll_seconds / max(1, len(running))))
        for number, job_id in list(running.items()):
            again = settings.command(f"launch --resume {group}")
            description = patiently(partial(backend.describe, job_id), again)
            if description is None:
                raise ServiceError(f"job {job_id} was deleted while it ran")
            if not description.is_running:
                del running[number]
            yield Progress(number, job_id, description)


def stop_all(group: str, settings: Settings) -> list[JobDescription]:
    """Stop the running jobs of a sweep, and keep it from starting others; returns those jobs."""
    if record_of(group, settings).exists():
        stop_file(group, settings).touch()
    running = [d for d in members(list_jobs(settings)[0], group).values() if d.is_running]
    for description in running:
        stop(description.job_id, settings)
    return running


@dataclass(frozen=True)
class Rank:
    """The jobs of one configuration, which differ only in their seed. losses are in nats."""

    values: dict[str, Any]
    losses: list[float]
    jobs: list[JobDescription]

    @property
    def loss(self) -> float:
        return fmean(self.losses) if self.losses else float("inf")


def ranking(found: Sequence[JobDescription]) -> list[Rank]:
    """The configurations of some jobs by their best validation loss, the lowest first."""
    differing = differences([description.hyperparameters for description in found])
    same: dict[tuple[Any, ...], list[JobDescription]] = defaultdict(list)
    for description in found:
        values = {n: description.hyperparameters.get(n) for n in differing if n != "seed"}
        same[tuple(values.items())].append(description)
    ranks = []
    for key, jobs in same.items():
        best = [(d.metrics or {}).get("best_loss") for d in jobs]
        ranks.append(Rank(dict(key), [loss for loss in best if loss is not None], jobs))
    return sorted(ranks, key=lambda rank: rank.loss)


def differences(configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names whose values are not the same in all configurations."""
    names = dict.fromkeys(name for each in configurations for name in each)
    return [n for n in names if len({str(each.get(n)) for each in configurations}) > 1]
