"""The three commands as a user types them, and jobs that are interrupted, against the emulator."""

from __future__ import annotations

import json
import re
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import pytest
import training_runs
from container import Cluster
from edits import EDITS
from emulator import Emulator
from launching import Ran, sets, until

from sm_nanogpt import Job
from sm_nanogpt.launcher.files import storage

INSTANCE = ("--instance", "ml.g5.12xlarge")
TWO_HOSTS = ("--instance-count", "2")
TINY: dict[str, Any] = {**launching.TINY, "batch_size": 8}

# A job that writes checkpoints after steps 20, 40 and 60, and with HOLD waits
# after step 30 until its machines are gone, so that the same steps are always lost and done again.
STEPS, HELD_AT = 60, 30
LONG = {**TINY, "max_steps": STEPS, "eval_interval": 20, "dropout": 0.1}
HOLD = ("--environment", f"NANOGPT_FAULT=0:{HELD_AT}:hang")
LOOP = "        while self.step < self.config.total_steps:\n"
SLOWER = f"{LOOP}            time.sleep(0.03)\n"
ALL_CHECKPOINTS = ("min(50 * self.cost, 600)", "min(self.cost, 600)")


def names_and_times_apart(request: dict[str, Any]) -> str:
    return re.sub(r"sm-nanogpt-\d{8}-\d{6}-[0-9a-f]{6}", "JOB", json.dumps(request, sort_keys=True))


def cluster_of(aws: Emulator, job_id: str) -> Cluster:
    attempts = aws.sagemaker.run.attempts  # type: ignore[attr-defined]
    return until(lambda: attempts.get(job_id)).cluster


@pytest.mark.usefixtures("containers")
def test_the_three_commands_train_on_two_hosts_and_sample(aws, cli, command, text_file):
    assert command("upload-data", str(text_file)).good
    launch = ("launch", *INSTANCE, *TWO_HOSTS, *sets(**{**TINY, "max_steps": 60}))
    shown = cli(*launch, "--dry-run").good
    launched = command(*launch).good
    assert "INFO:" not in launched.err
    job_id = launched.out.strip()
    tree = until(lambda: ranks(cluster_of(aws, job_id)))
    followed = cli("logs", job_id, "--follow").good
    sampled = command("fetch-and-sample", job_id, "--max-new-tokens", "50").good

    (request_sent,) = [body for operation, body in aws.calls if operation == "CreateTrainingJob"]
    printed_request = shown.out.replace("OWNER-NOT-KNOWN-YET", "root")
    assert names_and_times_apart(request_sent) == names_and_times_apart(json.loads(printed_request))
    # Each rank is a child of what mpirun started on its host.
    assert "mpirun" in tree[0][1]
    assert "orted" in tree[1][1]
    first_line = "running on 2 hosts x 1 CPU = 2 processes in one group (launched by mpirun;"
    first_line += " 1 CPU thread each)"  # as the tests ask for
    assert followed.out.count(first_line) == 1
    assert re.search(r"^step=60/60 ", followed.out, re.MULTILINE)
    assert len(followed.out.splitlines()) < 40
    assert len(sampled.out) >= 50


def test_two_hosts_tune_a_model_of_subword_tokens(aws, cli, text_file):
    assert cli("upload-data", str(text_file), "--tokenizer", "bpe", "--vocab-size", "500").good
    base = cli("launch", "--instance", "local", *sets(**TINY)).good.out.strip()
    recipe = {name: value for name, value in TINY.items() if not name.startswith("n_")}
    two = (*TWO_HOSTS, "--input-mode", "FastFile", "--init-from", base)
    tuned = cli("launch", *INSTANCE, *two, *sets(**recipe)).good.out.strip()
    assert cli("wait", tuned).good
    log = cli("logs", tuned).out
    assert re.search(r"started from the weights in \S+/input/data/model", log)
    assert " tokens to train on, " in log
    assert "step=0/" in log
    assert "bits/byte: " in cli("status", tuned).out
    sampled = cli("fetch-and-sample", tuned, "--prompt", "The 🙂")
    assert sampled.out.startswith("The 🙂"), sampled.err


