"""`make affected` chooses the tests of what a change touches."""

from __future__ import annotations

import subprocess

import pytest
from affected import changed_files, choose
from mutants import MODULES
from pages import ROOT, name_of


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("launcher/groups/ranking.py", "tests/launcher/groups"),  # its own room
        ("launcher/groups/ranking.py", "tests/launcher/views"),  # report imports it
        ("launcher/tracking.py", "tests/launcher/test_library.py"),  # which has no test_tracking
        ("launcher/sagemaker/backend.py", "tests/launcher/test_backends.py"),  # has it as text
        ("entry_point/optim.py", "tests/entry_point"),
        ("entry_point/sizes.py", "tests/launcher/launching"),  # asks the training folder for it
        ("launcher/sagemaker/caller.py", "tests/launcher/test_finding.py"),  # by the mutants' table
        ("launcher/cli/evaluate.py", "tests/launcher/judge/test_evaluate.py"),
        ("infra/template.yaml", "tests/launcher/sagemaker"),
        ("examples/to_gguf.py", "tests/examples/test_export.py"),
        ("tests/launcher/text/conftest.py", "tests/launcher/text"),
        ("tests/edits.py", "tests/entry_point/test_causality.py"),
        ("docs/aws.md", "tests/house"),
    ],
)
def test_a_change_affects_its_room_and_who_imports_it(file, tests):
    assert tests in choose([file]).paths


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("launcher/groups/ranking.py", "tests/launcher/text"),
        ("docs/aws.md", "tests/launcher/cli"),
        ("launcher/text/files.py", "tests/launcher"),  # by a fixture of several rooms
    ],
)
def test_a_change_does_not_affect_what_imports_nothing_of_it(file, tests):
    assert tests not in choose([file]).paths


@pytest.mark.parametrize("file", ["pyproject.toml", "tests/launching.py"])
def test_what_all_tests_rest_on_affects_everything(file):
    choice = choose([file])
    assert choice.paths == ["tests"]
    assert "on which all tests rest" in choice.everything


def test_the_tests_of_each_module_are_listed():
    modules = {
        name_of(path) for path in [*ROOT.glob("launcher/**/*.py"), *ROOT.glob("entry_point/*.py")]
    }
    unlisted = {name for name in modules - MODULES.keys() if not name.endswith("__init__.py")}
    assert not unlisted, (
        f"{unlisted}: add each to MODULES of tests/mutants.py, with the tests that hold its rules; "
        "`make affected` finds them by it, also in other rooms"
    )
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for module, tests in MODULES.items():
        assert (ROOT / module).is_file(), f"{module} is gone: take it out of tests/mutants.py"
        gone = set(tests.split()) - files
        assert not gone, f"{module}: tests/mutants.py lists {gone}, which no test file is named"


def test_each_choice_has_its_reason():
    reasons = choose(["launcher/groups/ranking.py"]).reasons
    assert reasons["tests/launcher/groups"] == "it changed"
    importer = "launcher/cli/sweep.py imports launcher/groups/ranking.py"
    assert reasons["tests/launcher/cli"] == importer


def test_a_change_is_all_that_the_base_has_not(tmp_path):
    def git(*arguments: str) -> None:
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    git("init", "--quiet")
    for name in ("committed", "edited", "deleted", "same"):
        (tmp_path / name).write_text("")
    git("add", "edited", "deleted", "same")
    git("commit", "--quiet", "-m", "the base")
    git("tag", "base")
    git("add", "committed")
    git("commit", "--quiet", "-m", "more")
    (tmp_path / "edited").write_text("new")
    (tmp_path / "deleted").unlink()
    (tmp_path / "untracked").write_text("")
    assert changed_files(tmp_path, "base") == ["committed", "deleted", "edited", "untracked"]
