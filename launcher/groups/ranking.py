"""Rank the configurations of some jobs by their losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from sm_nanogpt.launcher.description import JobDescription


@dataclass
class Rank:
    """The jobs of one configuration, which differ only in their seed.

    values: the hyperparameters of the configuration.
    """

    values: dict[str, Any]
    jobs: list[JobDescription] = field(default_factory=list)
    n_jobs: int = 0  # the jobs in `jobs`, and the jobs that were not started

    @property
    def losses(self) -> list[float]:
        """The best validation losses of the jobs, in nats."""
        return [job.best_loss for job in self.jobs if job.best_loss is not None]

    @property
    def mean_loss(self) -> float:
        """The mean of the losses; infinity if there are none, so that it is ranked last."""
        return fmean(self.losses) if self.losses else math.inf


def ranking(
    jobs: Iterable[JobDescription | None], configurations: Iterable[Mapping[str, Any]]
) -> list[Rank]:
    """Rank the configurations of some jobs by their best validation loss, the lowest first.

    Each job has one of the configurations. A job that was not started is None.
    """
    ranks = dict[str, Rank]()
    for job, values in zip(jobs, configurations, strict=True):
        without_seed = {name: value for name, value in values.items() if name != "seed"}
        key = repr(without_seed)  # in which 1, 1.0 and True differ
        rank = ranks.setdefault(key, Rank(without_seed))
        rank.n_jobs += 1
        if job is not None:
            rank.jobs.append(job)
    return sorted(ranks.values(), key=lambda rank: rank.mean_loss)


def best_first(jobs: Iterable[JobDescription]) -> list[JobDescription]:
    """Sort jobs by their best validation loss, the lowest first. Jobs without one come last."""

    def loss_of(job: JobDescription) -> float:
        return math.inf if job.best_loss is None else job.best_loss

    return sorted(jobs, key=loss_of)


def differing_values(jobs: Sequence[JobDescription]) -> list[dict[str, Any]]:
    """The hyperparameters of each job, without those that are the same in all jobs."""
    names = varied_names([job.hyperparameters for job in jobs])
    configurations = []
    for job in jobs:
        configurations.append({name: job.hyperparameters.get(name) for name in names})
    return configurations


def varied_names(configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names whose values are not the same in all configurations."""
    names = dict.fromkeys(name for values in configurations for name in values)

    def differs(name: str) -> bool:
        return len({str(values.get(name)) for values in configurations}) > 1

    return list(filter(differs, names))
