"""What a speed-up costs in loss: float32 against as shipped, in pairs that share a seed.

Examples:
  python examples/benchmarks/precision.py --text input.txt
  python examples/benchmarks/precision.py --text input.txt --against='--compile off'
  python examples/benchmarks/precision.py --text input.txt --folder ../older/entry_point

Without --ours it trains with --preset cpu --max_steps 500. --folder compares with the training
folder of another version, by the same options. Both runs of a pair start from the same
weights and see the same batches. The loss is that of the finished model, in float32, over the whole
validation part. The script prints the mean difference and its 95 % interval over the pairs
(Student's t). A speed-up costs nothing if the interval is narrow and holds 0, or lies below 0.
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from pathlib import Path

import measure
from measure import Report
from trainers import SHAPES, our_result, our_seconds, ours

BUDGET = {"preset": "cpu", "max_steps": 500}


def benchmark(args: Namespace, scratch: Path) -> Report:
    options = args.ours or BUDGET
    if args.quick:
        options = SHAPES["smoke"] | dict(max_steps=20, eval_tokens=128, sample_length=10)
        options |= args.ours
    other = str(args.folder or shlex.join(measure.as_arguments(args.against)))

    def trained(side: str, index: int) -> tuple[float, float]:
        out = scratch / f"{side}-{index}"
        seeded = {**options, "seed": args.first_seed + index}
        training = ours(args.text, out, seeded)
        if side == "other" and args.folder:
            training = ours(args.text, out, seeded, folder=args.folder)
        elif side == "other":
            training = ours(args.text, out, {**seeded, **args.against})
        measure.output(training.process)
        loss, _ = our_result(out, args.text)
        return loss, our_seconds(out)

    sides = {
        "as shipped": lambda index: trained("shipped", index),
        other: lambda index: trained("other", index),
    }
    runs = measure.alternate(args.rounds, sides)
    losses = {side: measure.column(rounds, 0) for side, rounds in runs.items()}
    seconds = {side: measure.column(rounds, 1) for side, rounds in runs.items()}
    report = Report()
    for side in sides:
        report.rows.append({"": side, "loss": losses[side], "training s": seconds[side]})
    gain = measure.differences(losses["as shipped"], losses[other])
    report.findings = {
        "our options": shlex.join(measure.as_arguments(options)),
        "seeds": measure.seeds(args),
        f"loss as shipped minus {other}": measure.plus_minus(gain),
        f"time of {other} over as shipped": measure.ratio(seconds[other], seconds["as shipped"]),
    }
    return report


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=8, nanogpt=False)
    parser.add_argument(
        "--against",
        type=measure.parse_options,
        default="--precision float32",
        metavar="WORDS",
        help="the other side's options for our train.py (default: --precision float32)",
    )
    parser.add_argument("--folder", type=Path, metavar="PATH", help="another training folder")
    parser.add_argument("--first-seed", type=int, default=2000, metavar="N", help="(default 2000)")
    measure.run(parser, benchmark)
