"""The wheel works away from the checkout, with what it declares."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import tomllib
import zipfile
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
    (site_packages,) = (tmp_path / "clean").glob("lib/*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    sm_nanogpt = tmp_path / "clean" / "bin" / "sm-nanogpt"
    environment = {**environment, "PATH": os.defpath, "PYTHONPATH": ""}
    output_of([sm_nanogpt, "upload-data", environment["TEXT"]], elsewhere, environment)
    launch: list[str | Path] = [sm_nanogpt, "launch", "--instance", "local", "--set", "max_steps=5"]
    job_id = output_of([*launch, "--processes-per-instance", "2"], elsewhere, environment).strip()
    sample: list[str | Path] = [sm_nanogpt, "fetch-and-sample", job_id, "--max-new-tokens", "20"]
    assert len(output_of(sample, elsewhere, environment)) >= 20
    code = "import sm_nanogpt as sm; print(sm.job(), sm.jobs()[0].status)"
    output = output_of([python, "-c", code], elsewhere, environment)
    assert output == f"{job_id} Completed\n"
    code = (
        "from sm_nanogpt.launcher.sagemaker import deploy;"
        "print(deploy.TEMPLATE.read_text(), end='')"
    )
    template = output_of([python, "-c", code], elsewhere, environment)
    assert template == (ROOT / "infra" / "template.yaml").read_text()
    assert not list(elsewhere.iterdir())


def test_the_wheel_adds_one_name_to_site_packages(wheel):
    names = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"sm_nanogpt"}


def imports_of(folder: Path) -> set[str]:
    """The top-level modules that its files import."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_each_import_of_the_product_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["data"]
    declared = {Requirement(requirement).name for requirement in requirements}
    packages = dict(packages_distributions())
    # These come with a package that is declared.
    packages |= {"botocore": ["boto3"], "pydantic_core": ["pydantic"], "jinja2": ["altair"]}
    ours = {"sm_nanogpt", "backports", "compression"}
    if_installed = {"pandas"}  # metrics
    imported = imports_of(ROOT / "entry_point") | imports_of(ROOT / "launcher")
    undeclared = [
        name
        for name in imported - sys.stdlib_module_names - ours - if_installed
        if declared.isdisjoint(packages.get(name, ()))
    ]
    assert not undeclared, f"{undeclared}: declare the packages in pyproject.toml, or do without"
