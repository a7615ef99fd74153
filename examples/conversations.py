"""From a text to a model that answers: questions with exact answers, and how many are right.

    python examples/conversations.py --text input.txt             # about eight minutes on one core
    python examples/conversations.py --text input.txt --seeds 3

It trains a base model on the text, makes conversations (sums, which number is larger, how a word of
the text is spelled), tunes the model on them, and asks questions that it has not seen, before and
after. An answer counts if it is exact, at temperature 0. All jobs run on this machine.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm_nanogpt import Job, Request, Settings, launch, upload_data

BASE = {"n_embd": 192, "n_head": 3, "n_layer": 4, "block_size": 128, "batch_size": 12}
HELD_OUT = 100  # questions of each kind


def questions(text: str, seed: int) -> dict[str, list[tuple[str, str]]]:
    """Questions and answers by kind, each question once, in random order."""
    words = sorted(set(re.findall(r"\b[a-z]{3,7}\b", text)))
    # Each pair in one order only, so that none is known by the other.
    pairs = [(a, b) if (a + b) % 2 else (b, a) for a in range(100) for b in range(a)]
    kinds = {
        "sum": [(f"What is {a} + {b}?", str(a + b)) for a, b in pairs],
        "larger": [(f"Which is larger, {a} or {b}?", str(max(a, b))) for a, b in pairs],
        "spelling": [(f"How do you spell {word}?", "-".join(word)) for word in words],
    }
    for made in kinds.values():
        random.Random(seed).shuffle(made)
    return kinds


def write_conversations(path: Path, known: Sequence[tuple[str, str]], seed: int) -> None:
    """One to three questions in each conversation."""
    chance, left = random.Random(seed), list(known)
    chance.shuffle(left)
    with path.open("w", encoding="utf-8") as file:
        while left:
            messages = []
            for question, answer in [
                left.pop() for _ in range(min(len(left), chance.randint(1, 3)))
            ]:
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": answer})
            file.write(json.dumps({"messages": messages}) + "\n")


def write_questions(path: Path, kinds: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """A conversation of each question and its answer, with its kind."""
    with path.open("w", encoding="utf-8") as file:
        for kind, (question, answer) in ((k, each) for k, made in kinds.items() for each in made):
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages, "kind": kind}) + "\n")


def trained(request: Request, settings: Settings) -> tuple[Job, float]:
    """The job when it has ended, and the seconds that it took."""
    began = time.monotonic()
    return launch(request, settings).wait(), time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1, help="number of rounds (default 1)")
    parser.add_argument("--base-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=1500, help="of the tuning (default 1500)")
    parser.add_argument("--ask", type=int, default=HELD_OUT, help="questions of each kind")
    words = parser.parse_args()
    text = words.text.read_text(encoding="utf-8")
    print(
        "| seed | questions | base model | tuned | base s | tuning s |\n|---|---|---|---|---|---|"
    )
    for seed in range(words.seeds):
        with tempfile.TemporaryDirectory() as temporary:
            settings = Settings(home=Path(temporary, "home"))
            data = upload_data(words.text, settings, tokenizer="bpe", vocab_size=512)
            values = {**BASE, "max_steps": words.base_steps, "seed": seed, "sample_length": 0}
            request = Request(instance="local", data=data.uri, preset="cpu", hyperparameters=values)
            base, base_seconds = trained(request, settings)
            kinds = questions(text, seed)
            known = [each for made in kinds.values() for each in made[words.ask :]]
            write_conversations(Path(temporary, "chats.jsonl"), known, seed)
            chats = upload_data(Path(temporary, "chats.jsonl"), settings, tokenizer=base.id)
            values = {"max_steps": words.steps, "seed": seed, "batch_size": 12, "device": "cpu"}
            request = Request(
                instance="local", data=chats.uri, init_from=base.id, hyperparameters=values
            )
            tuned, seconds = trained(request, settings)
            new, asked = Path(temporary, "new.txt"), Path(temporary, "asked.jsonl")
            write_questions(asked, {kind: made[: words.ask] for kind, made in kinds.items()})
            lines = [f"{q}\n{a}\n" for made in kinds.values() for q, a in made[: words.ask]]
            new.write_text("".join(lines), encoding="utf-8")  # eval takes a text too
            found = [job.eval(new, questions=asked).answers for job in (base, tuned)]
            for kind in kinds:
                before, after = (right / n for right, n in (answers[kind] for answers in found))
                row = f"{kind} | {before:.0%} | {after:.0%} | {base_seconds:.0f} | {seconds:.0f}"
                print(f"| {seed} | {row} |", flush=True)


if __name__ == "__main__":
    main()
