"""The jobs of a search: what they may cost, whoever is killed, waits, or gets no answer."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.errors import ServiceError
from launcher.job import JobDescription
from launcher.source import Source
from launcher.trying import cloud, ledger
from launcher.trying.cloud import OnSageMaker
from launcher.trying.ledger import Ledger, OverCeiling
from launcher.trying.search import Made

CEILING, HOURLY, AROUND = 10.0, 5.0, 600
HISTORIES = 1000


class Killed(BaseException):
    """What kill -9 is: nothing catches it."""


@dataclass
class Job:
    name: str
    created: float
    billed: float  # seconds in all, at most those that were reserved
    status: str = "Completed"
    lag: float = 0.0  # until AWS knows it, where its answer was lost

    @property
    def ends(self) -> float:
        return self.created + self.billed


@dataclass
class Aws:
    """SageMaker as far as money goes, on a clock of its own. Here is what it bills in the end.

    `event` is called wherever a command can be killed, sleep, or lose an answer.
    """

    event: Callable[[], None] = lambda: None
    now: float = 1.8e9
    jobs: dict[str, Job] = field(default_factory=dict)
    bills: dict[str, float] = field(default_factory=dict)
    draw: random.Random = field(default_factory=random.Random)
    trouble: float = 0.0  # the part of calls that fail
    poll_seconds: float = 0.0
    region: str = "us-east-1"

    def caller(self) -> Any:
        return SimpleNamespace(account="123456789012")

    def answer(self) -> None:
        self.event()
        if self.draw.random() < self.trouble:
            raise ServiceError("no answer")

    def describe(self, job_id: str) -> JobDescription | None:
        self.answer()
        job = self.jobs.get(job_id)
        if job is None or self.now < job.created + job.lag:
            return None
        status = job.status if self.now >= job.ends else "InProgress"
        uri = "s3://models" if status == "Completed" else None
        return JobDescription(
            job_id, status, status, "ml.g5.xlarge", 1, job.created, "", model_uri=uri
        )

    def submit(self, job_id: str, job: Any, *_: Any) -> None:
        if self.draw.random() < self.trouble:
            raise ServiceError("over the quota")
        self.event()
        if self.draw.random() < self.trouble:  # the request is lost, or its answer
            raise ServiceError("no answer", "job-may-exist", job_id=job_id)
        share = self.draw.choice([1.0, 1.0, 0.2])
        seconds = share * (job.max_run + AROUND)
        status = self.draw.choice(["Completed", "Completed", "Failed", "Stopped"])
        self.jobs[job_id] = Job(job_id, self.now, seconds, status)
        self.bills[job_id] = HOURLY * seconds / 3600
        self.event()
        if self.draw.random() < self.trouble:
            self.jobs[job_id].lag = self.draw.choice([0.0, 900.0])
            raise ServiceError("no answer", "job-may-exist", job_id=job_id)

    def wait(self, job_id: str, settings: Any) -> JobDescription:
        while (found := self.describe(job_id)) and found.is_running:
            self.now += 120
        if found is None:
            raise ServiceError(f"there is no job {job_id}")
        return found

    def with_costs(self, found: list[JobDescription], settings: Any) -> list[Any]:
        if self.draw.random() < self.trouble:
            return [SimpleNamespace(cost=None)]
        job = self.jobs[found[0].job_id]
        share = min(1.0, (self.now - job.created) / job.billed)
        return [SimpleNamespace(cost=share * self.bills[job.name])]


@pytest.fixture
def aws(monkeypatch, tmp_path):
    """A search's ledger in tmp_path, and the Aws that its jobs run on."""
    aws, numbers = Aws(), itertools.count()

    def prepare(request: Any, settings: Any, job_id: str, texts: Any) -> Any:
        worst = HOURLY * (request.max_run + AROUND) / 3600
        job = SimpleNamespace(worst_cost=worst, instance="ml.g5.xlarge", max_run=request.max_run)
        return SimpleNamespace(
            job=job, placement=None, request={}, backend=aws, upload=lambda: aws.answer()
        )

    def made_of(self: OnSageMaker, run: tuple[Source, int], entry: Any, place: Path) -> Made:
        problem = "it failed" if aws.draw.random() < aws.trouble else ""
        return Made(*run, place, 30.0, problem)

    clock = SimpleNamespace(time=lambda: aws.now)
    monkeypatch.setattr(cloud, "SageMakerBackend", lambda settings: aws)
    monkeypatch.setattr(cloud, "time", clock)
    monkeypatch.setattr(ledger, "time", clock)
    monkeypatch.setattr(ledger.os, "fsync", lambda fd: None)
    monkeypatch.setattr(cloud.launch, "cloud_settings", lambda backend: None)
    monkeypatch.setattr(cloud.launch, "prepare", prepare)
    monkeypatch.setattr(cloud.launch, "new_job_id", lambda: f"job-{next(numbers):06d}")
    monkeypatch.setattr(cloud.tracking, "wait", aws.wait)
    monkeypatch.setattr(cloud.tracking, "with_costs", aws.with_costs)
    monkeypatch.setattr(cloud.storage, "fetch", lambda *_, **__: [Path("tar")])
    monkeypatch.setattr(cloud.fetch, "extract", lambda *_: None)
    monkeypatch.setattr(OnSageMaker, "made_of", made_of)
    monkeypatch.setattr(OnSageMaker, "text", lambda self, near: SimpleNamespace(uri="s3://text"))
    monkeypatch.setattr(OnSageMaker, "folder", lambda self, runs, seconds: None)
    return aws


