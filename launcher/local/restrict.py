"""The process that a sandbox starts: it restricts itself, and becomes the program."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys

from launcher.local import landlock, syscalls


def main(limits: str, *command: str) -> None:
    """Become the command, with what `confined` of launcher.local.confine allows. Raises OSError."""
    allowed = json.loads(limits)
    call_filter = syscalls.call_filter(allowed["may_fork"]) if allowed["filters"] else None
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        library.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if allowed["parent"] not in (None, os.getppid()):
        sys.exit("the process that started this one has ended")
    os.chdir(allowed["directory"])
    if allowed["cpu_seconds"] is not None:
        limit = allowed["cpu_seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    if allowed["listable"] is not None:
        rights = {
            landlock.LIST: allowed["listable"],
            landlock.READ: allowed["readable"],
            landlock.WRITE: allowed["writable"],
        }
        landlock.restrict(library, rights)
    if call_filter is not None:
        call_filter.load()
    os.execv(command[0], command)
