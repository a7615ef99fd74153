"""The commands `launch` and `copy-script`."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.options import YES, Command, agree, complete_job, pairs, settings_of
from launcher.cli.show import byte_progress, note, print_json, silence
from launcher.errors import InputError, ServiceError

if TYPE_CHECKING:
    from launcher.settings import Settings


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


@click.command("launch", cls=LaunchCommand)
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
        ready = prepare(job, settings, progress, dry_run)
    job, settings = ready.job, ready.settings
    local, job_id = job.instance == "local", new_job_id()
    if dry_run:
        print_json(ready.request(job_id))
        return
    costs_much = not local and (job.worst_cost or math.inf) > settings.ask_above
    if costs_much and sys.stdin.isatty():
        agree("Launch it?", yes)
    with naming(job_id, settings):
        ready.submit(job_id)
        try:
            click.echo(job_id)
            sys.stdout.flush()
        except OSError as error:
            silence(sys.stdout)  # which would say the same again at the end
            raise ServiceError(
                f"{error.strerror or error}: the id of the job cannot be printed; it is"
                f" {job_id}, and `{settings.command(f'stop {job_id}')}` stops it"
            ) from None
    if link := ready.backend.console_link(job_id):
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
        for line in logs(job_id, follow=True, settings=settings):
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
    description = wait(job_id, settings)
    if description.status != "Completed":
        raise ServiceError(explain(description, settings))
    note(next_step(description, settings))


@click.command("copy-script", cls=Command)
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
