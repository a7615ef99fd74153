"""Options, arguments, and questions that several commands use."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from inspect import cleandoc
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from sm_nanogpt.entry_point.errors import os_reason
from sm_nanogpt.launcher.cli.remedies import command
from sm_nanogpt.launcher.cli.show import escaped, note
from sm_nanogpt.launcher.errors import InputError, LauncherError
from sm_nanogpt.launcher.locations import similar_files

if TYPE_CHECKING:
    from sm_nanogpt.launcher.finding import Part
    from sm_nanogpt.launcher.settings import Settings

T = TypeVar("T")

PAGE_START = b"<!doctype html"
MAX_OFFERED_JOBS = 50  # by Tab


def settings_of() -> Settings:
    """The settings of the running command. They are read once, as they have the session of AWS."""
    from sm_nanogpt.launcher.settings import load_settings

    context = click.get_current_context()
    if "settings" not in context.meta:
        context.meta["settings"] = load_settings(**context.obj)
    settings: Settings = context.meta["settings"]
    return settings


class Command(click.Command):
    """A command that takes either jobs or a sweep, and names options that belong before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # click wraps no line after a backspace.
        self.help = cleandoc(self.help or "").replace("\nExample:", "\n\b\nExample:")
        # Check the other parameters first: it may take seconds to look for a job.
        for parameter in self.params:
            parameter.is_eager = not isinstance(parameter.type, JobParameter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            unparsed = super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click omits it for an option without value
            if isinstance(error, click.NoSuchOption):
                check_not_misplaced(error, ctx)
            raise
        if not ctx.resilient_parsing:
            check_one_target(ctx.params)
        return unparsed


def check_not_misplaced(error: click.NoSuchOption, ctx: click.Context) -> None:
    """Raise InputError if a command was given an option that belongs before it."""
    root = ctx.find_root()
    for option in root.command.params:
        if error.option_name in option.opts and option.metavar:
            command_name = ctx.command_path.removeprefix(f"{root.command_path} ")
            example = f"{root.command_path} {error.option_name} {option.metavar} {command_name}"
            raise InputError(
                f"{error.option_name} goes before the command: {example} ..."
            ) from None


def check_one_target(params: Mapping[str, Any]) -> None:
    """Raise InputError if a command that takes jobs or a sweep was given both, or neither."""
    targets = [params[name] for name in ("job_id", "job_ids", "group") if name in params]
    if len(targets) == 2 and bool(targets[0]) == bool(targets[1]):
        raise InputError("give a JOB-ID, or --group with the id of a sweep")


# Paths that a command reads. It says itself what is wrong with one, and click does not check them.
PATH = click.Path(readable=False)
DIRECTORY = click.Path(readable=False, path_type=Path)


class InputFile(click.Path):
    """A file to read, or, if dir_okay, a directory. It is checked before the command begins."""

    def __init__(self, dir_okay: bool = False) -> None:
        super().__init__(dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        problem = ""
        try:
            path.stat()
        except OSError as error:
            suggestion = similar_files(path, str(value))
            problem = f"{os_reason(error)}; {suggestion}" if suggestion else os_reason(error)
        if not problem and path.is_dir() and not self.dir_okay:
            problem = "is a directory"
        if not problem and not os.access(path, os.R_OK):
            problem = "permission denied"
        if problem:
            raise InputError(f"{path}: {problem}")
        return path


class StoreParameter(click.Path):
    """A store: a directory or an S3 prefix. The settings check it. Tab completes directories."""

    def __init__(self) -> None:
        super().__init__(file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)


class OutputFile(click.Path):
    """A file to write, in a directory that exists. It is checked before the command begins."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Any = super().convert(value, param, ctx)  # a Path, by path_type
        if ctx is not None and not ctx.resilient_parsing:
            check_output_file(path)
        return path


def check_output_file(path: Path) -> None:
    """Raise InputError if a page cannot be written, or if the path is that of something else."""
    try:
        has_directory = path.parent.is_dir()
        is_other = path.is_symlink() or (path.exists() and not path.is_file())
        has_other_content = path.is_file() and not holds_page(path)
    except OSError as error:  # the name is too long, or the user may not look there
        raise InputError(f"{path}: {os_reason(error)}; name another one") from None
    if not has_directory:
        raise InputError(f"{path}: {path.parent} is no directory; make it, or name another one")
    if is_other:
        raise InputError(f"{path}: not a regular file; name another one")
    if has_other_content:
        raise InputError(f"{path}: is there, and is no page; name another one")


def holds_page(path: Path) -> bool:
    """True if a file is empty, or begins as a page of HTML."""
    with path.open("rb") as file:
        beginning = file.read(100).lstrip().lower()
    return not beginning or beginning.startswith(PAGE_START)


class TextParameter(click.Path):
    """A text: the name of an upload, a URI, or a path."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete an upload of this machine, or a file. bash completes files only if no upload
        fits, if those come first."""
        names = [name for name in upload_names() if name.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file"), *map(CompletionItem, names)]


@dataclass(eq=False)
class JobParameter(click.ParamType[str]):
    """A parameter for a job: an id, a name, a part of an id, or `latest`. Gives the full id.

    acts: the command changes the job. sweeps, uploads: it also takes the id of a sweep, or the name
    of an upload. reads: the command reads this part of a job, so `latest` is the newest job that
    has it. If that part is the model, a path, a URI, and the value `other` are returned unchanged.
    """

    acts: bool = False
    sweeps: bool = False
    uploads: bool = False
    reads: Part | None = None
    other: str = ""
    name = "job"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if ctx is None or ctx.resilient_parsing or value == self.other:
            return value
        from sm_nanogpt.launcher.files.moved import UPLOAD_NAME
        from sm_nanogpt.launcher.finding import full_id

        if self.uploads and UPLOAD_NAME.fullmatch(Path(value).name):
            return value.rstrip("/")
        settings = settings_of()
        sweep = self.convert_sweep(value, settings, ctx)
        if sweep:
            return sweep
        job_id = full_id(value, settings, self.acts, self.reads)
        if self.uploads and job_id == value:  # a whole id, or a part of none
            return self.convert_upload(value, settings)
        return job_id

    def convert_sweep(self, value: str, settings: Settings, ctx: click.Context) -> str:
        """The full id of a sweep, or ''. Raises InputError if the command takes no sweep here."""
        from sm_nanogpt.launcher.launching.names import recorded_group

        sweep = recorded_group(value, settings)
        if sweep is None or self.sweeps:
            return sweep or ""
        has_group_option = any(parameter.name == "group" for parameter in ctx.command.params)
        name = str(ctx.command.name) if has_group_option else "jobs"
        instead = command(name, "--group", value)
        raise InputError(f"{value} is a sweep: use `{instead}`, or one of its jobs, {value}-1")

    def convert_upload(self, value: str, settings: Settings) -> str:
        """The full name of an upload, from a part of it. The full id of a job is unchanged."""
        from sm_nanogpt.launcher.job import FULL_ID
        from sm_nanogpt.launcher.text.uploads import full_name

        if FULL_ID.fullmatch(value):
            return value
        return full_name(value, settings)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete a job of this machine, or a file where a model may be one.

        bash completes files only where no job fits, if those come first.
        """
        items = [CompletionItem(incomplete, type="file")] if self.reads == "model" else []
        references = job_references()
        if self.uploads:
            references += upload_names()
        references = [name for name in references if name.startswith(incomplete)]
        return items + [CompletionItem(name) for name in references]


def job_references() -> list[str]:
    """`latest`, and for each of this machine's newest jobs its name, or else the end of its id."""
    from sm_nanogpt.launcher.backends import LOCAL, backend_class
    from sm_nanogpt.launcher.description import UnreadableJob, end_of
    from sm_nanogpt.launcher.settings import Settings

    references = ["latest"]
    with suppress(LauncherError, OSError):  # the command itself says what is wrong
        settings = Settings()  # load_settings would make the home directory
        for job in islice(backend_class(LOCAL)(settings).list(), MAX_OFFERED_JOBS):
            if not isinstance(job, UnreadableJob):
                references.append(job.name or end_of(job.job_id))
    return list(dict.fromkeys(references))  # resumed jobs have one name


def upload_names() -> list[str]:
    """The names of the uploads in this machine's store."""
    from sm_nanogpt.launcher.settings import Settings
    from sm_nanogpt.launcher.text.store import local_upload_names

    with suppress(LauncherError, OSError):  # the command itself says what is wrong
        return local_upload_names(Settings())
    return []


def complete_hyperparameter(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Complete a hyperparameter of the packaged folder, as `n_layer=`."""
    from sm_nanogpt.entry_point.config import Config

    typed = incomplete.replace("-", "_")
    return [f"{field.name}=" for field in fields(Config) if field.name.startswith(typed)]


def complete_instance(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Complete `local` or an instance type of SageMaker, also behind other types and a comma."""
    from sm_nanogpt.launcher.backends import LOCAL
    from sm_nanogpt.launcher.instances import known_types

    earlier, comma, typed = incomplete.rpartition(",")
    names = sorted(known_types())
    if not comma:
        names.insert(0, LOCAL)
    return [f"{earlier}{comma}{name}" for name in names if name.startswith(typed)]


def complete_search(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Complete the name of a search of this machine."""
    from sm_nanogpt.launcher.settings import Settings
    from sm_nanogpt.launcher.trying.history import search_names

    return [name for name in search_names(Settings()) if name.startswith(incomplete)]


def complete_preset(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    from sm_nanogpt.entry_point.presets import PRESETS

    return [name for name in ["auto", *PRESETS] if name.startswith(incomplete)]


def typed_parameters(context: click.Context) -> set[str]:
    """The names of the parameters that were typed."""
    names = context.params
    source = context.get_parameter_source
    return {name for name in names if source(name) == ParameterSource.COMMANDLINE}


class CommandGroup(Command, click.Group):
    """A group of commands of the class Command."""

    command_class = Command

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "sample":
            cmd_name = "fetch-and-sample"
        return super().get_command(ctx, cmd_name)


def parse_assignments(
    context: click.Context | None, parameter: click.Parameter, assignments: tuple[str, ...]
) -> dict[str, str]:
    """Parse ('n_layer=6',) to {'n_layer': '6'}; an option callback."""
    option = parameter.opts[0]
    values: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if option in ("--set", "--sweep"):
            name = name.replace("-", "_")
            if name and equals and not value:
                raise InputError(f"{option} {assignment} is empty; give a value, or leave it out")
        if not equals or not name:
            raise InputError(f"{option} {assignment}: must be name=value")
        if name in values:
            problem = f"given twice ({values[name]!r} and {value!r})"
            raise InputError(f"{option} {name}: {problem}")
        values[name] = value
    return values


def parse_value_lists(
    context: click.Context | None, parameter: click.Parameter, assignments: tuple[str, ...]
) -> dict[str, list[str]]:
    """Parse ('n_layer=4,6',) to {'n_layer': ['4', '6']}; an option callback."""
    values_by_name: dict[str, list[str]] = {}
    for name, text in parse_assignments(context, parameter, assignments).items():
        values = text.split(",")
        are_different = len({as_number(value) for value in values}) == len(values)
        if "" in values or not are_different:
            raise InputError(f"--sweep {name}={text}: a value is empty or given twice")
        values_by_name[name] = values
    return values_by_name


def as_number(value: str) -> float | str:
    """A value as a number, so that 1e-3 and 0.001 are equal."""
    try:
        return float(value)
    except ValueError:
        return value


def agree(question: str, yes: bool) -> None:
    """Ask a question. Unless the user agrees, the command ends with exit code 1.

    yes: do not ask. Raises InputError if stdin is not a terminal.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError("this is not an interactive terminal; pass --yes to confirm")
    if not click.confirm(escaped(question), err=True):
        note("not confirmed; nothing was changed")
        raise click.exceptions.Exit(1)


def ask_if_not_yours(act: Callable[..., T], question: str, yes: bool) -> T:
    """Call `act(confirmed=...)`, and ask in a terminal if it would change another user's job.

    confirmed is True if the user passed --yes, or agrees. Without a terminal, NotYours is raised.
    """
    from sm_nanogpt.launcher.tracking import NotYours

    try:
        return act(confirmed=yes)
    except NotYours as error:
        if not sys.stdin.isatty():
            raise
        note(str(error))
    agree(question, yes=False)
    return act(confirmed=True)


def agree_to_cost(worst_cost: float, max_cost: float | None, settings: Settings, yes: bool) -> None:
    """Ask before jobs that may cost much. worst_cost: in USD; infinite if it is unknown.

    Without a terminal, this raises the error of check_confirmed.
    """
    from sm_nanogpt.launcher.sagemaker.cost import check_confirmed

    if not sys.stdin.isatty() and not yes:
        check_confirmed(worst_cost, max_cost, settings)
    elif worst_cost > settings.ask_above:
        agree("Launch?", yes)


# The attributes of an option, by its metavar.
KINDS: dict[str, dict[str, Any]] = {
    "N": {"type": click.IntRange(min=1)},
    "SECONDS": {"type": int},
    "GIB": {"type": int},
    "USD": {"type": float},
    "NAME|URI|PATH": {"type": TextParameter(readable=False)},
    "JOB-ID|PATH|URI": {"type": JobParameter(reads="model")},
    "KEY=VALUE": {"multiple": True, "callback": parse_assignments},
    "KEY=V1,V2,...": {"multiple": True, "callback": parse_value_lists},
    "ID": {"multiple": True},
}


def value_option(usage: str, help: str, **attributes: Any) -> Callable[[Any], Any]:
    """An option that takes a value.

    usage has the option, its parameter if that has another name, and the metavar. attributes are
    for click.option, in addition to those that KINDS has for the metavar.
    """
    *names, metavar = usage.split()
    attributes = {**KINDS.get(metavar, {}), **attributes}
    return click.option(*names, metavar=metavar, help=help, **attributes)


GROUP = value_option("--group SWEEP", "The jobs of a sweep, by its id or `latest`; or of a search.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
YES = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
JOB_ID = click.argument("job_id", metavar="JOB-ID", type=JobParameter())
RUN_ID = click.argument("job_id", metavar="JOB-ID", type=JobParameter(reads="curve"))
MODEL = click.argument("model", metavar="JOB-ID|DIR", type=JobParameter(reads="model"))
