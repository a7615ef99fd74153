"""The command line: stdout for data, stderr for people, one line for an error."""

from __future__ import annotations

import ast
import dataclasses
import errno
import graphlib
import inspect
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
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import launching
import pytest

import launcher
from entry_point.config import Config, make_config
from launcher import Request, ServiceError
from launcher import cli as commands
from launcher.cli.show import byte_progress, with_options
from launcher.files import storage
from launcher.job import LOCAL_FIELDS, option

GROUPS = {name: g for name, g in commands.cli.commands.items() if isinstance(g, click.Group)}
COMMANDS = [name for name in commands.cli.commands if name not in GROUPS]
COMMANDS += [f"{name} {command}" for name, group in GROUPS.items() for command in group.commands]


def word_options(command: str) -> list[str]:
    """The options of a command, or of all, that take a word of any kind."""
    found: Any = commands.cli
    for name in command.split():
        found = found.commands[name]
    return [
        option.opts[0]
        for option in found.params
        if isinstance(option, click.Option)
        and isinstance(option.type, type(click.STRING))
        and not option.is_flag
        and option.metavar != "KEY=VALUE"  # which say what they miss
    ]


def modules_after(code: str, home: Path) -> set[str]:
    """The top-level modules that a piece of code leaves loaded."""
    report = "import sys\nprint(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        env=launching.environment(home),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


# -- what costs nothing ---------------------------------------------------------------------------

HEAVY = {"torch", "numpy", "sagemaker", "boto3", "botocore", "s3fs", "fsspec", "pydantic"}


def test_help_imports_nothing_heavy(tmp_path):
    loaded = modules_after("from launcher.cli import run\nassert run(['--help']) == 0", tmp_path)
    assert "click" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_help_imports_nothing_heavy(command, tmp_path):
    code = f"from launcher.cli import run\nassert run('{command} -h'.split()) == 0"
    assert not modules_after(code, tmp_path) & HEAVY


def test_importing_the_package_imports_nothing_heavy(tmp_path):
    assert not modules_after("import launcher", tmp_path) & HEAVY


@pytest.mark.parametrize(
    "words",
    [
        "jobs",
        "status {job}",
        "metrics {job}",
        "logs {job}",
        "wait {job}",
        "upload-data {text}",
    ],
)
def test_light_commands_import_no_torch_aws_or_extra(finished, tmp_path, text_file, words):
    home = tmp_path / "home"
    shutil.copytree(finished.home, home)
    said = words.format(job=finished.job_id, text=text_file).split()
    loaded = modules_after(f"from launcher.cli import run\nassert run({said}) == 0", home)
    extras = {"altair", "vl_convert", "tensorboard"}
    assert not loaded & {"torch", "boto3", "botocore", "s3fs", "sagemaker", *extras}


