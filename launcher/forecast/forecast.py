"""Forecast the loss, the time and the cost of each size on a text, from pilots of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from entry_point.cores import cores
from entry_point.text import Corpus, unsigned
from launcher.errors import InputError
from launcher.forecast.law import Run, TextLaw, shared
from launcher.forecast.ledger import ForecastLedger
from launcher.forecast.pilots import SMALLEST, WRITTEN, Trial, pilots_of, run_trials
from launcher.forecast.table import Change, Forecast, Pilot, Row
from launcher.job import Expected, JobDescription, TrainingJob
from launcher.local.backend import plan_processes
from launcher.machines import is_busy
from launcher.sagemaker.cost import AROUND_SECONDS
from launcher.source import Source

SIZES = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0)
FURTHEST = 40  # times the compute of all pilots: beyond it nothing is forecast
MISFIT = 0.03  # of log losses: that of honest texts is up to 0.015
FAR = 4  # standard deviations of what compute is worth: that of honest texts is within 2.4
HARDLY = 0.003  # nats: a size that loses so little more is as good
Z = 1.2816  # standard deviations to either side hold 80 %
LOOK_STEPS = 24  # four for each length of the windows, twelve of the whole length
MOST_LOOKS = 6  # as many steps of a small model
LOOK_SECONDS = 4.0
LONG_STEP = 0.25  # seconds: longer steps are forecast by arithmetic


@dataclass(frozen=True)
class Place:
    """An instance type: the operations that a job did there in a second, its seconds around them,
    and the USD of a second; None where that is not known. job is that of the speed."""

    name: str
    flops: float | None = None
    around: float = 0.0
    per_second: float | None = None
    job: str = ""

    def seconds(self, work: float) -> float | None:
        return None if self.flops is None else self.around + work / self.flops

    def dollars(self, work: float, allowance: float = 0.0) -> float | None:
        seconds = self.seconds(work)
        if seconds is None or self.per_second is None:
            return None
        return (seconds + allowance) * self.per_second

    def fits(self, work: float, ceiling: float | None) -> bool:
        """Whether a job below the ceiling, in USD, has the time for it."""
        dollars = self.dollars(work, AROUND_SECONDS)
        return dollars is not None and ceiling is not None and dollars <= ceiling


@dataclass(frozen=True)
class LocalTimes:
    """The seconds that a job of each size takes here, and whether other programs used this machine
    while that was measured."""

    seconds: dict[float, float]
    busy: bool


class Forecaster:
    """The forecasts of one text by one training folder; the ledger at `path` keeps what was run.

    report gets a line for each run that ends. n_tokens is the length of the training text, of which
    the corpus may have only the beginning.
    """

    def __init__(
        self,
        corpus: Corpus,
        source: Source,
        path: Path,
        report: Callable[[str], None],
        n_tokens: int = 0,
    ) -> None:
        self.corpus, self.source, self.report = corpus, source, report
        self.config, self.sizes = source.module("config"), source.module("sizes")
        self.ledger = ForecastLedger(path)
        self.tokens = max(n_tokens, len(corpus.train))
        self.unit = corpus.tokenizer.unit
        if self.tokens < SMALLEST:
            few = f"{self.tokens:,} {self.unit} to train on are too few for pilots"
            raise InputError(f"no forecast: {few}; it takes {SMALLEST:,}")

    # -- runs -------------------------------------------------------------------------------------

    def values(self, size: float, tokens: int) -> dict[str, Any]:
        with self.source.running():
            return dict(self.sizes.hyperparameters_for_size(size, tokens))

    def config_of(self, size: float, tokens: int) -> Any:
        with self.source.running():
            return self.config.Config(**self.values(size, tokens))

    def run_of(self, size: float, tokens: int, loss: float = math.nan) -> Run:
        config = self.config_of(size, tokens)
        trained = config.max_steps * config.batch_size * config.block_size
        return Run(config.matrix_parameters, trained, tokens, loss)

    def run_pilots(self, trials: Sequence[Trial], at_once: int) -> list[Pilot]:
        """What these runs give. Those that the ledger lacks are made, some at once."""
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

    def check(self, runs: Sequence[Run], law: TextLaw) -> None:
        """Raise InputError if nothing can be known from the pilots."""
        counts = torch.bincount(unsigned(self.corpus.train[0 : min(self.tokens, WRITTEN)]))
        shares = counts[counts > 0] / counts.sum()
        guessing, best = -float((shares * shares.log()).sum()), min(run.loss for run in runs)
        usual, own = law.law.mean[1], float(law.mean[1])
        far = abs(own - usual) / math.sqrt(law.law.covariance[1][1])
        problem = ""
        if best > 0.97 * guessing:
            problem = f"the pilots learn no more than how frequent the {self.unit} are"
        elif best < 0.1:
            problem = f"the text repeats itself: a pilot has a loss of {best:.3f} nats"
        elif far > FAR:
            problem = f"compute is worth {own / usual:.2g} times what it is on other texts"
        elif law.misfit > MISFIT:
            problem = f"the pilots miss the law by {law.misfit:.1%} (at most {MISFIT:.0%})"
            problem += " of the training folder as it is packaged" * (not self.source.is_packaged)
        if problem:
            raise InputError(f"no forecast: {problem}")

    # -- time -------------------------------------------------------------------------------------

    def work_of(self, config: Any, vocabulary: int = 0) -> float:
        """The operations of a step: for each token 6 for a parameter, and those of attention."""
        head = (vocabulary or len(self.corpus.tokenizer)) * config.n_embd
        attention = config.n_layer * config.n_embd * config.block_size
        per_token = 6 * (config.matrix_parameters + head + attention)
        return float(per_token * config.batch_size * config.block_size)

    def work(self, size: float) -> float:
        """The operations of a run."""
        config = self.config_of(size, self.tokens)
        return self.work_of(config) * float(config.max_steps)

    def local_times(self, sizes: Sequence[float]) -> LocalTimes:
        """How long a job of each size takes here: a few steps show it, or by arithmetic those of a
        smaller size, if a step takes long."""
        found, speed, around, busy = dict[float, float](), math.inf, 0.0, False
        for size in sizes:
            config = self.config_of(size, self.tokens)
            per_step = self.work_of(config) / speed
            if per_step < LONG_STEP:
                looks = round(LOOK_SECONDS / LOOK_STEPS / per_step) if per_step else MOST_LOOKS
                steps = LOOK_STEPS * max(1, min(MOST_LOOKS, looks))
                look = self.timed(self.look(size, min(steps, config.max_steps)))
                per_step, around = look.step_seconds, look.around
                busy = busy or look.busy
                speed = self.work_of(config) / per_step
            evaluated = min(len(self.corpus.val), config.eval_tokens)
            passes = evaluated / (config.batch_size * config.block_size) / 3  # forward alone
            again = config.max_steps // config.eval_interval - 1
            found[size] = around + per_step * (config.max_steps + again * passes)
        return LocalTimes(found, busy)

    def timed(self, look: Trial) -> Pilot:
        """The outcome of a look, which says if other programs used this machine meanwhile. One that
        was kept from such a time is made again once the machine is quiet."""
        recorded = self.ledger.pilots.get(look.name)
        if recorded is not None and (not recorded.busy or is_busy()):
            return recorded
        busy_before = is_busy()
        [(_, pilot)] = run_trials([look], self.corpus, self.source, 1)
        if busy_before or is_busy():
            pilot = pilot.model_copy(update={"busy": True})
        self.ledger.add_pilot(look.name, pilot)
        self.report(f"{look.name}: {pilot.seconds:.0f} s (1 of 1)")
        return pilot

    def look(self, size: float, steps: int) -> Trial:
        """The first steps of a job on this machine, with the lengths of the windows of all."""
        values = self.values(size, self.tokens)
        job = TrainingJob(data="file:///", hyperparameters=values)
        job._source = self.source
        n, gpus = plan_processes(job)
        short = {"max_steps": steps, "device": "auto", "log_interval": 1}
        short |= {"sample_length": 300, **({} if gpus else {"processes": n})}
        unique, threads = min(self.tokens, WRITTEN), max(1, cores() // n)
        return Trial(f"speed of size {size:g}", {**values, **short}, unique, threads)

    def measured(self, job: JobDescription, vocabulary: Callable[[], int]) -> Place | None:
        """What an ended job tells of its instance type; None if it did not complete, its speed is
        unknown, a teacher made it slower, or its options are of another folder.

        vocabulary reads how many characters or tokens its text has, and is called only if the
        job tells something.
        """
        names = {f.name for f in fields(self.config.Config)}
        values = {n: v for n, v in job.hyperparameters.items() if n in names}
        speed = (job.metrics or {}).get("tokens_per_second")
        if job.status != "Completed" or not (speed and job.started and job.ended):
            return None
        try:
            config = self.config.Config(**values)
        except self.source.module("errors").ConfigError:
            return None
        if getattr(config, "generations", 1) > 1 or "teacher" in job.inputs:  # those are slower
            return None
        step = config.batch_size * config.block_size
        around = max(0.0, job.ended - job.started - config.max_steps * step / speed)
        flops = speed / step * self.work_of(config, vocabulary())
        return Place(job.instance, flops, around, job=job.job_id)

    # -- the forecast -----------------------------------------------------------------------------

    def forecast(self, text: str, places: Sequence[Place], ceiling: float | None) -> Forecast:
        """The forecast for this machine and for instance types; ceiling is in USD."""
        sizes = pilots_of(self.tokens)
        trials = [Trial(f"size {size:g} on {n:,}", self.values(size, n), n) for size, n in sizes]
        outcomes = self.run_pilots(trials, at_once=cores())
        runs = [self.run_of(*each, pilot.loss) for each, pilot in zip(sizes, outcomes, strict=True)]
        law = shared().of_text(runs)
        self.check(runs, law)
        most = FURTHEST * sum(run.parameters * run.tokens for run in runs)
        whole = [(size, self.run_of(size, self.tokens)) for size in SIZES]
        within = [size for size, run in whole if run.parameters * run.tokens <= most]
        here = self.local_times(within)
        per_byte = outcomes[0].bits_per_byte / outcomes[0].loss
        rows = [self.row(size, law, per_byte, places, here.seconds[size]) for size in within]
        best = chosen(rows) or SIZES[0]
        payable = [row for row in rows if any(p.fits(self.work(row.size), ceiling) for p in places)]
        made = Forecast(
            text=text,
            unit=self.unit,
            tokens=self.tokens,
            pilots=len(runs),
            pilot_seconds=sum(each.seconds for each in outcomes) / cores(),
            rows=rows,
            best=best,
            affordable=chosen(payable),
            **self.worth(best, law),
            busy=here.busy,
            notes=notes(rows, best, places, here.busy),
        )
        self.ledger.add_forecast(made)
        return made

    def row(
        self, size: float, law: TextLaw, per_byte: float, places: Sequence[Place], here: float
    ) -> Row:
        run, config = self.run_of(size, self.tokens), self.config_of(size, self.tokens)
        [(loss, deviation)] = law.losses([run])
        low, high = (loss * math.exp(z * deviation) for z in (-Z, Z))
        work = self.work(size)
        embedding = len(self.corpus.tokenizer) * config.n_embd * (2 - config.tie_embeddings)
        return Row(
            size=size,
            parameters=run.parameters + embedding,
            readings=run.tokens / self.tokens,
            expected=Expected(loss=loss, low=low, high=high),
            bits_per_byte=loss * per_byte,
            seconds={"local": here, **{place.name: place.seconds(work) for place in places}},
            dollars={place.name: place.dollars(work) for place in places},
        )

    def worth(self, best: float, law: TextLaw) -> dict[str, Change]:
        """What the loss changes by with twice the text, and with twice the compute."""
        now, more = self.run_of(best, self.tokens), self.run_of(best, 2 * self.tokens)
        larger = [self.run_of(best + n / 16, self.tokens) for n in range(1, 65)]
        work = 2 * now.parameters * now.tokens
        twice = next((run for run in larger if run.parameters * run.tokens >= work), larger[-1])
        [(loss, _)] = law.losses([now])
        found = {}
        for name, run in (("twice_text", more), ("twice_compute", twice)):
            change, deviation = law.change(now, run)
            nats, low, high = (loss * math.expm1(change + z * deviation) for z in (0, -Z, Z))
            found[name] = Change(nats=nats, low=low, high=high)
        return found


def chosen(rows: Sequence[Row]) -> float | None:
    """The smallest size whose loss is HARDLY more than the lowest."""
    lowest = min((row.expected.loss for row in rows), default=0.0)
    return next((row.size for row in rows if row.expected.loss <= lowest + HARDLY), None)


def notes(rows: Sequence[Row], best: float, places: Sequence[Place], busy: bool) -> list[str]:
    """What a reader of the table should know besides. busy: as in LocalTimes."""
    said = []
    if busy:
        measured = "local: other programs used this machine while its speed was measured"
        said.append(f"{measured}; jobs may be faster, and a forecast on a quiet one measures again")
    for place in places:
        if place.flops is None:
            said.append(f"no speed of {place.name} is known here, as no job of yours ended on it")
        else:
            said.append(f"the speed of {place.name} is that of job {place.job}")
    if best < rows[-1].size:
        said.append(f"a size over {best:g} gains less than {HARDLY} nats, or loses")
    if len(rows) < len(SIZES):
        beyond = f"a run is over {FURTHEST} times the pilots, and nothing is forecast"
        said.append(f"from size {SIZES[len(rows)]:g} on, {beyond}")
    return said
