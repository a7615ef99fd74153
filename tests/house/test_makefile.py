"""`make demo`, with a command in place of sm-nanogpt that writes down what it was asked."""

from __future__ import annotations

import subprocess
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
    """Runs `make demo` and returns how it ended, and the words of each command."""
    program = tmp_path / "bin/sm-nanogpt"
    program.parent.mkdir()
    program.write_text(RECORDER)
    program.chmod(0o755)
    makefile = [
        "make",
        "-f",
        str(ROOT / "Makefile"),
        "-o",
        ".venv/installed",
        f"BIN={program.parent}",
    ]

    def run(*words: str, **variables: str) -> tuple[int, list[str]]:
        settings = {"PATH": "/usr/bin:/bin", **variables}
        made = subprocess.run([*makefile, "demo", *words], cwd=tmp_path, env=settings)
        return made.returncode, (tmp_path / "asked.txt").read_text().splitlines()

    return run


def test_the_demo_follows_the_advice_for_a_short_text(demo):
    code, asked = demo("TEXT=my notes.txt", ADVICE=" --preset auto")
    assert code == 0
    assert asked == [
        "upload-data my notes.txt",
        "launch --instance local --preset auto",
        "fetch-and-sample JOB",
    ]


def test_the_demo_trains_with_two_processes_otherwise(demo):
    code, asked = demo()
    assert code == 0
    assert asked[:2] == [
        "upload-data",
        "launch --instance local --preset cpu --processes-per-instance 2",
    ]


def test_the_demo_ends_where_the_upload_fails(demo):
    code, asked = demo("TEXT=none.txt", UPLOAD="2")
    assert code != 0
    assert asked == ["upload-data none.txt"]
