"""When a change is better: a sequential test of pairs of runs, and one of fresh pairs.

A pair is two runs of one seed, of the base and of the changed folder: they begin with the same
weights and see the same batches, so their difference varies less than either loss. After each
number of pairs in LOOKS, one-sided t-tests say whether the change is better (at 5 %), or gains less
than what the search looks for (at 2.5 %). Both may err: there are several looks, and the base's
runs are the same for all tries. So nothing is kept before fresh seeds, which no one has seen, say
so again. That test, at 0.5 %, does not depend on the luck by which a change was chosen. The
reported gain is that of the fresh pairs. If a kept change gains less than the search looks for, its
gain is overstated, since only lucky ones pass; if it seems to gain less than half of that, it is
not kept, however sure this is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import correlation, fmean, stdev

logger = logging.getLogger(__name__)

# Quantiles of Student's t, by the number of pairs: 0.95, 0.975, and 0.995.
T95 = {4: 2.353, 8: 1.895, 16: 1.753, 32: 1.696, 64: 1.669}
T975 = {4: 3.182, 8: 2.365, 16: 2.131, 32: 2.040, 64: 1.998}
T995 = {4: 5.841, 8: 3.499, 16: 2.947, 32: 2.744, 64: 2.656}
LOOKS = tuple(T95)
MIN_FRESH_PAIRS = 32
# Nats. A smaller gain can come from losses that look ahead by what the judge takes for rounding, or
# at so few positions that it may miss them.
MIN_GAIN = 0.002
FOUR_OF_FIVE = 0.84  # quantile of the normal distribution
# The standard deviation of a pair's difference over that of a loss. At `quick`, losses that share a
# seed correlate by 0.8, also with other initial weights: the order of the batches is most of it.
PAIRED = 0.63
# Losses of a folder whose batches are the same for all seeds vary by less than this share of the
# base's, and are correlated with them by less than this. At `quick`, those of honest changes vary
# by 0.67 or more, and are correlated by 0.79 or more. Both without the worst pairs of the folder.
CHOSEN_SPREAD, CHOSEN_CORRELATION = 0.65, 0.6
WORST = 1 / 6  # the share of pairs that may be bad so that all others do not look alike
LUCK = 3.0  # standard deviations by which the best of several hundred orders of batches gains


@dataclass(frozen=True)
class Decision:
    """A verdict on a change, and the differences of pairs by which it was made."""

    verdict: str  # `kept`, `no better`, or `undecided`
    differences: Sequence[float]
    are_fresh: bool  # of fresh seeds, or of those that all tries share


def standard_error(differences: Sequence[float]) -> float:
    """The standard error of the mean of differences."""
    return stdev(differences) / math.sqrt(len(differences))


def margin(differences: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean of differences."""
    return T975[len(differences)] * standard_error(differences)


def screened(differences: Sequence[float], smallest_gain: float) -> str:
    """`better`, `no better`, or '' if it takes more pairs to know. smallest_gain: in nats."""
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
        error = PAIRED * deviation / math.sqrt(n)
        gains[n] = (T995[n] + FOUR_OF_FIVE) * error
    return gains


def pairs_for(smallest_gain: float, deviation: float) -> int:
    """How many pairs detect changes with this gain; the largest of LOOKS if none do."""
    for n, gain in detectable_gains(deviation).items():
        if gain <= smallest_gain:
            return n
    return LOOKS[-1]


def decide(
    shared: Callable[[int], Sequence[float]],
    fresh: Callable[[int], Sequence[float]],
    looks: Sequence[int],
    smallest_gain: float,
) -> Decision:
    """The verdict on a change.

    shared returns the differences of the first n pairs, and fresh those of n fresh pairs. looks are
    the numbers of pairs after which the first test may stop.
    """
    outcome = ""
    differences: Sequence[float] = ()
    for n in looks:
        differences = shared(n)
        outcome = screened(differences, smallest_gain)
        if outcome:
            break
    if outcome != "better":
        return Decision(outcome or "undecided", differences, are_fresh=False)

    # As if the change gained half of what it seems to; few pairs tell little of their deviation.
    likely_gain = max(smallest_gain, -fmean(differences) / 2)
    n_fresh = max(MIN_FRESH_PAIRS, pairs_for(likely_gain, stdev(differences) / PAIRED))
    n_fresh = min(n_fresh, looks[-1])
    logger.info(f"it looks better; {n_fresh} pairs of fresh seeds decide")
    differences = fresh(n_fresh)
    verdict = "kept" if is_confirmed(differences, smallest_gain) else "no better"
    return Decision(verdict, differences, are_fresh=True)


def without_worst(
    losses: Sequence[float], base_losses: Sequence[float]
) -> tuple[list[float], list[float]]:
    """The losses of a folder and of the base without the pairs where the folder is worst beside the
    base: a few bad seeds do not hide that all others are alike."""

    def difference(index: int) -> float:
        return losses[index] - base_losses[index]

    n_worst = max(1, round(WORST * len(losses)))
    others = sorted(range(len(losses)), key=difference)[:-n_worst]
    return [losses[index] for index in others], [base_losses[index] for index in others]


def may_be_luck(gain: float, losses: Sequence[float], base_losses: Sequence[float]) -> bool:
    """True if a folder may gain so much, in nats, by a lucky order of the batches that it chose.

    losses and base_losses are those of the same seeds. If the batches of a folder follow the seed,
    its losses vary, most of all together with the base's. If they were chosen, its gain has to be
    more than that of the luckiest order.
    """
    usual_losses, usual_base_losses = without_worst(losses, base_losses)
    spread = stdev(usual_losses)
    if spread > CHOSEN_SPREAD * stdev(usual_base_losses):
        return False
    if correlation(usual_losses, usual_base_losses) > CHOSEN_CORRELATION:
        return False
    base_spread = stdev(base_losses)
    base_spread += base_spread / math.sqrt(2 * len(base_losses))  # by one standard error of its own
    spread_of_orders = math.sqrt(max(0.0, base_spread**2 - spread**2))
    return gain < LUCK * spread_of_orders
