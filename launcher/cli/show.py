"""Print for all commands: escape, shorten, and format text, and show logs and progress."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

import click

from sm_nanogpt.launcher.cli.remedies import command, reason_of, remedies, remedy
from sm_nanogpt.launcher.errors import ServiceError, joined, shortened

if TYPE_CHECKING:
    from sm_nanogpt.launcher.curve import Curve
    from sm_nanogpt.launcher.description import JobDescription
    from sm_nanogpt.launcher.settings import Settings
    from sm_nanogpt.launcher.tracking import TrackedJob

TEXT_CHANNELS = ("training", "validation")

# Control characters except tab and newline, and marks that reorder text on a terminal.
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """Write control characters as escapes such as \\x1b, since a terminal would obey them."""
    return CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def shown(text: str) -> str:
    """Escape control characters, and cut the middle of a text of over 1,000 characters.

    File names, logs, and answers of AWS may contain anything.
    """
    return shortened(escaped(text))


def explain(description: JobDescription, settings: Settings) -> str:
    """Describe in one line how a job ended, why, and what to do next."""
    outcome = f"job {description.job_id} {description.status.lower()}"
    reason = reason_of(description)
    if reason:
        outcome += f": {reason}"
    return f"{outcome}; {next_step(description, settings)}"


def report_end(description: JobDescription, settings: Settings, *expected: str) -> None:
    """Print how a job ended. Raises ServiceError if its status is none of the expected ones."""
    explanation = explain(description, settings)
    if description.status not in expected:
        raise ServiceError(explanation)
    note(explanation)


def next_step(description: JobDescription, settings: Settings) -> str:
    """The likely next command for a job that has ended."""
    from sm_nanogpt.launcher.text.store import deleted_uploads, known_upload

    job_id = description.job_id
    if description.search:
        return f"its runs are those of a search: {command('try', 'log', description.search)}"
    if description.status == "Completed":
        upload = known_upload(description.data, settings)
        chats = upload is not None and upload.chats
        return f"next: {command('chat' if chats else 'fetch-and-sample', job_id)}"
    if description.checkpoint_uri is not None:
        checkpoint = f"its checkpoint of step {description.checkpoint_step}"
        resume = f"`{command('launch', '--resume', job_id)}`"
        texts = [uri for name, uri in description.inputs.items() if name in TEXT_CHANNELS]
        deleted = deleted_uploads(texts, settings)
        if deleted:
            sample = f"`{command('fetch-and-sample', job_id)}` takes the model of {checkpoint}"
            again = f"when the same text is uploaded again, {resume} goes on from there"
            return f"its text, {deleted[0]}, was deleted: {sample}; {again}"
        return f"resume from {checkpoint}: {resume}"
    return f"it left no checkpoint; read its log: `{command('logs', job_id)}`"


def note(text: str) -> None:
    """Print a message to stderr."""
    click.echo(shown(text), err=True)


def print_text(text: str, nl: bool = True) -> None:
    """Print the text of a model, a log, or a file to stdout.

    A file or a pipe gets the text unchanged. In a terminal, control characters are escaped.
    """
    if sys.stdout.isatty():
        text = escaped(text)
    click.echo(text, nl=nl, color=True)  # without color=True, click drops escape sequences


@contextmanager
def at_ctrl_c(explanation: str) -> Iterator[None]:
    """Add an explanation to the message `interrupted`, if Ctrl-C ends the body."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(*error.args, explanation) from None


class Screen(logging.Handler):
    """Prints log records of the library to stderr. One that all jobs of a sweep log comes once."""

    def __init__(self) -> None:
        super().__init__()
        self.printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        advice = remedies(getattr(record, "cause", None))  # an error that is no failure here
        code = getattr(record, "code", "")
        if code:
            advice.append(remedy(code, vars(record)))
        text = joined(record.getMessage(), *advice)
        if record.levelno >= logging.WARNING:
            text = f"warning: {text}"
        if text not in self.printed:
            self.printed.add(text)
            with bars_hidden():
                note(text)


@contextmanager
def bars_hidden() -> Iterator[None]:
    """Hide the progress bars of the terminal while the body prints; then they are below that.

    tqdm's external_write_mode would also draw bars whose delay is not over, and never end them.
    """
    tqdm = sys.modules.get("tqdm")
    if tqdm is None:  # then there are no bars
        yield
        return

    with tqdm.tqdm.get_lock():
        bars = [bar for bar in tqdm.tqdm._instances if is_drawn(bar)]
        for bar in bars:
            bar.clear(nolock=True)
        yield
        for bar in bars:
            bar.refresh(nolock=True)


def is_drawn(bar: Any) -> bool:
    """False for a bar of tqdm whose delay is not over, or that another thread is making."""
    return hasattr(bar, "start_t") and bar.last_print_t >= bar.start_t + bar.delay


