"""`make demo`, with a command in place of sm-nanogpt; and the Pythons that make takes."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDER = """#!/bin/sh
echo "$@" >>asked.txt
case "$1" in
upload-data) echo "next: sm-nanogpt launch --instance local$ADVICE" >&2; exit ${UPLOAD:-0} ;;
launch) echo JOB ;;
esac
"""


@pytest.fixture
def demo(tmp_path, quick):
    """Runs `make demo`; returns its exit code, and the commands that it ran."""
    program = tmp_path / "bin/sm-nanogpt"
    program.parent.mkdir()
    program.write_text(RECORDER)
    program.chmod(0o755)
    make = ["make", "-f", str(ROOT / "Makefile"), "-o", ".venv/installed", f"BIN={program.parent}"]

    def run(*arguments: str, **variables: str) -> tuple[int, list[str]]:
        settings = {"PATH": "/usr/bin:/bin", **variables}
        ended = subprocess.run([*make, "demo", *arguments], cwd=tmp_path, env=settings)
        return ended.returncode, (tmp_path / "asked.txt").read_text().splitlines()

    return run


def test_the_demo_follows_the_advice_for_a_short_text(demo):
    code, commands = demo("TEXT=my notes.txt", ADVICE=" --preset auto")
    assert code == 0
    assert commands == [
        "upload-data my notes.txt",
        "launch --instance local --preset auto",
        "fetch-and-sample JOB",
    ]


def test_the_demo_trains_with_two_processes_otherwise(demo):
    code, commands = demo()
    assert code == 0
    assert commands[:2] == [
        "upload-data",
        "launch --instance local --preset cpu --processes-per-instance 2",
    ]


def test_the_demo_ends_where_the_upload_fails(demo):
    code, commands = demo("TEXT=none.txt", UPLOAD="2")
    assert code != 0
    assert commands == ["upload-data none.txt"]


def test_make_takes_the_pythons_that_the_project_declares():
    makefile = (ROOT / "Makefile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, after_last = re.findall(r"\(3, (\d+)\)", makefile)
    advice = "Makefile, its message, and requires-python of pyproject.toml name the same Pythons"
    assert project["requires-python"] == f">=3.{first},<3.{after_last}", advice
    assert f"Python 3.{first} to 3.{int(after_last) - 1} is" in makefile, advice
