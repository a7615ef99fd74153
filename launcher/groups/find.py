"""Find the jobs of a sweep, or of a search, on any machine."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sm_nanogpt.launcher.backends import Backend, backend_class, backend_for
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.finding import Listing, is_part, not_asked, similar_to
from sm_nanogpt.launcher.groups.sweep import recorded_sweep
from sm_nanogpt.launcher.job import FULL_ID
from sm_nanogpt.launcher.launching.names import Member, member_of, next_try, recorded_groups
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)

Tries = dict[int, list[JobDescription]]  # the jobs of each member by its number, the newest last


@dataclass(frozen=True)
class JobGroup:
    """The jobs of a sweep, or those that make the runs of a search, each of which is a number of
    its own. id is that of the sweep, or the name of the search."""

    id: str
    tries: Tries
    is_search: bool = False

    @property
    def newest(self) -> list[JobDescription]:
        """The last job of each number."""
        return [jobs[-1] for _, jobs in sorted(self.tries.items())]

    @property
    def jobs(self) -> list[JobDescription]:
        return list(itertools.chain.from_iterable(self.tries.values()))


def find_group(reference: str, settings: Settings, everyone: bool = False) -> JobGroup:
    """The jobs of a sweep, from its name, the start or end of its id, the id or name of one of its
    jobs, or `latest`; or those of a search, from its name. Without everyone, only a full id may be
    somebody else's.
    """
    listing = Listing(settings, everyone or FULL_ID.fullmatch(reference) is not None)
    jobs = list(listing)
    groups = sorted({*recorded_groups(settings), *groups_of(jobs)}, reverse=True)
    part = part_of_id(reference, jobs)
    if reference == "latest" and groups:
        part = groups[0]
    matches = [group for group in groups if is_part(part, group)]
    group = matches[0] if matches else ""
    tries = tries_of(jobs, group)
    instance = instance_of_group(group, tries, settings)
    is_remote = instance is not None and backend_class(instance).is_remote

    if listing.failure is not None:
        # The latest may be one of those that were not listed.
        may_be_another = reference == "latest" or part not in groups
        if may_be_another or is_remote:
            raise listing.failure
    search_jobs = [job for job in jobs if job.search == reference]
    if search_jobs and not matches:
        by_number = {number: [job] for number, job in enumerate(reversed(search_jobs), 1)}
        return JobGroup(reference, by_number, is_search=True)
    if not groups:
        raise InputError(f"there are no sweeps yet{not_asked(settings)}", "no-such-sweep")
    if not matches:
        problem = f"{reference!r} matches no sweeps"
        suggestion = similar_to(reference, groups, group_names(jobs))
        if suggestion:
            problem += f"; {suggestion}"
        raise InputError(problem, "no-such-sweep")
    if len(matches) > 1:
        raise InputError(f"{reference!r} matches {len(matches)} sweeps", "no-such-sweep")

    for job in listing.unreadable:
        member = member_of(job.job_id)
        if member is not None and member.group == group:
            logger.info(f"job {job.job_id} is left out: {job.error}")
    if instance is not None and is_remote:
        add_unlisted(group, tries, backend_for(instance, settings))
    return JobGroup(group, tries)


def groups_of(jobs: Iterable[JobDescription]) -> set[str]:
    """The ids of the sweeps of these jobs."""
    members = [member_of(job.job_id) for job in jobs]
    return {member.group for member in members if member is not None}


def group_names(jobs: Iterable[JobDescription]) -> set[str]:
    """The names of the sweeps and searches of these jobs."""
    names = set()
    for job in jobs:
        member = member_of(job.job_id)
        if job.search is not None:
            names.add(job.search)
        elif member is not None and job.name is not None:
            names.add(job.name.removesuffix(member.suffix))
    return names


def part_of_id(reference: str, jobs: Iterable[JobDescription]) -> str:
    """The id of the sweep that a reference names, itself or by a job; else the reference, which may
    be a part of an id."""
    for job in jobs:
        member = member_of(job.job_id)
        if member is None or job.name is None:
            continue
        if reference in (job.name, job.name.removesuffix(member.suffix)):
            return member.group
    member = member_of(reference)
    return reference if member is None else member.group


def instance_of_group(group: str, tries: Tries, settings: Settings) -> str | None:
    """Where the jobs of a sweep run; None if nothing says it."""
    for jobs in tries.values():
        return jobs[0].instance
    sweep = recorded_sweep(group, settings) if group else None
    return sweep.job.instance if sweep else None


def tries_of(jobs: Iterable[JobDescription], group: str) -> Tries:
    members = dict[Member, JobDescription]()
    for job in jobs:
        member = member_of(job.job_id)
        if member is not None and member.group == group:
            members[member] = job
    tries: Tries = defaultdict(list)
    for member in sorted(members):
        tries[member.number].append(members[member])
    return tries


def add_unlisted(group: str, tries: Tries, backend: Backend) -> None:
    """Add the jobs that exist but are not listed yet: ask for each member's next attempt.

    Members start in order, so a number after the last known one that has no job is the end.
    """
    for number in itertools.count(1):
        jobs = tries.setdefault(number, [])
        while True:
            member = next_try(group, number, [job.job_id for job in jobs])
            unlisted = backend.describe(member.job_id)
            if unlisted is None:
                break
            jobs.append(unlisted)
        if not jobs:
            del tries[number]
            if number > max(tries, default=0):
                return
