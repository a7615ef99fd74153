"""Find the jobs of a sweep, or of a search, on any machine."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sm_nanogpt.launcher.backends import Backend, backend_class, backend_for
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.finding import Listing, is_part, similar_to, why_not_asked
from sm_nanogpt.launcher.groups.sweep import SweepLedger
from sm_nanogpt.launcher.job import FULL_ID
from sm_nanogpt.launcher.launching.names import Member, member_of, next_try, recorded_groups
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)

Members = dict[Member, JobDescription]  # the jobs of sweeps, by sweep, number, and try
Tries = dict[int, list[JobDescription]]  # the jobs of each member, by number; the newest last


@dataclass(frozen=True)
class JobGroup:
    """The jobs of a sweep, by number; or the jobs that make the runs of a search."""

    id: str  # the id of the sweep, or the name of the search
    tries: Tries = field(default_factory=dict)
    is_search: bool = False

    @property
    def newest(self) -> list[JobDescription]:
        """The last job of each number."""
        return [jobs[-1] for _, jobs in sorted(self.tries.items())]

    def last_try(self, number: int) -> JobDescription | None:
        """The last job of a number; None if it has none."""
        jobs = self.tries.get(number)
        return jobs[-1] if jobs else None

    @property
    def jobs(self) -> list[JobDescription]:
        return list(itertools.chain.from_iterable(self.tries.values()))


def find_group(reference: str, settings: Settings, everyone: bool = False) -> JobGroup:
    """Find the jobs of a sweep or of a search.

    A sweep may be named by its name, the start or the end of its id, the id or the name of one of
    its jobs, or `latest`. A search is named by its name. everyone: a reference may also mean
    somebody else's group; otherwise only a full id may.
    """
    listing = Listing(settings, everyone or FULL_ID.fullmatch(reference) is not None)
    jobs = list(listing)
    members = members_among(jobs)
    ids_of_jobs = {member.sweep_id for member in members}
    sweep_ids = sorted(ids_of_jobs.union(recorded_groups(settings)), reverse=True)
    id_or_part = resolve_name(reference, members)
    if reference == "latest" and sweep_ids:
        id_or_part = sweep_ids[0]
    if listing.failure is not None and (reference == "latest" or id_or_part not in sweep_ids):
        raise listing.failure  # the sweep may be one that was not listed
    matches = [sweep_id for sweep_id in sweep_ids if is_part(id_or_part, sweep_id)]
    search = group_of_search(reference, jobs)
    if search.tries and not matches:
        return search
    if len(matches) != 1:
        raise no_such_sweep_error(reference, jobs, sweep_ids, matches, settings)

    [sweep_id] = matches
    tries = tries_of(sweep_id, members)
    instance = instance_of_sweep(sweep_id, tries, settings)
    if instance is not None and backend_class(instance).is_remote:
        if listing.failure is not None:
            raise listing.failure
        add_unlisted(sweep_id, tries, backend_for(instance, settings))
    for job in listing.unreadable:
        if job.job_id.startswith(f"{sweep_id}-"):
            logger.info(f"job {job.job_id} is left out: {job.error}")
    return JobGroup(sweep_id, tries)


def no_such_sweep_error(
    reference: str,
    jobs: Iterable[JobDescription],
    sweep_ids: Sequence[str],
    matches: Sequence[str],
    settings: Settings,
) -> InputError:
    """The error for a reference to none of the sweeps, or to several."""
    if not sweep_ids:
        return InputError(f"there are no sweeps yet{why_not_asked(settings)}", "no-sweeps-yet")
    if matches:
        problem = f"{reference!r} matches {len(matches)} sweeps"
    else:
        problem = f"{reference!r} matches no sweeps"
        suggestion = similar_to(reference, sweep_ids, group_names(jobs))
        if suggestion:
            problem += f"; {suggestion}"
    return InputError(problem, code="no-such-sweep")


def group_of_search(name: str, jobs: Sequence[JobDescription]) -> JobGroup:
    """The jobs, of these, that make the runs of the search with this name."""
    jobs_of_search = [job for job in reversed(jobs) if job.search == name]
    tries = {number: [job] for number, job in enumerate(jobs_of_search, 1)}
    return JobGroup(name, tries, is_search=True)


def members_among(jobs: Iterable[JobDescription]) -> Members:
    """The jobs, of these, that belong to sweeps."""
    members: Members = {}
    for job in jobs:
        member = member_of(job.job_id)
        if member is not None:
            members[member] = job
    return members


def group_names(jobs: Iterable[JobDescription]) -> set[str]:
    """The names of the sweeps and searches of these jobs."""
    names = {job.search for job in jobs if job.search is not None}
    for member, job in members_among(jobs).items():
        if job.name is not None:
            names.add(job.name.removesuffix(member.suffix))
    return names


def resolve_name(reference: str, members: Members) -> str:
    """Replace the name of a sweep, or the name or id of one of its jobs, by the id of the sweep.

    Any other reference stays, as it may be a part of an id.
    """
    for member, job in members.items():
        if job.name is not None and reference in (job.name, job.name.removesuffix(member.suffix)):
            return member.sweep_id
    job_member = member_of(reference)
    return reference if job_member is None else job_member.sweep_id


def instance_of_sweep(sweep_id: str, tries: Tries, settings: Settings) -> str | None:
    """The instance on which the jobs of a sweep run; None if it is not known."""
    for jobs in tries.values():
        return jobs[0].instance
    sweep = SweepLedger(sweep_id, settings).sweep
    return None if sweep is None else sweep.job.instance


def tries_of(sweep_id: str, members: Members) -> Tries:
    """The tries of each number of a sweep."""
    tries: Tries = {}
    for member in sorted(members):
        if member.sweep_id == sweep_id:
            tries.setdefault(member.number, []).append(members[member])
    return tries


def add_unlisted(sweep_id: str, tries: Tries, backend: Backend) -> None:
    """Add the jobs of a sweep that exist and are not listed yet to its tries.

    This asks for the next try of each number. Numbers are started in their order, so it ends at the
    first number without a job that is over all numbers in `tries`.
    """
    for number in itertools.count(1):
        jobs = tries.setdefault(number, [])
        while True:
            member = next_try(sweep_id, number, [job.job_id for job in jobs])
            unlisted = backend.describe(member.job_id)
            if unlisted is None:
                break
            jobs.append(unlisted)
        if not jobs:
            del tries[number]
            if number > max(tries, default=0):
                return
