"""Run pilots: complete short runs on fractions of a text, from which longer runs are forecast."""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from sm_nanogpt.entry_point.metrics import duration
from sm_nanogpt.entry_point.text import Corpus
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.files.progress import LINE_SECONDS
from sm_nanogpt.launcher.forecast.sizes import Sizes
from sm_nanogpt.launcher.launching.forecasts import Pilot
from sm_nanogpt.launcher.local.runs import FinishedRun, Run, run_all
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.text.ids import draw_ids, write_ids

logger = logging.getLogger(__name__)

PILOT_SIZES = (1.0, 1.25, 1.5, 1.75)
SHORT_TEXT_PILOT_SIZES = (0.5, 0.75, 1.0, 1.25)
SHORT_TEXT_TOKENS = 100_000  # an eighth of fewer tokens is too little for a pilot
# Fractions are taken of at most so many tokens of a text. Pilots train on up to 0.9 million.
MAX_DIVIDED_TOKENS = 1 << 20
MAX_SAMPLE_TOKENS = 1 << 24  # runs may read so many tokens of a longer text
# The constant cost of a pilot's step, as the operations that take as long. At a load of 20, a step
# of sizes 0.5 and 0.75 took 0.15 s, and one of size 1.25, with 25 times the operations, 0.25 s.
STEP_OVERHEAD_OPERATIONS = 8e8


class PlannedPilot(NamedTuple):
    """A pilot to be run: its size, and how many tokens of the text it may read."""

    size: float
    n_tokens: int

    @property
    def name(self) -> str:
        """Its name in the ledger."""
        return f"size {self.size:g} on {self.n_tokens:,}"


