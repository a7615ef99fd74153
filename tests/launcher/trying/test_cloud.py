"""The jobs of a search: what they may cost, whoever is killed, waits, or gets no answer."""

from __future__ import annotations

import io
import itertools
import json
import random
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import kills
import pytest
from access import Refusal
from kills import kill_at
from searches import edits_of, folder, gain_of

from sm_nanogpt.launcher.aws import OverQuota
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.files import ledger
from sm_nanogpt.launcher.groups import run as group_runs
from sm_nanogpt.launcher.groups.ledger import OverCeiling
from sm_nanogpt.launcher.groups.run import Event, GroupRun
from sm_nanogpt.launcher.sagemaker.cost import OVERHEAD_SECONDS
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.trying import cloud as jobs_of
from sm_nanogpt.launcher.trying import driver, search
from sm_nanogpt.launcher.trying.budget import Budget
from sm_nanogpt.launcher.trying.cloud import DriverFacts, SageMakerRuns
from sm_nanogpt.launcher.trying.history import SearchLedger
from sm_nanogpt.launcher.trying.runs import SeededRun, TriedRun
from sm_nanogpt.launcher.trying.scoring import Judge, Score
from sm_nanogpt.launcher.trying.search import Search

if TYPE_CHECKING:
    import sagemaker_service

CEILING, HOURLY = 10.0, 5.0
INSTANCE = "ml.g5.xlarge"
HISTORIES = 200  # a half of them with --quick


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

    @property
    def account(self) -> Any:
        caller = SimpleNamespace(account="123456789012")
        return SimpleNamespace(region="us-east-1", caller=lambda: caller)

    def launch_settings(self) -> Any:
        return None

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
        return JobDescription(job_id, status, status, INSTANCE, 1, job.created, "", model_uri=uri)

    def list(self) -> Iterator[JobDescription]:
        for name in [*self.jobs]:
            if job := self.describe(name):
                yield job

    def sleep(self, seconds: float) -> None:
        self.now += 120

    def submit(self, job_id: str, job: Any, *_: Any) -> None:
        if self.draw.random() < self.trouble:
            raise OverQuota("over the quota")
        self.event()
        if self.draw.random() < self.trouble:  # the request is lost, or its answer
            raise ServiceError("no answer", "job-may-exist", job_id=job_id)
        share = self.draw.choice([1.0, 1.0, 0.2])
        seconds = share * (job.max_run + OVERHEAD_SECONDS)
        status = self.draw.choice(["Completed", "Completed", "Failed", "Stopped"])
        self.jobs[job_id] = Job(job_id, self.now, seconds, status)
        self.bills[job_id] = HOURLY * seconds / 3600
        self.event()
        if self.draw.random() < self.trouble:
            self.jobs[job_id].lag = self.draw.choice([0.0, 900.0])
            raise ServiceError("no answer", "job-may-exist", job_id=job_id)

    def with_costs(self, jobs: Sequence[JobDescription], settings: Any) -> Sequence[Any]:
        if self.draw.random() < self.trouble:
            return [SimpleNamespace(cost=None)]
        job = self.jobs[jobs[0].job_id]
        share = min(1.0, (self.now - job.created) / job.billed)
        return [SimpleNamespace(cost=share * self.bills[job.name])]


@dataclass
class Plan:
    """A plan whose job may run for max_run seconds."""

    job_id: str
    job: Any
    backend: Aws
    placement: Any = None
    request: dict[str, Any] = field(default_factory=dict)

    def upload(self) -> None:
        self.backend.answer()


