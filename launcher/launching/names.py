"""The ids and names of sweeps and of jobs, of which no other job may have one.

The id of a sweep, GROUP, is like that of a job. Its jobs are GROUP-1, GROUP-2, ..., and
GROUP-1-try2 is the second try of GROUP-1. So the id of a job tells its sweep. The ledger of a sweep
is below HOME/sweeps of the machine that launched it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.files import locks, storage
from sm_nanogpt.launcher.files.ledger import Ledger
from sm_nanogpt.launcher.finding import Listing
from sm_nanogpt.launcher.settings import Settings

MEMBER_ID = re.compile(r"(sm-nanogpt-\d{8}-\d{6}-[0-9a-f]{6})-(\d+)(?:-try(\d+))?")


@dataclass(frozen=True, order=True)
class Member:
    """A job of a sweep, by its id: a try of one of the numbers. Both count from 1."""

    sweep_id: str
    number: int
    attempt: int = 1

    @property
    def suffix(self) -> str:
        """The end of its id and of its name, which tells it from other jobs: `-3` or `-3-try2`."""
        if self.attempt == 1:
            return f"-{self.number}"
        return f"-{self.number}-try{self.attempt}"

    @property
    def job_id(self) -> str:
        return f"{self.sweep_id}{self.suffix}"


def member_of(job_id: str) -> Member | None:
    """The member that a job is of a sweep; None if it belongs to no sweep."""
    match = MEMBER_ID.fullmatch(job_id)
    if match is None:
        return None
    return Member(match[1], int(match[2]), int(match[3] or 1))


def next_try(sweep_id: str, number: int, job_ids: Iterable[str]) -> Member:
    """The next try of a number, after the tries among these jobs."""
    last_attempt = 0
    for member in map(member_of, job_ids):
        if member is not None and member.number == number:
            last_attempt = max(last_attempt, member.attempt)
    return Member(sweep_id, number, last_attempt + 1)


@contextmanager
def name_reserved(name: str | None, settings: Settings) -> Iterator[None]:
    """Reserve a name while the body records a job or a sweep of this machine that has it.

    Others that do so wait meanwhile. Raises InputError if a job or a sweep of this machine has the
    name. None reserves nothing.
    """
    if name is None:
        yield
        return
    lock_path = settings.home / "names.lock"
    with ExitStack() as stack:
        with storage.errors_about(str(lock_path)):  # not around the body, with other errors
            settings.home.mkdir(parents=True, exist_ok=True)
            lock_file = stack.enter_context(lock_path.open("w"))
            locks.lock(lock_file)
        check_name_here(name, settings)
        yield


def check_name_here(name: str, settings: Settings) -> None:
    """Raise InputError if a job or a sweep of this machine has a name."""
    group = recorded_group(name, settings)
    if group is not None:
        raise InputError(
            f"sweep {group} has this name",
            code="name-of-a-sweep",
            field="name",
            value=name,
            group=group,
        )
    job = next(Listing(settings, name=name).of_this_machine(), None)
    if job is not None:
        raise name_of_a_job_error(name, job.job_id)


def name_of_a_job_error(name: str, job_id: str) -> InputError:
    return InputError(
        f"job {job_id} has this name",
        code="name-of-a-job",
        field="name",
        value=name,
        job_id=job_id,
    )


def ledger_path(group: str, settings: Settings) -> Path:
    return settings.home / "sweeps" / f"{group}.jsonl"


def recorded_groups(settings: Settings) -> list[str]:
    """The ids of the sweeps that were launched from this machine."""
    return [path.stem for path in ledger_path("*", settings).parent.glob("*.jsonl")]


def recorded_group(reference: str, settings: Settings) -> str | None:
    """The id of the sweep of this machine that has this id or name; None if there is none."""
    groups = recorded_groups(settings)
    if reference in groups:  # an absolute path would be another file
        return reference
    for group in groups:
        with suppress(ServiceError):  # a damaged ledger is passed over
            for entry in Ledger(ledger_path(group, settings)).of("asked"):
                if entry["job"].get("name") == reference:
                    return group
    return None
