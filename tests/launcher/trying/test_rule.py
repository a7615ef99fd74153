"""The rule of a search: how often it keeps what changes nothing, and finds what is better."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest

from launcher.trying import rule

DEVIATION = 0.01  # of a pair's difference


def attempt(
    draw: random.Random, gain: float, base: Sequence[float] = (), smallest_gain: float = 0.005
) -> tuple[bool, int, bool]:
    """Whether a change with this gain is kept, its pairs, and whether its interval holds the gain.

    base: the noise of the base's first runs, which tries share.
    """
    max_pairs, used = rule.pairs_for(smallest_gain, DEVIATION / rule.PAIRED), [0, 0]
    spread = DEVIATION / 2**0.5
    luck = base or [draw.gauss(0, spread) for _ in range(max_pairs)]
    folder_noise = [draw.gauss(-gain, spread) for _ in range(max_pairs)]

    def shared(n: int) -> list[float]:
        used[0] = n
        return [a - b for a, b in zip(folder_noise[:n], luck, strict=False)]

    def fresh(n: int) -> list[float]:
        used[1] = n
        return [draw.gauss(-gain, DEVIATION) for _ in range(n)]

    looks = [n for n in rule.LOOKS if n <= max_pairs]
    verdict, differences, _ = rule.decide(shared, fresh, looks, smallest_gain)
    return verdict == "kept", sum(used), abs(fmean(differences) + gain) < rule.half(differences)


def test_what_changes_nothing_is_hardly_ever_kept():
    """Also where all tries share a base whose runs were unlucky: fresh pairs decide."""
    draw = random.Random(1)
    for _ in range(5):
        base = [draw.gauss(0.004, DEVIATION / 2**0.5) for _ in range(rule.LOOKS[-1])]
        n_kept = sum(attempt(draw, 0.0, base)[0] for _ in range(400))
        assert n_kept <= 8


@pytest.mark.parametrize(("gain", "min_share"), [(0.008, 0.8), (0.01, 0.95), (0.02, 0.99)])
def test_a_change_that_gains_is_found(gain, min_share):
    draw = random.Random(2)
    tries = [attempt(draw, gain) for _ in range(1000)]
    assert fmean(kept for kept, _, _ in tries) >= min_share
    assert fmean(inside for kept, _, inside in tries if kept) > 0.9


def losses_of(draw: random.Random, order: float, weights: float, n: int) -> tuple[Any, Any]:
    """Losses of a folder and of the base, for the same seeds. `order` is how much of the base's
    order of batches, which deviates by 0.014, the folder follows; its weights deviate by this."""
    orders = [draw.gauss(0, 0.014) for _ in range(n)]
    base_losses = [2.0 + lucky + draw.gauss(0, 0.0064) for lucky in orders]
    losses = [2.0 + order * lucky + draw.gauss(0, weights) for lucky in orders]
    return losses, base_losses


@pytest.mark.parametrize("gain", [0.01, 0.018, 0.035])
def test_a_gain_by_chosen_batches_is_luck(gain):
    """Their order is the same for all seeds: the best of many that somebody tried."""
    draw = random.Random(4)
    verdicts = [rule.may_be_luck(gain, *losses_of(draw, 0.0, 0.0064, 36)) for _ in range(500)]
    assert fmean(verdicts) > 0.8


@pytest.mark.parametrize(("every", "worse"), [(12, 0.05), (12, 0.15)])
def test_a_few_bad_seeds_do_not_hide_chosen_batches(every, worse):
    """A folder trains worse for one seed of so many, so that its losses deviate like the base's."""
    draw = random.Random(7)
    verdicts = []
    for _ in range(500):
        losses, base_losses = losses_of(draw, 0.0, 0.0064, 36)
        losses[::every] = [loss + worse for loss in losses[::every]]
        verdicts.append(rule.may_be_luck(0.035, losses, base_losses))
    assert fmean(verdicts) > 0.8


def test_more_than_the_luckiest_order_gains_is_no_luck():
    draw = random.Random(5)
    assert not any(rule.may_be_luck(0.08, *losses_of(draw, 0.0, 0.0064, 36)) for _ in range(500))


@pytest.mark.parametrize(
    ("order", "weights"),
    [(1.0, 0.0064), (0.5, 0.0032), (0.0, 0.0154)],
    ids=["same spread", "half of the spread", "another order of its own"],
)
def test_an_honest_change_is_no_luck(order, weights):
    """Averaged weights halve the spread, and larger batches have another order."""
    draw = random.Random(6)
    verdicts = [rule.may_be_luck(0.01, *losses_of(draw, order, weights, 36)) for _ in range(500)]
    assert fmean(verdicts) < 0.02


def test_a_hopeless_change_costs_few_pairs():
    draw = random.Random(3)
    assert fmean(attempt(draw, -0.01)[1] for _ in range(300)) < 8


def test_smaller_gains_need_more_pairs():
    pairs = [rule.pairs_for(gain, DEVIATION / rule.PAIRED) for gain in (0.05, 0.015, 0.005, 0.001)]
    assert pairs == sorted(pairs)
    assert pairs[0] < pairs[-1] == rule.LOOKS[-1]
