"""Decide whether a change is better: by a sequential test of pairs of runs, then by fresh pairs.

A pair is two runs of one seed, of the base and of the changed folder: they begin with the same
weights and see the same batches, so their difference varies less than either loss. After each
number of pairs in LOOKS, one-sided t-tests say whether the change is better (at 5 %), or gains less
than the search looks for (at 2.5 %). The tests err more often than 5 % and 2.5 %: there are several
looks, and the base's runs are the same for all tries. So a change is kept only if pairs of fresh
seeds, which nobody has seen, say so again. That test, at 0.5 %, does not depend on the luck by
which the change was chosen. The reported gain is the gain of the fresh pairs. If a kept change
gains less than the search looks for, its reported gain is too high, since only lucky changes of
that kind pass. A change that seems to gain less than half of what the search looks for is never
kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import correlation, fmean, stdev

logger = logging.getLogger(__name__)

# The quantiles 0.95, 0.975, and 0.995 of Student's t, by the number of pairs.
T95 = {4: 2.353, 8: 1.895, 16: 1.753, 32: 1.696, 64: 1.669}
T975 = {4: 3.182, 8: 2.365, 16: 2.131, 32: 2.040, 64: 1.998}
T995 = {4: 5.841, 8: 3.499, 16: 2.947, 32: 2.744, 64: 2.656}
LOOKS = tuple(T95)
MIN_FRESH_PAIRS = 32
# In nats. A smaller gain can come from a model that looks ahead: by so little that the judge takes
# it for rounding, or at so few positions that the judge may miss them.
MIN_GAIN = 0.002
POWER_QUANTILE = 0.84  # 80 % of the normal distribution are below it
# The standard deviation of a pair's difference, divided by that of a loss. At `quick`, losses of
# one seed correlate by 0.8, also with other initial weights: most of it comes from the order of the
# batches.
PAIRED_RATIO = 0.63
# If the batches of a folder are the same for all seeds, the deviation of its losses is less than
# CHOSEN_SPREAD of the base's, and their correlation with the base's losses is less than
# CHOSEN_CORRELATION. At `quick`, honest changes have at least 0.67 and 0.79. The worst pairs of the
# folder count neither for the spread nor for the correlation.
CHOSEN_SPREAD, CHOSEN_CORRELATION = 0.65, 0.6
WORST_SHARE = 1 / 6  # the share of pairs that do not count for the spread and the correlation
# Standard deviations by which the best of several hundred orders of batches gains.
LUCK_DEVIATIONS = 3.0


@dataclass(frozen=True)
class Decision:
    """A verdict on a change, and the differences of pairs by which it was made."""

    verdict: str  # `kept`, `no better`, or `undecided`
    differences: Sequence[float]
    are_fresh: bool  # True: the pairs are of fresh seeds; False: of seeds that all tries share


def standard_error(differences: Sequence[float]) -> float:
    """The standard error of the mean of differences."""
    return stdev(differences) / math.sqrt(len(differences))


def margin_of_mean(differences: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean of differences, whose number is one of LOOKS."""
    return T975[len(differences)] * standard_error(differences)


def first_verdict(differences: Sequence[float], smallest_gain: float) -> str:
    """`better`, `no better`, or '' if it takes more pairs to know.

    differences: of losses, below 0 if the change is better; their number is one of LOOKS.
    smallest_gain: in nats.
    """
    mean = fmean(differences)
    error = standard_error(differences)
    n = len(differences)
    if mean + T95[n] * error < 0:
        return "better"
    if mean - T975[n] * error > -smallest_gain:
        return "no better"
    return ""


def is_confirmed(differences: Sequence[float], smallest_gain: float) -> bool:
    """True if fresh pairs say that a change is better, and it gains enough to count."""
    mean = fmean(differences)
    error = standard_error(differences)
    is_better = mean + T995[len(differences)] * error < 0
    return is_better and -mean >= max(MIN_GAIN, smallest_gain / 2)


def detectable_gains(deviation: float) -> dict[int, float]:
    """The gain, in nats, at which four of five changes are confirmed, by the number of pairs.

    deviation is the standard deviation of a loss from seed to seed.
    """
    gains = {}
    for n in LOOKS:
        error = PAIRED_RATIO * deviation / math.sqrt(n)
        gains[n] = (T995[n] + POWER_QUANTILE) * error
    return gains


def n_pairs_for(smallest_gain: float, deviation: float) -> int:
    """How many pairs detect changes with this gain; the largest of LOOKS if none do."""
    for n, gain in detectable_gains(deviation).items():
        if gain <= smallest_gain:
            return n
    return LOOKS[-1]


def decide(
    shared_differences: Callable[[int], Sequence[float]],
    fresh_differences: Callable[[int], Sequence[float]],
    looks: Sequence[int],
    smallest_gain: float,
) -> Decision:
    """The verdict on a change.

    shared_differences makes the first n pairs of shared seeds, and returns their differences;
    fresh_differences does so with n fresh seeds. looks: the numbers of pairs after which the first
    test may stop. smallest_gain: in nats.
    """
    outcome = ""
    differences: Sequence[float] = ()
    for n in looks:
        differences = shared_differences(n)
        outcome = first_verdict(differences, smallest_gain)
        if outcome:
            break
    if outcome != "better":
        return Decision(outcome or "undecided", differences, are_fresh=False)

    # The change may gain only half of what it seems to. There are at least MIN_FRESH_PAIRS, as the
    # deviation of few pairs is uncertain.
    likely_gain = max(smallest_gain, -fmean(differences) / 2)
    n_fresh = max(MIN_FRESH_PAIRS, n_pairs_for(likely_gain, stdev(differences) / PAIRED_RATIO))
    n_fresh = min(n_fresh, looks[-1])
    logger.info(f"it looks better; {n_fresh} pairs of fresh seeds decide")
    differences = fresh_differences(n_fresh)
    verdict = "kept" if is_confirmed(differences, smallest_gain) else "no better"
    return Decision(verdict, differences, are_fresh=True)


def without_worst(
    losses: Sequence[float], base_losses: Sequence[float]
) -> tuple[list[float], list[float]]:
    """The losses of a folder and of the base, without the pairs with the largest differences.

    So a few bad seeds of the folder do not hide that all its other losses are alike.
    """

    def difference(index: int) -> float:
        return losses[index] - base_losses[index]

    n_worst = max(1, round(WORST_SHARE * len(losses)))
    others = sorted(range(len(losses)), key=difference)[:-n_worst]
    return [losses[index] for index in others], [base_losses[index] for index in others]


def may_be_luck(gain: float, losses: Sequence[float], base_losses: Sequence[float]) -> bool:
    """True if a folder may gain so much, in nats, by choosing a lucky order of batches.

    losses and base_losses are of the same seeds. If the batches of a folder follow the seed, its
    losses vary, and mostly together with the base's. If the folder chose them, its gain has to be
    more than the gain of the luckiest order.
    """
    usual_losses, usual_base_losses = without_worst(losses, base_losses)
    spread = stdev(usual_losses)
    if spread > CHOSEN_SPREAD * stdev(usual_base_losses):
        return False
    if correlation(usual_losses, usual_base_losses) > CHOSEN_CORRELATION:
        return False
    base_spread = stdev(base_losses)
    base_spread += base_spread / math.sqrt(2 * len(base_losses))  # plus its standard error
    spread_of_orders = math.sqrt(max(0.0, base_spread**2 - spread**2))
    return gain < LUCK_DEVIATIONS * spread_of_orders
