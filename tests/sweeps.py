"""Records of sweeps, and of their jobs."""

from __future__ import annotations

from typing import Any

from sm_nanogpt import Settings
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.groups.sweep import Sweep, SweepLedger

GROUP = "sm-nanogpt-20260101-000000-abcdef"


def described(job_id: str, status: str = "Completed", **values: Any) -> JobDescription:
    loss = values.pop("best_loss", None)
    metrics = None if loss is None else {"best_loss": loss}
    return JobDescription(
        job_id, status, status, "local", 1, 0.0, "", hyperparameters=values, metrics=metrics
    )


def record(sweep: Sweep, settings: Settings) -> None:
    """Write that a sweep was launched from this machine."""
    SweepLedger(GROUP, settings).record(sweep)
