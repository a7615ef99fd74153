"""The tutorial of examples/, unchanged, against the emulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shell(aws, impatience, tmp_path, text_file, monkeypatch):
    """The shell of a user who makes the tutorial's first try."""
    (tmp_path / "sitecustomize.py").write_text(impatience)
    for name, value in {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path),
        "TEXT": str(text_file),
        "INSTANCE": "ml.m5.xlarge",
        "PRESET": "cpu",
        "MAX_STEPS": "10",
    }.items():
        monkeypatch.setenv(name, value)


def test_the_script_of_the_tutorial_runs(shell, text_file, tmp_path):
    done = subprocess.run(
        [ROOT / "examples/sagemaker.sh", text_file],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stderr
    assert "step:        10/10" in done.stdout
    assert len(done.stdout.rpartition("billable:")[2]) > 600  # the two samples
    assert '"InstanceCount": 1' in done.stdout  # of the dry run


def test_the_notebook_of_the_tutorial_runs(shell, tmp_path):
    notebook = nbformat.read(ROOT / "examples/sagemaker.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=480, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    printed = "".join(str(cell.get("outputs")) for cell in notebook.cells)
    assert "step=10/10" in printed
    assert "Plan(job_id=" in printed
    assert "<th>cost</th>" in printed
    assert "<polyline" in printed
    assert "model.safetensors" in printed
    sampled = notebook.cells[-1]["outputs"]
    assert sum(len(each["text"]) for each in sampled) > 600