def test_the_launcher_has_no_circular_imports():
    top = Path(launcher.__file__).parent
    imports: dict[str, set[str]] = {}
    for path in top.rglob("*.py"):
        module = ".".join(path.relative_to(top.parent).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for_types = {
            id(line)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for line in node.body
        }
        named = imports.setdefault(module.removesuffix(".__init__"), set())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                named.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and id(node) not in for_types:
                assert node.module and not node.level
                named.update({node.module, *(f"{node.module}.{a.name}" for a in node.names)})
    assert "launcher.cli" in imports
    list(graphlib.TopologicalSorter(imports).static_order())  # raises CycleError


def test_every_test_has_a_name_of_under_60_characters():
    names = [
        node.name
        for path in Path(__file__).parent.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert names
    assert [name for name in names if len(name) >= 60] == []


# -- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_commands_help_shows_an_example(cli, command):
    ran = cli(*command.split(), "--help")
    assert ran.code == 0
    assert f"Example:\n    sm-nanogpt {command}" in ran.out
    assert ran.err == ""


def test_the_help_shows_the_three_commands(cli):
    example = cli("--help").out.partition("Options:")[0]
    three = ("upload-data", "launch", "fetch-and-sample")
    positions = [example.index(f"sm-nanogpt {command}") for command in three]
    assert positions == sorted(positions)


def test_the_help_groups_the_commands(cli):
    sections = re.findall(r"^[A-Z].*:\n((?:  [a-z].*\n)+)", cli("--help").out, re.MULTILINE)
    names = [re.findall(r"^  (\S+)", section, re.MULTILINE) for section in sections]
    assert sorted(itertools.chain(*names)) == sorted(commands.cli.commands)
    assert max(map(len, names)) <= 8


def test_the_help_of_launch_groups_sagemaker_options(cli):
    _, _, told = cli("launch", "--help").out.partition("Options for SageMaker only:\n")
    fields = Request.model_fields.keys() - LOCAL_FIELDS
    assert set(re.findall(r"^  (--[\w-]+)", told, re.MULTILINE)) == set(map(option, fields))


def test_help_does_not_create_the_home_directory(home, cli):
    assert (cli("--help").code, cli("launch", "--help").code) == (0, 0)
    assert not home.exists()


def test_without_a_command_help_is_shown_with_exit_code_2(cli):
    ran = cli()
    assert (ran.code, ran.out) == (2, "")
    assert "\nJobs:\n  jobs  " in ran.err


def test_the_version_goes_to_stdout(cli):
    ran = cli("--version")
    assert ran.code == 0
    assert re.search(r"\d+\.\d+", ran.out)


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["frobnicate"],
        ["launch"],
        ["fetch-and-sample"],
        ["status"],
        ["jobs", "extra"],
        ["launch", "--instance"],
        ["--nonsense"],
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(words, home):
    ran = launching.command(*words, home=home)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert ran.error


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["frobnicate"], ""),
        (["--store", "here"], ""),
        (["infra", "frobnicate"], " infra"),
        (["infra", "show", "extra"], " infra show"),
        (["launch", "--nonsense"], " launch"),
        (["status"], " status"),
        (["launch", "--instance"], " launch"),
        (["--region"], ""),
        (["fetch-and-sample", "some-job", "--temperature", "nan"], " fetch-and-sample"),
        (["fetch-and-sample", "some-job", "--temperature", "inf"], " fetch-and-sample"),
        (["fetch-and-sample", "some-job", "--top-p", "nan"], " fetch-and-sample"),
    ],
)
def test_wrong_arguments_name_the_help_to_read(cli, words, command):
    ran = cli(*words)
    assert ran.code == 2
    assert re.search(rf"[^.]; `sm-nanogpt{command} --help` shows what there is$", ran.error)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["upload-data", ""], "PATH"),
        (["status", ""], "JOB-ID"),
        *[
            ([*command.split(), option, "", *rest], option)
            for command in ["", *COMMANDS]
            for option in word_options(command)
            for rest in [
                {
                    "": ["jobs"],
                    "fetch-and-sample": ["some-job"],
                    "track": ["some-job"],
                }.get(command, [])
            ]
        ],
    ],
)
def test_an_empty_argument_does_not_mean_the_default(cli, home, text_file, words, named):
    (home.parent / "input.txt").write_bytes(text_file.read_bytes())
    ran = cli(*words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.error.startswith(f"{named} is empty")
    assert not home.exists()


@pytest.mark.parametrize("command", ["launch", "infra", "infra deploy"])
@pytest.mark.parametrize("option", ["--store", "--region", "--profile", "--role"])
def test_a_misplaced_global_option_says_where_it_goes(cli, command, option):
    for words in ((option, "word"), (f"{option}=word",)):
        ran = cli(*command.split(), *words)
        assert ran.code == 2
        start = f"{option} goes before the command: sm-nanogpt {option} "
        assert re.fullmatch(rf"{start}[A-Z]+ {command} \.\.\.", ran.error)


@pytest.mark.parametrize("words", [["upload-data"], ["launch", "--instance", "local", "--data"]])
def test_a_tilde_before_an_unknown_user_is_explained(cli, words):
    ran = cli(*words, "~notes.txt")
    assert ran.code == 2
    assert "./~notes.txt" in ran.error


def test_a_failing_service_is_one_line_and_exit_code_1(home):
    ran = launching.command("status", "nope", home=home)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.count("\n") == 1


def test_debug_shows_the_traceback_and_keeps_the_exit_code(cli):
    failed = cli("--debug", "status", "nope")
    assert failed.code == 1
    assert "Traceback" in failed.err
    assert failed.err.splitlines()[-1].startswith("error: ")
    wrong = cli("--debug", "upload-data", "missing.txt")
    assert wrong.code == 2
    assert "Traceback" in wrong.err


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), OSError(5, "Input/output error")])
def test_an_unexpected_error_is_one_line(home, capsys, monkeypatch, error):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("launcher.tracking.all_backends", fail)
    assert commands.run(["jobs"]) == 1
    place = "`sm-nanogpt --debug ...` shows where"
    assert capsys.readouterr().err == f"error: {type(error).__name__}: {error}; {place}\n"


