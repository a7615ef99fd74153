"""The tests test this checkout, and CI lets none be skipped."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections import Counter

import pytest
from pages import ROOT


@pytest.mark.parametrize("package", ["launcher", "sm_nanogpt"])
def test_the_tests_and_their_processes_test_this_checkout(package, tmp_path):
    """Also with the Python of another checkout, as in a git worktree."""
    code = f"import {package}; print({package}.__file__)"
    path = str(ROOT / package / "__init__.py")
    assert importlib.import_module(package).__file__ == path
    output = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    assert output == f"{path}\n"


@pytest.mark.parametrize(
    "test",
    [
        "def test_it(): pytest.skip('no tool')",
        "pytest.importorskip('no_tool')",
    ],
)
def test_a_skip_fails_where_ci_is_set(test, pytester, pytestconfig, monkeypatch):
    monkeypatch.setenv("CI", "1")
    plugin = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests/conftest.py"))
    pytester.makepyfile(f"import pytest\n{test}\n")
    _, skips, failures = pytester.inline_run(plugins=[plugin]).listoutcomes()
    assert skips == []
    (failure,) = failures
    assert re.search("no.tool", str(failure.longrepr))


def test_no_test_module_imports_another_one():
    imports = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^(?:from|import) (test_\w+)", path.read_text("utf-8"), re.M):
            imports.append(f"{path.name} imports {name}")
    assert not imports, f"{imports}: move what they share into a module of tests/ without test_"


def test_each_test_file_has_a_name_of_its_own():
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    repeated = [name for name, count in names.items() if count > 1]
    assert not repeated, f"{repeated}: pytest and mypy know a test file by its name alone"
