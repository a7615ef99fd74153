"""What examples/ holds runs."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from launching import output_of
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]


def test_the_script_of_the_local_loop_runs(tmp_path, environment):
    out = output_of(
        [ROOT / "examples" / "local_loop.sh", environment["TEXT"]], tmp_path, environment
    )
    assert "step:        30/30" in out  # it went on from step 20


def test_the_notebook_of_the_local_loop_runs(tmp_path, environment):
    notebook = nbformat.read(ROOT / "examples" / "local_loop.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    printed = [str(cell.get("outputs", "")) for cell in notebook.cells]
    assert any("step=20/20 train_loss=" in each for each in printed)
    assert any("Completed" in each and "<polyline" in each for each in printed)
    assert any("bits_per_byte" in each and "</table>" in each for each in printed)
    assert "---" in "".join(printed)  # after a sample
    assert any("'model.safetensors'" in each for each in printed)
    assert not any("Warning" in each for each in printed)


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


def test_the_example_of_conversations_asks_before_and_after(tmp_path, environment):
    few = ("--base-steps", "5", "--steps", "5", "--ask", "2")
    script = ROOT / "examples" / "conversations.py"
    out = output_of(
        [sys.executable, script, "--text", environment["TEXT"], *few], tmp_path, environment
    )
    rows = [line.split("|")[2].strip() for line in out.splitlines()[2:]]
    assert rows == ["sum", "larger", "spelling"]
