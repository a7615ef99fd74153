"""The rule of `try`: how often it keeps what changes nothing, and finds what is better.

Examples:
  python examples/benchmarks/searching.py runs --text input.txt   # adds to search-runs.jsonl
  python examples/benchmarks/searching.py rule                    # tries, drawn from these runs

`runs` trains the folders of FOLDERS at `quick` with many seeds, and judges them as `try` does:
the base; one that changes nothing but which random numbers the weights begin with; and ones with
another learning rate. `rule` draws tries from these runs, each with its own seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median, stdev

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from launcher.job import Request  # noqa: E402
from launcher.settings import Settings  # noqa: E402
from launcher.source import Source  # noqa: E402
from launcher.trying import rule  # noqa: E402
from launcher.trying.runs import SeededRun  # noqa: E402
from launcher.trying.start import begin  # noqa: E402

RUNS = HERE / "search-runs.jsonl"
RATE = ("presets.py", "max_steps=180, learning_rate=0.05")
# Edits of the folder: a file, and what stands in it before and after.
FOLDERS: dict[str, tuple[str, str, str] | None] = {
    "base": None,
    "other weights": ("model.py", 'derive_seed(seed, "weights")', 'derive_seed(seed, "other")'),
    "learning rate 0.035": (*RATE, "max_steps=180, learning_rate=0.035"),
    "learning rate 0.025": (*RATE, "max_steps=180, learning_rate=0.025"),
}


def edited(edit: tuple[str, str, str] | None) -> Source:
    packaged = Source.packaged()
    if edit is None:
        return packaged
    name, old, new = edit
    before = packaged.files[name].decode()
    assert before.count(old) == 1, old
    files = {**packaged.files, name: before.replace(old, new).encode()}
    return Source(packaged.directory, files)


def runs(text: Path, seeds: range, names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as home:
        settings = Settings(home=Path(home))
        request = Request(instance="local", preset="quick", data=str(text))
        search = begin("rule", request, settings, 0.005, None, print)
        sources = {name: edited(FOLDERS[name]) for name in names}
        for seed in seeds[::8]:
            some = range(seed, min(seed + 8, seeds.stop))
            pairs = itertools.product(sources.values(), some)
            search.measure([SeededRun(source, seed) for source, seed in pairs])
            made = {(each["folder"], each["seed"]): each for each in search.ledger.of("run")}
            with RUNS.open("a") as file:
                for name, source in sources.items():
                    for each in some:
                        entry = made[source.sha256, each]
                        row = {"folder": name, "seed": each, "loss": round(entry["loss"], 6)}
                        file.write(json.dumps({**row, "seconds": entry["seconds"]}) + "\n")


def known() -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for line in RUNS.read_text().splitlines():
        row = json.loads(line)
        found[row["folder"]][row["seed"]] = row["loss"]
    return found


def tried(
    shared: list[float], fresh: list[float], smallest_gain: float, most: int
) -> tuple[bool, int, bool]:
    """A try with these first differences, and fresh ones drawn from others, whose mean is the gain:
    whether it is kept, its pairs, and whether its interval holds the gain."""
    used = [0, 0]

    def first(n: int) -> list[float]:
        used[0] = n
        return shared[:n]

    def later(n: int) -> list[float]:
        used[1] = n
        return random.choices(fresh, k=n)

    looks = [n for n in rule.LOOKS if n <= most]
    verdict, found, _ = rule.decide(first, later, looks, smallest_gain)
    inside = abs(fmean(found) - fmean(fresh)) < rule.half(found)
    return verdict == "kept", sum(used), inside


def check_rule(smallest_gain: float) -> None:
    losses = known()
    base, other = losses.pop("base"), losses["other weights"]
    seeds, spread = list(base), stdev(base.values())
    most = rule.pairs_for(smallest_gain, spread)
    print(f"base: {len(base)} seeds, sd {spread:.4f}; at most {most} pairs for {smallest_gain:g}")
    differences = {name: [found[s] - base[s] for s in seeds] for name, found in losses.items()}
    for name, d in differences.items():
        print(f"{name}: {fmean(d):+.4f}, sd of a pair {stdev(d):.4f}, {len(d)} pairs")
    # The tries of a group share the base's runs on the first seeds.
    mean = fmean(other.values()) - fmean(base.values())
    kept = []
    for _ in range(100):
        shared = random.choices(seeds, k=most)
        for _ in range(40):
            noise = [random.gauss(0, spread * 0.3) for _ in shared]  # no two tries are equal
            first = [other[s] - base[s] - mean + n for s, n in zip(shared, noise, strict=True)]
            kept.append(
                tried(first, [other[s] - base[s] - mean for s in seeds], smallest_gain, most)
            )
    n = sum(each[0] for each in kept)
    print(f"changes nothing: {n} of {len(kept):,} kept; {fmean(e[1] for e in kept):.1f} pairs each")
    for name, d in differences.items():
        for gain in (0.005, 0.01, 0.02):
            moved = [each - fmean(d) - gain for each in d]
            found = [
                tried(random.choices(moved, k=most), moved, smallest_gain, most)
                for _ in range(1000)
            ]
            holds = [inside for is_kept, _, inside in found if is_kept]
            print(
                f"gain {gain:g}, noise of {name}: {len(holds) / 10:.0f} % kept, median"
                f" {median(pairs for _, pairs, _ in found):.0f} pairs; the interval of those kept"
                f" holds it in {fmean(holds) if holds else 0:.0%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("runs", "rule"))
    parser.add_argument("--text", type=Path)
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 48), metavar="N")
    parser.add_argument("--folders", nargs="*", default=list(FOLDERS))
    parser.add_argument("--smallest-gain", type=float, default=0.005)
    args = parser.parse_args()
    random.seed(1)
    if args.what == "runs":
        runs(args.text, range(args.smallest_gainds[0], args.seeds[1] + 1), args.folders)
    else:
        check_rule(args.smallest_gain)


if __name__ == "__main__":
    main()
