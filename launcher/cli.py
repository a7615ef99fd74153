"""The command line: words, progress, exit codes. Each command is a few lines over the library.

stdout carries data, stderr what is said to people. Exit codes: 0 done, 1 a job or a service failed,
2 the user's words are off.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

from launcher.errors import InputError, ServiceError

if TYPE_CHECKING:
    from launcher.aws.infra import Deployment, Removal
    from launcher.aws.stack import Stack
    from launcher.job import JobDescription
    from launcher.settings import Settings


# What a terminal obeys, or shows in another order: C0 and C1 but for tab and newline, and bidi.
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
LONGEST = 1000  # characters that are told at once


def shown(text: str) -> str:
    """Text for a terminal, with control characters escaped, and the middle of a long one left out.

    What comes from outside may hold anything: the names in a file, a log, an answer of AWS.
    """
    text = CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)
    if len(text) > LONGEST:  # what to do is at the end
        text = f"{text[: LONGEST - 300]} ... {text[-300:]}"
    return text


def note(text: str) -> None:
    """Something for the person at the terminal."""
    click.echo(shown(text), err=True)


@contextmanager
def byte_progress(label: str, total: int | None = None) -> Iterator[Callable[[int], object]]:
    """A bar on stderr, counted in bytes."""
    from tqdm import tqdm

    # Only where somebody watches, and only when it takes long enough to watch.
    quiet = not sys.stderr.isatty()
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=quiet, delay=0.2) as bar:
        yield bar.update


def settings_of(context: click.Context, **said: str | None) -> Settings:
    """The settings, with what a command's own options say over the words before it."""
    from launcher.settings import load_settings

    return load_settings(**{**context.obj, **{name: v for name, v in said.items() if v}})


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=asdict))


def print_fields(fields: Mapping[str, str | None]) -> None:
    """One line for each that is there, with the values below each other."""
    width = max(map(len, fields)) + 2
    for name, value in fields.items():
        if value is not None:
            click.echo(shown(f"{name + ':':<{width}}{value}"))


class Command(click.Command):
    """A command that takes no empty word, which a variable that is not set leaves behind.

    It would mean the default, or the current directory.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        root = ctx.find_root()
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            for option in root.command.params:
                if error.option_name in option.opts and option.metavar:
                    here = ctx.command_path.removeprefix(f"{root.command_path} ")
                    words = f"{root.command_path} {error.option_name} {option.metavar} {here}"
                    raise InputError(
                        f"{error.option_name} goes before the command: {words} ..."
                    ) from None
            raise
        except click.UsageError as error:  # of an option without its word click tells no command
            error.ctx = error.ctx or ctx
            raise
        for parameter in () if ctx.resilient_parsing else self.params:  # a shell that completes
            value = ctx.params.get(parameter.name or "")
            if value == "" or (isinstance(value, tuple) and "" in value):
                argument = isinstance(parameter, click.Argument)
                named = (argument and parameter.metavar) or parameter.opts[0]
                without = "" if parameter.required else ", or leave it out"
                raise InputError(f"{named.strip('[]')}: is empty; give a word{without}")
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        for name in {"job_id", "resume"} & ctx.params.keys():
            if word := ctx.params[name]:
                from launcher.tracking import full_id

                ctx.params[name] = full_id(word, settings_of(ctx))
        return super().invoke(ctx)


class Group(Command, click.Group):
    """A group of such commands."""

    command_class = Command
    group_class = type


def finite(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """Refuses NaN, which is in every range of click's, and infinity."""
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.", context, parameter)
    return value


JSON = click.option("--json", "as_json", is_flag=True, help="For scripts.")


