"""The request of a sweep: a grid of jobs that share most fields."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.documents import Count, Document, Scalar, parse
from sm_nanogpt.launcher.files.moved import find_moved
from sm_nanogpt.launcher.groups.ledger import GroupLedger
from sm_nanogpt.launcher.job import Positive, Request
from sm_nanogpt.launcher.launching.names import ledger_path
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.values import plain

Values = Mapping[str, Sequence[Scalar]]  # the values that a sweep tries, by hyperparameter
DEFAULT_FIRST_SEED = 1337  # the first of a sweep's seeds
MODEL_CHOICES = ("size", "preset")  # fields of a request that a sweep varies as hyperparameters


class Sweep(Document):
    """A grid of jobs. Its members are numbered from 1."""

    job: Request  # what all jobs share
    members: list[dict[str, Scalar]]  # the values of each job, by the hyperparameters that vary
    parallel: Annotated[Count, Field(ge=1)]  # jobs that run at a time
    # USD that each job may cost under a ceiling, without a time limit: the same for all, so that
    # all get the same time limit.
    share: Positive | None = None

    @property
    def numbers(self) -> range:
        return range(1, len(self.members) + 1)

    @property
    def ceiling(self) -> float:
        """What all jobs may cost together, in USD."""
        if self.job.max_cost is None:
            return math.inf
        return self.job.max_cost

    def fields_of(self, number: int) -> dict[str, Any]:
        """The fields of the request for a member."""
        fields = self.job.explicit_fields()
        hyperparameters = dict(self.job.hyperparameters)
        for name, value in self.members[number - 1].items():
            if name in MODEL_CHOICES:
                fields[name] = value
            else:
                hyperparameters[name] = value
        return {**fields, "hyperparameters": hyperparameters}


# -- the grid --------------------------------------------------------------------------------------


def combinations_of(
    request: Request, values: Mapping[str, Any], seeds: int
) -> list[dict[str, Scalar]]:
    """The values of each job of a new sweep: a combination, and one of `seeds` seeds.

    Raises InputError if the values are no lists, or if the request also sets one of their names.
    """
    varied = {}
    for name, name_values in values.items():
        varied[name.replace("-", "_")] = list_values(name, name_values)
    check_varied(varied, request, seeds)
    first_seed = int(request.hyperparameters.get("seed", DEFAULT_FIRST_SEED))
    return grid(varied, seeds, first_seed)


def list_values(name: str, values: Any) -> list[Any]:
    """The values of a name, from a list, a range, an array, or anything else that yields them."""
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
    """True if a value can be that of a hyperparameter."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int)


def check_varied(varied: Values, request: Request, seeds: int) -> None:
    """Raise InputError if the request sets what a sweep varies.

    A size and a preset set the same hyperparameters, so they count as one.
    """
    set_by_request = set(request.hyperparameters)
    if seeds > 1:
        set_by_request.add("seed")
    if not request.explicit_fields().keys().isdisjoint(MODEL_CHOICES):
        set_by_request.update(MODEL_CHOICES)
    both = varied.keys() & set_by_request
    if both:
        raise InputError("is given twice", code="swept-and-set", field="sweep", value=min(both))
    if varied.keys() >= set(MODEL_CHOICES):
        problem = "a preset sets the size of the model too; vary one of the two"
        raise InputError(problem, field="sweep", value="size")


def grid(varied: Values, seeds: int, first_seed: int) -> list[dict[str, Scalar]]:
    """The combinations of the values, each with each of `seeds` seeds."""
    values = dict(varied)
    if seeds > 1:
        values["seed"] = range(first_seed, first_seed + seeds)
    combinations = itertools.product(*values.values())
    return [dict(zip(values, combination, strict=True)) for combination in combinations]


# -- the ledger ------------------------------------------------------------------------------------


class SweepLedger(GroupLedger):
    """The ledger of a sweep, by its id."""

    def __init__(self, sweep_id: str, settings: Settings) -> None:
        super().__init__(ledger_path(sweep_id, settings))
        self.settings = settings

    def record(self, sweep: Sweep) -> None:
        """Record a sweep that was requested, or changed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.add("asked", **sweep.model_dump(mode="json", exclude_unset=True))

    @property
    def sweep(self) -> Sweep | None:
        """The sweep as it was requested last; None if it was not launched from this machine."""
        entries = self.of("asked")
        if not entries:
            return None
        sweep = parse(entries[-1], Sweep, self.path)
        if sweep.job.entry_point is None:
            return sweep
        folder = Path(find_moved(str(sweep.job.entry_point), self.settings))
        job = sweep.job.model_copy(update={"entry_point": folder})
        return sweep.model_copy(update={"job": job})
