"""What a sweep is: its record below HOME/sweeps of the machine that launched it, and its jobs.

A sweep has an id like a job's, GROUP; its jobs are GROUP-1, GROUP-2, ..., and GROUP-1-try2 is the
second try of the first. So the jobs of a sweep are known by their ids alone.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from launcher.errors import InputError, ServiceError
from launcher.files import storage
from launcher.files.documents import Count, Document, Scalar
from launcher.files.moved import find_moved
from launcher.job import JobDescription, Request, UnreadableJob
from launcher.settings import Settings
from launcher.values import plain

MEMBER = re.compile(r"(sm-nanogpt-\d{8}-\d{6}-[0-9a-f]{6})-(\d+)(?:-try(\d+))?")

Tries = dict[int, list[JobDescription]]  # the jobs of each member by its number, the newest last
Values = Mapping[str, Sequence[Scalar]]  # what a sweep varies, by name
MODEL_CHOICES = ("size", "preset")  # fields of a request that a sweep varies as hyperparameters


class Sweep(Document):
    """job is what all jobs of the sweep share, members what each has of its own."""

    job: Request
    members: list[dict[str, Scalar]]
    parallel: Annotated[Count, Field(ge=1)]

    def fields_of(self, number: int) -> dict[str, Any]:
        """The fields of a request that a member has of its own, with all its hyperparameters."""
        values = self.members[number - 1]
        fields: dict[str, Any] = {n: value for n, value in values.items() if n in MODEL_CHOICES}
        varied = {n: value for n, value in values.items() if n not in MODEL_CHOICES}
        return {**fields, "hyperparameters": {**self.job.hyperparameters, **varied}}

    def left(self, tries: Tries) -> list[int]:
        """The numbers of the members that have to be started, for the first time or again."""
        newest = {number: each[-1] for number, each in tries.items() if each}
        done = {n for n, job in newest.items() if job.is_running or job.status == "Completed"}
        return [number for number in range(1, len(self.members) + 1) if number not in done]


def listed(name: str, values: Any) -> list[Any]:
    """The values of a name: of a list, a range, an array, or anything else that yields them."""
    values = plain(values)
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InputError(f"{name} needs a list of values, not {values!r}", field="sweep")
    values = [plain(value) for value in values]
    if not values:
        raise InputError("has no values", field="sweep", value=name)
    for value in values:
        if not is_scalar(value):
            problem = f"{str(value)[:99]} is no finite number, text or truth value"
            raise InputError(problem, field="sweep", value=name)
    if len({repr(value) for value in values}) < len(values):
        raise InputError("a value is given twice", field="sweep", value=name)
    return values


def is_scalar(value: Any) -> bool:
    """Whether a job can have a value as a hyperparameter."""
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, str | int)


def check_varied(varied: Values, request: Request, seeds: int) -> None:
    """Raise InputError if the request sets what a sweep varies. A size and a preset set the same
    hyperparameters, so they count as one."""
    settled = set(request.hyperparameters)
    if seeds > 1:
        settled.add("seed")
    if any(name in request.given() for name in MODEL_CHOICES):
        settled.update(MODEL_CHOICES)
    if both := varied.keys() & settled:
        raise InputError("is given twice", "swept-and-set", "sweep", min(both))
    if varied.keys() >= set(MODEL_CHOICES):
        problem = "a preset sets the size of the model too; vary one of the two"
        raise InputError(problem, field="sweep", value="size")


def grid(sweep: Values, seeds: int, first: int) -> list[dict[str, Scalar]]:
    """Each combination of the values, with each of `seeds` seeds."""
    values = dict(sweep)
    if seeds > 1:
        values["seed"] = range(first, first + seeds)
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def write_record(group: str, sweep: Sweep, settings: Settings) -> None:
    record = sweep.model_dump(mode="json", exclude_unset=True)
    storage.write_json(str(record_of(group, settings)), record)


def read_record(group: str, settings: Settings) -> Sweep | None:
    sweep = storage.read_document(str(record_of(group, settings)), Sweep)
    if sweep is None or sweep.job.entry_point is None:
        return sweep
    folder = Path(find_moved(str(sweep.job.entry_point), settings))
    job = sweep.job.model_copy(update={"entry_point": folder})
    return sweep.model_copy(update={"job": job})


def tries_of(found: Iterable[JobDescription | UnreadableJob], group: str) -> Tries:
    tries: Tries = defaultdict(list)
    for job in found:
        name = MEMBER.fullmatch(job.job_id)
        if name and name[1] == group and isinstance(job, JobDescription):
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
    again = f"-try{attempt_of(tries[-1].job_id) + 1}" if tries else ""
    return f"{group}-{number}{again}"


def record_of(group: str, settings: Settings) -> Path:
    return settings.home / "sweeps" / f"{group}.json"


def recorded_as(reference: str, settings: Settings) -> str | None:
    """The id of the sweep of this machine that has this id or name."""
    records = [*record_of("*", settings).parent.glob("*.json")]
    if reference in [path.stem for path in records]:  # an absolute path would be another file
        return reference
    for path in records:
        with suppress(ServiceError):  # a damaged one is not this one
            sweep = read_record(path.stem, settings)
            if sweep is not None and sweep.job.name == reference:
                return path.stem
    return None
