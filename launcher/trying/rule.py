"""When a change is better: a sequential test of pairs of runs, and one of fresh pairs.

A pair is two runs of one seed, of the base and of the changed folder: they begin with the same
weights and see the same batches, so their difference varies less than either loss. After each
number of pairs in LOOKS, one-sided t-tests say whether the change is better (at 5 %), or gains less
than what the search looks for (at 2.5 %). Both may err: there are several looks, and the base's
runs are the same for all tries. So nothing is kept before fresh seeds, which no one has seen, say
so again. That test, at 0.5 %, does not depend on the luck by which a change was chosen. The
reported gain is that of the fresh pairs. If a kept change gains less than the search looks for, its
gain is overstated, since only lucky ones pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import correlation, fmean, stdev

LOOKS = (4, 8, 16, 32, 64)  # pairs
# Quantiles of Student's t for these pairs: 0.95, 0.975, and 0.995.
T = {
    4: (2.353, 3.182, 5.841),
    8: (1.895, 2.365, 3.499),
    16: (1.753, 2.131, 2.947),
    32: (1.696, 2.040, 2.744),
    64: (1.669, 1.998, 2.656),
}
T95, T975, T995 = range(3)
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


def error(differences: Sequence[float]) -> float:
    """The standard error of the mean."""
    return stdev(differences) / math.sqrt(len(differences))


def half(differences: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean."""
    return T[len(differences)][T975] * error(differences)


def screened(differences: Sequence[float], smallest_gain: float) -> str:
    """`better`, `no better`, or '' if more pairs must tell. smallest_gain: in nats."""
    mean, e, t = fmean(differences), error(differences), T[len(differences)]
    if mean + t[T95] * e < 0:
        return "better"
    return "no better" if mean - t[T975] * e > -smallest_gain else ""


def detectable_gains(deviation: float) -> dict[int, float]:
    """By pairs: the gain, in nats, at which four of five changes are confirmed.

    deviation is that of a loss from seed to seed.
    """
    e = PAIRED * deviation
    return {n: (T[n][T995] + FOUR_OF_FIVE) * e / math.sqrt(n) for n in LOOKS}


def pairs_for(smallest_gain: float, deviation: float) -> int:
    """The pairs that detect changes with this gain; the largest of LOOKS if none do."""
    for pairs, gain in detectable_gains(deviation).items():
        if gain <= smallest_gain:
            return pairs
    return LOOKS[-1]


def decide(
    shared: Callable[[int], Sequence[float]],
    fresh: Callable[[int], Sequence[float]],
    looks: Sequence[int],
    smallest_gain: float,
) -> tuple[str, Sequence[float], bool]:
    """The verdict on a change, the differences that it goes by, and whether they are fresh.

    shared gives the differences of the first pairs, fresh those of so many fresh ones; looks are
    the numbers of pairs after which the first may be stopped.
    """
    verdict: str = ""
    found: Sequence[float] = ()
    for n in looks:
        found = shared(n)
        if verdict := screened(found, smallest_gain):
            break
    if verdict != "better":
        return verdict or "undecided", found, False
    # As if the change gained half of what it seems to; few pairs tell little of their deviation.
    n = pairs_for(max(smallest_gain, -fmean(found) / 2), stdev(found) / PAIRED)
    found = fresh(min(max(n, 32), looks[-1]))
    is_better = fmean(found) + T[len(found)][T995] * error(found) < 0
    return "kept" if is_better else "no better", found, True


def without_worst(
    losses: Sequence[float], base_losses: Sequence[float]
) -> tuple[list[float], list[float]]:
    """The losses of a folder and of the base without the pairs where the folder is worst beside the
    base: a few bad seeds do not hide that all others are alike."""
    pairs = sorted(zip(losses, base_losses, strict=True), key=lambda pair: pair[0] - pair[1])
    n_worst = max(1, round(WORST * len(pairs)))
    most = pairs[:-n_worst]
    return [loss for loss, _ in most], [base_loss for _, base_loss in most]


def may_be_luck(gain: float, losses: Sequence[float], base_losses: Sequence[float]) -> bool:
    """True if a folder may gain so much, in nats, by a lucky order of the batches that it chose.

    losses and base_losses are those of the same seeds. If the batches of a folder follow the seed,
    its losses vary, most of all together with the base's. If they were chosen, its gain has to be
    more than that of the luckiest order.
    """
    most_losses, most_base_losses = without_worst(losses, base_losses)
    spread = stdev(most_losses)
    if spread > CHOSEN_SPREAD * stdev(most_base_losses):
        return False
    if correlation(most_losses, most_base_losses) > CHOSEN_CORRELATION:
        return False
    base_spread = stdev(base_losses)
    base_spread += base_spread / math.sqrt(2 * len(base_losses))  # by one standard error of its own
    spread_of_orders = math.sqrt(max(0.0, base_spread**2 - spread**2))
    return gain < LUCK * spread_of_orders
