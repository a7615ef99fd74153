"""Copies of the finished job with other values, and its curve."""

from __future__ import annotations

import json
import shutil
from typing import Any

from launching import Finished

from launcher.files.storage import write_json


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


def copied(job, job_id, **values):
    """A copy of a job with another id, and other values in its record."""
    place = job.home / "jobs" / job_id
    shutil.copytree(job.directory, place)
    record = json.loads((place / "job.json").read_text())
    record["job"] |= values
    write_json(str(place / "job.json"), record)
    return job_id
