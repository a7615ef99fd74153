"""The rule of a search: how often it keeps what changes nothing, and finds what is better."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import pytest

from sm_nanogpt.launcher.trying import rule

DEVIATION = 0.01  # of a pair's difference


class Attempt(NamedTuple):
    is_kept: bool
    n_pairs: int
    holds_gain: bool  # whether the interval of the change holds its gain


def attempt(
    draw: random.Random, gain: float, base: Sequence[float] = (), smallest_gain: float = 0.005
) -> Attempt:
    """Tries a change with this gain.

    base: the noise of the base's first runs, which tries share.
    """
    max_pairs = rule.pairs_for(smallest_gain, DEVIATION / rule.PAIRED)
    n_pairs = {"shared": 0, "fresh": 0}
    spread = DEVIATION / 2**0.5
    base_losses = base or [draw.gauss(0, spread) for _ in range(max_pairs)]
    losses = [draw.gauss(-gain, spread) for _ in range(max_pairs)]

    def shared(n: int) -> list[float]:
        n_pairs["shared"] = n
        return [losses[pair] - base_losses[pair] for pair in range(n)]

    def fresh(n: int) -> list[float]:
        n_pairs["fresh"] = n
        return [draw.gauss(-gain, DEVIATION) for _ in range(n)]

    looks = [n for n in rule.LOOKS if n <= max_pairs]
    decision = rule.decide(shared, fresh, looks, smallest_gain)
    error = abs(fmean(decision.differences) + gain)
    holds_gain = error < rule.margin(decision.differences)
    return Attempt(decision.verdict == "kept", sum(n_pairs.values()), holds_gain)


def test_what_changes_nothing_is_hardly_ever_kept():
    """Also where all tries share a base whose runs were unlucky: fresh pairs decide."""
    draw = random.Random(1)
    for _ in range(5):
        base = [draw.gauss(0.004, DEVIATION / 2**0.5) for _ in range(rule.LOOKS[-1])]
        tries = [attempt(draw, 0.0, base) for _ in range(400)]
        assert sum(change.is_kept for change in tries) <= 8


@pytest.mark.parametrize(("gain", "min_share"), [(0.008, 0.8), (0.01, 0.95), (0.02, 0.99)])
def test_a_change_that_gains_is_found(gain, min_share):
    draw = random.Random(2)
    tries = [attempt(draw, gain) for _ in range(1000)]
    kept = [change for change in tries if change.is_kept]
    assert len(kept) / len(tries) >= min_share
    assert fmean(change.holds_gain for change in kept) > 0.9


@pytest.mark.parametrize(("gain", "smallest_gain"), [(0.002, 0.005), (0.001, 0.0001)])
def test_a_gain_too_small_to_count_is_not_kept(gain, smallest_gain):
    """However sure it is, as that of a folder whose runs are the base's and whose model looks ahead
    by less than the judge takes for rounding."""

    def certain(n: int) -> list[float]:
        return [-gain - 1e-5 * (pair % 2) for pair in range(n)]

    decision = rule.decide(certain, certain, rule.LOOKS, smallest_gain)
    assert decision.are_fresh
    assert decision.verdict == "no better"


def losses_of(
    draw: random.Random, order: float = 0.0, weights: float = 0.0064
) -> tuple[list[float], list[float]]:
    """Losses of a folder and of the base, for the same 36 seeds. `order` is how much of the base's
    order of batches, which deviates by 0.014, the folder follows; its weights deviate by this."""
    orders = [draw.gauss(0, 0.014) for _ in range(36)]
    base_losses = [2.0 + lucky + draw.gauss(0, 0.0064) for lucky in orders]
    losses = [2.0 + order * lucky + draw.gauss(0, weights) for lucky in orders]
    return losses, base_losses


def share_of_luck(
    draw: random.Random, gain: float, order: float = 0.0, weights: float = 0.0064
) -> float:
    """How often a gain of such a folder may be luck."""
    verdicts = []
    for _ in range(500):
        losses, base_losses = losses_of(draw, order, weights)
        verdicts.append(rule.may_be_luck(gain, losses, base_losses))
    return fmean(verdicts)


@pytest.mark.parametrize("gain", [0.01, 0.018, 0.035])
def test_a_gain_by_chosen_batches_is_luck(gain):
    """Their order is the same for all seeds: the best of many that somebody tried."""
    assert share_of_luck(random.Random(4), gain) > 0.8


@pytest.mark.parametrize("worse", [0.05, 0.15])
def test_a_few_bad_seeds_do_not_hide_chosen_batches(worse):
    """A folder trains worse for each twelfth seed, so that its losses deviate like the base's."""
    draw = random.Random(7)
    verdicts = []
    for _ in range(500):
        losses, base_losses = losses_of(draw)
        losses[::12] = [loss + worse for loss in losses[::12]]
        verdicts.append(rule.may_be_luck(0.035, losses, base_losses))
    assert fmean(verdicts) > 0.8


def test_more_than_the_luckiest_order_gains_is_no_luck():
    assert share_of_luck(random.Random(5), 0.08) == 0


@pytest.mark.parametrize(
    ("order", "weights"),
    [(1.0, 0.0064), (0.5, 0.0032), (0.0, 0.0154)],
    ids=["same spread", "half of the spread", "another order of its own"],
)
def test_an_honest_change_is_no_luck(order, weights):
    """Averaged weights halve the spread, and larger batches have another order."""
    assert share_of_luck(random.Random(6), 0.01, order, weights) < 0.02


def test_a_hopeless_change_costs_few_pairs():
    draw = random.Random(3)
    tries = [attempt(draw, -0.01) for _ in range(300)]
    assert fmean(change.n_pairs for change in tries) < 8


def test_smaller_gains_need_more_pairs():
    pairs = [rule.pairs_for(gain, DEVIATION / rule.PAIRED) for gain in (0.05, 0.015, 0.005, 0.001)]
    assert pairs == sorted(pairs)
    assert pairs[0] < pairs[-1] == rule.LOOKS[-1]