def test_an_error_of_several_lines_is_joined_into_one(cli, monkeypatch):
    def fail(*_: object) -> None:
        raise ServiceError("first\nsecond")

    monkeypatch.setattr("launcher.tracking.all_backends", fail)
    assert cli("jobs").err == "error: first second\n"


def test_an_interrupt_prints_no_traceback(cli, monkeypatch):
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.tracking.all_backends", fail)
    ran = cli("jobs")
    assert (ran.code, ran.err) == (1, "interrupted\n")


def test_an_interrupted_wait_says_that_the_job_keeps_running(cli, monkeypatch):
    monkeypatch.setattr("launcher.tracking.wait", Mock(side_effect=KeyboardInterrupt))
    ran = cli("wait", "some-job")
    assert (ran.code, ran.err) == (1, "interrupted: the job keeps running\n")


def test_a_full_disk_is_not_reported_as_a_bug(cli, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("launcher.tracking.all_backends", Mock(side_effect=full))
    assert cli("jobs").err == "error: cannot write the result: No space left on device\n"


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_any_command_as_ctrl_c_does(cli, monkeypatch, sign):
    def fail(*_: object) -> None:
        os.kill(os.getpid(), sign)
        time.sleep(0.5)

    before = signal.signal(sign, signal.default_int_handler)  # so that no test run ends here
    try:
        monkeypatch.setattr("launcher.tracking.all_backends", fail)
        ran = cli("jobs")
        assert signal.getsignal(sign) is signal.default_int_handler
    finally:
        signal.signal(sign, before)
    assert (ran.code, ran.err) == (1, "interrupted\n")


def test_a_command_under_nohup_outlives_its_terminal(cli, monkeypatch):
    def close(*_: object) -> list[Any]:
        os.kill(os.getpid(), signal.SIGHUP)
        return []

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        monkeypatch.setattr("launcher.tracking.all_backends", close)
        assert cli("jobs").code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


# -- streams --------------------------------------------------------------------------------------


def test_upload_data_prints_only_the_uri(home, text_file):
    ran = launching.command("upload-data", str(text_file), home=home)
    assert ran.code == 0
    assert re.fullmatch(r"file:///\S+/store/data/input-[0-9a-f]{12}\n", ran.out)


def test_the_job_id_is_printed_before_the_job_ends(home, text_file):
    words = launching.launching(data=text_file, **launching.ENDLESS)
    with launching.started(*words, home=home) as process:
        assert process.stdout is not None
        job_id = process.stdout.readline().strip()
        assert process.poll() is None
        assert json.loads((home / "jobs" / job_id / "job.json").read_text())


def test_a_launch_prints_only_the_job_id_on_stdout(home, text_file):
    ran = launching.command(*launching.launching(data=text_file), home=home)
    assert ran.code == 0
    assert re.fullmatch(r"sm-nanogpt-\d{8}-\d{6}-[0-9a-f]{6}\n", ran.out)
    assert "step=10/10 train_loss=" in ran.err
    assert ran.err.splitlines()[-1] == f"next: sm-nanogpt fetch-and-sample {ran.out.strip()}"


def test_a_closed_stdout_is_refused_before_the_start(home, text_file):
    words = [*launching.PROGRAM, *launching.launching("--detach", data=text_file)]
    ran = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *words],
        env=launching.environment(home),
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: stdout is closed")
    assert ran.stderr.count("\n") == 1
    assert not home.exists()


