"""Training tokens per second, ours as shipped against nanoGPT at its best.

Example:
  python examples/benchmarks/throughput.py --text input.txt --nanogpt ../nanoGPT --shape baby

Both models have as many parameters, and the same context, batch and dropout. Ours runs by its
preset, and compiled on a GPU, as in time_to_loss.py. nanoGPT first runs once in each way; the
fastest way then alternates with ours, and each ratio is that of two runs in a row. The clock counts
data, forward, backward, optimizer and communication. On a GPU, the table also shows the share of
its peak (MFU).
"""

from __future__ import annotations

import random
import re
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import measure
from measure import Failed, Report
from trainers import GPT2_PASSES, NEVER, SHAPES, NanoGPT, Pace, fastest_first, our_shape, ours, pace

from launcher.instances import GPUS, Gpu

# Kinds of GPU that SageMaker does not have, before those that it has: their names hold the others'.
OTHER_GPUS = [
    Gpu("H200 NVL", memory=141, teraflops=836),
    Gpu("H100 NVL", memory=94, teraflops=836),
    Gpu("H100 PCIe", memory=80, teraflops=756),
    Gpu("V100-PCIE", memory=16, teraflops=112),
]
GPT2_SYMBOLS = 50304


def benchmark(args: Namespace, scratch: Path) -> Report:
    _, gpu = measure.torch_and_gpu()
    name = args.shape or ("baby" if gpu else "cpu")
    size = "smoke" if args.quick else name
    shape = SHAPES[size]
    gpu = "" if shape.get("device") == "cpu" else gpu
    top = peak(gpu, args.peak) if gpu else None
    seconds = 0.2 if args.quick else args.seconds
    text = many_symbols(scratch) if name == "gpt2" else args.text
    log_interval = 10 if (gpu or name == "cpu") and name != "gpt2" else 1
    rare = {"log_interval": log_interval, "eval_interval": NEVER}
    words = {**our_shape(size), **rare, "max_steps": NEVER}
    words |= {"tie_embeddings": True} if name == "gpt2" else {}
    words |= {"compile": "on"} if gpu else {}
    words |= args.ours

    def our_pace(index: int) -> Pace:
        return pace(ours(text, scratch / f"ours-{index}", words), shape, seconds)

    sides, looks = {"ours": our_pace}, []
    if args.nanogpt:
        nanogpt = NanoGPT(args.nanogpt, text, scratch)
        theirs = {**shape, **rare, "max_iters": NEVER, "eval_iters": 1, "out_dir": scratch / "out"}
        if size == "gpt2":  # nanoGPT's batch_size is that of one pass
            theirs["gradient_accumulation_steps"] = GPT2_PASSES
            theirs["batch_size"] //= GPT2_PASSES
        looks = fastest_first(nanogpt.variants(theirs, args.quick), shape, seconds)
        best = looks[0][0]
        sides[best.name] = lambda index: pace(best, shape, seconds)
    found = measure.alternate(args.rounds, sides)

    report = Report([row(side, paces, shape, top) for side, paces in found.items()])
    if looks:
        mine, other = found.values()
        speeds = ([p.tokens_per_second for p in paces] for paces in (mine, other))
        size = mine[0].parameters / other[0].parameters
        report.findings = {
            f"ours against {looks[0][0].name}": measure.ratio(*speeds),
            "parameters, ours to theirs": f"{size:.3f}"
            + (" (NOT within 5 %)" if abs(size - 1) > 0.05 else ""),
        }
    for variant, look in looks[1:]:
        report.rows.append(row(f"{variant.name} (one look)", [look], shape, top))
        if look.tokens_per_second > statistics.median(p.tokens_per_second for p in other):
            report.findings["NOT nanoGPT's best"] = f"{variant.name} was faster; measure again"
    return report


def row(who: str, paces: list[Pace], shape: dict[str, Any], peak: float | None) -> dict[str, Any]:
    speeds = [p.tokens_per_second for p in paces]
    found = {"": who, "parameters": paces[0].parameters, "tokens/s": speeds}
    if peak:
        # arXiv:2204.02311, appendix B: operations per token, forward and backward.
        attention = 12 * shape["n_layer"] * shape["n_embd"] * shape["block_size"]
        per_token = 6 * paces[0].parameters + attention
        found["MFU %"] = [100 * speed * per_token / (peak * 1e12) for speed in speeds]
    return found


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
    path = scratch / "symbols.txt"
    path.write_text("".join(symbols + random.Random(0).choices(symbols, k=2_000_000)), "utf-8")
    return path


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=3)
    parser.add_argument("--shape", choices=("cpu", "baby", "gpt2"), help="(default: cpu, or baby)")
    parser.add_argument("--seconds", type=float, default=15, help="of each run (default 15)")
    parser.add_argument("--peak", type=float, metavar="TFLOPS", help="of the GPU, in a 16-bit type")
    measure.run(parser, benchmark)
