"""What a second generation is worth: two against single runs that take as long, over seeds.

Examples:
  python examples/benchmarks/generations.py --text input.txt
  python examples/benchmarks/generations.py --text input.txt --preset laptop --grid --rounds 5

Each round has a seed of its own. It trains two generations; the first of them is also the row "one
run". It then trains a single run of 2.25 times the steps. With --size, the longer run has the
learning rate and the weight decay that the dial has for its steps; with --preset, it has those of
the preset. --grid trains twelve single runs in place of the longer one: three widths, two weight
decays, and two dropouts, each with as many steps as take the same computation. The loss is the best
val_loss of a run. Each run has one thread; as many run at once as there are cores, eight at most.
"""

from __future__ import annotations

import itertools
import math
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import measure
from measure import ROOT, Report
from trainers import SHAPES, our_metrics, ours

sys.path.insert(0, str(ROOT))
from sm_nanogpt.entry_point.config import make_config
from sm_nanogpt.entry_point.presets import PRESETS
from sm_nanogpt.entry_point.sizes import hyperparameters_for_size, optimizer_values

AS_LONG = 2.25  # a step with a teacher takes 1.25 times one without
DECAYS, DROPOUTS = (1.0, 3.0), (0.0, 0.1)  # times that of the preset; added to its own


def longer(base: dict[str, Any], size: float | None, tokens: int) -> dict[str, Any]:
    """The values of a single run that takes as long as two generations."""
    config = make_config(base)
    steps = round(AS_LONG * config.max_steps)
    readings = steps * config.batch_size * config.block_size / tokens
    values = {**base, "max_steps": steps}
    if size is not None:
        values |= optimizer_values(size, steps, readings)
    return values


def grid(base: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Twelve single runs of the computation of two generations, by what they are."""
    config = make_config(base)
    head_width = config.n_embd // config.n_head
    runs: dict[str, dict[str, Any]] = {}
    for more_heads, decay, dropout in itertools.product(range(3), DECAYS, DROPOUTS):
        width = config.n_embd + more_heads * head_width
        values = {
            "n_head": config.n_head + more_heads,
            "n_embd": width,
            "max_steps": round(AS_LONG * config.max_steps * (config.n_embd / width) ** 2),
            "weight_decay": round(decay * config.weight_decay, 3),
            "dropout": config.dropout + dropout,
        }
        name = ", ".join(f"{name} {value:g}" for name, value in values.items())
        runs[name] = {**base, **values}
    return runs


def benchmark(args: Namespace, scratch: Path) -> Report:
    tokens = int(0.9 * len(args.text.read_text(encoding="utf-8")))
    size = None if args.preset else args.size
    if args.preset:
        base = dict(PRESETS[args.preset])
    else:
        base = hyperparameters_for_size(args.size, tokens)
    if args.quick:
        base = SHAPES["smoke"] | dict(max_steps=6, eval_tokens=128, weight_decay=0.1)
    base |= {"sample_length": 0, **args.ours}
    singles = grid(base) if args.grid else {"2.25 times the steps": longer(base, size, tokens)}
    sides = {"two generations": {**base, "generations": 2}, **singles}

    def trained(side: str, index: int) -> dict[int, float]:
        values = {**sides[side], "seed": args.first_seed + index}
        values["eval_interval"] = math.ceil(int(values["max_steps"]) / 8)
        out = scratch / f"{index}-{list(sides).index(side)}"
        measure.output(ours(args.text, out, values, threads=1).process)
        curve: dict[int, float] = {}
        for row in our_metrics(out):
            if "val_loss" in row:
                curve[row["step"]] = row["val_loss"]
        measure.note(f"seed {values['seed']}: {side}: {min(curve.values()):.4f}")
        return curve

    losses: dict[str, list[float]] = {"one run": []}
    with ThreadPoolExecutor(min(8, measure.cores())) as pool:
        futures = []
        for index in range(args.rounds):
            for side in sides:
                futures.append((side, pool.submit(trained, side, index)))
        for side, future in futures:
            curve = future.result()
            if side == "two generations":
                last_of_first = make_config(base).max_steps
                first = [loss for step, loss in curve.items() if step <= last_of_first]
                losses["one run"].append(min(first))
            losses.setdefault(side, []).append(min(curve.values()))

    report = Report()
    for side, losses_of_side in losses.items():
        report.rows.append({"": side, "loss": losses_of_side})
    best_single = min(singles, key=lambda side: fmean(losses[side]))
    for side in ("one run", best_single):
        gain = measure.differences(losses["two generations"], losses[side])
        report.findings[f"two generations minus {side}"] = measure.plus_minus(gain)
    report.findings["seeds"] = measure.seeds(args)
    return report


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=2, nanogpt=False)
    parser.add_argument("--size", type=float, default=2.0, metavar="N", help="(default 2)")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="in place of a size")
    parser.add_argument("--grid", action="store_true", help="twelve single runs, not one")
    parser.add_argument("--first-seed", type=int, default=1, metavar="N", help="(default 1)")
    measure.run(parser, benchmark)
