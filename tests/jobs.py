"""Copies of the finished job with other values, and its curve."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launching import Finished

from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.storage import write_json
from sm_nanogpt.launcher.job import COMMON_FIELDS, TrainingJob


def file_rows(job: Finished) -> list[dict[str, Any]]:
    path = job.directory / "hosts/algo-1/checkpoints/metrics-00000001.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def sibling(job: Finished, number: int, loss: float, **hyperparameters: Any) -> str:
    """A second job with other hyperparameters and another loss."""
    directory = job.directory.with_name(f"{job.job_id}-{number}")
    shutil.copytree(job.directory, directory)
    record = json.loads((directory / "job.json").read_text())
    record["hyperparameters"] |= hyperparameters
    (directory / "job.json").write_text(json.dumps(record))
    rows = [json.dumps({**row, "val_loss": loss}) for row in file_rows(job)]
    curve = directory / "hosts/algo-1/checkpoints/metrics-00000001.jsonl"
    curve.write_text("\n".join(rows) + "\n")
    return directory.name


def stopped_job(**values: Any) -> JobDescription:
    """A job of this machine that was stopped."""
    return JobDescription(
        job_id="sm-nanogpt-20261130-055203-b8e312",
        status="Stopped",
        secondary_status="Stopped",
        instance="local",
        instance_count=1,
        created=0.0,
        **values,
    )


def copy_job(job, job_id, **values):
    """A copy of a job with another id, and other values in its record."""
    directory = job.home / "jobs" / job_id
    shutil.copytree(job.directory, directory)
    record = json.loads((directory / "job.json").read_text())
    record["job"] |= values
    write_json(str(directory / "job.json"), record)
    return job_id


def jobs_in(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "jobs").iterdir())


def change(path: Path, **values: Any) -> None:
    """Puts other values into a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_job(directory: Path, resume: str | None = None, job: TrainingJob | None = None) -> None:
    """What a launch writes down of a job."""
    (directory / "code").mkdir(parents=True)
    text = directory / "input.txt"
    text.write_text("a text")
    job = job or TrainingJob(instance="local", data=text.as_uri(), resume=resume)
    record = {
        "job": job.model_dump(mode="json", include=COMMON_FIELDS),
        "hyperparameters": {},
        "created": time.time(),
        "processes_per_host": 1,
        "gpus_per_host": 0,
    }
    storage.write_json(str(directory / "job.json"), record)


@contextmanager
def running(directory: Path, job: TrainingJob | None = None) -> Iterator[Path]:
    """A job that seems to run, as somebody holds its lock."""
    write_job(directory, job=job)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory


NEWER = "sm-nanogpt-20990101-000000-abcdef"
