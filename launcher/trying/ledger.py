"""The ledger of a search: what was tried, what it cost, what was kept.

HOME/tries/NAME/ledger.jsonl has an entry in each line, and each entry the SHA-256 of the line
before it, so a change of any but the last shows. The last one's hash stands in what a command
prints. Entries are only added, under a lock, and a line is written whole or not at all; all that a
search knows is read from it, so a killed command leaves what was before the entry, or after it.

    start      what the search is: text, hyperparameters, folder, ceiling
    run        the loss and the seconds of one folder and seed
    base       what the first folder loses, and by how much that varies
    fresh      how many fresh seeds two folders got
    reserved   what a job may cost, and its runs; settled: what it cost
    sending    it is about to be sent; sent: AWS has it
    failed     a run of a job that left no model, and why
    try        a verdict
    gain       what all kept tries gain together
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from entry_point.files import flush_to_disk
from launcher.errors import InputError, ServiceError
from launcher.files import locks, storage
from launcher.sagemaker.cost import usd

FIRST = "0" * 64

Entry = dict[str, Any]


class OverCeiling(InputError):
    """A job may cost more than is left of the search's ceiling."""


class Ledger:
    """The entries of a search. Raises ServiceError if one was changed."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "ledger.jsonl"
        self.entries: list[Entry] = []
        self.head, self.size = FIRST, 0
        self.read()

    def read(self) -> None:
        """Read the entries that others have added."""
        if not self.path.exists():
            return
        with storage.reported(str(self.path)), self.path.open("rb") as file:
            file.seek(self.size)
            for line in file:
                if not line.endswith(b"\n"):  # a killed command's, which counts for nothing
                    break
                number = len(self.entries) + 1
                try:
                    entry = json.loads(line)
                    genuine = entry["previous"] == self.head
                except (ValueError, KeyError, TypeError):
                    genuine = False
                if not genuine:
                    raise ServiceError(
                        f"{self.path}: entry {number}, or the one before it, was changed after it"
                        " was written"
                    )
                self.entries.append(entry)
                self.head = hashlib.sha256(line).hexdigest()
                self.size += len(line)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """With what others have added, while no one else adds."""
        with storage.reported(str(self.path)), self.path.with_suffix(".lock").open("w") as file:
            locks.lock(file)
            self.check_present(file)
            self.read()
            yield

    def check_present(self, file: IO[str]) -> None:
        """Raise ServiceError if the search was removed while this waited for its lock."""
        path = self.path.with_suffix(".lock")
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise ServiceError(f"the search {self.path.parent.name} was removed")

    @property
    def is_unused(self) -> bool:
        """True if no run was made, no job was sent, and no money is reserved."""
        return not (self.open or self.of("sent") or self.of("run"))

    def add(self, kind: str, **facts: Any) -> Entry:
        with self.locked():
            return self.write(kind, **facts)

    def write(self, kind: str, **facts: Any) -> Entry:
        """Add an entry; the ledger is locked. Raises OSError.

        A note or a path may hold bytes that are not UTF-8; JSON escapes them.
        """
        entry = {"previous": self.head, "kind": kind, "at": round(time.time(), 3), **facts}
        line = json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        with os.fdopen(fd, "wb") as file:
            file.truncate(self.size)  # what a killed command began
            file.seek(self.size)
            file.write(line)
            file.flush()
            flush_to_disk(file.fileno())
        self.entries.append(entry)
        self.head, self.size = hashlib.sha256(line).hexdigest(), self.size + len(line)
        return entry

    def of(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry["kind"] == kind]

    # -- what the entries say ---------------------------------------------------------------------

    @property
    def base(self) -> str:
        """The SHA-256 of the folder that was kept last, or that the search began with."""
        kept = [entry["folder"] for entry in self.of("try") if entry["verdict"] == "kept"]
        return str(kept[-1] if kept else self.of("start")[0]["folder"])

    @property
    def losses(self) -> dict[tuple[str, int], float]:
        """Those of all runs, by folder and seed."""
        return {(e["folder"], e["seed"]): float(e["loss"]) for e in self.of("run")}

    def fresh_seeds(self, folder: str, base: str, n: int) -> list[int]:
        """So many seeds that no one has seen, for this pair of folders alone.

        A command that is killed when it dislikes what it sees gets no others.
        """
        with self.locked():
            first = 1001
            for entry in self.of("fresh"):
                if (entry["folder"], entry["base"], entry["n"]) == (folder, base, n):
                    break
                first += entry["n"]
            else:
                self.write("fresh", folder=folder, base=base, n=n)
        return list(range(first, first + n))

    # -- money ------------------------------------------------------------------------------------

    @property
    def spent(self) -> float:
        """USD of the jobs that ended."""
        return float(sum(entry["usd"] for entry in self.of("settled")))

    def cost_of(self, folder: str) -> float:
        """USD of the jobs that ended and that had a run of this folder."""
        jobs = {e["job"] for e in self.of("reserved") if folder in dict(e["runs"])}
        return float(sum(entry["usd"] for entry in self.of("settled") if entry["job"] in jobs))

    @property
    def open(self) -> list[Entry]:
        """The reservations of jobs whose cost is not known yet."""
        settled = {entry["job"] for entry in self.of("settled")}
        return [entry for entry in self.of("reserved") if entry["job"] not in settled]

    @property
    def reserved(self) -> float:
        """USD that the jobs whose cost is not known yet may cost."""
        return float(sum(entry["usd"] for entry in self.open))

    @property
    def free(self) -> float:
        """USD of the ceiling that are neither spent nor reserved."""
        return float(self.of("start")[0]["ceiling"] - self.spent - self.reserved)

    def reserve(self, job: str, amount: float, **facts: Any) -> Entry:
        """Reserve USD for a job, before it is sent. Raises OverCeiling."""
        with self.locked():
            if amount > (free := self.free):
                raise OverCeiling(
                    f"this may cost {usd(amount)}, and {max(0.0, free):,.2f} of"
                    f" {usd(self.of('start')[0]['ceiling'])} are free ({self.spent:,.2f} spent,"
                    f" {self.reserved:,.2f} reserved)"
                )
            return self.write("reserved", job=job, usd=amount, **facts)

    def settle(self, cost_of: Callable[[Entry], float | None]) -> None:
        """Replace reservations by what was billed; None: it is not known yet."""
        for entry in self.open:
            cost = cost_of(entry)
            with self.locked():
                if cost is not None and entry in self.open:
                    self.write("settled", job=entry["job"], usd=cost)
