"""Training tokens per second, ours as shipped against nanoGPT at its best.

Example:
  python examples/benchmarks/throughput.py --text input.txt --nanogpt ../nanoGPT --shape baby
  python examples/benchmarks/throughput.py --text input.txt --seconds 5 --beside 0,1,2

Both models have as many parameters, and the same context, batch and dropout. Ours runs by its
preset, and compiled on a GPU, as in time_to_loss.py. nanoGPT first runs once in each way; the
fastest way then alternates with ours, and each ratio is that of two runs in a row. The clock counts
data, forward, backward, optimizer and communication. On a GPU, the table also shows the share of
its peak (MFU).

--beside measures on a CPU, beside so many programs that do nothing but compute: ours as shipped,
with threads that stay awake while they wait for each other, and with fewer threads; and nanoGPT,
eager, with as many threads as there are cores and with one.
"""

from __future__ import annotations

import random
import re
import shutil
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import measure
from measure import Failed, Process, Report
from trainers import (
    NEVER,
    SHAPES,
    NanoGPT,
    Pace,
    Training,
    fastest_first,
    gpt2_passes,
    gpu_memory,
    our_shape,
    ours,
    pace,
    threads_text,
)

from sm_nanogpt.launcher.instances import GPUS, Gpu

# Kinds of GPU that SageMaker does not have, before those that it has: their names hold the others'.
OTHER_GPUS = [
    Gpu("H200 NVL", memory=141, teraflops=836),
    Gpu("H100 NVL", memory=94, teraflops=836),
    Gpu("H100 PCIe", memory=80, teraflops=756),
    Gpu("V100-PCIE", memory=16, teraflops=112),
]
GPT2_SYMBOLS = 50304
BUSY = "while True: pass"


def benchmark(args: Namespace, scratch: Path) -> Report:
    _, gpu = measure.torch_and_gpu()
    name = args.shape or ("baby" if gpu else "cpu")
    size = "smoke" if args.quick else name
    shape = SHAPES[size]
    if shape.get("device") == "cpu":
        gpu = None
    teraflops = peak(gpu, args.peak) if gpu else None
    seconds = 0.2 if args.quick else args.seconds
    text = many_symbols(scratch) if name == "gpt2" else args.text
    steps_are_short = name == "cpu" or (gpu and name != "gpt2")
    common = {"log_interval": 10 if steps_are_short else 1, "eval_interval": NEVER}
    options = {**our_shape(size), **common, "max_steps": NEVER}
    if name == "gpt2":
        options["tie_embeddings"] = True
    if gpu:
        options["compile"] = "on"
    options |= args.ours
    theirs = {
        **shape,
        **common,
        "max_iters": NEVER,
        "eval_iters": 1,
        "out_dir": scratch / "out",
    }
    if args.beside:
        return beside(args, scratch, {**options, "device": "cpu"}, theirs, shape, seconds)

    def our_pace(index: int) -> Pace:
        return pace(ours(text, scratch / f"ours-{index}", options), shape, seconds)

    sides = {"ours": our_pace}
    looks: list[tuple[Training, Pace]] = []
    if args.nanogpt:
        nanogpt = NanoGPT(args.nanogpt, text, scratch)
        pass_counts = gpt2_passes(gpu_memory()) if size == "gpt2" else [1]
        variants = nanogpt.variants(theirs, args.quick, pass_counts)
        looks = fastest_first(variants, shape, seconds)
        best, _ = looks[0]
        sides[best.name] = lambda index: pace(best, shape, seconds)
    paces = measure.alternate(args.rounds, sides)

    report = Report()
    for side, side_paces in paces.items():
        report.rows.append(row(side, side_paces, shape, teraflops))
    if not looks:
        return report

    our_paces, their_paces = paces["ours"], paces[best.name]
    our_speeds, their_speeds = speeds(our_paces), speeds(their_paces)
    size_ratio = our_paces[0].parameters / their_paces[0].parameters
    size_text = f"{size_ratio:.3f}"
    if abs(size_ratio - 1) > 0.05:
        size_text += " (NOT within 5 %)"
    report.findings[f"ours against {best.name}"] = measure.ratio(our_speeds, their_speeds)
    report.findings["parameters, ours to theirs"] = size_text
    for variant, look in looks[1:]:
        report.rows.append(row(f"{variant.name} (one look)", [look], shape, teraflops))
        if look.tokens_per_second > statistics.median(their_speeds):
            report.findings["NOT nanoGPT's best"] = f"{variant.name} was faster; measure again"
    return report


