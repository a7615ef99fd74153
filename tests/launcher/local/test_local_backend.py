"""Jobs on this machine: the container's layout as processes, and every way in which a job ends."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any
from unittest.mock import Mock

import launching
import pytest
import runs
from jobs import change, jobs_in, running, write_job
from launching import ENDLESS, Finished

from sm_nanogpt import ServiceError, Settings, jobs, launcher
from sm_nanogpt.entry_point.config import make_config
from sm_nanogpt.entry_point.errors import TrainingError, failure_report
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.launching.launch import new_job_id
from sm_nanogpt.launcher.local import backend
from sm_nanogpt.launcher.local.backend import LocalBackend
from sm_nanogpt.launcher.local.process import python_command
from sm_nanogpt.launcher.local.runner import LocalRun
from sm_nanogpt.launcher.settings import load_settings
from sm_nanogpt.launcher.source import Source, keep_source
from sm_nanogpt.launcher.text.corpus import upload_data
from sm_nanogpt.launcher.tracking import TrackedJob

START = "    config.check_world_size(ranks.world_size)\n"
CHECKPOINTS = "hosts/algo-1/checkpoints"
CHECKPOINT = f"{CHECKPOINTS}/checkpoint-00000010.safetensors"
TWO = ("--processes-per-instance", "2")
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def detach(home, short_text_file, cli):
    """Launches a job that goes on by itself, without an end unless told otherwise."""

    def call(*arguments: str, **values: Any) -> Finished:
        values = {**ENDLESS, **values}
        ran = cli(launching.launching("--detach", *arguments, data=short_text_file, **values)).good
        return Finished(home, ran.out.strip())

    return call


@contextmanager
def followed(
    home: Path, short_text_file: Path, *arguments: str
) -> Iterator[tuple[subprocess.Popen[str], Finished]]:
    """A launch that follows an endless job, which has a checkpoint."""
    arguments = tuple(launching.launching(*arguments, data=short_text_file, **ENDLESS))
    with launching.started(arguments, home=home) as process:
        assert process.stdout is not None
        job = Finished(home, process.stdout.readline().strip())
        launching.wait_for_step(job.directory)
        yield process, job


def state_of(job: Finished) -> str:
    return TrackedJob(job.job_id).describe().status


def run_job(directory: Path, script: str, resume: str | None = None) -> dict[str, Any]:
    """How a job ends that runs a few lines instead of train.py, which takes long to start.

    They know the files `model` and `stop`, and how to `be_stopped`.
    """
    write_job(directory, resume)
    (directory / "code/train.py").write_text(PRELUDE + textwrap.dedent(script))
    LocalRun(directory).run()
    state: dict[str, Any] = json.loads((directory / "state.json").read_text())
    return state


PRELUDE = """
import os, signal, sys, time
from pathlib import Path

job = Path(os.environ["SAGEMAKER_BASE_DIR"]).parents[1]
model, stop = job / "hosts/algo-1/model/model.safetensors", job / "stop"

def be_stopped(mark=stop):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    mark.touch()
    signal.sigwait({signal.SIGTERM})
"""


# -- a job of two processes, looked at from all sides ---------------------------------------------


# Put into a copy of train.py: each rank writes down what it was given.
WITNESS = """
    seen = {"env": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path}
    seen["session"] = os.getsid(0)
    Path(os.environ["SM_OUTPUT_DATA_DIR"], f"rank-{ranks.rank}.json").write_text(json.dumps(seen))