def pilots_of(n_tokens: int) -> list[PlannedPilot]:
    """The pilots to run for a text of n_tokens, the largest first.

    Pilots on fractions of the text show what more text is worth. Pilots of all sizes show what a
    larger model is worth.
    """
    sizes = PILOT_SIZES
    fractions = product((1.0, 1.5), (2, 4, 8))  # pairs of a size and a divisor of the tokens
    if n_tokens < SHORT_TEXT_TOKENS:
        sizes = SHORT_TEXT_PILOT_SIZES
        fractions = product((0.5, 1.0), (2, 4))
    pilots = [PlannedPilot(size, min(n_tokens, MAX_SAMPLE_TOKENS)) for size in sizes]
    for size, divisor in fractions:
        pilots.append(PlannedPilot(size, min(n_tokens, MAX_DIVIDED_TOKENS) // divisor))
    return sorted(pilots, reverse=True)


@dataclass(frozen=True)
class Trial:
    """A run of train.py to be made on this machine, on a sample of a text."""

    name: str
    hyperparameters: Mapping[str, Any]
    n_tokens: int  # of the sample
    threads: int = 1


def trials_of(planned_pilots: Sequence[PlannedPilot], sizes: Sizes) -> list[Trial]:
    """The trials of pilots.

    A pilot on the most tokens is evaluated at the steps at which a job of its size is: a job keeps
    its best model, so the lowest loss counts. A pilot on fewer tokens serves only to fit the law,
    and is evaluated only at its end.
    """
    most_tokens = max(planned.n_tokens for planned in planned_pilots)
    trials = []
    for planned in planned_pilots:
        hyperparameters = sizes.hyperparameters(planned.size, planned.n_tokens)
        if planned.n_tokens < most_tokens:
            hyperparameters["eval_interval"] = hyperparameters["max_steps"]
        trials.append(Trial(planned.name, hyperparameters, planned.n_tokens))
    return trials


@dataclass
class PilotTime:
    """The time that pilots take, and still take, by the operations and seconds of the ended ones.

    work: the operations of all pilots. at_once pilots are run at the same time.
    """

    work: float
    at_once: int
    start_time: float = field(default_factory=time.monotonic)
    ended_work: float = 0.0
    ended_seconds: float = 0.0
    last_end_time: float = -math.inf

    def note_end(self, work: float, seconds: float) -> None:
        """Note that a pilot of so many operations has ended, after so many seconds."""
        self.ended_work += work
        self.ended_seconds += seconds
        self.last_end_time = time.monotonic()

    def log_time(self) -> None:
        """Log how long the pilots go on, unless one has just ended, which is logged itself."""
        now = time.monotonic()
        if now - self.last_end_time > LINE_SECONDS:
            logger.info(f"pilot: {duration(now - self.start_time)} so far")

    @property
    def seconds_left(self) -> float:
        seconds_of_all = self.ended_seconds / self.ended_work * self.work / self.at_once
        return max(0.0, seconds_of_all - (time.monotonic() - self.start_time))


def run_trials(
    trials: Sequence[Trial], corpus: Corpus, source: Source, at_once: int
) -> Iterator[tuple[Trial, Pilot]]:
    """Run the trials, `at_once` at a time, and yield each with its pilot when it ends.

    If a trial fails, this ends the others, and raises ServiceError with the last line of its log.
    """
    with tempfile.TemporaryDirectory(prefix="sm-nanogpt-", ignore_cleanup_errors=True) as temporary:
        texts = write_texts(Path(temporary), trials, corpus)
        runs = []
        for trial in trials:
            hyperparameters = {"device": "cpu", **trial.hyperparameters}
            runs.append(Run(source, hyperparameters, texts[trial.n_tokens], trial.threads))
        for index, ended in run_all(runs, at_once):
            trial = trials[index]
            if ended.problem:
                raise ServiceError(f"pilot {trial.name} failed: {ended.problem}")
            yield trial, pilot_of_trial(trial, ended)


def write_texts(directory: Path, trials: Sequence[Trial], corpus: Corpus) -> dict[int, Path]:
    """Write a sample of the text for each length that trials need; return the paths by length."""
    texts = {trial.n_tokens: directory / str(trial.n_tokens) for trial in trials}
    val = draw_ids(corpus.val, MAX_SAMPLE_TOKENS)
    for n_tokens, text in texts.items():
        write_ids(text, corpus.tokenizer, draw_ids(corpus.train, n_tokens), val)
    return texts


def pilot_of_trial(trial: Trial, ended: FinishedRun) -> Pilot:
    """The pilot of a trial that has ended, by the losses and the times of its metrics."""
    metrics = (ended.directory / "output/metrics.jsonl").read_text()
    rows = [json.loads(line) for line in metrics.splitlines()]
    evaluations = [row for row in rows if "val_loss" in row]
    best = min(evaluations, key=lambda row: row["val_loss"])

    step_tokens = trial.hyperparameters["batch_size"] * trial.hyperparameters["block_size"]
    step_seconds = [step_tokens / row["tokens_per_second"] for row in rows]
    # The mean of medians of four steps leaves out the few that took unusually long.
    medians = [median(step_seconds[n : n + 4]) for n in range(0, len(rows), 4)]
    seconds_in_steps = 0.0
    for seconds, n_steps in zip(step_seconds, steps_of(rows), strict=True):
        seconds_in_steps += seconds * n_steps
    return Pilot(
        loss=best["val_loss"],
        bits_per_byte=best["bits_per_byte"],
        step_seconds=fmean(medians),
        around=ended.clock_seconds - seconds_in_steps,
        seconds=ended.clock_seconds,
        cpu_seconds=ended.cpu_seconds,
        train_loss=train_loss_of(rows),
    )


def train_loss_of(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean loss of all steps. A metric row has the mean of the steps since the row before."""
    logged = [row for row in rows if "train_loss" in row]
    steps = steps_of(logged)
    if not sum(steps):
        return None
    loss_sum = sum(row["train_loss"] * n for row, n in zip(logged, steps, strict=True))
    return float(loss_sum / sum(steps))


def steps_of(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """The number of steps that each metric row covers: the steps since the row before."""
    ends = [0, *(row["step"] for row in rows)]
    return [end - begin for begin, end in pairwise(ends)]
