"""What examples/ holds runs."""

from __future__ import annotations

import os
from pathlib import Path

import notebooks
import pytest
from launching import output_of, put_command, run_example

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def shell(environment, tmp_path):
    """That environment with a command which starts at once."""
    put_command(tmp_path)
    return {**environment, "PATH": f"{tmp_path}{os.pathsep}{environment['PATH']}"}


def test_the_script_of_the_local_loop_runs(tmp_path, shell):
    command: list[str | Path] = [EXAMPLES / "local_loop.sh", shell["TEXT"]]
    out = output_of(command, tmp_path, shell)
    assert "step:        30/30" in out  # it went on from step 20


def test_the_notebook_of_the_local_loop_runs(tmp_path, environment):
    cells = notebooks.execute(EXAMPLES / "local_loop.ipynb", tmp_path)
    outputs = [str(cell.get("outputs", "")) for cell in cells]
    assert any("Completed" in output and "<polyline" in output for output in outputs)
    assert any("bits_per_byte" in output and "</table>" in output for output in outputs)
    text = "".join(outputs)
    assert "step=20/20 train_loss=" in text
    assert "---" in text  # after a sample
    assert "'model.safetensors'" in text
    assert "Warning" not in text


def test_the_notebook_of_the_tutorials_shows_tables_and_plots(tmp_path, environment, monkeypatch):
    monkeypatch.setenv("QUICK", "1")
    monkeypatch.setenv("TUTORIALS", str(EXAMPLES / "tutorials"))
    tables = []
    images = []
    for cell in notebooks.execute(EXAMPLES / "tutorials/tutorials.ipynb", tmp_path):
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


def test_the_example_of_conversations_asks_before_and_after(environment):
    ran = run_example("conversations", "--text", environment["TEXT"], "--quick", env=environment)
    assert ran.returncode == 0, ran.stderr
    kinds = [line.split("|")[2].strip() for line in ran.stdout.splitlines()[2:]]
    assert kinds == ["sum", "larger", "spelling"]
