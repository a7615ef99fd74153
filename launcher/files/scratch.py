"""Temporary directories in the home, and the removal of what killed commands have left there.

Who writes a temporary file or directory holds a lock. What nobody holds is left over. Where the
file system has no locks, nothing is removed.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from launcher.errors import InputError
from launcher.files import storage
from launcher.files.locks import is_locked, lock
from launcher.settings import Settings

logger = logging.getLogger(__name__)

LOCK = ".lock"  # in a temporary directory
MINUTE, DAY = 60, 24 * 60 * 60  # seconds
DIRECTORIES = ("cache/text-*", "models/.fetch-*", "tries/.new-*", "tries/*/.job-*")
STORE_DIRECTORIES = ("data", "jobs", "models")  # a user may have more in a store
FILES = f".*.{'[0-9a-f]' * 8}{storage.TEMPORARY}"  # as storage.replacing names them


@contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """A temporary directory; those that killed commands have left beside it are removed first.

    Also raises OSError.
    """
    parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(parent.glob(f"{prefix}*"))
    # On NFS, a file that is still mapped keeps its directory.
    temporary = TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    with temporary as name, (Path(name) / LOCK).open("w") as file:
        with suppress(InputError):  # it has no locks, so nobody removes it
            lock(file)
        file.write("held by a command\n")  # after the lock: see is_left_over
        file.flush()
        yield Path(name)


def remove_all_leftovers(settings: Settings) -> None:
    """Remove what killed commands have left in the home and in the stores of this machine."""
    home = settings.home
    paths = [path for pattern in DIRECTORIES for path in home.glob(pattern)]
    paths += [*home.glob(FILES), *home.glob(f"*/{FILES}")]
    for store in {settings.local_store, settings.data_store}:
        if (directory := storage.local_path(store)) is not None:
            paths += chain.from_iterable(
                (directory / name).rglob(FILES) for name in STORE_DIRECTORIES
            )
    remove_leftovers(paths)


def remove_leftovers(paths: Iterable[Path]) -> None:
    """Remove those of these files and directories that are left over."""
    for path in paths:
        if not is_left_over(path):
            continue
        with suppress(OSError):  # it is somebody else's, or NFS keeps it
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            logger.info(f"{path}: removed; a killed command left it")


def is_left_over(path: Path) -> bool:
    """Whether no command uses a temporary file or directory any more.

    Each is locked before anything is written, so one that is empty may be about to be locked.
    """
    file = path / LOCK if path.is_dir() else path
    try:
        if not file.exists():  # by an older version, or kept by NFS
            return time.time() - path.stat().st_mtime > DAY
        is_written = file.stat().st_size > 0 or time.time() - file.stat().st_mtime > MINUTE
        return is_written and not is_locked(file)
    except (OSError, InputError):  # it is gone by now, or cannot be locked
        return False