AWAKE = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "5000"}
SHIPPED = "as shipped"


def ways_to_wait(shipped: Training) -> dict[str, Training]:
    """A run of ours as shipped, and with each fixed number of threads, which stay awake."""
    ways = {SHIPPED: shipped}
    for threads in sorted({1, measure.cores() // 2, measure.cores()} - {0}, reverse=True):
        env = {**AWAKE, "OMP_NUM_THREADS": str(threads)}
        process = replace(shipped.process, env=env)
        ways[f"{threads_text(threads)}, awake"] = replace(shipped, process=process)
    return ways


def beside(
    args: Namespace,
    scratch: Path,
    options: dict[str, Any],
    theirs: dict[str, Any],
    shape: dict[str, Any],
    seconds: float,
) -> Report:
    """Ours in each way to wait, and nanoGPT, beside busy programs.

    options: of our run. theirs: of nanoGPT's.
    """
    trainings = ways_to_wait(ours(args.text, scratch / "ours", options))
    if args.nanogpt:
        for training in NanoGPT(args.nanogpt, args.text, scratch).variants(theirs):
            if "thread" in training.name and "eager" in training.name:
                trainings[training.name] = training

    def pace_beside(training: Training, n_programs: int, index: int) -> Pace:
        shutil.rmtree(scratch / "ours", ignore_errors=True)  # a run of ours would be resumed
        with ExitStack() as programs:
            for _ in range(n_programs):
                programs.enter_context(measure.started(Process([sys.executable, "-c", BUSY])))
            return pace(training, shape, seconds)

    sides: dict[str, Callable[[int], Pace]] = {}
    for n_programs in args.beside:
        for way, training in trainings.items():
            sides[f"beside {n_programs}: {way}"] = partial(pace_beside, training, n_programs)
    paces = measure.alternate(args.rounds, sides)

    report = Report()
    for side, side_paces in paces.items():
        report.rows.append(row(side, side_paces, shape, None))
    for n_programs in args.beside:
        shipped, *others = [f"beside {n_programs}: {way}" for way in trainings]
        for side in others:
            ratio = measure.ratio(speeds(paces[shipped]), speeds(paces[side]))
            report.findings[f"{SHIPPED}, against {side}"] = ratio
    return report


def numbers(text: str) -> list[int]:
    """`0,1,2` as numbers."""
    return [int(number) for number in text.split(",")]


def speeds(paces: list[Pace]) -> list[float]:
    return [pace.tokens_per_second for pace in paces]


def row(
    side: str, paces: list[Pace], shape: dict[str, Any], teraflops: float | None
) -> dict[str, Any]:
    """The figures of a side; with the peak of the GPU also their share of it."""
    n_parameters = paces[0].parameters
    figures = {"": side, "parameters": n_parameters, "tokens/s": speeds(paces)}
    if teraflops:
        # arXiv:2204.02311, appendix B: operations per token, forward and backward.
        attention = 12 * shape["n_layer"] * shape["n_embd"] * shape["block_size"]
        percent = 100 * (6 * n_parameters + attention) / (teraflops * 1e12)
        figures["MFU %"] = [percent * speed for speed in speeds(paces)]
    return figures


def peak(gpu: str, override: float | None) -> float:
    """The 10**12 operations per second of a GPU, as torch names it. Raises Failed."""
    if override:
        return override
    for kind in [*OTHER_GPUS, *GPUS]:
        if kind.teraflops and re.search(rf"\b{kind.name}\b", gpu):
            return kind.teraflops
    raise Failed(f"the peak of {gpu} is not known; pass --peak TFLOPS")


def many_symbols(scratch: Path) -> Path:
    """A text with as many different characters as GPT-2 has tokens, for an equally large head."""
    symbols = [chr(0x20000 + i) for i in range(GPT2_SYMBOLS)]
    text = symbols + random.Random(0).choices(symbols, k=2_000_000)
    path = scratch / "symbols.txt"
    path.write_text("".join(text), "utf-8")
    return path


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=3)
    parser.add_argument("--shape", choices=("cpu", "baby", "gpt2"), help="(default: cpu, or baby)")
    parser.add_argument("--seconds", type=float, default=15, help="of each run (default 15)")
    parser.add_argument("--peak", type=float, metavar="TFLOPS", help="of the GPU, in a 16-bit type")
    parser.add_argument(
        "--beside", type=numbers, metavar="N,N", help="numbers of busy programs to measure beside"
    )
    measure.run(parser, benchmark)