@contextmanager
def logs_shown() -> Iterator[None]:
    """Print log records of the library at level INFO and above."""
    logger = logging.getLogger("sm_nanogpt")
    screen = Screen()
    level = logger.level
    logger.addHandler(screen)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(screen)
        logger.setLevel(level)


def print_curve(curve: Curve, err: bool = False) -> None:
    """Draw the validation loss, or the training loss while there are fewer than two evaluations."""
    from sm_nanogpt.launcher.curve import sketch

    for name in ("val_loss", "train_loss"):
        points = curve.points(name)
        if len(points) > 1:
            width = max(20, min(60, shutil.get_terminal_size().columns - 12))
            click.echo(f"{name}:", err=err)
            for line in sketch(points, width):
                click.echo(line, err=err)
            return


def with_progress_bar(lines: Iterator[str], job: TrackedJob) -> Iterator[str]:
    """Yield the lines of a running job's log, above a progress bar if stderr is a terminal.

    The bar shows the best loss, the speed, the time left, and the cost so far. At the end of the
    job, the curve replaces it.
    """
    if not sys.stderr.isatty():
        yield from lines
        return
    from tqdm import tqdm

    from sm_nanogpt.launcher.curve import Curve, Row, rows_of_log, total_steps

    description = job.describe()
    rows: list[Row] = []
    metrics: Row = {}  # the newest value of each name
    total = total_steps(description.hyperparameters)
    with tqdm(total=total, bar_format="{percentage:3.0f}% |{bar:20}| {desc}") as bar:
        for line in lines:
            with bar.external_write_mode():
                yield line
            for row in rows_of_log([line]):
                rows.append(row)
                bar.n = int(row["step"])
                metrics.update(row)
                bar.set_description_str(progress_of(replace(description, metrics=metrics)))
        bar.leave = False
    print_curve(Curve(job.id, "", rows), err=True)


def progress_of(job: JobDescription) -> str:
    """Describe the progress of a job in one line: best loss, speed, time left, and cost."""
    from sm_nanogpt.launcher.sagemaker.cost import cost_of, usd
    from sm_nanogpt.launcher.views.job_fields import texts_of

    texts = texts_of(job)
    parts = []
    for label in ("step", "best loss", "tokens/s", "time left"):
        if texts[label]:
            parts.append(f"{label} {texts[label]}")
    if job.price:
        parts.append(usd(cost_of(job, job.price, time.time())))
    return ", ".join(parts)


def print_json(value: Any) -> None:
    """Print a value as JSON. Infinity and NaN, which JSON does not have, become null."""
    from pydantic_core import to_jsonable_python

    finite = to_jsonable_python(value, inf_nan_mode="null")
    click.echo(json.dumps(finite, indent=2, allow_nan=False))


def aligned(rows: Sequence[Sequence[str]], align: str = "<") -> list[str]:
    """Format rows as lines, with the cells of a column below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (f"{cell:{align}{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append(shown("  ".join(cells).rstrip()))
    return lines


def print_table(rows: Sequence[Sequence[str]], err: bool = False, align: str = "<") -> None:
    for line in aligned(rows, align):
        click.echo(line, err=err)


def print_columns(
    columns: Mapping[str, Sequence[str | None]], optional: Sequence[str] = ()
) -> None:
    """Print a table, without columns whose cells are all empty. columns has the cells by heading.

    If the terminal is too narrow, columns of `optional` are left out, in their order there, and a
    note names them. If that is not enough, lines end in an ellipsis.
    """
    table = {}
    for heading, cells in columns.items():
        if any(cells):
            table[heading] = [cell or "-" for cell in cells]
    if not sys.stdout.isatty():
        print_table(table_rows(table))
        return
    width = shutil.get_terminal_size().columns
    hidden = []
    for heading in optional:
        if heading in table and width_of(table) > width:
            del table[heading]
            hidden.append(heading)
    for row in aligned(table_rows(table)):
        click.echo(row if len(row) <= width else f"{row[: width - 1]}…")
    if hidden:
        note(f"not shown on a terminal of {width} columns: {', '.join(hidden)}; --json prints all")


def table_rows(table: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The rows of a table of columns by heading. The first row has the headings."""
    columns = [[heading, *cells] for heading, cells in table.items()]
    return [list(row) for row in zip(*columns, strict=True)]


def width_of(table: Mapping[str, Sequence[str]]) -> int:
    return max(map(len, aligned(table_rows(table))), default=0)


def print_fields(fields: Mapping[str, str | None]) -> None:
    """Print a line for each field that is not None, with the values aligned."""
    width = max(map(len, fields)) + 2
    for name, value in fields.items():
        if value is not None:
            click.echo(shown(f"{name + ':':<{width}}{value}"))


def local_time(seconds: float | None) -> str | None:
    """A time, in seconds since 1970, by the clock of this machine."""
    if seconds is None:
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def silence(stream: TextIO) -> None:
    """Discard further output to a stream whose reader has left, as `| head` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