@pytest.fixture
def aws(monkeypatch, tmp_path):
    """A search's ledger in tmp_path, and the Aws that its jobs run on."""
    aws, numbers = Aws(), itertools.count()

    def prepare(request: Any, settings: Any, job_id: str, texts: Any) -> Any:
        worst = HOURLY * (request.max_run + OVERHEAD_SECONDS) / 3600
        job = SimpleNamespace(
            worst_cost=worst,
            instance=INSTANCE,
            instances=(INSTANCE,),
            max_run=request.max_run,
            resume=None,
        )
        return Plan(job_id, job, aws)

    def read_document(uri: str, kind: type[DriverFacts]) -> DriverFacts:
        problem = "it failed" if aws.draw.random() < aws.trouble else ""
        return DriverFacts(seconds=30.0, problem=problem)

    clock = SimpleNamespace(
        time=lambda: aws.now, monotonic=lambda: aws.now, sleep=lambda seconds: aws.sleep(seconds)
    )
    monkeypatch.setattr(jobs_of, "SageMakerBackend", lambda settings: aws)
    monkeypatch.setattr(jobs_of, "time", clock)
    monkeypatch.setattr(ledger, "time", clock)
    monkeypatch.setattr("sm_nanogpt.launcher.aws.time", clock)
    monkeypatch.setattr(group_runs, "time", clock)
    monkeypatch.setattr(ledger.os, "fsync", lambda fd: None)
    monkeypatch.setattr(jobs_of.launch, "prepare", prepare)
    monkeypatch.setattr(jobs_of.launch, "new_job_id", lambda: f"job-{next(numbers):06d}")
    monkeypatch.setattr("sm_nanogpt.launcher.groups.money.with_costs", aws.with_costs)
    monkeypatch.setattr(jobs_of.storage, "fetch", lambda *_, **__: [Path("tar")])
    monkeypatch.setattr(jobs_of.fetch, "extract", lambda *_: None)
    monkeypatch.setattr(jobs_of.storage, "read_document", read_document)
    monkeypatch.setattr(
        SageMakerRuns, "text_channel", lambda self, settings: SimpleNamespace(uri="s3://text")
    )
    monkeypatch.setattr(SageMakerRuns, "job_folder", lambda self, runs, seconds: None)
    return aws


def search_in(home: Path) -> Any:
    """What a command knows of a search, which it reads anew."""
    start = {"instance": INSTANCE, "hyperparameters": {}, "folder": "a", "text": "text"}
    book = SearchLedger(home)
    if not book.entries:
        book.add("start", ceiling=CEILING, **start)
    return SimpleNamespace(
        name="plays",
        directory=home,
        ledger=book,
        settings=Settings(home=home),
        start=book.entries[0],
        budget=Budget(book),
    )


def runs_of(name: str, n: int = 4) -> list[SeededRun]:
    source = Source(Path(name), {"train.py": name.encode()})
    return [SeededRun(source, seed) for seed in range(n)]


def trained(directory: Path, name: str, n: int = 4) -> list[TriedRun]:
    """What a command gets that asks for n runs of a folder."""
    return list(SageMakerRuns(search_in(directory)).train(runs_of(name, n)))


