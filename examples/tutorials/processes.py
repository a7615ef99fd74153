"""From one process to many: the same loss curve on 1, 2 and 4 processes.

Example:
  python examples/tutorials/processes.py --text input.txt --plot curves.png

Each row is a job of the launcher on this machine, trained by DistributedDataParallel on the same
global batches. The table shows how far each loss curve is from that of one process, the time, and
the efficiency: the speed over that of one process, by the number of processes (more processes than
cores cannot gain). The last row is stopped in the middle and resumed. --plot draws the curves.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import measure
from measure import ROOT, Report, note

sys.path.insert(0, str(ROOT))

from sm_nanogpt import Job, Request, Settings, launch
from sm_nanogpt.launcher.curve import Curve

WAYS = {"1 process": 1, "2 processes": 2, "4 processes": 4}
RESUMED = "2 processes, stopped and resumed"


def benchmark(args: Namespace, scratch: Path) -> Report:
    os.environ["OMP_NUM_THREADS"] = "1"  # so that processes are what differs
    settings = Settings(home=scratch / "home")
    steps = 100 if args.quick else args.steps  # with fewer, a run may end before it is stopped
    small = {"n_layer": 1, "n_embd": 32, "n_head": 2, "block_size": 32} if args.quick else {}
    values = {"batch_size": 12, "max_steps": steps, "sample_length": 150, **small, **args.ours}
    values |= {"log_interval": max(1, steps // 20), "eval_interval": max(1, steps // 4)}

    def job(processes: int, **hyperparameters: Any) -> Request:
        return Request(
            instance="local",
            processes_per_instance=processes,
            data=str(args.text),
            hyperparameters=values,
            **hyperparameters,
        )

    curves: dict[str, Curve] = {}
    for name, processes in WAYS.items():
        note(name)
        curves[name] = finished(launch(job(processes), settings))
    note(RESUMED)
    first = launch(job(2), settings)
    while curve_of(first).newest.get("step", 0) < steps // 3:
        time.sleep(0.05)
    first.stop()
    curves[RESUMED] = finished(first.wait().resume(processes_per_instance=2))

    alone, report, config = curves["1 process"], Report(), job(1).config()
    tokens = steps * config.batch_size * config.block_size
    for name, curve in curves.items():
        processes = WAYS.get(name, 2)
        speed = mean_speed(curve)
        report.rows.append(
            {
                "": name,
                "val_loss": f"{curve.points('val_loss')[-1][1]:.5f}",
                "largest difference of train_loss": f"{farthest(curve, alone):.1e}",
                "training s": f"{tokens / speed:.1f}",
                "tokens/s": f"{speed:,.0f}",
                "efficiency": f"{speed / mean_speed(alone) / processes:.0%}",
            }
        )
    for when, text in alone.samples.items():
        report.findings[f"sample {when}"] = repr(text)
    two = curves["2 processes"].points("val_loss")
    same = two == curves[RESUMED].points("val_loss")
    report.findings["stopped and resumed, against undisturbed"] = (
        "the same losses to the last bit" if same else "NOT the same losses"
    )
    if args.plot:
        draw(curves, args.plot)
    return report


def finished(job: Job) -> Curve:
    return curve_of(job.wait())


def curve_of(job: Job) -> Curve:
    return job.curve(with_samples=True)


def mean_speed(curve: Curve) -> float:
    """Tokens per second over the run; the first row holds the start."""
    speeds = [speed for _, speed in curve.points("tokens_per_second")][1:]
    return len(speeds) / sum(1 / speed for speed in speeds)


def farthest(curve: Curve, other: Curve) -> float:
    """The largest difference of the training losses at the steps that both logged."""
    other_losses = dict(other.points("train_loss"))
    return max(
        abs(loss - other_losses[step])
        for step, loss in curve.points("train_loss")
        if step in other_losses
    )


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Write the training losses as PNG or SVG, by the suffix."""
    import altair as alt

    values = [
        {"run": name, "step": step, "train_loss": loss}
        for name, curve in curves.items()
        for step, loss in curve.points("train_loss")
    ]
    chart = (
        alt.Chart(alt.Data(values=values))
        .mark_line(point=True, opacity=0.7)
        .encode(
            x="step:Q",
            y=alt.Y("train_loss:Q", scale=alt.Scale(zero=False)),
            color=alt.Color("run:N", sort=list(curves), title=None),
            strokeDash=alt.StrokeDash("run:N", sort=list(curves), title=None),
        )
        .properties(width=560, height=320, title="One curve, whatever the number of processes")
    )
    chart.save(str(path), scale_factor=2)


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=1, nanogpt=False)
    parser.add_argument("--steps", type=int, default=500, help="of each run (default 500)")
    parser.add_argument(
        "--plot", type=measure.picture, metavar="FILE", help="a PNG or SVG to write"
    )
    measure.run(parser, benchmark)
