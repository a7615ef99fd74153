"""Compare a candidate with the base, by the losses of pairs of runs with the same seed."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from sm_nanogpt.entry_point.metrics import duration
from sm_nanogpt.launcher.files.ledger import Entry
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.trying import rule
from sm_nanogpt.launcher.trying.budget import (
    JUDGE_TIME_FIELD,
    MAX_TIME_RATIO,
    MAX_TIME_RATIO_SHARED,
)
from sm_nanogpt.launcher.trying.history import SearchLedger
from sm_nanogpt.launcher.trying.refusal import Refused
from sm_nanogpt.launcher.trying.runs import SeededRun

if TYPE_CHECKING:
    from sm_nanogpt.launcher.trying.search import Search

logger = logging.getLogger(__name__)

SHARED_SEEDS = "pairs of all tries"  # the purpose of the seeds that all folders share


@dataclass(frozen=True)
class Comparison:
    """The comparison of two training folders of a search: a candidate, and the base.

    purpose: what the ledger draws the seeds of their runs for, such as SHARED_SEEDS.
    """

    search: Search
    candidate: Source
    base: Source
    purpose: str = SHARED_SEEDS

    @property
    def ledger(self) -> SearchLedger:
        return self.search.ledger

    @property
    def has_fresh_seeds(self) -> bool:
        """True if the seeds are for this comparison alone."""
        return self.purpose != SHARED_SEEDS

    def differences(self, n_pairs: int) -> list[float]:
        """Make the runs for n_pairs seeds; return the candidate's losses minus the base's.

        n_pairs: one of rule.LOOKS. Raises Refused if the candidate's runs break a rule.
        """
        seeds = self.ledger.seeds(self.purpose, n_pairs)
        kind = "fresh" if self.has_fresh_seeds else "shared"
        title = f"{n_pairs} pairs of {kind} seeds"
        runs = []
        for seed in seeds:
            runs += [SeededRun(self.base, seed), SeededRun(self.candidate, seed)]
        self.search.measure(runs, title, comparison=self)
        losses = self.ledger.losses_of(self.candidate.sha256, seeds)
        base_losses = self.ledger.losses_of(self.base.sha256, seeds)
        differences = [loss - base for loss, base in zip(losses, base_losses, strict=True)]

        mean = fmean(differences)  # below 0: the candidate is better
        logger.info(f"{title}: {mean:+.4f} ±{rule.margin_of_mean(differences):.4f}")
        self.check_losses(seeds)
        max_ratio = MAX_TIME_RATIO if self.has_fresh_seeds else MAX_TIME_RATIO_SHARED
        self.search.budget.check_time(self.candidate.sha256, self.base.sha256, seeds, max_ratio)
        return differences

    def describe_course(self, looks: Sequence[int]) -> str:
        """Describe how many pairs a try takes, and how long, by the times of the base's runs.

        looks: the numbers of pairs after which the try may end.
        """
        budget = self.search.budget
        run_seconds = budget.mean_seconds(self.base.sha256) / self.search.run_maker.at_once
        run_seconds += budget.mean_seconds(self.base.sha256, JUDGE_TIME_FIELD)
        max_pairs = looks[-1]
        shortest = duration(run_seconds * self.count_missing_runs(looks[0]))
        longest = duration(run_seconds * (self.count_missing_runs(max_pairs) + 2 * max_pairs))
        n_pairs = f"{max_pairs}"
        if len(looks) > 1:
            n_pairs = f"{looks[0]} to {max_pairs}"
        fresh_pairs = f"if it looks better up to {max_pairs} of fresh ones"
        time = f"about {shortest} to {longest} if nothing else uses the cores"
        return f"{n_pairs} pairs of shared seeds, and {fresh_pairs}: {time}"

    def count_missing_runs(self, n_pairs: int) -> int:
        """The number of runs that are still to be made for n_pairs of shared seeds."""
        seeds = set(self.ledger.drawn_seeds(SHARED_SEEDS))
        n_missing = 0
        for folder in (self.candidate.sha256, self.base.sha256):
            n_made = len(seeds.intersection(self.ledger.seeds_of(folder)))
            n_missing += max(0, n_pairs - n_made)
        return n_missing

    def is_candidate(self, run: SeededRun) -> bool:
        """True if a run is of the candidate, and not of the base."""
        return run.source.sha256 == self.candidate.sha256

    def leak_check_bound(self, seed: int) -> float:
        """The loss below which a model of the candidate is checked for looking ahead.

        Fresh seeds decide, so the bound is infinite, and all models are checked. For a shared seed,
        it is the loss of the base: only models that beat the base are checked.
        """
        if self.has_fresh_seeds:
            return math.inf
        return self.ledger.losses.get((self.base.sha256, seed), math.inf)

    def check_losses(self, seeds: Sequence[int]) -> None:
        """Raise Refused if two seeds have one loss, or all losses are those of another folder."""
        losses = self.ledger.losses
        candidate_losses = self.ledger.losses_of(self.candidate.sha256, seeds)
        if len(set(candidate_losses)) < len(seeds):
            raise Refused("different seeds give the same loss")
        names = {
            self.ledger.start["folder"]: "the search's first folder",
            self.base.sha256: "the base",
        }
        for folder in {folder for folder, _ in losses} - {self.candidate.sha256}:
            if [losses.get((folder, seed)) for seed in seeds] == candidate_losses:
                name = names.get(folder, f"folder {folder[:8]}, tried before")
                raise Refused(f"its runs are those of {name}: the change changes nothing")

    def may_be_luck(self, gain: float) -> bool:
        """As rule.may_be_luck, for all seeds with which base and candidate were trained."""
        base_seeds = self.ledger.seeds_of(self.base.sha256)
        seeds = self.ledger.seeds_of(self.candidate.sha256)
        common = [seed for seed in seeds if seed in base_seeds]
        losses = self.ledger.losses_of(self.candidate.sha256, common)
        base_losses = self.ledger.losses_of(self.base.sha256, common)
        return rule.may_be_luck(gain, losses, base_losses)

    def summary(self, differences: Sequence[float]) -> Entry:
        """The mean difference with its 95 % interval, and the candidate's time over the base's."""
        mean = fmean(differences)
        margin = rule.margin_of_mean(differences)
        seconds = self.search.budget.mean_seconds(self.candidate.sha256)
        base_seconds = self.search.budget.mean_seconds(self.base.sha256)
        return {
            "pairs": len(differences),
            "mean": round(mean, 5),
            "low": round(mean - margin, 5),
            "high": round(mean + margin, 5),
            "times": round(seconds / base_seconds, 5),
        }
