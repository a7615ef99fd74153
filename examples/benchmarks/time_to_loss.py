"""Seconds of training to a validation loss, ours as shipped against nanoGPT's own recipe.

Examples:
  python examples/benchmarks/time_to_loss.py --text input.txt --nanogpt ../nanoGPT
  python examples/benchmarks/time_to_loss.py --text input.txt --target 1.55 --ours='--preset laptop'

Each round trains ours with a new seed and the options of --ours only (default: BUDGETS below), and
nanoGPT by the recipe of its README, to the end, in the way that is fastest here (compiled, on a
GPU). The loss is that of the finished model over the whole validation part, in windows of its own
context. The time excludes evaluations, checkpoints, compilation and start, on both sides; the time
of the whole command stands beside it. nanoGPT's script has a fixed seed, so it draws one more batch
at its first evaluation in each round.
"""

from __future__ import annotations

import shlex
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
from measure import Report
from trainers import NEVER, SHAPES, NanoGPT, Training, fastest_first, our_result, our_seconds, ours

BUDGETS: dict[str, dict[str, Any]] = {
    "cpu": {"preset": "quick"},
    # The time excludes compilation on both sides; by default ours compiles only longer runs.
    "baby": {"preset": "baby", "compile": "on"},
}
# What nanoGPT's README says for a CPU and for a GPU. On the CPU it evaluates only at the end, so
# that its checkpoint is its last step; on a GPU it keeps its best, as shipped.
RECIPES: dict[str, dict[str, Any]] = {
    "cpu": SHAPES["cpu"]
    | dict(eval_iters=20, eval_interval=2000, max_iters=2000, lr_decay_iters=2000, log_interval=1),
    "baby": SHAPES["baby"] | dict(eval_iters=200),
}
COLUMNS = ("training s", "whole command s", "loss", "parameters")
Run = tuple[float, float, float, int]  # of COLUMNS


def benchmark(args: Namespace, scratch: Path) -> Report:
    name = args.shape or ("baby" if measure.torch_and_gpu()[1] else "cpu")
    words, recipe = args.ours or BUDGETS[name], RECIPES[name]
    if args.quick:
        few = SHAPES["smoke"] | dict(max_steps=20, eval_tokens=128, sample_length=10)
        words = few | args.ours
        recipe = SHAPES["smoke"] | dict(
            eval_iters=1, eval_interval=20, max_iters=20, lr_decay_iters=20
        )

    def our_run(index: int) -> Run:
        out, seeded = scratch / f"ours-{index}", {**words, "seed": args.first_seed + index}
        started = time.perf_counter()
        measure.output(ours(args.text, out, seeded).process)
        whole = time.perf_counter() - started
        return our_seconds(out), whole, *our_result(out, args.text)

    sides: dict[str, Callable[[int], Run]] = {"ours": our_run}
    if args.nanogpt:
        nanogpt = NanoGPT(args.nanogpt, args.text, scratch)
        best = fastest(nanogpt, recipe, scratch, args.quick)
        sides[best.name] = lambda index: nanogpt.train(
            best, {"eval_iters": recipe["eval_iters"] + index}, scratch / f"nanogpt-{index}"
        )
    columns = {
        side: dict(zip(COLUMNS, map(list, zip(*runs, strict=True)), strict=True))
        for side, runs in measure.alternate(args.rounds, sides).items()
    }

    report = Report([{"": side, **found} for side, found in columns.items()])
    for row in report.rows:
        row["parameters"] = row["parameters"][0]
    mine, *others = columns.values()
    seeds = f"{args.first_seed} to {args.first_seed + args.rounds - 1}"
    report.findings["our words"] = shlex.join(measure.as_options(words))
    report.findings["our loss"] = f"{measure.plus_minus(mine['loss'])}, seeds {seeds}"
    target = args.target
    for other in others:
        report.findings["their loss"] = measure.plus_minus(other["loss"])
        shorter = measure.ratio(other["training s"], mine["training s"])
        report.findings["their time over ours"] = shorter
        target = target or statistics.mean(other["loss"])
    if target:
        below = sum(loss <= target for loss in mine["loss"])
        how = "reached" if statistics.mean(mine["loss"]) <= target else "NOT reached"
        report.findings[f"a loss of {target:.4f}"] = (
            f"{how} in the mean; in {below} of {args.rounds} rounds"
        )
    return report


def fastest(nanogpt: NanoGPT, recipe: dict[str, Any], scratch: Path, quick: bool) -> Training:
    """The fastest way to run its recipe: compiled on a GPU; else by a trial of some seconds."""
    if measure.torch_and_gpu()[1] and recipe.get("device") != "cpu":
        return next(nanogpt.variants(recipe))
    look: dict[str, Any] = dict(log_interval=10, eval_interval=NEVER, eval_iters=1, max_iters=NEVER)
    look["out_dir"] = scratch / "look"
    variants = nanogpt.variants({**recipe, **look}, quick)
    name = fastest_first(variants, recipe, 0.2 if quick else 5)[0][0].name
    return next(v for v in nanogpt.variants(recipe, quick) if v.name == name)


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=5)
    parser.add_argument("--shape", choices=tuple(BUDGETS), help="whose recipe (cpu; baby on GPUs)")
    parser.add_argument("--target", type=float, metavar="LOSS", help="(default: nanoGPT's)")
    parser.add_argument("--first-seed", type=int, default=1000, metavar="N", help="(default 1000)")
    measure.run(parser, benchmark)
