"""Processes that this one starts: how Python is called, on which GPUs, and how one ended.

Needs only the standard library, since the process that confines a program imports it.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path


def python_command(module: str, *arguments: object) -> list[str]:
    """The command of a process that calls `main` of a module of the launcher with these arguments.

    It imports the launcher from the same directory as this process, and nothing else of it. It
    imports nothing of the current directory, where a user may have a random.py.
    """
    root = str(Path(__file__).parents[2].absolute())
    start = (
        "import sys; sys.path.insert(0, sys.argv.pop()); import launcher, entry_point;"
        f" del sys.path[0]; from {module} import main; main(*sys.argv[1:])"
    )
    return [sys.executable, "-P", "-c", start, *map(str, arguments), root]


def how_it_ended(status: int) -> str:
    """`ended with exit code 1`, or by which signal; only SIGKILL makes one ask about memory."""
    if status >= 0:
        return f"ended with exit code {status}"
    name = f"signal {-status}"
    with suppress(ValueError):  # a real-time signal has no name
        name = signal.Signals(-status).name
    question = " (was there too little memory?)" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{question}"


def visible_gpus(count: int) -> list[str]:
    """The first `count` GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES.

    These are numbers, or the UUIDs of GPUs or of their parts. Without the variable, the numbers
    begin at 0.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [name.strip() for name in names if name.strip()]
    return names[:count] or [str(number) for number in range(count)]
