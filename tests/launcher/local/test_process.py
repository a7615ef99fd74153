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
from jobs import write_job

from sm_nanogpt.launcher.local import runs as local_runs
from sm_nanogpt.launcher.local.gpus import visible_gpus
from sm_nanogpt.launcher.local.process import describe_status, python_command
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.tracking import TrackedJob
from sm_nanogpt.launcher.trying.local import LocalRuns

STREAMS = {"stdin": "0<&-", "stdout": "1>&-", "stderr": "2>&-"}
# It prints into a file, as its own streams may be closed.
PROBE = """\
import os, sys
from sm_nanogpt.entry_point.startup import open_standard_streams

open_standard_streams()
opened = open(sys.argv[1], "w")
print(opened.fileno() > 2, sys.stdin.read() == "", file=opened)
print("lost", file=sys.stdout, flush=True)
print("lost", file=sys.stderr, flush=True)
"""
# It starts a job that waits.
START = """\
import json, sys
from pathlib import Path
from sm_nanogpt.launcher.local.backend import LocalBackend
from sm_nanogpt.launcher.settings import load_settings
from sm_nanogpt.launcher.source import Source

directory = Path(sys.argv[1])
source = Source(directory, {"train.py": b"import time; time.sleep(100)"})
record = json.loads((directory / "job.json").read_text())
LocalBackend(load_settings()).start(directory, source, record)
"""
CHECKOUT = str(runs.SCRIPT.parents[1])


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


def test_ranks_import_nothing_of_the_current_directory(tmp_path, short_text_file):
    """Each is a new Python here, as on a GPU and on a Mac."""
    for name in ("random", "pickle", "types"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')")
    spawns = ('sys.platform != "linux" or device_type != "cpu"', "True")
    command = runs.edited_folder(tmp_path / "code", spawns)
    values = {**runs.SMALL, "max_steps": 1, "processes": 2, "data": short_text_file, "out": "run"}
    runs.run(runs.command_line(**values), cwd=tmp_path, command=command)
    assert (tmp_path / "run/model/config.json").exists()


@pytest.mark.parametrize("names", [["stdout"], list(STREAMS)], ids="-".join)
def test_closed_streams_become_empty_ones(names, tmp_path):
    command = [sys.executable, "-c", PROBE, str(tmp_path / "said")]
    environment = {**os.environ, "PYTHONPATH": CHECKOUT}
    subprocess.run(
        with_closed(command, names),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
        check=True,
    )
    assert (tmp_path / "said").read_text() == "True True\n"


def test_a_job_starts_from_a_command_without_streams(home):
    """Else its lock would have the number of a stream, and its runner would not inherit it."""
    directory = home / "jobs/sm-nanogpt-20261128-120000-abcdef"
    write_job(directory)
    command = with_closed([sys.executable, "-c", START, str(directory)], ["stdin", "stderr"])
    environment = {**launching.environment(home), "PYTHONPATH": CHECKOUT}
    subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    launching.until((directory / "state.json").exists)
    assert TrackedJob(directory.name).describe().status == "InProgress"


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
        (" 3, 2 ,1", ["3", "2"]),
        ("GPU-8932f937,GPU-1f6b", ["GPU-8932f937", "GPU-1f6b"]),
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
        assert ("memory" in describe_status(status)) == asks
