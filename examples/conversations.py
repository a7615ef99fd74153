"""From a text to a model that answers: questions with exact answers, and how many are right.

    python examples/conversations.py --text input.txt             # about eight minutes on one core
    python examples/conversations.py --text input.txt --seeds 3
    python examples/conversations.py --text input.txt --quick     # seconds; its figures say nothing

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

Pair = tuple[str, str]  # a question and its answer

BASE = {"n_embd": 192, "n_head": 3, "n_layer": 4, "block_size": 128, "batch_size": 12}
HELD_OUT = 100  # questions of each kind
# With --quick.
TINY = {"n_embd": 32, "n_head": 2, "n_layer": 1, "block_size": 128, "batch_size": 12}
FEW_PAIRS = 100  # to learn, of each kind


def questions(text: str, seed: int) -> dict[str, list[Pair]]:
    """Questions and answers by kind, each question once, in random order."""
    vocabulary = sorted(set(re.findall(r"\b[a-z]{3,7}\b", text)))
    sums: list[Pair] = []
    comparisons: list[Pair] = []
    for larger in range(100):
        for smaller in range(larger):
            # Two numbers in one order only, so that none is known by the other.
            a, b = (larger, smaller) if (larger + smaller) % 2 else (smaller, larger)
            sums.append((f"What is {a} + {b}?", str(a + b)))
            comparisons.append((f"Which is larger, {a} or {b}?", str(larger)))
    spellings: list[Pair] = []
    for term in vocabulary:
        spellings.append((f"How do you spell {term}?", "-".join(term)))
    kinds = {"sum": sums, "larger": comparisons, "spelling": spellings}
    for pairs in kinds.values():
        random.Random(seed).shuffle(pairs)
    return kinds


def messages_of(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_conversations(path: Path, pairs: Sequence[Pair], seed: int) -> None:
    """Writes the pairs of question and answer, one to three of them in each conversation."""
    generator = random.Random(seed)
    remaining = list(pairs)
    generator.shuffle(remaining)
    with path.open("w", encoding="utf-8") as file:
        while remaining:
            messages = []
            for _ in range(min(len(remaining), generator.randint(1, 3))):
                messages += messages_of(*remaining.pop())
            file.write(json.dumps({"messages": messages}) + "\n")


def write_questions(path: Path, kinds: Mapping[str, Sequence[Pair]]) -> None:
    """Writes a conversation of each question and its answer, with its kind."""
    with path.open("w", encoding="utf-8") as file:
        for kind, pairs in kinds.items():
            for question, answer in pairs:
                record = {"messages": messages_of(question, answer), "kind": kind}
                file.write(json.dumps(record) + "\n")


def trained(request: Request, settings: Settings) -> tuple[Job, float]:
    """The job when it has ended, and the seconds that it took."""
    began = time.monotonic()
    job = launch(request, settings).wait()
    return job, time.monotonic() - began


def run_round(args: argparse.Namespace, seed: int, directory: Path) -> None:
    """Trains a base model, tunes it, asks both, and prints a row for each kind of question."""
    settings = Settings(home=directory / "home")
    data = upload_data(args.text, settings, tokenizer="bpe", vocab_size=512)
    shape = TINY if args.quick else BASE
    values = {**shape, "max_steps": args.base_steps, "seed": seed, "sample_length": 0}
    request = Request(instance="local", data=data.uri, preset="cpu", hyperparameters=values)
    base, base_seconds = trained(request, settings)

    kinds = questions(args.text.read_text(encoding="utf-8"), seed)
    new: dict[str, list[Pair]] = {}
    learned: list[Pair] = []
    for kind, pairs in kinds.items():
        new[kind] = pairs[: args.ask]
        others = pairs[args.ask :]
        learned += others[:FEW_PAIRS] if args.quick else others
    chats_file = directory / "chats.jsonl"
    write_conversations(chats_file, learned, seed)
    chats = upload_data(chats_file, settings, tokenizer=base.id)
    values = {"max_steps": args.steps, "seed": seed, "batch_size": 12, "device": "cpu"}
    request = Request(instance="local", data=chats.uri, init_from=base.id, hyperparameters=values)
    tuned, seconds = trained(request, settings)

    questions_file = directory / "asked.jsonl"
    write_questions(questions_file, new)
    text_file = directory / "new.txt"  # eval takes a text too
    with text_file.open("w", encoding="utf-8") as file:
        for pairs in new.values():
            for question, answer in pairs:
                file.write(f"{question}\n{answer}\n")
    base_answers = base.eval(text_file, questions=questions_file).answers
    tuned_answers = tuned.eval(text_file, questions=questions_file).answers
    for kind in kinds:
        base_right, n = base_answers[kind]
        tuned_right, _ = tuned_answers[kind]
        shares = f"{base_right / n:.0%} | {tuned_right / n:.0%}"
        print(f"| {seed} | {kind} | {shares} | {base_seconds:.0f} | {seconds:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1, help="number of rounds (default 1)")
    parser.add_argument("--base-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=1500, help="of the tuning (default 1500)")
    parser.add_argument("--ask", type=int, default=HELD_OUT, help="questions of each kind")
    parser.add_argument("--quick", action="store_true", help="a tiny model that learns nothing")
    args = parser.parse_args()
    if args.quick:
        args.base_steps = args.steps = 5
        args.ask = 2
    print("| seed | questions | base model | tuned | base s | tuning s |")
    print("|---|---|---|---|---|---|")
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as directory:
            run_round(args, seed, Path(directory))


if __name__ == "__main__":
    main()
