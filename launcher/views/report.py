"""What a report says of runs: their curves, configurations, texts, machines and costs."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.curve import Curve, Row, samples_of_log, total_steps
from launcher.errors import ServiceError
from launcher.finding import find
from launcher.groups.ranking import Rank, differences, ranking
from launcher.groups.sweep import MODEL_CHOICES
from launcher.job import JobDescription, TrainingJob, end_of
from launcher.judge.evaluation import Evaluation, saved_evaluations
from launcher.launching.summary import format_value
from launcher.settings import Settings
from launcher.text.corpus import Upload, known_upload
from launcher.tracking import with_costs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What a report says of a job."""

    description: JobDescription
    job: TrainingJob
    curve: Curve
    log: Sequence[str] = ()
    data: Upload | None = None
    validation: Upload | None = None
    judged: Sequence[Evaluation] = ()
    label: str = ""

    @property
    def short_name(self) -> str:
        """The name, or else the end of the id."""
        return self.job.name or end_of(self.description.job_id)

    def logged(self, pattern: str) -> str:
        """The first group of the first line of the log that begins so, or ''."""
        found = (re.match(pattern, line) for line in self.log)
        return next((match[1] for match in found if match), "")

    @property
    def unit(self) -> str:
        return self.logged(r"[\d,]+ parameters; [\d,]+ (\w+) to train on") or "characters"

    @property
    def tokenizer(self) -> str:
        return (self.data.tokenizer if self.data else "") or self.unit

    @property
    def text(self) -> object:
        """Identify the validation text by its length, or by its location if that is unknown."""
        upload = self.validation if self.job.validation else self.data
        return upload.characters if upload else self.job.validation or self.job.data

    @property
    def evaluations(self) -> list[Row]:
        return [row for row in self.curve.rows if "val_loss" in row]

    @property
    def best(self) -> Row:
        """The row of the lowest validation loss; empty before the first evaluation."""
        return min(self.evaluations, key=lambda row: row["val_loss"], default={})

    @property
    def step(self) -> int:
        return int(self.curve.rows[-1]["step"])

    @property
    def tokens_per_step(self) -> int:
        values = self.description.hyperparameters
        return int(values["batch_size"] * values["block_size"])

    @property
    def times(self) -> list[float]:
        """The time of each row, in seconds since the start of the run; empty if not all have one.

        A run that continues another one starts with its first row; the pause between them does not
        count.
        """
        if not all("time" in row for row in self.curve.rows):
            return []
        times = [float(row["time"]) for row in self.curve.rows]
        started = self.description.started or 0.0
        before = [each for each in times if each < started]  # of the runs that this one continues
        if not before:
            return [each - (started or times[0]) for each in times]
        pause = started - before[-1]
        return [each - times[0] - pause * (each >= started) for each in times]

    @property
    def seconds(self) -> float | None:
        return self.times[-1] if self.times else None

    @property
    def total_steps(self) -> int:
        return int(total_steps(self.description.hyperparameters) or 0)

    @property
    def configuration(self) -> dict[str, Any]:
        """What two runs may differ in."""
        d, job = self.description, self.job
        names = ("data", "validation", "init_from", "teacher")
        places = {name: getattr(job, name) for name in names}
        return {
            **d.hyperparameters,
            **{name: getattr(job, name) for name in MODEL_CHOICES},
            "instance": d.instance,
            "instance_count": d.instance_count,
            **{name: (at or "").rstrip("/").rpartition("/")[2] for name, at in places.items()},
            "script": (job.source_sha256 or "")[:12],
        }


