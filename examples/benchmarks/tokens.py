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

import json
import math
import re
import shlex
from argparse import Namespace
from functools import partial
from pathlib import Path

import measure
from measure import Report
from trainers import SHAPES, our_seconds, ours


def encoded(text: Path, vocab_size: int, home: Path) -> Path:
    """The directory of the text's tokens."""
    words = ["upload-data", str(text), "--tokenizer", "bpe", "--vocab-size", str(vocab_size)]
    process = measure.Process([*measure.CLI, *words, "--json"], env={"SM_NANOGPT_HOME": str(home)})
    output = measure.output(process)
    (uri,) = re.findall(r'"uri": "file://(.+)"', output)
    return Path(uri)


def benchmark(args: Namespace, scratch: Path) -> Report:
    words = {"preset": "cpu", "max_steps": 2000, **args.ours}
    sizes = [int(size) for size in args.vocab_sizes.split(",")]
    look = 100
    if args.quick:
        words = SHAPES["smoke"] | {"max_steps": 20, "sample_length": 10} | args.ours
        sizes, look = [300], 10
    texts = {"characters": args.text}
    for size in sizes:
        texts[f"BPE of {size}"] = encoded(args.text, size, scratch / "home")

    def trained(name: str, steps: int, index: int) -> tuple[float, float]:
        out = scratch / f"{index}-{name}-{steps}"
        last = {"max_steps": steps, "eval_interval": max(1, steps // 8), "eval_tokens": 0}
        more = {**words, **last, "seed": args.first_seed + index}
        measure.output(ours(texts[name], out, more).process)
        rows = map(json.loads, (out / "output" / "metrics.jsonl").read_text().splitlines())
        return min(row["bits_per_byte"] for row in rows if "val_loss" in row), our_seconds(out)

    each = {name: trained(name, look, -1)[1] for name in texts}
    steps = {
        name: math.ceil(int(words["max_steps"]) * each["characters"] / seconds)
        for name, seconds in each.items()
    }
    found = measure.alternate(
        args.rounds, {name: partial(trained, name, steps[name]) for name in texts}
    )
    rows = []
    for name, runs in found.items():
        bits, seconds = map(list, zip(*runs, strict=True))
        what = f"{name}, {steps[name]} steps"
        rows.append({"": what, "bits per byte": bits, "training s": seconds})
    return Report(
        rows,
        {
            "our words": shlex.join(measure.as_options(words)),
            "seeds": f"{args.first_seed} to {args.first_seed + args.rounds - 1}",
        },
    )


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=3, nanogpt=False)
    parser.add_argument(
        "--vocab-sizes", default="2048,8192", metavar="N,N", help="(default: 2048,8192)"
    )
    parser.add_argument("--first-seed", type=int, default=2000, metavar="N", help="(default 2000)")
    measure.run(parser, benchmark)
