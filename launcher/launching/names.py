"""The ids and names of sweeps and of their jobs, which no other job may have.

A sweep has an id like a job's, GROUP; its jobs are GROUP-1, GROUP-2, ..., and GROUP-1-try2 is the
second try of the first. So the jobs of a sweep are known by their ids alone. Its ledger is below
HOME/sweeps of the machine that launched it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.files.ledger import Ledger
from sm_nanogpt.launcher.settings import Settings

MEMBER_ID = re.compile(r"(sm-nanogpt-\d{8}-\d{6}-[0-9a-f]{6})-(\d+)(?:-try(\d+))?")


def group_of(job_id: str) -> str:
    """The id of the sweep of a job; that of the job if it is of none."""
    match = MEMBER_ID.fullmatch(job_id)
    return match[1] if match else job_id


def number_of(job_id: str) -> int:
    """Which job of its sweep a job is, from 1; 0 if it is of none."""
    match = MEMBER_ID.fullmatch(job_id)
    return int(match[2]) if match else 0


def attempt_of(job_id: str) -> int:
    """Which try of its number a job of a sweep is, from 1; 0 if it is of none."""
    match = MEMBER_ID.fullmatch(job_id)
    return int(match[3] or 1) if match else 0


def suffix_of(job_id: str) -> str:
    """What tells a job of a sweep from the others: `-3` or `-3-try2`. Its name ends so too."""
    return job_id.removeprefix(group_of(job_id))


def member_id(group: str, number: int, attempt: int) -> str:
    suffix = f"-try{attempt}" if attempt > 1 else ""
    return f"{group}-{number}{suffix}"


def ledger_path(group: str, settings: Settings) -> Path:
    return settings.home / "sweeps" / f"{group}.jsonl"


def recorded_groups(settings: Settings) -> list[str]:
    """The ids of the sweeps that were launched from this machine."""
    return [path.stem for path in ledger_path("*", settings).parent.glob("*.jsonl")]


def recorded_group(reference: str, settings: Settings) -> str | None:
    """The id of the sweep of this machine that has this id or name."""
    groups = recorded_groups(settings)
    if reference in groups:  # an absolute path would be another file
        return reference
    for group in groups:
        with suppress(ServiceError):  # a damaged one is not this one
            for entry in Ledger(ledger_path(group, settings)).of("asked"):
                if entry["job"].get("name") == reference:
                    return group
    return None
