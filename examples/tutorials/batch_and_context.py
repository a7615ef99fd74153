"""What batch size, context, accumulation, processes and windows do to the speed of training.

Example:
  python examples/tutorials/batch_and_context.py --text input.txt --heat-map speed.png

Each row is a run of train.py with one change to the first row. Sequences per second are what the
throughput tutorial calls QPS; tokens per second are those times block_size. --heat-map draws batch
size against context.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import measure
from measure import Report
from trainers import NEVER, SHAPES, ours, pace

BATCHES, CONTEXTS = (4, 16, 64), (32, 64, 128, 256)
CHANGES: dict[str, dict[str, Any]] = {
    "gradient_accumulation_steps 2": {"gradient_accumulation_steps": 2},
    "gradient_accumulation_steps 4": {"gradient_accumulation_steps": 4},
    "precision float32": {"precision": "float32"},
    "dropout 0.2": {"dropout": 0.2},
    "short_windows 1": {"short_windows": 1},
    "2 processes (DDP)": {"processes": 2},
}


def benchmark(args: Namespace, scratch: Path) -> Report:
    shape = {**SHAPES["smoke" if args.quick else "cpu"], "batch_size": 16, "device": args.device}
    seconds = 0.1 if args.quick else args.seconds
    runs = 0

    def speeds(changes: dict[str, Any]) -> list[float]:
        nonlocal runs
        figures = []
        for _ in range(args.rounds):
            runs += 1
            options = {**shape, "log_interval": 5, "eval_interval": NEVER, "max_steps": NEVER}
            # In one process, so that the rows differ only in what they change.
            options |= {"processes": 1, **changes, **args.ours}
            training = ours(args.text, scratch / str(runs), options)
            figures.append(pace(training, options, seconds).tokens_per_second)
        return figures

    batches: tuple[int, ...] = BATCHES
    contexts: tuple[int, ...] = CONTEXTS
    changes_to_try = dict(CHANGES)
    if args.quick:
        batches, contexts = (4, 8), (32,)
        changes_to_try = {name: CHANGES[name] for name in ("dropout 0.2", "2 processes (DDP)")}
    first = speeds({})
    report = Report([row("as it is", shape["block_size"], first, first)])
    for name, changes in changes_to_try.items():
        report.rows.append(row(name, shape["block_size"], speeds(changes), first))
    cells = []
    for context in contexts:
        for batch in batches:
            shape_of_cell = {"batch_size": batch, "block_size": context}
            figures = speeds(shape_of_cell)
            name = f"batch_size {batch}, block_size {context}"
            report.rows.append(row(name, context, figures, first))
            cells.append({**shape_of_cell, "tokens/s": median(figures)})
    if args.heat_map:
        draw(cells, args.heat_map)
    return report


def row(name: str, block_size: int, speeds: list[float], first: list[float]) -> dict[str, Any]:
    return {
        "": name,
        "sequences/s": [speed / block_size for speed in speeds],
        "tokens/s": speeds,
        "over the first": measure.ratio(speeds, first),
    }


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """Write a heat map of batch size against context, as PNG or SVG by the suffix."""
    import altair as alt

    base = alt.Chart(alt.Data(values=cells)).encode(
        x=alt.X("batch_size:O", title="batch_size", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("block_size:O", title="block_size", sort="descending"),
    )
    squares = base.mark_rect().encode(
        color=alt.Color("tokens/s:Q", title="tokens/s", scale=alt.Scale(scheme="viridis"))
    )
    numbers = base.mark_text(color="white", fontSize=13, stroke="black", strokeWidth=0.4).encode(
        text=alt.Text("tokens/s:Q", format=",.0f")
    )
    chart = (squares + numbers).properties(width=360, height=280, title="Tokens per second")
    chart.save(str(path), scale_factor=2)


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=3, nanogpt=False)
    parser.add_argument("--seconds", type=float, default=4, help="of each run (default 4)")
    parser.add_argument("--device", default="cpu", help="(default: cpu)")
    parser.add_argument(
        "--heat-map", type=measure.picture, metavar="FILE", help="a PNG or SVG to write"
    )
    measure.run(parser, benchmark)
