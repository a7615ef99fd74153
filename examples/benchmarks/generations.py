"""What a second generation is worth: two against single runs that take as long, over seeds.

Examples:
  python examples/benchmarks/generations.py --text input.txt
  python examples/benchmarks/generations.py --text input.txt --preset laptop --grid --rounds 5
  python examples/benchmarks/generations.py --text input.txt --sizes 1 1.25 1.5 --rounds 1

Each round has a seed of its own. It trains two generations; the first of them is also the row "one
run". It then trains a single run of 2.25 times the steps. With --size, the longer run has the
learning rate and the weight decay that the dial has for its steps; with --preset, it has those of
the preset. --grid trains twelve single runs in place of the longer one: three widths, two weight
decays, and two dropouts, each with as many steps as take the same computation. The loss is the best
val_loss of a run. Each run has one thread; as many run at once as there are cores, eight at most.

--sizes trains two generations of each size in place of all that: the runs behind the choices of
`--preset auto`. With --ours='--validation FILE', all of the text is to train on.
"""

from __future__ import annotations

import itertools
import math
import sys
from argparse import Namespace
from collections.abc import Iterator
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
    if args.sizes:
        return compare_sizes(args, scratch)
    tokens = training_tokens(args)
    size = None if args.preset else args.size
    if args.preset:
        base = dict(PRESETS[args.preset])
    else:
        base = hyperparameters_for_size(args.size, tokens)
    base = base_values(args, base)
    singles = grid(base) if args.grid else {"2.25 times the steps": longer(base, size, tokens)}
    sides = {"two generations": {**base, "generations": 2}, **singles}

    losses: dict[str, list[float]] = {"one run": []}
    for side, curve in curves(args, scratch, sides):
        if side == "two generations":
            losses["one run"].append(first_generation(curve, sides[side]))
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


def compare_sizes(args: Namespace, scratch: Path) -> Report:
    """One run and two generations of each size."""
    tokens = training_tokens(args)
    sides = {}
    for size in args.sizes:
        values = base_values(args, hyperparameters_for_size(size, tokens))
        sides[f"size {size:g}"] = {**values, "generations": 2}

    single: dict[str, list[float]] = {side: [] for side in sides}
    double: dict[str, list[float]] = {side: [] for side in sides}
    for side, curve in curves(args, scratch, sides):
        single[side].append(first_generation(curve, sides[side]))
        double[side].append(min(curve.values()))

    report = Report()
    for side, values in sides.items():
        config = make_config(values)
        readings = config.max_steps * config.batch_size * config.block_size / tokens
        row: dict[str, Any] = {"": side, "readings": f"{readings:.1f}"}
        row |= {"one run": single[side], "two generations": double[side]}
        report.rows.append(row)
    for name, losses in (("one run", single), ("two generations", double)):
        best = min(sides, key=lambda side: fmean(losses[side]))
        report.findings[f"best for {name}"] = best
    report.findings["seeds"] = measure.seeds(args)
    return report


def training_tokens(args: Namespace) -> int:
    n_characters = len(args.text.read_text(encoding="utf-8"))
    return n_characters if "validation" in args.ours else int(0.9 * n_characters)


def base_values(args: Namespace, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a run, as the options of the benchmark change them."""
    if args.quick:
        values = SHAPES["smoke"] | dict(max_steps=6, eval_tokens=128, weight_decay=0.1)
    return values | {"sample_length": 0, **args.ours}


def curves(
    args: Namespace, scratch: Path, sides: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, dict[int, float]]]:
    """The losses of each run by step, with its side, round after round."""

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

    with ThreadPoolExecutor(min(8, measure.cores())) as pool:
        futures = []
        for index in range(args.rounds):
            for side in sides:
                futures.append((side, pool.submit(trained, side, index)))
        for side, future in futures:
            yield side, future.result()


def first_generation(curve: dict[int, float], values: dict[str, Any]) -> float:
    """The loss of one run, which is the first generation of two."""
    last_step = make_config(values).max_steps
    return min(loss for step, loss in curve.items() if step <= last_step)


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=2, nanogpt=False)
    parser.add_argument("--size", type=float, default=2.0, metavar="N", help="(default 2)")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="in place of a size")
    parser.add_argument(
        "--sizes", type=float, nargs="+", metavar="N", help="two generations of each of these"
    )
    parser.add_argument("--grid", action="store_true", help="twelve single runs, not one")
    parser.add_argument("--first-seed", type=int, default=1, metavar="N", help="(default 1)")
    measure.run(parser, benchmark)
