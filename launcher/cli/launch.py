"""The commands `launch` and `copy-script`."""

from __future__ import annotations

import math
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from launcher.cli.options import YES, Command, Job, agree_to_cost, settings_of, valued
from launcher.cli.show import (
    at_ctrl_c,
    explain,
    following,
    next_step,
    note,
    print_json,
    print_text,
    silence,
)
from launcher.cli.words import command, remedy
from launcher.errors import InputError, ServiceError

if TYPE_CHECKING:
    from launcher.settings import Settings


@click.command("launch", cls=Command)
@valued(
    "--instance TYPE[,TYPE...]",
    "SageMaker instance type, or `local` for this machine. With up to five types, the job runs"
    " on the first with free capacity.",
)
@valued("--name NAME", "A name for the job, unique among yours, to use in place of its id.")
@valued("--instance-count N", "Number of hosts (default: 1).")
@valued(
    "--processes-per-instance N",
    "With local and no GPU: number of processes (default: the fastest).",
)
@valued("--data NAME|URI|PATH", "Text to train on (default: last upload).")
@valued("--validation NAME|URI|PATH", "Text to validate on (default: the last tenth of the data).")
@valued(
    "--preset NAME",
    "cpu (default; a minute on a CPU), quick (seconds), laptop (three minutes), baby (default"
    " on SageMaker GPU instances), small, gpt2 (124 M parameters), or auto (a size by the text).",
)
@valued(
    "--size N",
    "In place of a preset: a model 64 N wide, with all that follows from it (0.25 to 16).",
    type=float,
)
@valued(
    "--set assignments KEY=VALUE", "Set a hyperparameter; `sm-nanogpt hyperparameters` lists them."
)
@valued("--config config_file FILE", "TOML file of hyperparameters.", type=click.Path())
@valued("--entry-point DIR", "Your edited training folder.", type=click.Path())
@valued(
    "--init-from JOB-ID|PATH|URI",
    "Start from the weights of an earlier job, or of a Hugging Face directory of the Qwen3 family.",
)
@valued(
    "--teacher JOB-ID|PATH|URI",
    "Learn also from a model that you have, which has the same tokens.",
)
@valued(
    "--resume JOB-ID",
    "Continue from the checkpoints of an earlier job, with its options where you give none.",
    type=Job(acts=True, sweeps=True),
)
@click.option(
    "--follow/--detach",
    default=None,
    help="Print the log until the job ends (default for local), or return at once (default for"
    " SageMaker).",
)
@valued(
    "--sweep KEY=V1,V2,...",
    "Launch a job for each value of a hyperparameter, of size, or of preset; several --sweep make a"
    " grid.",
)
@valued("--seeds N", "Launch each job of a sweep with N seeds (default: 1).", default=1)
@valued("--parallel N", "Number of jobs of a sweep that run at a time (default: 1).")
@click.option("--dry-run", is_flag=True, help="Print the SageMaker request without sending it.")
@click.option(
    "--forecast",
    "forecasts",
    is_flag=True,
    help="Start nothing; in about two minutes here, find out what each size would be.",
)
@click.option("--json", "as_json", is_flag=True, help="With --forecast: print JSON.")
@YES
@click.option(
    "--launcher",
    type=click.Choice(["pytorchddp", "torchrun"]),
    help="How SageMaker starts the ranks (default: pytorchddp; torchrun on ml.p5.48xlarge).",
)
@valued("--pytorch-version V", "PyTorch version of the AWS image (default: 2.12.1).")
@valued("--image-uri URI", "Use your own container image.")
@valued("--max-run SECONDS", "Time limit (default: 3600).")
@valued(
    "--max-cost USD",
    "Stop before the job costs more. Counts the jobs that it resumes; for a sweep, all of its"
    " jobs.",
)
@click.option(
    "--spot/--on-demand",
    default=None,
    help="Spot is cheaper, and resumes after interruptions (default: on demand).",
)
@valued(
    "--max-wait SECONDS",
    "With --spot: limit for waiting and running (default: 2 x max-run, at most 28 days).",
)
@valued("--keep-alive SECONDS", "Keep a warm pool after the job.")
@valued("--volume-size GIB", "Disk per host, for instance types without local disks (default: 50).")
@click.option(
    "--input-mode",
    type=click.Choice(["File", "FastFile"]),
    help="Copy the text to each host before the job starts (File, the default), or read it from S3"
    " as the job goes (FastFile).",
)
@valued("--environment KEY=VALUE", "Set an environment variable in the container.")
@valued("--tag tags KEY=VALUE", "Tag the job.")
@valued("--kms-key KEY", "KMS key that encrypts the job's disks and output.")
@valued(
    "--subnet subnets ID",
    "Subnet of your VPC. It must reach S3, by a NAT gateway or an S3 endpoint.",
)
@valued(
    "--security-group security_group_ids ID",
    "Required with --subnet. For several hosts, it must allow traffic from itself.",
)
@click.option(
    "--network-isolation/--no-network-isolation",
    default=None,
    help="Run the job without network (default: from config.toml, else off).",
)
@click.option(
    "--encrypt-traffic/--no-encrypt-traffic",
    default=None,
    help="Encrypt traffic between hosts, which is slower (default: from config.toml, else off).",
)
@click.pass_context
def launch_command(
    context: click.Context,
    assignments: dict[str, str],
    config_file: str | None,
    follow: bool | None,
    sweep: dict[str, list[str]],
    seeds: int,
    parallel: int | None,
    dry_run: bool,
    forecasts: bool,
    as_json: bool,
    yes: bool,
    **fields: Any,
) -> None:
    """Start a training job and print its id.

    The options from --launcher on are for SageMaker only.

    Ctrl-C stops a local job after it writes a checkpoint. A job on SageMaker keeps running. SIGTERM
    and SIGHUP act as Ctrl-C.

    Example:
      sm-nanogpt launch --instance local --processes-per-instance 2 --set max_steps=500
      sm-nanogpt launch --instance ml.g5.12xlarge --spot --dry-run
      sm-nanogpt launch --instance ml.g5.12xlarge,ml.g6.12xlarge
      sm-nanogpt launch --instance local --sweep learning_rate=0.01,0.02 --seeds 2
      sm-nanogpt launch --forecast
    """
    from launcher.cli.forecast import show_forecast
    from launcher.cli.sweep import run_sweep
    from launcher.files.documents import read_toml
    from launcher.job import Request
    from launcher.launching.launch import prepare
    from launcher.launching.records import record_of, tail_of
    from launcher.launching.sweeps import continue_sweep, plan_sweep

    from_file = read_toml(Path(config_file)) if config_file else {}
    given = {name: value for name, value in fields.items() if value not in (None, (), {})}
    settings, resumed = settings_of(), given.get("resume", "")
    source = context.get_parameter_source
    typed = {name for name in context.params if source(name) == ParameterSource.COMMANDLINE}
    own = typed - {"forecasts", "as_json", *fields}
    other = [parameter.opts[0] for parameter in context.command.params if parameter.name in own]
    is_sweep = bool(resumed) and record_of(resumed, settings).exists()
    swept, problem = bool(sweep or seeds > 1), ""
    if forecasts and other:
        problem = f"{other[0]}: a forecast is for all sizes, without it"
    elif as_json and not forecasts:
        problem = "--json is for --forecast; a launch prints the id of the job"
    elif is_sweep and not forecasts and typed - {"resume", "max_cost", "parallel", "yes"}:
        only = "besides --resume, give only --max-cost, --parallel or --yes"
        problem = f"{resumed} is a sweep, which continues as it was launched: {only}"
    elif swept and follow is not None:
        problem = "--follow and --detach are not for sweeps, which run until all jobs ended"
    elif parallel and not (swept or is_sweep):
        problem = "--parallel is for jobs of a sweep; add --sweep or --seeds"
    elif dry_run and given.get("instance") == "local":
        problem = "--dry-run shows the request to SageMaker; --instance local sends none"
    if problem:
        raise InputError(problem)
    if forecasts:
        show_forecast(given, settings, as_json)
        return
    if is_sweep:
        run_sweep(continue_sweep(resumed, settings, given.get("max_cost"), parallel), yes)
        return
    if tail := tail_of(resumed):
        again = command("launch", "--resume", resumed.removesuffix(tail))
        note(f"{resumed} continues alone; its sweep continues with `{again}`")
    request = Request(**given, hyperparameters={**from_file, **assignments})
    if dry_run:
        settings = settings.with_offline(True)
    if swept:
        several = plan_sweep(request, settings, sweep, seeds, parallel or 1)
        if dry_run:
            print_json([each.request for each in several.plans.values()])
        else:
            run_sweep(several, yes)
        return
    plan = prepare(request, settings)
    job_id, job = plan.job_id, plan.job
    if dry_run:
        print_json(plan.request)
        return
    if not job.is_local:
        # Only a ceiling typed in this command is consent; not one that --resume inherits.
        agree_to_cost(job.worst_cost or math.inf, given.get("max_cost"), settings, yes)
    stops = f"`{command('stop', job_id)}` stops it"
    shows = f"`{command('status', job_id)}` shows whether the job was submitted"
    with at_ctrl_c(f"{shows}; {stops}"):
        plan.submit()
    try:
        click.echo(job_id)
    except OSError as error:
        silence(sys.stdout)  # else the flush at exit fails too
        problem = f"{error.strerror or error}: cannot print the job id, {job_id}"
        raise ServiceError(f"{problem}; {stops}") from None
    if link := plan.backend.console_link(job_id):
        note(f"console: {link}")
    if follow or (follow is None and job.is_local):
        follow_job(job_id, settings, stops=job.is_local)
    else:
        chats = any(channel.upload and channel.upload.chats for channel in plan.channels.values())
        then = command("chat" if chats else "fetch-and-sample", job_id)
        note(f"{remedy('job-goes-on', {'job_id': job_id})}; when it has completed: {then}")


