"""The wheel works away from the checkout, with what it declares."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import launching
from launching import output_of
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def test_the_wheel_works_in_a_clean_environment(wheel, tmp_path, environment):
    """What it depends on comes from this environment, without the checkout that this one shows."""
    output_of([sys.executable, "-m", "venv", tmp_path / "clean"], tmp_path, environment)
    python = tmp_path / "clean" / "bin" / "python"
    launching.pip(python, "install", "--no-deps", wheel)
    (place,) = (tmp_path / "clean").glob("lib/*/site-packages")
    (place / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    sm_nanogpt = tmp_path / "clean" / "bin" / "sm-nanogpt"
    environment = {**environment, "PATH": os.defpath, "PYTHONPATH": ""}
    output_of([sm_nanogpt, "upload-data", environment["TEXT"]], elsewhere, environment)
    launch: list[str | Path] = [sm_nanogpt, "launch", "--instance", "local", "--set", "max_steps=5"]
    job_id = output_of([*launch, "--processes-per-instance", "2"], elsewhere, environment).strip()
    sample: list[str | Path] = [sm_nanogpt, "fetch-and-sample", job_id, "--max-new-tokens", "20"]
    assert len(output_of(sample, elsewhere, environment)) >= 20
    known = [python, "-c", "import sm_nanogpt as sm; print(sm.job(), sm.jobs()[0].status)"]
    assert output_of(known, elsewhere, environment) == f"{job_id} Completed\n"
    template = "from launcher.sagemaker import deploy; print(deploy.TEMPLATE.read_text(), end='')"
    carried = output_of([python, "-c", template], elsewhere, environment)
    assert carried == (ROOT / "infra" / "template.yaml").read_text()
    assert not list(elsewhere.iterdir())


def test_each_import_of_the_product_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {Requirement(each).name for each in [*project["dependencies"], *extras["data"]]}
    own = {"entry_point", "launcher", "backports", "compression"}
    where_it_is = {"pandas"}  # metrics
    brought = {"botocore": "boto3", "pydantic_core": "pydantic", "jinja2": "altair"}
    imported = set()
    for folder in ("entry_point", "launcher"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {each.name.partition(".")[0] for each in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported.add(node.module.partition(".")[0])
    found = {**packages_distributions(), **{name: [by] for name, by in brought.items()}}
    foreign = imported - sys.stdlib_module_names - own - where_it_is
    assert {name for name in foreign if not declared & set(found.get(name, ()))} == set()
