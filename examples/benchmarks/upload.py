"""Seconds and memory of upload-data: by characters, as tokens, and of many small files.

Examples:
  python examples/benchmarks/upload.py --text input.txt
  git worktree add ../before v0.1
  python examples/benchmarks/upload.py --text input.txt --before ../before

The large text repeats the given one. Its tokens are those of a BPE that each checkout learns from
the given text before, with --vocab-size. Their speed is from the difference between the large text
and the given one, so it leaves out the start. The small files have the lines of the given text in
turn, and are compared with `cp -r` of their folder and `sync`. With --before, the same commands of
another checkout run in turns with these.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import measure
from measure import CLI, ROOT, Failed, Process, Report, cost
from startup import repeated


def benchmark(args: Namespace, scratch: Path) -> Report:
    megabytes, n_files = args.megabytes, args.files
    if args.quick:
        megabytes, n_files = 2, 100
    large = repeated(scratch / "large.txt", args.text.read_text("utf-8"), megabytes)

    def upload(
        checkout: Path, text: Path, *options: str | Path, home: Path | None = None
    ) -> tuple[float, float]:
        home = home or scratch / f"home-{time.monotonic_ns()}"  # an empty store
        env = {"SM_NANOGPT_HOME": str(home), "PYTHONPATH": str(checkout)}
        command = [*CLI, "upload-data", str(text), *map(str, options)]
        return cost(Process(command, cwd=checkout, env=env))

    folder = write_notes(scratch / "notes", args.text, n_files)

    checkouts = {"": ROOT}
    if args.before:
        checkouts[", before"] = args.before.absolute()
    tokenizers = dict[Path, Path]()  # each checkout has its own
    for checkout in checkouts.values():
        home = scratch / f"learned-{len(tokenizers)}"
        options = ("--tokenizer", "bpe", "--vocab-size", str(args.vocab_size))
        upload(checkout, args.text, *options, home=home)
        (tokenizer_json,) = home.glob("store/data/*/tokenizer.json")
        tokenizers[checkout] = tokenizer_json.parent

    def by_characters(checkout: Path) -> tuple[float, float]:
        return upload(checkout, large)

    def by_tokens(checkout: Path) -> tuple[float, float]:
        tokenizer = tokenizers[checkout]
        small_seconds = 0.0
        if not args.quick:  # then, the text is too small to show a difference
            small_seconds, _ = upload(checkout, args.text, "--tokenizer", tokenizer)
        seconds, memory = upload(checkout, large, "--tokenizer", tokenizer)
        if seconds <= small_seconds:
            raise Failed("the large text took no longer than the given one; more --megabytes")
        megabytes = (large.stat().st_size - args.text.stat().st_size) / 1e6
        return megabytes / (seconds - small_seconds), memory

    def by_files(checkout: Path) -> tuple[float, float]:
        return upload(checkout, folder)

    def copied(index: int) -> tuple[float, float]:
        target = scratch / f"copy-{index}"
        return cost(Process(["sh", "-c", 'cp -r "$0" "$1" && sync', str(folder), str(target)]))

    ways = {"characters": by_characters, "tokens": by_tokens, "files": by_files}
    sides = dict[str, Callable[[int], tuple[float, float]]]()
    for way, upload_text in ways.items():
        for when, checkout in checkouts.items():
            sides[f"{way}{when}"] = on_checkout(upload_text, checkout)
    sides["cp"] = copied
    rounds = measure.alternate(args.rounds, sides)
    figures = {side: measure.column(values, 0) for side, values in rounds.items()}
    report = Report()
    report.findings["text"] = f"{large.stat().st_size / 1e6:.0f} MB"
    report.findings["files"] = f"{n_files:,}"
    for side, values in rounds.items():
        unit = "MB/s" if side.startswith("tokens") else "seconds"
        memory = measure.column(values, 1)
        report.rows.append({"": side, unit: figures[side], "memory MB": memory})
        if f"{side}, before" in figures:
            ratio = measure.ratio(figures[side], figures[f"{side}, before"])
            report.findings[f"{side}, {unit} over those before"] = ratio
    ratio = measure.ratio(figures["files"], figures["cp"])
    report.findings["files, seconds over those of cp"] = ratio
    return report


def on_checkout(
    upload_text: Callable[[Path], tuple[float, float]], checkout: Path
) -> Callable[[int], tuple[float, float]]:
    return lambda _: upload_text(checkout)


def write_notes(folder: Path, text: Path, count: int) -> Path:
    """A folder of small files, 500 in each folder below it, each with another text."""
    lines = text.read_text("utf-8").splitlines()
    for number in range(count):
        path = folder / str(number // 500) / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}: {lines[number % len(lines)]}\n", "utf-8")
    return folder


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=3, nanogpt=False)
    parser.add_argument("--megabytes", type=float, default=200, help="of text (default 200)")
    parser.add_argument("--files", type=int, default=2000, help="small ones (default 2000)")
    parser.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="(default 4096)")
    parser.add_argument("--before", type=Path, metavar="PATH", help="a checkout to compare with")
    measure.run(parser, benchmark)
