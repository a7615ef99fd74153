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
from launcher.trying.search import begin  # noqa: E402

RUNS = HERE / "search-runs.jsonl"
RATE = ("config.py", "max_steps=180, learning_rate=0.05")
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
            search.measure([(source, each) for each in some for source in sources.values()])
            with RUNS.open("a") as file:
                for name, source in sources.items():
                    for each in some:
                        entry = search.ledger.run_of(source.sha256, each) or {}
                        row = {"folder": name, "seed": each, "loss": round(entry["loss"], 6)}
                        file.write(json.dumps({**row, "seconds": entry["seconds"]}) + "\n")


def known() -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for line in RUNS.read_text().splitlines():
        row = json.loads(line)
        found[row["folder"]][row["seed"]] = row["loss"]
    return found


def tried(shared: list[float], fresh: list[float], see: float, most: int) -> dict[str, float]:
    """A try whose first differences are `shared`, and whose fresh ones are drawn from `fresh`."""
    used = []

    def first(n: int) -> list[float]:
        used.append(n)
        return shared[:n]

    def later(n: int) -> list[float]:
        used.append(n)
        return random.choices(fresh, k=n)

    looks = [n for n in rule.LOOKS if n <= most]
    verdict, found, _ = rule.decide(first, later, looks, see)
    half = rule.half(found)
    kept = verdict == "kept"
    return {
        "kept": kept,
        "pairs": used[-1] + (sum(used[-2:]) - used[-1]) * kept,
        "mean": fmean(found),
        "half": half,
    }


def check_rule(see: float) -> None:
    losses = known()
    base, names = losses["base"], [name for name in losses if name != "base"]
    most = rule.pairs_for(see, stdev(list(base.values())[:8]) * 2**0.5)
    print(
        f"base: {len(base)} seeds, sd {stdev(base.values()):.4f}; at most {most} pairs for {see:g}"
    )
    differences = {n: [losses[n][s] - base[s] for s in base if s in losses[n]] for n in names}
    for name, d in differences.items():
        print(f"{name}: {fmean(d):+.4f}, sd of a pair {stdev(d):.4f}, {len(d)} pairs")
    seeds = list(base)
    for group in range(5):
        kept = 0
        ones = random.sample(seeds, most)
        for _ in range(40):
            others = random.sample(seeds, most)
            shared = [
                losses["other weights"][o] - base[s] for s, o in zip(ones, others, strict=True)
            ]
            fresh = [losses["other weights"][random.choice(seeds)] - base[s] for s in seeds * 3]
            center = fmean(losses["other weights"].values()) - fmean(base.values())
            kept += (
                tried([d - center for d in shared], [d - center for d in fresh], see, most)["kept"]
                > 0
            )
        print(f"changes nothing, group {group + 1}: {kept} of 40 kept")
    for name, d in differences.items():
        for gain in (0.005, 0.01, 0.02):
            moved = [each - fmean(d) - gain for each in d]
            found = [tried(random.sample(moved, most), moved, see, most) for _ in range(1000)]
            kept = [each for each in found if each["kept"]]
            inside = fmean(abs(each["mean"] + gain) < each["half"] for each in kept) if kept else 0
            print(
                f"gain {gain:g}, noise of {name}: {len(kept) / 10:.0f} % kept, median {median(e['pairs'] for e in found):.0f} pairs; interval holds {inside:.0%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("runs", "rule"))
    parser.add_argument("--text", type=Path)
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 48), metavar="N")
    parser.add_argument("--folders", nargs="*", default=list(FOLDERS))
    parser.add_argument("--see", type=float, default=0.005)
    args = parser.parse_args()
    random.seed(1)
    if args.what == "runs":
        runs(args.text, range(args.seeds[0], args.seeds[1] + 1), args.folders)
    else:
        check_rule(args.see)


if __name__ == "__main__":
    main()
