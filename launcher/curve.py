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

from launcher.files.documents import Damaged, Number, parse

Name = Annotated[str, Field(pattern=r"^[\w./-]{1,64}$")]  # it reaches the terminal
Row = dict[Name, Number]  # a line of metrics.jsonl
LARGEST_CURVE = 1 << 26  # bytes: half a million rows

LONGEST_LINE = 1000  # characters of a log's line that may be a row
LINE = re.compile(r"step=(\d{1,18})/\d+ ([a-z_]+=\S+(?: [a-z_]+=\S+)*) ?$")
VALUE = re.compile(r"([a-z_]+)=(\d{1,18}(?:\.\d+)?)(?!\S)")
FILE = re.compile(r"metrics-\d{8}\.jsonl")


@dataclass(frozen=True)
class Curve:
    """The rows of a job in order of step, and where they were read. samples holds the texts that
    the script wrote into its log: `before training` and `after training`."""

    job_id: str
    source: str
    rows: Sequence[Row]
    samples: dict[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> Row:
        """The last known value of each name."""
        return {name: value for row in self.rows for name, value in row.items()}

    def points(self, name: str) -> list[tuple[int, float]]:
        """The steps at which a value is known, and the value there."""
        return [(int(row["step"]), float(row[name])) for row in self.rows if name in row]


def rows_of_file(lines: Iterable[bytes], name: object) -> list[Row]:
    """Rows from the lines of metrics.jsonl; skips an incomplete line, and one without a step."""
    rows = []
    for line in lines:
        with suppress(Damaged):
            rows.append(parse(line, Row, name))
    return in_order(row for row in rows if type(row.get("step")) is int)


def rows_of_log(lines: Iterable[str]) -> list[Row]:
    """Rows from the lines of a log, whose values have fewer digits than those of the file."""
    rows: list[Row] = []
    for line in lines:
        if found := LINE.search(line[-LONGEST_LINE:]):
            values = {name: float(value) for name, value in VALUE.findall(found[2])}
            rows.append({"step": int(found[1]), **values})
    return in_order(rows)


def samples_of_log(lines: Iterable[str]) -> dict[str, str]:
    """The samples that a run logs: {"before training": text, "after training": text}."""
    samples: dict[str, list[str]] = {}
    when = ""
    for line in lines:
        if found := re.fullmatch(r"--- sample (.+) ---", line):
            when = found[1]
            samples[when] = []
        elif when and line.startswith("| "):
            samples[when].append(line[2:])
        else:
            when = ""
    return {when: "\n".join(text) for when, text in samples.items()}


def in_order(rows: Iterable[Row]) -> list[Row]:
    """The rows without those that a run repeated after it resumed from an earlier step."""
    kept: list[Row] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def total_steps(hyperparameters: Mapping[str, Any]) -> Any:
    """The steps of all generations; None if they are not known."""
    each = hyperparameters.get("max_steps")
    return each and each * hyperparameters.get("generations", 1)


def seconds_left(metrics: Mapping[str, Any], hyperparameters: Mapping[str, Any]) -> float | None:
    """The time to the last step at the present speed; None if it is not known."""
    try:
        steps = total_steps(hyperparameters) - metrics["step"]
        tokens = steps * hyperparameters["batch_size"] * hyperparameters["block_size"]
        return float(tokens / metrics["tokens_per_second"])
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def sketch(points: Sequence[tuple[float, float]], width: int = 60, height: int = 8) -> list[str]:
    """Draw a curve as lines of text: `width` x `height` characters and the labels of both axes.

    A braille character has 2 x 4 dots.
    """
    across, down = 2, 4
    columns, rows = width * across, height * down
    steps, values = zip(*points, strict=True)
    left, right, low, high = steps[0], steps[-1], min(values), max(values)
    bits = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
    cells = [[0] * width for _ in range(height)]
    before = None
    for column in range(columns):
        x = left + (right - left) * column / (columns - 1)
        index = min(max(bisect_left(steps, x), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[index - 1], points[index]
        y = y0 + (y1 - y0) * (min(1.0, (x - x0) / (x1 - x0)) if x1 > x0 else 1.0)
        row = round((high - y) / ((high - low) or 1) * (rows - 1))
        start = row if before is None else before + (row > before) - (row < before)
        for each in range(min(start, row), max(start, row) + 1):
            cells[each // down][column // across] |= bits[column % across][each % down]
        before = row
    drawn = ["".join(chr(0x2800 + cell) for cell in line) for line in cells]
    labels = [f"{high:.3f}", *[""] * (height - 2), f"{low:.3f}"]
    lines = [f"{a:>9} {b}".rstrip(" \u2800") for a, b in zip(labels, drawn, strict=True)]
    return [*lines, f"{'step':>9} {f'{left:g}':<{width - 10}}{f'{right:g}':>10}"]


def newest_curve(names: Iterable[str]) -> str:
    """The newest curve among these file names, or else the name of a job's first.

    Each start of a job has its own, which holds the rows of those before it too.
    """
    return max((n for n in names if FILE.fullmatch(n)), default="metrics-00000001.jsonl")
