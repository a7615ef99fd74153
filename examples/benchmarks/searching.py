"""The rule of `try`: how often it keeps what changes nothing, and finds what is better.

Examples:
  python examples/benchmarks/searching.py runs --text input.txt   # adds to search-runs.jsonl
  python examples/benchmarks/searching.py rule                    # tries, drawn from these runs

`runs` trains the folders of FOLDERS at `quick` with many seeds, and judges them as `try` does:
the base; one that changes nothing but which random numbers the weights begin with; and ones with
another learning rate. `rule` draws tries from these runs, each with its own seeds, and decides them
as a search does: by the rule, by the sum of the times, and by how the losses follow the seeds.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from sm_nanogpt.launcher.job import Request  # noqa: E402
from sm_nanogpt.launcher.settings import Settings  # noqa: E402
from sm_nanogpt.launcher.source import Source  # noqa: E402
from sm_nanogpt.launcher.trying import rule  # noqa: E402
from sm_nanogpt.launcher.trying.budget import MAX_TIME_RATIO  # noqa: E402
from sm_nanogpt.launcher.trying.runs import SeededRun  # noqa: E402
from sm_nanogpt.launcher.trying.start import begin_search  # noqa: E402

RUNS = HERE / "search-runs.jsonl"
RATE = ("presets.py", "max_steps=180, learning_rate=0.05")
# Edits of the folder: a file, and what stands in it before and after.
FOLDERS: dict[str, tuple[str, str, str] | None] = {
    "base": None,
    "other weights": ("model.py", 'derive_seed(seed, "weights")', 'derive_seed(seed, "other")'),
    "learning rate 0.035": (*RATE, "max_steps=180, learning_rate=0.035"),
    "learning rate 0.025": (*RATE, "max_steps=180, learning_rate=0.025"),
}
GROUPS, TRIES_OF_A_GROUP = 100, 40  # the tries of a group share the base's runs
# The deviation of losses whose batches are the same: that of a pair, 0.009, over 2 ** 0.5.
OF_WEIGHTS = 0.0064


# -- runs ------------------------------------------------------------------------------------------


def edited(edit: tuple[str, str, str] | None) -> Source:
    packaged = Source.packaged()
    if edit is None:
        return packaged
    name, old, new = edit
    source = packaged.files[name].decode()
    assert source.count(old) == 1, old
    files = {**packaged.files, name: source.replace(old, new).encode()}
    return Source(packaged.directory, files)


def make_runs(text: Path, seeds: range, names: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as home:
        settings = Settings(home=Path(home))
        request = Request(instance="local", preset="quick", data=str(text))
        search = begin_search("rule", request, settings, 0.005, None)
        for first in seeds[::8]:
            runs = []
            names_of_folders = {}
            for name in names:
                source = edited(FOLDERS[name])
                names_of_folders[source.sha256] = name
                for seed in range(first, min(first + 8, seeds.stop)):
                    runs.append(SeededRun(source, seed))
            search.measure(runs, f"seeds from {first}")
            measured = {(run["folder"], run["seed"]): run for run in search.ledger.of("run")}
            with RUNS.open("a") as file:
                for run in runs:
                    entry = measured[run.source.sha256, run.seed]
                    row = {
                        "folder": names_of_folders[run.source.sha256],
                        "seed": run.seed,
                        "loss": round(entry["loss"], 6),
                        "seconds": entry["seconds"],
                    }
                    file.write(json.dumps(row) + "\n")


@dataclass
class Folder:
    """What a folder loses, and the seconds that it takes, by seed."""

    losses: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)


def read_runs() -> dict[str, Folder]:
    folders = {name: Folder() for name in FOLDERS}
    for line in RUNS.read_text().splitlines():
        row = json.loads(line)
        folders[row["folder"]].losses[row["seed"]] = row["loss"]
        folders[row["folder"]].seconds[row["seed"]] = row["seconds"]
    return folders


# -- tries -----------------------------------------------------------------------------------------


@dataclass
class Try:
    """A change that is tried: its runs on drawn seeds, beside those of the base."""

    base: Folder
    loss_of: Callable[[int], float]
    seconds: Sequence[float]
    shared_seeds: Sequence[int]
    losses: list[float] = field(default_factory=list)
    base_losses: list[float] = field(default_factory=list)
    is_slow: bool = False

    def differences(self, seeds: Sequence[int]) -> list[float]:
        differences = []
        for seed in seeds:
            loss = self.loss_of(seed)
            base_loss = self.base.losses[seed]
            self.losses.append(loss)
            self.base_losses.append(base_loss)
            differences.append(loss - base_loss)
        seconds_of_draw = sum(random.choices(self.seconds, k=len(seeds)))
        usual_seconds = len(seeds) * fmean(self.base.seconds.values())
        self.is_slow = self.is_slow or seconds_of_draw > MAX_TIME_RATIO * usual_seconds
        return differences

    def on_shared_seeds(self, n: int) -> list[float]:
        self.losses.clear()
        self.base_losses.clear()
        return self.differences(self.shared_seeds[:n])

    def on_fresh_seeds(self, n: int) -> list[float]:
        return self.differences(random.choices(list(self.base.losses), k=n))

    def decide(self, smallest_gain: float) -> Verdict:
        looks = [n for n in rule.LOOKS if n <= len(self.shared_seeds)]
        decision = rule.decide(self.on_shared_seeds, self.on_fresh_seeds, looks, smallest_gain)
        gain = -fmean(decision.differences)
        is_luck = rule.may_be_luck(gain, self.losses, self.base_losses)
        is_kept = decision.verdict == "kept" and not is_luck and not self.is_slow
        return Verdict(is_kept, gain, rule.margin_of_mean(decision.differences), len(self.losses))


@dataclass(frozen=True)
class Verdict:
    """Whether a change is kept, what it seems to gain and the margin of that, and its pairs."""

    is_kept: bool
    gain: float
    margin: float
    n_pairs: int


def honest(base: Folder, other: Folder, gain: float) -> Callable[[int], float]:
    """What a change with this gain loses, if it varies as another folder does."""
    shift = fmean(base.losses.values()) - fmean(other.losses.values()) - gain
    noise = 0.3 * stdev(base.losses.values())  # no two tries are equal
    return lambda seed: other.losses[seed] + shift + random.gauss(0, noise)


def with_chosen_batches(base: Folder, gain: float) -> Callable[[int], float]:
    """What a folder loses whose batches are the same for all seeds, and luckier by this gain."""
    mean = fmean(base.losses.values()) - gain
    return lambda seed: random.gauss(mean, OF_WEIGHTS)


def with_bad_seeds(base: Folder, gain: float) -> Callable[[int], float]:
    """The same, of a folder that trains worse for one seed in twelve, to hide it."""
    loss_of = with_chosen_batches(base, gain)
    return lambda seed: loss_of(seed) + (0.05 if random.random() < 1 / 12 else 0.0)


def verdicts(
    base: Folder, loss_of: Callable[[int], float], seconds: Sequence[float], smallest_gain: float
) -> list[Verdict]:
    n_pairs = rule.n_pairs_for(smallest_gain, stdev(base.losses.values()))
    results = []
    for _ in range(GROUPS):
        shared_seeds = random.choices(list(base.losses), k=n_pairs)
        for _ in range(TRIES_OF_A_GROUP):
            attempt = Try(base, loss_of, seconds, shared_seeds)
            results.append(attempt.decide(smallest_gain))
    return results


def check_rule(smallest_gain: float) -> None:
    folders = read_runs()
    base = folders.pop("base")
    spread = stdev(base.losses.values())
    n_pairs = rule.n_pairs_for(smallest_gain, spread)
    print(f"base: {len(base.losses)} seeds, sd {spread:.4f}; {n_pairs} pairs for {smallest_gain:g}")
    other = folders["other weights"]
    for gain in (0.0, 0.005, 0.01, 0.02):
        for name, folder in folders.items():
            seconds = [*other.seconds.values()]
            results = verdicts(base, honest(base, folder, gain), seconds, smallest_gain)
            show(f"gains {gain:g}, noise of {name}", results, gain)
    for gain in (0.01, 0.018, 0.035):
        seconds = [*base.seconds.values()]
        results = verdicts(base, with_chosen_batches(base, gain), seconds, smallest_gain)
        show(f"chosen batches that gain {gain:g}", results, gain)
        results = verdicts(base, with_bad_seeds(base, gain), seconds, smallest_gain)
        show(f"the same, with one bad seed in twelve of 0.05: {gain:g}", results, gain)
    for gain in (0.1, 0.3):
        quick_seconds = list(base.seconds.values())
        slow_seconds = [10 * seconds for seconds in quick_seconds]
        slow = quick_seconds * 3 + slow_seconds * 2
        results = verdicts(base, honest(base, other, gain), slow, smallest_gain)
        show(f"gains {gain:g}, ten times as slow for 40 % of the seeds", results, gain)


def show(name: str, results: Sequence[Verdict], gain: float) -> None:
    kept_results = [result for result in results if result.is_kept]
    pairs = [result.n_pairs for result in results]
    line = (
        f"{len(kept_results):,} of {len(results):,} kept ({len(kept_results) / len(results):.1%})"
    )
    line += f"; pairs: median {median(pairs):.0f}, mean {fmean(pairs):.1f}"
    if kept_results:
        holds = fmean(abs(result.gain - gain) < result.margin for result in kept_results)
        line += f"; the interval of those kept holds the gain in {holds:.0%}"
    print(f"{name}: {line}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("runs", "rule"))
    parser.add_argument("--text", type=Path)
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 48), metavar="N")
    parser.add_argument("--folders", nargs="*", default=list(FOLDERS))
    parser.add_argument("--smallest-gain", type=float, default=0.005)
    args = parser.parse_args()
    random.seed(1)
    if args.action == "runs":
        make_runs(args.text, range(args.seeds[0], args.seeds[1] + 1), args.folders)
    else:
        check_rule(args.smallest_gain)


if __name__ == "__main__":
    main()
