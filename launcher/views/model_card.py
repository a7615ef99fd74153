"""Collect what a page says of a model, from its job or from the files beside it."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sm_nanogpt.launcher.backends import LOCAL
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import InputError, LauncherError
from sm_nanogpt.launcher.files.documents import Damaged, parse
from sm_nanogpt.launcher.job import FULL_ID, TrainingJob
from sm_nanogpt.launcher.launching.summary import summary_of
from sm_nanogpt.launcher.models.load import packaged_config
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.tracking import TrackedJob
from sm_nanogpt.launcher.views.job_fields import data_name, texts_of


def job_behind(model: str, directory: Path, settings: Settings) -> JobDescription | None:
    """Find the job that made the model in a directory; None if that fails, or no job made it."""
    for part in (model, *reversed(directory.absolute().parts)):
        if FULL_ID.fullmatch(part):
            with suppress(LauncherError):
                return TrackedJob(part, settings).identify(attempts=2)
    return None


def card_for(directory: Path, job: JobDescription | None) -> dict[str, str]:
    """What a page says of a model, by label: facts of its job, or, without one, its settings."""
    texts: dict[str, str | None]
    if job is None:
        texts = {"settings": summary_in(directory)}
    else:
        date = time.strftime("%Y-%m-%d", time.localtime(job.created))
        texts = texts_of(job) | {"data": data_name(job), "date": date}
    card = {}
    for label in ("data", "settings", "step", "best loss", "bits/byte", "date", "job"):
        text = texts.get(label)
        if text:
            card[label] = text
    return card


def summary_in(directory: Path) -> str:
    """The loss and the settings of the model in a directory; "" for a model of another tool."""
    try:
        training = parse((directory / "training.json").read_bytes(), dict[str, Any], directory)
        loss = f"val_loss {training['val_loss']:.4f} at step {training['step']}"
        values = asdict(packaged_config(training["config"]))
        job = TrainingJob(instance=LOCAL, data=str(directory), hyperparameters=values)
        return f"{loss}; {summary_of(job)}"
    except (OSError, Damaged, KeyError, TypeError, InputError):
        return ""
