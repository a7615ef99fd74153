"""Errors and the log. The last line is `ErrorName: cause`: SageMaker shows it as the reason."""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


class TrainingError(Exception):
    """A failure that the user can act on."""


class ConfigError(TrainingError):
    """A hyperparameter or option is unknown, impossible, or differs from the checkpoint's."""


class DataError(TrainingError):
    """The text is missing, unreadable or too short."""


class FormatError(TrainingError):
    """A file is damaged, truncated or of another kind."""


def failure_report(error: BaseException) -> str:
    """The text to print for an error. Its last line is `ErrorName: cause`.

    SageMaker's toolkit takes the failure reason from the first line that names an exception it
    knows. There the frames of an unexpected error come without their source text.
    """
    toolkit = "SM_FRAMEWORK_MODULE" in os.environ
    cause = " ".join(str(error).split()) or "no message"
    line = f"{type(error).__name__}: {cause}"
    # SageMaker's toolkit knows only the names of Python's own errors.
    builtin = next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")
    if toolkit and builtin not in line:
        line += f" [{builtin}]"
    if isinstance(error, (TrainingError, BrokenPipeError)):
        return line
    if not toolkit:
        return "".join(traceback.format_tb(error.__traceback__)) + line
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        lines.append(f"  at {Path(frame.filename).name}:{frame.lineno} in {frame.name}")
    return "\n".join([*lines, line])


def report_failure(failure: str) -> None:
    """Prints a failure_report, and leaves its last line where SageMaker reads the reason.

    Only the first rank to fail writes there; the others may fail because of it.
    """
    if "SM_CURRENT_HOST" in os.environ:
        path = Path(os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml") / "output/failure"
        with suppress(OSError), path.open("x", errors="backslashreplace") as file:
            file.write(failure.rpartition("\n")[2])
    sys.stderr.write(failure + "\n")
    sys.stderr.flush()


def is_out_of_memory(error: Exception) -> bool:
    """CUDA raises a class of its own; CPUs and MPS only have a message."""
    messages = "out of memory|can't allocate memory|ALLOC_FAILED"
    return isinstance(error, MemoryError) or bool(re.search(messages, str(error)))


def log(line: str) -> None:
    """Writes one line of the log in one write, so that lines of several ranks do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def first_line(error: BaseException) -> str:
    text = str(error).strip() or repr(error)
    return text.splitlines()[0]


def counted(n: int, word: str) -> str:
    """'1 host', '2 hosts', '2,000 processes'."""
    if n == 1:
        return f"{n} {word}"
    if word.endswith("s"):
        return f"{n:,} {word}es"
    return f"{n:,} {word}s"


def os_reason(error: OSError) -> str:
    """Why the system refused, as a part of a sentence: `no such file or directory`."""
    reason = error.strerror or str(error)
    if reason[1:2].islower():  # no abbreviation
        reason = reason[0].lower() + reason[1:]
    return reason


def nearest_name(name: str, names: Sequence[str]) -> str:
    """What to say of a name that is none of these.

    '; did you mean X?' for the initials of X, or a slip in it; else for up to three names that are
    a little like it; else ''.
    """
    by_initials = {initials(other): other for other in names}
    if name in by_initials:
        matches = [by_initials[name]]
    else:
        matches = difflib.get_close_matches(name, names, 1, 0.8)
    if not matches:
        matches = difflib.get_close_matches(name, names)
    if not matches:
        return ""
    return f"; did you mean {' or '.join(matches)}?"


def initials(name: str) -> str:
    """`lr` of learning_rate."""
    return "".join(word[:1] for word in name.split("_"))
