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
import json
import math
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import measure
from measure import ROOT, Report
from trainers import SHAPES, ours

sys.path.insert(0, str(ROOT))
from entry_point.config import make_config
from entry_point.presets import PRESETS
from entry_point.sizes import hyperparameters_for_size, optimizer_values

AS_LONG = 2.25  # a step with a teacher takes 1.25 times one without
DECAYS, DROPOUTS = (1.0, 3.0), (0.0, 0.1)  # times that of the preset; added to its own


def longer(base: dict[str, Any], size: float | None, tokens: int) -> dict[str, Any]:
    """The values of a single run that takes as long as two generations."""
    config = make_config(base)
    steps = round(AS_LONG * config.max_steps)
    readings = steps * config.batch_size * config.block_size / tokens
    return {
        **base,
        "max_steps": steps,
        **({} if size is None else optimizer_values(size, steps, readings)),
    }


def grid(base: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Twelve single runs of the computation of two generations, by what they are."""
    made, config = dict[str, dict[str, Any]](), make_config(base)
    one_head = config.n_embd // config.n_head
    for heads, decay, dropout in itertools.product(range(3), DECAYS, DROPOUTS):
        width = config.n_embd + heads * one_head
        values = {
            "n_head": config.n_head + heads,
            "n_embd": width,
            "max_steps": round(AS_LONG * config.max_steps * (config.n_embd / width) ** 2),
            "weight_decay": round(decay * config.weight_decay, 3),
            "dropout": config.dropout + dropout,
        }
        made[", ".join(f"{name} {value:g}" for name, value in values.items())] = {**base, **values}
    return made


def benchmark(args: Namespace, scratch: Path) -> Report:
    tokens = int(0.9 * len(args.text.read_text(encoding="utf-8")))
    size = None if args.preset else args.size
    base = (
        dict(PRESETS[args.preset]) if args.preset else hyperparameters_for_size(args.size, tokens)
    )
    if args.quick:
        base = SHAPES["smoke"] | dict(max_steps=6, eval_tokens=128, weight_decay=0.1)
    base |= {"sample_length": 0, **args.ours}
    singles = grid(base) if args.grid else {"2.25 times the steps": longer(base, size, tokens)}
    sides = {"two generations": {**base, "generations": 2}, **singles}

    def trained(side: str, index: int) -> list[tuple[int, float]]:
        values = {**sides[side], "seed": args.first_seed + index}
        values["eval_interval"] = math.ceil(int(values["max_steps"]) / 8)
        out = scratch / f"{index}-{list(sides).index(side)}"
        measure.output(ours(args.text, out, values, threads=1).process)
        rows = map(json.loads, (out / "output" / "metrics.jsonl").read_text().splitlines())
        curve = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
        best = min(loss for _, loss in curve)
        measure.note(f"seed {values['seed']}: {side}: {best:.4f}")
        return curve

    losses: dict[str, list[float]] = {"one run": []}
    with ThreadPoolExecutor(min(8, measure.cores())) as pool:
        wanted = [(side, index) for index in range(args.rounds) for side in sides]
        curves = pool.map(trained, *zip(*wanted, strict=True))
        for (side, _), curve in zip(wanted, curves, strict=True):
            if side == "two generations":
                first = make_config(base).max_steps
                losses["one run"].append(min(loss for step, loss in curve if step <= first))
            losses.setdefault(side, []).append(min(loss for _, loss in curve))
    best = min(singles, key=lambda side: fmean(losses[side]))
    two, findings = losses["two generations"], dict[str, str]()
    for side in ("one run", best):
        differences = [a - b for a, b in zip(two, losses[side], strict=True)]
        findings[f"two generations minus {side}"] = measure.plus_minus(differences)
    findings["seeds"] = f"{args.first_seed} to {args.first_seed + args.rounds - 1}"
    return Report([{"": side, "loss": found} for side, found in losses.items()], findings)


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=2, nanogpt=False)
    parser.add_argument("--size", type=float, default=2.0, metavar="N", help="(default 2)")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="in place of a size")
    parser.add_argument("--grid", action="store_true", help="twelve single runs, not one")
    parser.add_argument("--first-seed", type=int, default=1, metavar="N", help="(default 1)")
    measure.run(parser, benchmark)
