"""Forecast the loss, the time and the cost of each size on a text, from pilots of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import linear_regression
from typing import Any, NamedTuple

from sm_nanogpt.entry_point.cores import cores
from sm_nanogpt.entry_point.text import Corpus
from sm_nanogpt.launcher.backends import LOCAL
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.forecast.checks import (
    AS_GOOD,
    best_size,
    check_text,
    describe_losses,
    has_lowest,
    problem_of,
    problem_of_validation,
    up_to_lowest,
)
from sm_nanogpt.launcher.forecast.law import MeasuredRun, TextLaw, shared
from sm_nanogpt.launcher.forecast.pilots import (
    SMALLEST,
    WRITTEN,
    Trial,
    pilots_of,
    run_trials,
    trials_of,
)
from sm_nanogpt.launcher.forecast.times import InstanceType, LocalTimes, steps_to_time
from sm_nanogpt.launcher.job import Expected, TrainingJob
from sm_nanogpt.launcher.launching.forecasts import Change, Forecast, ForecastLedger, Pilot, Row
from sm_nanogpt.launcher.local.backend import LocalPlacement, plan_processes
from sm_nanogpt.launcher.machines import is_busy
from sm_nanogpt.launcher.source import Source

TABLE_SIZES = (1.0, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0)
MAX_COMPUTE = 40  # times that of all pilots: beyond it nothing is forecast
Z = 1.2816  # standard deviations to either side hold 80 %
LONG_STEP = 0.25  # seconds: longer steps are forecast by arithmetic


class SizedPilot(NamedTuple):
    """A pilot, its size, and the tokens of the text that it has read."""

    size: float
    n_tokens: int
    pilot: Pilot


class Forecaster:
    """Forecasts for one text and one training folder.

    The ledger at `path` keeps what was run. report gets a line for each run that ends. n_tokens is
    the length of the training text, of which the corpus may have only the beginning.
    """

    def __init__(
        self,
        corpus: Corpus,
        source: Source,
        path: Path,
        report: Callable[[str], None],
        n_tokens: int = 0,
    ) -> None:
        self.corpus = corpus
        self.source = source
        self.report = report
        self.config = source.module("config")
        self.sizes = source.module("sizes")
        self.ledger = ForecastLedger(path)
        self.tokens = max(n_tokens, len(corpus.train))
        self.unit = corpus.tokenizer.unit
        if self.tokens < SMALLEST:
            problem = f"{self.tokens:,} {self.unit} to train on are too few for pilots"
            raise InputError(f"no forecast: {problem}; it takes {SMALLEST:,}")

    # -- runs -------------------------------------------------------------------------------------

    def values(self, size: float, tokens: int) -> dict[str, Any]:
        with self.source.running():
            return dict(self.sizes.hyperparameters_for_size(size, tokens))

    def config_of(self, size: float, tokens: int) -> Any:
        with self.source.running():
            return self.config.Config(**self.values(size, tokens))

    def run_of(self, size: float, tokens: int, loss: float = math.nan) -> MeasuredRun:
        config = self.config_of(size, tokens)
        trained_on = config.max_steps * config.batch_size * config.block_size
        return MeasuredRun(config.matrix_parameters, trained_on, tokens, loss)

    def run_pilots(self, trials: Sequence[Trial], at_once: int) -> list[Pilot]:
        """Run the trials that the ledger lacks, `at_once` at a time; returns the pilot of each."""
        recorded = self.ledger.pilots
        missing = [trial for trial in trials if trial.name not in recorded]
        n_ended = len(trials) - len(missing)
        for trial, pilot in run_trials(missing, self.corpus, self.source, at_once):
            n_ended += 1
            self.ledger.add_pilot(trial.name, pilot)  # before it is reported
            result = f"loss {pilot.loss:.3f}, {pilot.seconds:.0f} s"
            self.report(f"{trial.name}: {result} ({n_ended} of {len(trials)})")
        pilots = self.ledger.pilots
        return [pilots[trial.name] for trial in trials]

    # -- time -------------------------------------------------------------------------------------

    def step_work(self, config: Any, vocabulary_size: int) -> float:
        """The operations of a step: for each token 6 for a parameter, and those of attention."""
        head = vocabulary_size * config.n_embd
        attention = config.n_layer * config.n_embd * config.block_size
        per_token = 6 * (config.matrix_parameters + head + attention)
        return float(per_token * config.batch_size * config.block_size)

    def work(self, size: float) -> float:
        """The operations of a run."""
        config = self.config_of(size, self.tokens)
        return self.step_work(config, len(self.corpus.tokenizer)) * float(config.max_steps)

    def local_times(self, sizes: Sequence[float], pilots: Sequence[SizedPilot]) -> LocalTimes:
        """How long a job of each size takes here.

        A few of its steps are timed. If other programs use the machine, the times are computed from
        the processor time of the pilots, which is nearly the same then.
        """
        seconds = self.timed_seconds(sizes)
        if seconds is not None:
            return LocalTimes(seconds, busy=False)
        step_seconds = self.fit_step_seconds(pilots)
        by_size = dict[float, float | None]()
        for size in sizes:
            by_size[size] = None
            if step_seconds is not None and not self.placement(size).gpus:
                config = self.config_of(size, self.tokens)
                n_steps = self.steps_with_evaluations(config)
                by_size[size] = n_steps * step_seconds(config)
        return LocalTimes(by_size, busy=True)

    def timed_seconds(self, sizes: Sequence[float]) -> dict[float, float | None] | None:
        """The seconds of a job of each size, by steps that are timed; None on a busy machine.

        Where a step takes long, its time is computed from that of a smaller size.
        """
        seconds = dict[float, float | None]()
        flops = math.inf
        around = 0.0
        for size in sizes:
            config = self.config_of(size, self.tokens)
            step_work = self.step_work(config, len(self.corpus.tokenizer))
            step_seconds = step_work / flops
            if step_seconds < LONG_STEP:
                n_steps = min(steps_to_time(step_seconds), config.max_steps)
                timed = self.time(self.first_steps(size, n_steps))
                if timed is None:
                    return None
                around = timed.around
                step_seconds = timed.step_seconds
                flops = step_work / step_seconds
            seconds[size] = around + step_seconds * self.steps_with_evaluations(config)
        return seconds

    def fit_step_seconds(self, pilots: Sequence[SizedPilot]) -> Callable[[Any], float] | None:
        """The seconds of a step on all cores, by its config; None if no processor time is recorded.

        A line through the pilots' processor seconds for a step, over the operations of a step. The
        cores share the operations; what a step costs besides is of one core.
        """
        works = []
        seconds = []
        for size, n_tokens, pilot in pilots:
            if pilot.cpu_seconds is None:
                return None
            config = self.config_of(size, n_tokens)
            works.append(self.step_work(config, len(self.corpus.tokenizer)))
            seconds.append(pilot.cpu_seconds / config.max_steps)
        slope, intercept = linear_regression(works, seconds)

        def step_seconds(config: Any) -> float:
            work = self.step_work(config, len(self.corpus.tokenizer))
            return max(0.0, intercept) + slope * work / cores()

        return step_seconds if slope > 0 else None

    def steps_with_evaluations(self, config: Any) -> float:
        """The steps of a run, and as many more as its evaluations take, but for the last one."""
        n_tokens = min(len(self.corpus.val), config.eval_tokens)
        evaluation = n_tokens / (config.batch_size * config.block_size) / 3  # forward alone
        n_evaluations = config.max_steps // config.eval_interval - 1
        return float(config.max_steps + n_evaluations * evaluation)

    def placement(self, size: float) -> LocalPlacement:
        """On what a job of a size runs here."""
        values = self.values(size, self.tokens)
        job = TrainingJob(data="file:///", hyperparameters=values)
        job._source = self.source
        return plan_processes(job)

    def first_steps(self, size: float, n_steps: int) -> Trial:
        """The first steps of a job on this machine, whose windows have all lengths of the job's."""
        values = self.values(size, self.tokens)
        placement = self.placement(size)
        values |= {"max_steps": n_steps, "device": "auto", "log_interval": 1, "sample_length": 300}
        if not placement.gpus:
            values["processes"] = placement.processes
        threads = max(1, cores() // placement.processes)
        return Trial(f"speed of size {size:g}", values, min(self.tokens, WRITTEN), threads)

    def time(self, trial: Trial) -> Pilot | None:
        """Run the first steps of a job, unless the ledger has them.

        None if other programs use this machine meanwhile: the steps would seem too slow, so their
        time is not kept.
        """
        recorded = self.ledger.pilots.get(trial.name)
        if recorded is not None:
            return recorded
        if is_busy():
            return None
        [(_, pilot)] = run_trials([trial], self.corpus, self.source, 1)
        if is_busy():
            return None
        self.ledger.add_pilot(trial.name, pilot)
        self.report(f"{trial.name}: {pilot.seconds:.0f} s (1 of 1)")
        return pilot

    def measured_on(
        self, job: JobDescription, vocabulary_size: Callable[[], int]
    ) -> InstanceType | None:
        """The instance type of an ended job, with its speed.

        None if the job did not complete, its speed is unknown, a teacher made it slower, or its
        options are of another folder. vocabulary_size reads how many characters or tokens its text
        has, 0 if that is unknown; it is called only if the job has a speed.
        """
        tokens_per_second = (job.metrics or {}).get("tokens_per_second")
        if job.status != "Completed" or not (tokens_per_second and job.started and job.ended):
            return None
        names = {field.name for field in fields(self.config.Config)}
        values = {name: value for name, value in job.hyperparameters.items() if name in names}
        try:
            config = self.config.Config(**values)
        except self.source.module("errors").ConfigError:
            return None
        if getattr(config, "generations", 1) > 1 or "teacher" in job.inputs:  # those are slower
            return None
        step_seconds = config.batch_size * config.block_size / tokens_per_second
        around = max(0.0, job.ended - job.started - config.max_steps * step_seconds)
        size = vocabulary_size() or len(self.corpus.tokenizer)
        flops = self.step_work(config, size) / step_seconds
        return InstanceType(job.instance, flops, around, job_id=job.job_id)

    # -- the forecast -----------------------------------------------------------------------------

    def forecast(
        self, text: str, instances: Sequence[InstanceType], ceiling: float | None
    ) -> Forecast:
        """The forecast for this machine and for instance types; ceiling is in USD."""
        pilots = self.pilots()
        whole_pilots = on_most_tokens(pilots)
        check_text(whole_pilots, self.corpus.train[0 : min(self.tokens, WRITTEN)], self.unit)

        runs = [self.run_of(size, n_tokens, pilot.loss) for size, n_tokens, pilot in pilots]
        law = shared().of_text(runs)
        problem = problem_of(law, self.source.is_packaged)
        candidates = self.sizes_within(MAX_COMPUTE * sum(run.compute for run in runs))
        losses = self.losses(whole_pilots, law, problem, candidates)
        shown = up_to_lowest(losses)

        local = self.local_times([*shown], pilots)
        bits_per_nat = pilots[0].pilot.bits_per_byte / pilots[0].pilot.loss
        rows = []
        for size, loss in shown.items():
            rows.append(self.row(size, loss, bits_per_nat, local, instances))
        best = best_size(rows) or TABLE_SIZES[0]
        overfits = len(shown) < len(losses)
        lines = notes(rows, best, overfits, len(candidates), instances, local.busy)
        validation_problem = problem_of_validation(whole_pilots)
        if validation_problem:
            lines.append(validation_problem)
        twice_text = None
        twice_compute = None
        if not problem:
            larger_text = self.run_of(best, 2 * self.tokens)
            larger_model = self.run_of_twice_the_compute(best)
            twice_text = self.change_to(larger_text, best, shown[best].loss, law)
            twice_compute = self.change_to(larger_model, best, shown[best].loss, law)
        forecast = Forecast(
            text=text,
            unit=self.unit,
            tokens=self.tokens,
            pilots=len(pilots),
            pilot_seconds=sum(pilot.seconds for _, _, pilot in pilots) / cores(),
            rows=rows,
            best=best,
            affordable=best_size(self.affordable(rows, instances, ceiling)),
            twice_text=twice_text,
            twice_compute=twice_compute,
            overfits=overfits,
            busy=local.busy,
            notes=lines,
        )
        self.ledger.add_forecast(forecast)
        return forecast

    def pilots(self) -> list[SizedPilot]:
        """The pilots of this text, after those that the ledger lacks have run."""
        parts = pilots_of(self.tokens)
        pilots = self.run_pilots(trials_of(parts, self.values), at_once=cores())
        return [SizedPilot(*part, pilot) for part, pilot in zip(parts, pilots, strict=True)]

    def losses(
        self,
        whole_pilots: Mapping[float, Pilot],
        law: TextLaw,
        problem: str,
        candidates: Sequence[float],
    ) -> dict[float, Expected]:
        """The losses by size: those of the pilots on the whole text, then the law's of larger ones.

        Raises InputError if the law has a problem, and the pilots do not show which size is best.
        """
        losses = dict[float, Expected]()
        if self.tokens <= WRITTEN:  # else the pilots have read a part of the text
            for size in sorted(whole_pilots):
                losses[size] = measured_loss(whole_pilots[size], law)
        if problem:
            if not has_lowest(losses):
                raise InputError(f"no forecast: {problem}{describe_losses(losses)}")
            return losses
        largest_measured = max(losses, default=0.0)
        for size in candidates:
            if size > largest_measured:
                [(loss, deviation)] = law.losses([self.run_of(size, self.tokens)])
                losses[size] = expected(loss, deviation)
        return losses

    def sizes_within(self, compute: float) -> list[float]:
        """The sizes whose runs take no more compute, in parameters times tokens."""
        return [size for size in TABLE_SIZES if self.run_of(size, self.tokens).compute <= compute]

    def affordable(
        self, rows: Sequence[Row], instances: Sequence[InstanceType], ceiling: float | None
    ) -> list[Row]:
        """The rows whose size fits the ceiling, in USD, on one of the instance types."""
        fitting = []
        for row in rows:
            work = self.work(row.size)
            if any(instance.fits(work, ceiling) for instance in instances):
                fitting.append(row)
        return fitting

    def row(
        self,
        size: float,
        expected: Expected,
        bits_per_nat: float,
        local: LocalTimes,
        instances: Sequence[InstanceType],
    ) -> Row:
        run = self.run_of(size, self.tokens)
        config = self.config_of(size, self.tokens)
        work = self.work(size)
        seconds = {instance.name: instance.seconds(work) for instance in instances}
        n_embeddings = 1 if config.tie_embeddings else 2
        embedding = len(self.corpus.tokenizer) * config.n_embd * n_embeddings
        return Row(
            size=size,
            parameters=run.parameters + embedding,
            readings=run.tokens / self.tokens,
            expected=expected,
            bits_per_byte=expected.loss * bits_per_nat,
            seconds={LOCAL: local.seconds[size], **seconds},
            dollars={instance.name: instance.dollars(work) for instance in instances},
        )

    def change_to(self, other: MeasuredRun, size: float, loss: float, law: TextLaw) -> Change:
        """What the loss of a size on this text changes by with another run."""
        change, deviation = law.change(self.run_of(size, self.tokens), other)
        return Change(
            nats=loss * math.expm1(change),
            low=loss * math.expm1(change - Z * deviation),
            high=loss * math.expm1(change + Z * deviation),
        )

    def run_of_twice_the_compute(self, size: float) -> MeasuredRun:
        """The run on this text of the next size, by 1/16, that takes twice the compute."""
        compute = 2 * self.run_of(size, self.tokens).compute
        for n in range(1, 65):
            larger = self.run_of(size + n / 16, self.tokens)
            if larger.compute >= compute:
                break
        return larger


def on_most_tokens(pilots: Sequence[SizedPilot]) -> dict[float, Pilot]:
    """The pilots by size that have read the whole text, or the most of a long one."""
    most_tokens = max(pilot.n_tokens for pilot in pilots)
    return {size: pilot for size, n_tokens, pilot in pilots if n_tokens == most_tokens}


def expected(loss: float, deviation: float, measured: bool = False) -> Expected:
    """A loss with its 80 % interval, by the standard deviation of its logarithm."""
    low = loss * math.exp(-Z * deviation)
    high = loss * math.exp(Z * deviation)
    return Expected(loss=loss, low=low, high=high, measured=measured)


def measured_loss(pilot: Pilot, law: TextLaw) -> Expected:
    """The loss of a pilot on the whole text, which is that of a job of its size."""
    return expected(pilot.loss, law.law.spread * law.law.noise, measured=True)


def notes(
    rows: Sequence[Row],
    best: float,
    overfits: bool,
    n_sizes: int,
    instances: Sequence[InstanceType],
    busy: bool,
) -> list[str]:
    """What a reader of the table should know besides.

    overfits and busy: as in Forecast. n_sizes: how many of TABLE_SIZES are near the pilots.
    """
    lines = []
    if busy:
        estimated = "other programs use this machine, so times are by the pilots' processors"
        lines.append(f"{LOCAL}: {estimated}; a forecast on a quiet machine measures them")
    for instance in instances:
        if instance.flops is None:
            problem = f"no speed of {instance.name} is known here"
            lines.append(f"{problem}, as no job of yours ended on it")
        else:
            lines.append(f"the speed of {instance.name} is that of job {instance.job_id}")
    largest = rows[-1].size
    if best < largest:
        lines.append(f"a size over {best:g} gains less than {AS_GOOD} nats")
    if overfits:
        lines.append(f"a size over {largest:g} overfits: its loss is higher")
    elif n_sizes < len(TABLE_SIZES):
        beyond = f"a run is over {MAX_COMPUTE} times the pilots, and nothing is forecast"
        lines.append(f"from size {TABLE_SIZES[n_sizes]:g} on, {beyond}")
    return lines
