"""Sweeps: the grid, the ceiling, how many jobs run at a time, and the ranking."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import launching
import pytest
from launching import Ran, until

from launcher import Settings
from launcher.errors import ServiceError
from launcher.job import JobDescription, Request
from launcher.launching import sweeps
from launcher.launching.sweeps import Sweep, find_sweep, grid, ranking, stop_all, tries_of
from launcher.local.backend import LocalBackend
from launcher.sagemaker.cost import CeilingTooLow

GROUP = "sm-nanogpt-20260101-000000-abcdef"
CLOUD = ("launch", "--instance", "ml.g5.xlarge")


def described(job_id: str, status: str = "Completed", **values: Any) -> JobDescription:
    loss = values.pop("best_loss", None)
    return JobDescription(
        job_id=job_id,
        status=status,
        secondary_status=status,
        instance="local",
        instance_count=1,
        created=0.0,
        data="",
        hyperparameters=values,
        metrics=None if loss is None else {"best_loss": loss},
    )


class Fake:
    """A backend whose jobs end when they were asked about twice."""

    poll_seconds = 0.0

    def __init__(self, *jobs: JobDescription) -> None:
        self.jobs = {job.job_id: job for job in jobs}
        self.asked: dict[str, int] = {}
        self.most = 0
        self.described = 0
        self.stopped: list[str] = []

    def stop(self, job_id: str) -> None:
        self.stopped.append(job_id)
        self.jobs[job_id] = described(job_id, "Stopping")

    def job(self, job_id: str) -> Request:
        return Request()

    def places(self, job_id: str) -> list[str]:
        return [f"file:///{job_id}"]

    def list(self) -> Iterator[JobDescription]:
        yield from self.jobs.values()

    def describe(self, job_id: str) -> JobDescription | None:
        job = self.jobs.get(job_id)
        if job is None:
            return None
        self.described += 1
        self.asked[job_id] = self.asked.get(job_id, 0) + 1
        if job.is_running and self.asked[job_id] > 1:
            job = self.jobs[job_id] = described(job_id)
        return job

    def submit(self, job_id: str) -> None:
        self.jobs[job_id] = described(job_id, "InProgress")
        self.most = max(self.most, sum(job.is_running for job in self.jobs.values()))


@pytest.fixture
def ran(home, monkeypatch):
    """Runs a sweep of four jobs, two at a time, on a Fake; returns it and the jobs prepared."""

    def run(
        *jobs: JobDescription,
        stop_at: str = "",
        job: Request | None = None,
        used_up: tuple[str, ...] = (),
        sleep: Callable[[float], None] = lambda seconds: None,
    ) -> tuple[Fake, list[Request]]:
        fake, prepared = Fake(*jobs), list[Request]()

        def prepare(job: Request, settings: Settings, job_id: str) -> Any:
            prepared.append(job)
            if job.resume in used_up:
                raise CeilingTooLow("even a run of 60 s costs more")
            submit = partial(fake.submit, job_id)
            return SimpleNamespace(job=job, upload=lambda: None, submit=submit)

        monkeypatch.setattr(sweeps, "prepare", prepare)
        monkeypatch.setattr(sweeps, "backend_for", lambda instance, settings: fake)
        monkeypatch.setattr(sweeps.time, "sleep", sleep)
        settings = Settings(home=home)
        sweep = Sweep(
            job=job or Request(data="x"), members=grid({"n_layer": [1, 2]}, 2, 7), parallel=2
        )
        sweeps.write_record(GROUP, sweep, settings)
        for progress in sweeps.run(GROUP, sweep, settings):
            if progress.job_id == stop_at:
                stop_all(GROUP, tries_of([described(f"{GROUP}-1")], GROUP), settings)
        return fake, prepared

    return run


def test_a_grid_has_each_combination_with_each_seed():
    each = grid({"learning_rate": ["0.1", "0.2"], "n_layer": ["1"]}, 2, 5)
    assert [list(values.values()) for values in each] == [
        ["0.1", "1", 5],
        ["0.1", "1", 6],
        ["0.2", "1", 5],
        ["0.2", "1", 6],
    ]


def test_no_more_jobs_run_than_asked(ran):
    fake, prepared = ran()
    assert list(fake.jobs) == [f"{GROUP}-{n}" for n in range(1, 5)]
    assert fake.most == 2
    assert prepared[3].hyperparameters == {"n_layer": 2, "seed": 8}


def test_a_sweep_continues_where_it_was(ran):
    stopped = described(f"{GROUP}-2", "Stopped")
    object.__setattr__(stopped, "checkpoint_uri", "file:///x")
    failed = described(f"{GROUP}-4-try2", "Failed")
    fake, prepared = ran(described(f"{GROUP}-1"), stopped, described(f"{GROUP}-4"), failed)
    assert set(fake.jobs) - {f"{GROUP}-1", f"{GROUP}-2", f"{GROUP}-4", f"{GROUP}-4-try2"} == {
        f"{GROUP}-2-try2",
        f"{GROUP}-3",
        f"{GROUP}-4-try3",
    }
    assert [job.resume for job in prepared] == [f"{GROUP}-2", None, None]


def test_a_failed_trys_cost_lowers_the_next_ceiling(ran, monkeypatch):
    def with_costs(found: list[JobDescription], settings: Settings) -> list[JobDescription]:
        return [replace(description, cost=0.25) for description in found]

    monkeypatch.setattr(sweeps, "with_costs", with_costs)
    failed = [described(f"{GROUP}-1{suffix}", "Failed") for suffix in ("", "-try2")]
    job = Request(instance="ml.g5.xlarge", data="x", max_cost=4)
    fake, prepared = ran(*failed, described(f"{GROUP}-11", "Failed"), job=job)
    assert [each.max_cost for each in prepared] == [0.5, 1, 1, 1]
    assert f"{GROUP}-1-try3" in fake.jobs


def test_a_resumed_try_has_the_share_that_others_left(ran, monkeypatch):
    """`prepare` itself counts the tries that this one continues."""
    monkeypatch.setattr(
        sweeps, "with_costs", lambda found, settings: [replace(job, cost=0.25) for job in found]
    )
    stopped = replace(described(f"{GROUP}-1-try2", "Stopped"), checkpoint_uri="s3://x")
    job = Request(instance="ml.g5.xlarge", data="x", max_cost=4)
    _, prepared = ran(described(f"{GROUP}-1", "Failed"), stopped, job=job)
    assert (prepared[0].resume, prepared[0].max_cost) == (stopped.job_id, 0.75)


def test_a_job_that_runs_is_not_started_again(ran):
    fake, prepared = ran(described(f"{GROUP}-1", "InProgress"))
    assert len(prepared) == 3
    assert fake.most == 2


def test_a_sweep_that_is_stopped_stops_its_jobs_and_starts_none(ran):
    """Also a job that started while somebody stopped the sweep, maybe on another machine."""
    fake, _ = ran(stop_at=f"{GROUP}-2")
    assert fake.stopped == list(fake.jobs) == [f"{GROUP}-1", f"{GROUP}-2"]


def test_a_job_that_is_not_listed_yet_is_not_started_again(ran, monkeypatch):
    monkeypatch.setattr(Fake, "list", lambda self: iter(()))
    fake, prepared = ran(described(f"{GROUP}-1", "InProgress"), described(f"{GROUP}-2"))
    assert len(prepared) == 2
    assert set(fake.jobs) == {f"{GROUP}-{n}" for n in range(1, 5)}


def test_a_job_at_its_ceiling_does_not_keep_the_others(ran):
    stopped = replace(described(f"{GROUP}-1", "Stopped"), checkpoint_uri="s3://x")
    fake, prepared = ran(stopped, used_up=(f"{GROUP}-1",))
    assert list(fake.jobs) == [f"{GROUP}-{n}" for n in range(1, 5)]
    assert len(prepared) == 4


def test_all_jobs_are_described_once_a_poll(ran, monkeypatch):
    monkeypatch.setattr(Fake, "poll_seconds", 5.0)
    slept = list[float]()
    fake, _ = ran(sleep=slept.append)
    assert set(slept) == {5.0}
    assert fake.described == 2 * len(slept)


def test_a_sweep_is_run_by_one_command(home):
    settings = Settings(home=home)
    with (
        sweeps.alone(GROUP, settings),
        pytest.raises(ServiceError, match="another command runs"),
        sweeps.alone(GROUP, settings),
    ):
        pass


def test_a_record_runs_at_least_one_job_at_a_time(home):
    settings = Settings(home=home)
    sweeps.write_record(GROUP, Sweep(job=Request(), members=[{}], parallel=1), settings)
    record = sweeps.record_of(GROUP, settings)
    record.write_text(record.read_text().replace('"parallel": 1', '"parallel": 0'))
    with pytest.raises(ServiceError, match="parallel"):
        sweeps.read_record(GROUP, settings)


def test_a_record_keeps_what_was_said(home):
    job = Request(instance="ml.g5.xlarge", max_cost=3, hyperparameters={"n_layer": 2})
    sweep = Sweep(job=job, members=[{"seed": 1}], parallel=1)
    sweeps.write_record(GROUP, sweep, Settings(home=home))
    read = sweeps.read_record(GROUP, Settings(home=home))
    assert read == sweep
    assert read is not None
    assert read.job.model_fields_set == job.model_fields_set


def test_the_ranking_is_by_the_mean_over_seeds():
    found = [
        described("a", n_layer=1, seed=1, best_loss=2.0),
        described("b", n_layer=1, seed=2, best_loss=3.0),
        described("c", n_layer=2, seed=1, best_loss=2.4),
        described("d", n_layer=2, seed=2),
    ]
    first, second = ranking(found)
    assert (first.values, first.losses, second.loss) == ({"n_layer": 2}, [2.4], 2.5)


def test_the_ranking_has_the_jobs_that_were_not_started():
    found = [described("a", n_layer=1, best_loss=2.0), None]
    first, second = ranking(found, [{"n_layer": "1"}, {"n_layer": "2"}])
    assert (first.values, first.n) == ({"n_layer": "1"}, 1)
    assert (second.values, second.jobs, second.n) == ({"n_layer": "2"}, [], 1)


def test_the_newest_try_of_a_member_is_its_last():
    ids = [f"{GROUP}-1", f"{GROUP}-1-try2", f"{GROUP}-10", "sm-nanogpt-20260101-000000-abcde0-1"]
    found = tries_of([described(each) for each in reversed(ids)], GROUP)
    assert {n: [d.job_id for d in each] for n, each in found.items()} == {1: ids[:2], 10: [ids[2]]}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--sweep", "n_layer=1,1"), "--sweep n_layer=1,1: a value is empty or given twice"),
        (("--sweep", "n_head=1,1e0"), "--sweep n_head=1,1e0: a value is empty or given twice"),
        (
            ("--sweep", "n-head=1", "--sweep", "n_head=2"),
            "--sweep n_head: given twice ('1' and '2')",
        ),
        (("--sweep", "n_layer=1,"), "--sweep n_layer=1,: a value is empty or given twice"),
        (
            ("--sweep", "seed=1,2", "--resume", "a-job"),
            "--resume continues one job; to start the jobs of a sweep from its weights, use"
            " --init-from a-job",
        ),
        (("--parallel", "2"), "--parallel is for jobs of a sweep; add --sweep or --seeds"),
        (
            ("--sweep", "n_layer=1,2", "--set", "n-layer=3"),
            "--sweep n_layer: --set or --config gives it too; leave one out",
        ),
        (
            ("--sweep", "seed=1,2", "--seeds", "2"),
            "--sweep seed and --seeds cannot be combined",
        ),
        (
            ("--seeds", "2", "--detach"),
            "--follow and --detach are not for sweeps: this command runs until all jobs ended",
        ),
    ],
)
def test_a_wrong_sweep_is_one_line(words, error, cli, text_file):
    ran = cli("launch", "--instance", "local", "--data", str(text_file), *words)
    assert (ran.code, ran.error) == (2, error)


def test_one_invalid_value_starts_no_job(cli, text_file):
    words = ("launch", "--instance", "local", "--data", str(text_file), "--sweep", "n_layer=1,0")
    ran = cli(*words)
    assert (ran.code, ran.out) == (2, "")
    assert "n_layer=0" in ran.error


def test_the_ceiling_holds_for_the_sum(cloud, cli, text_file):
    words = ("--sweep", "n_layer=2,4", "--seeds", "2", "--max-cost", "4", "--dry-run")
    ran = cli(*CLOUD, "--data", str(text_file), *words)
    requests = json.loads(ran.out)
    assert [r["HyperParameters"]["n_layer"] for r in requests] == ["2", "2", "4", "4"]
    (limit,) = {r["StoppingCondition"]["MaxRuntimeInSeconds"] for r in requests}
    alone = cli(*CLOUD, "--data", str(text_file), "--max-cost", "1", "--dry-run")
    assert json.loads(alone.out)["StoppingCondition"]["MaxRuntimeInSeconds"] == limit < 3600


def test_a_sweep_on_sagemaker_says_what_it_costs_and_ranks(cloud, cli, text_file):
    words = ("--sweep", "n_layer=2,4", "--parallel", "2", "--max-cost", "2")
    ran = cli(*CLOUD, "--data", str(text_file), *words)
    assert ran.code == 0, ran.err
    group = ran.out.strip()
    assert "sweep: 2 jobs, 2 at a time\ncost: at most 2.00 USD together\n" in ran.err
    ranked = cli("jobs", "--group", group[-6:])
    assert ranked.out in ran.err
    assert ranked.out.split()[:5] == ["RANK", "BEST", "LOSS", "SPREAD", "JOBS"]
    assert {d["job_id"] for d in json.loads(cli("jobs", "--group", "latest", "--json").out)} == {
        f"{group}-1",
        f"{group}-2",
    }


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--dry-run",), "--dry-run"),
        (("--set", "max_steps=9"), "--set"),
        (("--seeds", "2"), "--seeds"),
        (("--detach",), "--detach"),
    ],
)
def test_a_sweep_continues_only_as_it_was_launched(words, named, home, cli):
    sweeps.write_record(GROUP, Sweep(job=Request(), members=[{}], parallel=1), Settings(home=home))
    ran = cli("launch", "--resume", GROUP, *words)
    assert (ran.code, ran.error.rpartition(": ")[2]) == (2, f"leave out {named}")
    assert not (home / "jobs").exists()


def test_a_continued_sweep_says_what_it_costs(cloud, cli, text_file, home):
    ran = cli(*CLOUD, "--data", str(text_file), "--sweep", "n_layer=2,4", "--max-cost", "2")
    group = ran.out.strip()
    record = sweeps.record_of(group, Settings(home=home))
    document = json.loads(record.read_text())
    document["members"].append({"n_layer": 6})
    record.write_text(json.dumps(document))
    ran = cli("launch", "--resume", group)
    assert ran.code == 0, ran.err
    assert "\ncost: at most 0.67 USD together\n" in ran.err  # a third, for the job left
    assert ran.err.count("warning: the run reads the text 39 times") == 1


def test_a_continued_sweep_takes_a_larger_ceiling(cloud, cli, text_file, home):
    settings = Settings(home=home)
    job = Request(instance="ml.g5.xlarge", data=str(text_file), max_cost=0.02)
    sweeps.write_record(
        GROUP, Sweep(job=job, members=grid({"n_layer": ["2"]}, 1, 0), parallel=1), settings
    )
    assert "0.02 USD (--max-cost) is too low" in cli("launch", "--resume", GROUP).error
    ran = cli("launch", "--resume", GROUP, "--max-cost", "1")
    assert ran.code == 0, ran.err
    record = sweeps.read_record(GROUP, settings)
    assert record is not None
    assert record.job.max_cost == 1


def test_a_local_sweep_runs_to_its_end(home, text_file):
    words = launching.launching("--sweep", "n_embd=16,32", "--parallel", "2", data=text_file)
    del words[words.index("n_embd=32") - 1 : words.index("n_embd=32") + 1]
    ran = launching.command(*words, home=home)
    assert ran.code == 0, ran.err
    assert len(list((home / "jobs").iterdir())) == 2
    assert "RANK  BEST LOSS" in ran.err


@pytest.fixture
def swept(job):
    """A sweep of two copies of a finished job."""
    for n in (1, 2):
        shutil.copytree(job.directory, job.home / "jobs" / f"{GROUP}-{n}")
    return GROUP


@pytest.mark.parametrize("word", ["latest", GROUP[-6:], GROUP, f"{GROUP}-2"])
def test_a_sweep_is_found_by_a_part_of_its_id(word, swept, job):
    group, tries = find_sweep(word, Settings(home=job.home))
    assert (group, sorted(tries)) == (swept, [1, 2])


def test_a_sweep_has_one_report(swept, cli):
    ran = cli("report", "--group", "latest")
    assert (ran.code, ran.out) == (0, "report-2-runs.html\n")


def test_a_report_names_the_jobs_without_a_curve(swept, job, cli):
    curve = "hosts/algo-1/checkpoints/metrics-00000001.jsonl"
    (job.home / "jobs" / f"{swept}-1" / curve).unlink()
    ran = cli("report", "--group", "latest")
    assert ran.out == f"report-{swept}-2.html\n"
    assert f"{swept}-1 is left out: it is Completed and has no curve yet" in ran.err
    (job.home / "jobs" / f"{swept}-2" / curve).unlink()
    ran = cli("report", "--group", "latest")
    assert (ran.code, ran.error.partition(";")[0]) == (1, "no job of this sweep has a curve yet")


def test_no_such_sweep_is_one_line(cli):
    ran = cli("jobs", "--group", "nope")
    assert (ran.code, ran.error.partition(";")[0]) == (2, "'nope' matches no sweeps")


def test_a_sweep_on_sagemaker_is_stopped_from_any_machine(
    cloud, cli, text_file, tmp_path, monkeypatch
):
    """The command that stops it has another home, and so no record of the sweep."""
    ran = list[Ran]()

    def stop() -> None:
        until(lambda: len(cloud.sagemaker.jobs) == 1)
        group = next(iter(cloud.sagemaker.jobs)).rpartition("-")[0]
        settings = Settings(home=tmp_path / "other")
        stop_all(*find_sweep(group, settings), settings)

    thread = threading.Thread(target=stop)
    thread.start()
    ran.append(cli(*CLOUD, "--data", str(text_file), "--sweep", "n_layer=2,4,6"))
    thread.join()
    assert ran[0].code == 1
    assert [job.status for job in cloud.sagemaker.jobs.values()] == ["Stopped"]


@pytest.fixture
def running(cloud, cli, text_file, monkeypatch):
    """A sweep of three jobs that run, whose command has ended."""

    def crash(settings: Settings) -> None:
        raise ServiceError("no")

    poll = "launcher.sagemaker.backend.SageMakerBackend.poll_seconds"
    monkeypatch.setattr(poll, property(crash))
    ran = cli(*CLOUD, "--data", str(text_file), "--sweep", "n_layer=2,4,6", "--parallel", "3")
    monkeypatch.setattr(poll, 0.05)
    assert len(cloud.sagemaker.jobs) == 3
    return ran.out.strip()


def test_the_jobs_that_search_does_not_know_yet_are_stopped_too(cloud, cli, running):
    cloud.sagemaker.search_lag = 500
    ran = cli("stop", "--group", "latest")
    assert ran.code == 0, ran.err
    assert {job.status for job in cloud.sagemaker.jobs.values()} == {"Stopped"}
    assert cli("delete", "--group", running, "--yes").code == 0
    assert not cloud.sagemaker.jobs


def test_the_end_of_a_sweep_is_known_before_search_knows_it(cloud, cli, text_file, monkeypatch):
    search = cloud.sagemaker.Search

    def late(body: dict[str, Any]) -> Any:
        found = search(body)
        for each in found["Results"]:
            each["TrainingJob"]["TrainingJobStatus"] = "InProgress"
        return found

    monkeypatch.setattr(cloud.sagemaker, "Search", late)
    ran = cli(*CLOUD, "--data", str(text_file), "--sweep", "n_layer=2,4")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("words", ["stop", "delete --yes"])
def test_no_sweep_out_of_reach_is_stopped_or_deleted(cloud, cli, home, words):
    sweep = Sweep(job=Request(instance="ml.g5.xlarge"), members=[{}], parallel=1)
    sweeps.write_record(GROUP, sweep, Settings(home=home))
    cloud.refuse["Search"] = ("ExpiredTokenException", "no")
    ran = cli(*words.split(), "--group", GROUP)
    assert ran.code == 1
    assert "Search: the AWS credentials have expired" in ran.error
    assert sweeps.record_of(GROUP, Settings(home=home)).exists()


def test_a_sweep_without_jobs_is_not_called_stopped(cli, home):
    sweep = Sweep(job=Request(instance="local"), members=[{}], parallel=1)
    sweeps.write_record(GROUP, sweep, Settings(home=home))
    ran = cli("stop", "--group", GROUP)
    assert (ran.code, ran.error.partition(":")[0]) == (1, f"sweep {GROUP} has started no job yet")


def test_a_sweep_starts_from_the_model_that_was_the_latest(home, job, text_file, cli):
    words = ("--sweep", "max_steps=1,2", "--set", "sample_length=0", "--set", "eval_windows=4")
    at_once = ("--data", str(text_file), "--init-from", "latest", *words)
    ran = cli("launch", "--instance", "local", "--preset", "quick", *at_once)
    assert ran.code == 0, ran.err
    local = LocalBackend(Settings(home=home))
    models = {local.job(f"{ran.out.strip()}-{n}").init_from for n in (1, 2)}
    assert len(models) == 1
    assert job.job_id in str(models)


@pytest.mark.parametrize("command", ["status", "logs", "metrics", "stop", "delete"])
def test_a_sweeps_id_in_place_of_a_jobs_names_the_command(command, home, cli):
    sweeps.write_record(GROUP, Sweep(job=Request(), members=[{}], parallel=1), Settings(home=home))
    ran = cli(command, GROUP)
    takes = command if command in ("stop", "delete") else "jobs"
    assert ran.code == 2
    assert f"`sm-nanogpt {takes} --group {GROUP}`" in ran.error


def test_an_interrupted_sweep_is_shown_whole_and_resumed(swept, job, cli, monkeypatch):
    shutil.rmtree(job.directory)
    members = grid({"n_embd": ["32", "48", "64"]}, 1, 0)
    sweep = Sweep(job=Request(instance="local"), members=members, parallel=1)
    sweeps.write_record(swept, sweep, Settings(home=job.home))
    table = cli("jobs", "--group", "latest").out.splitlines()
    assert "n_embd" in table[0]
    assert [line.split()[3:5] for line in table[3:]] == [["0/1", "64"]]
    resumed = list[str]()
    monkeypatch.setattr("launcher.cli.sweep.run_sweep", lambda group, *_: resumed.append(group))
    assert cli("launch", "--resume", "latest").code == 0
    assert resumed == [swept]


def test_stop_takes_a_job_or_a_sweep(cli):
    assert cli("stop").error == "give a JOB-ID, or --group with the id of a sweep"


def test_jobs_are_filtered_by_state_and_number(job, cli):
    shutil.copytree(job.directory, job.home / "jobs" / f"{GROUP}-1")
    assert len(json.loads(cli("jobs", "--limit", "1", "--json").out)) == 1
    assert json.loads(cli("jobs", "--status", "Failed", "--json").out) == []
    assert len(json.loads(cli("jobs", "--status", "Completed", "--json").out)) == 2
