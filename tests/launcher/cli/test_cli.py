"""The command line: stdout for data, stderr for people, one line for an error."""

from __future__ import annotations

import ast
import errno
import io
import itertools
import json
import os
import re
import shutil
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

from entry_point.config import Config
from launcher import cli as commands
from launcher.cli.remedies import command, option
from launcher.cli.show import print_columns
from launcher.files.progress import byte_progress
from launcher.job import COMMON_FIELDS
from sm_nanogpt import Request, ServiceError

GROUP = "sm-nanogpt-20260101-000000-abcdef"
GROUPS = {name: g for name, g in commands.cli.commands.items() if isinstance(g, click.Group)}
COMMANDS = [name for name in commands.cli.commands if name not in GROUPS]
COMMANDS += [f"{name} {command}" for name, group in GROUPS.items() for command in group.commands]


def word_options(command: str) -> list[str]:
    """The options of a command, or of all, that take a word of any kind."""
    found: Any = commands.cli
    for name in command.split():
        found = found.commands[name]
    options = [o for o in found.params if isinstance(o, click.Option) and not o.is_flag]
    words = [o for o in options if o.type is click.STRING]
    return [o.opts[0] for o in words if o.metavar != "KEY=VALUE"]  # those say what they miss


def modules_after(home: Path, *calls: list[str]) -> set[str]:
    """The top-level modules that some commands leave loaded."""
    code = f"""
import sys
from launcher.cli import run
for words in {calls}:
    assert run(words) == 0, words
print(*{{name.partition(".")[0] for name in sys.modules}})
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=launching.environment(home),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


# -- what costs nothing ---------------------------------------------------------------------------


def test_help_imports_nothing_heavy(tmp_path):
    loaded = modules_after(tmp_path, ["--help"], *([*c.split(), "-h"] for c in COMMANDS))
    assert "click" in loaded
    heavy = {"torch", "numpy", "sagemaker", "boto3", "botocore", "s3fs", "fsspec", "pydantic"}
    assert not loaded & heavy


def test_light_commands_import_no_torch_aws_or_extra(job, text_file):
    calls = [["hyperparameters"], ["jobs"], ["upload-data", str(text_file)]]
    calls += [[name, job.job_id] for name in ("status", "metrics", "logs", "wait")]
    extras = {"altair", "vl_convert"}
    heavy = {"torch", "boto3", "botocore", "s3fs", "sagemaker", *extras}
    assert not modules_after(job.home, *calls) & heavy


def test_every_test_has_a_name_of_under_60_characters():
    names = [
        node.name
        for path in Path(__file__).parents[2].rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert names
    long = [name for name in names if len(name) >= 60]
    assert not long, (
        f"{long}: the name of a test is a sentence of under 60 characters, so that a list of tests "
        "reads as a list of rules; say the rule in the name, and the rest in a docstring"
    )


# -- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_commands_help_shows_an_example(home, cli, command):
    ran = cli(*command.split(), "--help")
    assert (ran.code, ran.err) == (0, "")
    assert f"Example:\n    sm-nanogpt {command}" in ran.out
    assert not home.exists()


def test_an_option_that_is_a_hyperparameter_names_set(cli):
    assert cli("launch", "--max-steps", "500").failed(2, "--set NAME=VALUE")


def test_a_text_behind_launch_is_told_where_it_goes(cli):
    assert cli("launch", "notes.txt").failed(2, "`upload-data` first, or is named by --data")


def test_the_help_shows_three_commands_and_groups_all(cli):
    told = cli("--help").out
    example = told.partition("Options:")[0]
    three = ("upload-data", "launch", "fetch-and-sample")
    positions = [example.index(f"sm-nanogpt {command}") for command in three]
    assert positions == sorted(positions)
    sections = re.findall(r"^[A-Z].*:\n((?:  [a-z].*\n)+)", told, re.MULTILINE)
    names = [re.findall(r"^  (\S+)", section, re.MULTILINE) for section in sections]
    assert sorted(itertools.chain(*names)) == sorted(commands.cli.commands)
    assert max(map(len, names)) <= 8


def test_the_help_of_launch_ends_with_sagemaker_options(cli):
    named = re.findall(r"^  (--[\w-]+)", cli("launch", "--help").out, re.MULTILINE)
    fields = Request.model_fields.keys() - COMMON_FIELDS
    assert set(named[named.index("--launcher") :]) == {*map(option, fields)}


def test_without_a_command_help_is_an_error(cli):
    ran = cli()
    assert (ran.code, ran.out) == (2, "")
    assert "\nJobs:\n  jobs  " in ran.err


def test_the_version_goes_to_stdout(cli):
    ran = cli("--version")
    assert (ran.code, bool(re.search(r"\d+\.\d+", ran.out))) == (0, True)


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "code"), [("frobnicate", 2), ("status nope", 1)])
def test_a_process_exits_with_the_code_of_its_error(words, code, home):
    ran = launching.command(*words.split(), home=home)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.count("\n") == 1
    assert ran.error


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("frobnicate", ""),
        ("--nonsense", ""),
        ("--region", ""),
        ("--store here", ""),
        ("infra frobnicate", " infra"),
        ("infra show extra", " infra show"),
        ("jobs extra", " jobs"),
        ("launch --nonsense", " launch"),
        ("launch --instance", " launch"),
        ("status", " status"),
        ("fetch-and-sample", " fetch-and-sample"),
        ("fetch-and-sample some-job --top-k a", " fetch-and-sample"),
    ],
)
def test_wrong_arguments_name_the_help_to_read(cli, words, command):
    ran = cli(*words.split())
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert re.search(rf"[^.]; `sm-nanogpt{command} --help` shows what there is$", ran.error)


# What else a command needs, so that an option is looked at.
NAMED = ["chat", "fetch-and-sample", "play"]
ARGUMENTS = {"": ["jobs"], **{name: ["some-job"] for name in NAMED}}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["upload-data", ""], "upload-data"),
        (["jobs", "--group="], "--group="),
        *(
            ([*command.split(), option, "", *ARGUMENTS.get(command, [])], option)
            for command in ["", *COMMANDS]
            for option in word_options(command)
        ),
    ],
)
def test_an_empty_argument_does_not_mean_the_default(cli, home, text_file, words, named):
    (home.parent / "input.txt").write_bytes(text_file.read_bytes())
    ran = cli(*words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.error.startswith(f"what follows {named} is empty")
    assert not home.exists()


@pytest.mark.parametrize("command", ["launch", "infra", "infra deploy"])
@pytest.mark.parametrize("option", ["--store", "--region", "--profile", "--role"])
def test_a_misplaced_global_option_says_where_it_goes(cli, command, option):
    for words in ((option, "word"), (f"{option}=word",)):
        ran = cli(*command.split(), *words)
        assert ran.code == 2
        start = f"{option} goes before the command: sm-nanogpt {option} "
        assert re.fullmatch(rf"{start}[A-Z]+ {command} \.\.\.", ran.error)


@pytest.mark.parametrize(
    ("words", "code"), [(("status", "nope"), 1), (("upload-data", "missing.txt"), 2)]
)
def test_debug_shows_the_traceback(cli, words, code):
    ran = cli("--debug", *words)
    assert (ran.code, "Traceback" in ran.err) == (code, True)
    assert ran.err.splitlines()[-1].startswith("error: ")


CRASH = "error: {}; `sm-nanogpt --debug ...` shows where"
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("words", "failing", "error", "said"),
    [
        ("jobs", "with_costs", RuntimeError("no luck"), CRASH.format("RuntimeError: no luck")),
        ("jobs", "with_costs", OSError(5, "broken"), CRASH.format("OSError: [Errno 5] broken")),
        ("jobs", "with_costs", FULL, "error: cannot write the result: No space left on device"),
        ("jobs", "with_costs", ServiceError("first\nsecond"), "error: first second"),
        ("jobs", "with_costs", KeyboardInterrupt, "interrupted"),
        ("logs some-job", "TrackedJob.logs", KeyboardInterrupt, "interrupted"),
        (
            "wait some-job",
            "TrackedJob.wait_for_end",
            KeyboardInterrupt,
            "interrupted: the job keeps running",
        ),
    ],
)
def test_an_error_within_a_command_is_one_line(
    home, capsys, monkeypatch, words, failing, error, said
):
    monkeypatch.setattr(f"launcher.tracking.{failing}", Mock(side_effect=error))
    assert commands.run(words.split()) == 1
    assert capsys.readouterr().err == f"{said}\n"


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

    before = signal.signal(sign, handler)
    try:
        monkeypatch.setattr("launcher.tracking.with_costs", signalled)
        ran = cli("jobs")
        assert signal.getsignal(sign) is handler
    finally:
        signal.signal(sign, before)
    assert (ran.code, ran.err == "interrupted\n") == (code, code == 1)


# -- streams --------------------------------------------------------------------------------------


def test_a_launch_prints_only_the_job_id_on_stdout(finished):
    launched = (finished.home.parent / "launched.json").read_text()
    ran = launching.Ran(*json.loads(launched))
    assert re.fullmatch(r"sm-nanogpt-\d{8}-\d{6}-[0-9a-f]{6}\n", ran.out)
    assert "step=10/10 train_loss=" in ran.err
    assert ran.err.splitlines()[-1] == f"next: sm-nanogpt fetch-and-sample {ran.out.strip()}"


def test_a_closed_stdout_is_refused_before_the_start(home, text_file):
    words = [*launching.PROGRAM, *launching.launching("--detach", data=text_file)]
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *words]
    env = launching.environment(home)
    ran = subprocess.run(closed, env=env, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert ran.stderr.startswith("error: stdout is closed")
    assert not home.exists()


def test_unprintable_characters_are_escaped_on_stdout(job):
    (job.directory / "logs/job.log").write_text("Ж\nthe end\n", encoding="utf-8")
    env = {"PYTHONIOENCODING": "latin-1"}
    ran = launching.command("logs", job.job_id, home=job.home, env=env)
    assert (ran.code, ran.out, ran.err) == (0, "\\u0416\nthe end\n", "")


def test_status_shows_state_step_loss_and_paths(job, cli):
    shown = cli("status", job.job_id).out
    model = r"file:///\S+/model\.tar\.gz"
    for line in ("state: +Completed", "step: +10/10", r"best loss: +\d\.\d{4}", f"model: +{model}"):
        assert re.search(f"^{line}$", shown, re.MULTILINE), line
    told = json.loads(cli("status", job.job_id, "--json").out)
    assert (told["status"], told["hyperparameters"]["n_embd"]) == ("Completed", 32)
    assert told["metrics"]["step"] == told["hyperparameters"]["max_steps"] == 10
    assert told["created"] <= told["started"] <= told["ended"]
    assert told["best_loss"] == told["metrics"]["best_loss"]


NEWER = "sm-nanogpt-20990101-000000-abcdef"


@pytest.fixture
def newer(job):
    """The directory of a later job, of which there is only a record."""
    directory = job.home / "jobs" / NEWER
    directory.mkdir()
    record = json.loads((job.directory / "job.json").read_text())
    (directory / "job.json").write_text(json.dumps({**record, "created": 4e9}))
    return directory


def test_jobs_are_listed_newest_first(job, newer, cli):
    rows = cli("jobs").out.splitlines()
    assert rows[0].split()[:2] == ["JOB-ID", "STATE"]
    assert [row.split()[0] for row in rows[1:]] == [NEWER, job.job_id]
    listed = json.loads(cli("jobs", "--json").out)
    assert [described["job_id"] for described in listed] == [NEWER, job.job_id]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *[("job.json", content) for content in ("", "null", "{", "[]", '{"job": {}}')],
        *[("state.json", content) for content in ("", "null", "{", "[]")],
    ],
)
def test_an_unreadable_job_hides_no_other(job, newer, cli, file, content):
    broken = newer / file
    broken.write_text(content)
    listed = cli("jobs")
    shutil.rmtree(job.directory)
    alone = cli("jobs")
    assert [row.split()[0] for row in listed.out.splitlines()[1:]] == [job.job_id]
    assert alone.out == ""
    for ran in (listed, alone):
        assert (ran.code, ran.err.count("\n")) == (0, 1)
        assert ran.err.startswith(f"job {NEWER} is left out: {broken} is damaged")
    assert cli("status", NEWER).failed(1, f"{broken} is damaged")


def test_an_empty_list_of_jobs_says_how_to_begin(cli):
    ran = cli("jobs")
    assert (ran.code, ran.out) == (0, "")
    assert "next: sm-nanogpt upload-data FILE" in ran.err
    assert json.loads(cli("jobs", "--json").out) == []
    assert cli("status", "latest").failed(1, "sm-nanogpt launch", "AWS_REGION")
    assert cli("jobs", "--group", "latest").failed(2, "--sweep")


def test_a_job_is_found_by_a_unique_part_of_its_id(job, cli):
    for part in (job.job_id[:14], job.job_id[-6:], "latest"):
        ran = cli("status", part).good
        assert f"job:         {job.job_id}\n" in ran.out
    other = f"{job.job_id[:-6]}ffffff"
    shutil.copytree(job.directory, job.directory.parent / other)
    ran = cli("status", "sm-nanogpt-2")
    assert ran.failed(2, "matches 2 jobs: ", job.job_id, other)


def test_the_list_of_jobs_shows_losses_and_changes(job, cli):
    assert re.search(r" +input-[0-9a-f]{12}  cpu n_layer=1 n_embd=32 ", cli("jobs").out)
    assert "COST" not in cli("jobs").out  # no job has one
    rows = [{"step": 5, "val_loss": 2.0, "best_loss": 2.0, "bits_per_byte": 1.5}]
    rows += [{"step": 10, "val_loss": 4.0, "best_loss": 2.0, "bits_per_byte": 3.0}]
    curve = job.directory / "hosts/algo-1/checkpoints/metrics-00000001.jsonl"
    curve.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert re.search(r" 2\.0000 +1\.5000 ", cli("jobs").out)


def test_logs_print_the_output_of_the_run(job, cli):
    ran = cli("logs", job.job_id)
    assert ran.out == (job.directory / "logs/job.log").read_text()
    assert "step=10/10" in ran.out
    assert cli("logs", job.job_id, "--follow").out == ran.out


def test_an_ended_job_cannot_be_stopped(job, cli):
    assert cli("stop", job.job_id).failed(1, "has already ended: Completed")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (120, ["NAME", "LOSS", "DATA", "URI"]),
        (30, ["NAME", "LOSS", "DATA"]),
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


def test_after_an_upload_the_next_step_is_to_launch(cli, text_file):
    cli("upload-data", str(text_file))
    assert "next: sm-nanogpt launch --instance local" in cli("jobs").err


def test_a_long_upload_shows_a_progress_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with byte_progress("upload") as progress:
        progress.expect(2_000_000)
        time.sleep(0.25)
        progress(1_000_000)
        progress(1_000_000)
    assert isinstance(sys.stderr, Terminal)
    assert "upload: 100%" in sys.stderr.getvalue()


# -- the same from Python -------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "code"), [("infra", 0), ("entry_point", 1)])
def test_a_package_that_hides_the_training_folder_is_refused(home, name, code):
    package = home.parent / name
    package.mkdir()
    (package / "__init__.py").touch()
    words = [sys.executable, "-c", "import launcher"]
    done = subprocess.run(words, cwd=home.parent, capture_output=True, text=True)
    assert (done.returncode, str(package) in done.stderr) == (code, code == 1)


def test_hyperparameters_lists_those_of_the_script(cli, tmp_path):
    told = cli("hyperparameters").out
    listed = {line.split()[0] for line in told.splitlines() if "; " in line}
    assert listed == {field.name for field in fields(Config)}
    assert (
        "; a number from 0 to 1e+37 (default: 0, which means 0.02 with muon, 0.001 with adamw)\n"
        in told
    )
    assert "(0: all); a whole number, at least 0 (default: 32768)\n" in told
    kept = {line.split()[0] for line in told.splitlines() if "; --resume keeps it" in line}
    assert kept == {field.name for field in fields(Config) if field.metadata["kept_on_resume"]}
    edited = launching.edited(tmp_path / "my", ('"a set of hyper', '"one set of hyper'))
    assert cli("hyperparameters", "--entry-point", str(edited)).code == 0


def test_a_suggestion_repeats_the_options_before_a_command():
    given = {"store": "s3://words", "region": "us-east-1", "profile": "of mine", "role": ""}
    with click.Context(commands.cli, obj=given):
        said = "--store s3://words --region us-east-1 --profile 'of mine'"
        assert command("status", "ID") == f"sm-nanogpt {said} status ID"
    with click.Context(commands.cli, obj={}):
        assert command("status", "ID") == "sm-nanogpt status ID"
