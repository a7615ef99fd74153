"""The rows of a training curve, read from a file or from a log, and drawn as text.

A row is what train.py writes at a log interval or an evaluation: `step`, `train_loss` and
`val_loss` in nats per token, `bits_per_byte`, `learning_rate`, `tokens_per_second`, `time` in
seconds since the epoch. Not each row has each value.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from sm_nanogpt.launcher.files.documents import Damaged, Number, parse

Name = Annotated[str, Field(pattern=r"^[\w./-]{1,64}$")]  # it reaches the terminal
Row = dict[Name, Number]  # a line of metrics.jsonl
MAX_CURVE_BYTES = 1 << 26  # half a million rows

MAX_LINE = 1000  # characters of a log's line that may be a row
LOG_LINE = re.compile(r"step=(\d{1,18})/\d+ ([a-z_]+=\S+(?: [a-z_]+=\S+)*) ?$")
VALUE = re.compile(r"([a-z_]+)=(\d{1,18}(?:\.\d+)?)(?!\S)")
CURVE_FILE = re.compile(r"metrics-\d{8}\.jsonl")


@dataclass(frozen=True)
class Curve:
    """The rows of a job in order of step, and where they were read."""

    job_id: str
    source: str
    rows: Sequence[Row]
    # The texts that the script wrote into its log: `before training` and `after training`.
    samples: dict[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> Row:
        """The last value of each name that any row has."""
        return newest_values(self.rows)

    def points(self, name: str) -> list[tuple[int, float]]:
        """The steps whose rows have a value of this name, each with the value."""
        return [(int(row["step"]), float(row[name])) for row in self.rows if name in row]


# -- rows ------------------------------------------------------------------------------------------


def rows_of_file(lines: Iterable[bytes], name: object) -> list[Row]:
    """Parse the lines of metrics.jsonl. Incomplete lines, and those without a step, are skipped."""
    rows = []
    for line in lines:
        with suppress(Damaged):
            row = parse(line, Row, name)
            if type(row.get("step")) is int:
                rows.append(row)
    return without_repeated_steps(rows)


def rows_of_log(lines: Iterable[str]) -> list[Row]:
    """Parse the lines of a log, whose values have fewer digits than those of metrics.jsonl."""
    rows: list[Row] = []
    for line in lines:
        match = LOG_LINE.search(line[-MAX_LINE:])
        if match:
            row: Row = {"step": int(match[1])}
            for name, value in VALUE.findall(match[2]):
                row[name] = float(value)
            rows.append(row)
    return without_repeated_steps(rows)


def without_repeated_steps(rows: Iterable[Row]) -> list[Row]:
    """The rows, with only the last row of a step that was repeated after a resume."""
    unique: list[Row] = []
    for row in rows:
        while unique and unique[-1]["step"] >= row["step"]:
            unique.pop()
        unique.append(row)
    return unique


def newest_values(rows: Iterable[Row]) -> Row:
    """The last value of each name that any row has."""
    values: Row = {}
    for row in rows:
        values.update(row)
    return values


def newest_curve_file(names: Iterable[str]) -> str:
    """The newest file of a curve among these names; if there is none, the name of a job's first.

    Each start of a job has a file of its own, which also has the rows of earlier starts.
    """
    curves = [name for name in names if CURVE_FILE.fullmatch(name)]
    return max(curves, default="metrics-00000001.jsonl")


def samples_of_log(lines: Iterable[str]) -> dict[str, str]:
    """The samples that a run logs: {"before training": text, "after training": text}."""
    samples: dict[str, list[str]] = {}
    title = ""  # of the sample that is read; '' between samples
    for line in lines:
        heading = re.fullmatch(r"--- sample (.+) ---", line)
        if heading:
            title = heading[1]
            samples[title] = []
        elif title and line.startswith("| "):
            samples[title].append(line[2:])
        else:
            title = ""
    return {title: "\n".join(text) for title, text in samples.items()}


# -- progress --------------------------------------------------------------------------------------


def total_steps(hyperparameters: Mapping[str, Any]) -> Any:
    """The number of steps of all generations; None if it is not known."""
    max_steps = hyperparameters.get("max_steps")
    if not max_steps:
        return max_steps
    return max_steps * hyperparameters.get("generations", 1)


def seconds_left(metrics: Mapping[str, Any], hyperparameters: Mapping[str, Any]) -> float | None:
    """The seconds until the last step, at the present speed; None if they are not known."""
    try:
        steps = total_steps(hyperparameters) - metrics["step"]
        tokens = steps * hyperparameters["batch_size"] * hyperparameters["block_size"]
        return float(tokens / metrics["tokens_per_second"])
    except (KeyError, TypeError, ZeroDivisionError):
        return None


# -- drawing ---------------------------------------------------------------------------------------

BRAILLE = 0x2800  # the character without dots
DOTS_ACROSS = 2  # in a character
DOTS_DOWN = 4
# The bits of the dots of a character, by column and row.
DOT_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def sketch(points: Sequence[tuple[float, float]], width: int = 60, height: int = 8) -> list[str]:
    """Draw a curve as lines of text: `width` x `height` characters, and the labels of both axes."""
    values = [value for _, value in points]
    low = min(values)
    high = max(values)
    labels = [""] * height
    labels[-1] = f"{low:.3f}"
    labels[0] = f"{high:.3f}"

    dot_rows = []  # of the dot of each column, counted from the top
    for value in interpolate(points, width * DOTS_ACROSS):
        depth = (high - value) / ((high - low) or 1)  # 0 at the top, 1 at the bottom
        dot_rows.append(round(depth * (height * DOTS_DOWN - 1)))

    lines = []
    for label, characters in zip(labels, braille(dot_rows, width, height), strict=True):
        lines.append(f"{label:>9} {characters}".rstrip())
    first_step = f"{points[0][0]:g}"
    last_step = f"{points[-1][0]:g}"
    lines.append(f"{'step':>9} {first_step:<{width - 10}}{last_step:>10}")
    return lines


def interpolate(points: Sequence[tuple[float, float]], n_columns: int) -> list[float]:
    """The values of a curve at `n_columns` steps, evenly spaced from its first to its last."""
    steps = [step for step, _ in points]
    spacing = (steps[-1] - steps[0]) / (n_columns - 1)
    values = []
    for column in range(n_columns):
        step = steps[0] + column * spacing
        index = min(max(bisect_left(steps, step), 1), len(points) - 1)
        step_before, value_before = points[index - 1]
        step_after, value_after = points[index]
        weight = 1.0  # of the value after the step
        if step_after > step_before:
            weight = min(1.0, (step - step_before) / (step_after - step_before))
        values.append(value_before + (value_after - value_before) * weight)
    return values


def braille(dot_rows: Sequence[int], width: int, height: int) -> list[str]:
    """Draw a dot in each column, connected to the dot before it, as lines of characters."""
    cells = [[BRAILLE] * width for _ in range(height)]
    last_row = dot_rows[0]
    for column, row in enumerate(dot_rows):
        bits = DOT_BITS[column % DOTS_ACROSS]
        for dot_row in dot_rows_between(last_row, row):
            cells[dot_row // DOTS_DOWN][column // DOTS_ACROSS] |= bits[dot_row % DOTS_DOWN]
        last_row = row
    return ["".join(map(chr, line)).rstrip(chr(BRAILLE)) for line in cells]


def dot_rows_between(last_row: int, row: int) -> range:
    """The rows of the dots that connect a column to the one before it, including its own dot."""
    if row > last_row:
        return range(last_row + 1, row + 1)
    if row < last_row:
        return range(row, last_row)
    return range(row, row + 1)
