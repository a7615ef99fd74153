"""Jobs on this machine: the container's layout as processes, and every way in which a job ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import launching
import pytest
import runs
from launching import ENDLESS, Finished, Ran

import launcher
from entry_point.config import make_config
from launcher import Request, Settings, describe, jobs, logs, wait
from launcher.job import LOCAL_FIELDS, TrainingJob
from launcher.launching.launch import find_earlier, resumed
from launcher.local.backend import GONE, LocalBackend, last_metrics, own_checkpoint, write_json
from launcher.local.runner import LocalRun
from launcher.source import Source

MAIN = 'if __name__ == "__main__":\n'
START = "    device = rank_device(config, container, ranks)\n"
STEP = "    def forward_backward(self, step: int) -> Tensor:\n"


def detached(cli: Callable[..., Ran], home: Path, *words: str, **values: Any) -> Finished:
    """A job that goes on by itself."""
    ran = cli(*launching.launching("--detach", *words, **values))
    assert ran.code == 0, ran.err
    return Finished(home, ran.out.strip())


def state_of(job: Finished) -> str:
    return describe(job.job_id, launching.settings_of(job.home)).status


def wait_for_end(job: Finished) -> str:
    return str(
        launching.until(lambda: state_of(job) not in ("InProgress", "Stopping") and state_of(job))
    )


def write_job(directory: Path, text_file: Path) -> None:
    """What a launch writes down of a job."""
    job = TrainingJob(instance="local", data=text_file.as_uri())
    record = {
        "job": job.model_dump(mode="json", include=LOCAL_FIELDS),
        "hyperparameters": {},
        "created": time.time(),
        "processes_per_host": 1,
        "gpus_per_host": 0,
        "max_steps": 10,
        "resume_from": None,
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "job.json", record)


@contextmanager
def running(directory: Path, text_file: Path) -> Iterator[Path]:
    """A job that seems to run, as somebody holds its lock."""
    write_job(directory, text_file)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory


def run_job(directory: Path, text_file: Path, script: str) -> dict[str, Any]:
    """How a job ends that runs a few lines instead of train.py, which takes long to start.

    They know the files `model` and `stop`, and how to `be_stopped`.
    """
    write_job(directory, text_file)
    (directory / "code").mkdir()
    (directory / "code/train.py").write_text(PRELUDE + textwrap.dedent(script))
    LocalRun(directory).run()
    state: dict[str, Any] = json.loads((directory / "state.json").read_text())
    return state


PRELUDE = """
import os, signal, sys, time
from pathlib import Path

job = Path(os.environ["SAGEMAKER_BASE_DIR"]).parents[1]
model, stop = job / "hosts/algo-1/model/model.safetensors", job / "stop"

def be_stopped():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    stop.touch()
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


