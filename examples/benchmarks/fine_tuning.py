"""What a start from a trained model is worth: --init_from against a run from scratch.

Examples:
  python examples/benchmarks/fine_tuning.py --text input.txt
  python examples/benchmarks/fine_tuning.py --text input.txt --ours='--optimizer adamw'

Each round, with a seed of its own, trains a model on the first 70 % of the text. Two runs then
train on the other 30 %: one from scratch, and one from that model in a tenth of the steps. The loss
is that of the finished model over the last tenth of those 30 %, which neither run trained on.
--ours sets options of the second run.
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from functools import partial
from pathlib import Path

import measure
from measure import Report
from trainers import SHAPES, our_result, our_seconds, ours


def benchmark(args: Namespace, scratch: Path) -> Report:
    words = {"preset": "cpu"}
    steps = 2000
    if args.quick:
        words, steps = SHAPES["smoke"] | dict(eval_tokens=128, sample_length=10), 20
    text = args.text.read_text(encoding="utf-8")
    cut = int(0.7 * len(text))
    old, new = scratch / "old.txt", scratch / "new.txt"
    old.write_text(text[:cut], encoding="utf-8")
    known = set(text[:cut])  # a model of characters refuses unknown characters
    new.write_text("".join(c for c in text[cut:] if c in known), encoding="utf-8")
    # The preset's batches; the shape comes from the model.
    tuning = {"batch_size": 12, "device": "cpu", "max_steps": steps // 10, **args.ours}

    def trained(name: str, index: int) -> tuple[float, float]:
        seed = {"seed": args.first_seed + index}
        out = scratch / f"{index}-{name}"
        if name == "tuned":
            base = scratch / f"{index}-base"
            training = ours(old, base, {**words, **seed, "max_steps": steps})
            measure.output(training.process)
            more = {"init_from": base / "model", **tuning, **seed}
        else:
            more = {**words, **seed, "max_steps": steps}
        measure.output(ours(new, out, more).process)
        return our_result(out, new)[0], our_seconds(out)

    found = measure.alternate(
        args.rounds, {name: partial(trained, name) for name in ("scratch", "tuned")}
    )
    (losses, seconds), (tuned_losses, tuned_seconds) = (
        map(list, zip(*runs, strict=True)) for runs in found.values()
    )
    differences = [a - b for a, b in zip(tuned_losses, losses, strict=True)]
    return Report(
        [
            {"": f"from scratch, {steps} steps", "loss": losses, "training s": seconds},
            {
                "": f"from a model, {tuning['max_steps']} steps",
                "loss": tuned_losses,
                "training s": tuned_seconds,
            },
        ],
        {
            "words of the tuned run": shlex.join(measure.as_options(tuning)),
            "seeds": f"{args.first_seed} to {args.first_seed + args.rounds - 1}",
            "loss from a model minus from scratch": measure.plus_minus(differences),
        },
    )


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=3, nanogpt=False)
    parser.add_argument("--first-seed", type=int, default=2000, metavar="N", help="(default 2000)")
    measure.run(parser, benchmark)
