"""The law of a text, which tells the loss of a run from the losses of shorter runs on parts of it.

    log loss = c0 + c1 (P D)^-a + c2 (D/U)^b (P/U)^c

P are the parameters of the matrices, D the tokens that a run trains on, and U the tokens of its
text, in millions. The second term is what compute gains, and the third what a short text costs. A
forecast starts at the loss of the largest pilot, which is nearest to it, and follows the law from
there.

The exponents are the same for every text. They, and how the numbers c vary between texts, were
fitted by examples/benchmarks/forecasting.py to the runs in forecast-runs.jsonl beside it. The
numbers of one text come from its pilots by Bayesian linear regression (Bishop 2006, 3.3), with the
other texts as the prior.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class CompleteRun:
    """A complete run, and its loss."""

    parameters: int  # of the matrices of its model
    tokens: int  # that it trains on, counted in each reading
    unique: int  # tokens of its text, counted once
    loss: float = math.nan  # in nats per token; NaN if it is to be forecast

    @property
    def compute(self) -> int:
        """A number proportional to its operations."""
        return self.parameters * self.tokens


@dataclass(frozen=True)
class Law:
    """The law for all texts: the exponents, and how the numbers c of texts vary."""

    exponents: tuple[float, ...]  # a, b, c
    mean: list[float]  # of the numbers c0, c1, c2 of a text: the prior
    covariance: list[list[float]]
    noise: float  # standard deviation of the log loss of a run
    spread: float = 1.0  # widens the intervals of forecasts, so that they hold what they say

    def features(self, runs: Sequence[CompleteRun]) -> Tensor:
        """The factors by which c0, c1, and c2 enter the log loss of each run, float64 [runs, 3]."""
        a, b, c = self.exponents
        rows = []
        for run in runs:
            p = run.parameters / 1e6
            d = run.tokens / 1e6
            u = run.unique / 1e6
            rows.append((1.0, (p * d) ** -a, (d / u) ** b * (p / u) ** c))
        return torch.tensor(rows, dtype=torch.float64)

    def of_text(self, pilots: Sequence[CompleteRun]) -> TextLaw:
        """Fit the law of a text to the losses of its pilots."""
        x = self.features(pilots)
        y = torch.tensor([math.log(run.loss) for run in pilots], dtype=torch.float64)
        mean = torch.tensor(self.mean, dtype=torch.float64)
        precision = torch.linalg.inv(torch.tensor(self.covariance, dtype=torch.float64))
        covariance = torch.linalg.inv(precision + x.T @ x / self.noise**2)
        posterior = covariance @ (precision @ mean + x.T @ y / self.noise**2)
        residuals = y - x @ posterior
        misfit = float(residuals.square().mean().sqrt())
        largest = max(pilots, key=lambda run: (run.unique, run.compute))
        above = float(residuals[pilots.index(largest)])
        return TextLaw(self, posterior, covariance, misfit, above)


@dataclass(frozen=True)
class TextLaw:
    """The law of one text: a normal distribution of its numbers c0, c1, and c2."""

    law: Law
    mean: Tensor  # float64 [3]
    covariance: Tensor  # float64 [3, 3]
    misfit: float  # root mean square of the differences of the pilots' log losses from the law
    above: float  # by how much the log loss of the largest pilot is above the law

    def losses(self, runs: Sequence[CompleteRun]) -> list[tuple[float, float]]:
        """For each larger run, the median of its loss, and the standard deviation of its log
        loss."""
        x = self.law.features(runs)
        variance = (x @ self.covariance * x).sum(1) + self.law.noise**2
        medians = (x @ self.mean + self.above).exp()
        deviations = self.law.spread * variance.sqrt()
        return list(zip(medians.tolist(), deviations.tolist(), strict=True))

    def change(self, run: CompleteRun, other: CompleteRun) -> tuple[float, float]:
        """The log loss of `other` minus the log loss of `run`, and the standard deviation of this
        difference, which includes the noise of the two runs."""
        features, features_of_other = self.law.features([run, other])
        difference = features_of_other - features
        variance = float(difference @ self.covariance @ difference) + 2 * self.law.noise**2
        return float(difference @ self.mean), self.law.spread * math.sqrt(variance)


@cache
def shared_law() -> Law:
    """The law that was fitted to the runs of many texts."""
    return Law(**json.loads(Path(__file__).with_name("law.json").read_bytes()))
