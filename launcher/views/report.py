"""Read the facts of a report about runs: their curves, settings, texts, machines, and costs."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sm_nanogpt.launcher.backends import backend_class
from sm_nanogpt.launcher.curve import Curve, Row, samples_of_log, total_steps
from sm_nanogpt.launcher.description import JobDescription, end_of
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.finding import find
from sm_nanogpt.launcher.groups.ranking import Rank, ranking, varied_names
from sm_nanogpt.launcher.groups.sweep import MODEL_CHOICES
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.judge.evaluation import Evaluation, saved_evaluations
from sm_nanogpt.launcher.launching.summary import format_value
from sm_nanogpt.launcher.locations import last_part
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.store import Upload, known_upload
from sm_nanogpt.launcher.tracking import with_costs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReportedRun:
    """The facts about a job."""

    description: JobDescription
    job: TrainingJob
    curve: Curve
    log: Sequence[str] = ()
    data: Upload | None = None
    validation: Upload | None = None
    evaluations: Sequence[Evaluation] = ()
    label: str = ""

    @property
    def short_name(self) -> str:
        """The name of the job, or, without one, the end of its id."""
        return self.job.name or end_of(self.description.job_id)

    @property
    def has_image(self) -> bool:
        """True if the job ran in a container image, as on SageMaker."""
        return backend_class(self.description.instance).takes_field("image_uri")

    def logged(self, pattern: str) -> str:
        """Find the first line of the log that matches a pattern; return its first group, or ''."""
        for line in self.log:
            match = re.match(pattern, line)
            if match:
                return match[1]
        return ""

    @property
    def evaluation_facts(self) -> dict[str, list[str]]:
        """A row of the table of evaluations by its heading: the fact of each evaluation, or '-'."""
        facts = [evaluation.facts() for evaluation in self.evaluations]
        headings = dict.fromkeys(heading for row in facts for heading in row)
        return {heading: [row.get(heading, "-") for row in facts] for heading in headings}

    @property
    def unit(self) -> str:
        """The unit in which the run counts its text, such as characters or tokens."""
        return self.logged(r"[\d,]+ parameters; [\d,]+ (\w+) to train on") or "characters"

    @property
    def tokenizer(self) -> str:
        if self.data and self.data.tokenizer:
            return self.data.tokenizer
        return self.unit

    @property
    def validation_text(self) -> object:
        """What tells validation texts apart: the length, or, if that is unknown, the location.

        With two tokenizers, the same text is stored in two locations.
        """
        upload = self.validation if self.job.validation else self.data
        if upload is not None:
            return upload.characters
        return self.job.validation or self.job.data

    @property
    def evaluation_rows(self) -> list[Row]:
        return [row for row in self.curve.rows if "val_loss" in row]

    @property
    def best(self) -> Row:
        """The row of the lowest validation loss; empty before the first evaluation."""
        return min(self.evaluation_rows, key=lambda row: row["val_loss"], default={})

    @property
    def step(self) -> int:
        return int(self.curve.rows[-1]["step"])

    @property
    def tokens_per_step(self) -> int:
        values = self.description.hyperparameters
        return int(values["batch_size"] * values["block_size"])

    @property
    def times(self) -> list[float]:
        """The time of each row, in seconds since the start of the run; [] if a row has no time.

        A resumed run starts with the first row of the earlier run. The pause between them does not
        count.
        """
        if not all("time" in row for row in self.curve.rows):
            return []
        times = [float(row["time"]) for row in self.curve.rows]
        started = self.description.started or 0.0
        earlier_times = [time for time in times if time < started]
        if not earlier_times:
            origin = started or times[0]
            return [time - origin for time in times]

        pause = started - earlier_times[-1]
        own_times = [time - pause for time in times if time >= started]
        return [time - times[0] for time in earlier_times + own_times]

    @property
    def seconds(self) -> float | None:
        return self.times[-1] if self.times else None

    @property
    def total_steps(self) -> int:
        return int(total_steps(self.description.hyperparameters) or 0)

    @property
    def generations(self) -> int:
        return int(self.description.hyperparameters.get("generations", 1))

    @property
    def configuration(self) -> dict[str, Any]:
        """The values in which two runs may differ, by name."""
        configuration = dict(self.description.hyperparameters)
        for name in MODEL_CHOICES:
            configuration[name] = getattr(self.job, name)
        configuration["instance"] = self.description.instance
        configuration["instance_count"] = self.description.instance_count
        for name in ("data", "validation", "init_from", "teacher"):
            location = getattr(self.job, name) or ""
            configuration[name] = last_part(location)
        configuration["script"] = (self.job.source_sha256 or "")[:12]
        return configuration


@dataclass(frozen=True)
class Report:
    """Runs, the best first, and the names of the values that differ between them.

    per_byte is True if the runs have several tokenizers: their losses, which are per token, do not
    compare, so the report has bits per byte.
    """

    runs: Sequence[ReportedRun]
    differing: Sequence[str]
    per_byte: bool

    @property
    def unit(self) -> str:
        if self.per_byte:
            return "bits per byte"
        return f"loss (nats per {self.runs[0].unit.removesuffix('s')})"

    @property
    def title(self) -> str:
        if len(self.runs) == 1:
            return self.runs[0].job.name or self.runs[0].description.job_id
        title = f"{len(self.runs)} runs"
        if 0 < len(self.differing) <= 2:
            title += f" by {' and '.join(self.differing)}"
        return title

    @property
    def varied(self) -> list[str]:
        """The hyperparameters for which a plot shows the result against their values.

        They are at most four, and all numbers. Fewer than three runs have no such plot.
        """
        hyperparameters = {*self.runs[0].description.hyperparameters, *MODEL_CHOICES} - {"seed"}
        names = [name for name in self.differing if name in hyperparameters]
        if len(names) > 4 or len(self.runs) < 3:
            return []
        for run in self.runs:
            if any(type(run.configuration.get(name)) not in (int, float) for name in names):
                return []
        return names

    @property
    def shared(self) -> dict[str, Any]:
        """The hyperparameters whose values all runs share."""
        values = [run.description.hyperparameters for run in self.runs]
        different = varied_names(values)
        return {name: value for name, value in values[0].items() if name not in different}

    @property
    def validated_alike(self) -> bool:
        """True if all runs have the same validation text."""
        return len({run.validation_text for run in self.runs}) == 1

    @property
    def over_seeds(self) -> list[Rank]:
        """The configurations, each with all its losses; [] if each was run with one seed.

        Also [] if the runs have several tokenizers, so that losses do not compare.
        """
        if self.per_byte:
            return []
        jobs = []
        configurations = []
        for run in self.runs:
            metrics = {"best_loss": run.best.get("val_loss")}
            jobs.append(replace(run.description, metrics=metrics))
            configurations.append({name: run.configuration[name] for name in self.differing})
        ranks = ranking(jobs, configurations)
        has_seeds = any(len(rank.losses) > 1 for rank in ranks)
        return ranks if has_seeds else []

    def score(self, run: ReportedRun) -> float:
        """The best result of a run, in `unit`; infinite before its first evaluation."""
        name = "bits_per_byte" if self.per_byte else "val_loss"
        return float(run.best.get(name, math.inf))


def read_runs(job_ids: Sequence[str], settings: Settings) -> list[ReportedRun]:
    """Read the facts about some jobs, which may still run, with their costs.

    Jobs without a curve are left out, and logged. Raises ServiceError if no job has a curve.
    """
    runs = []
    problems = []  # of the jobs without a curve
    for job_id in dict.fromkeys(job_ids):
        run = read_run(job_id, settings)
        if run.curve.rows:
            runs.append(run)
        else:
            problems.append(f"job {job_id} has no curve yet; it is {run.description.state}")
    if problems and not runs:
        raise ServiceError(problems[0])
    for problem in problems:
        logger.info(f"{problem}, and left out")
    descriptions = with_costs([run.description for run in runs], settings)
    return [replace(run, description=d) for run, d in zip(runs, descriptions, strict=True)]


def read_run(job_id: str, settings: Settings) -> ReportedRun:
    """Read the facts about a job. Its curve may have no rows."""
    backend, description = find(job_id, settings)
    rows, source = backend.curve(job_id)
    log = list(backend.logs(job_id, follow=False))
    job = backend.job(job_id)
    return ReportedRun(
        description=description,
        job=job,
        curve=Curve(job_id, source, rows, samples_of_log(log)),
        log=log,
        data=known_upload(job.data, settings),
        validation=known_upload(job.validation, settings),
        evaluations=saved_evaluations(job_id, settings),
    )


def compare(runs: Sequence[ReportedRun]) -> Report:
    """Rank the runs.

    The label of each is its name, with the end of its id if runs share the name, and up to two
    values that differ.
    """
    set_by_model = hyperparameters_of_models(runs)
    differing = varied_names([run.configuration for run in runs])
    differing = [name for name in differing if name not in set_by_model]
    tokenizers = {run.tokenizer for run in runs}
    report = Report(runs, differing, per_byte=len(tokenizers) > 1)
    n_runs_of = Counter(run.short_name for run in runs)
    labeled = []
    for run in sorted(runs, key=report.score):
        label = run.short_name
        if n_runs_of[label] > 1:
            label += f" {end_of(run.description.job_id)}"
        if len(differing) <= 2:
            for name in differing:
                label += f", {name} {value_text(run.configuration.get(name))}"
        labeled.append(replace(run, label=label))
    return replace(report, runs=labeled)


def hyperparameters_of_models(runs: Sequence[ReportedRun]) -> set[str]:
    """Return the hyperparameters that differ only because the size or the preset differs.

    These are all that no run sets itself, according to the summaries. Empty if size and preset are
    the same.
    """
    jobs = [run.job for run in runs]
    for choice in MODEL_CHOICES:
        values = {getattr(job, choice) for job in jobs}
        if len(values) < 2 or None in values or not all(job.summary for job in jobs):
            continue
        names = set(runs[0].description.hyperparameters)
        for job in jobs:
            names -= set(re.findall(r"(\w+)=", job.summary))
        return names
    return set()


def value_text(value: Any) -> str:
    """A value of a configuration as text; "-" if there is none."""
    return "-" if value in (None, "") else format_value(value)
