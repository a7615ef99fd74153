"""The runs that a search asks for, and what each left, wherever it was made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launcher.source import Source


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
class FinishedRun:
    """A run that ended: the directory of its model, and the seconds that it computed; or why it
    left no model."""

    run: SeededRun
    model: Path
    seconds: float
    problem: str = ""


class Trainer(Protocol):
    """Where a search has its runs made."""

    def train(self, runs: Sequence[SeededRun]) -> Iterator[FinishedRun]:
        """Make these runs, and yield each when it ends. Its model is there until the next one."""
