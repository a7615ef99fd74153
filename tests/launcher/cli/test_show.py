"""Tables and progress in a terminal."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import sys
import time

import launching
import pytest
from jobs import stopped_job

from sm_nanogpt import upload_data
from sm_nanogpt.launcher.cli.remedies import sentence
from sm_nanogpt.launcher.cli.show import logs_shown, next_step, print_columns, print_json
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.progress import byte_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (120, ["NAME", "LOSS", "DATA", "URI"]),
        (20, ["NAME", "LOSS"]),
        (5, ["NAME…"]),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns(width, heads, monkeypatch):
    columns: dict[str, list[str | None]] = {
        "NAME": ["a-name", "b"],
        "LOSS": ["1.5", None],
        "DATA": ["data-1234", None],
        "URI": ["file:///home/you/data-1234", None],
    }
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(width))
    print_columns(columns, optional=("URI", "DATA"))
    assert isinstance(sys.stdout, Terminal)
    lines = sys.stdout.getvalue().splitlines()
    assert lines[0].split() == heads
    assert max(map(len, lines)) <= width


def test_columns_that_are_not_shown_are_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "20")
    print_columns({"NAME": ["short"], "URI": ["file:///a/long/one"]}, optional=("URI",))
    note = capsys.readouterr().err
    assert "URI" in note
    assert "--json" in note


def test_a_pipe_gets_every_column(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    print_columns({"NAME": ["short"], "URI": ["file:///a/long/one"]}, optional=("URI",))
    assert capsys.readouterr() == ("NAME   URI\nshort  file:///a/long/one\n", "")


def test_a_long_upload_shows_a_progress_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with byte_progress("upload") as progress:
        progress.expect(2_000_000)
        time.sleep(0.25)
        progress(1_000_000)
        progress(1_000_000)
    assert isinstance(sys.stderr, Terminal)
    assert "upload: 100%" in sys.stderr.getvalue()


def test_a_line_of_the_log_stands_above_a_progress_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with logs_shown(), byte_progress("eval") as progress:
        progress.expect(2_000_000)
        time.sleep(0.25)
        progress(1_000_000)
        logging.getLogger("sm_nanogpt.launcher").info("a line")
    assert isinstance(sys.stderr, Terminal)
    [line] = [line for line in sys.stderr.getvalue().split("\n") if line.endswith("a line")]
    assert line.rpartition("\r")[2] == "a line"
    assert "eval:  50%" in sys.stderr.getvalue().partition("a line")[2]


def test_a_line_of_the_log_shows_no_bar_before_its_time(monkeypatch):
    """Short work, which shows no bar, would leave one on the line of what is printed next."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with logs_shown(), byte_progress("fetch", source="input.txt") as progress:
        progress.expect(2_000_000)
    assert isinstance(sys.stderr, Terminal)
    assert "input.txt" in sys.stderr.getvalue()
    assert "fetch" not in sys.stderr.getvalue()


def job_with_checkpoint(data: str) -> JobDescription:
    """A job that was stopped after step 45 of its training on a text."""
    return stopped_job(
        data=data,
        inputs={"training": data},
        checkpoint_uri="file:///checkpoints",
        checkpoint_step=45,
    )


def test_a_stopped_job_is_resumed_from_its_checkpoint(home, short_text_file):
    settings = launching.settings_of(home)
    job = job_with_checkpoint(upload_data(short_text_file, settings).uri)
    assert next_step(job, settings) == (
        f"resume from its checkpoint of step 45: `sm-nanogpt launch --resume {job.job_id}`"
    )


def test_a_job_whose_text_was_deleted_needs_it_again(home):
    settings = launching.settings_of(home)
    job = job_with_checkpoint((home / "store/data/notes-0123456789ab").as_uri())
    assert next_step(job, settings) == (
        "its text, notes-0123456789ab, was deleted:"
        f" `sm-nanogpt fetch-and-sample {job.job_id}` takes the model of its checkpoint of step 45;"
        f" when the same text is uploaded again, `sm-nanogpt launch --resume {job.job_id}` goes on"
        " from there"
    )


def test_a_number_that_json_has_not_is_null(capsys):
    """As the perplexity of a model that gives a token no probability."""
    print_json({"perplexity": math.inf, "losses": [1.5, math.nan]})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"perplexity": None, "losses": [1.5, None]}


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ("no such job", "no such job; --me NAME says whose messages are the answers"),
        ("did you mean a?", "did you mean a? --me NAME says whose messages are the answers"),
    ],
)
def test_advice_follows_a_question_without_a_semicolon(problem, expected):
    assert sentence(InputError(problem, "give-me")) == expected


@pytest.mark.parametrize("arguments", ["lanch", "status --jsno", "try strat", "launch --presett a"])
def test_help_follows_a_question_without_a_semicolon(cli, arguments):
    ran = cli(arguments.split())
    assert ran.failed(2, "--help` shows what there is")
    assert "?;" not in ran.error


@pytest.mark.parametrize(
    ("value", "expected"),
    [(-1.0, "--size -1: "), (0.1, "--size 0.1: "), (1e300, "--size 1e+300: ")],
)
def test_a_number_is_shown_as_it_is_typed(value, expected):
    error = InputError("must be at least 0.25", field="size", value=value)
    assert sentence(error).startswith(expected)
    assert str(error).startswith(expected.removeprefix("--").replace(" ", "=", 1))


def test_the_command_that_lists_hyperparameters_is_named(cli, tmp_path):
    launch = ["launch", "--instance", "local", "--set", "xyzzy=1"]
    assert cli(launch).failed(2, "hyperparameter; `sm-nanogpt hyperparameters` lists them")
    assert cli("copy-script", "my gpt").code == 0
    with (tmp_path / "my gpt/config.py").open("a") as file:
        file.write("# edited\n")
    error = cli(launch, "--entry-point", "my gpt").error
    assert re.search(r"hyperparameters --entry-point '\S*my gpt'` lists them", error)
