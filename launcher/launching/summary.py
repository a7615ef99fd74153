"""Summarize a job in a few words, for the column SETTINGS of `jobs`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import asdict, fields
from typing import Any

from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.launching import start

SIZE = re.compile(r"size (\d+(\.\d+)?)")  # how a summary begins if the job has a size


def summary_of(job: TrainingJob, explicit: Set[str] = frozenset()) -> str:
    """Summarize a job: its size and the explicit hyperparameters, or its preset and the values that
    differ from it; whether its training folder is edited; and the models and the job that it
    continues.

    If the job has no preset, the one with the fewest differences is named. Hyperparameters that an
    initial model prescribes are left out.
    """
    if job.size:
        values = shown_values(job)
        names = sorted(values.keys() & explicit)
        parts = [f"size {job.size:g}", *assignments(values, names)]
    else:
        parts = changes_of(job)
    if not job.source.is_packaged:
        parts.append("edited")
    if job.init_from is not None:
        parts.append(f"from {job.base}")
    if job.teacher is not None:
        parts.append(f"taught by {start.model_name(job.teacher)}")
    if job.resume is not None:
        parts.append(f"resumes {job.resume}")
    return " ".join(parts)


def summary_of_resumed(job: TrainingJob, earlier: TrainingJob) -> str:
    """Summarize a job that resumes an earlier one.

    If that has the hyperparameters of a size, the job has them too, except for those that its
    summary names.
    """
    size = SIZE.match(earlier.summary)
    if size is None:
        return summary_of(job)
    values, earlier_values = shown_values(job), shown_values(earlier)
    names = {word.partition("=")[0] for word in earlier.summary.split() if "=" in word}
    names |= {name for name, value in values.items() if value != earlier_values[name]}
    return summary_of(job.model_copy(update={"size": float(size[1])}), names)


def shown_values(job: TrainingJob) -> dict[str, Any]:
    """The hyperparameters of a job that its summary may name."""
    hidden = {"device"}  # differs between machines
    if job.init_from is not None:
        config_fields = fields(job.source.module("config").Config)
        hidden |= {field.name for field in config_fields if field.metadata["shape"]}
    values = asdict(job.config())
    return {name: value for name, value in values.items() if name not in hidden}


def changes_of(job: TrainingJob) -> list[str]:
    """The preset, and the values that differ from it. Without a preset, that with the fewest."""
    if job.preset or job.init_from is not None:
        return differences_from(job.preset or "", job)
    presets = job.source.module("presets").PRESETS
    return min([differences_from(preset, job) for preset in presets], key=len)


def differences_from(preset: str, job: TrainingJob) -> list[str]:
    """The name of a preset, and the values of a job that differ from it."""
    values = shown_values(job)
    presets = job.source.module("presets").PRESETS
    defaults = asdict(job.source.module("config").Config())
    defaults |= presets.get(preset, {})
    if job.init_from is not None:
        defaults |= job.source.module("huggingface").FINE_TUNING
    changed = [name for name, value in values.items() if defaults[name] != value]
    changes = assignments(values, changed)
    return [preset, *changes] if preset else changes


def assignments(values: Mapping[str, Any], names: list[str]) -> list[str]:
    return [f"{name}={format_value(values[name])}" for name in names]


def format_value(value: Any) -> str:
    """A value in the shortest form that `--set` takes."""
    return f"{value:g}" if isinstance(value, float) else str(value)