class History:
    """What several commands do, each of which may be killed at any call and at any write."""

    def __init__(self, seed: int, directory: Path, aws: Aws, monkeypatch: Any) -> None:
        self.draw = random.Random(seed)
        self.directory = directory
        self.aws = aws
        self.depth = 0  # of commands that run at the same time
        aws.jobs = {}
        aws.bills = {}
        aws.draw = self.draw
        aws.event = self.event
        aws.trouble = self.draw.choice([0.0, 0.1, 0.3])
        self.kills = self.draw.choice([0.0, 0.02, 0.1])
        write = SearchLedger.write

        def torn(book: SearchLedger, kind: str, **facts: Any) -> Any:
            self.may_kill()
            if self.draw.random() < self.kills / 2:
                with book.path.open("r+b") as file:
                    file.seek(book.end)
                    file.write(b'{"previous": "torn'[: self.draw.randrange(18)])
                raise Killed
            entry = write(book, kind, **facts)
            self.may_kill()
            return entry

        self.write = lambda: monkeypatch.setattr(SearchLedger, "write", torn)
        self.end_writes = lambda: monkeypatch.setattr(SearchLedger, "write", write)

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
        deletable = self.deletable_jobs()
        if choice < 0.1 and deletable:
            del self.aws.jobs[self.draw.choice(deletable)]
        elif choice < 0.2:
            self.aws.now += self.draw.choice([60.0, 3700.0, 90_000.0])
        else:
            with suppress(Killed, ServiceError, OverCeiling):
                trained(self.directory, self.draw.choice("abc"), self.draw.choice([4, 8, 16, 32]))
        self.depth -= 1

    def deletable_jobs(self) -> list[str]:
        sent_ids = {entry["job"] for entry in SearchLedger(self.directory).of("sent")}
        ended = [job.name for job in self.aws.jobs.values() if job.ends <= self.aws.now]
        return [name for name in ended if name in sent_ids]

    def run(self) -> SearchLedger:
        """The ledger after some commands, and a last one when all jobs have ended."""
        search_in(self.directory)
        self.write()
        for _ in range(self.draw.randrange(4, 16)):
            self.command()
        self.end_writes()
        self.aws.event, self.aws.trouble, self.kills = lambda: None, 0.0, 0.0
        self.aws.now += 90_000
        last = search_in(self.directory)
        last.ledger.settle_all(SageMakerRuns(last).cost_of)
        return last.ledger


def test_no_history_costs_more_than_the_ceiling(aws, tmp_path, monkeypatch, pytestconfig):
    """Several commands on one ledger, killed at any write or call, asleep, without an answer."""
    events = Counter[str]()
    histories = HISTORIES // 2 if pytestconfig.getoption("--quick") else HISTORIES
    for seed in range(histories):
        book = History(seed, tmp_path / str(seed), aws, monkeypatch)
        book.directory.mkdir()
        entries = book.run()
        spent = sum(aws.bills.values())
        reserved = {entry["job"] for entry in entries.of("reserved")}
        assert spent <= CEILING, seed
        assert aws.bills.keys() <= reserved, seed
        assert not entries.open_reservations, seed
        assert entries.spent >= spent - 1e-9, seed
        assert entries.spent <= CEILING, seed
        costs = {entry["job"]: entry["usd"] for entry in entries.of("settled")}
        assert not any(costs[job] for job in reserved - aws.bills.keys()), seed
        events["jobs"] += len(aws.bills)
        events["deleted"] += len(aws.bills.keys() - aws.jobs.keys())
        events["never sent"] += len(reserved - aws.bills.keys())
        events["failed runs"] += len(entries.of("failed"))
        events["nearly all spent"] += spent > 0.8 * CEILING
    assert min(events.values()) > histories / 10


