"""Sweeps: a grid of jobs, a few at a time, under one cost ceiling."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import fmean
from typing import IO, Any

from launcher.aws import OverQuota, QuotaWait, patiently
from launcher.backends import Backend, backend_class, backend_for
from launcher.errors import InputError, ServiceError
from launcher.files import locks, storage
from launcher.finding import Listing, is_part, not_asked
from launcher.job import FULL_ID, JobDescription, Request
from launcher.launching import records
from launcher.launching.draft import check_name
from launcher.launching.launch import Plan, new_job_id, prepare
from launcher.launching.pot import Pot, costs_of, pot_of, prepare_affordable, slots_for
from launcher.launching.records import Sweep, Tries, record_of, tail_of
from launcher.sagemaker.cost import CeilingTooLow
from launcher.settings import Settings
from launcher.source import keep
from launcher.tracking import check_yours

logger = logging.getLogger(__name__)


def alone(group: str, settings: Settings) -> IO[str]:
    """A file that keeps a second command of this machine from running the sweep while it is open.
    Two would start each job twice.
    """
    path = record_of(group, settings).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w")
    if not locks.lock(file, wait=False):
        problem = f"another command runs sweep {group}"
        raise ServiceError(problem, "sweep-is-running", group=group)
    return file


def stop_mark(group: str, place: str, settings: Settings) -> str:
    """The file that says whether a sweep may start jobs. `run`: it may; any other content, or no
    file: it may not. It is deleted with the sweep. Any machine may stop or delete a sweep, so for
    SageMaker the file is in the store, beside `place`, which holds the files of one of its jobs.
    """
    if not place.startswith("s3://"):
        return str(record_of(group, settings).with_suffix(".stop"))
    return storage.join(place.rstrip("/").rpartition("/")[0], group, "stop")


def find_sweep(reference: str, settings: Settings, everyone: bool = False) -> tuple[str, Tries]:
    """The id of a sweep and its jobs, from its name, the start or end of its id, the id or name of
    one of its jobs, or `latest`. Without everyone, only a full id may be somebody else's.
    """
    listing = Listing(settings, everyone or FULL_ID.fullmatch(reference) is not None)
    found, failure = list(listing), listing.failure
    ids = {path.stem for path in record_of("*", settings).parent.glob("*.json")}
    part = reference.removesuffix(tail_of(reference))
    for job in found:
        if tail := tail_of(job.job_id):
            ids.add(group := job.job_id.removesuffix(tail))
            if job.name is not None and reference in (job.name, job.name.removesuffix(tail)):
                part = group
    groups = sorted(ids, reverse=True)
    if reference == "latest" and groups:
        part = groups[0]
    matches = [group for group in groups if is_part(part, group)]
    tries = records.tries_of(found, matches[0] if matches else "")
    sweep = None if tries or not matches else records.read_record(matches[0], settings)
    request = sweep.job if sweep else next(iter(tries.values()), [None])[0]
    instance = (request and request.instance) or "local"
    # The latest may be one of those that were not listed.
    is_remote = backend_class(instance).is_remote
    if failure is not None and (reference == "latest" or part not in groups or is_remote):
        raise failure
    if len(matches) != 1:
        problem = f"{reference!r} matches {len(matches) or 'no'} sweep{'s' * (len(matches) != 1)}"
        none = f"there are no sweeps yet{not_asked(settings)}"
        raise InputError(problem if groups else none, "no-such-sweep")
    for left_out in listing.unreadable:
        if left_out.job_id.startswith(f"{matches[0]}-"):
            logger.info(f"job {left_out.job_id} is left out: {left_out.error}")
    if is_remote:
        add_unlisted(matches[0], tries, backend_for(instance, settings))
    return matches[0], tries


def add_unlisted(group: str, tries: Tries, backend: Backend) -> None:
    """Add the jobs that a list does not have yet. The first tries are made in order."""
    for number in itertools.count(1):
        while unlisted := backend.describe(records.next_id(group, number, tries[number])):
            tries[number].append(unlisted)
        if not tries[number]:
            del tries[number]
            if number > max(tries, default=0):
                return


def prepare_member(
    sweep: Sweep,
    number: int,
    settings: Settings,
    job_id: str,
    tries: Sequence[JobDescription] = (),
    first: Plan | None = None,
    amount: float | None = None,
) -> Plan:
    """The member's next job, checked. It continues the last try if that left a checkpoint.

    amount: USD that the job itself may cost; None: no ceiling. first: the plan of another member,
    with the same texts and folder, which are not read again. Raises CeilingTooLow if even the
    shortest run costs more.
    """
    given = {**sweep.job.given(), **sweep.fields_of(number)}
    resumed_cost = 0.0
    if tries:
        backend = backend_for(sweep.job.instance or "local", settings)
        last = backend.describe(tries[-1].job_id)
        if last is not None and last.checkpoint_uri:
            given = {"resume": last.job_id}
            if amount is not None:
                resumed_cost = costs_of(tries, backend, settings).chain
    if amount is not None:
        given["max_cost"] = min(amount + resumed_cost, settings.max_cost or math.inf)
    if sweep.job.name is not None:
        given["name"] = f"{sweep.job.name}{tail_of(job_id)}"
    request, texts = Request(**given), None
    if first is not None:
        texts = {n: text for n, text in first.channels.items() if n in ("data", "validation")}
        request._source = None if request.resume else first.job.source
    return prepare(request, settings, job_id, texts)


def plan_sweep(
    request: Request, settings: Settings, values: Mapping[str, Any], seeds: int, parallel: int
) -> SweepPlan:
    """Check and price the jobs of a new sweep: each combination of the values, with each of `seeds`
    seeds, `parallel` jobs at a time. Raises InputError if the values are no lists, or as `prepare`
    if a job cannot run.
    """
    if (job_id := request.resume) is not None:
        raise InputError("continues one job", "sweep-of-one", "resume", job_id, job_id=job_id)
    varied = {name.replace("-", "_"): records.listed(name, each) for name, each in values.items()}
    records.check_varied(varied, request, seeds)
    shares_cores = backend_class(request.instance or "").shares_cores
    if shares_cores and parallel > 1 and request.processes_per_instance is None:
        request = request.model_copy(update={"processes_per_instance": 1})
    members = records.grid(varied, seeds, int(request.hyperparameters.get("seed", 1337)))
    check_name(request, settings)
    if request.name is not None:  # jobs that continue the sweep have names too
        request.replaced(name=f"{request.name}-{len(members)}-try99")
    sweep = Sweep(job=request, members=members, parallel=parallel)
    return plan_left(new_job_id(), sweep, settings, {})


def continue_sweep(
    group: str, settings: Settings, max_cost: float | None, parallel: int | None
) -> SweepPlan:
    """Check and price the jobs of a sweep of this machine that have not completed."""
    with ExitStack() as unless_planned:
        lock = unless_planned.enter_context(alone(group, settings))
        if (sweep := records.read_record(group, settings)) is None:
            raise InputError(f"sweep {group} was not launched from this machine, or was deleted")
        changed: dict[str, Any] = {"parallel": parallel} if parallel else {}
        if max_cost is not None:
            changed["job"] = sweep.job.replaced(max_cost=max_cost)
        sweep, tries = sweep.model_copy(update=changed), find_sweep(group, settings)[1]
        plan = plan_left(group, sweep, settings, tries)
        plan.lock = lock
        unless_planned.pop_all()
    return plan


def plan_left(group: str, sweep: Sweep, settings: Settings, tries: Tries) -> SweepPlan:
    """Check and price what is left of a sweep. tries: its jobs so far."""
    backend = backend_for(sweep.job.instance or "local", settings)
    pot = None
    if sweep.job.max_cost is not None:
        pot = pot_of(sweep.job.max_cost, tries, backend, settings)
    left = sweep.left(tries)
    plans, limited = dict[int, Plan](), dict[int, CeilingTooLow]()
    for number in left:
        earlier, first = tries.get(number, []), next(iter(plans.values()), None)
        job_id = records.next_id(group, number, earlier)
        prepare_for = partial(prepare_member, sweep, number, settings, job_id, earlier, first)
        try:
            if pot is None:
                plans[number] = prepare_for(None)
            else:  # what runs may give back what it has reserved
                slots = slots_for(sweep, len(left))
                plans[number] = prepare_affordable(prepare_for, pot.unspent, slots)
        except CeilingTooLow as limit:
            if not earlier:
                raise
            limited[number] = limit
    return SweepPlan(group, sweep, settings, tries, plans, limited, pot)


@dataclass
class Progress:
    """A job of a sweep for the screen: what it continues when it starts, or how it ended; or what
    keeps it from being started, its cost ceiling or a quota of the account."""

    number: int
    job_id: str
    description: JobDescription | None = None
    continued: str | None = None
    obstacle: CeilingTooLow | OverQuota | None = None


@dataclass
class SweepPlan:
    """A sweep whose jobs are checked and priced.

    tries: its jobs so far, which get those that are started. plans: the jobs that are left to
    start. limited: why others are not, since the ceiling is used up. pot: its money, if it has a
    ceiling. lock: keeps other commands from running the sweep, if it has jobs.
    """

    group: str
    sweep: Sweep
    settings: Settings
    tries: Tries
    plans: dict[int, Plan]
    limited: dict[int, CeilingTooLow]
    pot: Pot | None = None
    lock: IO[str] | None = None
    mark: str = ""

    @property
    def worst_cost(self) -> float:
        """What the jobs may cost together, in USD; infinity if the price is unknown."""
        worst = sum(plan.job.worst_cost or math.inf for plan in self.plans.values())
        return worst if self.pot is None else min(worst, self.pot.unspent)

    @cached_property
    def backend(self) -> Backend:
        return backend_for(self.sweep.job.instance or "local", self.settings)

    @cached_property
    def running(self) -> dict[int, str]:
        return {n: each[-1].job_id for n, each in self.tries.items() if each[-1].is_running}

    def submit(self) -> Iterator[Progress]:
        """Upload the text and record the sweep. Returns an iterator that runs it.

        It starts the jobs, `parallel` at a time, until all have ended, and yields each when it
        starts and when it ends. A job that stopped or failed earlier continues from its checkpoint.
        A job that a quota of the account holds back waits until another job ends. After an error,
        the jobs that run keep running.
        """
        for first in list(self.plans.values())[:1]:
            first.upload()
            # What later tries read must be what the first one does, whatever is changed or
            # launched meanwhile, and from any directory.
            fixed: dict[str, Any] = {name: each.uri for name, each in first.channels.items()}
            if first.job.entry_point is not None:
                fixed["entry_point"] = keep(first.job.source, self.settings)
            job = self.sweep.job.model_copy(update=fixed)
            self.sweep = self.sweep.model_copy(update={"job": job})
        records.write_record(self.group, self.sweep, self.settings)
        return self.run()

    def run(self) -> Iterator[Progress]:
        with self.lock or alone(self.group, self.settings):
            for number, limit in self.limited.items():
                yield Progress(number, self.tries[number][-1].job_id, obstacle=limit)
            left, quota_wait, needs_money = [*self.plans], QuotaWait(), False
            self.write_mark()
            while left or self.running:
                if stopped := self.is_stopped():
                    left = []
                room = len(self.running) < self.sweep.parallel
                if left and room and quota_wait.may_send and not needs_money:
                    try:
                        yield self.start(left[0], len(left))
                        left = left[1:]
                        quota_wait.note_sent()
                    except OverQuota as quota:
                        if quota_wait.note_refusal(quota, bool(self.running)):
                            yield Progress(left[0], self.plans[left[0]].job_id, obstacle=quota)
                    except CeilingTooLow as limit:
                        needs_money = bool(self.running)  # which may give some back
                        if not needs_money:
                            yield Progress(left[0], self.plans[left[0]].job_id, obstacle=limit)
                            left = left[1:]
                    continue
                time.sleep(max(0.5, self.backend.poll_seconds))
                n_running = len(self.running)
                yield from self.poll(stopped)
                if len(self.running) < n_running:  # some have ended, or were deleted
                    quota_wait.note_end()
                    needs_money = False

    def write_mark(self) -> None:
        """Write the file that says that this sweep may start jobs."""
        plans = self.plans.values()
        places = [storage.join(p.backend.settings.data_store, "jobs", p.job_id) for p in plans]
        if started := [each[0].job_id for each in self.tries.values() if not places]:
            places = [self.backend.directories(started[0])[0]]
        for place in places[:1]:
            self.mark = stop_mark(self.group, place, self.settings)
            storage.write_bytes(self.mark, b"run", self.settings)

    def is_stopped(self) -> bool:
        """Whether somebody stopped or deleted the sweep."""
        read = partial(storage.read_bytes, self.mark, self.settings)
        return patiently(read, job_id=self.group, code="") != b"run"

    def start(self, number: int, n_left: int) -> Progress:
        """Start a member's next job, one of n_left. Raises OverQuota, CeilingTooLow, or as
        `Plan.submit`."""
        plan = self.plans[number]
        if self.pot is not None:
            plan = self.affordable(plan, number, n_left, self.pot)
        plan.backend.parallel = self.sweep.parallel
        replace(plan, channels={}).submit()  # `submit` has uploaded them
        if self.pot is not None:
            self.pot.reserve(number, plan.job)
        self.running[number] = plan.job_id
        return Progress(number, plan.job_id, continued=plan.job.resume)

    def affordable(self, plan: Plan, number: int, n_left: int, pot: Pot) -> Plan:
        """The plan of a job, with a ceiling by what is free now. Raises CeilingTooLow if that is
        too little, or would cut its time limit while other jobs run, which may give back some."""
        tries = self.tries.get(number, [])
        prepare_for = partial(
            prepare_member, self.sweep, number, self.settings, plan.job_id, tries, plan
        )
        slots = slots_for(self.sweep, n_left, len(self.running))
        affordable = prepare_affordable(prepare_for, pot.free, slots)
        wanted = plan.job.time_limit
        is_shorter = self.sweep.job.max_run is not None and affordable.job.time_limit < wanted
        if self.running and is_shorter:
            raise CeilingTooLow(f"a run of {wanted} s may cost more than is free: {pot}")
        return affordable

    def poll(self, stop: bool) -> Iterator[Progress]:
        """Ask about each job that runs, and stop it if asked. Yields those that have ended."""
        for number, job_id in list(self.running.items()):
            ask = partial(self.backend.describe, job_id)
            if (description := patiently(ask, job_id=self.group, code="")) is None:
                logger.info(f"job {job_id} was deleted")
                del self.running[number]
                self.settle(number, None)
                continue
            if stop and description.status == "InProgress":
                self.backend.stop(job_id)
            earlier = [job for job in self.tries.get(number, []) if job.job_id != job_id]
            self.tries[number] = [*earlier, description]
            if not description.is_running:
                del self.running[number]
                self.settle(number, description)
                yield Progress(number, job_id, description)

    def settle(self, number: int, job: JobDescription | None) -> None:
        """Count what a job cost that has ended or was deleted."""
        if self.pot is not None:
            self.pot.settle(number, job, self.settings)


def stop_all(
    group: str, tries: Tries, settings: Settings, confirmed: bool = False
) -> list[JobDescription]:
    """Stop the running jobs of a sweep, and keep it from starting others; returns those jobs.

    The command that runs the sweep stops a job that it starts meanwhile. Raises NotYours if the
    sweep is somebody else's, unless confirmed.
    """
    if not (newest := [each[-1] for each in tries.values()]):
        return []
    if not confirmed:
        check_yours(newest[0], settings)
    backend, running = backend_for(newest[0].instance, settings), []
    try:
        for job in newest:
            now = backend.describe(job.job_id) if job.is_running else None
            if now is not None and now.is_running:
                running.append(now)
                if now.status == "InProgress":  # a second stop would not wait for a checkpoint
                    backend.stop(now.job_id)
    finally:
        place = backend.directories(newest[0].job_id)[0]
        storage.write_bytes(stop_mark(group, place, settings), b"stop", settings)
    return running


@dataclass(frozen=True)
class Rank:
    """The jobs of one configuration, which differ only in their seed. losses are in nats; n counts
    the jobs that were not started too."""

    values: dict[str, Any]
    losses: list[float]
    jobs: list[JobDescription]
    n: int

    @property
    def loss(self) -> float:
        return fmean(self.losses) if self.losses else float("inf")


def ranking(
    found: Sequence[JobDescription | None], planned: Sequence[Mapping[str, Any]] | None = None
) -> list[Rank]:
    """The configurations of some jobs by their best validation loss, the lowest first.

    planned: what was varied, for each job; None: what differs. A job is None until it is started.
    """
    if planned is None:
        planned = [job.hyperparameters if job else {} for job in found]
        differing = differences(planned)
        planned = [{name: each.get(name) for name in differing} for each in planned]
    same: dict[tuple[Any, ...], list[JobDescription | None]] = defaultdict(list)
    for job, values in zip(found, planned, strict=True):
        same[tuple((n, value) for n, value in values.items() if n != "seed")].append(job)
    ranks = []
    for key, each in same.items():
        jobs = [job for job in each if job is not None]
        losses = [job.best_loss for job in jobs if job.best_loss is not None]
        ranks.append(Rank(dict(key), losses, jobs, len(each)))
    return sorted(ranks, key=lambda rank: rank.loss)


def differences(configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names whose values are not the same in all configurations."""
    names = dict.fromkeys(name for each in configurations for name in each)
    return [n for n in names if len({str(each.get(n)) for each in configurations}) > 1]