@pytest.fixture(scope="module")
def pair(tmp_path_factory, text_file):
    """A finished job of 2 processes, from an unfriendly environment and directory.

    Its ranks wrote down their environment, argv and working directory. It is shared.
    """

    def build(base: Path) -> tuple[Path, str]:
        home = base / "höme with spaces [x] %41"
        (base / "texts/deep").mkdir(parents=True)
        whole = text_file.read_text(encoding="utf-8")
        for name, part in (("b.txt", whole[:200_000]), ("deep/a b.txt", whole[200_000:])):
            (base / "texts" / name).write_text(part, encoding="utf-8", newline="")
        (base / "texts/notes.md").write_text("no text of the corpus")
        (base / "shadows/launcher").mkdir(parents=True)
        for name in ("torch.py", "train.py", "json.py", "launcher/__init__.py"):
            (base / "shadows" / name).write_text("raise SystemExit('shadowed')\n")
        # Importing anything of AWS in the command or the runner ends it.
        (base / "blocked").mkdir()
        for name in ("boto3", "botocore", "s3fs", "aiobotocore", "sagemaker"):
            (base / "blocked" / f"{name}.py").write_text("raise SystemExit('imports AWS')\n")
        entry_point = launching.edited(base / "mine", (START, WITNESS + START))
        words = launching.launching(
            *("--processes-per-instance", "2"),
            *("--entry-point", str(entry_point), "--validation", str(text_file)),
            data=base / "texts",
            dropout="1e-05",
            tie_embeddings="true",
        )
        environment = {
            **launching.environment(home),
            **STRANGE_ENVIRONMENT,
            "PYTHONPATH": str(base / "blocked"),
        }
        done = subprocess.run(
            [Path(sys.executable).parent / "sm-nanogpt", *words],
            cwd=base / "shadows",
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return home, done.stdout.strip()

    home, job_id = launching.once(tmp_path_factory, "pair", build)
    return Finished(Path(home), job_id)


def seen_by(pair: Finished, rank: int) -> dict[str, Any]:
    """What a rank wrote down."""
    return json.loads((pair.directory / f"hosts/algo-1/output/data/rank-{rank}.json").read_text())


def test_two_processes_form_one_group(pair):
    log = (pair.directory / "logs/job.log").read_text()
    assert log.count("2 CPU = 2 processes in one group (launched by sm-nanogpt;") == 1


def test_the_host_has_the_containers_layout(pair):
    for base in (pair.directory / "hosts").iterdir():
        assert {path.name for path in base.iterdir()} == {
            "checkpoints",
            "code",
            "input",
            "model",
            "output",
        }
        assert launching.tree(base / "input") == {
            "config",
            "config/hyperparameters.json",
            "config/inputdataconfig.json",
            "config/resourceconfig.json",
            "data",
            "data/training",
            "data/training/b.txt",
            "data/training/deep",
            "data/training/deep/a b.txt",
            "data/validation",
            "data/validation/input.txt",
        }


def test_the_configuration_files_match_sagemakers(pair):
    config = pair.directory / "hosts/algo-1/input/config"
    resources = json.loads((config / "resourceconfig.json").read_text())
    assert resources["current_host"] == "algo-1"
    assert resources["hosts"] == ["algo-1"]
    assert resources["network_interface_name"] == "lo"
    hyperparameters = json.loads((config / "hyperparameters.json").read_text())
    assert all(isinstance(value, str) for value in hyperparameters.values())
    assert json.loads(hyperparameters["n_embd"]) == 32
    channels = json.loads((config / "inputdataconfig.json").read_text())
    assert set(channels) == {"training", "validation"}
    assert channels["training"]["S3DistributionType"] == "FullyReplicated"


@pytest.mark.parametrize("rank", range(2))
def test_the_variables_match_the_toolkits(pair, rank):
    env = seen_by(pair, rank)["env"]
    base = pair.directory / "hosts/algo-1"
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
    assert json.loads(env["SM_USER_ARGS"]) == seen_by(pair, rank)["argv"][1:-1]


def test_variables_of_the_users_shell_do_not_leak_in(pair):
    env = seen_by(pair, 1)["env"]
    assert not {"SM_CHANNEL_TEST", "PMIX_RANK", "PYTHONHASHSEED"} & set(env)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("1", "2", "1")
    assert "other-2" not in env.values()
    assert env["SM_HP_N_LAYER"] == "1"


def test_ranks_find_what_the_users_python_finds(pair):
    """Torch may be there through PYTHONPATH alone, as modules of a cluster have it."""
    for rank in range(2):
        assert seen_by(pair, rank)["env"]["PYTHONPATH"].endswith("/blocked")


def test_a_job_runs_with_packages_on_pythonpath_only(home, text_file):
    """The interpreter behind a virtual environment has nothing of it."""
    bare = str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))
    checkout = Path(launcher.__file__).parents[1]
    sites = [os.path.relpath(path, checkout) for path in sys.path if "-packages" in path]
    done = subprocess.run(
        [bare, *launching.PROGRAM[1:], *launching.launching(data=text_file)],
        cwd=checkout,
        env={**launching.environment(home), "PYTHONPATH": os.pathsep.join(sites)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_argv_is_sorted_and_formatted_like_the_toolkits(pair):
    said = {**launching.TINY, "dropout": 1e-05, "tie_embeddings": True}
    values = asdict(make_config(said))
    expected = [w for name in sorted(values) for w in (f"--{name}", str(values[name]))]
    for rank in range(2):
        assert seen_by(pair, rank)["argv"] == ["train.py", *expected, "--processes=2"]


def test_ranks_run_in_the_code_directory(pair):
    for rank in range(2):
        code = pair.directory / "hosts/algo-1/code"
        assert seen_by(pair, rank)["cwd"] == str(code)
        assert seen_by(pair, rank)["path"][0] == str(code)
        assert {path.name for path in code.glob("*.*")} == Source.packaged().files.keys()


def test_the_archives_hold_model_and_output(pair):
    for name, source in (("model", "model"), ("output", "output/data")):
        with tarfile.open(pair.directory / "output" / f"{name}.tar.gz") as tar:
            names = set(tar.getnames())
        assert names == launching.tree(pair.directory / "hosts/algo-1" / source)
    assert "metrics.jsonl" in names


def test_the_model_can_be_fetched_and_loaded(pair):
    ran = launching.command(
        "fetch-and-sample", pair.job_id, "--max-new-tokens", "10", home=pair.home
    )
    assert ran.code == 0, ran.err
    assert len(ran.out) == 11


def test_a_job_validates_on_its_validation_text(pair, text):
    log = (pair.directory / "logs/job.log").read_text()
    assert f"{len(text):,} characters to train on, {len(text):,} to validate on" in log


def test_a_finished_job_leaves_no_process(pair):
    session = seen_by(pair, 0)["session"]
    launching.until(lambda: not launching.session_of(session), 10)


# -- following ------------------------------------------------------------------------------------


def test_a_detached_job_is_followed_to_its_end(home, text_file, cli):
    job = detached(cli, home, data=text_file)
    assert state_of(job) == "InProgress"
    ran = cli("logs", job.job_id, "--follow")
    assert "model written to" in ran.out
    assert state_of(job) == "Completed"


def test_two_launches_in_the_same_second_both_work(home, text_file):
    words = launching.launching(data=text_file)
    both = launching.all_ended([words, words], home)
    assert [ran.code for ran in both] == [0, 0], both
    assert both[0].out != both[1].out
    for ran in both:
        assert state_of(Finished(home, ran.out.strip())) == "Completed"


def test_job_ids_of_one_second_differ_and_suit_sagemaker():
    import re

    from launcher.launching.launch import new_job_id

    ids = {new_job_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", job_id) for job_id in ids)


# -- failing --------------------------------------------------------------------------------------


def test_a_rank_that_raises_ends_the_job_with_its_reason(home, text_file, tmp_path):
    words = launching.launching("--processes-per-instance", "2", data=text_file, **ENDLESS)
    ran = launching.command(*words, home=home, env={"NANOGPT_FAULT": "1:3:raise"})
    assert ran.code == 1
    job = Finished(home, ran.out.strip())
    reason = "OSError: NANOGPT_FAULT asked for this error"
    assert f"job {job.job_id} failed: {reason}" in ran.error
    assert f"`sm-nanogpt logs {job.job_id}`" in ran.error
    told = launching.command("status", job.job_id, home=home)
    assert re.search(r"^state: +Failed$", told.out, re.MULTILINE)
    assert re.search(rf"^reason: +{reason}$", told.out, re.MULTILINE)
    assert told.err == f"it left no checkpoint; read its log: `sm-nanogpt logs {job.job_id}`\n"
    failure = (job.directory / "hosts/algo-1/output/failure").read_text()
    assert failure == reason
    assert not launching.ranks_of(job.directory)


def test_a_killed_rank_fails_the_job_in_seconds(home, text_file, cli):
    job = detached(cli, home, "--processes-per-instance", "2", data=text_file, **ENDLESS)
    launching.wait_for_step(job.directory)
    os.kill(launching.ranks_of(job.directory)[1], signal.SIGKILL)
    killed = time.monotonic()
    assert wait_for_end(job) == "Failed"
    assert time.monotonic() - killed < 15
    ran = cli("status", job.job_id)
    assert "rank 1 on algo-1 was killed by SIGKILL" in ran.out
    assert not launching.ranks_of(job.directory)


def test_a_killed_rank_with_a_checkpoint_says_how_to_resume(home, text_file, tmp_path):
    words = launching.launching(data=text_file, **ENDLESS)
    ran = launching.command(*words, home=home, env={"NANOGPT_FAULT": "0:60:kill"})
    assert ran.code == 1
    goes_on = f"`sm-nanogpt launch --resume {ran.out.strip()}`"
    assert goes_on in ran.error
    assert goes_on in launching.command("status", ran.out.strip(), home=home).err


def test_a_job_that_leaves_no_model_has_failed(home, text_file, tmp_path):
    copy = launching.edited(tmp_path / "mine", (MAIN, MAIN + "    os._exit(0)\n"))
    words = launching.launching("--entry-point", str(copy), data=text_file)
    ran = launching.command(*words, home=home)
    assert ran.code == 1
    assert "wrote no model" in ran.error


def test_a_ranks_child_process_does_not_delay_the_end(home, text_file, tmp_path):
    # A child that keeps the rank's output open, for longer than the command may take.
    sleep = f'    os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "{runs.LIMIT + 10}")\n'
    copy = launching.edited(tmp_path / "mine", (MAIN, MAIN + sleep))
    words = launching.launching("--entry-point", str(copy), data=text_file)
    ran = launching.command(*words, home=home)
    assert ran.code == 0, ran.err


def test_missing_data_is_refused_before_anything_starts(home, cli):
    ran = cli(*launching.launching(data=str(home / "nowhere.txt")))
    assert ran.code == 2
    assert not (home / "jobs").exists()
    assert f"{home / 'nowhere.txt'}: no such file" in ran.error


@pytest.mark.parametrize(
    "failing",
    ["launcher.local.backend.write_json", "pathlib.Path.write_bytes", "subprocess.Popen"],
)
def test_a_job_that_cannot_be_written_leaves_nothing(home, text_file, cli, monkeypatch, failing):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    words = launching.launching("--detach", data=text_file)
    assert cli(*words).code == 0  # so that the text is there, and the directories
    before = list((home / "jobs").iterdir())
    with monkeypatch.context() as context:
        context.setattr(failing, full)
        ran = cli(*words)
    assert (ran.code, ran.out) == (1, "")
    assert ran.error.startswith(f"{home / 'jobs'}")
    assert "No space left on device, so the job was not started; " in ran.error
    assert list((home / "jobs").iterdir()) == before


def test_a_full_disk_names_the_archive(tmp_path, text_file, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("launcher.local.runner.tarfile.open", Mock(side_effect=full))
    reason = run_job(tmp_path, text_file, "model.touch()")["reason"]
    assert reason.startswith("ServiceError: ")
    assert "output/model.tar.gz: this machine's disk is full" in reason


@pytest.mark.parametrize("leftover", [False, True])
def test_an_interrupted_start_leaves_no_job(leftover, home, text_file, monkeypatch):
    """Else no command would list or delete it. A killed launch may leave one; it is in no way."""
    job = TrainingJob(data=str(text_file), processes_per_instance=1)
    backend, directory = LocalBackend(Settings(home=home)), home / "jobs" / "a-job"
    if leftover:
        (directory / "code").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as context:
        context.setattr("launcher.local.backend.write_json", Mock(side_effect=KeyboardInterrupt))
        backend.submit("a-job", job, (1, 0))
    assert not directory.exists()


def test_an_out_of_memory_error_is_the_failure_reason(tmp_path, text_file):
    """Its name has to be one that counts as an error's, though the rank ends like any other."""
    script = f"""
        sys.path.insert(0, {str(runs.SCRIPT.parent)!r})
        import train
        sys.exit(train.failure_report(train.TrainingError("less, please")))
    """
    state = run_job(tmp_path, text_file, script)
    assert state["reason"] == "TrainingError: less, please"


# -- hung -----------------------------------------------------------------------------------------


HANGS = {**ENDLESS, "hang_seconds": 3}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hung_rank_fails_the_job_and_is_named(home, text_file, cli, rank):
    """Rank 0 serves the store by which the ranks know of each other."""
    job = detached(cli, home, "--processes-per-instance", "2", data=text_file, **HANGS)
    launching.wait_for_step(job.directory)
    os.kill(launching.ranks_of(job.directory)[rank], signal.SIGSTOP)
    hung = time.monotonic()
    assert wait_for_end(job) == "Failed"
    assert time.monotonic() - hung < 30
    reason = describe(job.job_id, launching.settings_of(home)).failure_reason or ""
    assert reason.startswith(f"TrainingError: rank {rank} on algo-1")
    assert not launching.ranks_of(job.directory)


def test_a_second_ctrl_c_ends_a_hung_job(home, text_file):
    words = launching.launching("--processes-per-instance", "2", data=text_file, **ENDLESS)
    with launching.started(*words, home=home) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        job = Finished(home, process.stdout.readline().strip())
        launching.wait_for_step(job.directory)
        os.kill(launching.ranks_of(job.directory)[1], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        runs.wait_for_line(process, "stopping the job", process.stderr)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        process.wait(timeout=30)
    assert time.monotonic() - began < 10
    assert state_of(job) == "Stopped"
    assert not launching.ranks_of(job.directory)


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are found in /proc")
def test_a_job_listens_only_on_loopback(home, text_file, cli):
    job = detached(cli, home, "--processes-per-instance", "2", data=text_file, **ENDLESS)
    launching.wait_for_step(job.directory)
    assert runs.listening(launching.processes_below(job.directory)) == {"127.0.0.1"}


# -- killed ---------------------------------------------------------------------------------------


def test_processes_are_found_and_killed_without_proc(tmp_path, monkeypatch):
    def missing(path: Path) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "iterdir", missing)
    # Stands in for a runner: it starts a rank, and both wait.
    code = (
        "import subprocess, sys;"
        "print(subprocess.Popen([sys.executable, '-c', 'input()', 'train' + '.py']).pid, flush=1);"
        "input()"
    )
    words = ["launcher.local.runner", str(tmp_path / "job"), "5"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as runner:
        assert runner.stdout is not None
        rank = int(runner.stdout.readline())
        assert launching.runner_of(tmp_path) == runner.pid
        assert launching.ranks_of(tmp_path / "job") == [rank]
        launching.kill_below(tmp_path)
        assert runner.wait() == -signal.SIGKILL
        launching.until(lambda: not launching.session_of(runner.pid))


def test_a_killed_runner_ends_its_ranks_and_fails_the_job(home, text_file, cli):
    job = detached(cli, home, "--processes-per-instance", "2", data=text_file, **ENDLESS)
    launching.until(lambda: len(launching.ranks_of(job.directory)) == 2)
    runner = launching.runner_of(job.directory)
    os.kill(runner, signal.SIGKILL)
    launching.until(lambda: state_of(job) == "Failed", 5)
    assert GONE in cli("status", job.job_id).out
    assert "Failed" in cli("jobs").out
    # A rank that is still importing torch notices when it has done so.
    launching.until(lambda: not launching.session_of(runner), 30)


def test_a_job_whose_processes_were_all_killed_has_failed(home, text_file):
    words = launching.launching(data=text_file, **ENDLESS)
    with launching.started(*words, home=home) as process:
        assert process.stdout is not None
        job = Finished(home, process.stdout.readline().strip())
        launching.wait_for_step(job.directory)
        launching.kill_below(job.directory)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert GONE in err.splitlines()[-1]
    assert f"--resume {job.job_id}" in err.splitlines()[-1]
    assert state_of(job) == "Failed"


def test_a_starting_job_is_shown_as_in_progress(home, text_file, cli, monkeypatch):
    seen: list[str] = []

    def write_and_look(path: Path, value: Any) -> None:
        write_json(path, value)
        seen.extend(d.status for d in jobs(launching.settings_of(home)))

    monkeypatch.setattr("launcher.local.backend.write_json", write_and_look)
    cli(*launching.launching("--detach", data=text_file))
    assert seen == ["InProgress"]


def test_a_checkpoint_that_vanishes_is_skipped(tmp_path):
    (tmp_path / "checkpoint-00000010.safetensors").touch()
    # A link to nowhere is listed, and then not there, as is a file deleted in between.
    (tmp_path / "checkpoint-00000005.safetensors").symlink_to(tmp_path / "nowhere")
    assert own_checkpoint(tmp_path, given={}) == 10


def test_a_clock_set_back_hides_no_checkpoint(job):
    state = json.loads((job.directory / "state.json").read_text())
    (job.directory / "state.json").write_text(json.dumps({**state, "started": 4e9}))
    assert describe(job.job_id, launching.settings_of(job.home)).checkpoint_step == 10


def test_a_resumed_jobs_first_checkpoint_is_not_its_own(home, text_file, job, tmp_path):
    script = launching.edited(tmp_path / "mine", (STEP, STEP + "        raise OSError\n"))
    words = ("--resume", job.job_id, "--set", "max_steps=20", "--entry-point", str(script))
    ran = launching.command("launch", *words, home=home)
    assert ran.code == 1
    (resumed,) = {path.name for path in (home / "jobs").iterdir()} - {job.job_id}
    given = home / "jobs" / resumed / "hosts/algo-1/checkpoints"
    assert list(given.glob("checkpoint-*10.safetensors"))
    assert describe(resumed, launching.settings_of(home)).checkpoint_step is None


def test_a_partly_copied_checkpoint_is_not_the_jobs_own(tmp_path, text_file, job, monkeypatch):
    """The runner is killed while it copies."""
    write_job(tmp_path / "killed", text_file)
    (tmp_path / "killed/code").mkdir()
    run = LocalRun(tmp_path / "killed")
    earlier = str(job.directory / "hosts/algo-1/checkpoints")
    run.record = run.record.model_copy(update={"resume_from": earlier})

    def copy_half(source: Path, target: Path) -> None:
        (target / source.name if target.is_dir() else target).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copy2", copy_half)
    with pytest.raises(KeyboardInterrupt):
        run.lay_out()
    given = run.base / "checkpoints"
    assert own_checkpoint(given, run.state["given"]) is None


@pytest.mark.parametrize("between", [1, 5000])
def test_the_newest_value_of_each_metric_is_found(tmp_path, between):
    path, rows = tmp_path / "metrics.jsonl", 10_000
    lines = []
    for step in range(1, rows + 1):
        row = {"step": step, "train_loss": 1.5, "learning_rate": 0.001}
        lines.append(row if step % between else {**row, "val_loss": step / 4})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    newest = {"step": rows - 1, "train_loss": 1.5, "learning_rate": 0.001, "max_steps": rows}
    val_loss = (rows - 1) // between * between / 4
    assert last_metrics(path, rows) == {**newest, "val_loss": val_loss}
    with path.open("a") as file:
        file.write('{"step": 10000, "train')  # a line that is being written
    assert last_metrics(path, rows) == {**newest, "val_loss": val_loss}


def test_metrics_at_a_read_boundary_are_found(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for rows in range(735, 765):  # the row with val_loss comes into what is read, byte by byte
        with path.open("w") as file:
            for step in range(1, rows):
                row = {"step": step, "train_loss": 1.5}
                file.write(json.dumps(row if step != 250 else {**row, "val_loss": 1.25}) + "\n")
        read = last_metrics(path, rows)
        assert read is not None
        assert read["val_loss"] == 1.25


def test_the_newest_metrics_are_read_from_the_end_of_the_file(tmp_path):
    row = {"step": 1, "train_loss": 1.5, "val_loss": 1.5}
    lines = [json.dumps({**row, "early": 1}), *[json.dumps(row)] * 2000]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines) + "\n")
    assert last_metrics(path, 1) == {**row, "max_steps": 1}


def test_deleting_a_jobs_directory_ends_its_processes(text_file, home, cli):
    job = detached(cli, home, "--processes-per-instance", "2", data=text_file, **ENDLESS)
    launching.wait_for_step(job.directory)
    runner = launching.runner_of(job.directory)
    while job.directory.exists():  # until nothing is written in between
        shutil.rmtree(job.directory, ignore_errors=True)
    launching.until(lambda: not launching.session_of(runner), 30)
    assert not job.directory.exists()


def test_a_resumed_job_fails_if_its_checkpoints_are_gone(tmp_path, text_file):
    write_job(tmp_path / "job", text_file)
    record = json.loads((tmp_path / "job/job.json").read_text())
    (tmp_path / "job/code").mkdir()
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier/metrics-00000001.jsonl").touch()
    record["resume_from"] = str(tmp_path / "earlier")
    write_json(tmp_path / "job/job.json", record)
    LocalRun(tmp_path / "job").run()
    state = json.loads((tmp_path / "job/state.json").read_text())
    assert state["status"] == "Failed"
    assert state["reason"].startswith("ServiceError: the checkpoints to resume from are missing: ")


def test_a_failure_is_reported_though_no_log_can_be_written(tmp_path, text_file):
    script = """
    (job / "logs/job.log").mkdir()
    print("a line\\n" * 100_000)  # more than a pipe holds
    sys.exit("OSError: [Errno 28] No space left on device")
    """
    state = run_job(tmp_path, text_file, script)
    assert state["status"] == "Failed"
    assert state["reason"] == "OSError: [Errno 28] No space left on device"


def test_a_log_says_where_lines_are_missing(tmp_path, text_file):
    log = tmp_path / "logs/job.log"

    def output() -> Iterator[bytes]:
        log.parent.mkdir()
        yield b"one\n"
        log.rename(tmp_path / "aside")
        log.mkdir()
        yield b"two\n"
        log.rmdir()
        (tmp_path / "aside").rename(log)
        yield b"three\n"
        yield b"four\n"

    write_job(tmp_path, text_file)
    process: Any = SimpleNamespace(stdout=output())
    LocalRun(tmp_path).keep_output(process)
    assert log.read_text().splitlines() == [
        "one",
        "(lines are missing here: Is a directory)",
        "three",
        "four",
    ]


def test_a_failure_reason_has_at_most_1024_characters(tmp_path, text_file):
    state = run_job(tmp_path, text_file, "raise ValueError('x' * 2000)")
    assert state["status"] == "Failed"
    assert state["reason"] == f"ValueError: {'x' * 1024}"[:1024]


def test_a_failure_reason_is_written_though_the_disk_is_full(tmp_path, text_file, monkeypatch):
    def full(path: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_job(tmp_path, text_file)
    run = LocalRun(tmp_path)
    run.update(secondary="Training")
    monkeypatch.setattr("launcher.files.storage.replacing", full)
    run.update(status="Failed", reason="a reason")
    told = json.loads((tmp_path / "state.json").read_text())
    assert (told["status"], told["reason"]) == ("Failed", "a reason")
    run.update(reason="")  # which is shorter
    assert json.loads((tmp_path / "state.json").read_text())["reason"] == ""


def test_wait_ends_when_the_job_is_deleted(home, text_file, cli, monkeypatch):
    with running(home / "jobs/a", text_file) as directory:
        monkeypatch.setattr(
            "launcher.tracking.time.sleep",
            lambda seconds: shutil.rmtree(directory, ignore_errors=True),
        )
        ran = cli("wait", "a")
    assert ran.code == 1
    assert ran.error == "job a was deleted before it ended; `sm-nanogpt jobs` lists the jobs"


def test_a_followed_log_yields_whole_lines_and_characters(job):
    log, whole = job.directory / "logs/job.log", "naïve 漢字 🙂\rsame line".encode()
    log.write_bytes(b"")
    state = json.loads((job.directory / "state.json").read_text())
    with (job.directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as if it still ran
        write_json(job.directory / "state.json", {**state, "status": "InProgress"})
        lines = logs(job.job_id, follow=True, settings=launching.settings_of(job.home))

        def write_slowly() -> None:
            for byte in [*whole, *b"\n", *whole]:
                with log.open("ab") as file:
                    file.write(bytes([byte]))
                time.sleep(0.02)
            write_json(job.directory / "state.json", state)

        writer = threading.Thread(target=write_slowly)
        writer.start()
        assert [line.encode() for line in lines] == [whole, whole]
        writer.join()


# -- stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_following_stops_the_job_cleanly(home, text_file, sign):
    words = launching.launching("--processes-per-instance", "2", data=text_file, **ENDLESS)
    with launching.started(*words, home=home) as process:
        assert process.stdout is not None
        job = Finished(home, process.stdout.readline().strip())
        launching.wait_for_step(job.directory)
        os.killpg(process.pid, sign)
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


def test_a_followed_job_stops_when_its_log_has_no_reader(home, text_file):
    words = launching.launching(data=text_file, **ENDLESS)
    with launching.started(*words, home=home) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        job = Finished(home, process.stdout.readline().strip())
        launching.wait_for_step(job.directory)
        process.stderr.close()  # as `2>&1 | head` does
        assert process.wait(timeout=60) == 1
    assert state_of(job) == "Stopped"


def test_a_launch_that_cannot_print_the_id_names_the_job(home, text_file):
    reader, writer = os.pipe()
    os.close(reader)
    words = launching.launching("--detach", data=text_file)
    with launching.started(*words, home=home, stdout=writer) as process:
        _, err = process.communicate(timeout=60)
    os.close(writer)
    assert process.returncode == 1
    (job,) = (home / "jobs").iterdir()
    assert err.splitlines()[-1] == (
        f"error: Broken pipe: cannot print the job id, {job.name};"
        f" `sm-nanogpt stop {job.name}` stops it"
    )
    wait(job.name, launching.settings_of(home))


def test_an_interrupted_launch_names_the_local_job(text_file, cli, home, monkeypatch):
    start = subprocess.Popen

    def start_and_interrupt(*words: Any, **named: Any) -> Any:
        start(*words, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(subprocess, "Popen", start_and_interrupt)
        ran = cli(*launching.launching(data=text_file, **ENDLESS))
    assert (ran.code, ran.out) == (1, "")
    (directory,) = (home / "jobs").iterdir()
    assert f"`sm-nanogpt stop {directory.name}`" in ran.err.splitlines()[-1]


def test_ctrl_c_in_unfollowed_logs_does_not_mention_the_job(cli, monkeypatch):
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.tracking.logs", interrupted)
    ran = cli("logs", "some-job")
    assert (ran.code, ran.err) == (1, "interrupted\n")


def test_a_local_dry_run_is_refused_before_reading_text(cli):
    ran = cli(*launching.launching("--dry-run", data="missing.txt"))
    assert ran.code == 2
    assert ran.error.startswith("--dry-run shows the request to SageMaker")


def test_ctrl_c_in_logs_does_not_stop_the_job(home, text_file, cli):
    job = detached(cli, home, data=text_file, **ENDLESS)
    with launching.started("logs", job.job_id, "--follow", home=home) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "the job keeps running\n")
    assert state_of(job) == "InProgress"


def test_stop_waits_for_the_checkpoint_and_says_how_to_resume(home, text_file, cli):
    job = detached(cli, home, data=text_file, **ENDLESS)
    launching.wait_for_step(job.directory)
    ran = cli("stop", job.job_id)
    assert (ran.code, ran.out) == (0, "")
    assert f"--resume {job.job_id}" in ran.err
    assert state_of(job) == "Stopped"
    assert "Stopped" in cli("status", job.job_id).out


def test_a_job_stopped_before_its_first_step_has_no_checkpoint(home, text_file, cli):
    script = launching.edited(
        home.parent / "train",
        ("    corpus = load_corpus(container, config, group)\n", "    time.sleep(1000)\n"),
    )
    job = detached(cli, home, "--entry-point", str(script), data=text_file, **ENDLESS)
    assert cli("stop", job.job_id).code == 0
    assert state_of(job) == "Stopped"
    ran = cli("fetch-and-sample", job.job_id)
    assert ran.code == 1
    assert "is Stopped; it left neither a model nor a checkpoint" in ran.error
    resumed = cli("launch", "--instance", "local", "--resume", job.job_id)
    assert resumed.code == 1
    assert "no checkpoint to resume from" in resumed.error


def test_a_job_stopped_at_its_last_step_completes(tmp_path, text_file):
    script = """
        be_stopped()
        model.touch()
    """
    assert run_job(tmp_path, text_file, script)["status"] == "Completed"
    with tarfile.open(tmp_path / "output/model.tar.gz") as tar:
        assert tar.getnames() == ["model.safetensors"]


def test_a_stopped_job_fails_if_its_checkpoint_fails(tmp_path, text_file):
    script = """
        be_stopped()
        sys.exit("TrainingError: cannot write it: No space left on device")
    """
    state = run_job(tmp_path, text_file, script)
    assert state["status"] == "Failed"
    assert state["reason"] == "TrainingError: cannot write it: No space left on device"


def test_stop_fails_if_the_job_fails(home, text_file, cli, monkeypatch):
    with running(home / "jobs/a", text_file) as directory:
        failed = {"status": "Failed", "reason": "TrainingError: no space"}
        end = partial(write_json, directory / "state.json", failed)
        monkeypatch.setattr("launcher.tracking.time.sleep", lambda seconds: end())
        ran = cli("stop", "a")
    assert ran.code == 1
    assert ran.error.startswith("job a failed: TrainingError: no space; ")


def test_stop_says_if_the_job_completed_meanwhile(home, text_file, cli, monkeypatch):
    with running(home / "jobs/a", text_file) as directory:
        end = partial(write_json, directory / "state.json", {"status": "Completed"})
        monkeypatch.setattr("launcher.tracking.time.sleep", lambda seconds: end())
        ran = cli("stop", "a")
    assert ran.code == 0
    assert ran.err.splitlines()[-1] == "job a completed; next: sm-nanogpt fetch-and-sample a"


# -- resuming -------------------------------------------------------------------------------------


def test_a_resumed_job_keeps_its_data_and_hyperparameters(job, cli):
    words = ("--resume", job.job_id, "--set", "max_steps=15", "--processes-per-instance", "1")
    ran = cli("launch", *words)
    assert ran.code == 0, ran.err
    assert "resumed from the checkpoint of step 10" in ran.err
    assert "step=15/15" in ran.err
    before, after = (
        describe(job_id, launching.settings_of(job.home))
        for job_id in (job.job_id, ran.out.strip())
    )
    assert after.data == before.data
    assert after.hyperparameters == {**before.hyperparameters, "max_steps": 15}
    checkpoints = job.home / "jobs" / after.job_id / "hosts/algo-1/checkpoints"
    rows = (checkpoints / "metrics-00000001.jsonl").read_text()
    steps = [json.loads(row)["step"] for row in rows.splitlines()]
    assert steps == [5, 10, 15]
    assert (job.directory / "hosts/algo-1/checkpoints/checkpoint-00000010.safetensors").exists()


def taken_over(asked: Request, settings: Settings) -> tuple[Request, TrainingJob]:
    earlier = find_earlier(asked, settings)
    assert earlier is not None
    return resumed(asked, earlier, settings)


def test_a_resumed_job_keeps_the_defaults_of_its_launch(job):
    file = job.directory / "job.json"
    record = json.loads(file.read_text())
    record["hyperparameters"]["momentum"] = 0.5
    file.write_text(json.dumps(record))
    asked = Request(instance="local", resume=job.job_id)
    settings = launching.settings_of(job.home)
    taken, _ = taken_over(asked, settings)
    assert taken.hyperparameters["momentum"] == 0.5


def test_a_preset_keeps_a_resumed_adamw_jobs_learning_rate(job):
    file = job.directory / "job.json"
    record = json.loads(file.read_text())
    record["hyperparameters"].update(optimizer="adamw", learning_rate=0.002)
    file.write_text(json.dumps(record))
    asked = Request(instance="local", resume=job.job_id, preset="baby")
    settings = launching.settings_of(job.home)
    taken, _ = taken_over(asked, settings)
    assert taken.hyperparameters["learning_rate"] == 0.002


def test_resuming_drops_unknown_hyperparameters_and_says_so(caplog, job):
    file = job.directory / "job.json"
    record = json.loads(file.read_text())
    record["hyperparameters"]["gone"] = 1
    file.write_text(json.dumps(record))
    caplog.set_level("INFO", "launcher")
    asked = Request(resume=job.job_id, hyperparameters={"max_steps": 15})
    settings = launching.settings_of(job.home)
    taken_over(asked, settings)
    (line,) = caplog.messages
    assert "has no gone;" in line


def test_resuming_keeps_processes_validation_and_script(pair):
    words = ("launch", "--instance", "local", "--resume", pair.job_id)
    ran = launching.command(*words, *launching.sets(max_steps=12), home=pair.home)
    assert ran.code == 0, ran.err
    resumed = Finished(pair.home, ran.out.strip())
    assert (resumed.directory / "hosts/algo-1/output/data/rank-1.json").exists()
    assert (resumed.directory / "hosts/algo-1/input/data/validation/input.txt").exists()


def test_resuming_with_another_model_size_names_the_difference(job, cli):
    ran = cli("launch", "--instance", "local", "--resume", job.job_id, "--set", "n_embd=64")
    assert ran.code == 2
    assert "n_embd was 32 and is 64" in ran.error


def test_resuming_with_fewer_steps_than_made_is_refused(job, cli):
    ran = cli("launch", "--instance", "local", "--resume", job.job_id, "--set", "max_steps=5")
    assert ran.code == 2
    assert ran.error == (
        "max_steps=5: the earlier job has already reached step 10; to train further, add"
        " `--set max_steps=N` with N above 10"
    )


def test_resuming_a_completed_job_requires_more_steps(job, cli):
    words = ("launch", "--instance", "local", "--resume", job.job_id)
    ran = cli(*words)
    assert ran.code == 2
    assert "max_steps=10: " in ran.error
    assert "--set max_steps=" in ran.error
    assert len(list((job.home / "jobs").iterdir())) == 1


def test_a_job_that_failed_after_its_last_step_can_be_resumed(job, cli):
    file = job.directory / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "status": "Failed"}))
    ran = cli("launch", "--instance", "local", "--resume", job.job_id)
    assert ran.code == 0, ran.err
    resumed = Finished(job.home, ran.out.strip())
    assert (resumed.directory / "output/model.tar.gz").exists()


def test_a_running_job_cannot_be_resumed(home, text_file, cli):
    job = detached(cli, home, data=text_file, **ENDLESS)
    ran = cli("launch", "--instance", "local", "--resume", job.job_id)
    assert ran.code == 1
    assert f"`sm-nanogpt stop {job.job_id}`" in ran.error
    assert len(list((home / "jobs").iterdir())) == 1


def test_a_local_job_cannot_be_resumed_on_sagemaker(job, cli):
    ran = cli("launch", "--resume", job.job_id, "--instance", "ml.g5.xlarge")
    assert ran.code == 2
    assert ran.error.startswith(f"job {job.job_id} ran on local, and ")


def test_a_job_without_checkpoints_cannot_be_resumed(job, cli):
    shutil.rmtree(job.directory / "hosts/algo-1/checkpoints")
    ran = cli("launch", "--instance", "local", "--resume", job.job_id)
    assert ran.code == 1
    assert "left no checkpoint" in ran.error
    assert len(list((job.home / "jobs").iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--set", "n_layr=1"], "did you mean n_layer?"),
        (["--preset", "babby"], "did you mean baby?"),
        (["--preset", "auto"], "--preset auto is for a new run; leave it out with --resume"),
        (["--set", "batch_size=3", "--processes-per-instance", "2"], "batch_size=2 or 4"),
    ],
)
def test_resuming_with_invalid_options_starts_nothing(job, cli, words, named):
    ran = cli("launch", "--instance", "local", "--resume", job.job_id, *words)
    assert ran.code == 2
    assert named in ran.error
    assert len(list((job.home / "jobs").iterdir())) == 1


@pytest.mark.parametrize(
    "changed", [{"field_of_tomorrow": 1}, {"instance_count": "many"}, {"resume": 5}]
)
def test_a_job_with_a_damaged_record_cannot_be_resumed(job, cli, changed):
    record = json.loads((job.directory / "job.json").read_text())
    record["job"].update(changed)
    (job.directory / "job.json").write_text(json.dumps(record))
    ran = cli("launch", "--instance", "local", "--resume", job.job_id)
    assert ran.code == 1
    assert ran.error.startswith(f"{job.directory / 'job.json'} is damaged, or of another version")


def test_an_unknown_job_cannot_be_resumed(cli):
    ran = cli("launch", "--instance", "local", "--resume", "nope")
    assert ran.code == 1
    assert "`sm-nanogpt jobs`" in ran.error


# -- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "gpus", "expected"),
    [
        ({}, 4, (4, 4)),
        ({"processes_per_instance": 4}, 4, (4, 4)),
        ({"processes_per_instance": 3, "hyperparameters": {"device": "cpu"}}, 4, (3, 0)),
        ({}, 0, (1, 0)),
        ({"preset": "baby"}, 0, (4, 0)),
        ({"processes_per_instance": 3}, 0, (3, 0)),
    ],
)
def test_each_gpu_gets_one_process(monkeypatch, words, gpus, expected):
    from launcher.local.backend import plan_processes

    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    monkeypatch.setattr("launcher.machines.cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert plan_processes(TrainingJob(data="/data", **words)) == expected


def test_a_job_that_would_leave_gpus_idle_is_refused(monkeypatch):
    from launcher import InputError
    from launcher.local.backend import plan_processes

    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(InputError, match="device=cpu"):
        plan_processes(TrainingJob(data="/data", processes_per_instance=2))


def test_a_job_runs_the_folder_of_this_package(finished):
    assert Source.read(finished.directory / "hosts/algo-1/code").is_packaged


@pytest.mark.parametrize(
    "command",
    [
        "from entry_point import train",
        "from launcher.cli import run; run(['launch', '--instance', 'local', '--data', {text!r}])",
    ],
)
def test_a_signal_waits_for_the_import_of_torch(command, home, text_file):
    """In the middle of it, a signal got lost in C++ or aborted the process."""
    watch = """
import os, signal, sys
from importlib.abc import MetaPathFinder
class Watch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
            sys.stdout.flush()
            os._exit(0)
sys.meta_path.insert(0, Watch())
"""
    code = watch + command.format(text=str(text_file))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "True\n", ran.stderr
