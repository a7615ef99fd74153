"""The command line, `sm-nanogpt`: options, messages, progress bars and exit codes.

stdout carries data, stderr carries messages. Exit code 0 means success, 1 that a job or a service
failed, 2 that the user gave something wrong. Each module of this package holds one command or a
family of commands, and imports the library only when a command runs, which keeps --help fast.
"""

from __future__ import annotations

import difflib
import errno
import gc
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from itertools import pairwise
from typing import NoReturn

import click

from sm_nanogpt.entry_point.errors import os_reason
from sm_nanogpt.entry_point.startup import limit_spinning, open_standard_streams
from sm_nanogpt.launcher.backends import LOCAL
from sm_nanogpt.launcher.cli import (
    account,
    chat,
    delete,
    evaluate,
    folder,
    jobs,
    launch,
    models,
    search,
    upload,
)
from sm_nanogpt.launcher.cli.options import (
    CommandGroup,
    StoreParameter,
    settings_of,
    value_option,
)
from sm_nanogpt.launcher.cli.remedies import sentence
from sm_nanogpt.launcher.cli.show import logs_shown, note, silence
from sm_nanogpt.launcher.errors import InputError, LauncherError, Terminated, joined

COMPLETION_VARIABLE = "_SM_NANOGPT_COMPLETE"

# click's message about a value: the option, the value in quotes or without, and the rule.
WRONG_VALUE = re.compile(r"""Invalid value for '(\S+)': (['"]?)(.*)\2 is not (.*)""")
# Phrases of click's rules, and what replaces them.
CLICK_PHRASES = {
    "a valid integer( range)?": "a whole number",
    "a valid float": "a number",
    "in the range x>=": "at least ",
    "in the range (.+)<=x<=": r"from \1 to ",
}

# What there is in place of an option that people try, by the command and the name of the option.
# click would suggest the option that is spelled most alike, or none.
TRIED_OPTIONS = {
    "upload-data": {"name": "An upload has the name of its first text: rename the file"},
    "fetch-and-sample": {
        "length": "--max-new-tokens N sets the length",
        "start": "--prompt TEXT starts the text",
    },
    "chat": {"length": "--max-new-tokens N sets the length"},
}

COMMANDS: dict[str, list[click.Command]] = {
    "Text and training": [
        upload.upload_data_command,
        delete.data_command,
        launch.launch_command,
        folder.hyperparameters_command,
        folder.copy_script_command,
    ],
    "Jobs": [
        jobs.jobs_command,
        jobs.status_command,
        jobs.logs_command,
        jobs.metrics_command,
        jobs.report_command,
        jobs.wait_command,
        jobs.stop_command,
        delete.delete_command,
    ],
    "Models": [
        models.fetch_and_sample_command,
        chat.chat_command,
        models.play_command,
        evaluate.eval_command,
    ],
    "Search": [search.try_group],
    "AWS account": [account.infra_group, account.doctor_command],
}


class Root(CommandGroup):
    """The group of all commands. Its help lists them by the titles of COMMANDS."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))  # the same in all sections
        for title, commands in COMMANDS.items():
            lines = [
                (f"{command.name:<{width}}", command.get_short_help_str(99)) for command in commands
            ]
            with formatter.section(title):
                formatter.write_dl(lines)


@click.group(
    cls=Root,
    commands=[command for commands in COMMANDS.values() for command in commands],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="sm-nanogpt")
@value_option(
    "--store URL",
    "Where to keep data and models: s3://bucket/prefix or a directory. Default:"
    " SM_NANOGPT_STORE, config.toml, or the stack; else ~/.sm-nanogpt/store, or for SageMaker"
    " the account's default bucket.",
    type=StoreParameter(),
)
@value_option("--region NAME", "AWS region (default: from the AWS configuration).")
@value_option("--profile NAME", "AWS profile.")
@value_option("--role ARN", "Execution role for SageMaker (default: from the stack).")
@value_option(
    "--stack NAME", "CloudFormation stack that provides store and role (default: sm-nanogpt)."
)
@click.option("--debug", is_flag=True, help="Print the traceback of an error.")
@click.pass_context
def cli(context: click.Context, debug: bool, **settings: str | None) -> None:
    """Train your own GPT and sample from it in three commands.

    Example:
      sm-nanogpt upload-data input.txt
      sm-nanogpt launch --instance local  (or ml.g5.12xlarge, for example, on SageMaker)
      sm-nanogpt fetch-and-sample JOB-ID

    For JOB-ID, give an id, a name from `launch --name`, four or more characters from the start or
    the end of an id, its time (HHMMSS), or `latest`, your newest job.
    """
    context.obj = settings


def run(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code.

    A shell that asks for completions sets _SM_NANOGPT_COMPLETE, as click defines it.
    """
    instruction = os.environ.get(COMPLETION_VARIABLE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "sm-nanogpt", COMPLETION_VARIABLE, instruction)
    if arguments is None:
        arguments = sys.argv[1:]
    is_debugging = "--debug" in arguments  # wherever it is
    root: click.Context | None = None
    try:
        prepare_streams()
        check_no_empty_argument(arguments)
        arguments = [argument for argument in arguments if argument != "--debug"]
        # cli.main would treat a closed pipe as a failure.
        with (
            signals_as_ctrl_c(),
            logs_shown(),
            cli.make_context("sm-nanogpt", arguments) as root,
        ):
            cli.invoke(root)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except (KeyboardInterrupt, click.Abort) as error:
        note(": ".join(["interrupted", *map(str, error.args)]))
        return 1
    except BrokenPipeError:
        silence(sys.stdout)  # `| head` is not a failure
        return 0
    except Exception as error:
        if is_debugging and not isinstance(error, click.ClickException):
            traceback.print_exc()
        with root or nullcontext():
            note(f"error: {' '.join(message_of(error).splitlines())}")
        return 2 if isinstance(error, (InputError, click.ClickException)) else 1


