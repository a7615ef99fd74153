"""Locks of files, by which a living process shows what it uses. They end with the process."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO, Any

from entry_point.files import open_file
from launcher.errors import InputError


def lock(file: IO[Any], wait: bool = True, shared: bool = False) -> bool:
    """Lock an open file until it is closed; False if others hold it, where this does not wait.

    Raises InputError if its file system has no locks, as Lustre, NFS, or FUSE may have none.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        why = f"its file system has no locks ({error.strerror})"
        raise InputError(f"{file.name}: {why}; set SM_NANOGPT_HOME to a local disk") from None
    return True


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file. Also raises as `lock`.

    It tries a shared lock, so that those who look do not see each other.
    """
    try:
        with open_file(path) as file:
            return not lock(file, wait=False, shared=True)
    except FileNotFoundError:
        return False
