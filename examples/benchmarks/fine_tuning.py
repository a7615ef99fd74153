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
from typing import Any

import measure
from measure import Report
from trainers import SHAPES, our_result, our_seconds, ours


def benchmark(args: Namespace, scratch: Path) -> Report:
    options: dict[str, Any] = {"preset": "cpu"}
    steps = 2000
    if args.quick:
        options = SHAPES["smoke"] | dict(eval_tokens=128, sample_length=10)
        steps = 20
    text = args.text.read_text(encoding="utf-8")
    cut = int(0.7 * len(text))
    old = scratch / "old.txt"
    old.write_text(text[:cut], encoding="utf-8")
    vocabulary = set(text[:cut])  # a model of characters refuses unknown characters
    new = scratch / "new.txt"
    known_text = "".join(character for character in text[cut:] if character in vocabulary)
    new.write_text(known_text, encoding="utf-8")
    # The preset's batches; the shape comes from the model.
    tuning = {"batch_size": 12, "device": "cpu", "max_steps": steps // 10, **args.ours}

    def trained(name: str, index: int) -> tuple[float, float]:
        seed = {"seed": args.first_seed + index}
        out = scratch / f"{index}-{name}"
        if name == "tuned":
            base = scratch / f"{index}-base"
            training = ours(old, base, {**options, **seed, "max_steps": steps})
            measure.output(training.process)
            run_options = {"init_from": base / "model", **tuning, **seed}
        else:
            run_options = {**options, **seed, "max_steps": steps}
        measure.output(ours(new, out, run_options).process)
        loss, _ = our_result(out, new)
        return loss, our_seconds(out)

    names = {
        "scratch": f"from scratch, {steps} steps",
        "tuned": f"from a model, {tuning['max_steps']} steps",
    }
    runs = measure.alternate(args.rounds, {name: partial(trained, name) for name in names})
    losses: dict[str, list[float]] = {}
    report = Report()
    for name, rounds in runs.items():
        losses[name] = measure.column(rounds, 0)
        seconds = measure.column(rounds, 1)
        report.rows.append({"": names[name], "loss": losses[name], "training s": seconds})
    gain = measure.differences(losses["tuned"], losses["scratch"])
    report.findings = {
        "options of the tuned run": shlex.join(measure.as_arguments(tuning)),
        "seeds": measure.seeds(args),
        "loss from a model minus from scratch": measure.plus_minus(gain),
    }
    return report


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=3, nanogpt=False)
    parser.add_argument("--first-seed", type=int, default=2000, metavar="N", help="(default 2000)")
    measure.run(parser, benchmark)
