"""Read and write a file or a directory of this machine, for storage.py."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from sm_nanogpt.entry_point import files
from sm_nanogpt.entry_point.errors import os_reason
from sm_nanogpt.entry_point.files import file_sha256, open_file, read_file
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.locks import lock
from sm_nanogpt.launcher.files.progress import CHUNK_BYTES, Progress

logger = logging.getLogger(__name__)

TEMPORARY_SUFFIX = ".tmp"  # suffix of files that are being written


@dataclass(frozen=True)
class LocalLocation:
    """A file or a directory of this machine."""

    path: Path
    home: Path | None = None  # of the settings

    @property
    def file_system(self) -> tuple[Any, str]:
        """fsspec's file system, and the path in it."""
        return fsspec.filesystem("file"), str(self.path)

    def write_bytes(self, content: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(content)

    def write_file(self, source: Path, progress: Progress) -> None:
        """Copy a file with its times, and its mode without write permission, as jobs link to it."""
        with open_file(source) as file:
            self.write_content(file, source, progress)

    def write_content(self, content: BinaryIO, source: Path, progress: Progress) -> None:
        """Write the unpacked content of a file, with the times and the mode of that file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as copy:
            while chunk := content.read(CHUNK_BYTES):
                copy.write(chunk)
                progress(len(chunk))
            copy.flush()
            with suppress(OSError):  # the file system may have no times
                shutil.copystat(source, copy.name)
            with suppress(OSError):  # the file system may have no modes
                os.fchmod(copy.fileno(), source.stat().st_mode & 0o555)

    def read_bytes(self, max_bytes: int) -> bytes:
        return read_file(self.path, max_bytes)

    def fingerprint(self) -> str:
        return file_sha256(self.path)

    def fetch_file(self, name: str, target: Path, progress: Progress) -> None:
        """Link to a file of this directory, or to this file if name is ''. See link_or_copy."""
        source = self.path / name
        link_or_copy(source, target, self.home)
        progress(source.stat().st_size)

    def remove(self) -> None:
        """Delete the file or the directory.

        The files at the top of a directory are deleted last: a job is listed as long as it has its
        job.json.
        """
        if self.path.is_file() or self.path.is_symlink():
            self.path.unlink()
        with suppress(FileNotFoundError):
            for child in self.path.iterdir():
                if child.is_dir() and not child.is_symlink():
                    shutil.rmtree(child)
            shutil.rmtree(self.path)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a local file atomically. The lock of the new file shows that it is in use."""
    # The name is random: threads share a process id, and processes of containers may.
    name = f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
    with files.replacing(path, name) as file:
        with suppress(InputError):  # if there are no locks, nobody removes the file
            lock(file)
        yield file


def link_or_copy(source: Path, target: Path, home: Path | None = None) -> None:
    """Link to a file. If the file system has no links, copy the file, and log that.

    Inside the home, a link is relative, so that it stays valid when the home is moved.
    """
    link = source
    directory = target.parent.resolve()
    if home is not None:
        home = home.resolve()
        if directory.is_relative_to(home) and source.resolve().is_relative_to(home):
            link = Path(os.path.relpath(source.resolve(), directory))
    try:
        target.symlink_to(link)
    except FileExistsError:
        raise
    except OSError as error:
        problem = f"its file system has no links ({os_reason(error)})"
        logger.info(f"{target}: a copy of {source}, as {problem}")
        shutil.copyfile(source, target)
