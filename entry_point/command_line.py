"""The command line of train.py: its options, and the table of --help. Imports no torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .config import Config, allowed, hyperparameter, read_value
from .errors import ConfigError, nearest_name
from .presets import PRESETS


@dataclass(frozen=True)
class Options:
    """The options besides hyperparameters; in a container, only `processes` and `preset`."""

    data: str = hyperparameter("", "a text file, or a directory of *.txt files")
    validation: str = hyperparameter("", "a text file or directory for validation alone")
    out: str = hyperparameter("", "directory for the results (default: a new one in runs/)")
    init_from: str = hyperparameter(
        "", "directory of a model to start from: ours, or of the Qwen3 family"
    )
    teacher: str = hyperparameter("", "directory of a model of the same tokens to learn from, too")
    resume: str = hyperparameter("", "directory of an earlier run (on every host) to continue")
    processes: int = hyperparameter(
        0, "processes of a host without GPUs (default: 1, or as before)", 1
    )
    preset: str = hyperparameter(
        "", "a set of hyperparameters: " + ", ".join(PRESETS), choices=tuple(PRESETS)
    )
    processes_before: int = 0  # no option: those of the run that --resume continues, on a CPU

    def resumed(self, saved: Mapping[str, Any]) -> Options:
        """The options of a run that continues from a checkpoint's state.

        Raises ConfigError if a script with other hyperparameters wrote it.
        """
        names = {f.name for f in dataclasses.fields(Config)}
        foreign = sorted(saved["config"].keys() - names)
        if foreign:
            raise ConfigError(
                f"{self.resume} was trained by a script with other hyperparameters"
                f" ({', '.join(foreign)}); resume it with that script"
            )
        return dataclasses.replace(
            self,
            data=self.data or saved["data"],
            validation=self.validation or saved["validation"],
            init_from=saved["init_from"],
            teacher=saved.get("teacher", ""),
            processes_before=saved["processes"],
        )


OPTIONS = [f for f in dataclasses.fields(Options) if f.metadata]


def read_arguments(argv: Sequence[str]) -> dict[str, str]:
    """The values on a command line, by name. Names take `-` or `_`; a bare `--flag` is True."""
    types = {f.name: f.type for f in (*OPTIONS, *dataclasses.fields(Config))}
    values: dict[str, str] = {}
    remaining = list(argv)
    while remaining:
        option, equals, value = remaining.pop(0).partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("-"):
            problem = f"there is no such option; name a text with --data {option}"
            raise ConfigError(f"{option}: {problem}")
        if name not in types:
            advice = nearest_name(name.lstrip("_"), [*types]) or "; --help lists them"
            raise ConfigError(f"{option}: there is no such option{advice}")
        if equals:
            values[name] = value
        elif remaining and not remaining[0].startswith("--"):  # it may be a negative number
            values[name] = remaining.pop(0)
        elif types[name] == "bool":
            values[name] = "True"
        else:
            raise ConfigError(f"{option}: its value is missing")
    return values


def read_options(argv: Sequence[str]) -> tuple[dict[str, str], Options]:
    """The hyperparameters given, as text by name, and the options. Raises ConfigError."""
    hyperparameters = read_arguments(argv)
    values = {}
    for f in OPTIONS:
        text = hyperparameters.pop(f.name, "")
        if text:
            values[f.name] = read_value(f, text)
    options = Options(**values)
    if options.resume and (options.init_from or options.teacher or options.out):
        raise ConfigError(
            "--resume continues a run in its own directory: leave out --init-from, --teacher and"
            " --out (to keep the run as it is, resume a copy)"
        )
    return hyperparameters, options


def option_table() -> str:
    """A line for each option and each hyperparameter."""
    lines = [f"  --{f.name:<28} {f.metadata['help']}" for f in OPTIONS]
    return "\n".join(["options:", *lines]) + hyperparameter_table()


ZERO = re.compile(r" \(0: ([^)]*)\)")  # in the help of a field: what the value 0 means


def hyperparameter_table() -> str:
    """A line for each hyperparameter, in groups, with its meaning, range and default."""
    lines = []
    for f in dataclasses.fields(Config):
        if f.metadata["group"]:
            lines += ["", f"hyperparameters of the {f.metadata['group']}:"]
        text = f.metadata["help"]
        default = repr(f.default)
        zero = ZERO.search(text)
        if zero and not f.default:
            text = ZERO.sub("", text)
            default = f"0, which means {zero[1]}"
        text += f"; {allowed(f)}"
        if f.metadata["kept_on_resume"]:
            text += "; --resume keeps it"
        lines.append(f"  --{f.name:<28} {text} (default: {default})")
    return "\n".join(["", *lines])
