"""The command `eval`."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sm_nanogpt.launcher.cli.models import ENTRY_POINT
from sm_nanogpt.launcher.cli.options import (
    JSON,
    MODEL,
    PATH,
    Command,
    InputFile,
    JobParameter,
    settings_of,
    value_option,
)
from sm_nanogpt.launcher.cli.show import note, print_json, print_table, print_text, shown
from sm_nanogpt.launcher.files.progress import byte_progress
from sm_nanogpt.launcher.values import counted

if TYPE_CHECKING:
    from sm_nanogpt.launcher.judge.evaluate import Evaluation

FILE = InputFile()


@click.command("eval", cls=Command)
@MODEL
@click.argument("paths", metavar="TEXT...", nargs=-1, required=True, type=PATH)
@value_option(
    "--beside others JOB-ID|DIR",
    "Another model for the same text. Repeatable.",
    multiple=True,
    type=JobParameter(reads="model"),
)
@value_option(
    "--find canaries FILE",
    "Lines that a model may know by heart; a secret stands in braces: the code is {8231}.",
    type=FILE,
)
@value_option(
    "--questions FILE",
    "Conversations in JSON whose last message is the answer that is right.",
    type=FILE,
)
@value_option(
    "--me NAME", "In exported chats: the person whose messages are the answers.", default=""
)
@value_option("--column NAME", "Field of the text in a record (default: text).", default="text")
@value_option("--encoding NAME", "Read files that are not UTF-8 in this encoding.", default="")
@click.option("--documents", is_flag=True, help="Print CSV, a line for each document.")
@ENTRY_POINT
@JSON
def eval_command(
    model: str,
    paths: tuple[str, ...],
    others: tuple[str, ...],
    canaries: Path | None,
    questions: Path | None,
    me: str,
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
    from sm_nanogpt.launcher.judge.evaluate import evaluate
    from sm_nanogpt.launcher.judge.texts import read_texts
    from sm_nanogpt.launcher.models.fetch import model_directory

    settings = settings_of()
    texts = read_texts(paths, settings, encoding, column, me)
    models = [model, *others]
    directories = [model_directory(name, settings, entry_point) for name in models]
    evaluations = []
    for name, directory in zip(models, directories, strict=True):
        with byte_progress("eval") as progress:
            evaluation = evaluate(
                name,
                directory,
                ", ".join(paths),
                texts,
                settings,
                entry_point=entry_point,
                find=canaries,
                questions=questions,
                progress=progress,
            )
        evaluations.append(evaluation)
    if as_json:
        print_json(evaluations)
    elif documents:
        print_documents(evaluations)
    else:
        print_evaluations(evaluations)


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


def print_evaluations(evaluations: Sequence[Evaluation]) -> None:
    """Print a column for each model, and then the passages that each finds hardest."""
    from sm_nanogpt.launcher.judge.evaluation import N_STRETCHES

    first = evaluations[0]
    documents = counted(len(first.documents), "document")
    intervals = "too short for an interval"
    if first.half:
        intervals = f"95 % intervals by {N_STRETCHES} stretches of it"
    note(f"text: {first.text}, {documents}, {first.size:,} bytes; {intervals}")

    columns = [{"": evaluation.model, **evaluation.facts(first)} for evaluation in evaluations]
    rows = []
    for heading in dict.fromkeys(chain(*reversed(columns))):  # the last has the difference, too
        if heading or len(columns) > 1:
            rows.append([heading, *(column.get(heading, "") for column in columns)])
    print_table(rows)
    for evaluation in evaluations:
        if len(columns) > 1:
            click.echo(shown(f"{evaluation.model}:"))
        for line in details(evaluation):
            click.echo(shown(line))


def details(evaluation: Evaluation) -> list[str]:
    """The lines on a model's worst passages, on lines that it may know, and on its answers."""
    lines = []
    for part in evaluation.worst:
        lines.append(f"worst     {part.bits_per_byte:.2f}  {part.place}  {part.excerpt!r}")
    for canary in evaluation.canaries:
        lines.append(f"exposure  {canary.exposure:.1f} bits  {canary.line}")
    for kind, (n_right, n_asked) in evaluation.answers.items():
        lines.append(f"exact     {n_right} of {n_asked}  {kind}")
    return lines
