"""The time to the first step, the speed of tokenizing, and the time of a checkpoint.

Example:
  python examples/benchmarks/startup.py --text input.txt --nanogpt ../nanoGPT --megabytes 1000

The time to the first step is from the start of the command to its first line about a step.
nanoGPT's text is prepared before. The figures of tokenizing are the differences, in time and in
memory, between a large and a small text: of nanoGPT's prepare.py, and of one step of a tiny model
with ours. The large texts repeat the given one, as ASCII, and with characters of two to four bytes
in every line (mixed). prepare.py keeps everything in lists, so its text is smaller
(--nanogpt-megabytes).

The time of a checkpoint is the time between two steps of `baby`, on batches of one sequence, with a
checkpoint after each, less the time of a step. By default, a minute or more passes between two
checkpoints.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
from measure import CLI, Failed, Process, Report, cost
from trainers import SHAPES, NanoGPT, Training, our_shape, ours

IMPORT = (sys.executable, "-c", "import torch")
MIXED = str.maketrans("etaw", "éт漢🙂")
# A tiny model with long windows, so that the text takes most of the time.
TINY: dict[str, Any] = dict(
    n_layer=1,
    n_head=1,
    n_embd=16,
    block_size=1024,
    batch_size=1,
    max_steps=1,
    eval_tokens=8192,
    sample_length=1,
    device="cpu",
    compile="off",
)


def benchmark(args: Namespace, scratch: Path) -> Report:
    nanogpt = NanoGPT(args.nanogpt, args.text, scratch) if args.nanogpt else None
    report = Report()
    first_steps(args, scratch, nanogpt, report)
    text = "".join(c for c in args.text.read_bytes().decode() if c.isascii())
    tokenizing("ASCII", text, args, scratch, nanogpt, report)
    tokenizing("mixed", text.translate(MIXED), args, scratch, nanogpt, report)
    checkpoints(args, scratch, report)
    return report


def first_steps(args: Namespace, scratch: Path, nanogpt: NanoGPT | None, report: Report) -> None:
    name = "smoke" if args.quick else "cpu"
    common = {"device": "cpu", "log_interval": 1}
    our_options = {**our_shape(name), **common, **args.ours}
    mine, other = "first step, ours", "first step, nanoGPT eager"
    sides: dict[str, Callable[[int], float]] = {
        "python -c 'import torch'": lambda index: cost(Process(IMPORT))[0],
        "sm-nanogpt --help": lambda index: cost(Process([*CLI, "--help"]))[0],
        mine: lambda index: first_step(ours(args.text, scratch / f"first-{index}", our_options)),
    }
    if nanogpt:
        options = {
            **SHAPES[name],
            **common,
            "compile": False,
            "eval_iters": 1,
            "out_dir": scratch / "out",
        }
        sides[other] = lambda index: first_step(nanogpt.training("nanoGPT", options))
    seconds = measure.alternate(args.rounds, sides)
    for side, side_seconds in seconds.items():
        report.rows.append({"": side, "seconds": side_seconds})
    if nanogpt:
        time_ratio = measure.ratio(seconds[other], seconds[mine])
        report.findings["their time to the first step over ours"] = time_ratio


def first_step(training: Training) -> float:
    started = time.perf_counter()
    for moment, line in measure.lines(training.process):
        if training.step_line.match(line):
            return moment - started
    raise Failed(f"{training.name}: it ended before its first step")


def tokenizing(
    kind: str, unit: str, args: Namespace, scratch: Path, nanogpt: NanoGPT | None, report: Report
) -> None:
    """Adds speed, per byte of UTF-8, and memory on the unit repeated."""

    def our_cost(text: Path) -> tuple[float, float]:
        out = scratch / f"{kind}-{time.monotonic_ns()}"
        return cost(ours(text, out, {**TINY, **args.ours}).process)

    def their_cost(text: Path) -> tuple[float, float]:
        assert nanogpt
        return cost(nanogpt.prepare(text))

    def beyond_small(text: Path, on: Callable[[Path], tuple[float, float]]) -> tuple[float, float]:
        # In a smoke run, the text is too small to show a difference.
        small_seconds, small_memory = (0.0, 0.0) if args.quick else on(scratch / "small.txt")
        seconds, memory = on(text)
        if seconds <= small_seconds:
            raise Failed("the large text took no longer than the small one; more --megabytes")
        megabytes = text.stat().st_size / 1e6
        return megabytes / (seconds - small_seconds), memory - small_memory

    mine, other = f"tokenizing {kind}, ours", f"tokenizing {kind}, nanoGPT"
    (scratch / "small.txt").write_text(unit[:100_000], "utf-8")
    large = repeated(scratch / "large.txt", unit, 1 if args.quick else args.megabytes)
    sides = {mine: lambda index: beyond_small(large, our_cost)}
    if nanogpt:
        short_text = repeated(
            scratch / "less.txt", unit, 1 if args.quick else args.nanogpt_megabytes
        )
        sides[other] = lambda index: beyond_small(short_text, their_cost)
    speeds = {}
    for side, costs in measure.alternate(args.rounds, sides).items():
        speeds[side] = measure.column(costs, 0)
        memory = measure.column(costs, 1)
        report.rows.append({"": side, "MB/s": speeds[side], "memory MB": memory})
    if nanogpt:
        speed_ratio = measure.ratio(speeds[mine], speeds[other])
        report.findings[f"tokenizing {kind} per byte, ours over theirs"] = speed_ratio


def checkpoints(args: Namespace, scratch: Path, report: Report) -> None:
    """Adds the time between the lines of two steps, less a step, with a checkpoint after each."""
    steps = 5 if args.quick else 20
    name = "smoke" if args.quick else "baby"
    options = {**our_shape(name), "batch_size": 1, "device": "cpu", "max_steps": steps}
    options |= {"log_interval": 1, "checkpoint_seconds": 1e-6, **args.ours}

    def seconds_of_checkpoint(index: int) -> float:
        training = ours(args.text, scratch / f"checkpoints-{index}", options)
        moments, speeds = [], []
        for moment, line in measure.lines(training.process):
            match = re.search(r"^step=.* tokens_per_second=(\d+)", line)
            if match is not None:
                moments.append(moment)
                speeds.append(float(match[1]))
        # The last interval includes an evaluation.
        moments, speeds = moments[:-1], speeds[:-1]
        in_steps = sum(SHAPES[name]["block_size"] / speed for speed in speeds[1:])
        return (moments[-1] - moments[0] - in_steps) / (len(moments) - 1)

    side = "a checkpoint, ours"
    seconds = measure.alternate(args.rounds, {side: seconds_of_checkpoint})[side]
    report.rows.append({"": side, "seconds": seconds})
    share = statistics.median(seconds) / 60
    report.findings["a checkpoint a minute, of the time"] = f"{share:.2%}"


def repeated(path: Path, unit: str, megabytes: float) -> Path:
    """A file that repeats the unit to at least that size."""
    data = unit.encode()
    with path.open("wb") as file:
        while file.tell() < megabytes * 1e6:
            file.write(data)
    return path


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=3)
    parser.add_argument("--megabytes", type=float, default=1000, help="of text (default 1000)")
    parser.add_argument(
        "--nanogpt-megabytes", type=float, default=100, help="of text for it (default 100)"
    )
    measure.run(parser, benchmark)