"""

# What a shell may hold that has run other trainings.
STRANGE_ENVIRONMENT = {
    "SM_HOSTS": '["other-1", "other-2", "other-3"]',
    "SM_CURRENT_HOST": "other-2",
    "SM_CHANNEL_TEST": "/elsewhere",
    "SM_HP_N_LAYER": "12",
    "SAGEMAKER_BASE_DIR": "/elsewhere",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "192.0.2.1",
    "OMPI_COMM_WORLD_SIZE": "7",
    "PMIX_RANK": "7",
    "PYTHONHASHSEED": "7",
}


# The interpreter behind a virtual environment, which has no package of it.
BARE = str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory, text_file):
    """A finished job of 2 processes, from an unfriendly environment, and from a directory with
    modules of names that it imports.

    Its packages are on PYTHONPATH alone, as modules of a cluster have them. Its ranks wrote down
    their environment, argv and working directory. It is shared, and resumed there by its id.
    """

    def build(base: Path) -> tuple[Path, str]:
        home = base / "höme with spaces [x] %41"
        (base / "texts/deep").mkdir(parents=True)
        whole = text_file.read_text(encoding="utf-8")
        for name, part in (("b.txt", whole[:200_000]), ("deep/a b.txt", whole[200_000:])):
            (base / "texts" / name).write_text(part, encoding="utf-8", newline="")
        (base / "texts/.notes.md").write_text("no text of the corpus")
        (base / "shadows").mkdir()
        for name in ("torch", "train", "json", "sm_nanogpt", "entry_point"):
            (base / "shadows" / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
        # Importing anything of AWS in the command or the runner ends it.
        (base / "blocked").mkdir()
        for name in ("boto3", "botocore", "s3fs", "aiobotocore", "sagemaker"):
            (base / "blocked" / f"{name}.py").write_text("raise SystemExit('imports AWS')\n")
        entry_point = launching.edited(base / "mine", (START, WITNESS + START))
        arguments = launching.launching(
            *(*TWO, "--entry-point", str(entry_point), "--validation", str(text_file)),
            data=base / "texts",
            dropout="1e-05",
            tie_embeddings="true",
        )
        paths = [str(base / "blocked"), str(Path(launcher.__file__).parents[2])]
        paths += [path for path in sys.path if "-packages" in path]
        variables = {
            **launching.environment(home),
            **STRANGE_ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(paths),
        }
        program = Path(sys.executable).with_name("sm-nanogpt")
        printed = launching.output_of([BARE, program, *arguments], base / "shadows", variables)
        return home, printed.strip()

    home, job_id = launching.once(tmp_path_factory, "pair", build)
    return Finished(Path(home), job_id)


def seen_by(pair: Finished, rank: int) -> dict[str, Any]:
    """What a rank wrote down."""
    return json.loads((pair.directory / f"hosts/algo-1/output/data/rank-{rank}.json").read_text())


def test_two_processes_form_one_group(pair, text):
    log = (pair.directory / "logs/job.log").read_text()
    assert log.count("2 CPU = 2 processes in one group (launched by sm-nanogpt;") == 1
    assert f"{len(text):,} characters to train on, {len(text):,} to validate on" in log
    session = seen_by(pair, 0)["session"]
    launching.until(lambda: not launching.session_of(session), 10)


def test_a_jobs_directory_matches_a_container(pair):
    (base,) = (pair.directory / "hosts").iterdir()
    assert base.name == "algo-1"
    directories = {"checkpoints", "code", "input", "model", "output"}
    assert {path.name for path in base.iterdir()} == directories
    config, data = base / "input/config", base / "input/data"
    documents = {"hyperparameters.json", "inputdataconfig.json", "resourceconfig.json"}
    assert launching.tree(config) == documents
    assert launching.tree(data / "training") == {"b.txt", "deep", "deep/a b.txt"}
    assert launching.tree(data / "validation") == {"input.txt"}
    assert json.loads((config / "resourceconfig.json").read_text()) == {
        "current_host": "algo-1",
        "hosts": ["algo-1"],
        "current_instance_type": "local",
        "network_interface_name": "lo",
    }
    hyperparameters = json.loads((config / "hyperparameters.json").read_text())
    assert all(isinstance(value, str) for value in hyperparameters.values())
    assert json.loads(hyperparameters["n_embd"]) == 32
    channels = json.loads((config / "inputdataconfig.json").read_text())
    assert set(channels) == {"training", "validation"}
    assert channels["training"]["S3DistributionType"] == "FullyReplicated"
    for name, source in (("model", "model"), ("output", "output/data")):
        with tarfile.open(pair.directory / "output" / f"{name}.tar.gz") as tar:
            names = set(tar.getnames())
        assert names == launching.tree(base / source)
    assert "metrics.jsonl" in names


def test_a_rank_gets_the_toolkits_variables_and_argv(pair):
    process = seen_by(pair, 1)
    env, base = process["env"], pair.directory / "hosts/algo-1"
    expected = {
        "SM_CURRENT_HOST": "algo-1",
        "SM_NUM_GPUS": "0",
        "SM_MODEL_DIR": str(base / "model"),
        "SM_OUTPUT_DATA_DIR": str(base / "output/data"),
        "SM_OUTPUT_DIR": str(base / "output"),
        "SM_INPUT_DIR": str(base / "input"),
        "SM_INPUT_CONFIG_DIR": str(base / "input/config"),
        "SM_CHANNEL_TRAINING": str(base / "input/data/training"),
        "SM_CHANNEL_VALIDATION": str(base / "input/data/validation"),
        "SM_NETWORK_INTERFACE_NAME": "lo",
        "SM_HP_N_EMBD": "32",
        "MASTER_ADDR": "127.0.0.1",
        "TRAINING_JOB_NAME": pair.job_id,
    }
    assert {name: env.get(name) for name in expected} == expected
    assert json.loads(env["SM_HOSTS"]) == ["algo-1"]
    assert json.loads(env["SM_CHANNELS"]) == ["training", "validation"]
    values = asdict(make_config({**launching.TINY, "dropout": 1e-05, "tie_embeddings": True}))
    arguments = [word for name in sorted(values) for word in (f"--{name}", str(values[name]))]
    assert process["argv"] == ["train.py", *arguments, "--processes=2"]
    assert json.loads(env["SM_USER_ARGS"]) == arguments
    assert process["cwd"] == process["path"][0] == str(base / "code")
    assert {path.name for path in (base / "code").glob("*.*")} == Source.packaged().files.keys()


def test_variables_of_the_users_shell_do_not_leak_in(pair):
    env = seen_by(pair, 1)["env"]
    assert not {"SM_CHANNEL_TEST", "PMIX_RANK", "PYTHONHASHSEED"} & set(env)
    assert env["RANK"] == env["LOCAL_RANK"] == "1"
    assert env["WORLD_SIZE"] == "2"
    assert "other-2" not in env.values()
    assert env["SM_HP_N_LAYER"] == "1"


# -- following ------------------------------------------------------------------------------------


def test_a_detached_job_is_in_progress_until_it_ends(home, detach, cli, monkeypatch):
    write, states = storage.write_json, list[str]()

    def write_and_look(uri: str, value: Any, *settings: Any) -> None:
        write(uri, value, *settings)
        states.extend(each.status for each in jobs())

    monkeypatch.setattr(storage, "write_json", write_and_look)
    job = detach(**launching.TINY)
    assert states == ["InProgress"]
    ran = cli("logs", job.job_id, "--follow")
    assert "model written to" in ran.out
    assert state_of(job) == "Completed"
    assert Source.read(job.directory / "hosts/algo-1/code").is_packaged


def test_a_dry_run_shows_what_would_run_and_starts_nothing(home, short_text_file, cli):
    assert cli("upload-data", short_text_file).good
    launch = ("launch", "--instance", "local", "--dry-run")
    ran = cli(launch, "--preset", "quick", "--set", "max_steps=30", "--set", "generations=2").good
    shown = json.loads(ran.out)
    assert shown["job"]["preset"] == "quick" and shown["processes_per_host"] == 1
    assert shown["hyperparameters"]["max_steps"] == 30
    assert "nothing was started" in ran.err and "60 steps in 1 process" in ran.err
    fitted = json.loads(cli(launch, "--fit", "100kB").good.out)
    assert fitted["job"]["page_limit"] == 100_000 and fitted["hyperparameters"]["n_embd"]
    members = json.loads(cli(launch, "--sweep", "learning_rate=0.01,0.02").good.out)
    rates = [member["hyperparameters"]["learning_rate"] for member in members]
    assert rates == [0.01, 0.02]
    assert not (home / "jobs").exists() and not (home / "sweeps").exists()


def test_job_ids_of_one_second_differ_and_suit_sagemaker():
    ids = {new_job_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", job_id) for job_id in ids)


def test_a_followed_log_yields_whole_lines_and_characters(home):
    whole = "ï漢🙂\ra".encode()
    with running(home / "jobs/a") as directory:

        def write_slowly() -> None:
            (directory / "logs").mkdir()
            for byte in [*whole, *b"\n", *whole]:
                with (directory / "logs/job.log").open("ab") as file:
                    file.write(bytes([byte]))
                time.sleep(0.02)
            storage.write_json(str(directory / "state.json"), {"status": "Completed"})

        writer = threading.Thread(target=write_slowly)
        writer.start()
        lines = TrackedJob("a").logs(follow=True)
        assert [line.encode() for line in lines] == [whole, whole]
        writer.join()


# -- failing --------------------------------------------------------------------------------------


def test_a_killed_rank_fails_the_job_and_says_how_to_resume(home, short_text_file):
    arguments = launching.launching(*TWO, data=short_text_file, **ENDLESS)
    ran = launching.command(arguments, home=home, env={"NANOGPT_FAULT": "1:60:kill"})
    job = Finished(home, ran.out.strip())
    goes_on = f"`sm-nanogpt launch --resume {job.job_id}`"
    assert ran.failed(1, "rank 1 on algo-1 was killed by SIGKILL", goes_on)
    assert state_of(job) == "Failed"
    assert not launching.ranks_of(job.directory)


# How train.py ends a run whose memory is too small: its name has to count as an error's.
LESS_PLEASE = f"sys.exit({failure_report(TrainingError('less, please'))!r})"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("pass", "ServiceError: train.py exited with code 0 but wrote no model"),
        ("model.touch(); sys.exit(3)", "TrainingError: train.py ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", "TrainingError: train.py was killed by SIGKILL"),
        ("raise ValueError('x' * 2000)", f"ValueError: {'x' * 1024}"[:1024]),
        ("be_stopped(); sys.exit('OSError: no space')", "OSError: no space"),
        (LESS_PLEASE, "TrainingError: less, please"),
    ],
)
def test_a_failed_script_gives_the_jobs_reason(tmp_path, script, reason):
    state = run_job(tmp_path, script)
    assert state["status"] == "Failed"
    assert state["reason"].partition(" (")[0] == reason


def test_a_full_disk_names_the_archive(tmp_path, monkeypatch):
    monkeypatch.setattr("sm_nanogpt.launcher.local.runner.tarfile.open", Mock(side_effect=FULL))
    reason = run_job(tmp_path, "model.touch()")["reason"]
    assert reason.startswith("ServiceError: ")
    assert "output/model.tar.gz: this machine's disk is full" in reason


def test_a_resumed_job_fails_if_its_checkpoints_are_gone(tmp_path):
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier/metrics-00000001.jsonl").touch()
    state = run_job(tmp_path / "job", "model.touch()", "earlier")
    assert state["status"] == "Failed"
    assert state["reason"].startswith("ServiceError: the checkpoints to resume from are missing: ")


def test_a_ranks_child_process_does_not_delay_the_end(tmp_path, monkeypatch):
    join = threading.Thread.join
    monkeypatch.setattr(
        threading.Thread, "join", lambda self, timeout=None: join(self, timeout and timeout / 20)
    )
    script = """
        model.touch()
        child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")
        (job / "child").write_text(str(child))
    """
    assert run_job(tmp_path, script)["status"] == "Completed"
    # It lives, and keeps the rank's output open.
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_an_impossible_local_launch_starts_nothing(home, cli, arguments):
    ran = cli(launching.launching(*arguments, data=str(home / "nowhere.txt")))
    assert ran.failed(2, "nowhere.txt: no such file")
    assert not (home / "jobs").exists()


@pytest.mark.parametrize(
    "failing", ["sm_nanogpt.launcher.files.local.replacing", "pathlib.Path.write_bytes"]
)
def test_a_job_that_cannot_be_written_leaves_nothing(
    home, short_text_file, cli, monkeypatch, failing
):
    assert cli("upload-data", short_text_file).good
    keep_source(Source.packaged(), launching.settings_of(home))
    with monkeypatch.context() as context:
        context.setattr(failing, Mock(side_effect=FULL))
        ran = cli(launching.launching("--detach", data=short_text_file))
    assert ran.code == 1
    assert ran.out == ""
    assert ran.error.startswith(f"{home / 'jobs'}")
    assert "no space left on device" in ran.error
    assert jobs_in(home) == []


def test_a_job_whose_directory_cannot_be_made_fails(home, short_text_file, cli):
    assert cli("upload-data", short_text_file).good
    (home / "jobs").touch()
    ran = cli(launching.launching("--detach", data=short_text_file))
    assert ran.failed(1, str(home / "jobs"), "not a directory")


def test_a_job_that_cannot_be_started_says_why(home, short_text_file, cli, monkeypatch):
    def fail(*_: Any, stdout: IO[str], **__: Any) -> None:
        stdout.write("a warning\nno Python here\n")
        raise FULL

    monkeypatch.setattr(backend.subprocess, "Popen", fail)
    assert cli(launching.launching(data=short_text_file)).failed(1, "no space left on device")
    [job_id] = jobs_in(home)
    assert "it could not be started: no Python here" in cli("status", job_id).good.out


def test_output_is_read_though_the_log_cannot_be_written(tmp_path):
    """A rank with a full pipe would block."""
    write_job(tmp_path)
    run, lines = LocalRun(tmp_path), iter([b"a line\n", b"OSError: no space\r\n"])
    with (tmp_path / "job.json").open("rb", buffering=0) as log:
        run.keep_output(lines, log)
    assert run.error == "OSError: no space"
    assert list(lines) == []


def test_a_second_ctrl_c_ends_a_hung_job(home, short_text_file):
    with followed(home, short_text_file, *TWO) as (process, job):
        os.kill(launching.ranks_of(job.directory)[1], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        runs.wait_for_line(process, "stopping the job", process.stderr)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=10)
    assert state_of(job) == "Stopped"
    assert not launching.ranks_of(job.directory)


# -- killed ---------------------------------------------------------------------------------------


def test_a_killed_runner_ends_its_ranks_and_fails_the_job(detach, cli):
    job = detach(*TWO)
    launching.until(lambda: len(launching.ranks_of(job.directory)) == 2)
    runner = launching.runner_of(job.directory)
    os.kill(runner, signal.SIGKILL)
    launching.until(lambda: state_of(job) == "Failed", 5)
    assert backend.GONE_REASON in cli("status", job.job_id).out
    assert "Failed" in cli("jobs").out
    # A rank that is still importing torch notices when it has done so.
    launching.until(lambda: not launching.session_of(runner), 30)


def test_a_job_whose_processes_are_gone_has_failed(job, cli):
    change(job.directory / "state.json", status="InProgress")
    goes_on = f"`sm-nanogpt launch --resume {job.job_id}`"
    assert cli("wait", job.job_id).failed(1, backend.GONE_REASON, goes_on)


def test_deleting_a_jobs_directory_ends_its_processes(detach):
    job = detach(*TWO)
    launching.wait_for_step(job.directory)
    runner = launching.runner_of(job.directory)
    while job.directory.exists():  # until nothing is written in between
        shutil.rmtree(job.directory, ignore_errors=True)
    launching.until(lambda: not launching.session_of(runner), 30)


# -- what a job has made --------------------------------------------------------------------------


def test_a_job_links_its_text_and_leaves_the_store_alone(home, short_text_file):
    short_text_file.chmod(0o600)
    upload = upload_data(short_text_file)
    (stored,) = (path for path in (home / "store").rglob("*.txt"))
    assert stat.filemode(stored.stat().st_mode) == "-r--------"  # a job cannot write in place
    job = TrainingJob(instance="local", data=upload.uri)
    write_job(home / "jobs/one", job=job)
    LocalRun(home / "jobs/one").lay_out()
    (text,) = (home / "jobs/one/hosts/algo-1/input/data/training").iterdir()
    assert text.readlink() == stored
    storage.remove((home / "jobs/one").as_uri())
    assert stored.read_bytes() == short_text_file.read_bytes()


def test_the_newest_value_of_each_metric_is_found(tmp_path):
    rows: list[dict[str, float]] = [{"step": step, "train_loss": 1.5} for step in range(1, 9)]
    rows[2]["val_loss"] = 3.0
    rows[4]["val_loss"] = 2.0
    curve = "".join(json.dumps(row) + "\n" for row in rows)
    path = tmp_path / "metrics.jsonl"
    path.write_text(curve + '{"sample": "x')  # a line that is being written
    assert backend.last_metrics(path) == {"step": 8, "train_loss": 1.5, "val_loss": 2.0}


def test_the_newest_metrics_are_read_from_the_end_of_the_file(tmp_path, monkeypatch):
    """Its first line may be cut."""
    monkeypatch.setattr(backend, "TAIL_BYTES", 100)
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1, "early": 1.5}']
    lines += [f'{{"step": {step}, "val_loss": 1.5}}' for step in range(2, 8)]
    path.write_text("\n".join(lines) + "\n")
    assert backend.last_metrics(path) == {"step": 7, "val_loss": 1.5}


# -- stopping -------------------------------------------------------------------------------------


def test_ctrl_c_while_following_stops_the_job_cleanly(home, short_text_file):
    with followed(home, short_text_file, *TWO) as (process, job):
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert state_of(job) == "Stopped"
    last = err.splitlines()[-1]
    assert last.startswith(f"interrupted: job {job.job_id} stopped; ")
    assert f"`sm-nanogpt launch --resume {job.job_id}`" in last
    log = (job.directory / "logs/job.log").read_text()
    assert "stopped by a signal; the checkpoint of step" in log
    assert not launching.processes_below(job.directory)


def test_a_followed_job_stops_when_its_log_has_no_reader(home, short_text_file):
    with followed(home, short_text_file) as (process, job):
        assert process.stderr is not None
        process.stderr.close()  # as `2>&1 | head` does
        assert process.wait(timeout=60) == 1
    assert state_of(job) == "Stopped"


def test_a_launch_that_cannot_print_the_id_names_the_job(home, short_text_file):
    reader, writer = os.pipe()
    os.close(reader)
    arguments = launching.launching("--detach", data=short_text_file)
    with launching.started(arguments, home=home, stdout=writer) as process:
        _, err = process.communicate(timeout=60)
    os.close(writer)
    assert process.returncode == 1
    (job_id,) = jobs_in(home)
    last = err.splitlines()[-1]
    assert last.startswith("error: broken pipe: ")
    assert f"`sm-nanogpt stop {job_id}`" in last


def test_an_interrupted_launch_names_the_local_job(short_text_file, cli, home, monkeypatch):
    monkeypatch.setattr(backend.subprocess, "Popen", Mock(side_effect=KeyboardInterrupt))
    ran = cli(launching.launching(data=short_text_file))
    assert ran.code == 1
    assert ran.out == ""
    (job_id,) = jobs_in(home)
    assert f"`sm-nanogpt stop {job_id}`" in ran.err.splitlines()[-1]


def test_ctrl_c_in_logs_keeps_the_job_and_stop_ends_it(home, detach, cli):
    job = detach()
    with launching.started("logs", job.job_id, "--follow", home=home) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err == "the job keeps running\n"
    assert state_of(job) == "InProgress"
    launching.wait_for_step(job.directory)
    ran = cli("stop", job.job_id)
    assert ran.code == 0
    assert ran.out == ""
    assert f"--resume {job.job_id}" in ran.err
    assert state_of(job) == "Stopped"
    assert "Stopped" in cli("status", job.job_id).out


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("stop.touch(); time.sleep(20)", "Stopped"),  # it does not catch the signal yet
        ("be_stopped(); model.touch()", "Completed"),  # in its last step
        # It does not react, and is stopped again.
        ("be_stopped(); (job / 'stop-now').touch(); time.sleep(20)", "Stopped"),
    ],
)
def test_a_stop_ends_a_script_wherever_it_is(tmp_path, script, status):
    assert run_job(tmp_path, script)["status"] == status
    assert (tmp_path / "output/model.tar.gz").exists() == (status == "Completed")


def test_a_signal_and_a_stop_are_not_two_stops(home):
    """As where all processes of a followed job are ended at once."""
    directory = home / "jobs" / "sm-nanogpt-20261128-120000-abcdef"
    write_job(directory)
    saves = """
        be_stopped(job / "ready")
        while not stop.exists():
            time.sleep(0.01)
        time.sleep(0.3)  # in which the runner looks at it
        model.touch()
    """
    (directory / "code/train.py").write_text(PRELUDE + textwrap.dedent(saves))
    runner = subprocess.Popen(python_command("sm_nanogpt.launcher.local.runner", directory, 0))
    launching.until((directory / "ready").exists)
    runner.terminate()
    launching.until(lambda: "Stopping" in (directory / "state.json").read_text())
    LocalBackend(load_settings()).stop(directory.name)
    assert runner.wait() == 0
    assert json.loads((directory / "state.json").read_text())["status"] == "Completed"


FAILED = {"status": "Failed", "reason": "OSError: why"}


@pytest.mark.parametrize(
    ("command", "state", "code", "message"),
    [
        ("stop", {"status": "Completed"}, 0, r"job a completed; next: .* fetch-and-sample a"),
        ("stop", FAILED, 1, r"job a failed: OSError: why; .*`sm-nanogpt logs a`"),
        ("wait", None, 1, r"there is no job 'a' .*`sm-nanogpt jobs`"),
    ],
)
def test_stop_and_wait_tell_how_the_job_ended(
    home, cli, monkeypatch, command, state, code, message
):
    def end(seconds: float) -> None:
        if state:
            storage.write_json(str(directory / "state.json"), state)
        else:
            shutil.rmtree(directory, ignore_errors=True)

    with running(home / "jobs/a") as directory:
        monkeypatch.setattr("sm_nanogpt.launcher.tracking.time.sleep", end)
        ran = cli(command, "a")
    assert ran.code == code
    assert re.match(rf"(error: )?{message}", ran.err.splitlines()[-1])


def test_wait_gives_up_after_its_timeout(home):
    with running(home / "jobs/a"), pytest.raises(ServiceError, match="InProgress"):
        TrackedJob("a").wait_for_end(timeout=0.1)


# -- resuming -------------------------------------------------------------------------------------


def test_a_resumed_job_keeps_what_its_launch_named(pair):
    arguments = ("launch", "--instance", "local", "--resume", pair.job_id, "--set", "max_steps=15")
    ran = launching.command(arguments, home=pair.home).good
    assert "resumed from the checkpoint of step 10" in ran.err
    settings = launching.settings_of(pair.home)
    before, after = (
        TrackedJob(each, settings).describe() for each in (pair.job_id, ran.out.strip())
    )
    assert after.data == before.data
    assert after.hyperparameters == {**before.hyperparameters, "max_steps": 15}
    host = pair.home / "jobs" / after.job_id / "hosts/algo-1"
    assert [row["step"] for row in runs.metrics(host / "checkpoints")] == [5, 10, 15]
    assert (host / "output/data/rank-1.json").exists()  # of its processes and its script
    assert (host / "input/data/validation/input.txt").exists()
    assert (pair.directory / CHECKPOINT).exists()


def test_jobs_of_one_second_are_listed_as_they_were_launched(home, job):
    """Their ids differ in the random end alone."""
    local, record = backend.LocalBackend(Settings(home=home)), job.directory / "job.json"
    ids = [f"sm-nanogpt-20990101-000000-{end}" for end in ("ffffff", "000000", "aaaaaa")]
    for n, job_id in enumerate(ids):
        (home / "jobs" / job_id).mkdir()
        shutil.copy(record, home / "jobs" / job_id / "job.json")
        os.utime(home / "jobs" / job_id / "job.json", (n, n))
    assert [each.job_id for each in local.list()][:3] == ids[::-1]