def test_unprintable_characters_are_escaped_on_stdout(job):
    (job.directory / "logs/job.log").write_text("Ж\nthe end\n", encoding="utf-8")
    env = {"PYTHONIOENCODING": "latin-1"}
    ran = launching.command("logs", job.job_id, home=job.home, env=env)
    assert (ran.code, ran.out, ran.err) == (0, "\\u0416\nthe end\n", "")


def test_status_shows_state_step_loss_and_paths(finished):
    ran = launching.command("status", finished.job_id, home=finished.home)
    assert re.search(r"^state: +Completed$", ran.out, re.MULTILINE)
    assert re.search(r"^step: +10/10$", ran.out, re.MULTILINE)
    assert re.search(r"^best loss: +\d\.\d{4}$", ran.out, re.MULTILINE)
    assert re.search(r"^model: +file:///\S+/model\.tar\.gz$", ran.out, re.MULTILINE)


def test_status_as_json_holds_the_same_values(finished):
    told = json.loads(
        launching.command("status", finished.job_id, "--json", home=finished.home).out
    )
    assert told["status"] == "Completed"
    assert told["metrics"]["step"] == told["metrics"]["max_steps"] == 10
    assert told["hyperparameters"]["n_embd"] == 32
    assert told["created"] <= told["started"] <= told["ended"]


def test_jobs_are_listed_newest_first(job, cli):
    newer = "sm-nanogpt-20990101-000000-abcdef"
    directory = job.home / "jobs" / newer
    directory.mkdir()
    record = json.loads((job.directory / "job.json").read_text())
    (directory / "job.json").write_text(json.dumps({**record, "created": 4e9}))
    rows = cli("jobs").out.splitlines()
    assert rows[0].split()[:2] == ["JOB-ID", "STATE"]
    assert [row.split()[0] for row in rows[1:]] == [newer, job.job_id]
    listed = json.loads(cli("jobs", "--json").out)
    assert [described["job_id"] for described in listed] == [newer, job.job_id]


@pytest.mark.parametrize("file", ["state.json", "job.json"])
@pytest.mark.parametrize("content", ["", "null", "{", "[]"])
def test_an_unreadable_job_hides_no_other(job, cli, file, content):
    broken = job.home / "jobs/sm-nanogpt-20990101-000000-abcdef"
    broken.mkdir()
    (broken / "job.json").write_bytes((job.directory / "job.json").read_bytes())
    (broken / file).write_text(content)
    ran = cli("jobs")
    assert ran.code == 0
    assert [row.split()[0] for row in ran.out.splitlines()[1:]] == [job.job_id]
    assert ran.err.count("\n") == 1
    assert ran.err.startswith(f"job {broken.name} is left out: {broken / file} is damaged")
    ran = cli("status", broken.name)
    assert ran.code == 1
    assert ran.error.startswith(f"{broken / file} is damaged")


@pytest.mark.parametrize(
    "changed",
    [
        {"job": {}},
        {"job": []},
        {"created": "yesterday"},
        {"hyperparameters": None},
    ],
)
def test_a_job_with_an_incomplete_record_hides_no_other(job, cli, changed):
    odd = job.home / "jobs/sm-nanogpt-20990101-000000-abcdef"
    odd.mkdir()
    record = json.loads((job.directory / "job.json").read_text())
    (odd / "job.json").write_text(json.dumps({**record, **changed}))
    ran = cli("jobs")
    assert ran.code == 0
    assert [row.split()[0] for row in ran.out.splitlines()[1:]] == [job.job_id]
    assert ran.err.count("\n") == 1
    assert ran.err.startswith(f"job {odd.name} is left out: {odd / 'job.json'} is damaged, or of")


def test_unreadable_jobs_are_not_reported_as_no_jobs(home, cli):
    broken = home / "jobs/sm-nanogpt-20990101-000000-abcdef"
    broken.mkdir(parents=True)
    (broken / "job.json").write_text("{")
    ran = cli("jobs")
    assert (ran.code, ran.out) == (0, "")
    assert ran.err.startswith(f"job {broken.name} is left out: ")
    assert ran.err.count("\n") == 1


