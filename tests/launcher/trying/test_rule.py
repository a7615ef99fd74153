"""The rule of a search: how often it keeps what changes nothing, and finds what is better."""

from __future__ import annotations

import math
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
    max_pairs = rule.n_pairs_for(smallest_gain, DEVIATION / rule.PAIRED_RATIO)
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
    holds_gain = error < rule.margin_of_mean(decision.differences)
    return Attempt(decision.verdict == "kept", sum(n_pairs.values()), holds_gain)


def share_below(t: float, n_pairs: int) -> float:
    """The share of Student's t distribution of n pairs below t, by Simpson's rule."""
    freedom = n_pairs - 1
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    steps = 1000
    integral = 0.0
    for step in range(steps + 1):
        weight = 2 + 2 * (step % 2)
        if step in (0, steps):
            weight = 1
        x = t * step / steps
        integral += weight * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
    return 0.5 + scale * integral * t / steps / 3


@pytest.mark.parametrize(
    ("quantiles", "share"), [(rule.T95, 0.95), (rule.T975, 0.975), (rule.T995, 0.995)]
)
def test_a_test_errs_as_often_as_it_says(quantiles, share):
    assert list(quantiles) == [4, 8, 16, 32, 64]
    for n_pairs, t in quantiles.items():
        assert share_below(t, n_pairs) == pytest.approx(share, abs=5e-5)


def test_an_interval_is_of_the_mean_of_all_pairs():
    standard_error = math.sqrt(4 / 3) / 2
    assert rule.margin_of_mean([1.0, 3.0, 1.0, 3.0]) == pytest.approx(3.182 * standard_error)


def test_what_changes_nothing_is_hardly_ever_kept():
    """Also where all tries share a base whose runs were unlucky: fresh pairs decide."""
    draw = random.Random(1)
    for _ in range(2):
        base = [draw.gauss(0.004, DEVIATION / 2**0.5) for _ in range(rule.LOOKS[-1])]
        tries = [attempt(draw, 0.0, base) for _ in range(200)]
        assert sum(change.is_kept for change in tries) <= 4


def test_a_change_that_gains_is_found():
    draw = random.Random(2)
    tries = [attempt(draw, 0.008) for _ in range(400)]
    kept = [change for change in tries if change.is_kept]
    assert len(kept) / len(tries) >= 0.8
    assert fmean(change.holds_gain for change in kept) > 0.9


def test_four_of_five_gains_that_can_be_detected_are_confirmed():
    draw = random.Random(8)
    gain = rule.detectable_gains(1.0)[8]
    tries = [[draw.gauss(-gain, rule.PAIRED_RATIO) for _ in range(8)] for _ in range(500)]
    n_confirmed = sum(rule.is_confirmed(differences, gain) for differences in tries)
    assert n_confirmed / len(tries) == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize(("gain", "smallest_gain"), [(0.002, 0.005), (0.001, 0.0001)])
def test_a_gain_too_small_to_count_is_not_kept(gain, smallest_gain):
    """However sure it is, as that of a folder whose runs are the base's and whose model looks ahead
    by less than the judge takes for rounding."""

    def certain(n: int) -> list[float]:
        return [-gain - 1e-5 * (pair % 2) for pair in range(n)]

    decision = rule.decide(certain, certain, rule.LOOKS, smallest_gain)
    assert decision.are_fresh
    assert decision.verdict == "no better"


@pytest.mark.parametrize(("gain", "n_fresh"), [(1.2, 64), (1.3, 32), (9.0, 32)])
def test_fresh_pairs_are_as_many_as_half_of_the_gain_needs(gain, n_fresh):
    """Four pairs, by whose deviation the gain is this large, tell little of either."""
    deviation = DEVIATION * math.sqrt(3 / 4)  # of four differences, by their mean
    n_pairs_asked = []

    def shared(n: int) -> list[float]:
        return [-gain * DEVIATION + deviation * (-1) ** pair for pair in range(n)]

    def fresh(n: int) -> list[float]:
        n_pairs_asked.append(n)
        return shared(n)

    assert rule.decide(shared, fresh, rule.LOOKS, 0.0).are_fresh
    assert n_pairs_asked == [n_fresh]


def test_a_change_that_no_look_decides_is_undecided():
    differences = [-0.004 - 0.01 * (-1) ** pair for pair in range(64)]

    def shared(n: int) -> list[float]:
        return differences[:n]

    def fresh(n: int) -> list[float]:
        raise AssertionError("it seems no better")

    decision = rule.decide(shared, fresh, [4, 8], 0.005)
    assert decision == rule.Decision("undecided", differences[:8], are_fresh=False)


def test_a_change_of_nothing_is_no_better():
    assert rule.first_verdict([0.0] * 4, 0.005) == "no better"


def losses_of(
    draw: random.Random, order: float = 0.0, weights: float = 0.0064
) -> tuple[list[float], list[float]]:
    """Losses of a folder and of the base, for the same 36 seeds. `order` is how much of the base's
    order of batches, which deviates by 0.014, the folder follows; its weights deviate by this."""
    orders = [draw.gauss(0, 0.014) for _ in range(36)]
    base_losses = [2.0 + lucky + draw.gauss(0, 0.0064) for lucky in orders]
    losses = [2.0 + order * lucky + draw.gauss(0, weights) for lucky in orders]
    return losses, base_losses


def share_of_luck(gain: float, order: float = 0.0, weights: float = 0.0064) -> float:
    """How often a gain of such a folder may be luck."""
    draw = random.Random(4)
    verdicts = []
    for _ in range(200):
        losses, base_losses = losses_of(draw, order, weights)
        verdicts.append(rule.may_be_luck(gain, losses, base_losses))
    return fmean(verdicts)


def test_a_gain_by_chosen_batches_is_luck():
    """Their order is the same for all seeds: the best of many that somebody tried."""
    assert share_of_luck(0.035) > 0.8


def test_a_few_bad_seeds_do_not_hide_chosen_batches():
    """A folder trains worse for each twelfth seed, so that its losses deviate like the base's."""
    draw = random.Random(7)
    verdicts = []
    for _ in range(200):
        losses, base_losses = losses_of(draw)
        losses[::12] = [loss + 0.05 for loss in losses[::12]]
        verdicts.append(rule.may_be_luck(0.035, losses, base_losses))
    assert fmean(verdicts) > 0.8


def test_a_sixth_of_the_pairs_may_be_bad():
    base_losses = [2.0 + seed / 100 for seed in range(36)]
    losses = [loss + 0.1 * (seed < 6) for seed, loss in enumerate(base_losses)]
    assert rule.without_worst(losses, base_losses) == (losses[6:], base_losses[6:])


def test_more_than_the_luckiest_order_gains_is_no_luck():
    assert share_of_luck(0.065) < 0.02


@pytest.mark.parametrize(
    ("order", "weights"),
    [(0.5, 0.0032), (0.0, 0.0154)],
    ids=["half of the spread", "another order of its own"],
)
def test_an_honest_change_is_no_luck(order, weights):
    """Averaged weights halve the spread, and larger batches have another order."""
    assert share_of_luck(0.01, order, weights) < 0.02


def test_a_hopeless_change_costs_few_pairs():
    draw = random.Random(3)
    tries = [attempt(draw, -0.01) for _ in range(100)]
    assert fmean(change.n_pairs for change in tries) < 8


def test_smaller_gains_need_more_pairs():
    deviation = 0.016  # of a loss
    pairs = [rule.n_pairs_for(gain, deviation) for gain in (0.05, 0.02, 0.007, 0.001)]
    assert pairs == [4, 8, 32, 64]
