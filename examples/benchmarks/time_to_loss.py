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
    options = args.ours or BUDGETS[name]
    recipe = RECIPES[name]
    if args.quick:
        options = SHAPES["smoke"] | dict(max_steps=20, eval_tokens=128, sample_length=10)
        options |= args.ours
        recipe = SHAPES["smoke"] | dict(
            eval_iters=1, eval_interval=20, max_iters=20, lr_decay_iters=20
        )

    def our_run(index: int) -> Run:
        out = scratch / f"ours-{index}"
        seeded = {**options, "seed": args.first_seed + index}
        began = time.perf_counter()
        measure.output(ours(args.text, out, seeded).process)
        command_seconds = time.perf_counter() - began
        loss, n_parameters = our_result(out, args.text)
        return our_seconds(out), command_seconds, loss, n_parameters

    sides: dict[str, Callable[[int], Run]] = {"ours": our_run}
    if args.nanogpt:
        nanogpt = NanoGPT(args.nanogpt, args.text, scratch)
        best = fastest(nanogpt, recipe, scratch, args.quick)
        sides[best.name] = lambda index: nanogpt.train(
            best, {"eval_iters": recipe["eval_iters"] + index}, scratch / f"nanogpt-{index}"
        )
    report = Report()
    for side, runs in measure.alternate(args.rounds, sides).items():
        row = {name: measure.column(runs, index) for index, name in enumerate(COLUMNS)}
        report.rows.append({"": side, **row, "parameters": row["parameters"][0]})

    our_row, *other_rows = report.rows
    our_losses = our_row["loss"]
    our_loss = measure.plus_minus(our_losses)
    report.findings["our options"] = shlex.join(measure.as_arguments(options))
    report.findings["our loss"] = f"{our_loss}, seeds {measure.seeds(args)}"
    target = args.target
    for row in other_rows:
        report.findings["their loss"] = measure.plus_minus(row["loss"])
        time_ratio = measure.ratio(row["training s"], our_row["training s"])
        report.findings["their time over ours"] = time_ratio
        target = target or statistics.mean(row["loss"])
    if target:
        n_below = sum(loss <= target for loss in our_losses)
        verdict = "reached" if statistics.mean(our_losses) <= target else "NOT reached"
        report.findings[f"a loss of {target:.4f}"] = (
            f"{verdict} in the mean; in {n_below} of {args.rounds} rounds"
        )
    return report


def fastest(nanogpt: NanoGPT, recipe: dict[str, Any], scratch: Path, quick: bool) -> Training:
    """The fastest way to run its recipe: compiled on a GPU; else by a trial of some seconds."""
    if measure.torch_and_gpu()[1] and recipe.get("device") != "cpu":
        return next(nanogpt.variants(recipe))
    trial = {
        **recipe,
        "log_interval": 10,
        "eval_interval": NEVER,
        "eval_iters": 1,
        "max_iters": NEVER,
        "out_dir": scratch / "look",
    }
    looks = fastest_first(nanogpt.variants(trial, quick), recipe, 0.2 if quick else 5)
    best, _ = looks[0]
    return next(v for v in nanogpt.variants(recipe, quick) if v.name == best.name)


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=5)
    parser.add_argument("--shape", choices=tuple(BUDGETS), help="whose recipe (cpu; baby on GPUs)")
    parser.add_argument("--target", type=float, metavar="LOSS", help="(default: nanoGPT's)")
    parser.add_argument("--first-seed", type=int, default=1000, metavar="N", help="(default 1000)")
    measure.run(parser, benchmark)