@dataclass(frozen=True)
class Report:
    """Runs, the best first. differing names what sets them apart; per_byte says that bits per byte
    replace the losses, which two tokenizers count per different tokens."""

    runs: Sequence[Run]
    differing: Sequence[str]
    per_byte: bool

    @property
    def unit(self) -> str:
        of_tokens = f"loss (nats per {self.runs[0].unit.removesuffix('s')})"
        return "bits per byte" if self.per_byte else of_tokens

    @property
    def title(self) -> str:
        if len(self.runs) == 1:
            return self.runs[0].job.name or self.runs[0].description.job_id
        by = f" by {' and '.join(self.differing)}" if 0 < len(self.differing) <= 2 else ""
        return f"{len(self.runs)} runs{by}"

    @property
    def varied(self) -> list[str]:
        """The hyperparameters to plot the result against: one to four numbers, of three runs."""
        hyperparameters = {*self.runs[0].description.hyperparameters, *MODEL_CHOICES} - {"seed"}
        names = [name for name in self.differing if name in hyperparameters]
        values = [run.configuration.get(name) for run in self.runs for name in names]
        fit = all(type(value) in (int, float) for value in values)
        return names if fit and len(names) <= 4 and len(self.runs) >= 3 else []

    @property
    def shared(self) -> dict[str, Any]:
        """The hyperparameters that all runs have in common."""
        values = [run.description.hyperparameters for run in self.runs]
        different = differences(values)
        return {name: value for name, value in values[0].items() if name not in different}

    @property
    def validated_alike(self) -> bool:
        """Whether all runs have the same text, which two tokenizers store in two places."""
        return len({run.text for run in self.runs}) == 1

    @property
    def over_seeds(self) -> list[Rank]:
        """The configurations with the spread of their losses, if one was run with several seeds."""
        bests = [{"best_loss": run.best.get("val_loss")} for run in self.runs]
        runs = zip(self.runs, bests, strict=True)
        jobs = [replace(run.description, metrics=best) for run, best in runs]
        values = [{name: run.configuration[name] for name in self.differing} for run in self.runs]
        ranks = ranking(jobs, values)
        several = any(len(rank.losses) > 1 for rank in ranks)
        return ranks if several and not self.per_byte else []

    def score(self, run: Run) -> float:
        return float(run.best.get("bits_per_byte" if self.per_byte else "val_loss", math.inf))


def read_runs(job_ids: Sequence[str], settings: Settings) -> list[Run]:
    """Read what is known of some jobs, whether they run or have ended. Leaves out those without a
    curve, and raises ServiceError if none has one."""
    every = [read_run(job_id, settings) for job_id in dict.fromkeys(job_ids)]
    runs = [run for run in every if run.curve.rows]
    for run in every:
        problem = f"job {run.curve.job_id} has no curve yet; it is {run.description.state}"
        if not runs:
            raise ServiceError(problem)
        if not run.curve.rows:
            logger.info(f"{problem}, and left out")
    priced = with_costs([run.description for run in runs], settings)
    return [replace(run, description=d) for run, d in zip(runs, priced, strict=True)]


def read_run(job_id: str, settings: Settings) -> Run:
    backend, description = find(job_id, settings)
    rows, source = backend.curve(job_id)
    log, job = list(backend.logs(job_id, follow=False)), backend.job(job_id)
    return Run(
        description=description,
        job=job,
        curve=Curve(job_id, source, rows, samples_of_log(log)),
        log=log,
        data=known_upload(job.data, settings),
        validation=known_upload(job.validation, settings),
        judged=saved_evaluations(job_id, settings),
    )


def compare(runs: Sequence[Run]) -> Report:
    """Rank the runs, and name each by its id and what sets it apart."""
    set_by_model = hyperparameters_of_models(runs)
    differing = differences([run.configuration for run in runs])
    differing = [name for name in differing if name not in set_by_model]
    report = Report(runs, differing, len({run.tokenizer for run in runs}) > 1)
    ranked = sorted(runs, key=report.score)
    named = []
    for run in ranked:
        apart = [f"{name} {plain(run.configuration.get(name))}" for name in differing]
        label = ", ".join([run.short_name, *(apart if len(apart) <= 2 else [])])
        named.append(replace(run, label=label))
    return replace(report, runs=named)


def hyperparameters_of_models(runs: Sequence[Run]) -> set[str]:
    """The hyperparameters that differ only because the runs are of several sizes, or of several
    presets: those that no run sets besides, by its summary."""
    jobs = [run.job for run in runs]
    for choice in MODEL_CHOICES:
        values = {getattr(job, choice) for job in jobs}
        if len(values) < 2 or None in values or not all(job.summary for job in jobs):
            continue
        explicit = {name for job in jobs for name in re.findall(r"(\w+)=", job.summary)}
        return {*runs[0].description.hyperparameters} - explicit
    return set()


def plain(value: Any) -> str:
    return "-" if value in (None, "") else format_value(value)
