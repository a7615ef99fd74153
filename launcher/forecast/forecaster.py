"""Forecast the loss, the time and the cost of each size on a text, from pilots of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sm_nanogpt.entry_point.cores import cores
from sm_nanogpt.entry_point.metrics import duration
from sm_nanogpt.entry_point.text import Corpus
from sm_nanogpt.launcher.backends import LOCAL
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.progress import repeated
from sm_nanogpt.launcher.forecast.checks import (
    AS_GOOD_NATS,
    best_size,
    check_text,
    describe_losses,
    has_lowest,
    problem_of_law,
    problem_of_validation,
    up_to_lowest,
)
from sm_nanogpt.launcher.forecast.clock import LocalClock, LocalTimes
from sm_nanogpt.launcher.forecast.law import CompleteRun, TextLaw, shared_law
from sm_nanogpt.launcher.forecast.pilots import (
    MAX_SAMPLE_TOKENS,
    STEP_OVERHEAD_OPERATIONS,
    PilotTime,
    PlannedPilot,
    pilots_of,
    run_trials,
    trials_of,
)
from sm_nanogpt.launcher.forecast.sizes import Sizes
from sm_nanogpt.launcher.forecast.times import InstanceType
from sm_nanogpt.launcher.job import Expected
from sm_nanogpt.launcher.launching.forecasts import (
    MIN_TRAINING_TOKENS,
    Z_80,
    Change,
    Forecast,
    ForecastLedger,
    Pilot,
    Row,
)
from sm_nanogpt.launcher.source import Source

logger = logging.getLogger(__name__)

TABLE_SIZES = (1.0, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0)
MAX_COMPUTE_RATIO = 40  # times that of all pilots; for larger runs nothing is forecast


class Forecaster:
    """Forecasts the runs of each size on one text, by one training folder.

    The ledger at ledger_path keeps the pilots and the forecasts. Each run that ends is logged.
    n_tokens is the length of the training text; None: the corpus has all of it. Raises InputError
    if the text is too short for pilots.
    """

    def __init__(
        self,
        corpus: Corpus,
        training_folder: Source,
        ledger_path: Path,
        n_tokens: int | None = None,
    ) -> None:
        self.corpus = corpus
        self.training_folder = training_folder
        if n_tokens is None:
            n_tokens = len(corpus.train)
        self.sizes = Sizes(training_folder, n_tokens, len(corpus.tokenizer))
        self.unit = corpus.tokenizer.unit
        if self.sizes.n_tokens < MIN_TRAINING_TOKENS:
            problem = f"{self.sizes.n_tokens:,} {self.unit} to train on are too few for pilots"
            raise InputError(f"no forecast: {problem}; it takes {MIN_TRAINING_TOKENS:,}")
        self.ledger = ForecastLedger(ledger_path)

    def forecast(
        self, text: str, instances: Sequence[InstanceType], max_cost: float | None
    ) -> Forecast:
        """Forecast for this machine and for instance types.

        text: what the forecast calls the text. max_cost: what a job may cost, in USD.
        """
        pilots = self.pilots()
        whole_pilots = on_most_tokens(pilots)
        self.check_text(whole_pilots)

        runs = self.runs_of(pilots)
        law = shared_law().of_text(runs)
        problem = problem_of_law(law, self.training_folder.is_packaged)
        candidates = self.candidates(runs)
        losses = self.losses(whole_pilots, law, problem, candidates)
        shown = up_to_lowest(losses)
        overfits = len(shown) < len(losses)

        clock = LocalClock(self.sizes, self.corpus, self.ledger)
        local = clock.times([*shown], pilots)
        rows = self.rows(shown, pilots, local, instances)
        best = best_size(rows) or TABLE_SIZES[0]

        notes = notes_on_table(rows, best, overfits, len(candidates), instances, local.busy)
        validation_problem = problem_of_validation(whole_pilots)
        if validation_problem:
            notes.append(validation_problem)

        twice_text = None
        twice_compute = None
        if not problem:
            larger_text = self.sizes.run(best, 2 * self.sizes.n_tokens)
            larger_model = self.run_of_twice_the_compute(best)
            twice_text = self.change_to(larger_text, best, shown[best].loss, law)
            twice_compute = self.change_to(larger_model, best, shown[best].loss, law)

        forecast = Forecast(
            text=text,
            unit=self.unit,
            tokens=self.sizes.n_tokens,
            pilots=len(pilots),
            pilot_seconds=sum(pilot.seconds for pilot in pilots.values()) / cores(),
            rows=rows,
            best=best,
            affordable=best_size(self.affordable(rows, instances, max_cost)),
            twice_text=twice_text,
            twice_compute=twice_compute,
            overfits=overfits,
            busy=local.busy,
            notes=notes,
        )
        self.ledger.add_forecast(forecast)
        return forecast

    def pilots(self) -> dict[PlannedPilot, Pilot]:
        """The pilots of this text. Those that the ledger lacks are run now."""
        planned_pilots = pilots_of(self.sizes.n_tokens)
        trials = trials_of(planned_pilots, self.sizes)
        recorded = self.ledger.pilots
        missing = [trial for trial in trials if trial.name not in recorded]
        n_ended = len(trials) - len(missing)
        works = {planned.name: self.work_of(planned) for planned in planned_pilots}
        pilot_time = PilotTime(sum(works[trial.name] for trial in missing), cores())
        if missing:
            logger.info(f"pilot: {len(missing)} to run, {cores()} at a time")
        with repeated(pilot_time.log_time):
            for trial, pilot in run_trials(missing, self.corpus, self.training_folder, cores()):
                n_ended += 1
                pilot_time.note_end(works[trial.name], pilot.seconds)
                self.ledger.add_pilot(trial.name, pilot)  # before it is logged
                progress = f"{n_ended} of {len(trials)}"
                if n_ended < len(trials):
                    progress += f", time left {duration(pilot_time.seconds_left)}"
                result = f"loss {pilot.loss:.3f}, {pilot.seconds:.0f} s"
                logger.info(f"pilot: {trial.name}: {result} ({progress})")
        recorded = self.ledger.pilots
        return {planned: recorded[planned.name] for planned in planned_pilots}

    def work_of(self, planned: PlannedPilot) -> float:
        """The operations of a pilot, including those that take as long as the overhead of steps."""
        config = self.sizes.config(planned.size, planned.n_tokens)
        operations = self.sizes.operations_of_step(config) + STEP_OVERHEAD_OPERATIONS
        return float(config.max_steps * operations)

    def check_text(self, whole_pilots: Mapping[float, Pilot]) -> None:
        """Raise InputError if the text repeats itself, or pilots learn only frequencies."""
        n_checked = min(self.sizes.n_tokens, MAX_SAMPLE_TOKENS)
        check_text(whole_pilots, self.corpus.train[0:n_checked], self.unit)

    def runs_of(self, pilots: Mapping[PlannedPilot, Pilot]) -> list[CompleteRun]:
        """The runs of the pilots, with their losses."""
        runs = []
        for planned, pilot in pilots.items():
            run = self.sizes.run(planned.size, planned.n_tokens)
            runs.append(replace(run, loss=pilot.loss))
        return runs

    def candidates(self, runs: Sequence[CompleteRun]) -> list[float]:
        """The sizes of the table whose run takes at most MAX_COMPUTE_RATIO times the compute of
        these runs together."""
        limit = MAX_COMPUTE_RATIO * sum(run.compute for run in runs)
        return [size for size in TABLE_SIZES if self.sizes.run(size).compute <= limit]

    def losses(
        self,
        whole_pilots: Mapping[float, Pilot],
        law: TextLaw,
        problem: str,
        candidates: Sequence[float],
    ) -> dict[float, Expected]:
        """The losses by size: for the sizes of pilots on the whole text, as measured; for larger
        candidates, by the law.

        Raises InputError if the law has a problem, and the pilots do not show which size is best.
        """
        losses = dict[float, Expected]()
        # If the text is longer, the pilots have read only a part of it.
        if self.sizes.n_tokens <= MAX_SAMPLE_TOKENS:
            deviation = law.law.spread * law.law.noise
            for size in sorted(whole_pilots):
                losses[size] = expected_loss(whole_pilots[size].loss, deviation, measured=True)
        if problem:
            if not has_lowest(losses):
                raise InputError(f"no forecast: {problem}{describe_losses(losses)}")
            return losses
        largest_measured = max(losses, default=0.0)
        for size in candidates:
            if size > largest_measured:
                [(loss, deviation)] = law.losses([self.sizes.run(size)])
                losses[size] = expected_loss(loss, deviation)
        return losses

    def affordable(
        self, rows: Sequence[Row], instances: Sequence[InstanceType], max_cost: float | None
    ) -> list[Row]:
        """The rows whose job costs at most max_cost, in USD, on one of the instance types.

        None of them does if max_cost is None.
        """
        fitting = []
        for row in rows:
            operations = self.sizes.run_operations(row.size)
            if any(instance.fits(operations, max_cost) for instance in instances):
                fitting.append(row)
        return fitting

    def rows(
        self,
        losses: Mapping[float, Expected],
        pilots: Mapping[PlannedPilot, Pilot],
        local: LocalTimes,
        instances: Sequence[InstanceType],
    ) -> list[Row]:
        """The rows of the table, by the losses of its sizes."""
        largest = pilots[max(pilots)]
        bits_per_nat = largest.bits_per_byte / largest.loss
        rows = []
        for size, loss in losses.items():
            rows.append(self.row(size, loss, bits_per_nat, local, instances))
        return rows

    def row(
        self,
        size: float,
        expected: Expected,
        bits_per_nat: float,
        local: LocalTimes,
        instances: Sequence[InstanceType],
    ) -> Row:
        """The row of a size, with its time here and on each instance type, and its cost there."""
        operations = self.sizes.run_operations(size)
        seconds = {LOCAL: local.seconds[size]}
        dollars = {}
        for instance in instances:
            seconds[instance.name] = instance.seconds(operations)
            dollars[instance.name] = instance.dollars(operations)

        run = self.sizes.run(size)
        config = self.sizes.config(size)
        n_embeddings = 1 if config.tie_embeddings else 2
        embedding = len(self.corpus.tokenizer) * config.n_embd * n_embeddings
        return Row(
            size=size,
            parameters=run.parameters + embedding,
            readings=run.tokens / self.sizes.n_tokens,
            expected=expected,
            bits_per_byte=expected.loss * bits_per_nat,
            seconds=seconds,
            dollars=dollars,
        )

    def change_to(self, other: CompleteRun, size: float, loss: float, law: TextLaw) -> Change:
        """By how much another run's loss differs from `loss`, the loss of a size on this text."""
        change, deviation = law.change(self.sizes.run(size), other)
        return Change(
            nats=loss * math.expm1(change),
            low=loss * math.expm1(change - Z_80 * deviation),
            high=loss * math.expm1(change + Z_80 * deviation),
        )

    def run_of_twice_the_compute(self, size: float) -> CompleteRun:
        """The run on this text that takes twice the compute of a size, of the next larger size in
        steps of 1/16."""
        compute = 2 * self.sizes.run(size).compute
        for n in range(1, 65):
            larger = self.sizes.run(size + n / 16)
            if larger.compute >= compute:
                break
        return larger


