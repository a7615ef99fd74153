"""Locks of files, by which a living process shows what it uses. They end with the process."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO, Any

from sm_nanogpt.entry_point.files import open_file
from sm_nanogpt.launcher.errors import InputError


def lock(file: IO[Any], wait: bool = True, shared: bool = False) -> bool:
    """Lock an open file until it is closed. Returns False if others hold its lock.

    With `wait` it waits for them instead. Raises InputError if the file system has no locks, as
    Lustre, NFS, or FUSE may have none.
    """
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        problem = f"its file system has no locks ({error.strerror})"
        raise InputError(f"{file.name}: {problem}; set SM_NANOGPT_HOME to a local disk") from None
    return True


def is_locked(path: Path) -> bool:
    """True if a process holds the lock of a file. Raises InputError as `lock` does.

    It tries a shared lock, so that two processes that ask do not see each other.
    """
    try:
        with open_file(path) as file:
            return not lock(file, wait=False, shared=True)
    except FileNotFoundError:
        return False
