"""The ledger of a group of runs: its request, its reservations, and the results of its jobs.

    reserved   a job is about to be sent; usd is what it may cost
    sent       the backend has the job
    settled    the job has ended, or was never sent; usd is what it cost

What the ended jobs have cost, and what the other jobs may cost, is together never over the ceiling.
So what a job may cost is reserved before it is sent, and what it did not spend is free again after
its end.
"""

from __future__ import annotations

import math
from typing import Any

from sm_nanogpt.launcher.files.ledger import Entry, Ledger
from sm_nanogpt.launcher.sagemaker.cost import CeilingTooLow, usd


class OverCeiling(CeilingTooLow):
    """A job may cost more than is free below the ceiling of its group."""


class GroupLedger(Ledger):
    """The ledger of a group. Its ceiling is in USD, and infinite if there is none."""

    ceiling = math.inf

    # -- jobs -------------------------------------------------------------------------------------

    def reserve(self, job_id: str, amount: float, **facts: Any) -> Entry:
        """Note that a job is about to be sent, which may cost `amount`, in USD.

        facts: other fields of the entry. Raises OverCeiling if the amount is more than is free.
        """
        with self.locked():
            if amount > self.free:
                raise OverCeiling(f"this may cost {usd(amount)}, and {self.usage}")
            return self.write("reserved", job=job_id, usd=finite_or_none(amount), **facts)

    def note_sent(self, job_id: str) -> None:
        if not self.was_sent(job_id):
            self.add("sent", job=job_id)

    def note_unsent(self, job_id: str) -> None:
        """Note that a job was never sent, and so costs nothing."""
        self.settle(job_id, 0.0, status="NotSent")

    def note_deleted(self, job_id: str) -> None:
        """Note that a job was deleted. What it cost is unknown, so what it reserved counts."""
        self.settle(job_id, None, status="Deleted")

    def settle(self, job_id: str, cost: float | None, **facts: Any) -> None:
        """Note the cost of a job, in USD, and its result.

        cost: None if it is unknown; then what the job reserved counts. facts: other fields of the
        entry.
        """
        with self.locked():
            reservation = self.open_reservations.get(job_id)
            if reservation is None:  # another command has settled it
                return
            if cost is None:
                cost = reservation["usd"]
            self.write("settled", job=job_id, usd=cost, **facts)

    def was_sent(self, job_id: str) -> bool:
        return any(entry["job"] == job_id for entry in self.of("sent"))

    def reservation_of(self, job_id: str) -> Entry:
        """The last reservation of a job."""
        return [entry for entry in self.of("reserved") if entry["job"] == job_id][-1]

    @property
    def open_reservations(self) -> dict[str, Entry]:
        """The reservations of jobs whose cost is not known yet, by their ids."""
        reservations = dict[str, Entry]()
        for entry in self.entries:
            if entry["kind"] == "reserved":
                reservations[entry["job"]] = entry
            elif entry["kind"] == "settled":
                reservations.pop(entry["job"], None)
        return reservations

    # -- money ------------------------------------------------------------------------------------

    @property
    def spent(self) -> float:
        """What the settled jobs have cost, in USD."""
        return math.fsum(entry["usd"] or 0.0 for entry in self.of("settled"))

    @property
    def reserved(self) -> float:
        """What the jobs with open reservations may cost, in USD."""
        return math.fsum(entry["usd"] or 0.0 for entry in self.open_reservations.values())

    @property
    def unspent(self) -> float:
        """What the settled jobs have left of the ceiling, in USD."""
        return self.ceiling - self.spent

    @property
    def free(self) -> float:
        """What is neither spent nor reserved of the ceiling, in USD."""
        return self.unspent - self.reserved

    @property
    def usage(self) -> str:
        """Describe what of the ceiling is spent and reserved."""
        free = max(0.0, self.free)
        used = f"{self.spent:,.2f} spent, {self.reserved:,.2f} reserved"
        return f"{free:,.2f} of {usd(self.ceiling)} are free ({used})"


def finite_or_none(amount: float) -> float | None:
    """The amount; None for infinity, which JSON does not have."""
    if math.isinf(amount):
        return None
    return amount
