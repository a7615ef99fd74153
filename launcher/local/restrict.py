"""The process that a sandbox starts. It restricts itself, and then becomes the program."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys

from sm_nanogpt.launcher.local import landlock, syscalls


def main(limits: str, *command: str) -> None:
    """Become the command, within limits that `confined` of confine.py wrote as JSON.

    Raises OSError if the kernel refuses a limit.
    """
    allowed = json.loads(limits)
    call_filter = None
    if allowed["has_filter"]:
        call_filter = syscalls.call_filter(allowed["may_fork"])
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        library.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    lease = allowed["lease"]
    is_closed = bool(select.select([lease], [], [], 0)[0])
    if is_closed:
        sys.exit("the process that started this one has ended")
    os.close(lease)
    os.chdir(allowed["directory"])
    cpu_seconds = allowed["cpu_seconds"]
    if cpu_seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    if allowed["has_landlock"]:
        rights = {
            landlock.LIST: allowed["listable"],
            landlock.READ: allowed["readable"],
            landlock.WRITE: allowed["writable"],
        }
        landlock.restrict(library, rights)
    if call_filter is not None:
        call_filter.load()
    os.execv(command[0], command)
