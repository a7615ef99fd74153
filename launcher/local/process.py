"""Processes that this one starts: how Python is called, and how one ended.

Needs only the standard library, since the process that confines a program imports it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

BWRAP = "bwrap"  # the program bubblewrap
PATIENCE = 5  # seconds for a process to end after what it runs


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


def remove(directory: Path) -> None:
    """Remove what a program has left, which may be nested deeper than Python's own way can go."""
    try:
        shutil.rmtree(directory, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", directory], stderr=subprocess.DEVNULL)


class Program:
    """A program that leads a session of its own, which Ctrl-C in the terminal does not reach.

    status is its exit status once it has ended, and minus the number of the signal that ended it.
    cpu_seconds is what it has computed, with its children that it has waited for.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.is_wrapped = command[0] == BWRAP
        self.process = subprocess.Popen(command, start_new_session=True, **options)
        self.pid, self.output = self.process.pid, self.process.stdout
        self.status: int | None = None
        self.cpu_seconds = 0.0

    def has_ended(self, within: float = 0.0) -> bool:
        """Whether it has ended, or does within so many seconds."""
        deadline = time.monotonic() + within
        while self.status is None:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.cpu_seconds = used.ru_utime + used.ru_stime
                self.status = os.waitstatus_to_exitcode(status)
                if self.is_wrapped and self.status > 128:  # so bwrap reports a signal
                    self.status = 128 - self.status
                self.process.returncode = self.status
            elif time.monotonic() < deadline:
                time.sleep(0.005)
            else:
                break
        return self.status is not None

    def kill(self) -> None:
        """Send SIGKILL to what it runs, or to itself. Does not wait, so any thread may call it."""
        if self.status is not None:
            return
        if not self.is_wrapped:
            os.killpg(self.pid, signal.SIGKILL)
            return
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        with suppress(OSError):  # bwrap ends after its child, and counts what that computed
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)

    def end(self) -> None:
        """End it, with what it runs, at once."""
        if self.is_wrapped and not self.has_ended():
            self.kill()
            self.has_ended(PATIENCE)
        if not self.has_ended():
            os.killpg(self.pid, signal.SIGKILL)
            self.has_ended(PATIENCE)
