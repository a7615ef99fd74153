"""The runs that a search asks for, what each one left, and the interface of what makes them."""

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


@dataclass(frozen=True)
class SeededRun:
    """A run that a search asks for: a training folder, and a seed."""

    source: Source
    seed: int

    @property
    def key(self) -> tuple[str, int]:
        """The folder and the seed, by which the ledger knows the run."""
        return self.source.sha256, self.seed


@dataclass(frozen=True)
class TriedRun:
    """A run that has ended: the directory of its model, the seconds that it computed, and why it
    left no model, or ''."""

    run: SeededRun
    model: Path
    seconds: float
    problem: str = ""


class RunMaker(Protocol):
    """Makes the runs of a search."""

    makes_jobs: ClassVar[bool]  # each `train` is a job, whose start takes minutes and costs money

    at_once: int  # the number of runs that are made together, and then judged

    def __init__(self, search: Search) -> None: ...

    def train(self, runs: Sequence[SeededRun]) -> Iterator[TriedRun]:
        """Make these runs, and yield each when it ends. Its model exists until the next is asked
        for."""

    def cost_of(self, entry: Entry) -> float | None:
        """What the job of a reservation has cost, in USD; None while that is not known."""


def run_maker_class(instance: str) -> type[RunMaker]:
    """The class that makes the runs of a search on an instance. Raises InputError if none does."""
    backend = backend_class(instance)
    if not backend.run_maker:
        problem = f"a search has no runs on {backend.title}"
        raise InputError(problem, field="instance", value=instance)
    run_maker: type[RunMaker] = load_object(backend.run_maker)
    return run_maker
