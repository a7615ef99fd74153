"""Chooses the tests of what a change touches, and says why. `make affected` runs them.

    .venv/bin/python tests/affected.py              # paths for pytest on stdout, reasons on stderr
    .venv/bin/python tests/affected.py --base HEAD~3
    .venv/bin/python tests/affected.py launcher/job.py    # as if only this file had changed

A change is what the working tree has and the base has not: committed, uncommitted, or untracked.
Without --base, the base is where this branch left main.

A change of a module affects the tests of its room and of the rooms that import it: of
`launcher/text/`, tests/launcher/text; of `launcher/job.py`, tests/launcher/test_job.py. It also
affects the tests that tests/mutants.py lists for it, in any room. Those that import it through
others are left to `make test`: of most modules, they are nearly all. A change of a helper in tests/
affects all tests that use it. The rules of tests/house hold for every file.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mutants import MODULES

ROOT = Path(__file__).parents[1]
PACKAGES = ("launcher", "entry_point", "sm_nanogpt", "examples", "tests")
HOUSE = "tests/house"
# What runs in containers, on an emulated account as a whole, or for minutes: `make test` has them.
LONG = ("tests/contract", "tests/e2e", "tests/slow")
# All tests rest on these.
CONFTEST = "tests/conftest.py"
FOUNDATIONS = ("pyproject.toml", "constraints.txt", CONFTEST)


@dataclass(frozen=True)
class Choice:
    """The tests to run, each with the reason; or all of them, for one reason."""

    reasons: dict[str, str]  # by the path for pytest, nearest to the change first
    everything: str = ""

    @property
    def paths(self) -> list[str]:
        return ["tests"] if self.everything else list(self.reasons)


def git(root: Path, *arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=root, text=True)


def base_of(root: Path) -> str:
    """The commit at which this branch left main; HEAD where there is no main."""
    branches = git(root, "branch", "--list", "main", "--format=%(refname:short)").split()
    if "main" not in branches:
        return "HEAD"
    return git(root, "merge-base", "HEAD", "main").strip()


def changed_files(root: Path, base: str) -> list[str]:
    """The files that differ from a commit, also deleted and untracked ones."""
    differing = git(root, "diff", "--name-only", "--no-renames", base).splitlines()
    untracked = git(root, "ls-files", "--others", "--exclude-standard").splitlines()
    return sorted({*differing, *untracked})


# -- which file imports which ----------------------------------------------------------------------


def module_name(file: str) -> str:
    """The name by which others import a file; helpers and examples have no package."""
    if file.startswith(("tests/", "examples/")):
        return Path(file).stem
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name == "sm_nanogpt" else f"sm_nanogpt.{name}"


def read_imports(file: Path) -> Iterator[str]:
    """The names that a file may import, also within functions.

    With those that it has as text, such as the classes of backends.py, or what a test replaces; and
    with the modules of a training folder, as `source.module("config")`.
    """
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = f"sm_nanogpt.{file.parent.name}.{module}".removesuffix(".")
            for alias in node.names:
                yield f"{module}.{alias.name}"
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"sm_nanogpt(\.\w+)+", node.value)
        ):
            yield node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "module"
            and len(node.args) == 1
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            yield f"sm_nanogpt.entry_point.{node.args[0].value}"


@functools.cache
def find_importers(root: Path) -> dict[str, set[str]]:
    """For each Python file, the files that import it."""
    files = [
        path.relative_to(root).as_posix()
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    ]
    file_of = {module_name(file): file for file in files}
    importers: dict[str, set[str]] = {file: set() for file in files}
    for file in files:
        for name in read_imports(root / file):
            module = name
            while module and module not in file_of:
                module = module.rpartition(".")[0]
            if module and file_of[module] != file:
                importers[file_of[module]].add(file)
    return importers


def reach(changed: list[str], importers: dict[str, set[str]]) -> dict[str, str]:
    """The files that a change affects, each with the reason.

    Those that import it; of a file in tests/, also those that import it through helpers.
    """
    reasons = dict.fromkeys(changed, "it changed")
    queue = list(changed)
    for file in queue:  # which grows
        for importer in sorted(importers.get(file, ())):
            if importer not in reasons:
                reasons[importer] = f"{importer} imports {file}"
                if file.startswith("tests/"):
                    queue.append(importer)
    return reasons


# -- which tests -----------------------------------------------------------------------------------


def tests_of(file: str, root: Path) -> str:
    """The path of the tests of a file, which may be a pattern; "" if only others test it."""
    path = Path(file)
    folders = path.parts[:-1]
    if path.parts[0] == "tests":
        if file == CONFTEST:  # it imports what it does not test
            return ""
        if path.name == "conftest.py":
            return path.parent.as_posix()
        return file if path.name.startswith("test_") else ""
    if folders[:1] == ("launcher",) and len(folders) > 1:
        return f"tests/launcher/{folders[1]}"
    if folders == ("launcher",):
        own = f"tests/launcher/test_{path.stem}.py"
        return own if (root / own).exists() else "tests/launcher/test_*.py"
    if folders[:1] == ("entry_point",):
        return "tests/entry_point"
    if folders[:1] == ("infra",):
        return "tests/launcher/sagemaker"
    return ""


def choose(changed: list[str], root: Path = ROOT) -> Choice:
    for file in changed:
        if file in FOUNDATIONS:
            return Choice({}, f"{file} changed, on which all tests rest")
    importers = find_importers(root)
    helpers = [file for file in changed if file.startswith("tests/")]
    if CONFTEST in reach(helpers, importers):
        return Choice({}, f"{CONFTEST}, on which all tests rest, imports a changed helper")
    reasons: dict[str, str] = {}
    for file in changed:
        for test in MODULES.get(file, "").split():
            for path in root.glob(f"tests/**/{test}.py"):
                name = path.relative_to(root).as_posix()
                if not name.startswith(LONG):
                    reasons[name] = f"it holds rules of {file}"
    for file, reason in reach(changed, importers).items():
        pattern = tests_of(file, root)
        for path in sorted(root.glob(pattern)) if pattern else ():
            name = path.relative_to(root).as_posix()
            if not name.startswith(LONG):
                reasons.setdefault(name, reason)
    if changed:
        reasons.setdefault(HOUSE, "its rules hold for every file")
    directories = tuple(f"{path}/" for path in reasons if not path.endswith(".py"))
    return Choice({p: reason for p, reason in reasons.items() if not p.startswith(directories)})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", help="as if only these had changed")
    parser.add_argument("--base", help="the commit to compare with (default: where main was left)")
    options = parser.parse_args()
    changed = options.files
    for file in changed:
        if not (ROOT / file).is_file():
            parser.error(f"{file}: no file of this repository; name it as `git ls-files` does")
    if not changed:
        base = options.base or base_of(ROOT)
        changed = changed_files(ROOT, base)
        print(f"{len(changed)} files differ from {base[:12]}", file=sys.stderr)
    choice = choose(changed)
    if choice.everything:
        print(f"everything is affected: {choice.everything}", file=sys.stderr)
    for path, reason in choice.reasons.items():
        print(f"{path}: {reason}", file=sys.stderr)
    if changed:
        print(f"left to `make test`: the rest, and {', '.join(LONG)}", file=sys.stderr)
    print("\n".join(choice.paths))


if __name__ == "__main__":
    main()
