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


def resolve(python: str, system: str, *words: str) -> set[str]:
    """The `name==version` of all packages that an install takes on this Python and system."""
    target = ("--python-version", python, "--python-platform", system, "--only-binary", ":all:")
    # By default, uv uses certificates of its own and searches the PATH for each Python.
    here = ("--system-certs", "--python", sys.executable)
    quiet = ("--quiet", "--no-header", "--no-annotate")
    oldest = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}  # of the systems that torch is built for
    ran = subprocess.run(
        [UV, "pip", "compile", *target, *here, *quiet, *words],
        cwd=ROOT,
        env={**os.environ, **oldest},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if ran.returncode != 0:
        pytest.fail(f"Python {python} on {system}: {ran.stderr}", pytrace=False)
    return set(ran.stdout.split())


def test_the_constraints_match_each_python_and_system():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.partition(";")[0] for line in lines if line[0] != "#"}  # without what they are for
    words = ("pyproject.toml", "--extra", "test", "-c", "constraints.txt")
    targets = itertools.product(FIRST_RELEASES, SYSTEMS)
    with ThreadPoolExecutor(4) as pool:
        taken = pool.map(lambda target: resolve(*target, *words), targets)
    assert set().union(*taken) == pins


@pytest.mark.parametrize("python", FIRST_RELEASES)
def test_the_contract_tests_toolkit_installs_on_each_python(python):
    sources = ("inotify-simple", "sagemaker-training", "sagemaker-pytorch-training")
    words = [word for name in sources for word in ("--no-binary", name)]
    # Without their dependencies, for which sources would be built.
    assert resolve(python, SYSTEMS[0], *words, "--no-deps", "tests/contract/requirements.txt")
