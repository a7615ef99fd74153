"""What subword tokens are worth: bits per byte of characters and of BPE, in the same time.

Examples:
  python examples/benchmarks/tokens.py --text input.txt
  python examples/benchmarks/tokens.py --text other.txt --vocab-sizes 2048,8192

Characters train with --preset cpu. Tokens train with the same options, for as many steps as take
the same time; a first run of 100 steps of each measures that. The loss is that of the model that is
kept: the best of eight evaluations over the whole validation part, the last tenth of the text for
both. --ours sets options of all runs.
"""

from __future__ import annotations

import math
import re
import shlex
from argparse import Namespace
from functools import partial
from pathlib import Path

import measure
from measure import Report
from trainers import SHAPES, our_metrics, our_seconds, ours


def encoded(text: Path, vocab_size: int, home: Path) -> Path:
    """The directory of the text's tokens."""
    command = [*measure.CLI, "upload-data", str(text), "--json"]
    command += ["--tokenizer", "bpe", "--vocab-size", str(vocab_size)]
    process = measure.Process(command, env={"SM_NANOGPT_HOME": str(home)})
    (path,) = re.findall(r'"uri": "file://(.+)"', measure.output(process))
    return Path(path)


def benchmark(args: Namespace, scratch: Path) -> Report:
    options = {"preset": "cpu", "max_steps": 2000, **args.ours}
    sizes = [int(size) for size in args.vocab_sizes.split(",")]
    timed_steps = 100
    if args.quick:
        options = SHAPES["smoke"] | {"max_steps": 20, "sample_length": 10} | args.ours
        sizes = [300]
        timed_steps = 10
    texts = {"characters": args.text}
    for size in sizes:
        texts[f"BPE of {size}"] = encoded(args.text, size, scratch / "home")

    def trained(name: str, steps: int, index: int) -> tuple[float, float]:
        out = scratch / f"{index}-{name}-{steps}"
        run_options = {
            **options,
            "max_steps": steps,
            "eval_interval": max(1, steps // 8),
            "eval_tokens": 0,
            "seed": args.first_seed + index,
        }
        measure.output(ours(texts[name], out, run_options).process)
        evaluations = [row for row in our_metrics(out) if "val_loss" in row]
        return min(row["bits_per_byte"] for row in evaluations), our_seconds(out)

    seconds = {}
    for name in texts:
        _, seconds[name] = trained(name, timed_steps, -1)
    steps = {}
    for name in texts:
        step_ratio = int(options["max_steps"]) * seconds["characters"] / seconds[name]
        steps[name] = math.ceil(step_ratio)

    sides = {name: partial(trained, name, steps[name]) for name in texts}
    report = Report()
    for name, rounds in measure.alternate(args.rounds, sides).items():
        report.rows.append(
            {
                "": f"{name}, {steps[name]} steps",
                "bits per byte": measure.column(rounds, 0),
                "training s": measure.column(rounds, 1),
            }
        )
    report.findings = {
        "our options": shlex.join(measure.as_arguments(options)),
        "seeds": measure.seeds(args),
    }
    return report


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=3, nanogpt=False)
    parser.add_argument(
        "--vocab-sizes", default="2048,8192", metavar="N,N", help="(default: 2048,8192)"
    )
    parser.add_argument("--first-seed", type=int, default=2000, metavar="N", help="(default 2000)")
    measure.run(parser, benchmark)