def test_an_empty_list_of_jobs_says_how_to_begin(cli):
    ran = cli("jobs")
    assert (ran.code, ran.out) == (0, "")
    assert "sm-nanogpt launch --instance local" in ran.err
    assert json.loads(cli("jobs", "--json").out) == []


@pytest.mark.parametrize("cut", [lambda i: i[:14], lambda i: i[-6:], lambda i: "latest"])
def test_a_job_is_found_by_part_of_its_id(job, cli, cut):
    ran = cli("status", cut(job.job_id))
    assert ran.code == 0, ran.err
    assert f"job:         {job.job_id}\n" in ran.out


def test_an_ambiguous_part_of_an_id_is_refused(job, cli):
    other = f"{job.job_id[:-6]}ffffff"
    shutil.copytree(job.directory, job.directory.parent / other)
    ran = cli("status", "sm-nanogpt-2")
    assert (ran.code, "matches 2 jobs: " in ran.error) == (2, True)
    assert job.job_id in ran.error and other in ran.error


def test_the_list_of_jobs_shows_the_best_loss(job, cli):
    rows = [{"step": 5, "val_loss": 2.0, "best_loss": 2.0, "bits_per_byte": 1.5}]
    rows += [{"step": 10, "val_loss": 4.0, "best_loss": 2.0, "bits_per_byte": 3.0}]
    curve = job.directory / "hosts/algo-1/checkpoints/metrics-00000001.jsonl"
    curve.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert re.search(r" 2\.0000 +1\.5000 ", cli("jobs").out)


def test_the_list_of_jobs_shows_data_preset_and_changes(job, cli):
    assert re.search(r" - +input-[0-9a-f]{12}  cpu n_layer=1 n_embd=32 ", cli("jobs").out)
    record = json.loads((job.directory / "job.json").read_text())
    values = make_config({"dropout": 0.25, "max_steps": 7}, "laptop")
    record["hyperparameters"] = dataclasses.asdict(values)
    (job.directory / "job.json").write_text(json.dumps(record))
    assert cli("jobs").out.endswith("  laptop dropout=0.25\n")


def test_logs_print_the_output_of_the_run(job, cli):
    ran = cli("logs", job.job_id)
    assert ran.out == (job.directory / "logs/job.log").read_text()
    assert "step=10/10" in ran.out
    assert cli("logs", job.job_id, "--follow").out == ran.out


def test_an_ended_job_cannot_be_stopped(job, cli):
    ran = cli("stop", job.job_id)
    assert ran.code == 1
    assert "has already ended: Completed" in ran.error


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_upload_shows_a_progress_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with byte_progress("upload") as progress:
        storage.expect(progress, 2_000_000)
        time.sleep(0.25)
        progress(1_000_000)
        progress(1_000_000)
    assert isinstance(sys.stderr, Terminal)
    assert "upload: 100%" in sys.stderr.getvalue()


