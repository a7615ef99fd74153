"""Whether pilots say what larger models lose, and from which size on these lose more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sm_nanogpt.entry_point.text import unsigned
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.forecast.law import TextLaw
from sm_nanogpt.launcher.job import Expected
from sm_nanogpt.launcher.launching.forecasts import Pilot, Row

MAX_MISFIT = 0.03  # of log losses: that of honest texts is up to 0.015
MAX_DEVIATIONS = 4  # of what compute is worth: most texts are within 2.4, release notes at 5
MAX_ABOVE = 0.02  # of log loss: the largest pilot of honest texts is up to 0.014 above the law
OTHER_KIND = 1.3  # validation loss over train loss, early in training: honest texts are near 1
MIN_LOSS = 0.1  # nats: a pilot on a text that repeats itself loses less
MAX_OF_ENTROPY = 0.97  # of the loss by frequencies alone: a pilot that learns loses less
AS_GOOD = 0.003  # nats: a size that loses so little more is as good


def check_text(pilots: Mapping[float, Pilot], ids: Tensor, unit: str) -> None:
    """Raise InputError if the losses of pilots, by size, on the same text mean nothing.

    ids are those of the training text, of any integer type [n]; unit is what they are.
    """
    counts = torch.bincount(unsigned(ids))
    shares = counts[counts > 0] / counts.sum()
    entropy = -float((shares * shares.log()).sum())  # the loss of a model that knows no more
    lowest = min(pilot.loss for pilot in pilots.values())
    if lowest < MIN_LOSS:
        problem = f"the text repeats itself: a pilot has a loss of {lowest:.3f} nats"
        raise InputError(f"no forecast: {problem}")
    if lowest > MAX_OF_ENTROPY * entropy:
        problem = problem_of_validation(pilots)
        if problem:
            raise InputError(f"no forecast: {problem}", "another-kind")
        problem = f"the pilots learn no more than how frequent the {unit} are"
        raise InputError(f"no forecast: {problem}")


def problem_of_law(law: TextLaw, is_packaged: bool) -> str:
    """Why a law does not say what larger models lose on its text, or ''.

    is_packaged: the pilots are of the training folder as it is packaged.
    """
    worth = float(law.mean[1])  # of compute
    worth_elsewhere = law.law.mean[1]
    deviation = math.sqrt(law.law.covariance[1][1])
    deviations = abs(worth - worth_elsewhere) / deviation
    if deviations > MAX_DEVIATIONS:
        return f"compute is worth {worth / worth_elsewhere:.2g} times what it is on other texts"
    if law.misfit > MAX_MISFIT:
        problem = f"the pilots miss the law by {law.misfit:.1%} (at most {MAX_MISFIT:.0%})"
        if not is_packaged:
            problem += " of the training folder as it is packaged"
        return problem
    if law.above > MAX_ABOVE:
        gains = "larger models gain less than on other texts"
        return f"{gains}: the largest pilot is {law.above:.1%} above the law"
    return ""


def describe_losses(losses: Mapping[float, Expected]) -> str:
    """What the pilots lost on the whole text, by size: jobs of these sizes do. '' without any."""
    if not losses:
        return ""
    measured = [f"{expected.loss:.3f} at size {size:g}" for size, expected in losses.items()]
    return f"; the pilots lost {', '.join(measured)}"


def has_lowest(losses: Mapping[float, Expected]) -> bool:
    """True if the losses, by size, fall to the lowest one and rise from it, as of an overfit."""
    if not losses:
        return False
    by_size = [losses[size].loss for size in sorted(losses)]
    lowest = by_size.index(min(by_size))
    falls = by_size[:lowest] == sorted(by_size[:lowest], reverse=True)
    rises = by_size[lowest:] == sorted(by_size[lowest:])
    return falls and rises and by_size[-1] > by_size[lowest] + AS_GOOD


def up_to_lowest(losses: Mapping[float, Expected]) -> dict[float, Expected]:
    """The losses by size, without the sizes over that of the lowest."""
    best = min(losses, key=lambda size: losses[size].loss)
    return {size: expected for size, expected in losses.items() if size <= best}


def problem_of_validation(pilots: Mapping[float, Pilot]) -> str:
    """How the validation text differs from the training text, by the smallest of these pilots.

    '' if the two are of one kind.
    """
    pilot = pilots[min(pilots)]
    if pilot.train_loss is None or pilot.loss <= OTHER_KIND * pilot.train_loss:
        return ""
    losses = f"a pilot loses {pilot.loss:.2f} nats on it, and {pilot.train_loss:.2f} in training"
    return f"the validation text is of another kind than the training text: {losses}"


def best_size(rows: Sequence[Row]) -> float | None:
    """The smallest size whose loss is at most AS_GOOD over the lowest; None without rows."""
    lowest = min((row.expected.loss for row in rows), default=0.0)
    for row in rows:
        if row.expected.loss <= lowest + AS_GOOD:
            return row.size
    return None