def packed(files: dict[str, bytes]) -> bytes:
    """A tar.gz."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    return content.getvalue()


@pytest.fixture
def jobs(cloud, s3, cli, short_text_file, monkeypatch, same_seeds):
    """The jobs that SageMaker was sent for a search, which began. They leave models of no content;
    one whose reason is set fails. What a folder loses stands in it, and is judged by nobody."""
    import sagemaker_service  # which imports moto

    sent: list[sagemaker_service.Job] = []

    def run(job: sagemaker_service.Job) -> None:
        sent.append(job)
        for state in ("Downloading", "Training"):
            job.enter(state)
        job.training_seconds = 100
        if job.script:
            return job.end("Failed", job.script["reason"])
        files = dict[str, bytes]()
        for index, (_, seed) in enumerate(json.loads(archive_of(job)["plan.json"])["runs"]):
            if index < cloud.cut:
                continue
            facts = {"seconds": 30.0, "problem": ""}
            files[f"run-{index}/facts.json"] = json.dumps(facts).encode()
            model = packed({"model/seed": str(seed).encode()})
            files[f"run-{index}/model.tar.gz"] = cloud.damaged or model
        bucket, key = sagemaker_service.split(job.request["OutputDataConfig"]["S3OutputPath"])
        path = f"{key}/{job.name}/output/model.tar.gz"
        s3.put_object(Bucket=bucket, Key=path, Body=packed(files))
        return job.end("Completed")

    def archive_of(job: sagemaker_service.Job) -> dict[str, bytes]:
        [code] = [c for c in job.request["InputDataConfig"] if c["ChannelName"] == "code"]
        bucket, key = sagemaker_service.split(code["DataSource"]["S3DataSource"]["S3Uri"])
        content = s3.get_object(Bucket=bucket, Key=key.rstrip("/"))["Body"].read()
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            return {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]

    def score(
        self: Judge, model: Path, source: Source, leak_check_bound: float, limit: float
    ) -> Score:
        draw = random.Random(f"{edits_of(source)} {(model / 'seed').read_text()}")
        return Score(2.0 - gain_of(source) + draw.gauss(0, 0.004), 3.0)

    monkeypatch.setattr(Judge, "score", score)
    monkeypatch.setattr(Search, "check", lambda self, source: None)
    sizes = {"parameters": 100, "tokens": 1000, "bytes": 1000}
    monkeypatch.setattr(search, "sizes_of", lambda model: sizes)
    cloud.sagemaker.run, cloud.archive_of, cloud.damaged = run, archive_of, b""
    cloud.cut = 0
    arguments = ("--instance", "ml.g5.12xlarge", "--ceiling", "10", "--smallest-gain", "0.01")
    assert cli("try", "start", "plays", "--text", short_text_file, *arguments).good
    return sent


@pytest.fixture
def attempt(cli, jobs, tmp_path):
    """Tries a folder with so much gain, which must not be imported here."""

    def run(gain: float = 0.0) -> Any:
        path = folder(tmp_path / f"gains-{gain}", gain)
        (path / "config.py").write_text("raise RuntimeError('it was imported')\n")
        return cli("try", "run", str(path), "--group", "plays", "--json")

    return run


def ledger_of(home: Path) -> SearchLedger:
    return SearchLedger(home / "tries" / "plays")


def test_a_keep_is_two_jobs_of_known_cost(attempt, jobs, home, cloud):
    ran = attempt(0.05)
    assert ran.code == 0, ran.err
    entry, book = json.loads(ran.out), ledger_of(home)
    assert entry["verdict"] == "kept"
    assert entry["fresh"] is True
    base, *of_try = book.of("settled")
    assert entry["usd"] == pytest.approx(sum(each["usd"] for each in of_try), abs=1e-4)
    assert base["usd"] == pytest.approx(7.09 * 100 / 3600, rel=0.01)
    assert len(jobs) == len(book.of("sent")) == 3 and not book.open_reservations
    base_seeds = {run["seed"] for run in book.of("run") if run["folder"] == entry["base"]}
    assert {*book.seeds(search.SHARED_SEEDS, 8)} < base_seeds


@pytest.mark.parametrize("command", ["fetch-and-sample", "metrics"])
def test_latest_is_no_job_of_a_search(jobs, cli, job, command):
    ran = cli(command, "latest")
    message = f"makes the runs of search plays; the newest other job is {job.job_id}"
    assert message in ran.good.err


def test_a_group_is_also_the_jobs_of_a_search(attempt, jobs, cli):
    """`jobs`, `report`, `stop` and `delete` take its name, as they take that of a sweep."""
    attempt(0.05)
    ids = {job.name for job in jobs}
    assert len(ids) == 3
    listed = json.loads(cli("jobs", "--group", "plays", "--json").good.out)
    assert {job["job_id"] for job in listed} == ids
    assert "JOB-ID" in cli("jobs", "--group", "plays").good.out
    assert cli("report", "--group", "plays").failed(1, "search plays", "try log plays")
    assert "search plays is stopped" in cli("stop", "--group", "plays").good.err
    assert cli("delete", "--group", "plays", "--yes").good
    assert json.loads(cli("jobs", "--json").good.out) == []


def test_a_job_of_a_search_says_that_it_has_no_model(jobs, cli):
    driver = jobs[-1].name
    assert cli("fetch-and-sample", driver).failed(1, "search plays", "copy-script my_gpt --from")
    assert cli("wait", driver).good.err.endswith("sm-nanogpt try log plays\n")
    assert "search:      plays\n" in cli("status", driver).good.out


def test_a_job_reaches_nobody_and_has_each_folder_apart(attempt, jobs, home, cloud):
    attempt(0.05)
    request, files = jobs[-1].request, cloud.archive_of(jobs[-1])
    assert request["EnableNetworkIsolation"] is True
    assert request["StoppingCondition"]["MaxRuntimeInSeconds"] < 600
    assert files["train.py"] == jobs_of.DRIVER.read_bytes()
    for name in {run[0] for run in json.loads(files["plan.json"])["runs"]}:
        assert {f"{name}/train.py", f"{name}/config.py", f"{name}/model.py"} < files.keys()


def test_a_try_over_the_ceiling_sends_nothing(attempt, jobs, home, cloud, s3):
    ledger_of(home).reserve("another", 9.5, place="", runs=[])
    n_keys = s3.list_objects_v2(Bucket=s3.bucket)["KeyCount"]
    ran = attempt()
    assert ran.code == 5
    assert json.loads(ran.out)["verdict"] == "ceiling"
    assert len(jobs) == 1
    assert s3.list_objects_v2(Bucket=s3.bucket)["KeyCount"] == n_keys


def test_a_killed_commands_job_is_taken_not_paid_again(attempt, jobs, home, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(GroupRun, "poll", failing(KeyboardInterrupt()))
        assert "interrupted" in attempt().err
    assert len(ledger_of(home).open_reservations) == 1
    again = attempt()
    assert again.code == 3 and "was sent before" in again.err
    assert len(jobs) == 2 and not ledger_of(home).open_reservations


def test_a_search_on_sagemaker_survives_kills(attempt, jobs, home, monkeypatch):
    """At each write of its ledger, whole or in part: no run is lost, made twice, or paid twice."""
    monkeypatch.setattr(jobs_of, "MAX_UNKNOWN_SECONDS", 0)  # for jobs that were never sent
    for number in range(1, 8):  # reserved, sending, sent, settled, and the first runs
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, number, is_torn=number % 2 == 0)
            with pytest.raises(kills.Killed):
                attempt(number * 1e-6)
        assert attempt(number * 1e-6).code == 3
    ledger = ledger_of(home)
    names = [job.name for job in jobs]
    assert Counter(entry["job"] for entry in ledger.of("sent")) == dict.fromkeys(names, 1)
    reserved = [entry for entry in ledger.of("reserved") if entry["job"] in names]
    run_counts = Counter(tuple(run) for entry in reserved for run in entry["runs"])
    assert set(run_counts.values()) == {1}
    assert Counter((run["folder"], run["seed"]) for run in ledger.of("run")) == run_counts
    assert not ledger.open_reservations
    assert ledger.spent == pytest.approx(len(names) * 7.09 * 100 / 3600, rel=0.01)


def begun_job(self: Search) -> dict[str, Any]:
    """Send the job of the base, and do not wait for it."""
    first = self.source(self.start["folder"])
    runs = SageMakerRuns(self)
    runs.begin_stage([SeededRun(first, seed) for seed in range(1, 9)])
    runs.start(1, runs.waiting[1])
    return {"loss": 2.0, "sd": 0.01, "pairs": 8}


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_job_whose_answer_was_lost_is_taken(attempt, jobs, home, cloud):
    create = cloud.sagemaker.CreateTrainingJob

    def lost(body: dict[str, Any]) -> Any:
        create(body)
        cloud.refuse["DescribeTrainingJob"] = ("InternalFailure", "lost", 500)
        raise Refusal("InternalFailure", "lost", 500)

    cloud.sagemaker.CreateTrainingJob = lost
    assert attempt().code == 1
    assert len(ledger_of(home).open_reservations) == 1
    cloud.refuse.clear()
    assert attempt().code == 3
    assert len(jobs) == 2 and not ledger_of(home).open_reservations


@pytest.mark.parametrize("failure", ["refused", "failed"])
def test_a_job_that_fails_can_be_tried_again(attempt, jobs, home, cloud, failure):
    if failure == "refused":
        cloud.refuse["CreateTrainingJob"] = ("AccessDeniedException", "no quota")
    else:
        cloud.sagemaker.next_script = {"reason": "AlgorithmError: the GPU is gone"}
    assert attempt().failed(1, "no quota" if failure == "refused" else "the GPU is gone")
    cost = ledger_of(home).of("settled")[-1]["usd"]
    assert cost == 0 if failure == "refused" else cost > 0
    cloud.refuse.clear()
    cloud.sagemaker.next_script = {}
    assert attempt().code == 3
    assert not ledger_of(home).open_reservations


def test_a_job_waits_while_another_holds_the_quota(attempt, jobs, home, cloud, monkeypatch):
    """SageMaker counts the job of the base for a while after its end."""
    monkeypatch.setattr("sm_nanogpt.launcher.aws.QUOTA_RETRY_SECONDS", 0.1)
    quota = cloud.sagemaker.quota
    quota["ml.g5.12xlarge for training job usage"] = 0
    poll = GroupRun.poll

    def frees(run: GroupRun) -> Iterator[Event]:
        quota["ml.g5.12xlarge for training job usage"] = 1
        yield from poll(run)

    monkeypatch.setattr(GroupRun, "poll", frees)
    ran = attempt()
    assert ran.code == 3
    assert ran.err.count(" waits: CreateTrainingJob: ") == 1
    assert len(jobs) == 2 and not ledger_of(home).open_reservations


def test_a_damaged_model_refuses_the_try_alone(attempt, jobs, home, cloud):
    cloud.damaged = b"no archive"
    ran = attempt()
    assert ran.code == 4
    assert json.loads(ran.out)["verdict"] == "refused"
    assert len(ledger_of(home).of("failed")) == 1 and not ledger_of(home).open_reservations


def test_what_a_stopped_job_did_not_make_is_made_anew(attempt, jobs, home, cloud):
    cloud.cut = 1
    assert attempt().failed(1, "ended before all runs were made")
    cloud.cut = 0
    assert attempt().code == 3
    assert len(ledger_of(home).of("failed")) == 1 and len(jobs) == 3


@pytest.mark.parametrize("name", ["link", "link to a file", "large"])
def test_a_model_is_packed_without_what_it_links_to(tmp_path, name):
    secret, model = tmp_path / "secret", tmp_path / "model"
    secret.mkdir()
    (secret / "weights").write_text("another's")
    if name == "link":
        model.symlink_to(secret)
    else:
        model.mkdir()
        if name == "large":
            (model / "weights").write_bytes(bytes(2_000_000))
        else:
            (model / "weights").symlink_to(secret / "weights")
    try:
        driver.pack(model, tmp_path / "packed", 1_000_000)
    except OSError:
        assert name != "link to a file"
        return
    with pytest.raises(ServiceError, match="is a link"):
        jobs_of.fetch.extract(tmp_path / "packed", tmp_path / "unpacked", "it")


def test_a_search_takes_one_type_of_instance(cloud, cli, short_text_file):
    arguments = ("--instance", "ml.g5.xlarge,ml.g6.xlarge", "--ceiling", "10")
    ran = cli("try", "start", "plays", "--text", short_text_file, *arguments)
    assert ran.failed(2, "--instance ml.g5.xlarge,ml.g6.xlarge: a search takes one type")


STARTS = ("try", "start", "plays", "--instance", "ml.g5.12xlarge", "--ceiling", "10")


def test_a_ceiling_of_the_settings_shortens_the_first_job(
    cloud, cli, short_text_file, monkeypatch, home
):
    monkeypatch.setenv("SM_NANOGPT_MAX_COST", "3")
    monkeypatch.setattr(Search, "measure_base", begun_job)
    assert cli(*STARTS, "--text", short_text_file).good
    [job] = cloud.sagemaker.jobs.values()
    [reserved] = ledger_of(home).of("reserved")
    assert reserved["usd"] <= 3
    assert job.request["StoppingCondition"]["MaxRuntimeInSeconds"] < 3600


@pytest.mark.parametrize("refusal", ["settings", "ceiling", "quota"])
def test_a_search_that_is_refused_leaves_nothing(
    cloud, cli, short_text_file, monkeypatch, home, refusal
):
    arguments = [*STARTS, "--text", short_text_file]
    if refusal == "settings":
        monkeypatch.setenv("SM_NANOGPT_MAX_COST", "1")
    elif refusal == "ceiling":
        arguments += ["--ceiling", "0.01"]
    else:
        cloud.sagemaker.quota["ml.g5.12xlarge for training job usage"] = 0
    assert cli(arguments).code == (1 if refusal == "quota" else 2)
    assert [*(home / "tries").iterdir()] == []
    assert not cloud.sagemaker.jobs


def test_a_refused_start_keeps_what_another_command_reserved(
    cloud, cli, short_text_file, monkeypatch, home
):
    def reserved_meanwhile(self: Search) -> None:
        self.ledger.reserve("another", 9.5, place="", runs=[])
        raise OverCeiling("no money is free")

    monkeypatch.setattr(Search, "measure_base", reserved_meanwhile)
    assert cli(*STARTS, "--text", short_text_file).failed(2, "no money is free")
    assert ledger_of(home).reserved == 9.5


def test_without_a_price_nothing_is_sent(cloud, cli, short_text_file, s3):
    arguments = ("--instance", "ml.g5.48xlarge", "--ceiling", "10")
    ran = cli("try", "start", "plays", "--text", short_text_file, *arguments)
    assert ran.failed(2, "the price of ml.g5.48xlarge is unknown")
    assert s3.list_objects_v2(Bucket=s3.bucket)["KeyCount"] == 0


def test_a_run_of_a_job_starts_with_the_filter_alone(tmp_path):
    """Its files need nothing of the launcher."""
    for name, path in jobs_of.FILTER_FILES.items():
        (tmp_path / name).write_bytes(path.read_bytes())
    assert driver.has_filter(tmp_path)
    code = "import os; print(os.getpid()); os.fork()"
    start = [sys.executable, "-P", "-c", driver.FILTER_PROGRAM, str(tmp_path), "False"]
    done = subprocess.run([*start, sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.count("\n") == 1
    assert "Operation not permitted" in done.stderr


def test_a_run_of_a_job_has_its_share_of_threads_and_no_secret(tmp_path, monkeypatch):
    plan = {"runs": [["a", 1], ["a", 2], ["b", 1]], "variables": ["PATH"]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    monkeypatch.setattr(driver, "JOB_FOLDER", tmp_path)
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8))
    second = driver.Driver(tmp_path, rank=1, world_size=2)
    assert [(run.index, run.folder, run.seed) for run in second.runs()] == [(1, "a", 2)]
    variables = second.environment(tmp_path)
    assert "HF_TOKEN" not in variables
    assert variables["OMP_NUM_THREADS"] == "4"
    assert variables["MKL_DYNAMIC"] == "FALSE"  # else one thread, on Intel and in the filter


def test_an_image_without_the_library_is_known(tmp_path):
    (tmp_path / "syscalls.py").write_text("def is_available(): return False")
    assert not driver.has_filter(tmp_path)
