"""Sweeps: the grid, the ceiling, how many jobs run at a time, and the ranking."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import launching
import pytest
from jobs import copy_job
from launching import until
from sweeps import GROUP, described, record

from sm_nanogpt import Settings
from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.groups import plan, run
from sm_nanogpt.launcher.groups.find import JobGroup, find_group
from sm_nanogpt.launcher.groups.plan import SweepPlan
from sm_nanogpt.launcher.groups.stop import lock_sweep, stop_group
from sm_nanogpt.launcher.groups.sweep import (
    Sweep,
    SweepLedger,
    check_varied,
    grid,
)
from sm_nanogpt.launcher.job import Request
from sm_nanogpt.launcher.launching.launch import Plan, prepare
from sm_nanogpt.launcher.launching.names import ledger_path, name_reserved, recorded_groups
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.text import corpus

LOCAL = ("launch", "--instance", "local")


def member_plan(sweep: Sweep, number: int, settings: Settings) -> Plan:
    """The next job of a member."""
    plan = SweepPlan(JobGroup(GROUP), sweep, settings)
    plan.plan_member(number, math.inf)
    return plan.plans[number]


def test_a_sweep_without_a_ceiling_asks_for_no_cost(home, monkeypatch):
    """Of a job that it continues: this would ask SageMaker and its price list."""
    monkeypatch.setattr(plan, "cost_with_earlier", None)
    request = Request(instance="local", data="input.txt")
    sweep = Sweep(job=request, members=[{"seed": 1}], parallel=1)
    sweep_plan = SweepPlan(JobGroup(GROUP), sweep, Settings(home=home))
    stopped = described("earlier", "Stopped")
    fields = sweep_plan.fields_of(sweep_plan.next_member(1), stopped, math.inf)
    assert fields == {"resume": "earlier"}


def test_a_grid_has_each_combination_with_each_seed():
    assert grid({"learning_rate": ["0.1", "0.2"], "n_layer": ["1"]}, 2, 5) == [
        {"learning_rate": "0.1", "n_layer": "1", "seed": 5},
        {"learning_rate": "0.1", "n_layer": "1", "seed": 6},
        {"learning_rate": "0.2", "n_layer": "1", "seed": 5},
        {"learning_rate": "0.2", "n_layer": "1", "seed": 6},
    ]


@pytest.mark.parametrize(
    ("varied", "fields", "seeds"),
    [
        ({"n_layer": [1, 2]}, {"hyperparameters": {"n-layer": 3}}, 1),
        ({"seed": [1, 2]}, {}, 2),
        ({"size": [1, 2]}, {"preset": "quick"}, 1),
    ],
)
def test_a_sweep_varies_nothing_that_is_set(varied, fields, seeds):
    with pytest.raises(InputError, match="is given twice"):
        check_varied(varied, Request(instance="local", **fields), seeds)


@pytest.mark.usefixtures("swept")
def test_a_sweep_that_a_command_runs_is_not_deleted(home, cli):
    with lock_sweep(GROUP, Settings(home=home)):
        assert cli("delete", "--group", GROUP, "--yes").failed(1, "another command runs sweep")
    assert (home / "jobs" / f"{GROUP}-1").exists()
    assert cli("delete", "--group", GROUP, "--yes").code == 0


def test_a_job_started_just_before_a_sweep_is_deleted_goes_too(swept, home, cli, monkeypatch):
    @contextmanager
    def late(*_: Any) -> Iterator[None]:
        shutil.copytree(home / "jobs" / f"{swept}-1", home / "jobs" / f"{swept}-3")
        yield

    monkeypatch.setattr("sm_nanogpt.launcher.groups.stop.lock_sweep", late)
    assert cli("delete", "--group", swept, "--yes").good
    assert not [*(home / "jobs").glob(f"{swept}-*")]


@pytest.fixture
def recorded(home):
    """Writes the record of a sweep that was launched from here; returns its path."""

    def write(*members: dict[str, Any], **job: Any) -> Path:
        settings = Settings(home=home)
        sweep = Sweep(
            job=Request(**{"instance": "local", **job}), members=[*members] or [{}], parallel=1
        )
        record(sweep, settings)
        recorded = SweepLedger(GROUP, settings).sweep
        assert recorded is not None
        assert recorded == sweep
        assert recorded.job.model_fields_set == {"instance", *job}
        return ledger_path(GROUP, settings)

    return write


def test_a_record_runs_at_least_one_job_at_a_time(recorded, home):
    values = {"hyperparameters": {"n_layer": 2}, "max_cost": 3.0}
    path = recorded({"seed": 1}, instance="ml.g5.xlarge", **values)
    path.write_text(path.read_text().replace('"parallel": 1', '"parallel": 0'))
    with pytest.raises(ServiceError, match="parallel"):
        _ = SweepLedger(GROUP, Settings(home=home)).sweep


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ("--sweep learning_rate=1e-3,0.001", "--sweep learning_rate=1e-3,0.001:"),
        ("--sweep n_layer=1,0", "n_layer='0'"),
        ("--sweep n-head=1 --sweep n_head=2", "--sweep n_head: given twice ('1' and '2')"),
        ("--sweep seed=1,2 --resume a-job", "--init-from a-job"),
        ("--sweep size=1,2 --sweep preset=quick,cpu", "vary one of the two"),
        ("--sweep size=1,99", "--size 99: must be at most 16"),
        ("--sweep instance=local,ml.g5.xlarge", "there is no such hyperparameter"),
        ("--parallel 2", "--parallel is for jobs of a sweep"),
        ("--seeds 2 --detach", "--follow and --detach"),
        (f"--seeds 2 --name {'a' * 56}", "-2-try99: must be at most 63"),
    ],
)
def test_an_unusable_sweep_starts_no_job(arguments, fact, cli, home, short_text_file):
    ran = cli(LOCAL, "--data", short_text_file, arguments.split())
    assert ran.failed(2, fact)
    assert ran.out == ""
    assert not (home / "jobs").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "fact"),
    [
        (f"launch --resume {GROUP} --set max_steps=9", 2, "only --max-cost"),
        (f"status {GROUP}", 2, f"`sm-nanogpt jobs --group {GROUP}`"),
        (f"delete {GROUP}", 2, f"`sm-nanogpt delete --group {GROUP}`"),
        ("stop", 2, "JOB-ID, or --group"),
        ("jobs --group nope", 2, "'nope' matches no sweeps"),
        ("jobs --group latst", 2, "'latst' matches no sweeps; did you mean latest?"),
        (f"stop --group {GROUP}", 1, f"sweep {GROUP} has no job yet"),
    ],
)
def test_a_command_refuses_what_a_sweep_cannot_do(arguments, code, fact, recorded, home, cli):
    recorded()
    ran = cli(arguments.split())
    assert ran.failed(code, fact)
    assert ran.out == ""
    assert not (home / "jobs").exists()


@pytest.mark.parametrize(
    ("arguments", "differ"),
    [
        ("--preset auto --sweep generations=1,2", True),
        ("--preset auto --sweep seed=1,2", False),
        ("--sweep size=1,2", False),
    ],
)
def test_sizes_that_a_sweep_does_not_name_are_said(arguments, differ, cli, short_text_file):
    """Two generations of a short text get a larger size than one."""
    ran = cli(LOCAL, "--data", short_text_file, "--dry-run", arguments.split()).good
    assert ("gives all jobs one size" in ran.err) is differ


# -- on SageMaker ----------------------------------------------------------------------------------


@pytest.fixture
def launch(cloud, cli, short_text_file):
    """Launches a sweep, with the values that are given first."""
    return partial(
        cli, "launch", "--instance", "ml.g5.xlarge", "--data", str(short_text_file), "--sweep"
    )


def test_a_command_locks_the_sweep_that_it_begins(cloud, launch, monkeypatch):
    poll = run.GroupRun.poll

    def poll_locked(sweep: run.GroupRun) -> Any:
        with pytest.raises(ServiceError, match="another command runs"):
            lock_sweep(sweep.name, sweep.settings)
        return poll(sweep)

    monkeypatch.setattr(run.GroupRun, "poll", poll_locked)
    assert launch("n_layer=2,4").good


def test_the_ceiling_holds_for_the_sum(launch):
    ran = launch("n_layer=2,4", "--seeds", "2", "--max-cost", "4", "--dry-run")
    requests = json.loads(ran.out)
    assert [r["HyperParameters"]["n_layer"] for r in requests] == ["2", "2", "4", "4"]
    limits = {r["StoppingCondition"]["MaxRuntimeInSeconds"] for r in requests}
    assert limits == {1956}  # 2,556 s for 1 USD at 1.408 USD an hour; 600 s are kept back


def test_a_ceiling_of_the_settings_is_for_each_job(cloud, launch, monkeypatch):
    monkeypatch.setenv("SM_NANOGPT_MAX_COST", "0.4")
    assert launch("n_layer=1,2", "--max-cost", "2").good
    for job in cloud.sagemaker.jobs.values():
        assert job.request["StoppingCondition"]["MaxRuntimeInSeconds"] == 422


def test_a_sweep_reads_its_text_and_its_folder_once(launch, tmp_path, monkeypatch):
    folder = launching.edited(tmp_path / "my", ('"a set of hyper', '"one set of hyper'))
    Source.packaged()  # is read once in a process
    reads = Counter[str]()

    def counted(owner: Any, name: str) -> None:
        read = getattr(owner, name)

        def count(*arguments: Any) -> Any:
            reads[name] += 1
            return read(*arguments)

        monkeypatch.setattr(owner, name, count)

    counted(corpus, "survey_upload")
    counted(Source, "read")
    ran = launch("n_layer=2,4", "--seeds", "2", "--entry-point", folder, "--dry-run").good
    assert len(json.loads(ran.out)) == 4
    assert reads == {"survey_upload": 1, "read": 1}


def test_a_sweep_shows_its_cost_and_ranks(cloud, launch, cli, home, monkeypatch):
    search = cloud.sagemaker.Search

    def late(body: dict[str, Any]) -> Any:
        answer = search(body)
        for result in answer["Results"]:
            result["TrainingJob"]["TrainingJobStatus"] = "InProgress"
        return answer

    with monkeypatch.context() as patch:  # the sweep ends before Search knows it
        patch.setattr(cloud.sagemaker, "Search", late)
        ran = launch("n_layer=2,4", "--parallel", "2", "--max-cost", "2")
    assert ran.code == 0, ran.err
    group = ran.out.strip()
    assert "sweep: 2 jobs, 2 at a time\ncost: at most 2.00 USD together\n" in ran.err
    assert ran.err.count("data: s3:") == 1
    ranked = cli("jobs", "--group", group[-6:])
    assert ranked.out in ran.err
    assert ranked.out.split()[:5] == ["RANK", "BEST", "LOSS", "SPREAD", "JOBS"]
    assert f"`sm-nanogpt report --group {group}`" in ran.err
    best = ranked.table[0]["BEST JOB"]
    assert ran.err.endswith(f"\nnext: sm-nanogpt fetch-and-sample {best}\n")
    listed = json.loads(cli("jobs", "--group", "latest", "--json").out)
    assert {job["job_id"] for job in listed} == {f"{group}-1", f"{group}-2"}

    settings = Settings(home=home)
    sweep = SweepLedger(group, settings).sweep
    assert sweep is not None
    longer = sweep.model_copy(update={"members": [*sweep.members, {"n_layer": 6}]})
    SweepLedger(group, settings).record(longer)
    ran = cli("launch", "--resume", group).good
    # What the first two left, for the last.
    assert re.search(r"\ncost: at most (1\.\d\d|2\.00) USD together\n", ran.err)
    for once in ("warning: the run reads the text 782 times", "price: "):
        assert ran.err.count(once) == 1


def test_a_quota_of_one_instance_runs_a_sweep_one_by_one(cloud, launch):
    cloud.sagemaker.quota["ml.g5.xlarge for training job usage"] = 1
    ran = launch("n_layer=2,4", "--parallel", "2").good
    assert re.findall(r"waits: n_layer=4 \(CreateTrainingJob: .*; request an incr", ran.err)
    assert [job.status for job in cloud.sagemaker.jobs.values()] == ["Completed"] * 2
    cloud.sagemaker.quota["ml.g5.xlarge for training job usage"] = 0
    cloud.sagemaker.jobs.clear()  # for minutes after its end, a job may still hold the quota
    assert launch("n_layer=2,4").failed(1, "is 0", "request an increase", "launch --resume")


def test_a_continued_sweep_takes_a_larger_ceiling(
    cloud, cli, short_text_file, home, recorded, monkeypatch
):
    monkeypatch.setattr(run.SweepRun, "events", lambda run: iter(()))
    recorded({"n_layer": "2"}, instance="ml.g5.xlarge", data=str(short_text_file), max_cost=0.02)
    assert "the ceiling of 0.02 USD is too low" in cli("launch", "--resume", GROUP).error
    assert cli("launch", "--resume", GROUP, "--max-cost", "1").failed(1, "not all jobs")
    sweep = SweepLedger(GROUP, Settings(home=home)).sweep
    assert sweep is not None and sweep.job.max_cost == 1


def test_a_sweep_is_stopped_from_any_machine(cloud, launch, tmp_path, monkeypatch):
    """The command that stops it has another home, and so no record of the sweep."""
    monkeypatch.setattr("sagemaker_service.LOOKS", math.inf)

    def stop() -> None:
        until(lambda: len(cloud.sagemaker.jobs) == 1)
        group = next(iter(cloud.sagemaker.jobs)).rpartition("-")[0]
        settings = Settings(home=tmp_path / "other")
        stop_group(find_group(group, settings), settings)

    thread = threading.Thread(target=stop)
    thread.start()
    ran = launch("n_layer=2,4")
    thread.join()
    assert ran.code == 1
    assert [job.status for job in cloud.sagemaker.jobs.values()] == ["Stopped"]


def test_ctrl_c_leaves_a_sweeps_sagemaker_jobs(cloud, launch, cli, monkeypatch):
    monkeypatch.setattr("sagemaker_service.LOOKS", math.inf)
    stopwatch = SimpleNamespace(sleep=Mock(side_effect=KeyboardInterrupt), monotonic=lambda: 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(run, "time", stopwatch)
        ran = launch("n_layer=2,4,6", "--parallel", "2")
    group, message = ran.out.strip(), ran.err.splitlines()[-1]
    assert ran.code == 1
    assert message.partition(":")[0] == "interrupted"
    assert f"`sm-nanogpt launch --resume {group}`" in message
    statuses = {job_id: job.status for job_id, job in cloud.sagemaker.jobs.items()}
    assert statuses == {f"{group}-1": "InProgress", f"{group}-2": "InProgress"}

    cloud.sagemaker.search_lag = 500  # jobs that Search lacks are stopped and deleted
    assert cli("stop", "--group", "latest").code == 0
    assert {job.status for job in cloud.sagemaker.jobs.values()} == {"Stopped"}
    assert cli("delete", "--group", group, "--yes").code == 0
    assert not cloud.sagemaker.jobs


@pytest.mark.parametrize(
    ("arguments", "instance", "group"),
    [("stop", "ml.g5.xlarge", GROUP), ("delete --yes", "local", "latest")],
)
def test_no_sweep_out_of_reach_is_stopped_or_deleted(
    cloud, cli, recorded, arguments, instance, group
):
    record = recorded(instance=instance)
    cloud.refuse["Search"] = ("ExpiredTokenException", "no")
    assert cli(arguments.split(), "--group", group).failed(
        1, "Search: ", "the AWS credentials have expired"
    )
    assert record.exists()


# -- local jobs ------------------------------------------------------------------------------------


def test_a_local_sweep_starts_from_one_latest_model(job, short_text_file, cli, monkeypatch):
    monkeypatch.setattr(run.SweepRun, "events", lambda run: iter(()))
    arguments = ("--data", short_text_file, "--init-from", "latest", "--sweep", "max_steps=1,2")
    group = cli(LOCAL, arguments).out.strip()
    sweep = SweepLedger(group, Settings(home=job.home)).sweep
    assert sweep is not None
    assert job.job_id in str(sweep.job.init_from)


@pytest.mark.parametrize(("name", "value"), [("size", 0.5), ("preset", "quick")])
def test_a_sweep_varies_sizes_and_presets(home, short_text_file, name, value):
    request = Request(instance="local", data=str(short_text_file), hyperparameters={"max_steps": 2})
    sweep = Sweep(job=request, members=[{name: value, "seed": 3}], parallel=1)
    job = member_plan(sweep, 1, Settings(home=home)).job
    assert getattr(job, name) == value
    assert job.hyperparameters["seed"] == 3
    assert job.config().max_steps == 2
    assert "max_steps=2" in job.summary


def test_parallel_local_jobs_share_the_cores(home, cli, short_text_file, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("sm_nanogpt.launcher.local.backend.cores", lambda: 9)
    started = list[dict[str, str]]()

    def popen(*_: Any, env: dict[str, str], **__: Any) -> None:
        started.append(env)

    monkeypatch.setattr("sm_nanogpt.launcher.local.backend.subprocess.Popen", popen)
    arguments = launching.launching(
        "--sweep", "dropout=0,0.1", "--parallel", "2", data=short_text_file
    )
    ran = cli(arguments)
    group = ran.out.strip()
    assert [env["OMP_NUM_THREADS"] for env in started] == ["4", "4"]
    sweep = SweepLedger(group, Settings(home=home)).sweep
    assert sweep is not None
    assert sweep.parallel == 2
    assert sweep.job.processes_per_instance == 1


def test_ctrl_c_stops_a_local_sweep_at_checkpoints(home, short_text_file):
    values = {**launching.ENDLESS, "eval_interval": 10_000_000}  # no checkpoint before the end
    arguments = ("--sweep", "dropout=0,0.1,0.2", "--parallel", "2")
    launch = launching.launching(*arguments, data=short_text_file, **values)
    with launching.started(launch, home=home) as process:
        assert process.stdout is not None
        group = process.stdout.readline().strip()
        logs = [home / "jobs" / f"{group}-{n}" / "logs/job.log" for n in (1, 2)]
        until(lambda: all(log.exists() and "step=" in log.read_text() for log in logs))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    message = err.splitlines()[-1]
    assert process.returncode == 1
    assert message.partition(":")[0] == "interrupted"
    assert f"`sm-nanogpt launch --resume {group}`" in message
    tries = find_group(group, Settings(home=home)).tries
    assert sorted(tries) == [1, 2]
    for [job] in tries.values():
        assert job.status == "Stopped"
        assert job.checkpoint_uri


@pytest.fixture
def swept(job):
    """A sweep of two copies of a finished job."""
    for n in (1, 2):
        shutil.copytree(job.directory, job.home / "jobs" / f"{GROUP}-{n}")
    return GROUP


@pytest.mark.parametrize("id_part", ["latest", GROUP[-6:], f"{GROUP}-2"])
def test_a_sweep_is_found_by_a_part_of_its_id(id_part, swept, job):
    group = find_group(id_part, Settings(home=job.home))
    assert group.id == swept
    assert sorted(group.tries) == [1, 2]


def test_a_sweep_gives_its_name_to_its_jobs(job, home, cli, short_text_file):
    settings = Settings(home=home)
    request = Request(instance="local", data=str(short_text_file), name="grid")
    sweep = Sweep(job=request, members=[{"seed": 1}, {"seed": 2}], parallel=1)
    record(sweep, settings)
    for n in (1, 2):
        name = member_plan(sweep, n, settings).job.name
        assert name == f"grid-{n}"
        copy_job(job, f"{GROUP}-{n}", name=name)
    SweepLedger(GROUP, settings).add("sent", job=f"{GROUP}-2")
    assert member_plan(sweep, 2, settings).job.name == "grid-2-try2"
    for group_name in ("grid", "grid-2"):
        assert find_group(group_name, settings).id == GROUP
    assert cli("status", "grid").failed(2, "--group grid")
    assert f"{GROUP}-2 (grid-2), Completed:" in cli("delete", "grid-2", "--yes").good.err
    assert cli("delete", "--group", "grid", "--yes").good
    assert [path.name for path in (home / "jobs").iterdir()] == [job.job_id]


def test_a_name_means_one_job_or_one_sweep(job, recorded, cli, short_text_file):
    recorded(name="grid")
    alone = copy_job(job, "sm-nanogpt-20200101-000000-abcdef", name="alone")
    delete_sweep = f"delete --group {GROUP}"  # by its id: without jobs, none has its name
    delete_job = f"delete {alone}"
    for name, deletes in (("grid", delete_sweep), ("alone", delete_job)):
        for arguments in ("", "--seeds 2"):
            ran = cli(LOCAL, "--data", short_text_file, "--name", name, arguments.split())
            assert ran.failed(2, f"--name {name}: ", f"`sm-nanogpt {deletes}`")
        assert cli(deletes.split(), "--yes").good
    assert not recorded_groups(Settings(home=job.home))


def test_a_home_that_takes_no_lock_of_names_is_an_error(home):
    (home / "names.lock").mkdir(parents=True)
    with (
        pytest.raises(ServiceError, match=r"names\.lock"),
        name_reserved("grid", Settings(home=home)),
    ):
        pass


def test_a_name_taken_since_the_plan_is_refused(job, home, short_text_file):
    settings = Settings(home=home)
    request = Request(instance="local", data=str(short_text_file), name="grid")
    job_plan = prepare(request, settings)
    sweep_plan = plan.plan_sweep(request, settings, {"seed": [1, 2]}, seeds=1, parallel=1)
    copy_job(job, "sm-nanogpt-20200101-000000-abcdef", name="grid")
    jobs = sorted((home / "jobs").iterdir())
    for start in (job_plan.submit, partial(run.begin_sweep, sweep_plan)):
        with pytest.raises(InputError) as caught:
            start()
        assert caught.value.code == "name-of-a-job"
    assert sorted((home / "jobs").iterdir()) == jobs
    assert not recorded_groups(settings)


def test_a_sweep_without_a_job_has_no_report(home, cli):
    sweep = Sweep(job=Request(instance="local"), members=[{}], parallel=1)
    record(sweep, Settings(home=home))
    assert cli("report", "--group", GROUP).failed(1, "has no job")


def test_a_sweep_has_a_report_of_jobs_with_a_curve(swept, job, cli):
    curves = sorted(job.home.glob(f"jobs/{swept}-*/hosts/algo-1/checkpoints/metrics-*"))
    assert cli("report", "--group", "latest").out == "report-2-runs.html\n"
    curves[0].unlink()
    ran = cli("report", "--group", "latest")
    assert ran.out == f"report-{swept}-2.html\n"
    assert f"{swept}-1 has no curve yet" in ran.err
    curves[1].unlink()
    assert cli("report", "--group", "latest").failed(1, "has no curve yet")


def test_an_interrupted_sweep_is_shown_and_resumed(
    swept, job, recorded, cli, short_text_file, monkeypatch
):
    shutil.rmtree(job.directory)
    recorded(*grid({"n_embd": ["32", "48", "64"]}, 1, 0), data=str(short_text_file))
    table = cli("jobs", "--group", "latest").out.splitlines()
    assert "n_embd" in table[0]
    assert [line.split()[3:5] for line in table[3:]] == [["0/1", "64"]]
    assert (
        f"its sweep continues with `sm-nanogpt launch --resume {swept}`\n"
        in cli("launch", "--resume", "latest").err
    )
    monkeypatch.setattr(run.SweepRun, "events", lambda run: iter(()))
    ran = cli("launch", "--resume", swept)
    assert ran.out == f"{swept}\n"
    assert ran.code == 1


def test_jobs_are_filtered_by_state_and_number(swept, cli):
    for arguments, number in (("--limit 1", 1), ("--status Failed", 0), ("--status Completed", 3)):
        assert len(json.loads(cli("jobs", "--json", arguments.split()).out)) == number
