"""Check whether pilots tell the losses of larger models, and at which size the loss is lowest."""

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

MAX_MISFIT = 0.03  # of log losses; honest texts have up to 0.015
MAX_DEVIATIONS = (
    4  # standard deviations of the worth of compute; most texts have up to 2.4, and release notes 5
)
MAX_ABOVE = 0.02  # of the largest pilot's log loss over the law; honest texts have up to 0.014
# Validation loss over train loss, early in training. With texts of one kind, it is about 1.
MAX_LOSS_RATIO = 1.3
MIN_LOSS_NATS = 0.1  # on a text that repeats itself, a pilot loses less
MAX_ENTROPY_SHARE = 0.97  # of the loss by frequencies alone; a pilot that learns loses less
AS_GOOD_NATS = 0.003  # a size that loses at most so much more is as good


def check_text(pilots: Mapping[float, Pilot], ids: Tensor, unit: str) -> None:
    """Raise InputError if the text repeats itself, or pilots learn only the frequencies of ids.

    pilots, by size, have all read the same text. ids: of the training text, of any integer type
    [n]. unit: what they stand for, such as `characters`.
    """
    counts = torch.bincount(unsigned(ids))
    shares = counts[counts > 0] / counts.sum()
    # The loss of a model that knows only the frequencies.
    entropy = -float((shares * shares.log()).sum())
    lowest_loss = min(pilot.loss for pilot in pilots.values())
    if lowest_loss < MIN_LOSS_NATS:
        problem = f"the text repeats itself: a pilot has a loss of {lowest_loss:.3f} nats"
        raise InputError(f"no forecast: {problem}")
    if lowest_loss > MAX_ENTROPY_SHARE * entropy:
        problem = problem_of_validation(pilots)
        if problem:
            raise InputError(f"no forecast: {problem}", code="another-kind")
        problem = f"the pilots learn no more than how frequent the {unit} are"
        raise InputError(f"no forecast: {problem}")


def problem_of_law(text_law: TextLaw, is_packaged: bool) -> str:
    """Why the law of a text cannot tell what larger models lose on it, or ''.

    is_packaged: the packaged training folder made the pilots, and not an edited one.
    """
    shared_law = text_law.law
    worth = float(text_law.mean[1])  # of compute: c1
    usual_worth = shared_law.mean[1]
    deviation = math.sqrt(shared_law.covariance[1][1])
    if abs(worth - usual_worth) > MAX_DEVIATIONS * deviation:
        return f"compute is worth {worth / usual_worth:.2g} times what it is on other texts"
    if text_law.misfit > MAX_MISFIT:
        problem = f"the pilots miss the law by {text_law.misfit:.1%} (at most {MAX_MISFIT:.0%})"
        if not is_packaged:
            problem += " of the training folder as it is packaged"
        return problem
    if text_law.above > MAX_ABOVE:
        gains = "larger models gain less than on other texts"
        return f"{gains}: the largest pilot is {text_law.above:.1%} above the law"
    return ""


def describe_losses(losses: Mapping[float, Expected]) -> str:
    """Describe the losses of pilots on the whole text, by size; '' if there is none."""
    if not losses:
        return ""
    measured = [f"{expected.loss:.3f} at size {size:g}" for size, expected in losses.items()]
    return f"; the pilots lost {', '.join(measured)}"


def has_lowest(losses: Mapping[float, Expected]) -> bool:
    """True if the losses, in the order of sizes, fall, and then rise by over AS_GOOD_NATS.

    So they do if larger sizes overfit. False if there are none.
    """
    if not losses:
        return False
    by_size = [losses[size].loss for size in sorted(losses)]
    lowest = by_size.index(min(by_size))
    falls = by_size[:lowest] == sorted(by_size[:lowest], reverse=True)
    rises = by_size[lowest:] == sorted(by_size[lowest:])
    return falls and rises and by_size[-1] > by_size[lowest] + AS_GOOD_NATS


def up_to_lowest(losses: Mapping[float, Expected]) -> dict[float, Expected]:
    """The losses by size, up to the size with the lowest loss."""
    best = min(losses, key=lambda size: losses[size].loss)
    return {size: expected for size, expected in losses.items() if size <= best}


def problem_of_validation(pilots: Mapping[float, Pilot]) -> str:
    """Describe how the validation text differs from the training text, by the smallest pilot.

    Returns '' if the validation text and the training text are of one kind.
    """
    pilot = pilots[min(pilots)]
    if pilot.train_loss is None or pilot.loss <= MAX_LOSS_RATIO * pilot.train_loss:
        return ""
    losses = f"a pilot loses {pilot.loss:.2f} nats on it, and {pilot.train_loss:.2f} in training"
    return f"the validation text is of another kind than the training text: {losses}"


def best_size(rows: Sequence[Row]) -> float | None:
    """The smallest size whose loss is at most AS_GOOD_NATS over the lowest; None without rows."""
    lowest = min((row.expected.loss for row in rows), default=0.0)
    for row in rows:
        if row.expected.loss <= lowest + AS_GOOD_NATS:
            return row.size
    return None
