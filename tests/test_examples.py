"""What examples/ holds runs, and the wheel works away from the checkout."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import launching
import nbformat
import pytest
from nbclient import NotebookClient
from packaging.requirements import Requirement

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


def test_the_example_of_conversations_asks_before_and_after(tmp_path, environment):
    few = ("--base-steps", "5", "--steps", "5", "--ask", "2")
    script = ROOT / "examples" / "conversations.py"
    out = run([sys.executable, script, "--text", environment["TEXT"], *few], tmp_path, environment)
    rows = [line.split("|")[2].strip() for line in out.splitlines()[2:]]
    assert rows == ["sum", "larger", "spelling"]


def test_committed_notebooks_hold_no_output():
    for path in (ROOT / "examples").rglob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        assert not any(cell.get("outputs") for cell in cells)


def test_the_wheel_works_in_a_clean_environment(wheel, tmp_path, environment):
    """What it depends on comes from this environment, without the checkout that this one shows."""
    run([sys.executable, "-m", "venv", tmp_path / "clean"], tmp_path, environment)
    python = tmp_path / "clean" / "bin" / "python"
    launching.pip(python, "install", "--no-deps", wheel)
    (place,) = (tmp_path / "clean").glob("lib/*/site-packages")
    (place / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

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


def test_each_import_of_the_product_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [
        each
        for name in ("report", "tensorboard")
        for each in project["optional-dependencies"][name]
    ]
    declared = {Requirement(each).name for each in [*project["dependencies"], *optional]}
    own = {"entry_point", "infra", "launcher", "backports", "compression"}
    brought = {"botocore": "boto3", "pydantic_core": "pydantic", "jinja2": "altair"}
    imported = set()
    for folder in ("entry_point", "infra", "launcher"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {each.name.partition(".")[0] for each in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported.add(node.module.partition(".")[0])
    found = {**packages_distributions(), **{name: [by] for name, by in brought.items()}}
    foreign = imported - sys.stdlib_module_names - own
    assert {name for name in foreign if not declared & set(found.get(name, ()))} == set()
