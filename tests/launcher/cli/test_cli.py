"""The command line: stdout for data, stderr for people, one line for an error."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import launching
import pytest

from sm_nanogpt import Request, ServiceError
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.launcher import cli as commands
from sm_nanogpt.launcher.cli.remedies import REMEDIES, command, option
from sm_nanogpt.launcher.job import COMMON_FIELDS

GROUP = "sm-nanogpt-20260101-000000-abcdef"


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--max-steps", "`--set max_steps=VALUE`"),
        ("--max_steps", "`--set max_steps=VALUE`"),
        ("--generatons", "`--set generations=VALUE`"),
        ("--instnace", "'--instance'"),
        ("--xyzzy", "--set NAME=VALUE"),
    ],
)
def test_an_option_that_is_a_hyperparameter_names_set(cli, option, hint):
    ran = cli("launch", option, "500")
    assert ran.failed(2, hint)
    assert ("Did you mean" in ran.error) is (option == "--instnace")


def test_a_text_behind_launch_is_told_where_it_goes(cli):
    assert cli("launch", "notes.txt").failed(2, "`upload-data` first, or is named by --data")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("upload-data input.txt --name tale", "the name of its first text: rename the file"),
        ("upload-data input.txt --nam tale", "the name of its first text: rename the file"),
        ("sample latest --length 20", "--max-new-tokens N"),
        ("sample latest --lenght 20", "--max-new-tokens N"),
        ("chat latest --length 20", "--max-new-tokens N"),
        ("fetch-and-sample latest --start ROMEO:", "--prompt TEXT"),
    ],
)
def test_an_option_that_people_try_says_what_there_is(cli, arguments, hint):
    ran = cli(arguments.split())
    assert ran.failed(2, hint)
    assert "Did you mean" not in ran.error  # --me is none of a name


@pytest.mark.parametrize(
    ("argument", "option"),
    [("local", "--instance"), ("ml.g5.xlarge", "--instance"), ("quick", "--preset")],
)
def test_an_argument_of_launch_is_told_its_option(cli, argument, option):
    ran = cli("launch", argument, "more")
    assert ran.failed(2, f"`{option} {argument}`")
    assert "upload-data" not in ran.error


def test_the_help_shows_three_commands_and_groups_all(cli):
    output = cli("--help").out
    example = output.partition("Options:")[0]
    three = ("upload-data", "launch", "fetch-and-sample")
    positions = [example.index(f"sm-nanogpt {command}") for command in three]
    assert positions == sorted(positions)
    sections = re.findall(r"^[A-Z].*:\n((?:  [a-z].*\n)+)", output, re.MULTILINE)
    names = [re.findall(r"^  (\S+)", section, re.MULTILINE) for section in sections]
    assert sorted(itertools.chain(*names)) == sorted(commands.cli.commands)
    assert max(map(len, names)) <= 8


def test_the_help_of_launch_ends_with_sagemaker_options(cli):
    options = re.findall(r"^  (--[\w-]+)", cli("launch", "--help").out, re.MULTILINE)
    fields = Request.model_fields.keys() - COMMON_FIELDS
    assert set(options[options.index("--launcher") :]) == {*map(option, fields)}


def test_without_a_command_help_is_an_error(cli):
    ran = cli()
    assert ran.code == 2
    assert ran.out == ""
    assert "\nJobs:\n  jobs  " in ran.err


def test_the_version_goes_to_stdout(cli):
    ran = cli("--version")
    assert ran.code == 0
    assert re.search(r"\d+\.\d+", ran.out)


# -- errors ---------------------------------------------------------------------------------------


def test_a_process_exits_with_the_code_of_its_error(home):
    ran = launching.command("frobnicate", home=home)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.count("\n") == 1
    assert ran.error


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("frobnicate", ""),
        ("infra frobnicate", " infra"),
        ("fetch-and-sample some-job --top-k a", " fetch-and-sample"),
    ],
)
def test_wrong_arguments_name_the_help_to_read(cli, arguments, command):
    ran = cli(arguments.split())
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.count("\n") == 1
    assert re.search(rf"[^.]; `sm-nanogpt{command} --help` shows what there is$", ran.error)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("logs some-job --tail x", "--tail x: must be a whole number"),
        ("logs some-job --tail -1", "--tail -1: must be at least 0"),
        ("play some-job --bits 9", "--bits 9: must be from 4 to 8"),
        ("launch --size x", "--size x: must be a number"),
        ("jobs --status x", "--status x: must be one of 'InProgress', "),
        ("launch --size 'a valid float'", "--size a valid float: must be a number"),
        ("""launch --size "it's" """, "--size it's: must be a number"),
        ("jobs 'a valid integer'", "Got unexpected extra argument (a valid integer)"),
    ],
)
def test_a_wrong_value_is_told_as_the_library_tells_it(cli, arguments, problem):
    ran = cli(shlex.split(arguments))
    assert ran.code == 2
    assert ran.error.startswith(problem)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("missing.txt", "no such file or directory"),
        (".", "is a directory"),
        ("closed.txt", "permission denied"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_first(cli, monkeypatch, tmp_path, path, problem):
    (tmp_path / "closed.txt").write_text("a line")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    ran = cli("eval", "latest", "held-out.txt", "--find", path)
    assert ran.failed(2, f"{path}: {problem}")


def test_click_checks_no_path():
    """Its messages are none of ours."""
    groups = (commands.cli, commands.search.try_group)
    takers = [command for group in groups for command in (group, *group.commands.values())]
    for taker in takers:
        for parameter in taker.params:
            kind = parameter.type
            if type(kind) is click.Path:
                checks = (kind.exists, kind.readable, not kind.file_okay, not kind.dir_okay)
                assert not any(checks), parameter


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["upload-data", ""], "upload-data"),
        (["jobs", "--group="], "--group="),
        (["--store", "", "jobs"], "--store"),
    ],
)
def test_an_empty_argument_does_not_mean_the_default(cli, home, arguments, name):
    ran = cli(arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.error.startswith(f"what follows {name} is empty")
    assert not home.exists()


@pytest.mark.parametrize("command", ["launch", "infra deploy"])
def test_a_misplaced_global_option_says_where_it_goes(cli, command):
    for arguments in (["--region", "word"], ["--region=word"]):
        message = f"--region goes before the command: sm-nanogpt --region NAME {command} ..."
        assert cli(command.split(), arguments).failed(2, message)


def test_debug_shows_the_traceback(cli):
    ran = cli("--debug", "upload-data", "missing.txt")
    assert ran.code == 2
    assert "Traceback" in ran.err
    assert ran.err.splitlines()[-1].startswith("error: ")


CRASH = "error: {}; `sm-nanogpt --debug ...` shows where"
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("arguments", "failing", "error", "message"),
    [
        ("jobs", "with_costs", RuntimeError("no luck"), CRASH.format("RuntimeError: no luck")),
        ("jobs", "with_costs", FULL, "error: cannot write the result: no space left on device"),
        ("jobs", "with_costs", ServiceError("first\nsecond"), "error: first second"),
        ("jobs", "with_costs", KeyboardInterrupt, "interrupted"),
        (
            "wait some-job",
            "TrackedJob.wait_for_end",
            KeyboardInterrupt,
            "interrupted: the job keeps running",
        ),
    ],
)
def test_an_error_within_a_command_is_one_line(
    home, capsys, monkeypatch, arguments, failing, error, message
):
    monkeypatch.setattr(f"sm_nanogpt.launcher.tracking.{failing}", Mock(side_effect=error))
    assert commands.run(arguments.split()) == 1
    assert capsys.readouterr().err == f"{message}\n"


def test_each_command_with_an_encoding_is_in_its_advice():
    takers = [
        name
        for name, taker in commands.cli.commands.items()
        if "encoding" in [parameter.name for parameter in taker.params]
    ]
    assert "upload-data" in takers
    assert all(f"`{name}`" in REMEDIES["give-encoding"] for name in takers)


def test_a_file_that_may_not_be_written_is_one_line(cli, monkeypatch):
    error = PermissionError(errno.EACCES, "Permission denied", "closed/ledger")
    monkeypatch.setattr("sm_nanogpt.launcher.tracking.with_costs", Mock(side_effect=error))
    assert cli("jobs").failed(1, "closed/ledger: permission denied")


@pytest.mark.parametrize(
    ("sign", "handler", "code"),
    [
        (signal.SIGTERM, print, 1),  # which ends nothing
        (signal.SIGHUP, print, 1),
        (signal.SIGHUP, signal.SIG_IGN, 0),  # as `nohup` does
    ],
)
def test_a_signal_ends_a_command_unless_it_is_ignored(cli, monkeypatch, sign, handler, code):
    def signalled(*_: object) -> list[Any]:
        os.kill(os.getpid(), sign)
        time.sleep(0.05)
        return []

    earlier_handler = signal.signal(sign, handler)
    try:
        monkeypatch.setattr("sm_nanogpt.launcher.tracking.with_costs", signalled)
        ran = cli("jobs")
        assert signal.getsignal(sign) is handler
    finally:
        signal.signal(sign, earlier_handler)
    assert ran.code == code
    assert (ran.err == "interrupted\n") == (code == 1)


# -- streams --------------------------------------------------------------------------------------


def test_a_launch_prints_only_the_job_id_on_stdout(finished):
    launched = (finished.home.parent / "launched.json").read_text()
    ran = launching.Ran(*json.loads(launched))
    assert re.fullmatch(r"sm-nanogpt-\d{8}-\d{6}-[0-9a-f]{6}\n", ran.out)
    assert "step=10/10 train_loss=" in ran.err
    assert ran.err.splitlines()[-1] == f"next: sm-nanogpt fetch-and-sample {ran.out.strip()}"


def test_a_closed_stdout_is_refused_before_the_start(home, short_text_file):
    command = [*launching.PROGRAM, *launching.launching("--detach", data=short_text_file)]
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    env = launching.environment(home)
    ran = subprocess.run(closed, env=env, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("error: stdout is closed")
    assert not home.exists()


def test_unprintable_characters_are_escaped_on_stdout(job, monkeypatch):
    (job.directory / "logs/job.log").write_text("Ж\nthe end\n", encoding="utf-8")
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "latin-1"))
    assert commands.run(["logs", job.job_id]) == 0
    assert printed.getvalue() == b"\\u0416\nthe end\n"


def test_an_ended_job_cannot_be_stopped(job, cli):
    assert cli("stop", job.job_id).failed(1, "has already ended: Completed")


@pytest.mark.parametrize(("length", "option"), [(30_000, " --preset auto"), (300_000, "")])
def test_the_first_launch_has_one_advice(cli, tmp_path, text, length, option):
    (tmp_path / "notes.txt").write_text((text * (1 + length // len(text)))[:length])
    advice = f"next: sm-nanogpt launch --instance local{option}"
    assert cli("upload-data", "notes.txt").err.splitlines()[-1] == advice
    assert cli("jobs").err.splitlines()[-1].endswith(advice)


# -- the same from Python -------------------------------------------------------------------------


def test_packages_of_the_user_do_not_hide_those_of_the_product(tmp_path):
    for name in ("launcher", "entry_point", "infra"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the user')")
    code = "import sm_nanogpt; sm_nanogpt.Request(instance='local').config()"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_hyperparameters_lists_those_of_the_script(cli, tmp_path):
    output = cli("hyperparameters").out
    listed = {line.split()[0] for line in output.splitlines() if "; " in line}
    assert listed == {field.name for field in fields(Config)}
    default = r"; a number from 0 to 1e\+37 \(default: 0, which means ([^)]*)\)$"
    [rates] = re.findall(default, output, re.MULTILINE)
    assert {"0.02 with muon", "0.001 with adamw"} <= set(rates.split(", "))
    assert "(0: all); a whole number, at least 0 (default: 32768)\n" in output
    kept_on_resume = {
        line.split()[0] for line in output.splitlines() if "; --resume keeps it" in line
    }
    assert kept_on_resume == {
        field.name for field in fields(Config) if field.metadata["kept_on_resume"]
    }
    edited = launching.edited(tmp_path / "my", ('"a set of hyper', '"one set of hyper'))
    assert cli("hyperparameters", "--entry-point", edited).code == 0


def test_a_suggestion_has_the_path_of_a_hidden_program(monkeypatch, tmp_path):
    """As in a .venv that is not activated, where `make demo` runs it."""
    monkeypatch.setattr(sys, "argv", [".venv/bin/sm-nanogpt", "launch"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command("jobs") == ".venv/bin/sm-nanogpt jobs"
    (tmp_path / "sm-nanogpt").touch(mode=0o755)
    assert command("jobs") == "sm-nanogpt jobs"


def test_a_suggestion_repeats_the_options_before_a_command():
    options = {"store": "s3://words", "region": "us-east-1", "profile": "of mine", "role": ""}
    with click.Context(commands.cli, obj=options):
        shown = "--store s3://words --region us-east-1 --profile 'of mine'"
        assert command("status", "ID") == f"sm-nanogpt {shown} status ID"
    with click.Context(commands.cli, obj={}):
        assert command("status", "ID") == "sm-nanogpt status ID"


@pytest.mark.parametrize(
    "variables, count",
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_of_a_command_do_not_wait_awake_for_long(monkeypatch, variables, count):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that the end of the test restores it
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(commands, "run", lambda: 0)
    with pytest.raises(SystemExit):
        commands.main()
    assert os.environ.get("GOMP_SPINCOUNT") == count


def test_a_file_is_written_to_no_new_directory(cli):
    ran = cli("report", "latest", "-o", "typo/a.html")
    assert ran.failed(2, "typo/a.html: typo is no directory")
    assert not Path("typo").exists()


def test_a_name_that_no_file_can_have_is_an_input_error(cli):
    ran = cli("play", "latest", "--save", "a" * 300)
    assert ran.failed(2, "file name too long; name another one")
