"""The loop that starts the jobs of a sweep, and what they may cost together."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock

import pytest
from sweeps import GROUP, described, record

from sm_nanogpt import Settings
from sm_nanogpt.launcher.aws import OverQuota
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.groups import money, plan, run
from sm_nanogpt.launcher.groups.find import JobGroup, members_among, tries_of
from sm_nanogpt.launcher.groups.money import own_worst_cost
from sm_nanogpt.launcher.groups.plan import continue_sweep
from sm_nanogpt.launcher.groups.stop import stop_group
from sm_nanogpt.launcher.groups.sweep import Sweep, SweepLedger, grid
from sm_nanogpt.launcher.job import Request, TrainingJob
from sm_nanogpt.launcher.launching.names import ledger_path
from sm_nanogpt.launcher.sagemaker.cost import CeilingTooLow


class Fake:
    """A backend whose jobs end when they were asked about twice."""

    poll_seconds = 0.0
    bills = True

    def __init__(self, settings: Settings, *jobs: JobDescription) -> None:
        self.settings = settings
        self.jobs = {job.job_id: job for job in jobs}
        self.asked = Counter[str]()
        self.most = 0
        self.stopped: list[str] = []
        self.worst: dict[str, float] = {}  # USD that a job may cost
        self.costs: dict[str, float] = {}

    def stop(self, job_id: str) -> None:
        self.stopped.append(job_id)
        self.jobs[job_id] = described(job_id, "Stopping")

    def job(self, job_id: str) -> TrainingJob:
        return TrainingJob(instance="ml.g5.xlarge", data="x", worst_cost=self.worst.get(job_id))

    def directories(self, job_id: str) -> list[str]:
        return [f"file:///{job_id}"]

    def list(self) -> Iterator[JobDescription]:
        yield from self.jobs.values()

    def describe(self, job_id: str) -> JobDescription | None:
        job = self.jobs.get(job_id)
        if job is None:
            return None
        self.asked[job_id] += 1
        if job.is_running and self.asked[job_id] > 1:
            job = self.jobs[job_id] = described(job_id)
        return job

    def submit(self, job_id: str) -> None:
        self.jobs[job_id] = described(job_id, "InProgress")
        self.most = max(self.most, sum(job.is_running for job in self.jobs.values()))


@dataclass(frozen=True)
class Prepared:
    """A job on a Fake that can be submitted."""

    job: TrainingJob
    job_id: str
    backend: Fake
    channels: Mapping[str, Any] = field(default_factory=dict)
    new_name: str | None = None

    def upload(self) -> None:
        pass

    def submit(self, confirmed: bool) -> None:
        self.backend.worst[self.job_id] = self.job.worst_cost or 0.0
        self.backend.submit(self.job_id)


@pytest.fixture
def ran(home, monkeypatch):
    """Runs a sweep of four jobs, two at a time, on a Fake; returns it and the jobs prepared."""

    def run_sweep(
        *jobs: JobDescription,
        stop_at: str = "",
        max_cost: float | None = None,
        cost: float = 0.0,  # of each earlier job
        share: Callable[[], float] = lambda: 0.0,  # of what it may cost, for each other job
        shortest_cost: float = 0.0,  # USD that the shortest run may cost
        max_run: int | None = None,
        affordable_run: int | None = None,  # seconds, by the settings
        used_up: tuple[str, ...] = (),
        sleep: Callable[[float], None] = lambda seconds: None,
    ) -> tuple[Fake, list[Request]]:
        settings = Settings(home=home)
        fake, prepared = Fake(settings, *jobs), list[Request]()
        fake.worst |= {job.job_id: shortest_cost for job in jobs if job.is_running}

        def cost_of(job_id: str) -> float:
            if job_id not in fake.worst:
                return cost
            return fake.costs.setdefault(job_id, share() * fake.worst[job_id])

        def with_costs(jobs: list[JobDescription], settings: Settings) -> list[JobDescription]:
            return [replace(job, cost=cost_of(job.job_id)) for job in jobs]

        def prepare(job: Request, settings: Settings, job_id: str, texts: Any) -> Prepared:
            prepared.append(job)
            if job.resume in used_up or (job.max_cost or shortest_cost) < shortest_cost:
                raise CeilingTooLow("even a run of 60 s costs more")
            worst = shortest_cost if job.max_run else job.max_cost
            prepared_job = TrainingJob(
                **{"instance": "ml.g5.xlarge", "data": "x", **job.explicit_fields()},
                worst_cost=worst,
                affordable_run=affordable_run,
            )
            return Prepared(prepared_job, job_id, fake)

        monkeypatch.setattr(plan, "prepare", prepare)
        monkeypatch.setattr(money, "with_costs", with_costs)
        monkeypatch.setattr(plan, "backend_for", lambda instance, settings: fake)
        group = JobGroup(GROUP, tries_of(GROUP, members_among(fake.list())))
        monkeypatch.setattr(plan, "find_group", lambda *_: group)
        monkeypatch.setattr(
            "sm_nanogpt.launcher.groups.stop.backend_for", lambda instance, settings: fake
        )
        monkeypatch.setattr(run.time, "sleep", sleep)
        job = Request(instance="ml.g5.xlarge", data="x", max_cost=max_cost, max_run=max_run)
        sweep = Sweep(job=job, members=grid({"n_layer": [1, 2]}, 2, 7), parallel=2)
        record(sweep, settings)
        for event in run.begin_sweep(continue_sweep(GROUP, settings, None, None)):
            if event.job_id == stop_at:
                group = JobGroup(GROUP, tries_of(GROUP, members_among([described(f"{GROUP}-1")])))
                stop_group(group, settings)
        return fake, prepared

    return run_sweep


def test_no_more_jobs_run_than_asked(ran):
    fake, prepared = ran()
    assert list(fake.jobs) == [f"{GROUP}-{n}" for n in range(1, 5)]
    assert fake.most == 2
    assert prepared[3].hyperparameters == {"n_layer": 2, "seed": 8}


def test_a_sweep_continues_where_it_was(ran):
    done, unfinished = described(f"{GROUP}-1"), described(f"{GROUP}-4")
    stopped = replace(described(f"{GROUP}-2", "Stopped"), checkpoint_uri="file:///x")
    failed = described(f"{GROUP}-4-try2", "Failed")
    fake, prepared = ran(done, stopped, unfinished, failed)
    started = list(fake.jobs)[4:]
    assert started == [f"{GROUP}-2-try2", f"{GROUP}-3", f"{GROUP}-4-try3"]
    assert [job.resume for job in prepared] == [f"{GROUP}-2", None, None]


def test_a_failed_trys_cost_lowers_the_ceiling(ran):
    failed = [described(f"{GROUP}-1{suffix}", "Failed") for suffix in ("", "-try2")]
    fake, prepared = ran(*failed, max_cost=4, cost=0.25)
    assert {job.max_cost for job in prepared} == {3.5 / 4}
    assert f"{GROUP}-1-try3" in fake.jobs


def test_a_resumed_try_has_what_others_left(ran):
    """`prepare` itself counts the tries that this one continues."""
    stopped = replace(described(f"{GROUP}-1-try2", "Stopped"), checkpoint_uri="s3://x")
    _, prepared = ran(described(f"{GROUP}-1", "Failed"), stopped, max_cost=4, cost=0.25)
    assert prepared[0].resume == stopped.job_id
    assert prepared[0].max_cost == 3.5 / 4 + 0.25


def test_jobs_of_a_sweep_give_back_what_they_do_not_spend(ran):
    """Four jobs that may cost 1.30 each, under 2.65 USD, of which each spends a third."""
    fake, _ = ran(max_cost=2.65, shortest_cost=1.3, max_run=60, share=lambda: 1 / 3)
    assert len(fake.jobs) == 4
    assert sum(fake.costs.values()) == pytest.approx(4 * 1.3 / 3)


def test_a_sweep_starts_no_job_that_its_pot_cannot_pay(ran):
    fake, _ = ran(max_cost=3, shortest_cost=1.3, max_run=60, share=lambda: 1.0)
    assert len(fake.jobs) == 2


@pytest.mark.parametrize(
    ("max_cost", "configured", "expected"), [(None, None, 5.0), (9, None, 2.0), (None, 9, 2.0)]
)
def test_a_job_reserves_what_it_may_cost_itself(max_cost, configured, expected):
    """Under a ceiling, worst_cost has that of the jobs that it resumes, too."""
    job = TrainingJob(
        instance="ml.g5.xlarge", data="x", resume=f"{GROUP}-1", max_cost=max_cost,
        worst_cost=5, earlier_cost=3,
    )  # fmt: skip
    assert own_worst_cost(job, Settings(max_cost=configured)) == expected


def test_jobs_that_the_settings_shorten_run_side_by_side(ran):
    fake, _ = ran(max_cost=9, shortest_cost=1.3, max_run=600, affordable_run=60)
    assert fake.most == 2


def test_a_deleted_job_is_not_waited_for(ran, monkeypatch):
    """The second job waits for what the first may give back; nobody knows what that has cost."""
    polls = list[float]()

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        assert len(polls) < 10

    monkeypatch.setattr(Fake, "describe", lambda fake, job_id: None)
    fake, _ = ran(max_cost=2, shortest_cost=1.3, max_run=60, sleep=sleep)
    assert list(fake.jobs) == [f"{GROUP}-1"]


@pytest.mark.parametrize("max_run", [None, 60])
def test_no_sweep_costs_more_than_its_ceiling(ran, max_run):
    """Whatever its jobs, and earlier ones, cost of what they may cost."""
    started = Counter[int]()
    for seed in range(20):
        draw = random.Random(seed)
        earlier = [described(f"{GROUP}-{n}", "Failed") for n in range(1, draw.randint(1, 4))]
        cost = draw.uniform(0, 0.9)
        running = described(f"{GROUP}-4", "InProgress")
        fake, _ = ran(
            *earlier,
            running,
            max_cost=4,
            shortest_cost=1.3,
            cost=cost,
            max_run=max_run,
            share=draw.random,
        )
        assert cost * len(earlier) + sum(fake.costs.values()) <= 4
        started[len(fake.costs)] += 1
    assert len(started) > 1


def test_a_job_that_is_there_is_not_started_again(ran):
    fake, prepared = ran(described(f"{GROUP}-1", "InProgress"), described(f"{GROUP}-2"))
    assert len(prepared) == 2
    assert set(fake.jobs) == {f"{GROUP}-{n}" for n in range(1, 5)}
    assert fake.most == 2


def test_a_stopped_sweep_starts_no_more_jobs(ran):
    """Also a job that started while somebody stopped the sweep, maybe on another machine."""
    fake, _ = ran(stop_at=f"{GROUP}-2")
    assert fake.stopped == list(fake.jobs) == [f"{GROUP}-1", f"{GROUP}-2"]


def test_a_job_at_its_ceiling_does_not_block_others(ran):
    stopped = replace(described(f"{GROUP}-1", "Stopped"), checkpoint_uri="s3://x")
    fake, prepared = ran(stopped, used_up=(stopped.job_id,))
    assert list(fake.jobs) == [f"{GROUP}-{n}" for n in range(1, 5)]
    assert len(prepared) == 4


def test_all_jobs_are_described_once_a_poll(ran, monkeypatch):
    monkeypatch.setattr(Fake, "poll_seconds", 5.0)
    slept = list[float]()
    fake, _ = ran(sleep=slept.append)
    assert set(slept) == {5.0}
    assert fake.asked.total() == 2 * len(slept)


def test_a_job_over_the_quota_waits_until_another_ends(ran, monkeypatch):
    """One job at a time, and told of once, not at each try."""
    submit, submitted = Fake.submit, list[int]()

    def within(fake: Fake, job_id: str) -> None:
        if any(job.is_running for job in fake.jobs.values()):
            submitted.append(len(fake.jobs))
            raise OverQuota("the quota is 1")
        submit(fake, job_id)

    monkeypatch.setattr(Fake, "submit", within)
    fake, _ = ran()
    assert list(fake.jobs) == [f"{GROUP}-{n}" for n in range(1, 5)]
    assert fake.most == 1
    assert submitted == [1, 2, 3]


def test_a_sweep_waits_while_another_job_holds_the_quota(ran, monkeypatch):
    """A job of no sweep, whose end makes room for the first of them."""
    submit, refused = Fake.submit, list[str]()

    def after_the_other(fake: Fake, job_id: str) -> None:
        if not refused:
            refused.append(job_id)
            raise OverQuota("the quota is 1")
        submit(fake, job_id)

    monkeypatch.setattr(Fake, "submit", after_the_other)
    monkeypatch.setattr("sm_nanogpt.launcher.aws.QUOTA_RETRY_SECONDS", 0.0)
    other = replace(described("sm-nanogpt-20251231-000000-000000"), instance="ml.g5.xlarge")
    monkeypatch.setattr(Fake, "list", lambda fake: iter([replace(other, status="InProgress")]))
    fake, _ = ran()
    assert refused == [f"{GROUP}-1"]
    assert list(fake.jobs) == [f"{GROUP}-{n}" for n in range(1, 5)]


def test_a_sweep_ends_if_a_quota_allows_none_of_its_jobs(ran, monkeypatch):
    monkeypatch.setattr(Fake, "submit", Mock(side_effect=OverQuota("the quota is 0")))
    with pytest.raises(OverQuota, match="the quota is 0"):
        ran()


@pytest.mark.parametrize(("code", "is_reserved"), [("", False), ("job-may-exist", True)])
def test_a_job_that_may_exist_keeps_its_reservation(ran, home, monkeypatch, code, is_reserved):
    failure = ServiceError("no answer", code)
    monkeypatch.setattr(Fake, "submit", Mock(side_effect=failure))
    with pytest.raises(ServiceError, match="no answer"):
        ran()
    ledger = SweepLedger(GROUP, Settings(home=home))
    assert bool(ledger.open_reservations) == is_reserved


def test_a_deleted_sweep_starts_no_more_jobs(ran, home, monkeypatch):
    """Its mark is gone. For SageMaker that is in the store, so any machine may delete a sweep."""
    submit, mark = Fake.submit, ledger_path(GROUP, Settings(home=home)).with_suffix(".stop")

    def deleted(fake: Fake, job_id: str) -> None:
        submit(fake, job_id)
        mark.unlink()

    monkeypatch.setattr(Fake, "submit", deleted)
    assert list(ran()[0].jobs) == [f"{GROUP}-1"]
