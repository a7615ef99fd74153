"""Make temporary directories in the home, and remove those that killed commands have left.

A process that writes a temporary file or directory holds its lock. A file or directory whose lock
nobody holds is left over. If the file system has no locks, nothing is removed.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.local import TEMPORARY_SUFFIX
from sm_nanogpt.launcher.files.locks import is_locked, lock
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"  # the file in a temporary directory that is locked
MINUTE_SECONDS = 60
DAY_SECONDS = 24 * 60 * 60
DIRECTORY_PATTERNS = ("cache/text-*", "models/.fetch-*", "tries/.new-*", "tries/*/.job-*")
STORE_DIRECTORIES = ("data", "jobs", "models")  # others in a store may be a user's
TEMPORARY_PATTERN = f".*.{'[0-9a-f]' * 8}{TEMPORARY_SUFFIX}"  # the names that files/local.py gives


@contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a temporary directory, and remove those beside it that killed commands have left.

    Raises OSError.
    """
    parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(parent.glob(f"{prefix}*"))
    with TemporaryDirectory(
        prefix=prefix,
        dir=parent,
        ignore_cleanup_errors=True,  # on NFS, a file that is still mapped keeps its directory
    ) as name:
        directory = Path(name)
        with (directory / LOCK_NAME).open("w") as file:
            with suppress(InputError):  # if there are no locks, nobody removes it
                lock(file)
            file.write("held by a command\n")  # only after the lock: see is_left_over
            file.flush()
            yield directory


def remove_all_leftovers(settings: Settings) -> None:
    """Remove what killed commands have left in the home and in the stores of this machine."""
    for pattern in (*DIRECTORY_PATTERNS, TEMPORARY_PATTERN, f"*/{TEMPORARY_PATTERN}"):
        remove_leftovers(settings.home.glob(pattern))
    for store in {settings.local_store, settings.data_store}:
        directory = storage.local_path(store)
        if directory is not None:
            for name in STORE_DIRECTORIES:
                remove_leftovers((directory / name).rglob(TEMPORARY_PATTERN))


def remove_leftovers(paths: Iterable[Path]) -> None:
    """Remove those of these files and directories that are left over."""
    for path in paths:
        if not is_left_over(path):
            continue
        with suppress(OSError):  # it belongs to another user, or NFS keeps it
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            logger.info(f"{path}: removed; a killed command left it")


def is_left_over(path: Path) -> bool:
    """True if no command uses a temporary file or directory any more.

    A command locks a file before it writes anything, so an empty file may be about to be locked.
    """
    file = path / LOCK_NAME if path.is_dir() else path
    try:
        if not file.exists():  # an older version made it, or NFS keeps it
            return age_seconds(path) > DAY_SECONDS
        if file.stat().st_size == 0 and age_seconds(file) <= MINUTE_SECONDS:
            return False
        return not is_locked(file)
    except (OSError, InputError):  # it is gone by now, or cannot be locked
        return False


def age_seconds(path: Path) -> float:
    """Seconds since a file or directory was written."""
    return time.time() - path.stat().st_mtime
