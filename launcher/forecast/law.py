"""The law of a text: what a run on it will lose, by what shorter runs on parts of it lost.

    log loss = c0 + c1 (P D)^-a + c2 (D/U)^b (P/U)^c

P are the parameters of the matrices, D the tokens that a run trains on, and U those of its text, in
millions. The first two terms are what compute buys, the third what a short text costs.
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
class Run:
    """A complete run: its matrix parameters, the tokens that it trains on, the tokens of its text,
    and its loss in nats per token."""

    parameters: int
    tokens: int
    unique: int
    loss: float = math.nan


@dataclass(frozen=True)
class Law:
    """The exponents, the prior of the numbers of a text, and the standard deviation of a run's log
    loss around them. `spread` widens the intervals, so that they hold what they say."""

    exponents: tuple[float, ...]
    mean: list[float]
    covariance: list[list[float]]
    noise: float
    spread: float = 1.0

    def features(self, runs: Sequence[Run]) -> Tensor:
        """[runs, 3] in float64."""
        a, b, c = self.exponents
        rows = []
        for run in runs:
            p, d, u = (n / 1e6 for n in (run.parameters, run.tokens, run.unique))
            rows.append((1.0, (p * d) ** -a, (d / u) ** b * (p / u) ** c))
        return torch.tensor(rows, dtype=torch.float64)

    def of_text(self, pilots: Sequence[Run]) -> TextLaw:
        x = self.features(pilots)
        y = torch.tensor([math.log(run.loss) for run in pilots], dtype=torch.float64)
        mean = torch.tensor(self.mean, dtype=torch.float64)
        precision = torch.linalg.inv(torch.tensor(self.covariance, dtype=torch.float64))
        covariance = torch.linalg.inv(precision + x.T @ x / self.noise**2)
        posterior = covariance @ (precision @ mean + x.T @ y / self.noise**2)
        misfit = float((y - x @ posterior).square().mean().sqrt())
        return TextLaw(self, posterior, covariance, misfit)


@dataclass(frozen=True)
class TextLaw:
    """The numbers of one text, with their covariance, and how far its pilots are from the law:
    the root mean square of their log losses."""

    law: Law
    mean: Tensor
    covariance: Tensor
    misfit: float

    def losses(self, runs: Sequence[Run]) -> list[tuple[float, float]]:
        """The median of each run's loss, and the standard deviation of its logarithm."""
        x = self.law.features(runs)
        variance = (x @ self.covariance * x).sum(1) + self.law.noise**2
        medians, deviations = (x @ self.mean).exp(), self.law.spread * variance.sqrt()
        return list(zip(medians.tolist(), deviations.tolist(), strict=True))

    def change(self, run: Run, other: Run) -> tuple[float, float]:
        """By what the log loss of another run differs from that of a run, and the standard
        deviation of that, with the noise of both."""
        own, others = self.law.features([run, other])
        apart = others - own
        variance = float(apart @ self.covariance @ apart) + 2 * self.law.noise**2
        return float(apart @ self.mean), self.law.spread * math.sqrt(variance)


@cache
def shared() -> Law:
    return Law(**json.loads(Path(__file__).with_name("law.json").read_bytes()))
