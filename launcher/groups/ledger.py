"""The ledger of a group of jobs: what was asked, what is reserved, and what each job gave.

    asked      what the jobs of the group are
    reserved   a job is about to be sent; usd is what it may cost
    sent       its backend has it
    ended      its status and its loss; usd is what it cost

Money is one pot: what jobs have cost, and what those that have not ended may cost, never exceed the
ceiling together. So a job reserves what it may cost before it is sent, and gives back what it did
not spend.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from launcher.files.ledger import Entry, Ledger
from launcher.sagemaker.cost import CeilingTooLow, usd


class GroupLedger(Ledger):
    """The ledger of a group whose ceiling is in USD; infinity without one."""

    def __init__(self, path: Path, ceiling: float = math.inf) -> None:
        super().__init__(path)
        self.ceiling = ceiling

    # -- jobs -------------------------------------------------------------------------------------

    def reserve(self, job_id: str, amount: float, **facts: Any) -> None:
        """Note that a job is about to be sent, which may cost so many USD.

        Raises CeilingTooLow if that is more than is free.
        """
        with self.locked():
            if amount > self.free:
                raise CeilingTooLow(f"a job may cost {usd(amount)}, and too little is free: {self}")
            known_amount = None if math.isinf(amount) else amount
            self.write("reserved", job=job_id, usd=known_amount, **facts)

    def note_sent(self, job_id: str) -> None:
        if not self.was_sent(job_id):
            self.add("sent", job=job_id)

    def release(self, job_id: str) -> None:
        """Note that a job that was to be sent does not exist, and costs nothing."""
        self.add("ended", job=job_id, status="NotSent", loss=None, usd=0.0)

    def settle(self, job_id: str, status: str, loss: float | None, cost: float | None) -> None:
        """Note what a job gave, and what it cost in USD; if that is not known, what it reserved."""
        if cost is None:
            cost = self.open_reservations[job_id]["usd"]
        self.add("ended", job=job_id, status=status, loss=loss, usd=cost)

    def was_sent(self, job_id: str) -> bool:
        return any(entry["job"] == job_id for entry in self.of("sent"))

    @property
    def open_reservations(self) -> dict[str, Entry]:
        """The reservations of jobs that have not ended, by their ids."""
        reservations = dict[str, Entry]()
        for entry in self.entries:
            if entry["kind"] == "reserved":
                reservations[entry["job"]] = entry
            elif entry["kind"] == "ended":
                reservations.pop(entry["job"], None)
        return reservations

    # -- money ------------------------------------------------------------------------------------

    @property
    def spent(self) -> float:
        """USD of the jobs that ended."""
        return math.fsum(entry["usd"] or 0.0 for entry in self.of("ended"))

    @property
    def reserved(self) -> float:
        """USD that the other jobs may cost."""
        return math.fsum(entry["usd"] or 0.0 for entry in self.open_reservations.values())

    @property
    def unspent(self) -> float:
        return self.ceiling - self.spent

    @property
    def free(self) -> float:
        """USD that are neither spent nor reserved."""
        return self.unspent - self.reserved

    def __str__(self) -> str:
        total = usd(self.ceiling)
        return f"{usd(self.spent)} spent and {usd(self.reserved)} reserved of {total}"
