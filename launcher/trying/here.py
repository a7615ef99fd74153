"""The runs of a search on this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from entry_point.cores import cores
from launcher.local.confine import version
from launcher.local.process import visible_gpus
from launcher.local.runs import Run, run_all
from launcher.source import Source

if TYPE_CHECKING:
    from launcher.trying.search import Search

logger = logging.getLogger(__name__)

MOST_SIZE = 1.1  # times the parameters and the bytes of the search's first model
SLOW = 4.0  # times its time by the clock, after which a run is ended


@dataclass(frozen=True)
class Made:
    """A run that ended: where its model is, and how many seconds it computed; or its problem."""

    source: Source
    seed: int
    model: Path
    seconds: float
    problem: str = ""


class Here:
    """Makes the runs on this machine: one on each core, or on each GPU."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.gpus: list[str] = []
        if search.start["device"] != "cpu":
            self.gpus = visible_gpus(torch.cuda.device_count())
        if (known := version()) < 4:
            open_to = "TCP" if known else "any file, and TCP"
            logger.warning(f"on this system, runs are not kept from {open_to} (Landlock)")

    def made(self, runs: Sequence[tuple[Source, int]]) -> Iterator[Made]:
        words, text, limit = self.search.start["words"], self.search.text, self.search.limit
        given = [
            Run(source, {**words, "seed": seed}, text, limit=limit, alone=True)
            for source, seed in runs
        ]
        for index, ended in run_all(given, cores(), self.gpus):
            seconds = ended.seconds if self.gpus else ended.cpu_seconds
            yield Made(*runs[index], ended.out / "model", seconds, ended.problem)
