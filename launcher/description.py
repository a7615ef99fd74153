"""The state of a job, as a backend describes it, and what of the job is billed."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.instances import Price, types_of
from sm_nanogpt.launcher.job import Expected

logger = logging.getLogger(__name__)

CHECKPOINT = re.compile(r"checkpoint-(\d+)\.safetensors")
ID_BEGINS = re.compile(r"sm-nanogpt-\d{8}-\d{6}-")
STATUSES = ("InProgress", "Stopping", "Completed", "Failed", "Stopped")
RUNNING = STATUSES[:2]


@dataclass(frozen=True)
class JobDescription:
    """The state of a job.

    Moments are in seconds since the epoch. None stands for what is unknown, or does not exist yet.
    A list of jobs on SageMaker does not ask S3, so its descriptions have no checkpoints. But only
    they have names, owners, and summaries.
    """

    job_id: str
    status: str  # one of STATUSES
    secondary_status: str  # what a running job does, or how it ended, in SageMaker's words
    instance: str  # the type; all candidates, separated by commas, until SageMaker chooses one
    instance_count: int
    created: float
    data: str
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    name: str | None = None
    owner: str | None = None  # None for a job on this machine
    summary: str | None = None  # as summary.summary_of says
    search: str | None = None  # the search whose runs it makes, without a model of its own
    expected: Expected | None = None  # the loss that was forecast for it
    page_limit: int | None = None  # bytes that its page may have
    inputs: dict[str, str] = field(default_factory=dict)  # URIs, as TrainingJob.channels has them
    failure_reason: str | None = None
    started: float | None = None
    ended: float | None = None
    metrics: dict[str, Any] | None = None  # the newest values of the training curve
    model_uri: str | None = None
    checkpoint_uri: str | None = None  # on SageMaker also None while the job runs
    checkpoint_step: int | None = None  # of the newest checkpoint
    message: str | None = None  # the service's message for the present state
    billable_seconds: int | None = None  # this field and the next ones: SageMaker only
    training_seconds: int | None = None
    volume_size: int = 0  # GiB of disk per instance
    keep_alive: int | None = None  # seconds of warm pool requested
    warm_pool_seconds: int | None = None  # billed after the job; None until the pool ends
    spot: bool = False
    cost: float | None = None  # USD so far or in total, at `price`
    price: Price | None = None

    @property
    def is_running(self) -> bool:
        return self.status in RUNNING

    @property
    def best_loss(self) -> float | None:
        """The lowest validation loss so far, in nats per token."""
        metrics = self.metrics or {}
        return metrics.get("best_loss", metrics.get("val_loss"))

    @property
    def best_bits_per_byte(self) -> float | None:
        """The lowest validation loss in bits for each byte of text."""
        metrics = self.metrics or {}
        newest_loss = metrics.get("val_loss")
        newest_bits = metrics.get("bits_per_byte")
        if not newest_bits or not newest_loss or not self.best_loss:
            return None
        return float(newest_bits * self.best_loss / newest_loss)

    @property
    def named(self) -> str:
        """The id, with the name if the job has one, for messages."""
        return f"{self.job_id} ({self.name})" if self.name else self.job_id

    @property
    def launched(self) -> tuple[str, float]:
        """A key to sort jobs by their launch. The time in the id comes first: all ids are from the
        clock of a launching machine, while `created` is from the backend's."""
        return time_of(self.job_id), self.created

    @property
    def is_placed(self) -> bool:
        """True if SageMaker has chosen an instance type. Before that, a job costs nothing."""
        return len(types_of(self.instance)) == 1

    @property
    def state(self) -> str:
        """The status, with the more detailed status of the service if that differs."""
        if self.status == self.secondary_status:
            return self.status
        return f"{self.status} ({self.secondary_status})"

    @property
    def may_have_pool(self) -> bool:
        """True if the job may have had a warm pool whose billed seconds are not known."""
        had_machines = bool(self.billable_seconds or self.started)
        keeps_machines = self.ended is not None and self.keep_alive is not None
        return had_machines and keeps_machines and self.warm_pool_seconds is None

    def log_pending(self) -> None:
        logger.info(f"job {self.job_id} is {self.state}: {self.message}")

    def has_open_pool(self, now: float) -> bool:
        """True if the job may have a warm pool at `now`, in seconds since the epoch."""
        return self.may_have_pool and now < (self.ended or 0) + (self.keep_alive or 0)

    def billed_seconds(self, now: float) -> float:
        """The billed seconds of each instance, so far or in total. now: seconds since the epoch.

        What SageMaker has not reported yet is estimated by the clock. A warm pool counts in full. A
        job that failed by an error of AWS gets no pool, so SageMaker never reports one.
        """
        warm = self.warm_pool_seconds or 0
        if self.may_have_pool and (self.status != "Failed" or self.has_open_pool(now)):
            warm = self.keep_alive or 0
        if self.billable_seconds is not None:
            return self.billable_seconds + warm
        if self.started is None:
            return 0.0
        return max(0.0, (self.ended or now) - self.started) + warm


@dataclass(frozen=True)
class UnreadableJob:
    """A job whose record is damaged or of another version, with the error."""

    job_id: str
    error: ServiceError


def time_of(job_id: str) -> str:
    """The start of an id, up to the time of the launch."""
    return job_id[: len("sm-nanogpt-20261125-000000")]


def end_of(job_id: str) -> str:
    """The end of a job's id, which tells it from other ids: 79bf20, or 79bf20-3 in a sweep."""
    return ID_BEGINS.sub("", job_id)


def checkpoints_among(names: Iterable[str]) -> dict[int, str]:
    """The checkpoints among these file names, by step."""
    checkpoints = {}
    for name in names:
        match = CHECKPOINT.fullmatch(name)
        if match is not None:
            checkpoints[int(match[1])] = name
    return checkpoints
