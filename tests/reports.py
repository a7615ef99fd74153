"""Runs that a report compares, without jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sm_nanogpt.launcher.curve import Curve, Row
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.views.report import ReportedRun


def reported_run(
    job_id: str, val_loss: float = 1.0, bits: float = 1.0, unit: str = "characters", **config: Any
) -> ReportedRun:
    """A run with one evaluation."""
    values = {"batch_size": 2, "block_size": 8, "max_steps": 5, **config}
    row = {"step": 5, "train_loss": val_loss, "val_loss": val_loss, "bits_per_byte": bits}
    return ReportedRun(
        JobDescription(job_id, "Completed", "Completed", "local", 1, 0.0, "", values),
        TrainingJob(data="/data"),
        Curve(job_id, "", [row]),
        log=[f"100 parameters; 1,000 {unit} to train on, 100 to validate on, vocabulary 65"],
    )


def with_rows(run: ReportedRun, rows: Sequence[Row], **samples: str) -> ReportedRun:
    """The run with another curve."""
    job_id = run.description.job_id
    return replace(run, curve=Curve(job_id, "", rows, samples))
