"""Completion in a shell: what Tab offers, by click's own means."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import time

import launching
import pytest
from jobs import write_job

from sm_nanogpt.launcher import cli as commands
from sm_nanogpt.launcher.job import TrainingJob


def completions(
    typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """What bash gets for a line whose last word is not finished, as "kind,word"."""
    monkeypatch.setenv("COMP_WORDS", f"sm-nanogpt {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
    monkeypatch.setenv("_SM_NANOGPT_COMPLETE", "bash_complete")
    assert commands.run([]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("fe", ["plain,fetch-and-sample"]),
        ("--sto", ["plain,--store"]),
        ("try st", ["plain,start"]),
        ("launch --data here/my", ["file,here/my"]),
        ("fetch-and-sample ./mod", ["file,./mod"]),
        ("launch --preset ba", ["plain,baby"]),
        ("launch --instance lo", ["plain,local"]),
        ("launch --instance ml.g5.4", ["plain,ml.g5.48xlarge", "plain,ml.g5.4xlarge"]),
        ("launch --instance ml.m5.xlarge,ml.p4de.", ["plain,ml.m5.xlarge,ml.p4de.24xlarge"]),
        ("--store my", ["dir,my"]),
        ("launch --set n_la", ["plain,n_layer="]),
        ("launch --sweep learning-r", ["plain,learning_rate="]),
    ],
)
def test_tab_completes_commands_options_and_files(typed, offered, monkeypatch, capsys):
    assert completions(typed, monkeypatch, capsys) == offered


def test_tab_completes_the_jobs_of_this_machine(home, monkeypatch, capsys):
    for job_id, name in [("20261130-055203-b8e312", None), ("20261130-055209-8f40ca", "baseline")]:
        job = TrainingJob(data=(home / "input.txt").as_uri(), name=name)
        write_job(home / "jobs" / f"sm-nanogpt-{job_id}", job=job)
    assert completions("status b", monkeypatch, capsys) == ["plain,baseline", "plain,b8e312"]
    assert completions("play la", monkeypatch, capsys) == ["file,la", "plain,latest"]


def test_tab_completes_the_uploads_of_this_machine(home, cli, text_file, monkeypatch, capsys):
    name = cli("upload-data", text_file).good.out.strip().rpartition("/")[2]
    assert completions("launch --data in", monkeypatch, capsys) == ["file,in", f"plain,{name}"]
    assert completions("delete in", monkeypatch, capsys) == [f"plain,{name}"]


def test_tab_completes_the_searches_of_this_machine(home, monkeypatch, capsys):
    assert completions("try log sh", monkeypatch, capsys) == [""]
    (home / "tries/shakespeare").mkdir(parents=True)
    (home / "tries/shakespeare/ledger.jsonl").touch()
    for command in ("try log", "try run my_gpt --group", "copy-script --from"):
        assert completions(f"{command} sh", monkeypatch, capsys) == ["plain,shakespeare"], command


def test_tab_writes_nothing(home, monkeypatch, capsys):
    assert completions("status la", monkeypatch, capsys) == ["plain,latest"]
    assert not home.exists()


def test_tab_looks_for_no_job_and_refuses_nothing(home, monkeypatch, capsys):
    assert completions("delete no-such-job --ye", monkeypatch, capsys) == ["plain,--yes"]


@pytest.mark.parametrize(
    ("shell", "lines"),
    [
        ("bash --norc --noprofile -i", 'eval "$(_SM_NANOGPT_COMPLETE=bash_source sm-nanogpt)"'),
        (
            "zsh -f -i",
            "autoload -Uz compinit && compinit -D -u;"
            ' eval "$(_SM_NANOGPT_COMPLETE=zsh_source sm-nanogpt)"',
        ),
        ("fish --no-config -i", "_SM_NANOGPT_COMPLETE=fish_source sm-nanogpt | source"),
    ],
    ids=["bash", "zsh", "fish"],
)
def test_a_tab_completes_a_command(shell, lines, quick, tmp_path):
    """As documented: source the script in an interactive shell, then type and press Tab."""
    command = shell.split()
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    program = tmp_path / "sm-nanogpt"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(launching.PROGRAM)} "$@"\n')
    program.chmod(0o755)
    settings = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "dumb"}
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(command[0], command, settings)
    try:
        os.write(terminal, lines.encode() + b"\n")
        os.write(terminal, b"echo rea''dy\n")
        read_until(terminal, "\nready")
        os.write(terminal, b"sm-nanogpt fetch-an\t")
        read_until(terminal, "sm-nanogpt fetch-and-sample")
    finally:
        os.close(terminal)  # hangs up, which ends the shell
        os.waitpid(child, 0)


def read_until(terminal: int, text: str) -> None:
    output = ""
    deadline = time.monotonic() + 60
    while text not in output:
        assert time.monotonic() < deadline, output
        if select.select([terminal], [], [], 1)[0]:
            output += os.read(terminal, 1 << 16).decode(errors="replace")
