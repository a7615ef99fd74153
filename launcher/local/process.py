"""Start processes, call Python in one, and describe how a process ended.

This module needs only the standard library: the process that confines a program imports it.
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
END_SECONDS = 5  # in which a process has to end after the program that it runs


def python_command(module: str, *arguments: object) -> list[str]:
    """Return the command that calls `main` of a module of the launcher with these arguments.

    The new process imports the launcher from the directory from which this one did, and nothing
    else from there, and nothing from the current directory, where a user may have a random.py.
    """
    root = str(Path(__file__).parents[3].absolute())
    start = (
        "import sys; sys.path.insert(0, sys.argv.pop()); import sm_nanogpt;"
        f" del sys.path[0]; from {module} import main; main(*sys.argv[1:])"
    )
    return [sys.executable, "-P", "-c", start, *map(str, arguments), root]


def describe_status(status: int) -> str:
    """Describe how a process ended: `ended with exit code 1`, or `was killed by SIGKILL`.

    status is its exit code, or minus the number of a signal. After SIGKILL, the text asks about
    memory.
    """
    if status >= 0:
        return f"ended with exit code {status}"
    name = f"signal {-status}"
    with suppress(ValueError):  # a real-time signal has no name
        name = signal.Signals(-status).name
    if name == "SIGKILL":
        return f"was killed by {name} (was there too little memory?)"
    return f"was killed by {name}"


def remove(directory: Path) -> None:
    """Remove the directory of a program, which may be nested deeper than Python can recurse."""
    try:
        shutil.rmtree(directory, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", directory], stderr=subprocess.DEVNULL)


class Program:
    """A program in a session or a process group of its own, which Ctrl-C in the terminal does not
    reach.

    After its end, status is its exit status, or minus the number of the signal that ended it, and
    cpu_seconds is its processor time, with that of the children for which it waited.
    """

    def __init__(self, command: Sequence[str], leads_session: bool = True, **options: Any) -> None:
        self.is_wrapped = command[0] == BWRAP
        group = None if leads_session else 0
        self.process = subprocess.Popen(
            command, start_new_session=leads_session, process_group=group, **options
        )
        self.pid = self.process.pid
        self.output = self.process.stdout
        self.status: int | None = None
        self.cpu_seconds = 0.0

    def has_ended(self, within: float = 0.0) -> bool:
        """Return True if the program has ended, or ends within so many seconds."""
        deadline = time.monotonic() + within
        while self.status is None:
            pid, wait_status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.cpu_seconds = usage.ru_utime + usage.ru_stime
                self.status = os.waitstatus_to_exitcode(wait_status)
                if self.is_wrapped and self.status > 128:  # how bwrap reports a signal
                    self.status = 128 - self.status
                self.process.returncode = self.status
            elif time.monotonic() < deadline:
                time.sleep(0.005)
            else:
                break
        return self.status is not None

    def terminate(self) -> None:
        """Send SIGTERM to the program, without its children, so that it can save."""
        if self.status is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the program, and not to a bwrap that runs it.

        Any thread may call this.
        """
        if self.status is not None:
            return
        if not self.is_wrapped:
            os.killpg(self.pid, signal.SIGKILL)
            return
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        with suppress(OSError):  # bwrap ends after its child, whose processor time it counts
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)

    def end(self) -> None:
        """End the program and its children at once, and wait until they have ended."""
        if self.is_wrapped and not self.has_ended():
            self.kill()
            self.has_ended(END_SECONDS)
        if not self.has_ended():
            os.killpg(self.pid, signal.SIGKILL)
            self.has_ended(END_SECONDS)
