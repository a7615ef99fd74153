"""A file to which entries are added, and in which none is changed.

An entry is on the disk before a command acts on it.

Each line is an entry, and has the SHA-256 of the line before it: if any line except the last is
changed, that shows. A line is written as a whole: a killed command leaves the file as it was before
the entry, or after it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from sm_nanogpt.entry_point.files import flush_to_disk
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.files import locks, storage

FIRST_HASH = "0" * 64

Entry = dict[str, Any]


class Ledger:
    """The entries of a file. Raises ServiceError if one was changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = []
        self.last_hash = FIRST_HASH
        self.end = 0  # of the entries that were read, in bytes
        self.read()

    def read(self) -> None:
        """Read the entries that others have added."""
        if not self.path.exists():
            return
        with storage.errors_about(str(self.path)), self.path.open("rb") as file:
            file.seek(self.end)
            for line in file:
                if not line.endswith(b"\n"):  # a killed command began it: it does not count
                    break
                entry = self.parse(line)
                self.advance(line)
                self.take_in(entry)

    def parse(self, line: bytes) -> Entry:
        try:
            entry: Entry = json.loads(line)
            is_genuine = entry["previous"] == self.last_hash
        except (ValueError, KeyError, TypeError):
            is_genuine = False
        if not is_genuine:
            number = len(self.entries) + 1
            problem = f"entry {number}, or the one before it, was changed after it was written"
            raise ServiceError(f"{self.path}: {problem}")
        return entry

    def advance(self, line: bytes) -> None:
        """Move the end, and the hash of the last line, behind a line."""
        self.last_hash = hashlib.sha256(line).hexdigest()
        self.end += len(line)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the ledger, so that no other process adds to it, and read what others have added."""
        lock_path = self.path.with_suffix(".lock")
        with ExitStack() as stack:
            with storage.errors_about(str(self.path)):  # not around the body, with other errors
                lock_file = stack.enter_context(lock_path.open("w"))
                locks.lock(lock_file)
                self.check_present(lock_file, lock_path)
            self.read()
            yield

    def check_present(self, lock_file: IO[str], lock_path: Path) -> None:
        """Raise ServiceError if the ledger was removed while this waited for its lock."""
        locked = os.fstat(lock_file.fileno())
        if not lock_path.exists() or not os.path.samestat(locked, lock_path.stat()):
            raise ServiceError(f"{self.path} was removed")

    def add(self, kind: str, **facts: Any) -> Entry:
        """Lock the ledger, and add an entry of a kind."""
        with self.locked():
            return self.write(kind, **facts)

    def write(self, kind: str, **facts: Any) -> Entry:
        """Add an entry to the locked ledger.

        A note or a path may hold bytes that are not UTF-8, which are escaped.
        """
        moment = round(time.time(), 3)
        entry = {"previous": self.last_hash, "kind": kind, "at": moment, **facts}
        line = json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        with storage.errors_about(str(self.path)):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.truncate(self.end)  # what a killed command began
                file.seek(self.end)
                file.write(line)
                file.flush()
                flush_to_disk(file.fileno())
        self.advance(line)
        self.take_in(entry)
        return entry

    def take_in(self, entry: Entry) -> None:
        """Add an entry that was read or written to the entries in memory."""
        self.entries.append(entry)

    def of(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry["kind"] == kind]
