"""What a job is, in words that `jobs`, `status` and reports show."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from launcher.job import TrainingJob


def summary_of(job: TrainingJob) -> str:
    """The preset, or else the nearest one, the hyperparameters that differ from it, whether the
    training folder is edited, and which model and which job it continues.

    Hyperparameters that an initial model prescribes are left out.
    """
    source, hidden = job.source, {"device"}  # which differs by machine
    module, base = source.module("config"), dict[str, Any]()
    presets = [job.preset] if job.preset else list(module.PRESETS)
    if job.init_from is not None:
        base = source.module("huggingface").FINE_TUNING
        hidden |= {f.name for f in fields(module.Config) if f.metadata["shape"]}
        presets = [job.preset or ""]
    values = {name: v for name, v in asdict(job.config(1)).items() if name not in hidden}

    def words(preset: str) -> list[str]:
        usual = {**asdict(module.Config()), **module.PRESETS.get(preset, {}), **base}
        changed = [f"{name}={shortest(v)}" for name, v in values.items() if usual[name] != v]
        return [*([preset] if preset else []), *changed]

    found = min(map(words, presets), key=len)
    found += [] if source.is_packaged else ["edited"]
    found += [f"from {job.base}"] if job.init_from is not None else []
    found += [f"resumes {job.resume}"] if job.resume is not None else []
    return " ".join(found)


def shortest(value: Any) -> str:
    """A value as `--set` takes it."""
    return f"{value:g}" if isinstance(value, float) else str(value)