def prepare_streams() -> None:
    """Open the standard streams that are closed. Raises InputError if stdout is."""
    is_stdout_closed = sys.stdout is None  # as `>&-` leaves it
    open_standard_streams()
    if is_stdout_closed:
        raise InputError(
            "stdout is closed, so results cannot be printed; use `>/dev/null` to discard them"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escape what the terminal's encoding lacks, so that the other characters are printed.
        sys.stdout.reconfigure(errors="backslashreplace")


def check_no_empty_argument(arguments: list[str]) -> None:
    """Raise InputError if an argument is empty, as an unset shell variable makes it."""
    for previous, argument in pairwise(["sm-nanogpt", *arguments]):
        if re.fullmatch("(--[a-z-]+=)?", argument):
            problem = f"what follows {argument or previous} is empty"
            raise InputError(f"{problem}; give a value, or leave it out")


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Raise Terminated on SIGTERM and SIGHUP, so that a command can clean up as after Ctrl-C.

    An ignored signal stays ignored, as `nohup` expects.
    """
    handlers = {sign: signal.getsignal(sign) for sign in (signal.SIGTERM, signal.SIGHUP)}
    handlers = {sign: old for sign, old in handlers.items() if old is not signal.SIG_IGN}

    def interrupt(*_: object) -> NoReturn:
        for sign in handlers:
            signal.signal(sign, signal.SIG_IGN)  # `timeout` sends it twice
        raise Terminated

    for sign in handlers:
        signal.signal(sign, interrupt)
    try:
        yield
    finally:
        for sign, handler in handlers.items():
            signal.signal(sign, handler)


def message_of(error: Exception) -> str:
    """What is printed of an error."""
    if isinstance(error, click.ClickException):
        return usage_message(error)
    if isinstance(error, LauncherError):
        return joined(sentence(error), *first_step_after(error))
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"cannot write {error.filename or 'the result'}: {os_reason(error)}"
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {os_reason(error)}"
    return f"{type(error).__name__}: {error}; `sm-nanogpt --debug ...` shows where"


def first_step_after(error: LauncherError) -> list[str]:
    """What a person without jobs types next, if an error says that there are none; else nothing."""
    from sm_nanogpt.launcher.finding import NoJobs

    if not isinstance(error, NoJobs):
        return []
    try:
        return [f"next: {jobs.first_step(settings_of())}"]
    except InputError as store_error:  # there is no such store
        return [sentence(store_error)]


def usage_message(error: click.ClickException) -> str:
    """The message of click, a hint, and the command whose help says more."""
    message = " ".join(error.format_message().split())
    wrong_value = WRONG_VALUE.fullmatch(message)
    if wrong_value is not None:
        option, _, value, rule = wrong_value.groups()
        for pattern, replacement in CLICK_PHRASES.items():
            rule = re.sub(pattern, replacement, rule)
        message = f"{option} {value}: must be {rule}"
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    is_launch = context.command is launch.launch_command
    if isinstance(error, click.NoSuchOption):
        advice = advice_on_option(error.option_name, context.command)
        if advice:
            message = f"{error.message.rstrip('.')}. {advice}"
        elif is_launch:
            message += " Hyperparameters need --set NAME=VALUE"
    elif is_launch and "unexpected extra argument" in message:
        message += f". {advice_on_argument(message)}"
    return joined(message.rstrip("."), f"`{context.command_path} --help` shows what there is")


def advice_on_option(typed: str, command: click.Command) -> str:
    """What a command has in place of an option that it lacks, if people try it; else ''.

    People try those of TRIED_OPTIONS, and with `launch` the names of hyperparameters. They may
    misspell one: it counts if no option of the command is more similar to what they typed.
    """
    from sm_nanogpt.entry_point.config import Config

    tried = dict(TRIED_OPTIONS.get(command.name or "", {}))
    if command is launch.launch_command:
        for field in fields(Config):
            name = field.name.replace("_", "-")
            tried[name] = f"`--set {field.name}=VALUE` sets that hyperparameter"
    names = [option.lstrip("-") for parameter in command.params for option in parameter.opts]
    typed_name = typed.lstrip("-").replace("_", "-")
    closest = difflib.get_close_matches(typed_name, [*names, *tried], n=1)
    return tried.get(closest[0], "") if closest else ""


def advice_on_argument(message: str) -> str:
    """How to give `launch` the argument that click did not expect: an instance, a preset, or else a
    text.

    message: that of click, with the argument in parentheses.
    """
    from sm_nanogpt.entry_point.presets import PRESETS

    argument = message.partition("(")[2].rstrip(")").partition(" ")[0]
    if argument == LOCAL or argument.startswith("ml."):
        return f"Write `--instance {argument}`"
    if argument in ("auto", *PRESETS):
        return f"Write `--preset {argument}`"
    return "A text goes to `upload-data` first, or is named by --data"


def main() -> NoReturn:
    limit_spinning()  # sampling too is slow where threads stay awake long
    exit_code = run()
    gc.freeze()  # at exit, Python would search all objects for cycles: a fifth of the time
    sys.exit(exit_code)