def complete_job(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Ids of the jobs on this machine, for a shell that completes one."""
    from launcher.settings import load_settings

    names = sorted(path.name for path in load_settings().jobs_dir.glob("sm-nanogpt-*"))
    return [name for name in names if name.startswith(incomplete)]


YES = click.option("--yes", is_flag=True, help="Do not ask.")
JOB_ID = click.argument("job_id", metavar="JOB-ID", shell_complete=complete_job)


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="sm-nanogpt")
@click.option(
    "--store",
    metavar="URL",
    help="s3://bucket/prefix or a directory (default: SM_NANOGPT_STORE, else config.toml's, else"
    " the stack's, else ~/.sm-nanogpt/store, or for SageMaker the account's default bucket).",
)
@click.option("--region", metavar="NAME", help="AWS region (default: the AWS configuration's).")
@click.option("--profile", metavar="NAME", help="AWS profile.")
@click.option(
    "--role", metavar="ARN", help="The role that SageMaker acts as (default: the stack's)."
)
@click.option(
    "--stack",
    metavar="NAME",
    help="What `infra deploy` made, with store and role (default: sm-nanogpt).",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(context: click.Context, debug: bool, **settings: str | None) -> None:
    """Train a GPT of your own, and sample from it, in three commands.

    \b
    Example:
      sm-nanogpt upload-data input.txt
      sm-nanogpt launch                      (on SageMaker; --instance local: here)
      sm-nanogpt fetch-and-sample JOB-ID

    A JOB-ID may be given by its beginning or its end, if no other job has that, or as `latest`.
    """
    context.obj = settings


@cli.command("upload-data")
@click.argument("path", metavar="[PATH]", required=False)
@click.option("--corpus", metavar="NAME", help="A text to begin with: shakespeare or python-docs.")
@JSON
@click.pass_context
def upload_data_command(
    context: click.Context, path: str | None, corpus: str | None, as_json: bool
) -> None:
    """Put text into the store and print its URI.

    PATH is a text file, or a directory of *.txt files. Without one, tiny Shakespeare is fetched, or
    the Python reference where that cannot be had. Text that is there already is not sent again.

    \b
    Example:
      sm-nanogpt upload-data input.txt
    """
    from launcher.corpus import find_text, upload_data
    from launcher.storage import path_of

    if path is not None and corpus is not None:
        raise InputError("give a PATH or --corpus, not both")
    settings = settings_of(context)
    if path is None:
        path = str(built_in_text(corpus, settings))
    if path.partition("://")[0] in ("http", "https", "s3"):
        raise InputError(f"{path}: download it first; upload-data takes a file or a directory")
    source = path_of(path)
    total = sum(file.stat().st_size for _, file in find_text(source))
    with byte_progress("upload", total) as progress:
        upload = upload_data(source, settings, progress, tell=note)
    note(
        f"{len(upload.files)} file{'s' * (len(upload.files) > 1)}, {upload.size:,} bytes,"
        f" {upload.characters:,} characters, {upload.vocabulary_size} different ones"
    )
    if not upload.uploaded:
        note("unchanged since it was uploaded; nothing was sent")
    if as_json:
        print_json(upload)
    else:
        click.echo(upload.uri)
    near = upload.uri.startswith("file:")
    note(f"next: {settings.command('launch --instance local' if near else 'launch')}")


def built_in_text(corpus: str | None, settings: Settings) -> Path:
    """The named corpus; without a name Shakespeare, or what every Python holds."""
    from launcher.corpus import get_corpus

    with byte_progress("download") as progress:
        try:
            return get_corpus(corpus or "shakespeare", settings, progress)
        except ServiceError as error:
            if corpus is not None:
                raise
            reason = error
    note(f"tiny Shakespeare cannot be had ({reason}); taking the Python reference instead")
    return get_corpus("python-docs", settings)


def pairs(
    context: click.Context | None, parameter: click.Parameter, words: tuple[str, ...]
) -> dict[str, str]:
    """{'n_layer': '6'} of ('n_layer=6',); a callback of options."""
    option, values = parameter.opts[0], dict[str, str]()
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise InputError(f"{option} {word}: must be name=value")
        name = name.replace("-", "_") if option == "--set" else name
        if name in values:
            raise InputError(f"{option} {name}: given twice ({values[name]!r} and {value!r})")
        values[name] = value
    return values


class CloudOption(click.Option):
    """An option of `launch` that is for jobs on SageMaker alone."""


cloud_option = partial(click.option, cls=CloudOption)


class LaunchCommand(Command):
    """A command whose help sets these options apart."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, cloud in (("Options", False), ("Options for SageMaker alone", True)):
            chosen = [p for p in self.get_params(ctx) if isinstance(p, CloudOption) is cloud]
            with formatter.section(title):
                formatter.write_dl([row for p in chosen if (row := p.get_help_record(ctx))])


@cli.command("launch", cls=LaunchCommand)
@click.option(
    "--instance",
    metavar="TYPE[,TYPE...]",
    help="A SageMaker type; up to five, and the job runs on the first that AWS has free; or local:"
    " this machine (default: ml.g5.12xlarge, or as --resume's).",
)
@click.option("--instance-count", metavar="N", type=int, help="Hosts (default: 1).")
@click.option(
    "--processes-per-instance",
    metavar="K",
    type=int,
    help="local: processes per host without GPUs (default: the fastest); with GPUs one for each.",
)
@click.option(
    "--data",
    metavar="URI|PATH",
    help="Text to train on, on S3 or here (default: the last upload).",
)
@click.option(
    "--validation",
    metavar="URI|PATH",
    help="Text to validate on (default: the last tenth).",
)
@click.option(
    "--preset",
    metavar="NAME",
    help="cpu (a minute on a CPU; its sizes are the default), quick (seconds), laptop (three"
    " minutes) or baby (default of SageMaker's GPU types).",
)
@click.option(
    "--set",
    "assignments",
    metavar="KEY=VALUE",
    multiple=True,
    callback=pairs,
    help="A hyperparameter; `python -m entry_point.train --help` lists them.",
)
@click.option("--config", "config_file", metavar="FILE", help="Hyperparameters in TOML.")
@click.option("--entry-point", metavar="FILE", help="Your own edited copy of train.py.")
@click.option(
    "--resume",
    metavar="JOB-ID",
    shell_complete=complete_job,
    help="Go on from an earlier job's checkpoints.",
)
@click.option(
    "--follow/--detach",
    default=None,
    help="Show the log until the end (default: local), or come back at once (SageMaker).",
)
@click.option("--dry-run", is_flag=True, help="Print the request to SageMaker; send nothing.")
@YES
@cloud_option(
    "--launcher",
    type=click.Choice(["pytorchddp", "torchrun"]),
    help="What starts the ranks on SageMaker (default: pytorchddp; torchrun on ml.p5.48xlarge).",
)
@cloud_option("--pytorch-version", metavar="V", help="Of AWS's image (default: 2.10.0).")
@cloud_option("--image-uri", metavar="URI", help="A container image of your own.")
@cloud_option("--max-run", metavar="SECONDS", type=int, help="Time limit (default: 3600).")
@cloud_option(
    "--max-cost",
    metavar="USD",
    type=float,
    help="Sets the time limit by what it may cost, with the jobs that it resumes.",
)
@cloud_option(
    "--spot/--on-demand",
    default=None,
    help="Spot capacity: cheaper; goes on later (default: on demand, or as --resume's).",
)
@cloud_option(
    "--max-wait",
    metavar="SECONDS",
    type=int,
    help="With --spot, waiting included (default: 2 x max-run, 28 days at most).",
)
@cloud_option("--keep-alive", metavar="SECONDS", type=int, help="Keep the machines warm after.")
@cloud_option(
    "--volume-size",
    metavar="GIB",
    type=int,
    help="Disk of each host, on a type without disks of its own (default: 50).",
)
@cloud_option(
    "--environment",
    metavar="KEY=VALUE",
    multiple=True,
    callback=pairs,
    help="A variable in the container.",
)
@cloud_option(
    "--tag",
    "tags",
    metavar="KEY=VALUE",
    multiple=True,
    callback=pairs,
    help="A tag of the job.",
)
@cloud_option("--kms-key", metavar="KEY", help="Encrypts the job's volumes and its output.")
@cloud_option(
    "--subnet",
    "subnets",
    metavar="ID",
    multiple=True,
    help="Of your own VPC, with a way to S3: a NAT gateway, or an S3 endpoint.",
)
@cloud_option(
    "--security-group",
    "security_group_ids",
    metavar="ID",
    multiple=True,
    help="Goes with --subnet; for several hosts it lets in what comes from itself.",
)
@cloud_option(
    "--network-isolation/--no-network-isolation",
    default=None,
    help="No network in the job (default: as config.toml or --resume's job has it, else off).",
)
@cloud_option(
    "--encrypt-traffic/--no-encrypt-traffic",
    default=None,
    help="Encrypts what several hosts send each other, which is slower (default: as config.toml or"
    " --resume's job has it, else off).",
)
@click.pass_context
def launch_command(
    context: click.Context,
    assignments: dict[str, str],
    config_file: str | None,
    follow: bool | None,
    dry_run: bool,
    yes: bool,
    **fields: Any,
) -> None:
    """Start a training and print its id.

    Ctrl-C while following stops a local job, which leaves a checkpoint to go on from; a job on
    SageMaker goes on. SIGTERM, and SIGHUP of a closed terminal, count as Ctrl-C.

    \b
    Example:
      sm-nanogpt launch --instance local --processes-per-instance 2 --set max_steps=500
      sm-nanogpt launch --instance ml.g5.12xlarge --spot --dry-run
      sm-nanogpt launch --instance ml.g5.12xlarge,ml.g6.12xlarge
    """
    from launcher.documents import read_toml
    from launcher.job import TrainingJob
    from launcher.submission import naming, new_job_id, prepare

    from_file = read_toml(Path(config_file)) if config_file else {}
    said = {name: value for name, value in fields.items() if value not in (None, (), {})}
    settings = settings_of(context)
    if "resume" not in said:
        said.setdefault("instance", "ml.g5.12xlarge")
    job = TrainingJob(**said, hyperparameters={**from_file, **assignments})
    with byte_progress("upload") as progress:
        ready, backend, settings = prepare(job, settings, progress, dry_run, tell=note)
    local, job_id = ready.instance == "local", new_job_id()
    if dry_run:
        print_json(backend.request(job_id, ready))
        return
    costs_much = not local and (ready.worst_cost or math.inf) > settings.ask_above
    if costs_much and sys.stdin.isatty():
        agree("Launch it?", yes)
    with naming(job_id, settings):
        backend.submit(job_id, ready)
        try:
            click.echo(job_id)
            sys.stdout.flush()
        except OSError as error:
            silence(sys.stdout)  # which would say the same again at the end
            raise ServiceError(
                f"{error.strerror or error}: the id of the job cannot be printed; it is"
                f" {job_id}, and `{settings.command(f'stop {job_id}')}` stops it"
            ) from None
    if link := backend.console_link(job_id):
        note(f"console: {link}")
    if follow or (follow is None and local):
        follow_job(job_id, settings, stops=local)
    else:
        fetch = settings.command(f"fetch-and-sample {job_id}")
        note(f"{how_to_follow(job_id, settings)}; then: {fetch}")


def how_to_follow(job_id: str, settings: Settings) -> str:
    return f"`{settings.command(f'logs {job_id} --follow')}` follows it"


def follow_job(job_id: str, settings: Settings, stops: bool) -> None:
    """Shows a job's log on stderr to its end; Ctrl-C stops the job, or only the showing, and so
    does it when the log's reader leaves."""
    from launcher.tracking import describe, explain, logs, next_step, stop, wait

    try:
        for line in logs(job_id, follow=True, settings=settings, tell=note):
            note(line)
    except (KeyboardInterrupt, BrokenPipeError) as error:
        if isinstance(error, BrokenPipeError):
            silence(sys.stderr)
        if not stops:
            note(f"the job goes on; {how_to_follow(job_id, settings)}")
            return
        if describe(job_id, settings).is_running:
            stop(job_id, settings)
        # Only now, as nothing can be said where the terminal was closed.
        note("stopping the job; it writes a checkpoint first (Ctrl-C again ends it at once)")
        try:
            wait(job_id, settings)
        except KeyboardInterrupt:
            with suppress(ServiceError):  # it has just ended
                stop(job_id, settings)
    description = wait(job_id, settings, tell=note)
    if description.status != "Completed":
        raise ServiceError(explain(description, settings))
    note(next_step(description, settings))


@cli.command("copy-script")
@click.argument("file", metavar="[FILE]", type=click.Path(path_type=Path), default="my_train.py")
@click.pass_context
def copy_script_command(context: click.Context, file: Path) -> None:
    """Write a copy of train.py to FILE (default: my_train.py), to edit the model or the recipe.

    \b
    Example:
      sm-nanogpt copy-script my_train.py
      sm-nanogpt launch --instance local --entry-point my_train.py
    """
    from launcher.job import TrainingJob

    content = TrainingJob().script.read_bytes()
    try:
        with file.open("xb") as copy:
            copy.write(content)
    except FileExistsError:
        raise InputError(f"{file} exists; name another file") from None
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    click.echo(file)
    launch = settings_of(context).command(f"launch --instance local --entry-point {file}")
    note(f"edit it, then: {launch}")


@cli.command("fetch-and-sample")
@JOB_ID
@click.option("--prompt", metavar="TEXT", help="What the text begins with (default: a new line).")
@click.option(
    "--max-new-tokens",
    metavar="N",
    type=click.IntRange(min=1),
    default=500,
    show_default=True,
    help="Characters to make.",
)
@click.option(
    "--num-samples",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Texts to make.",
)
@click.option(
    "--temperature",
    metavar="T",
    type=click.FloatRange(min=0),
    callback=finite,
    default=0.8,
    show_default=True,
    help="0: always the most likely.",
)
@click.option(
    "--top-k",
    metavar="K",
    type=click.IntRange(min=0),
    default=0,
    help="Choose among the K most likely (default: all).",
)
@click.option(
    "--top-p",
    metavar="P",
    type=click.FloatRange(min=0, max=1, min_open=True),
    callback=finite,
    default=1.0,
    help="Choose among the likeliest P of probability (default: 1).",
)
@click.option(
    "--seed",
    metavar="S",
    type=click.IntRange(min=0, max=2**63 - 1),
    default=1337,
    show_default=True,
    help="The same seed, the same text.",
)
@click.option(
    "--entry-point",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The edited train.py that trained the model (default: the job's, if it is here).",
)
@JSON
@click.pass_context
def fetch_and_sample_command(
    context: click.Context,
    job_id: str,
    prompt: str | None,
    max_new_tokens: int,
    num_samples: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    entry_point: Path | None,
    as_json: bool,
) -> None:
    """Fetch a job's model and print text that it makes, as it makes it.

    \b
    Example:
      sm-nanogpt fetch-and-sample JOB-ID --prompt "ROMEO:" --num-samples 2
    """
    from launcher.artefacts import fetch_described, script_finder
    from launcher.tracking import describe

    settings = settings_of(context)
    description = describe(job_id, settings)
    with byte_progress("fetch") as progress:
        directory = fetch_described(description, settings, progress, entry_point)
    if description.model_uri is None:
        note(
            f"job {job_id} is {description.status}; this is its latest checkpoint, {directory.name}"
        )
    note(f"model: {directory}")
    from launcher.sampling import is_edited, load_model, stream_samples

    find_script = script_finder(description, settings, entry_point)
    model, vocabulary = load_model(directory, find_script, own_script=entry_point is not None)
    if is_edited(model):
        note("sampled by the edited script that trained it: slower, and computed as it was trained")
    if temperature == 0 and prompt is None:
        note("at temperature 0 a text without a --prompt tends to repeat one character")
    columns = stream_samples(
        model, vocabulary, prompt, max_new_tokens, num_samples, temperature, top_k, top_p, seed
    )
    if as_json:
        texts = ["".join(text) for text in zip(*columns, strict=True)]
        print_json([(prompt or "") + text for text in texts])
        return
    # The first text is shown as it is made; the others, made beside it, follow.
    others = [prompt or ""] * (num_samples - 1)
    click.echo(prompt or "", nl=False)
    for column in columns:
        click.echo(column[0], nl=False)
        others = [text + character for text, character in zip(others, column[1:], strict=True)]
    click.echo()
    for text in others:
        click.echo(f"---\n{text}")


@cli.command("jobs")
@JSON
@click.pass_context
def jobs_command(context: click.Context, as_json: bool) -> None:
    """List the jobs, newest first.

    \b
    Example:
      sm-nanogpt jobs
    """
    from launcher.tracking import jobs_and_failure, with_costs

    settings = settings_of(context)
    unread: list[str] = []

    def tell(line: str) -> None:
        unread.append(line)
        note(line)

    found, failure = jobs_and_failure(settings, tell)
    try:
        found = with_costs(found, settings, note)
    except (InputError, ServiceError) as error:
        failure = failure or error
    if as_json:
        print_json(found)
    elif found or not (failure or unread):
        print_jobs(found, settings)
    if failure is not None:
        raise failure


def print_jobs(found: list[JobDescription], settings: Settings) -> None:
    from launcher.aws.money import usd

    if not found:
        note(f"no jobs yet: {settings.command('launch --instance local')}")
        return
    row = "{:<33} {:<10} {:<18} {:<16} {:>11} {:>9} {:>7} {:>10}  {}"
    heads = ("JOB-ID", "STATE", "INSTANCE", "CREATED", "STEP", "BEST LOSS", "MODEL", "COST", "DATA")
    click.echo(row.format(*heads))
    for d in found:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(d.created))
        step, loss = progress_words(d)
        instance = d.instance if d.instance_count == 1 else f"{d.instance_count} x {d.instance}"
        cost = "-" if d.cost is None else usd(d.cost)
        # layers x width
        model = "{n_layer}x{n_embd}".format_map(defaultdict(lambda: "?", d.hyperparameters))
        data = d.data.rstrip("/").rpartition("/")[2]
        cells = (d.job_id, d.status, instance, created, step, loss, model, cost, data)
        click.echo(shown(row.format(*cells)))


def progress_words(description: JobDescription) -> tuple[str, str]:
    metrics = description.metrics or {}
    step = f"{metrics['step']:.0f}/{metrics['max_steps']}" if "step" in metrics else "-"
    loss = metrics.get("best_loss", metrics.get("val_loss"))
    return step, "-" if loss is None else f"{loss:.4f}"


@cli.command("status")
@JOB_ID
@JSON
@click.pass_context
def status_command(context: click.Context, job_id: str, as_json: bool) -> None:
    """Show how a job stands.

    \b
    Example:
      sm-nanogpt status JOB-ID
    """
    from launcher.tracking import describe, logs, next_step, reason_of, with_costs

    settings = settings_of(context)
    (d,) = with_costs([describe(job_id, settings)], settings, note)
    if as_json:
        print_json(d)
        return
    step, loss = progress_words(d)
    lines = {
        "job": d.job_id,
        "state": d.state,
        "reason": reason_of(d),
        "instance": f"{d.instance_count} x {d.instance}",
        "created": moment(d.created),
        "started": moment(d.started),
        "ended": moment(d.ended),
        "data": d.data,
        "step": step,
        "best loss": loss,
        "model": d.model_uri,
        "checkpoints": d.checkpoint_uri,
        "billable": billable_words(d),
        "cost": paid_words(d),
        "message": d.message if d.is_running else None,
    }
    print_fields(lines)
    if not d.is_running:
        note(next_step(d, settings))
    last = deque(logs(job_id, settings=settings), maxlen=10) if d.status == "Failed" else ()
    if last:
        click.echo("its last lines:")
    for line in last:
        click.echo(shown(f"  {line if len(line) <= 200 else line[:199] + '…'}"))


def billable_words(description: JobDescription) -> str | None:
    """The seconds that SageMaker bills, and what spot capacity saved of them."""
    billable, trained = description.billable_seconds, description.training_seconds
    if billable is None:
        return None
    saving = f", {1 - billable / trained:.0%} saved by spot" if description.spot and trained else ""
    return f"{billable} s{saving}"


def paid_words(description: JobDescription) -> str | None:
    """What a job has cost, and by which price."""
    from launcher.aws.instances import has_local_storage
    from launcher.aws.money import usd

    if description.cost is None or description.price is None:
        return None
    so_far = " so far (by the clock)" if description.is_running else ""
    if description.has_open_pool:
        so_far = f" so far, with all {description.keep_alive} s of its warm pool"
    price = f"{usd(description.price.per_hour)} an hour of an instance"
    if not has_local_storage(description.instance):
        price += " and its disk beside"
    return f"{usd(description.cost)}{so_far}, at {price} ({description.price.source})"


def moment(seconds: float | None) -> str | None:
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


@cli.command("logs")
@JOB_ID
@click.option("--follow", is_flag=True, help="Go on until the job ends.")
@click.option("--tail", metavar="N", type=click.IntRange(min=0), help="The last N lines alone.")
@click.option("--raw", is_flag=True, help="All lines of the containers, SageMaker's own too.")
@click.pass_context
def logs_command(
    context: click.Context, job_id: str, follow: bool, tail: int | None, raw: bool
) -> None:
    """Print what the script of a job printed.

    \b
    Example:
      sm-nanogpt logs JOB-ID --follow
      sm-nanogpt logs JOB-ID --tail 20
    """
    from launcher.tracking import logs

    if follow and tail is not None:
        raise InputError("--tail does not go with --follow")
    try:
        lines = logs(job_id, follow, settings_of(context), tell=note, raw=raw)
        for line in lines if tail is None else deque(lines, maxlen=tail):
            click.echo(line)
    except KeyboardInterrupt:
        if not follow:
            raise
        note("the job goes on")


@cli.command("wait")
@JOB_ID
@click.pass_context
def wait_command(context: click.Context, job_id: str) -> None:
    """Wait until a job has ended; exit code 0 if it completed.

    \b
    Example:
      sm-nanogpt wait JOB-ID && sm-nanogpt fetch-and-sample JOB-ID
    """
    from launcher.tracking import explain, wait

    settings = settings_of(context)
    try:
        description = wait(job_id, settings, tell=note)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the waiting alone; the job is not stopped") from None
    if description.status != "Completed":
        raise ServiceError(explain(description, settings))
    note(f"job {job_id} completed")


@cli.command("stop")
@JOB_ID
@click.pass_context
def stop_command(context: click.Context, job_id: str) -> None:
    """Stop a running job. A local one writes a checkpoint first; SageMaker keeps the newest.

    \b
    Example:
      sm-nanogpt stop JOB-ID
    """
    from launcher.tracking import explain, stop, wait

    settings = settings_of(context)
    local = stop(job_id, settings).instance == "local"
    note(f"stopping; {'it writes a checkpoint first' if local else 'this may take two minutes'}")
    description = wait(job_id, settings, tell=note)
    if description.status == "Failed":
        raise ServiceError(explain(description, settings))
    note(explain(description, settings))


@cli.command("doctor")
@click.option(
    "--instance",
    metavar="TYPE",
    default="ml.g5.12xlarge",
    show_default=True,
    help="For jobs on which; local: this machine alone.",
)
@click.option("--no-train", is_flag=True, help="Leave out the training of a tiny model.")
@JSON
@click.pass_context
def doctor_command(context: click.Context, instance: str, no_train: bool, as_json: bool) -> None:
    """Check this machine and the AWS account, and say what to do. Exit code 1: something failed.

    \b
    Example:
      sm-nanogpt doctor --instance ml.g5.xlarge
    """
    from launcher.aws.instances import check_instance
    from launcher.doctor import FAILURE, WARNING, examine

    settings = settings_of(context)
    check_instance(instance)

    def show(result: str, check: str, text: str) -> None:
        click.echo(shown(f"{result:<8} {check + ':':<15} {text}"))
        sys.stdout.flush()

    findings, left_out = [], []
    for finding in examine(settings, instance, train=not no_train):
        findings.append(finding)
        if as_json or (no_train and finding.check == "local training"):  # as was asked for
            continue
        if finding.left_out:
            left_out.append(finding.check)
        else:
            show(finding.result, finding.check, finding.text)
    if as_json:
        print_json(findings)
    if left_out:
        show(WARNING, "not checked", f"{', '.join(left_out)} (for want of what failed)")
    failed = [finding.check for finding in findings if finding.result == FAILURE]
    if failed and instance != "local" and not settings.reaches_aws:
        note(f"`{settings.command('doctor --instance local')}` checks this machine alone")
    if failed:
        raise ServiceError(f"failed: {', '.join(failed)}")


STACK = click.option("--stack", metavar="NAME", help="The stack's name (default: sm-nanogpt).")


@cli.group("infra")
def infra_group() -> None:
    """Make what jobs on SageMaker need in an AWS account: a bucket, a role, a policy.

    They are one CloudFormation stack. Once it is there, the other commands find bucket and role.

    \b
    Example:
      sm-nanogpt infra deploy
    """


@infra_group.command("deploy")
@STACK
@click.option("--kms", is_flag=True, help="With a key of your own, which costs 1 USD a month.")
@click.option("--vpc", is_flag=True, help="Let jobs run in a VPC of your own (--subnet).")
@click.option("--dry-run", is_flag=True, help="Only show what would change.")
@YES
@click.pass_context
def infra_deploy_command(
    context: click.Context, stack: str | None, kms: bool, vpc: bool, dry_run: bool, yes: bool
) -> None:
    """Make the stack, or bring it up to date, and print its outputs.

    \b
    Example:
      sm-nanogpt infra deploy --dry-run
      sm-nanogpt --region eu-west-1 infra deploy
    """
    from launcher.aws.infra import Deployment

    can_ask(yes or dry_run)
    deployment = Deployment(settings_of(context, stack=stack), note)
    if left := deployment.left_over():
        note(f"stack {deployment.name} is {left.status}; what is left of it is deleted first")
        if dry_run:
            show_removal(left)
            note("a dry run: nothing was changed; the stack would be made anew after that")
            return
        remove_stack(deployment, left, yes)
    planned = deployment.plan(kms, vpc)
    if planned is None:
        note(f"stack {deployment.name}: nothing to change")
        print_stack(deployment.show())
        return
    try:
        for change in planned.changes:
            note(f"{change.action:<8} {change.kind} {change.resource}")
        if not dry_run:
            place = account_and_region(planned.stack_id)
            agree(f"Make this in {place}, as stack {deployment.name}?", yes)
    except BaseException:
        try:
            deployment.discard(planned)
        except ServiceError as error:  # beside what went wrong first
            note(f"the change set is left in AWS: {error}")
        raise
    if dry_run:
        deployment.discard(planned)
        note("a dry run: nothing was changed")
        return
    made = deployment.execute(planned)
    print_stack(made)
    note(f"whoever else launches jobs needs the policy {made.policy}")
    note(f"next: {deployment.settings.command('upload-data')}")


@infra_group.command("show")
@STACK
@JSON
@click.pass_context
def infra_show_command(context: click.Context, stack: str | None, as_json: bool) -> None:
    """Print what the stack gives to the other commands.

    \b
    Example:
      sm-nanogpt infra show
    """
    from launcher.aws.infra import Deployment

    found = Deployment(settings_of(context, stack=stack), note).show()
    if as_json:
        print_json(found)
    else:
        print_stack(found)


@infra_group.command("destroy")
@STACK
@YES
@click.pass_context
def infra_destroy_command(context: click.Context, stack: str | None, yes: bool) -> None:
    """Delete the stack. The bucket stays, with its texts and models, and so does the key.

    \b
    Example:
      sm-nanogpt infra destroy
    """
    from launcher.aws.infra import Deployment

    can_ask(yes)
    deployment = Deployment(settings_of(context, stack=stack), note)
    removal = deployment.removal()
    if removal is None:
        note(f"there is no stack {deployment.name} in {deployment.region}; nothing to delete")
        return
    remove_stack(deployment, removal, yes)


def show_removal(removal: Removal) -> None:
    for action, resources in (("keep", removal.kept), ("remove", removal.removed)):
        for _, kind, place in resources:
            note(f"{action:<8} {kind} {place}")
    for kind, name in removal.holders:
        note(f"detach   the launcher policy from {kind.lower()} {name}")
    for job_id in removal.jobs:
        note(f"warning: job {job_id} is running; without its role it ends without a model")


def remove_stack(deployment: Deployment, removal: Removal, yes: bool) -> None:
    """Deletes a stack if the person agrees, and says how to delete what is kept."""
    show_removal(removal)
    agree(f"Delete stack {deployment.name} in {account_and_region(removal.stack_id)}?", yes)
    deployment.destroy(removal)
    kept = {name: place for name, _, place in removal.kept}
    if "Bucket" in kept:
        note(f"the bucket is kept; to delete it: aws s3 rb --force s3://{kept['Bucket']}")
    if "Key" in kept:
        note(
            "the key is kept, without which the bucket cannot be read; to delete it:"
            f" aws kms schedule-key-deletion --key-id {kept['Key']}"
        )


def account_and_region(arn: str) -> str:
    """Where the thing behind an ARN is."""
    _, _, _, region, account, _ = arn.split(":", 5)
    return f"account {account}, {region}"


def can_ask(settled: bool) -> None:
    """Raises InputError where a question would find nobody to answer."""
    if not settled and not sys.stdin.isatty():
        raise InputError("this is not an interactive terminal; pass --yes to confirm")


def agree(question: str, yes: bool) -> None:
    """Goes on if the person agrees; else click's Exit ends the command, with exit code 1."""
    if not yes and not click.confirm(question, err=True):
        note("not confirmed; nothing was done")
        raise click.exceptions.Exit(1)


def print_stack(stack: Stack) -> None:
    lines = {
        "stack": f"{stack.name} ({stack.status})",
        "store": stack.store,
        "role": stack.role,
        "kms key": stack.kms_key,
        "vpc": "jobs may run in one" if stack.vpc else None,
        "policy": stack.policy,
    }
    print_fields(lines)


def run(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    if instruction := os.environ.get("_SM_NANOGPT_COMPLETE"):  # a shell that completes a word
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "sm-nanogpt", "_SM_NANOGPT_COMPLETE", instruction)
    words = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in words  # wherever it stands
    try:
        if sys.stdout is None:  # as `>&-` leaves it
            raise InputError(
                "stdout is closed, so that no id or result can be told; `>/dev/null` drops them"
            )
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Of a text that the terminal cannot show, what it can: not its beginning alone.
            sys.stdout.reconfigure(errors="backslashreplace")
        # Not cli.main, which makes a failure of a pipe whose reader has left.
        with (
            signals_as_ctrl_c(),
            cli.make_context(
                "sm-nanogpt", [word for word in words if word != "--debug"]
            ) as context,
        ):
            cli.invoke(context)
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
        silence(sys.stdout)  # that is no failure
        return 0
    except Exception as error:
        if debug and not isinstance(error, click.ClickException):
            traceback.print_exc()
        note(f"error: {' '.join(told(error).splitlines())}")
        return 2 if isinstance(error, (InputError, click.ClickException)) else 1


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """What `timeout`, a CI, or a terminal that closes sends would end this process without a word,
    and leave behind what it was about. What is ignored stays so, as `nohup` has it."""
    if threading.current_thread() is not threading.main_thread():  # signals are for that alone
        yield
        return
    before = {sign: signal.getsignal(sign) for sign in (signal.SIGTERM, signal.SIGHUP)}

    def interrupt(*_: object) -> NoReturn:
        for sign in before:
            signal.signal(sign, signal.SIG_IGN)  # `timeout` sends it twice
        raise KeyboardInterrupt

    for sign, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(sign, interrupt)
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def silence(stream: TextIO) -> None:
    """Lets nothing more fail that is said to a reader who has left, as `| head` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def told(error: Exception) -> str:
    if isinstance(error, click.ClickException):
        text = " ".join(error.format_message().split())
        if context := getattr(error, "ctx", None):
            text = f"{text.rstrip('.')}; `{context.command_path} --help` shows what there is"
        return text
    if isinstance(error, (InputError, ServiceError)):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"cannot write {error.filename or 'the result'}: {error.strerror}"
    return f"{type(error).__name__}: {error}; `sm-nanogpt --debug ...` shows where"


def main() -> NoReturn:
    sys.exit(run())


if __name__ == "__main__":
    main()