def on_most_tokens(pilots: Mapping[PlannedPilot, Pilot]) -> dict[float, Pilot]:
    """The pilots, by size, that have read the whole text, or the largest part of a long text."""
    most_tokens = max(planned.n_tokens for planned in pilots)
    by_size = {}
    for planned, pilot in pilots.items():
        if planned.n_tokens == most_tokens:
            by_size[planned.size] = pilot
    return by_size


def expected_loss(loss: float, deviation: float, measured: bool = False) -> Expected:
    """A loss with its 80 % interval. deviation: the standard deviation of the log loss."""
    low = loss * math.exp(-Z_80 * deviation)
    high = loss * math.exp(Z_80 * deviation)
    return Expected(loss=loss, low=low, high=high, measured=measured)


def notes_on_table(
    rows: Sequence[Row],
    best: float,
    overfits: bool,
    n_sizes: int,
    instances: Sequence[InstanceType],
    busy: bool,
) -> list[str]:
    """Notes on the table of a forecast.

    overfits and busy are as in Forecast. n_sizes: how many of TABLE_SIZES are within
    MAX_COMPUTE_RATIO.
    """
    lines = []
    if busy:
        estimated = "other programs use this machine, so times are by the pilots' processors"
        lines.append(f"{LOCAL}: {estimated}; a forecast on a quiet machine measures them")
    for instance in instances:
        if instance.operations_per_second is None:
            problem = f"no speed of {instance.name} is known here"
            lines.append(f"{problem}, as no job of yours ended on it")
        else:
            lines.append(f"the speed of {instance.name} is that of job {instance.job_id}")
    largest = rows[-1].size
    if best < largest:
        lines.append(f"a size over {best:g} gains less than {AS_GOOD_NATS} nats")
    if overfits:
        lines.append(f"a size over {largest:g} overfits: its loss is higher")
    elif n_sizes < len(TABLE_SIZES):
        beyond = f"a run is over {MAX_COMPUTE_RATIO} times the pilots, and nothing is forecast"
        lines.append(f"from size {TABLE_SIZES[n_sizes]:g} on, {beyond}")
    return lines