def search_in(place: Path) -> Any:
    """What a command knows of a search, which it reads anew."""
    start = {"instance": "ml.g5.xlarge", "words": {}, "folder": "a", "text": "text"}
    book = Ledger(place)
    if not book.entries:
        book.add("start", ceiling=CEILING, **start)
    return SimpleNamespace(
        name="plays",
        directory=place,
        ledger=book,
        settings=None,
        start=book.entries[0],
        told=lambda line: None,
        seconds=lambda folder: 30.0,
    )


def runs_of(name: str, n: int = 4) -> list[tuple[Source, int]]:
    source = Source(Path(name), {"train.py": name.encode()})
    return [(source, seed) for seed in range(n)]


def made(place: Path, name: str, n: int = 4) -> list[Made]:
    """What a command gets that asks for n runs of a folder."""
    return list(OnSageMaker(search_in(place)).made(runs_of(name, n)))


def failing(kind: type[BaseException], *facts: str) -> Callable[[], None]:
    """An event that raises once."""
    left = [kind(*facts)]

    def event() -> None:
        if left:
            raise left.pop()

    return event


class History:
    """What several commands do, each of which may be killed at any call and at any write."""

    def __init__(self, seed: int, place: Path, aws: Aws, monkeypatch: Any) -> None:
        self.draw, self.place, self.aws, self.depth = random.Random(seed), place, aws, 0
        aws.jobs, aws.bills, aws.draw, aws.event = {}, {}, self.draw, self.event
        aws.trouble = self.draw.choice([0.0, 0.1, 0.3])
        self.kills = self.draw.choice([0.0, 0.02, 0.1])
        write = Ledger.write

        def torn(book: Ledger, kind: str, **facts: Any) -> Any:
            self.may_kill()
            if self.draw.random() < self.kills / 2:
                with book.path.open("r+b") as file:
                    file.seek(book.size)
                    file.write(b'{"previous": "torn'[: self.draw.randrange(18)])
                raise Killed
            entry = write(book, kind, **facts)
            self.may_kill()
            return entry

        self.write = lambda: monkeypatch.setattr(Ledger, "write", torn)
        self.end_writes = lambda: monkeypatch.setattr(Ledger, "write", write)

    def may_kill(self) -> None:
        if self.draw.random() < self.kills:
            raise Killed

    def event(self) -> None:
        self.may_kill()
        if self.draw.random() < 0.1:
            self.aws.now += self.draw.choice([1.0, 300.0, 4000.0])  # the machine may sleep
        if self.depth < 2 and self.draw.random() < 0.1:
            self.command()

    def command(self) -> None:
        self.depth += 1
        choice = self.draw.random()
        known = {entry["job"] for entry in Ledger(self.place).of("sent")}
        ended = [job for job in self.aws.jobs.values() if job.ends <= self.aws.now]
        if choice < 0.1 and (deletable := [job.name for job in ended if job.name in known]):
            del self.aws.jobs[self.draw.choice(deletable)]
        elif choice < 0.2:
            self.aws.now += self.draw.choice([60.0, 3700.0, 90_000.0])
        else:
            with suppress(Killed, ServiceError, OverCeiling):
                made(self.place, self.draw.choice("abc"), self.draw.choice([4, 8, 16, 32]))
        self.depth -= 1

    def run(self) -> Ledger:
        """The ledger after some commands, and a last one when all jobs have ended."""
        search_in(self.place)
        self.write()
        for _ in range(self.draw.randrange(4, 16)):
            self.command()
        self.end_writes()
        self.aws.event, self.aws.trouble, self.kills = lambda: None, 0.0, 0.0
        self.aws.now += 90_000
        last = search_in(self.place)
        OnSageMaker(last).settle()
        return last.ledger


def test_no_history_costs_more_than_the_ceiling(aws, tmp_path, monkeypatch):
    """Several commands on one ledger, killed at any write or call, asleep, without an answer."""
    seen = Counter[str]()
    for seed in range(HISTORIES):
        book = History(seed, tmp_path / str(seed), aws, monkeypatch)
        book.place.mkdir()
        entries = book.run()
        spent = sum(aws.bills.values())
        reserved = {entry["job"] for entry in entries.of("reserved")}
        assert spent <= CEILING, seed
        assert aws.bills.keys() <= reserved, seed
        assert not entries.open, seed
        assert entries.spent >= spent - 1e-9, seed
        assert entries.spent <= CEILING, seed
        costs = {entry["job"]: entry["usd"] for entry in entries.of("settled")}
        assert not any(costs[job] for job in reserved - aws.bills.keys()), seed
        seen["jobs"] += len(aws.bills)
        seen["deleted"] += len(aws.bills.keys() - aws.jobs.keys())
        seen["never sent"] += len(reserved - aws.bills.keys())
        seen["failed runs"] += len(entries.of("failed"))
        seen["nearly all spent"] += spent > 0.8 * CEILING
    assert min(seen.values()) > HISTORIES / 10
