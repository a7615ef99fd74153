"""What examples/ holds runs."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from launching import output_of
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]


def test_the_script_of_the_local_loop_runs(tmp_path, environment):
    command: list[str | Path] = [ROOT / "examples" / "local_loop.sh", environment["TEXT"]]
    out = output_of(command, tmp_path, environment)
    assert "step:        30/30" in out  # it went on from step 20


def test_the_notebook_of_the_local_loop_runs(tmp_path, environment):
    notebook = nbformat.read(ROOT / "examples" / "local_loop.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [str(cell.get("outputs", "")) for cell in notebook.cells]
    assert any("Completed" in output and "<polyline" in output for output in outputs)
    assert any("bits_per_byte" in output and "</table>" in output for output in outputs)
    text = "".join(outputs)
    assert "step=20/20 train_loss=" in text
    assert "---" in text  # after a sample
    assert "'model.safetensors'" in text
    assert "Warning" not in text


def test_the_notebook_of_the_tutorials_shows_tables_and_plots(tmp_path, environment, monkeypatch):
    monkeypatch.setenv("QUICK", "1")
    monkeypatch.setenv("TUTORIALS", str(ROOT / "examples/tutorials"))
    notebook = nbformat.read(ROOT / "examples/tutorials/tutorials.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, resources=resources).execute()
    tables = []
    images = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text/markdown" in output.data:
                tables.append(output.data["text/markdown"])
            if "image/png" in output.data:
                images.append(output.data["image/png"])
    processes, batches, ladder = tables
    assert "\n| 4 processes " in processes
    assert "\n| as shipped " in batches
    assert "\n| dropout 0.2 " in ladder
    assert len(images) == 2


def test_the_example_of_conversations_asks_before_and_after(tmp_path, environment):
    command: list[str | Path] = [sys.executable, ROOT / "examples" / "conversations.py"]
    command += ["--text", environment["TEXT"], "--base-steps", "5", "--steps", "5", "--ask", "2"]
    out = output_of(command, tmp_path, environment)
    kinds = [line.split("|")[2].strip() for line in out.splitlines()[2:]]
    assert kinds == ["sum", "larger", "spelling"]
