"""The speed ladder: each rung changes one more setting, and shows the loss beside the speed.

Example:
  python examples/tutorials/ladder.py --text input.txt --shape baby --device cuda

The tutorial that this follows published, for a model of 10.9 million parameters on an A800: float32
144.5k tokens/s, TF32 542.6k, bfloat16 353k, compiled 706.7k, flash attention 731.9k. It showed no
loss, so nobody saw that its last rung had lost the dropout. Each rung here trains the same steps
from the same seed, so a rung that changes the model shows in its loss. On a CPU there is no TF32.

The attention kernel is not a setting of train.py: this script runs train.py with PyTorch's switches
for attention kernels off, as the rung says.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import measure
from measure import Report
from trainers import SHAPES, Training, our_metrics, our_seconds, ours

# What a rung executes before train.py, in addition to the settings of its row.
PLAIN_ATTENTION = (
    "torch.backends.cuda.enable_flash_sdp(False);"
    " torch.backends.cuda.enable_mem_efficient_sdp(False);"
    " torch.backends.cuda.enable_cudnn_sdp(False)"
)
TF32 = "torch.backends.cuda.matmul.allow_tf32 = True"
START = (
    "import runpy, sys, torch; {}; sys.argv = sys.argv[1:];"
    " runpy.run_path(sys.argv[0], run_name='__main__')"
)

Rung = tuple[str, dict[str, Any], str]


def rungs(device: str) -> list[Rung]:
    """Name, settings and switches of each rung, the slowest first."""
    plain = {"precision": "float32", "compile": "off"}
    ladder: list[Rung] = [("float32", plain, PLAIN_ATTENTION)]
    if device == "cuda":
        ladder.append(("TF32", plain, f"{PLAIN_ATTENTION}; {TF32}"))
    half = {**plain, "precision": "bfloat16"}
    ladder += [
        ("bfloat16", half, PLAIN_ATTENTION),
        ("compiled", {**half, "compile": "on"}, PLAIN_ATTENTION),
        ("fused attention", {**half, "compile": "on"}, ""),
    ]
    if device != "cuda":
        ladder.append(("as shipped", {}, ""))
    return ladder


def benchmark(args: Namespace, scratch: Path) -> Report:
    shape = {**SHAPES["smoke" if args.quick else args.shape], "device": args.device}
    steps = 4 if args.quick else args.steps
    options = {
        **shape,
        "max_steps": steps,
        "eval_interval": steps,
        "log_interval": max(1, steps // 2),
        "sample_length": 0,
        "processes": 1,
    }
    ladder = rungs(args.device)
    if args.quick:
        ladder = [ladder[0], ladder[-1]]
    losses: dict[str, float] = {}
    memory: dict[str, float] = {}

    def speed(rung: Rung, index: int) -> float:
        name, settings, switches = rung
        out = scratch / f"{index}-{name}"
        training = ours(args.text, out, {**options, **settings, **args.ours})
        _, memory[name] = measure.cost(with_switches(training, switches).process)
        losses[name] = our_metrics(out)[-1]["val_loss"]
        return steps * shape["batch_size"] * shape["block_size"] / our_seconds(out)

    sides: dict[str, Callable[[int], float]] = {}
    for rung in ladder:
        name, _, _ = rung
        sides[name] = partial(speed, rung)
    speeds = measure.alternate(args.rounds, sides)

    report = Report()
    slowest = next(iter(speeds.values()))
    below: list[float] = []  # the speeds of the rung below
    for name, figures in speeds.items():
        report.rows.append(
            {
                "": name,
                "tokens/s": figures,
                "over the rung below": measure.ratio(figures, below) if below else "",
                "over float32": measure.ratio(figures, slowest),
                "memory MB": f"{memory[name]:,.0f}",
                f"val_loss at step {steps}": f"{losses[name]:.4f}",
            }
        )
        below = figures
    spread = max(losses.values()) - min(losses.values())
    report.findings["val_loss, largest less smallest"] = f"{spread:.4f}"
    return report


def with_switches(training: Training, switches: str) -> Training:
    """The run with PyTorch's switches set before train.py begins."""
    if not switches:
        return training
    python, *arguments = training.process.command
    command = [python, "-c", START.format(switches), *arguments]
    return replace(training, process=replace(training.process, command=command))


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=3, nanogpt=False)
    parser.add_argument("--shape", choices=("cpu", "baby", "gpt2"), default="cpu")
    parser.add_argument("--device", default="cpu", help="(default: cpu)")
    parser.add_argument("--steps", type=int, default=200, help="of each run (default 200)")
    measure.run(parser, benchmark)
