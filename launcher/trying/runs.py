"""The runs that a search asks for, and what each left; the table of who makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from sm_nanogpt.launcher.backends import backend_class, load_object
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.ledger import Entry
from sm_nanogpt.launcher.source import Source

if TYPE_CHECKING:
    from sm_nanogpt.launcher.trying.search import Search

# Who makes the runs of a search, by the name of its backend's class: a RunMaker.
RUN_MAKERS = {
    "LocalBackend": "sm_nanogpt.launcher.trying.local.LocalRuns",
    "SageMakerBackend": "sm_nanogpt.launcher.trying.cloud.SageMakerRuns",
}


@dataclass(frozen=True)
class SeededRun:
    """A run that a search asks for: a training folder, and a seed."""

    source: Source
    seed: int

    @property
    def key(self) -> tuple[str, int]:
        """What the ledger knows it by."""
        return self.source.sha256, self.seed


@dataclass(frozen=True)
class TriedRun:
    """A run that ended: the directory of its model, and the seconds that it computed; or why it
    left no model."""

    run: SeededRun
    model: Path
    seconds: float
    problem: str = ""


class RunMaker(Protocol):
    """Where a search has its runs made."""

    makes_jobs: ClassVar[bool]  # `train` makes one job, whose start takes minutes and costs money

    at_once: int  # runs that are made and judged together

    def __init__(self, search: Search) -> None: ...

    def train(self, runs: Sequence[SeededRun]) -> Iterator[TriedRun]:
        """Make these runs, and yield each when it ends. Its model is there until the next one."""

    def cost_of(self, entry: Entry) -> float | None:
        """What the job of a reservation has cost; None while that is not known."""


def run_maker_class(instance: str) -> type[RunMaker]:
    """Who makes the runs of a search on an instance. Raises InputError if nobody does."""
    backend = backend_class(instance)
    path = RUN_MAKERS.get(backend.__name__)
    if path is None:
        problem = f"a search has no runs on {backend.title}"
        raise InputError(problem, field="instance", value=instance)
    run_maker: type[RunMaker] = load_object(path)
    return run_maker
