"""A job in a few words, as the column SETTINGS of `jobs` has it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import asdict, fields
from typing import Any

from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.launching import start


def summary_of(job: TrainingJob, explicit: Set[str] = frozenset()) -> str:
    """The size and the explicit hyperparameters, or a preset and what differs from it; whether the
    training folder is edited; and which models and which job it continues.

    Without a preset, it is the one from which the least differs. Hyperparameters that an initial
    model prescribes are left out.
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


def shown_values(job: TrainingJob) -> dict[str, Any]:
    """The hyperparameters of a job that say something about it."""
    hidden = {"device"}  # which differs by machine
    if job.init_from is not None:
        config_fields = fields(job.source.module("config").Config)
        hidden |= {field.name for field in config_fields if field.metadata["shape"]}
    values = asdict(job.config(world_size=1))
    return {name: value for name, value in values.items() if name not in hidden}


def changes_of(job: TrainingJob) -> list[str]:
    """The preset and what differs from it, in as few words as possible."""
    if job.preset or job.init_from is not None:
        return differences_from(job.preset or "", job)
    presets = job.source.module("presets").PRESETS
    return min([differences_from(preset, job) for preset in presets], key=len)


def differences_from(preset: str, job: TrainingJob) -> list[str]:
    """The name of a preset, and those of a job's values that differ from it."""
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
    """A value as `--set` takes it, as short as possible."""
    return f"{value:g}" if isinstance(value, float) else str(value)
