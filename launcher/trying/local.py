"""The runs of a search on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from entry_point.cores import cores
from launcher.files.ledger import Entry
from launcher.local.confine import warn_of_unprotected
from launcher.local.gpus import visible_gpus
from launcher.local.runs import Run, run_all
from launcher.trying.budget import Budget
from launcher.trying.runs import FinishedRun, SeededRun


class LocalRuns:
    """Makes the runs of a search on this machine: one on each core, or on each GPU.

    start is the first entry of its ledger, text the directory that its runs read.
    """

    def __init__(self, start: Entry, text: Path, budget: Budget) -> None:
        self.start, self.text, self.budget = start, text, budget
        self.gpus: list[str] = []
        if start["device"] != "cpu":
            self.gpus = visible_gpus(torch.cuda.device_count())
        warn_of_unprotected()

    def train(self, runs: Sequence[SeededRun]) -> Iterator[FinishedRun]:
        hyperparameters, limit = self.start["hyperparameters"], self.budget.limit
        local_runs = []
        for run in runs:
            values = {**hyperparameters, "seed": run.seed}
            local_runs.append(Run(run.source, values, self.text, limit=limit, is_isolated=True))
        for index, ended in run_all(local_runs, cores(), self.gpus):
            yield FinishedRun(runs[index], ended.directory / "model", ended.seconds, ended.problem)
