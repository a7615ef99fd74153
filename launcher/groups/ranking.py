"""The configurations of some jobs, ranked by their losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sm_nanogpt.launcher.description import JobDescription


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
    jobs: Sequence[JobDescription | None], planned: Sequence[Mapping[str, Any]] | None = None
) -> list[Rank]:
    """The configurations of some jobs by their best validation loss, the lowest first.

    planned: what was varied, for each job; None: what differs. A job is None until it is started.
    """
    if planned is None:
        planned = differing_values(jobs)
    configurations: dict[str, dict[str, Any]] = {}
    members: dict[str, list[JobDescription | None]] = defaultdict(list)
    for job, values in zip(jobs, planned, strict=True):
        without_seed = {name: value for name, value in values.items() if name != "seed"}
        key = repr(without_seed)  # in which 1, 1.0 and True differ
        configurations[key] = without_seed
        members[key].append(job)
    ranks = [rank_of(values, members[key]) for key, values in configurations.items()]
    return sorted(ranks, key=lambda rank: rank.loss)


def rank_of(values: dict[str, Any], members: Sequence[JobDescription | None]) -> Rank:
    jobs = [job for job in members if job is not None]
    losses = [job.best_loss for job in jobs if job.best_loss is not None]
    return Rank(values, losses, jobs, len(members))


def differing_values(jobs: Sequence[JobDescription | None]) -> list[dict[str, Any]]:
    """The hyperparameters of each job that are not the same in all."""
    configurations = [job.hyperparameters if job is not None else {} for job in jobs]
    names = differences(configurations)
    return [{name: values.get(name) for name in names} for values in configurations]


def differences(configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names whose values are not the same in all configurations."""
    names = dict.fromkeys(name for values in configurations for name in values)
    differing = []
    for name in names:
        values = {str(configuration.get(name)) for configuration in configurations}
        if len(values) > 1:
            differing.append(name)
    return differing
