"""Lock files, to show which files a living process uses. A lock ends with its process."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO, Any

from sm_nanogpt.entry_point.errors import os_reason
from sm_nanogpt.entry_point.files import open_file
from sm_nanogpt.launcher.errors import InputError


def lock(file: IO[Any], wait: bool = True, shared: bool = False) -> bool:
    """Lock an open file until it is closed; return False if another process holds its lock.

    wait: wait until no other process holds it. shared: processes with a shared lock may hold it
    together. Raises InputError if the file system has no locks, as Lustre, NFS, or FUSE may not.
    """
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        problem = f"its file system has no locks ({os_reason(error)})"
        raise InputError(f"{file.name}: {problem}; set SM_NANOGPT_HOME to a local disk") from None
    return True


def is_locked(path: Path) -> bool:
    """True if a process holds the lock of a file. Raises InputError as `lock` does.

    This tries a shared lock, so that two processes which call it do not see each other.
    """
    try:
        with open_file(path) as file:
            return not lock(file, wait=False, shared=True)
    except FileNotFoundError:
        return False