def follow_job(job_id: str, settings: Settings, stops: bool) -> None:
    """Print a job's log to stderr until it ends.

    Ctrl-C, or a closed stderr, stops the job if `stops`, else only the printing.
    """
    from launcher.tracking import find, logs, stop, wait

    interrupted = False
    try:
        lines = logs(job_id, follow=True, settings=settings)
        for line in following(lines, job_id, settings):
            note(line)
    except (KeyboardInterrupt, BrokenPipeError) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if not interrupted:
            silence(sys.stderr)
        if not stops:
            note(f"the job keeps running; {remedy('job-goes-on', {'job_id': job_id})}")
            return
        if find(job_id, settings)[1].is_running:
            stop(job_id, settings)
        try:
            # Stop first: printing fails if the terminal was closed.
            note("stopping the job after a checkpoint; press Ctrl-C again to stop it at once")
            wait(job_id, settings)
        except KeyboardInterrupt:
            with suppress(ServiceError):  # it just ended
                stop(job_id, settings)
    description = wait(job_id, settings)
    if description.status != "Completed":
        stopped = description.status == "Stopped" and interrupted
        raise (KeyboardInterrupt if stopped else ServiceError)(explain(description, settings))
    note(next_step(description, settings))


@click.command("hyperparameters", cls=Command)
@valued("--entry-point DIR", "List those of your edited training folder.", type=click.Path())
def hyperparameters_command(entry_point: str | None) -> None:
    """List what `launch --set` takes: ranges and defaults.

    Example:
      sm-nanogpt hyperparameters
    """
    from launcher.source import Source

    source = Source.read(Path(entry_point)) if entry_point else Source.packaged()
    table = source.module("config").hyperparameter_table()
    print_text(table.strip("\n").replace("  --", "  "))


@click.command("copy-script", cls=Command)
@click.argument("directory", metavar="[DIR]", type=click.Path(path_type=Path), default="my_gpt")
@valued("--from search NAME", "The folder that a search has kept, from `try start NAME`.")
def copy_script_command(directory: Path, search: str | None) -> None:
    """Copy the training folder to DIR (default: my_gpt). Edit the model or the recipe there.

    Example:
      sm-nanogpt copy-script my_gpt
      sm-nanogpt launch --instance local --entry-point my_gpt
    """
    from launcher.source import Source

    source, folder = Source.packaged(), shlex.quote(str(directory))
    then = f"launch --instance local --entry-point {folder}"
    if search is not None:
        from launcher.trying.search import Search

        found = Search(search, settings_of(), note)
        source, then = found.source(found.ledger.base), f"try run {folder} --group {search}"
    try:
        directory.mkdir(parents=True)
        source.write(directory)
    except OSError as error:
        raise InputError(f"{directory}: {error.strerror}; name another directory") from None
    click.echo(directory)
    note(f"edit a file in {directory}; then")
    note(f"next: {command(then)}")