def ranks(cluster: Cluster) -> list[list[str]]:
    """For each host its rank: the command line of it and of the processes above it.

    Empty as long as not all of them are there.
    """
    lines = []
    for index in range(len(cluster.hosts)):
        for command, *parents in cluster.processes(index):
            if "train.py" in command and "mpirun" not in command:
                lines.append([command, *parents])
    return lines if len(lines) == len(cluster.hosts) else []


# -- interrupted -----------------------------------------------------------------------------------


@pytest.fixture
def launch_long(aws, cli, text_file, tmp_path):
    """Launches the job of an edited model, with some words more; returns its id."""
    script = launching.edited(tmp_path / "train", ALL_CHECKPOINTS, *EDITS["activation"])
    a_day = ("--max-run", "86400")  # which a busy machine does not reach
    fixed = ("--data", str(text_file), "--entry-point", str(script), *a_day, *sets(**LONG))

    def launch(*arguments: str) -> str:
        return cli("launch", *INSTANCE, *fixed, *arguments).good.out.strip()

    return launch


def wait_until_held(s3: Any, cli: Callable[..., Ran], job_id: str) -> None:
    """Until the job waits, its checkpoint is in S3 and its log in CloudWatch."""
    prefix = f"some/prefix/checkpoints/{job_id}/checkpoint-"
    until(lambda: s3.list_objects_v2(Bucket=s3.bucket, Prefix=prefix)["KeyCount"])
    until(lambda: f"\nstep={HELD_AT}/" in cli("logs", job_id).out)


def result_of(cli: Callable[..., Ran], s3: Any, job_id: str, directory: Path) -> tuple[bytes, Any]:
    """The weights of a job that has ended well, and its curve without what is of the clock."""
    assert cli("wait", job_id).good
    weights = (Job(job_id).model() / "model.safetensors").read_bytes()
    output = f"s3://{s3.bucket}/some/prefix/jobs/{job_id}/output/output.tar.gz"
    (archive,) = storage.fetch(output, directory)
    with tarfile.open(archive) as tar:
        file = tar.extractfile("metrics.jsonl")
        assert file is not None
        rows = [json.loads(line) for line in file.read().splitlines()]
    for row in rows:
        row.pop("tokens_per_second", None)
        row.pop("time", None)
    return weights, rows


def steps_of(log: str) -> list[int]:
    """The steps of the metric lines of a log."""
    return [int(step) for step in re.findall(r"^step=(\d+)/", log, re.MULTILINE)]


def resumed_from(log: str) -> int:
    (step,) = re.findall(r"resumed from the checkpoint of step (\d+)", log)
    return int(step)


@pytest.fixture
def undisturbed(s3, cli, launch_long, tmp_path, tmp_path_factory):
    """The result of the job on two hosts when nothing happens to it; computed once."""

    def build(directory: Path) -> list[Path]:
        weights, rows = result_of(cli, s3, launch_long(*TWO_HOSTS), tmp_path / "undisturbed")
        (directory / "weights").write_bytes(weights)
        (directory / "rows").write_text(json.dumps(rows))
        return [directory]

    (directory,) = map(Path, launching.once(tmp_path_factory, "undisturbed", build))
    return (directory / "weights").read_bytes(), json.loads((directory / "rows").read_text())


