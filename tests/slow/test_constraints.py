"""Every pin installs on every Python and system that we support.

The resolver needs none of these Pythons, only the package index.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADMITTED = SpecifierSet(PROJECT["requires-python"])
FIRST_RELEASES = [v for minor in range(100) if (v := f"3.{minor}.0") in ADMITTED]
SYSTEMS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin")


def resolve(python: str, system: str, *arguments: str) -> set[str]:
    """The `name==version` of all packages that an install takes on this Python and system."""
    command: list[str | Path] = [UV, "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python-version", python, "--python-platform", system, "--only-binary", ":all:"]
    # By default, uv uses certificates of its own and searches the PATH for each Python.
    command += ["--system-certs", "--python", sys.executable]
    oldest = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}  # of the systems that torch is built for
    ran = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, **oldest},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if ran.returncode != 0:
        pytest.fail(f"Python {python} on {system}: {ran.stderr}", pytrace=False)
    return set(ran.stdout.split())


def test_the_constraints_match_each_python_and_system():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    # Without the Pythons and systems that they are for.
    pins = {line.partition(";")[0] for line in lines if not line.startswith("#")}

    def packages_on(target: tuple[str, str]) -> set[str]:
        python, system = target
        constraints = ("--extra", "test", "-c", "constraints.txt")
        return resolve(python, system, "pyproject.toml", *constraints)

    packages: set[str] = set()
    with ThreadPoolExecutor(4) as pool:
        for resolved in pool.map(packages_on, itertools.product(FIRST_RELEASES, SYSTEMS)):
            packages |= resolved
    assert packages == pins


@pytest.mark.parametrize("python", FIRST_RELEASES)
def test_the_contract_tests_toolkit_installs_on_each_python(python):
    arguments = ["--no-deps"]  # for which sources would be built
    for name in ("inotify-simple", "sagemaker-training", "sagemaker-pytorch-training"):
        arguments += ["--no-binary", name]
    assert resolve(python, SYSTEMS[0], *arguments, "tests/contract/requirements.txt")
