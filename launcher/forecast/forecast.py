"""Forecast the loss, the time and the cost of each size on a text, from pilots of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from sm_nanogpt.entry_point.cores import cores
from sm_nanogpt.entry_point.text import Corpus, unsigned
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.forecast.law import MeasuredRun, TextLaw, shared
from sm_nanogpt.launcher.forecast.ledger import ForecastLedger
from sm_nanogpt.launcher.forecast.pilots import SMALLEST, WRITTEN, Trial, pilots_of, run_trials
from sm_nanogpt.launcher.forecast.table import Change, Forecast, Pilot, Row
from sm_nanogpt.launcher.job import Expected, JobDescription, TrainingJob
from sm_nanogpt.launcher.local.backend import plan_processes
from sm_nanogpt.launcher.machines import is_busy
from sm_nanogpt.launcher.sagemaker.cost import OVERHEAD_SECONDS
from sm_nanogpt.launcher.source import Source

SIZES = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0)
MAX_COMPUTE = 40  # times that of all pilots: beyond it nothing is forecast
MAX_MISFIT = 0.03  # of log losses: that of honest texts is up to 0.015
MAX_DEVIATIONS = 4  # of what compute is worth: honest texts are within 2.4 of the usual
AS_GOOD = 0.003  # nats: a size that loses so little more is as good
Z = 1.2816  # standard deviations to either side hold 80 %
ROUND_STEPS = 24  # four for each length of the windows, twelve of the whole length
MAX_ROUNDS = 6  # of steps of a small model that are timed
TIMED_SECONDS = 4.0
LONG_STEP = 0.25  # seconds: longer steps are forecast by arithmetic


@dataclass(frozen=True)
class InstanceType:
    """The speed of an instance type, by a job that ended on it, and its price."""

    name: str
    flops: float | None = None  # operations in a second; None if no speed is known
    around: float = 0.0  # seconds of the job before and after its steps
    usd_per_second: float | None = None
    job_id: str = ""

    def seconds(self, work: float) -> float | None:
        if self.flops is None:
            return None
        return self.around + work / self.flops

    def dollars(self, work: float, allowance: float = 0.0) -> float | None:
        """USD of so many operations, and of `allowance` seconds; None if that is not known."""
        seconds = self.seconds(work)
        if seconds is None or self.usd_per_second is None:
            return None
        return (seconds + allowance) * self.usd_per_second

    def fits(self, work: float, ceiling: float | None) -> bool:
        """True if a job that may cost the ceiling, in USD, has the time for so many operations."""
        dollars = self.dollars(work, OVERHEAD_SECONDS)
        return dollars is not None and ceiling is not None and dollars <= ceiling


@dataclass(frozen=True)
class LocalTimes:
    """How long a job takes on this machine."""

    seconds: dict[float, float]  # by size
    busy: bool  # True if other programs used the machine while its speed was measured


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
        """Make those of these runs that the ledger lacks, some at once; returns what each gave."""
        recorded = self.ledger.pilots
        missing = [trial for trial in trials if trial.name not in recorded]
        n_ended = len(trials) - len(missing)
        for trial, pilot in run_trials(missing, self.corpus, self.source, at_once):
            n_ended += 1
            self.ledger.add_pilot(trial.name, pilot)  # before anybody hears of it
            result = f"loss {pilot.loss:.3f}, {pilot.seconds:.0f} s"
            self.report(f"{trial.name}: {result} ({n_ended} of {len(trials)})")
        pilots = self.ledger.pilots
        return [pilots[trial.name] for trial in trials]

    def check(self, runs: Sequence[MeasuredRun], text_law: TextLaw) -> None:
        """Raise InputError if nothing can be known from the pilots."""
        counts = torch.bincount(unsigned(self.corpus.train[0 : min(self.tokens, WRITTEN)]))
        shares = counts[counts > 0] / counts.sum()
        entropy = -float((shares * shares.log()).sum())  # the loss of a model that knows no more
        lowest = min(run.loss for run in runs)
        worth = float(text_law.mean[1])  # of compute
        worth_elsewhere = text_law.law.mean[1]
        deviations = abs(worth - worth_elsewhere) / math.sqrt(text_law.law.covariance[1][1])
        if lowest > 0.97 * entropy:
            problem = f"the pilots learn no more than how frequent the {self.unit} are"
        elif lowest < 0.1:
            problem = f"the text repeats itself: a pilot has a loss of {lowest:.3f} nats"
        elif deviations > MAX_DEVIATIONS:
            problem = (
                f"compute is worth {worth / worth_elsewhere:.2g} times what it is on other texts"
            )
        elif text_law.misfit > MAX_MISFIT:
            problem = f"the pilots miss the law by {text_law.misfit:.1%} (at most {MAX_MISFIT:.0%})"
            if not self.source.is_packaged:
                problem += " of the training folder as it is packaged"
        else:
            return
        raise InputError(f"no forecast: {problem}")

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

    def local_times(self, sizes: Sequence[float]) -> LocalTimes:
        """How long a job of each size takes here.

        A few of its steps are timed. Where a step takes long, its time is computed from that of a
        smaller size.
        """
        seconds = dict[float, float]()
        busy = False
        flops = math.inf
        around = 0.0
        for size in sizes:
            config = self.config_of(size, self.tokens)
            step_work = self.step_work(config, len(self.corpus.tokenizer))
            step_seconds = step_work / flops
            if step_seconds < LONG_STEP:
                n_steps = min(steps_to_time(step_seconds), config.max_steps)
                timed = self.time(self.first_steps(size, n_steps))
                busy = busy or timed.busy
                around = timed.around
                step_seconds = timed.step_seconds
                flops = step_work / step_seconds
            seconds[size] = around + step_seconds * self.steps_with_evaluations(config)
        return LocalTimes(seconds, busy)

    def steps_with_evaluations(self, config: Any) -> float:
        """The steps of a run, and as many more as its evaluations take, but for the last one."""
        n_tokens = min(len(self.corpus.val), config.eval_tokens)
        evaluation = n_tokens / (config.batch_size * config.block_size) / 3  # forward alone
        n_evaluations = config.max_steps // config.eval_interval - 1
        return float(config.max_steps + n_evaluations * evaluation)

    def first_steps(self, size: float, n_steps: int) -> Trial:
        """The first steps of a job on this machine, whose windows have all lengths of the job's."""
        values = self.values(size, self.tokens)
        job = TrainingJob(data="file:///", hyperparameters=values)
        job._source = self.source
        placement = plan_processes(job)
        values |= {"max_steps": n_steps, "device": "auto", "log_interval": 1, "sample_length": 300}
        if not placement.gpus:
            values["processes"] = placement.processes
        threads = max(1, cores() // placement.processes)
        return Trial(f"speed of size {size:g}", values, min(self.tokens, WRITTEN), threads)

    def time(self, trial: Trial) -> Pilot:
        """Run the first steps of a job, unless the ledger has them.

        The result says if other programs used this machine meanwhile. One that was recorded then is
        measured again once the machine is quiet.
        """
        recorded = self.ledger.pilots.get(trial.name)
        if recorded is not None and (not recorded.busy or is_busy()):
            return recorded
        busy_before = is_busy()
        [(_, pilot)] = run_trials([trial], self.corpus, self.source, 1)
        if busy_before or is_busy():
            pilot = pilot.model_copy(update={"busy": True})
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
        parts = pilots_of(self.tokens)
        trials = [Trial(f"size {size:g} on {n:,}", self.values(size, n), n) for size, n in parts]
        pilots = self.run_pilots(trials, at_once=cores())
        runs = []
        for (size, n), pilot in zip(parts, pilots, strict=True):
            runs.append(self.run_of(size, n, pilot.loss))
        law = shared().of_text(runs)
        self.check(runs, law)

        sizes = self.sizes_within(MAX_COMPUTE * sum(run.compute for run in runs))
        local = self.local_times(sizes)
        bits_per_nat = pilots[0].bits_per_byte / pilots[0].loss
        rows = [self.row(size, law, bits_per_nat, local, instances) for size in sizes]
        best = best_size(rows) or SIZES[0]
        forecast = Forecast(
            text=text,
            unit=self.unit,
            tokens=self.tokens,
            pilots=len(runs),
            pilot_seconds=sum(pilot.seconds for pilot in pilots) / cores(),
            rows=rows,
            best=best,
            affordable=best_size(self.affordable(rows, instances, ceiling)),
            twice_text=self.change(best, law, self.run_of(best, 2 * self.tokens)),
            twice_compute=self.change(best, law, self.run_of_twice_the_compute(best)),
            busy=local.busy,
            notes=notes(rows, best, instances, local.busy),
        )
        self.ledger.add_forecast(forecast)
        return forecast

    def sizes_within(self, compute: float) -> list[float]:
        """The sizes whose runs take no more compute, in parameters times tokens."""
        return [size for size in SIZES if self.run_of(size, self.tokens).compute <= compute]

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
        law: TextLaw,
        bits_per_nat: float,
        local: LocalTimes,
        instances: Sequence[InstanceType],
    ) -> Row:
        run = self.run_of(size, self.tokens)
        config = self.config_of(size, self.tokens)
        [(loss, deviation)] = law.losses([run])
        work = self.work(size)
        seconds = {instance.name: instance.seconds(work) for instance in instances}
        n_embeddings = 1 if config.tie_embeddings else 2
        embedding = len(self.corpus.tokenizer) * config.n_embd * n_embeddings
        return Row(
            size=size,
            parameters=run.parameters + embedding,
            readings=run.tokens / self.tokens,
            expected=Expected(
                loss=loss,
                low=loss * math.exp(-Z * deviation),
                high=loss * math.exp(Z * deviation),
            ),
            bits_per_byte=loss * bits_per_nat,
            seconds={"local": local.seconds[size], **seconds},
            dollars={instance.name: instance.dollars(work) for instance in instances},
        )

    def change(self, size: float, law: TextLaw, other: MeasuredRun) -> Change:
        """What the loss of a size on this text changes by in another run."""
        run = self.run_of(size, self.tokens)
        [(loss, _)] = law.losses([run])
        change, deviation = law.change(run, other)
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


