"""What a sweep asks for: a grid of jobs that share a request."""

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

Values = Mapping[str, Sequence[Scalar]]  # what a sweep varies, by name
MODEL_CHOICES = ("size", "preset")  # fields of a request that a sweep varies as hyperparameters


class Sweep(Document):
    """job is what all jobs of the sweep share, members what each varies; parallel run at a time.

    share is what a job may cost, in USD, where neither its time limit nor the lack of a ceiling
    says it: the same for all, so that all have the same time limit.
    """

    job: Request
    members: list[dict[str, Scalar]]
    parallel: Annotated[Count, Field(ge=1)]
    share: Positive | None = None

    @property
    def numbers(self) -> range:
        return range(1, len(self.members) + 1)

    @property
    def ceiling(self) -> float:
        """USD that all jobs may cost together."""
        return math.inf if self.job.max_cost is None else self.job.max_cost

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


def list_values(name: str, values: Any) -> list[Any]:
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
    """True if a job can have a value as a hyperparameter."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int)


def check_varied(varied: Values, request: Request, seeds: int) -> None:
    """Raise InputError if the request sets what a sweep varies. A size and a preset set the same
    hyperparameters, so they count as one."""
    settled = set(request.hyperparameters)
    if seeds > 1:
        settled.add("seed")
    if any(name in request.explicit_fields() for name in MODEL_CHOICES):
        settled.update(MODEL_CHOICES)
    both = varied.keys() & settled
    if both:
        raise InputError("is given twice", "swept-and-set", "sweep", min(both))
    if varied.keys() >= set(MODEL_CHOICES):
        problem = "a preset sets the size of the model too; vary one of the two"
        raise InputError(problem, field="sweep", value="size")


def grid(varied: Values, seeds: int, first_seed: int) -> list[dict[str, Scalar]]:
    """Each combination of the values, with each of `seeds` seeds."""
    values = dict(varied)
    if seeds > 1:
        values["seed"] = range(first_seed, first_seed + seeds)
    combinations = itertools.product(*values.values())
    return [dict(zip(values, combination, strict=True)) for combination in combinations]


# -- in the ledger ---------------------------------------------------------------------------------


def open_ledger(group: str, settings: Settings) -> GroupLedger:
    return GroupLedger(ledger_path(group, settings))


def write_sweep(ledger: GroupLedger, sweep: Sweep) -> None:
    ledger.path.parent.mkdir(parents=True, exist_ok=True)
    ledger.add("asked", **sweep.model_dump(mode="json", exclude_unset=True))


def read_sweep(ledger: GroupLedger, settings: Settings) -> Sweep | None:
    """The sweep as it was asked for last; None if it was not launched from this machine."""
    entries = ledger.of("asked")
    if not entries:
        return None
    sweep = parse(entries[-1], Sweep, ledger.path)
    if sweep.job.entry_point is None:
        return sweep
    folder = Path(find_moved(str(sweep.job.entry_point), settings))
    job = sweep.job.model_copy(update={"entry_point": folder})
    return sweep.model_copy(update={"job": job})


def recorded_sweep(group: str, settings: Settings) -> Sweep | None:
    return read_sweep(open_ledger(group, settings), settings)
