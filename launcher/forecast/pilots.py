"""Pilots: complete short runs on fractions of a text, from which longer runs are forecast."""

from __future__ import annotations

import json
import operator
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from entry_point.text import Corpus
from launcher.errors import ServiceError
from launcher.forecast.table import Pilot
from launcher.local.runs import Ended, Run, run_all
from launcher.source import Source
from launcher.text.ids import draw_ids, write_ids

SIZES = (1.0, 1.25, 1.5, 1.75)
SMALLEST = 100_000  # tokens of a text: fewer have no eighth that a pilot can learn from
LARGEST = 1 << 20  # tokens of a text whose fractions are tried: pilots train on up to 0.9 million
WRITTEN = 1 << 24  # tokens of a longer text that runs may read


def pilots_of(tokens: int) -> list[tuple[float, int]]:
    """The pilots for a text of so many tokens: the size of each, and the tokens that it may read.

    Fractions show what more text is worth, and sizes what a larger model is.
    """
    base = min(tokens, LARGEST)
    few = [(size, base // n) for size in (1.0, 1.5) for n in (8, 4, 2)]
    return sorted([*few, *((size, min(tokens, WRITTEN)) for size in SIZES)], reverse=True)


@dataclass(frozen=True)
class Trial:
    """A run of train.py to be made here: what it is called, its hyperparameters, and its text."""

    name: str
    values: Mapping[str, Any]
    unique: int
    threads: int = 1


def run_trials(
    trials: Sequence[Trial], corpus: Corpus, source: Source, at_once: int
) -> Iterator[tuple[Trial, Pilot]]:
    """Run these, some at once, and yield each with its outcome when it ends.

    Raises ServiceError, with the last line of its log, if one fails. None goes on afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="sm-nanogpt-", ignore_cleanup_errors=True) as temporary:
        texts = {each.unique: Path(temporary) / str(each.unique) for each in trials}
        val = draw_ids(corpus.val, WRITTEN)
        for n, text in texts.items():
            write_ids(text, corpus.tokenizer, draw_ids(corpus.train, n), val)
        runs = [
            Run(source, {"device": "cpu", **each.values}, texts[each.unique], each.threads)
            for each in trials
        ]
        for index, ended in run_all(runs, at_once):
            if problem := ended.problem:
                raise ServiceError(f"pilot {trials[index].name} failed: {problem}")
            yield trials[index], outcome(trials[index], ended)


def outcome(trial: Trial, ended: Ended) -> Pilot:
    rows = [json.loads(line) for line in (ended.out / "output" / "metrics.jsonl").open()]
    best = min((row for row in rows if "val_loss" in row), key=lambda row: row["val_loss"])
    per_step = trial.values["batch_size"] * trial.values["block_size"]
    times = [per_step / row["tokens_per_second"] for row in rows]
    steps = [b["step"] - a["step"] for a, b in pairwise([{"step": 0}, *rows])]
    return Pilot(
        loss=best["val_loss"],
        bits_per_byte=best["bits_per_byte"],
        step_seconds=fmean(median(times[at : at + 4]) for at in range(0, len(times), 4)),
        around=ended.clock_seconds - sum(map(operator.mul, times, steps)),
        seconds=ended.clock_seconds,
    )
