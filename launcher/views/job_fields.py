"""The table of the fields of a job. `jobs`, `status`, JSON, the card, and the progress bar read it.

A new field is a row of FIELDS. If COLUMNS names it, `jobs` has a column for it, and docs/aws.md a
row. If HIDDEN_IF_NARROW also names it, a narrow terminal does not show the column.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sm_nanogpt.entry_point.metrics import duration
from sm_nanogpt.launcher.curve import seconds_left, total_steps
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.instances import has_local_disks
from sm_nanogpt.launcher.locations import last_part
from sm_nanogpt.launcher.sagemaker.cost import usd

Text = Callable[[JobDescription], str | None]  # None: the value is unknown or does not apply


@dataclass(frozen=True)
class JobField:
    """A fact about a job.

    key is its name in JSON, and label its name in `status` and on the card. `text` gives its value
    as text; by default, that is the field `key` of JobDescription. In a column of jobs, the heading
    is `heading`, by default the label in capital letters, and `cell` gives the cells, by default
    the text. `value` gives the value for JSON, if that is no field of JobDescription.
    """

    key: str
    label: str
    text: Text | None = None
    cell: Text | None = None
    value: Callable[[JobDescription], object] | None = None
    heading: str = ""

    @property
    def column(self) -> str:
        """The heading of the column of this field."""
        return self.heading or self.label.upper()

    def text_of(self, job: JobDescription) -> str | None:
        if self.text is not None:
            return self.text(job)
        text: str | None = getattr(job, self.key)
        return text


# -- texts -----------------------------------------------------------------------------------------


def instance_text(job: JobDescription) -> str:
    if job.instance_count > 1:
        return f"{job.instance_count} x {job.instance}"
    return job.instance


def data_name(job: JobDescription) -> str:
    """The last part of the URI of the job's text."""
    return last_part(job.data)


def step_text(job: JobDescription) -> str | None:
    """The newest step, and the planned number of steps.

    The newest step may be that of a checkpoint: a job that is stopped writes one, and no row of its
    curve.
    """
    metrics = job.metrics or {}
    steps = [metrics.get("step"), job.checkpoint_step]
    known_steps = [step for step in steps if step is not None]
    if not known_steps:
        return None
    return f"{max(known_steps):.0f}/{total_steps(job.hyperparameters)}"


def four_digits(number: float | None) -> str | None:
    return None if number is None else f"{number:.4f}"


def forecast_text(job: JobDescription) -> str | None:
    return None if job.expected is None else str(job.expected)


def speed_text(job: JobDescription) -> str | None:
    tokens_per_second = (job.metrics or {}).get("tokens_per_second")
    return f"{tokens_per_second:,.0f}" if tokens_per_second else None


def time_left(job: JobDescription) -> float | None:
    """The seconds until the last step of a running job, at its present speed; None for others."""
    if not job.is_running:
        return None
    return seconds_left(job.metrics or {}, job.hyperparameters)


def time_left_text(job: JobDescription) -> str | None:
    seconds = time_left(job)
    return None if seconds is None else duration(seconds)


def billable_text(job: JobDescription) -> str | None:
    """The seconds that are billed, and, for a spot job, the share that it saved."""
    if job.billable_seconds is None:
        return None
    text = f"{job.billable_seconds} s"
    if job.spot and job.billable_seconds and job.training_seconds:
        saved = 1 - job.billable_seconds / job.training_seconds
        text += f", {saved:.0%} saved by spot"
    return text


def short_cost(job: JobDescription) -> str | None:
    return None if job.cost is None else usd(job.cost)


def cost_text(job: JobDescription) -> str | None:
    """The cost of a job, and the price by which it was computed."""
    if job.cost is None or job.price is None:
        return None
    note = ""
    if job.has_open_pool(time.time()):
        note = f" so far, including all {job.keep_alive} s of its warm pool"
    elif job.is_running:
        note = " so far (estimated)"
    disk = "" if has_local_disks(job.instance) else " plus its disk"
    price = f"{usd(job.price.per_hour)} per instance and hour{disk} ({job.price.source})"
    return f"{usd(job.cost)}{note}, at {price}"


def service_message(job: JobDescription) -> str | None:
    return job.message if job.is_running else None


# -- the table -------------------------------------------------------------------------------------

FIELDS = (
    JobField("job_id", "job", heading="JOB-ID"),
    JobField("name", "name"),
    JobField("owner", "owner"),
    JobField("summary", "settings"),
    JobField("search", "search"),
    JobField("status", "state", lambda job: job.state, cell=lambda job: job.status),
    JobField("failure_reason", "reason"),
    JobField("instance", "instance", instance_text),
    JobField("data", "data", cell=data_name),
    JobField("step", "step", step_text),
    JobField(
        "best_loss",
        "best loss",
        lambda job: four_digits(job.best_loss),
        value=lambda job: job.best_loss,
    ),
    JobField("expected", "forecast", forecast_text),
    JobField(
        "bits_per_byte",
        "bits/byte",
        lambda job: four_digits(job.best_bits_per_byte),
        value=lambda job: job.best_bits_per_byte,
    ),
    JobField("tokens_per_second", "tokens/s", speed_text),
    JobField("seconds_left", "time left", time_left_text, value=time_left),
    JobField("model_uri", "model"),
    JobField("checkpoint_uri", "checkpoints"),
    JobField("billable_seconds", "billable", billable_text),
    JobField("cost", "cost", cost_text, cell=short_cost),
    JobField("message", "message", service_message),
)

# The columns of a list of jobs, by the keys of their fields, from left to right.
COLUMNS = (
    "job_id",
    "name",
    "owner",
    "status",
    "instance",
    "step",
    "best_loss",
    "bits_per_byte",
    "cost",
    "data",
    "summary",
)
# The columns that a narrow terminal does not show, in the order in which they are left out.
HIDDEN_IF_NARROW = ("bits_per_byte", "data", "instance", "cost", "step")
BY_KEY = {field.key: field for field in FIELDS}


def texts_of(job: JobDescription) -> dict[str, str | None]:
    """The texts of a job's fields, by label; None for a field that is unknown."""
    return {field.label: field.text_of(job) for field in FIELDS}


def columns_of(
    jobs: Sequence[JobDescription], keys: Sequence[str] = COLUMNS
) -> dict[str, list[str | None]]:
    """The cells of a table of jobs, by the headings of its columns."""
    columns = {}
    for key in keys:
        field = BY_KEY[key]
        cell = field.cell or field.text_of
        columns[field.column] = [cell(job) for job in jobs]
    return columns


def json_fields_of(job: JobDescription) -> dict[str, Any]:
    """A job as JSON has it: the fields of its description, and the values of the table."""
    data = asdict(job)
    for field in FIELDS:
        if field.value is not None:
            data[field.key] = field.value(job)
    return data
