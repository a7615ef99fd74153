"""Options, arguments and questions that several commands use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from launcher.cli.show import escaped, note
from launcher.cli.words import command
from launcher.errors import InputError

if TYPE_CHECKING:
    from launcher.settings import Settings

T = TypeVar("T")


def settings_of() -> Settings:
    """The settings, which a command reads once: they hold the session of AWS."""
    from launcher.settings import load_settings

    context = click.get_current_context()
    if "settings" not in context.meta:
        context.meta["settings"] = load_settings(**context.obj)
    settings: Settings = context.meta["settings"]
    return settings


class Command(click.Command):
    """A command that says where an option belongs, and takes either jobs or a sweep."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # click wraps no line after a backspace.
        self.help = cleandoc(self.help or "").replace("\nExample:", "\n\b\nExample:")
        # Check the other parameters first: it may take seconds to look for a job.
        for parameter in self.params:
            parameter.is_eager = not isinstance(parameter.type, Job)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click omits it for an option without value
            raise misplaced(error, ctx) or error from None
        given = [
            bool(v) for name, v in ctx.params.items() if name in ("job_id", "job_ids", "group")
        ]
        if len(given) == 2 and sum(given) != 1 and not ctx.resilient_parsing:
            raise InputError("give a JOB-ID, or --group with the id of a sweep")
        return rest


def misplaced(error: click.UsageError, ctx: click.Context) -> InputError | None:
    """The error for an option that belongs before the command, if this is one."""
    root, name = ctx.find_root(), getattr(error, "option_name", None)
    for option in root.command.params:
        if isinstance(error, click.NoSuchOption) and name in option.opts and option.metavar:
            here = ctx.command_path.removeprefix(f"{root.command_path} ")
            words = f"{root.command_path} {name} {option.metavar} {here}"
            return InputError(f"{name} goes before the command: {words} ...")
    return None


@dataclass(eq=False)
class Job(click.ParamType[str]):
    """What a user types for a job: an id, a name, a part of an id, or `latest`. Gives the full id.

    acts: the command changes the job. sweeps, uploads: it takes those of a sweep, an upload too.
    trained: it reads a model, so `latest` is the newest job that has one; a path or a URI, which
    names a model elsewhere, stays as it is, and so does `other`. charted: it reads a curve, so
    `latest` is no job of a search.
    """

    acts: bool = False
    sweeps: bool = False
    uploads: bool = False
    trained: bool = False
    charted: bool = False
    other: str = ""
    name = "job"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if ctx is None or ctx.resilient_parsing or value == self.other:
            return value
        from launcher.files.moved import UPLOAD_NAME
        from launcher.finding import full_id
        from launcher.job import FULL_ID
        from launcher.launching.records import recorded_as

        if self.uploads and UPLOAD_NAME.fullmatch(Path(value).name):
            return value.rstrip("/")
        settings = settings_of()
        if (group := recorded_as(value, settings)) is not None:
            if self.sweeps:
                return group
            takes = any(each.name == "group" for each in ctx.command.params)
            instead = command(str(ctx.command.name) if takes else "jobs", "--group", value)
            raise InputError(f"{value} is a sweep: use `{instead}`, or one of its jobs, {value}-1")
        job_id = full_id(value, settings, self.acts, self.trained, self.charted)
        if self.uploads and job_id == value and not FULL_ID.fullmatch(value):
            from launcher.text.uploads import full_name

            return full_name(value, settings)
        return job_id

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete a file where a model may be one; jobs are not looked for."""
        if not self.trained:
            return []
        return [CompletionItem(incomplete, type="file")]


class Group(Command, click.Group):
    """A group of these commands."""

    command_class = Command

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, {"sample": "fetch-and-sample"}.get(cmd_name, cmd_name))


def pairs(
    context: click.Context | None, parameter: click.Parameter, typed: tuple[str, ...]
) -> dict[str, str]:
    """Parse ('n_layer=6',) to {'n_layer': '6'}; an option callback."""
    option, values = parameter.opts[0], dict[str, str]()
    sets = option in ("--set", "--sweep")
    for each in typed:
        name, equals, value = each.partition("=")
        name, problem = name.replace("-", "_") if sets else name, ""
        if sets and name and equals and not value:
            problem = f"{option} {each} is empty; give a value, or leave it out"
        elif not (equals and name):
            problem = f"{option} {each}: must be name=value"
        elif name in values:
            problem = f"{option} {name}: given twice ({values[name]!r} and {value!r})"
        if problem:
            raise InputError(problem)
        values[name] = value
    return values


def lists(
    context: click.Context | None, parameter: click.Parameter, typed: tuple[str, ...]
) -> dict[str, list[str]]:
    """Parse ('n_layer=4,6',) to {'n_layer': ['4', '6']}; an option callback."""
    values = {name: value.split(",") for name, value in pairs(context, parameter, typed).items()}
    for name, each in values.items():
        if "" in each or len({as_number(value) for value in each}) < len(each):
            raise InputError(f"--sweep {name}={','.join(each)}: a value is empty or given twice")
    return values


def as_number(value: str) -> float | str:
    """1e-3 and 0.001 are the same value."""
    try:
        return float(value)
    except ValueError:
        return value


def agree(question: str, yes: bool) -> None:
    """Ask for confirmation; without it, end the command with exit code 1.

    Raises InputError if stdin is not a terminal.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError("this is not an interactive terminal; pass --yes to confirm")
    if not click.confirm(escaped(question), err=True):
        note("not confirmed; nothing was changed")
        raise click.exceptions.Exit(1)


def unless_not_yours(act: Callable[[bool], T], question: str, yes: bool) -> T:
    """Do `act`, which takes whether it is confirmed. What belongs to somebody else is only touched
    with --yes, or after a question on a terminal."""
    from launcher.tracking import NotYours

    try:
        return act(yes)
    except NotYours as error:
        if not sys.stdin.isatty():
            raise
        note(str(error))
    agree(question, yes=False)
    return act(True)


def agree_to_cost(worst: float, max_cost: float | None, settings: Settings, yes: bool) -> None:
    """Ask before jobs that may cost much: `worst` USD, infinity if the price is unknown."""
    from launcher.sagemaker.cost import check_confirmed

    if not sys.stdin.isatty() and not yes:
        check_confirmed(worst, max_cost, settings)
    elif worst > settings.ask_above:
        agree("Launch?", yes)


# What an option takes, by its metavar.
KINDS: dict[str, dict[str, Any]] = {
    "N": {"type": click.IntRange(min=1)},
    "SECONDS": {"type": int},
    "GIB": {"type": int},
    "USD": {"type": float},
    "NAME|URI|PATH": {"type": click.Path()},
    "JOB-ID|PATH|URI": {"type": Job(trained=True)},
    "KEY=VALUE": {"multiple": True, "callback": pairs},
    "KEY=V1,V2,...": {"multiple": True, "callback": lists},
    "ID": {"multiple": True},
}


def valued(usage: str, help: str, **more: Any) -> Callable[[Any], Any]:
    """An option that takes a value. usage: the option, its parameter if that has another name, and
    the metavar."""
    *names, metavar = usage.split()
    return click.option(*names, metavar=metavar, help=help, **{**KINDS.get(metavar, {}), **more})


GROUP = valued("--group SWEEP", "The jobs of a sweep, by its id or `latest`.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
YES = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
JOB_ID = click.argument("job_id", metavar="JOB-ID", type=Job())
RUN_ID = click.argument("job_id", metavar="JOB-ID", type=Job(charted=True))
MODEL = click.argument("model", metavar="JOB-ID|DIR", type=Job(trained=True))
