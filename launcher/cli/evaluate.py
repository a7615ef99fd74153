"""The command `eval`."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.models import ENTRY_POINT
from launcher.cli.options import JSON, MODEL, Command, Job, settings_of, valued
from launcher.cli.show import note, print_json, print_table, print_text, shown
from launcher.files.progress import byte_progress

if TYPE_CHECKING:
    from launcher.judge.evaluate import Evaluation

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("eval", cls=Command)
@MODEL
@click.argument("paths", metavar="TEXT...", nargs=-1, required=True, type=click.Path())
@valued(
    "--beside others JOB-ID|DIR",
    "Another model for the same text. Repeatable.",
    multiple=True,
    type=Job(trained=True),
)
@valued(
    "--find canaries FILE",
    "Lines that a model may know by heart; a secret stands in braces: the code is {8231}.",
    type=FILE,
)
@valued(
    "--questions FILE",
    "Conversations in JSON whose last message is the answer that is right.",
    type=FILE,
)
@valued("--column NAME", "Field of the text in a record (default: text).", default="text")
@valued("--encoding NAME", "Read files that are not UTF-8 in this encoding.", default="")
@click.option("--documents", is_flag=True, help="Print CSV, a line for each document.")
@ENTRY_POINT
@JSON
def eval_command(
    model: str,
    paths: tuple[str, ...],
    others: tuple[str, ...],
    canaries: Path | None,
    questions: Path | None,
    column: str,
    encoding: str,
    documents: bool,
    entry_point: Path | None,
    as_json: bool,
) -> None:
    """Measure what a model is worth on TEXT, which it should not have seen.

    TEXT is what `upload-data` takes. Bits per byte compare models of different tokenizers. A
    process of its own computes the model; the loss is computed from its logits outside of it. A
    model that looks ahead is refused.

    Example:
      sm-nanogpt eval latest held-out.txt
      sm-nanogpt eval JOB-ID held-out.txt --beside another-job
      sm-nanogpt eval JOB-ID held-out.txt --documents > documents.csv
    """
    from launcher.judge.evaluate import evaluate
    from launcher.judge.texts import read_texts
    from launcher.models.fetch import model_directory

    settings = settings_of()
    texts = read_texts(paths, settings, encoding, column)
    label, found = ", ".join(paths), []
    places = [model_directory(each, settings, entry_point) for each in (model, *others)]
    for named, place in zip((model, *others), places, strict=True):
        with byte_progress("eval") as progress:
            given = (label, texts, settings, entry_point, canaries, questions, progress)
            found.append(evaluate(named, place, *given))
    if as_json:
        print_json(found)
    elif documents:
        print_documents(found)
    else:
        show(found)


def print_documents(evaluations: Sequence[Evaluation]) -> None:
    """Print CSV, a line for each document of each model."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["model", "place", "bytes", "tokens", "nats", "bits_per_byte"])
    for evaluation in evaluations:
        for part in evaluation.documents:
            row = [part.place, part.size, part.tokens, part.nats, part.bits_per_byte]
            writer.writerow([evaluation.model, *row])
    print_text(table.getvalue(), nl=False)


def show(found: Sequence[Evaluation]) -> None:
    """Print a column for each model, and then the passages that it finds hardest."""
    first, n = found[0], len(found[0].documents)
    text = f"{first.text}, {n:,} document{'s' * (n > 1)}, {first.size:,} bytes"
    certain = f"95 % intervals by {first.unit}" if first.half else "too short for an interval"
    note(f"text: {text}; {certain}")
    columns = [{"": each.model, **each.facts(first)} for each in found]
    names = [name for name in columns[-1] if name or len(found) > 1]
    print_table([[name, *(column.get(name, "") for column in columns)] for name in names])
    for each in found:
        lines = [f"{each.model}:"] * (len(found) > 1)
        lines += [f"worst     {p.bits_per_byte:.2f}  {p.place}  {p.excerpt!r}" for p in each.worst]
        lines += [f"exposure  {c.exposure:.1f} bits  {c.line}" for c in each.canaries]
        answers = each.answers.items()
        lines += [f"exact     {right} of {asked}  {kind}" for kind, (right, asked) in answers]
        click.echo("\n".join(map(shown, lines)))
