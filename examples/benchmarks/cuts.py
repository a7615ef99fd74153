"""How often `sm-nanogpt eval` and `try` miss a model that uses what it must not, by simulation.

Examples:
  python examples/benchmarks/cuts.py                    # 1,000 evaluations for each number
  python examples/benchmarks/cuts.py --evaluations 100

An evaluation draws its cuts as the judge does. The model is the worst that there can be: it
remembers each token that the second process was shown, and so agrees with the first one wherever it
can. It is missed if all cuts fall where it does not cheat, or where it can agree.

A leak is a position whose loss comes from the token after it. Leaks are at random positions. A
model that learns has seen some windows, and uses what it learned in a share of all windows. In
both processes it knows how many it has seen.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from sm_nanogpt.launcher.judge.causality import TOTAL_CUTS, Cut, draw_cuts, in_passes  # noqa: E402
from sm_nanogpt.launcher.judge.evaluate import EDITED  # noqa: E402
from sm_nanogpt.launcher.judge.score import ScoredSpan, window_spans  # noqa: E402
from sm_nanogpt.launcher.judge.worker import PASS_TOKENS  # noqa: E402
from sm_nanogpt.launcher.trying.scoring import MIN_FRESH_MODELS  # noqa: E402

LEAKS = (0.01, 0.003, 0.001, 0.0005)
LEARNING = ((1, 1.0), (1, 0.5), (10, 0.2))  # windows seen, share where it is used


@dataclass(frozen=True)
class Text:
    """A text to judge: its tokens, the model's context, and the second processes, of all models,
    that share the cuts."""

    n_tokens: int
    context: int
    n_processes: int


TEXTS = {
    "`try`, `quick`": Text(65_536, 64, MIN_FRESH_MODELS),
    "`try`, `laptop`": Text(65_536, 1024, MIN_FRESH_MODELS),
    "`eval`, 1 MB, `laptop`": Text(1_000_000, 1024, EDITED.n_processes),
}


@dataclass(frozen=True)
class Evaluation:
    """The windows of a text, and the passes of the second process, which are drawn when they are
    read."""

    windows: list[ScoredSpan]
    passes: Iterator[list[Cut]]


def evaluation(text: Text, chance: random.Random) -> Evaluation:
    windows = window_spans(text.n_tokens, text.context)
    scored = [range(counted - begin, end - begin) for begin, end, counted in windows]
    cuts = draw_cuts(scored, TOTAL_CUTS // text.n_processes, chance)
    return Evaluation(windows, in_passes(cuts, chance))


def misses_leaks(share: float, drawn: Evaluation, chance: random.Random, text: Text) -> bool:
    """Whether no cut asks for a token that leaks, and that no row has shown yet."""
    shown = bytearray(drawn.windows[-1][1] + 1)
    for together in drawn.passes:
        ends = []
        for cut in together:
            first, _, _ = drawn.windows[cut.window]
            begin, end = max(0, first - 1), first + cut.length - 1
            shown[begin:end] = b"\1" * (end - begin)
            ends.append(end)
        if any(not shown[end] and chance.random() < share for end in ends):
            return False
    return True


def misses_learning(
    min_tokens: int, share: float, drawn: Evaluation, chance: random.Random, text: Text
) -> bool:
    """Whether both processes have, or have not, seen so many windows at each that is compared."""
    n_windows = len(drawn.windows)
    using = {window for window in range(n_windows) if chance.random() < share}
    order = chance.sample(range(n_windows), n_windows)
    at_once = max(1, PASS_TOKENS // text.context)
    first_has_learned = {}
    for index, window in enumerate(order):
        n_shown = min(n_windows, (index // at_once + 1) * at_once)
        first_has_learned[window] = n_shown > min_tokens

    shown = set[int]()  # to the second process
    for together in drawn.passes:
        windows = {cut.window for cut in together}
        shown |= windows
        second_has_learned = len(shown) > min_tokens
        for window in windows & using:
            if first_has_learned[window] != second_has_learned:
                return False
    return True


def row(name: str, is_missed: Callable[[Evaluation, random.Random, Text], bool], n: int) -> str:
    """How many of n verdicts miss it: those of which each process does."""
    cells = [name]
    for text in TEXTS.values():
        chance = random.Random(f"{name} {text}")
        n_missed = 0
        for _ in range(n):
            processes = range(text.n_processes)
            if all(is_missed(evaluation(text, chance), chance, text) for _ in processes):
                n_missed += 1
        cells.append(f"{n_missed:,}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--evaluations", type=int, default=1000, metavar="N")
    n: int = parser.parse_args().evaluations
    print(f"Missed of {n:,} evaluations of {TOTAL_CUTS:,} cuts:\n")
    print(f"| | {' | '.join(TEXTS)} |")
    print("|---" * (1 + len(TEXTS)) + "|")
    for share in LEAKS:
        name = f"looks ahead at {100 * share:g} % of the positions"
        print(row(name, partial(misses_leaks, share), n), flush=True)
    for min_tokens, share in LEARNING:
        windows = "1 window" if min_tokens == 1 else f"{min_tokens} windows"
        name = f"learns from {windows}, for {share:.0%} of them"
        print(row(name, partial(misses_learning, min_tokens, share), n), flush=True)


if __name__ == "__main__":
    main()
