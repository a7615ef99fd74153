"""Text of others reaches a terminal without its control characters."""

from __future__ import annotations

import io
from unittest.mock import Mock

import pytest

from sm_nanogpt.launcher.cli.chat import converse
from sm_nanogpt.launcher.cli.evaluate import print_documents
from sm_nanogpt.launcher.judge.evaluation import Passage


def test_an_error_shows_no_control_characters(cli):
    ran = cli(
        "--region",
        "\x1b[2J\u202e" + "y" * 9000,
        "launch",
        "--instance",
        "ml.g5.xlarge",
        "--dry-run",
    )
    assert ran.code == 2
    assert "\x1b" not in ran.err
    assert "\u202e" not in ran.err
    assert len(ran.error) < 1100


HOSTILE = "\x1b]0;a title\x07\x1b[2K\u202eblue\ttab\n"
HARMLESS = r"\x1b]0;a title\x07\x1b[2K\u202eblue" + "\ttab\n"


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stdout seem to be a terminal."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)


def test_a_pipe_gets_a_log_as_it_is(job, cli):
    (job.directory / "logs/job.log").write_bytes(HOSTILE.encode())
    ran = cli("logs", job.job_id).good
    assert ran.out == HOSTILE
    assert ran.err == ""


def test_a_log_reaches_a_terminal_escaped(job, cli, monkeypatch):
    use_terminal(monkeypatch)
    (job.directory / "logs/job.log").write_bytes(HOSTILE.encode())
    assert cli("logs", job.job_id).good.out == HARMLESS


def test_a_sample_reaches_a_terminal_escaped(job, cli, monkeypatch):
    use_terminal(monkeypatch)
    pieces = [[piece, piece] for piece in HOSTILE]
    monkeypatch.setattr("sm_nanogpt.launcher.models.sample.stream_samples", lambda *_, **__: pieces)
    ran = cli("fetch-and-sample", job.job_id, "--num-samples", "2").good
    assert ran.out == f"{HARMLESS}\n---\n{HARMLESS}\n"


def test_a_chat_reaches_a_terminal_escaped(capsys, monkeypatch):
    use_terminal(monkeypatch)
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    converse(lambda line, n: (piece for piece in HOSTILE))
    assert capsys.readouterr().out == f"{HARMLESS}\n"


def test_a_try_is_shown_escaped(cli, monkeypatch):
    """Also in a pipe: a folder of others is text to look at."""
    files = {"base": {}, "folder": {"config.py": HOSTILE.encode()}}
    search = Mock()
    search.ledger.of.return_value = [{"base": "base", "folder": "folder"}]
    search.source = lambda key: Mock(files=files[key])
    monkeypatch.setattr("sm_nanogpt.launcher.cli.search.open_search", lambda name: search)
    assert f"+{HARMLESS}" in cli("try", "show", "1", "--group", "plays").good.out


def test_names_of_documents_reach_a_terminal_escaped(capsys, monkeypatch):
    use_terminal(monkeypatch)
    print_documents([Mock(model="a", documents=[Passage(HOSTILE, 1.0, 2, 3)])])
    assert HARMLESS.rstrip("\n") in capsys.readouterr().out