def steps_to_time(step_seconds: float) -> int:
    """How many steps show the speed, in about TIMED_SECONDS. step_seconds is 0 if not known."""
    n_rounds = MAX_ROUNDS
    if step_seconds:
        n_rounds = round(TIMED_SECONDS / ROUND_STEPS / step_seconds)
    return ROUND_STEPS * max(1, min(n_rounds, MAX_ROUNDS))


def best_size(rows: Sequence[Row]) -> float | None:
    """The smallest size whose loss is at most AS_GOOD over the lowest; None without rows."""
    lowest = min((row.expected.loss for row in rows), default=0.0)
    for row in rows:
        if row.expected.loss <= lowest + AS_GOOD:
            return row.size
    return None


def notes(
    rows: Sequence[Row], best: float, instances: Sequence[InstanceType], busy: bool
) -> list[str]:
    """What a reader of the table should know besides. busy: as in LocalTimes."""
    lines = []
    if busy:
        measured = "local: other programs used this machine while its speed was measured"
        advice = "jobs may be faster, and a forecast on a quiet one measures again"
        lines.append(f"{measured}; {advice}")
    for instance in instances:
        if instance.flops is None:
            problem = f"no speed of {instance.name} is known here"
            lines.append(f"{problem}, as no job of yours ended on it")
        else:
            lines.append(f"the speed of {instance.name} is that of job {instance.job_id}")
    if best < rows[-1].size:
        lines.append(f"a size over {best:g} gains less than {AS_GOOD} nats, or loses")
    if len(rows) < len(SIZES):
        beyond = f"a run is over {MAX_COMPUTE} times the pilots, and nothing is forecast"
        lines.append(f"from size {SIZES[len(rows)]:g} on, {beyond}")
    return lines
