"""Make the runs of a search on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from sm_nanogpt.entry_point.cores import cores
from sm_nanogpt.launcher.files.ledger import Entry
from sm_nanogpt.launcher.local.confine import warn_of_unprotected
from sm_nanogpt.launcher.local.gpus import visible_gpus
from sm_nanogpt.launcher.local.runs import Run, run_all
from sm_nanogpt.launcher.trying.runs import SeededRun, TriedRun

if TYPE_CHECKING:
    from sm_nanogpt.launcher.trying.search import Search


class LocalRuns:
    """Makes the runs of a search on this machine: one on each core, or on each GPU."""

    makes_jobs = False

    def __init__(self, search: Search) -> None:
        self.search = search
        self.gpus: list[str] = []
        if search.start["device"] != "cpu":
            self.gpus = visible_gpus(torch.cuda.device_count())
        self.at_once = len(self.gpus) or cores()
        warn_of_unprotected()

    def train(self, runs: Sequence[SeededRun]) -> Iterator[TriedRun]:
        for start in range(0, len(runs), self.at_once):
            yield from self.train_together(runs[start : start + self.at_once])

    def train_together(self, runs: Sequence[SeededRun]) -> Iterator[TriedRun]:
        """Make runs at the same time.

        The ledger notes first that they begin. If this command is killed, they are made again.
        """
        max_seconds = self.search.budget.max_seconds()
        local_runs = []
        for run in runs:
            values = {**self.search.hyperparameters, "seed": run.seed}
            local_run = Run(
                run.source,
                values,
                self.search.text_directory,
                max_seconds=max_seconds,
                is_isolated=True,
            )
            local_runs.append(local_run)
        self.search.ledger.add("begun", runs=[run.key for run in runs])
        # While a model is judged, no run goes on (in_groups): the model sees the judge's text, and
        # could signal it to a run, which could write it into another model.
        for index, ended in run_all(local_runs, len(runs), self.gpus, in_groups=True):
            yield TriedRun(runs[index], ended.directory / "model", ended.seconds, ended.problem)

    def cost_of(self, entry: Entry) -> float:
        return 0.0  # nothing is billed
