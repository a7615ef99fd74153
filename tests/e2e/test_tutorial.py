"""The tutorial of examples/, unchanged, against the emulator."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import notebooks
import pytest
from launching import PROGRAM, put_command
from sagemaker_service import Job, scripted

ROOT = Path(__file__).resolve().parents[2]
MODEL = "output/model.tar.gz"


@pytest.fixture
def shell(impatience, tmp_path, short_text_file, monkeypatch):
    """The shell of a user who makes the tutorial's first try."""
    put_command(tmp_path, impatience + PROGRAM[-1])
    for name, value in {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "TEXT": str(short_text_file),
        "INSTANCE": "ml.m5.xlarge",
        "PRESET": "cpu",
        "MAX_STEPS": "10",
    }.items():
        monkeypatch.setenv(name, value)


def test_the_script_of_the_tutorial_runs(cloud, s3, shell, finished, short_text_file, tmp_path):
    """Its commands. The job only seems to run; those of the notebook and of test_jobs.py do."""
    archive = finished.directory / "output/model.tar.gz"

    def run(job: Job) -> None:
        s3.upload_file(str(archive), s3.bucket, f"some/prefix/jobs/{job.name}/{MODEL}")
        scripted(job)

    cloud.sagemaker.run = run
    done = subprocess.run(
        [ROOT / "examples/sagemaker.sh", short_text_file],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stderr
    assert '"InstanceCount": 1' in done.stdout  # of the dry run
    assert "state:       Completed" in done.stdout
    assert len(done.stdout.rpartition("billable:")[2]) > 600  # the two samples
    (job,) = cloud.sagemaker.jobs.values()
    assert json.loads(job.request["HyperParameters"]["max_steps"]) == 10


def test_the_notebook_of_the_tutorial_runs(aws, shell, impatience, tmp_path):
    cells = notebooks.execute(ROOT / "examples/sagemaker.ipynb", tmp_path, impatience)
    printed = "".join(str(cell.get("outputs")) for cell in cells)
    assert "step=10/10" in printed
    assert "Plan(job_id=" in printed
    assert "<th>cost</th>" in printed
    assert "<polyline" in printed
    assert "model.safetensors" in printed
    sampled = cells[-1]["outputs"]
    assert sum(len(each["text"]) for each in sampled) > 600
