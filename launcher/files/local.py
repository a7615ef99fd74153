"""A file or a directory of this machine, as storage.py reads and writes it."""

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
from sm_nanogpt.entry_point.files import file_sha256, open_file, read_file
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.locks import lock
from sm_nanogpt.launcher.files.progress import Progress

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 22
TEMPORARY = ".tmp"  # suffix of files that are being written


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
        """Copy a file with its mode and times. Nobody may write the copy: jobs link to it."""
        with open_file(source) as file:
            self.write_content(file, source, progress)

    def write_content(self, content: BinaryIO, source: Path, progress: Progress) -> None:
        """Write what a file unpacks to, as write_file copies that file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as copy:
            while chunk := content.read(CHUNK_BYTES):
                copy.write(chunk)
                progress(len(chunk))
            copy.flush()
            with suppress(OSError):  # of a file system without times
                shutil.copystat(source, copy.name)
            with suppress(OSError):  # of a file system without modes
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

        The files at the top of a directory go last: a job is listed while its job.json is there.
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
    """Open a local file to write atomically. Its lock shows that it is in use."""
    # The name is random, since threads share a process id, and containers may.
    name = f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}"
    with files.replacing(path, name) as file:
        with suppress(InputError):  # without locks, nobody removes it
            lock(file)
        yield file


def link_or_copy(source: Path, target: Path, home: Path | None = None) -> None:
    """Link to a file. Where the file system has no links, copy it and log that.

    Inside the home a link is relative, so that it holds when the home is moved.
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
        problem = f"its file system has no links ({error.strerror})"
        logger.info(f"{target}: a copy of {source}, as {problem}")
        shutil.copyfile(source, target)
