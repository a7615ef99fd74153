"""What examples/ holds runs, and the wheel works away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import launching
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


@pytest.fixture
def environment(tmp_path, text_file, monkeypatch):
    """An empty home, and no settings from outside."""
    for name in list(os.environ):
        if name.startswith(("SM_", "AWS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MAX_STEPS", "20")
    monkeypatch.setenv("TEXT", str(text_file))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the cores are those of other tests too
    (tmp_path / "home").mkdir()
    return dict(os.environ)


def run(command: list[str | Path], cwd: Path, environment: dict[str, str]) -> str:
    """What a command prints on stdout; it has to succeed."""
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_of_the_local_loop_runs(tmp_path, environment):
    out = run([ROOT / "examples" / "local_loop.sh", environment["TEXT"]], tmp_path, environment)
    assert "step:        30/30" in out  # it went on from step 20


def test_the_notebook_of_the_local_loop_runs(tmp_path, environment):
    notebook = nbformat.read(ROOT / "examples" / "local_loop.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    printed = [str(cell.get("outputs", "")) for cell in notebook.cells]
    assert any("step=20/20 train_loss=" in each for each in printed)
    assert any("'Completed'" in each and "'val_loss': " in each for each in printed)
    assert any(each.count("---") == 2 for each in printed)  # two samples
    assert any("'model.safetensors'" in each for each in printed)


def test_the_notebook_of_the_tutorials_shows_tables_and_plots(tmp_path, environment, monkeypatch):
    monkeypatch.setenv("QUICK", "1")
    monkeypatch.setenv("TUTORIALS", str(ROOT / "examples/tutorials"))
    notebook = nbformat.read(ROOT / "examples/tutorials/tutorials.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, resources=resources).execute()
    shown = [output.data for cell in notebook.cells for output in cell.get("outputs", [])]
    tables = [data["text/markdown"] for data in shown if "text/markdown" in data]
    for table, row in zip(tables, ("4 processes", "as shipped", "dropout 0.2"), strict=True):
        assert f"\n| {row} " in table
    assert len([data for data in shown if "image/png" in data]) == 2


def test_committed_notebooks_hold_no_output():
    for path in (ROOT / "examples").rglob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        assert not any(cell.get("outputs") for cell in cells)


def test_the_wheel_works_in_a_clean_environment(wheel, tmp_path, environment):
    run([sys.executable, "-m", "venv", tmp_path / "clean"], tmp_path, environment)
    python = tmp_path / "clean" / "bin" / "python"
    launching.pip(python, "install", "-c", ROOT / "constraints.txt", wheel)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    sm_nanogpt = tmp_path / "clean" / "bin" / "sm-nanogpt"
    environment = {**environment, "PATH": os.defpath}
    run([sm_nanogpt, "upload-data", environment["TEXT"]], elsewhere, environment)
    launch: list[str | Path] = [sm_nanogpt, "launch", "--instance", "local", "--set", "max_steps=5"]
    job_id = run([*launch, "--processes-per-instance", "2"], elsewhere, environment).strip()
    sample: list[str | Path] = [sm_nanogpt, "fetch-and-sample", job_id, "--max-new-tokens", "20"]
    assert len(run(sample, elsewhere, environment)) >= 20
    template = "from launcher.sagemaker import deploy; print(deploy.TEMPLATE.read_text(), end='')"
    carried = run([python, "-c", template], elsewhere, environment)
    assert carried == (ROOT / "infra" / "template.yaml").read_text()
    assert not list(elsewhere.iterdir())
