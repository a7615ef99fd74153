"""Processes that the launcher starts: what they import, their streams, GPUs, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import launching
import pytest
import runs

from sm_nanogpt.launcher.local import runs as local_runs
from sm_nanogpt.launcher.local.gpus import visible_gpus
from sm_nanogpt.launcher.local.process import how_it_ended, python_command
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.trying.local import LocalRuns

STREAMS = {"stdin": "0<&-", "stdout": "1>&-", "stderr": "2>&-"}
SOME_CLOSED = [["stdin"], ["stdout"], ["stderr"], ["stdin", "stdout", "stderr"]]
# It prints into a file, as its own streams may be closed.
PROBE = """\
import os, sys
from sm_nanogpt.entry_point.files import open_standard_streams

open_standard_streams()
opened = open(sys.argv[1], "w")
print(opened.fileno() > 2, sys.stdin.read() == "", file=opened)
print("lost", file=sys.stdout, flush=True)
print("lost", file=sys.stderr, flush=True)
"""


def with_closed(command, names):
    """The command, started by a shell that closes these of its streams."""
    return ["sh", "-c", f'exec "$@" {" ".join(STREAMS[name] for name in names)}', "sh", *command]


def test_a_run_may_ask_for_more_than_its_model(tmp_path, monkeypatch):
    """As the first steps of a size, which are timed one by one."""
    commands = []
    monkeypatch.setattr(local_runs, "Program", lambda command, **_: commands.append(command))
    run = local_runs.Run(Source.packaged(), {"log_interval": 1}, tmp_path / "text")
    with (tmp_path / "log").open("wb") as log:
        local_runs.start(run, tmp_path, tmp_path, None, log)
    [command] = commands
    assert "--log_interval=1" in command
    assert "--moments=0" in command


def test_a_module_of_the_current_directory_is_not_imported(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    command = python_command("json.tool")  # any module with a main
    printed = subprocess.check_output(command, input="[1]", text=True, cwd=tmp_path)
    assert printed.split() == ["[", "1", "]"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_import_nothing_of_the_current_directory(method, tmp_path, text_file):
    """On a GPU and on a Mac, each rank is a new Python: `spawn`."""
    for name in ("random", "pickle", "types"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')")
    forks = ('sys.platform != "linux" or device_type != "cpu"', str(method == "spawn"))
    command = runs.edited_folder(tmp_path / "code", forks)
    values = {**runs.SMALL, "max_steps": 1, "processes": 2, "data": text_file, "out": "run"}
    runs.run(runs.command_line(**values), cwd=tmp_path, command=command)
    assert (tmp_path / "run/model/config.json").exists()


@pytest.mark.parametrize("names", SOME_CLOSED, ids="-".join)
def test_closed_streams_become_empty_ones(names, tmp_path):
    command = [sys.executable, "-c", PROBE, str(tmp_path / "said")]
    environment = {**os.environ, "PYTHONPATH": str(runs.SCRIPT.parents[1])}
    subprocess.run(
        with_closed(command, names),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
        check=True,
    )
    assert (tmp_path / "said").read_text() == "True True\n"


def test_a_job_starts_from_a_command_without_streams(home, text_file):
    program = [*launching.PROGRAM, *launching.launching(data=text_file)]
    command = with_closed(program, ["stdin", "stderr"])
    environment = launching.environment(home)
    subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=runs.LIMIT)
    ran = launching.command("jobs", home=home).good
    assert "Completed" in ran.out


def test_standard_input_that_is_closed_is_an_empty_text(home):
    command = with_closed([*launching.PROGRAM, "upload-data", "-"], ["stdin"])
    environment = launching.environment(home)
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "0 characters" in ran.stderr


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        (None, ["0", "1"]),
        ("", ["0", "1"]),
        ("2,3", ["2", "3"]),
        (" 3, 2 ,1", ["3", "2"]),
        ("GPU-8932f937,GPU-1f6b", ["GPU-8932f937", "GPU-1f6b"]),
        ("MIG-a3c1,MIG-b7", ["MIG-a3c1", "MIG-b7"]),
    ],
)
def test_gpus_have_the_names_that_were_given_to_us(variable, names, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus(2) == names


def test_the_runs_of_a_search_use_our_gpus_alone(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with patch("torch.cuda.device_count", return_value=2):
        search: Any = SimpleNamespace(start={"device": "auto"})
        runs = LocalRuns(search)
        assert runs.gpus == ["2", "3"]


def test_only_a_kill_makes_one_ask_about_memory():
    cases = [
        (1, False),
        (137, False),
        (-signal.SIGSEGV, False),
        (-40, False),
        (-signal.SIGKILL, True),
    ]
    for status, asks in cases:
        assert ("memory" in how_it_ended(status)) == asks