def test_an_interrupted_spot_job_ends_with_the_same_result(
    aws, s3, cli, undisturbed, launch_long, tmp_path
):
    weights, rows = undisturbed
    every_fifth = list(range(5, STEPS + 1, 5))
    assert [row["step"] for row in rows] == every_fifth

    spot = launch_long("--spot", *TWO_HOSTS, *HOLD)
    wait_until_held(s3, cli, spot)
    neighbor = f"some/prefix/checkpoints/{spot}0/checkpoint-99999999.safetensors"
    s3.put_object(Bucket=s3.bucket, Key=neighbor, Body=b"of a job whose id begins with this one")
    aws.sagemaker.jobs[spot].interrupting.set()
    assert result_of(cli, s3, spot, tmp_path / "spot") == (weights, rows)
    # Also where the second host's agent has uploaded what its host got at the restart.
    metric_rows = json.loads(cli("metrics", spot, "--json").out)
    assert [row["step"] for row in metric_rows] == every_fifth
    states = [t["Status"] for t in aws.sagemaker.jobs[spot].transitions]
    start = ["Starting", "Downloading", "Training"]
    assert states == [*start, "Interrupted", *start, "Uploading", "Completed"]
    assert not (checkpoints_of(aws, spot) / "0").exists()
    log = cli("logs", spot).out
    assert resumed_from(log) == 20
    lost = [step for step in every_fifth if 20 < step <= HELD_AT]  # and done again
    assert sorted(steps_of(log)) == sorted([*every_fifth, *lost])
    described = json.loads(cli("status", spot, "--json").out)
    assert described["metrics"]["step"] == STEPS
    assert described["metrics"]["val_loss"] == pytest.approx(rows[-1]["val_loss"], abs=1e-4)
    assert described["billable_seconds"] < described["training_seconds"]


def test_a_stopped_and_resumed_job_ends_with_the_same_result(
    aws, s3, cli, undisturbed, launch_long, tmp_path
):
    stopped = launch_long(*TWO_HOSTS, *HOLD)
    wait_until_held(s3, cli, stopped)
    assert json.loads(cli("status", stopped, "--json").out)["status"] == "InProgress"
    assert cli("stop", stopped).good
    assert "state:       Stopped" in cli("status", stopped).out
    resumed = cli("launch", "--resume", stopped).good.out.strip()
    assert result_of(cli, s3, resumed, tmp_path / "resumed") == undisturbed
    assert "sampling with the edited" in cli("fetch-and-sample", resumed).err
    log = cli("logs", resumed).out
    assert max(steps_of(cli("logs", stopped).out)) == HELD_AT  # it was stopped
    assert resumed_from(log) == 20
    assert min(steps_of(log)) > 20


@pytest.mark.usefixtures("containers")
def test_a_spot_job_stopped_while_interrupted_stays_stopped(aws, s3, cli, launch_long, monkeypatch):
    monkeypatch.setattr(training_runs, "GRACE_SECONDS", 60.0)  # of the interruption
    spot = launch_long("--spot", *HOLD)
    wait_until_held(s3, cli, spot)
    (host,) = cluster_of(aws, spot).hosts
    job = aws.sagemaker.jobs[spot]
    job.interrupting.set()
    until(lambda: not job.interrupting.is_set())
    assert cli("stop", spot).good
    assert [t["Status"] for t in job.transitions][-2:] == ["Stopping", "Stopped"]
    assert "stopped by a signal" not in cli("logs", spot).out  # SIGTERM reaches no rank
    assert host.status == -signal.SIGKILL


def test_s3_and_the_container_hold_the_same_checkpoints(aws, s3, cli, text_file, tmp_path):
    # Slow enough to be sent, and so fast that old ones are to be deleted while they are sent.
    script = launching.edited(tmp_path / "train", (LOOP, SLOWER), ALL_CHECKPOINTS)
    often = {**LONG, "eval_interval": 5}
    arguments = ("--data", str(text_file), "--entry-point", str(script), *sets(**often))
    job_id = cli("launch", *INSTANCE, *arguments, "--follow").good.out.strip()

    prefix = f"some/prefix/checkpoints/{job_id}/"
    objects = s3.list_objects_v2(Bucket=s3.bucket, Prefix=prefix)["Contents"]
    s3_sizes = {object["Key"].removeprefix(prefix): object["Size"] for object in objects}
    local_sizes = {}
    for path in checkpoints_of(aws, job_id).iterdir():
        if ".sagemaker-" not in path.name:
            local_sizes[path.name] = path.stat().st_size
    assert s3_sizes == local_sizes
    deletions = [access for access in aws.accesses if access.action == "s3:DeleteObject"]
    assert any(".safetensors" in deletion.resource for deletion in deletions)


def checkpoints_of(aws: Emulator, job_id: str) -> Path:
    """/opt/ml/checkpoints of a job's first host."""
    return cluster_of(aws, job_id).hosts[0].checkpoints
