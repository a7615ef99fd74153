"""Training tokens per second of 1, 2, ... processes on the CPU, with one thread each.

Example:
  python examples/benchmarks/scaling.py --text input.txt --nanogpt ../nanoGPT --processes 1 2

The global batch stays the same, so every row trains the same model on as many tokens per step. A
last row has one process with as many threads, which uses the same cores.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import measure
from measure import Report
from trainers import NEVER, SHAPES, NanoGPT, our_shape, ours, pace

OURS, THEIRS = "ours", "nanoGPT, eager"


def benchmark(args: Namespace, scratch: Path) -> Report:
    size = "smoke" if args.quick else args.shape
    shape = SHAPES[size]
    seconds = 0.2 if args.quick else args.seconds
    common = {"log_interval": 10 if size == "cpu" else 1, "eval_interval": NEVER, "device": "cpu"}
    nanogpt = NanoGPT(args.nanogpt, args.text, scratch) if args.nanogpt else None

    def our_speed(processes: int, threads: int, index: int) -> float:
        options = {
            **our_shape(size),
            **common,
            "max_steps": NEVER,
            "processes": processes,
            **args.ours,
        }
        out = scratch / f"{processes}-{threads}-{index}"
        return pace(ours(args.text, out, options, threads), shape, seconds).tokens_per_second

    def their_speed(processes: int, threads: int, index: int) -> float:
        assert nanogpt
        options = {
            **shape,
            **common,
            "max_iters": NEVER,
            "eval_iters": 1,
            "compile": False,
            "out_dir": scratch / "out",
        }
        training = nanogpt.training("nanoGPT", options, threads, processes)
        return pace(training, shape, seconds).tokens_per_second

    ways = [(processes, 1) for processes in args.processes]
    ways += [(1, threads) for threads in args.processes if threads > 1]
    sides: dict[str, Callable[[int], float]] = {}
    for processes, threads in ways:
        sides[name(OURS, processes, threads)] = partial(our_speed, processes, threads)
        if nanogpt:
            sides[name(THEIRS, processes, threads)] = partial(their_speed, processes, threads)
    speeds = measure.alternate(args.rounds, sides)

    report = Report()
    over_first = f"over {name('', *ways[0])}"
    for side in (OURS, THEIRS) if nanogpt else (OURS,):
        first = speeds[name(side, *ways[0])]
        for processes, threads in ways:
            label = name(side, processes, threads)
            row = {"": label, "tokens/s": speeds[label]}
            row[over_first] = measure.ratio(speeds[label], first)
            if nanogpt and side == OURS:
                theirs = speeds[name(THEIRS, processes, threads)]
                row["over nanoGPT"] = measure.ratio(speeds[label], theirs)
            report.rows.append(row)
    return report


def name(side: str, processes: int, threads: int) -> str:
    return f"{side} {processes} x {threads}".strip()


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=3)
    parser.add_argument("--shape", choices=("cpu", "baby"), default="baby", help="(default: baby)")
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, 2], metavar="N", help="(default: 1 2)"
    )
    parser.add_argument("--seconds", type=float, default=30, help="of each run (default 30)")
    measure.run(parser, benchmark)