# -- the same from Python -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("fe", ["plain,fetch-and-sample"]),
        ("logs la", ["plain,latest"]),
        ("logs sm-", [f"plain,sm-nanogpt-20260101-000000-abcdef-{n}" for n in ("1", "1-try2")]),
        ("stop --group sm-", ["plain,sm-nanogpt-20260101-000000-abcdef"]),
        ("launch --preset la", ["plain,laptop"]),
        ("launch --preset a", ["plain,auto"]),
        ("launch --set n_l", ["plain,n_layer="]),
        ("launch --sweep n_l", ["plain,n_layer="]),
        ("launch --config here/my", ["file,here/my"]),
        ("upload-data in", ["file,in"]),
        ("fetch-and-sample ./mod", ["file,./mod"]),
    ],
)
def test_a_shell_completes(words, completed, home, monkeypatch, capsys):
    for each in ("1", "1-try2"):
        (home / f"jobs/sm-nanogpt-20260101-000000-abcdef-{each}").mkdir(parents=True)
    monkeypatch.setenv("COMP_WORDS", f"sm-nanogpt {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    monkeypatch.setenv("_SM_NANOGPT_COMPLETE", "bash_complete")
    assert commands.run([]) == 0
    assert capsys.readouterr().out.splitlines() == completed


def test_hyperparameters_are_read_without_torch():
    code = (
        "import sys, launcher.cli.options as o; o.presets_and_defaults();"
        "from launcher import Request; Request(preset='baby').config(1);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_another_projects_entry_point_package_is_refused(home):
    (home.parent / "entry_point").mkdir()
    (home.parent / "entry_point/__init__.py").touch()
    words = [sys.executable, "-c", "import launcher"]
    done = subprocess.run(words, cwd=home.parent, capture_output=True, text=True)
    expected = f"package entry_point is {home.parent}/entry_point, not that of sm-nanogpt"
    assert expected in done.stderr.splitlines()[-1]


def test_dir_lists_the_public_names_of_the_package():
    assert dir(launcher) == sorted(launcher.__all__)


def test_every_public_name_exists_and_has_a_docstring():
    for name in launcher.__all__:
        assert inspect.getdoc(getattr(launcher, name)), name
    assert sorted(launcher.__all__) == sorted(launcher._MODULE)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = launcher.no_such_name


def test_the_packages_example_prints_only_its_sample(home, tmp_path, text_file, capfd):
    assert launcher.__doc__ is not None
    example = "\n".join(
        line[4:] for line in launcher.__doc__.splitlines() if line.startswith("    ")
    )
    assert "launch(" in example
    small = f"preset='cpu', hyperparameters={launching.TINY}"
    example = example.replace('preset="cpu"', small).replace("ROMEO:", "The ")
    text = text_file.read_text(encoding="utf-8")
    (tmp_path / "input.txt").write_text(text, encoding="utf-8")
    capfd.readouterr()
    exec(example, {})
    printed = capfd.readouterr()
    assert printed.out.startswith("The ")
    assert len(printed.out) == 4 + 500 + 1
    assert printed.err == ""


def test_wait_gives_up_after_its_timeout(home, text_file, cli):
    words = launching.launching("--detach", data=text_file, **launching.ENDLESS)
    job_id = cli(*words).out.strip()
    with pytest.raises(ServiceError, match="still InProgress"):
        launcher.wait(job_id, timeout=0.1)


def test_main_exits_with_the_exit_code(home, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sm-nanogpt", "status", "nope"])
    with pytest.raises(SystemExit) as left:
        commands.main()
    assert left.value.code == 1


def test_the_meaning_of_zero_stands_beside_the_default(cli):
    told = cli("hyperparameters").out
    assert "(default: 0, which means 0.02 for muon, 0.001 for adamw)\n" in told
    assert "(0: all); a whole number, at least 0 (default: 512)\n" in told


def test_hyperparameters_lists_the_scripts_hyperparameters(cli, tmp_path):
    names = {field.name for field in dataclasses.fields(Config)}
    listed = {line.split()[0] for line in cli("hyperparameters").out.splitlines() if "; " in line}
    assert listed == names
    edited = launching.edited(tmp_path / "my", ('"a set of hyper', '"one set of hyper'))
    assert cli("hyperparameters", "--entry-point", str(edited)).code == 0


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("status ID", "--region us-east-1 --profile 'of mine'"),
        ("upload-data", "--store s3://words --region us-east-1 --profile 'of mine' --stack other"),
        ("infra show", "--region us-east-1 --profile 'of mine' --stack other"),
    ],
)
def test_a_suggested_command_repeats_the_options_it_needs(command, said):
    words = {
        "stack": "other",
        "profile": "of mine",
        "region": "us-east-1",
        "store": "s3://words",
        "role": "",
    }
    with click.Context(commands.cli, obj=words):
        assert with_options(f"`sm-nanogpt {command}`") == f"`sm-nanogpt {said} {command}`"
    with click.Context(commands.cli, obj={}):
        assert with_options(f"`sm-nanogpt {command}`") == f"`sm-nanogpt {command}`"
