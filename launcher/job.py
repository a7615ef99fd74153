"""What to run, as plain validated data; not how."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from launcher.errors import InputError

Scalar = bool | int | float | str


class TrainingJob(BaseModel):
    """One training.

    hyperparameters go over those of the preset; both are held against the training script's own
    Config, by `config()`, so a launch and the container refuse the same things in the same words.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    instance: str = "local"
    instance_count: int = Field(default=1, ge=1, le=100)
    processes_per_instance: int | None = Field(default=None, ge=1, le=1024)
    data: str | None = None  # URI or path; None: the last upload
    validation: str | None = None
    preset: str | None = None
    hyperparameters: dict[str, Scalar] = Field(default_factory=dict)
    entry_point: Path | None = None  # None: the script of this package
    resume: str | None = None  # id of the job whose checkpoints this one goes on from

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name, *inner = (str(part) for part in first["loc"])
            if name == "hyperparameters" and inner:
                value = values[name][inner[0]]
                raise InputError(
                    f"{inner[0]}={value!r}: must be a number, true, false or text"
                ) from None
            raise InputError(f"{name}={first['input']!r}: {first['msg']}") from None

    @property
    def script(self) -> Path:
        """The file that trains."""
        if self.entry_point is not None:
            return self.entry_point
        spec = importlib.util.find_spec("entry_point.train")
        assert spec is not None
        assert spec.origin is not None
        return Path(spec.origin)

    def script_module(self) -> ModuleType:
        """The training script as a module; importing it runs nothing.

        Raises:
            InputError: the entry point is not a copy of train.py.
        """
        if self.entry_point is None:
            from entry_point import train

            return train
        spec = importlib.util.spec_from_file_location("user_train", self.entry_point)
        if spec is None or spec.loader is None:
            raise InputError(f"{self.entry_point}: not a Python file (*.py)")
        module = importlib.util.module_from_spec(spec)
        try:
            sys.modules[spec.name] = module  # dataclasses look their module up there
            with contextlib.redirect_stdout(sys.stderr):
                spec.loader.exec_module(module)
            _ = module.make_config, module.PRESETS
        except FileNotFoundError:
            raise InputError(f"{self.entry_point}: no such file") from None
        except AttributeError as error:
            raise InputError(
                f"{self.entry_point}: not an edited copy of train.py ({error})"
            ) from None
        except SyntaxError as error:
            raise InputError(f"{self.entry_point}: {error}") from None
        except (Exception, SystemExit) as error:
            raise InputError(
                f"{self.entry_point}: cannot be imported ({type(error).__name__}: {error})"
            ) from None
        return module

    def explicit_hyperparameters(self) -> dict[str, Scalar]:
        """What is sent: the preset's values and those given over them, under the fields' names."""
        config = self.config(1)
        given = {
            name.replace("-", "_"): value
            for name, value in self.hyperparameters.items()
            if value != ""
        }
        preset = self.script_module().PRESETS[self.preset] if self.preset else {}
        return {name: getattr(config, name) for name in {**preset, **given}}

    def config(self, world_size: int) -> Any:
        """The script's Config of this job.

        Raises:
            InputError: an unknown or impossible hyperparameter, or a batch that world_size
                processes cannot share.
        """
        module = self.script_module()
        try:
            config = module.make_config(self.hyperparameters, self.preset)
            config.check_world_size(world_size)
        except module.ConfigError as error:
            raise InputError(str(error)) from None
        return config

    def check_resumable(self, before: TrainingJob, step: int) -> None:
        """Raises InputError unless this job can go on from `before`, which came to `step`."""
        module = self.script_module()
        jobs = [
            {"config": asdict(job.config(1)), "corpus_sha256": (job.data, job.validation)}
            for job in (before, self)
        ]
        try:
            module.check_resumable(*jobs)
        except module.CheckpointError as error:
            raise InputError(str(error)) from None
        max_steps = self.config(1).max_steps
        if step > max_steps:
            raise InputError(f"max_steps={max_steps}: the earlier job came to step {step} already")


def read_hyperparameters(file: Path) -> dict[str, Scalar]:
    """Hyperparameters from a TOML file of `name = value` lines.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: not TOML: {error}") from None


def parse_assignments(words: tuple[str, ...]) -> dict[str, str]:
    """{'n_layer': '6'} of ('n_layer=6',), as `--set` takes them."""
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise InputError(f"--set {word}: must be name=value")
        name = name.replace("-", "_")
        if name in values:
            raise InputError(f"--set {name}: given twice ({values[name]!r} and {value!r})")
        values[name] = value
    return values


def command_line(hyperparameters: Mapping[str, Scalar]) -> list[str]:
    """argv as the SageMaker toolkit makes it: sorted by name, each value as text."""
    return [
        word
        for name in sorted(hyperparameters)
        for word in (f"--{name}", str(hyperparameters[name]))
    ]
