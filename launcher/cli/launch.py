"""The command `launch`."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sm_nanogpt.entry_point.errors import counted, os_reason
from sm_nanogpt.entry_point.metrics import duration
from sm_nanogpt.launcher.backends import LOCAL
from sm_nanogpt.launcher.cli.options import (
    PATH,
    YES,
    Command,
    JobParameter,
    agree_to_cost,
    complete_hyperparameter,
    complete_instance,
    complete_preset,
    settings_of,
    typed_parameters,
    value_option,
)
from sm_nanogpt.launcher.cli.remedies import command, remedy
from sm_nanogpt.launcher.cli.show import (
    at_ctrl_c,
    explain,
    next_step,
    note,
    print_json,
    silence,
    with_progress_bar,
)
from sm_nanogpt.launcher.errors import InputError, ServiceError

if TYPE_CHECKING:
    from sm_nanogpt.launcher.job import Request
    from sm_nanogpt.launcher.launching.launch import Plan
    from sm_nanogpt.launcher.settings import Settings


@click.command("launch", cls=Command)
@value_option(
    "--instance TYPE[,TYPE...]",
    "SageMaker instance type, or `local` for this machine. With up to five types, the job runs"
    " on the first with free capacity.",
    shell_complete=complete_instance,
)
@value_option("--name NAME", "A name for the job, new among yours, to use in place of its id.")
@value_option("--instance-count N", "Number of hosts (default: 1).")
@value_option(
    "--processes-per-instance N",
    "With local and no GPU: number of processes (default: the fastest).",
)
@value_option("--data NAME|URI|PATH", "Text to train on (default: last upload).")
@value_option(
    "--validation NAME|URI|PATH", "Text to validate on (default: the last tenth of the data)."
)
@value_option(
    "--preset NAME",
    "cpu (default; a minute on a CPU), quick (seconds), laptop (three minutes), baby (default"
    " on SageMaker GPU instances), small, gpt2 (124 M parameters), or auto (a size by the text).",
    shell_complete=complete_preset,
)
@value_option(
    "--size N",
    "In place of a preset: a model 64 N wide, with all that follows from it (0.25 to 16).",
    type=float,
)
@value_option(
    "--fit BYTES",
    "In place of a size: the largest one whose page, as `play --save` writes it, has at most so"
    " many bytes, such as 250kB or 1MB; all else is as with `--preset auto`.",
)
@value_option(
    "--set assignments KEY=VALUE",
    "Set a hyperparameter; `sm-nanogpt hyperparameters` lists them.",
    shell_complete=complete_hyperparameter,
)
@value_option("--config config_file FILE", "TOML file of hyperparameters.", type=PATH)
@value_option("--entry-point DIR", "Your edited training folder.", type=PATH)
@value_option(
    "--init-from JOB-ID|PATH|URI",
    "Start from the weights of an earlier job, or of a Hugging Face directory of the Qwen3 family.",
)
@value_option(
    "--teacher JOB-ID|PATH|URI",
    "Learn also from a model that you have, which has the same tokens.",
)
@value_option(
    "--resume JOB-ID",
    "Continue from the checkpoints of an earlier job, with its options where you give none.",
    type=JobParameter(acts=True, sweeps=True),
)
@click.option(
    "--follow/--detach",
    default=None,
    help="Print the log until the job ends (default for local), or return at once (default for"
    " SageMaker).",
)
@value_option(
    "--sweep KEY=V1,V2,...",
    "Launch a job for each value of a hyperparameter, of size, or of preset; several --sweep make a"
    " grid.",
    shell_complete=complete_hyperparameter,
)
@value_option("--seeds N", "Launch each job of a sweep with N seeds (default: 1).", default=1)
@value_option("--parallel N", "Number of jobs of a sweep that run at a time (default: 1).")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Start nothing; print as JSON what would run, on SageMaker the request.",
)
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
@value_option("--pytorch-version V", "PyTorch version of the AWS image (default: 2.12.1).")
@value_option("--image-uri URI", "Use your own container image.")
@value_option("--max-run SECONDS", "Time limit (default: 3600).")
@value_option(
    "--max-cost USD",
    "Stop before the job costs more. Counts the jobs that it resumes; for a sweep, all of its"
    " jobs.",
)
@click.option(
    "--spot/--on-demand",
    default=None,
    help="Spot is cheaper, and resumes after interruptions (default: on demand).",
)
@value_option(
    "--max-wait SECONDS",
    "With --spot: limit for waiting and running (default: 2 x max-run, at most 28 days).",
)
@value_option("--keep-alive SECONDS", "Keep a warm pool after the job.")
@value_option(
    "--volume-size GIB", "Disk per host, for instance types without local disks (default: 50)."
)
@click.option(
    "--input-mode",
    type=click.Choice(["File", "FastFile"]),
    help="Copy the text to each host before the job starts (File, the default), or read it from S3"
    " as the job goes (FastFile).",
)
@value_option("--environment KEY=VALUE", "Set an environment variable in the container.")
@value_option("--tag tags KEY=VALUE", "Tag the job.")
@value_option("--kms-key KEY", "KMS key that encrypts the job's disks and output.")
@value_option(
    "--subnet subnets ID",
    "Subnet of your VPC. It must reach S3, by a NAT gateway or an S3 endpoint.",
)
@value_option(
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
      sm-nanogpt launch --instance local --preset auto --dry-run
      sm-nanogpt launch --instance ml.g5.12xlarge --spot --dry-run
      sm-nanogpt launch --instance ml.g5.12xlarge,ml.g6.12xlarge
      sm-nanogpt launch --instance local --sweep learning_rate=0.01,0.02 --seeds 2
      sm-nanogpt launch --forecast
    """
    options = LaunchOptions(
        fields={name: value for name, value in fields.items() if value not in (None, (), {})},
        assignments=assignments,
        config_file=config_file,
        follow=follow,
        sweep=sweep,
        seeds=seeds,
        parallel=parallel,
        dry_run=dry_run,
        yes=yes,
        typed=typed_parameters(context),
    )
    settings = settings_of()
    if forecasts:
        from sm_nanogpt.launcher.cli.forecast import forecast_sizes

        forecast_sizes(context, options, settings, as_json)
    elif as_json:
        raise InputError("--json is for --forecast; a launch prints the id of the job")
    elif options.resumes_sweep(settings):
        resume_sweep(options, settings)
    elif options.is_sweep:
        launch_sweep(options, settings)
    else:
        launch_job(options, settings)


@dataclass(frozen=True)
class LaunchOptions:
    """The command line of `launch`.

    fields has the fields of a request, and typed the names of all parameters that were typed.
    """

    fields: dict[str, Any]
    assignments: dict[str, str]
    config_file: str | None
    follow: bool | None
    sweep: dict[str, list[str]]
    seeds: int
    parallel: int | None
    dry_run: bool
    yes: bool
    typed: set[str]

    @property
    def is_sweep(self) -> bool:
        return bool(self.sweep) or self.seeds > 1

    @property
    def resumed(self) -> str:
        return str(self.fields.get("resume", ""))

    def resumes_sweep(self, settings: Settings) -> bool:
        from sm_nanogpt.launcher.launching.names import ledger_path

        return bool(self.resumed) and ledger_path(self.resumed, settings).exists()

    def request(self) -> Request:
        """The request, with the hyperparameters of --config and --set."""
        from sm_nanogpt.launcher.files.documents import read_toml
        from sm_nanogpt.launcher.job import Request

        hyperparameters = {}
        if self.config_file:
            hyperparameters.update(read_toml(Path(self.config_file)))
        hyperparameters.update(self.assignments)
        return Request(**self.fields, hyperparameters=hyperparameters)


def resume_sweep(options: LaunchOptions, settings: Settings) -> None:
    """`launch --resume SWEEP`: run the jobs that have not completed."""
    from sm_nanogpt.launcher.cli.sweep import run_sweep
    from sm_nanogpt.launcher.groups.plan import continue_sweep

    group = options.resumed
    if options.typed - {"resume", "max_cost", "parallel", "yes"}:
        rule = "besides --resume, give only --max-cost, --parallel or --yes"
        raise InputError(f"{group} is a sweep, which continues as it was launched: {rule}")
    max_cost = options.fields.get("max_cost")
    plan = continue_sweep(group, settings, max_cost, options.parallel)
    run_sweep(plan, options.yes)


def launch_sweep(options: LaunchOptions, settings: Settings) -> None:
    """`launch --sweep`: run a job for each combination of values, or print their requests."""
    from sm_nanogpt.launcher.cli.sweep import run_sweep
    from sm_nanogpt.launcher.groups.plan import plan_sweep

    if options.follow is not None:
        rule = "are not for sweeps, which run until all jobs ended"
        raise InputError(f"--follow and --detach {rule}")
    request = options.request()
    if options.dry_run:
        settings = settings.with_offline(True)
    plan = plan_sweep(request, settings, options.sweep, options.seeds, options.parallel or 1)
    if options.dry_run:
        print_json([member.request for member in plan.plans.values()])
    else:
        run_sweep(plan, options.yes)


def launch_job(options: LaunchOptions, settings: Settings) -> None:
    """`launch`: start a job, print its id, and follow it if it runs here."""
    from sm_nanogpt.launcher.launching.launch import prepare

    if options.parallel:
        raise InputError("--parallel is for jobs of a sweep; add --sweep or --seeds")
    note_sweep_of(options.resumed)
    request = options.request()
    if options.dry_run:
        settings = settings.with_offline(True)
    plan = prepare(request, settings)
    if options.dry_run:
        print_json(plan.request)
        if not plan.backend.is_remote:
            note(f"dry run: nothing was started; {course_of(plan)}")
        return

    if plan.backend.bills:
        # Only a ceiling typed in this command is consent; not one that --resume inherits.
        max_cost = options.fields.get("max_cost")
        agree_to_cost(plan.worst_cost, max_cost, settings, options.yes)
    submit(plan)

    stops_at_ctrl_c = plan.backend.stops_at_ctrl_c
    follows = stops_at_ctrl_c if options.follow is None else options.follow
    if follows:
        follow_job(plan.job_id, settings, stops=stops_at_ctrl_c, costs=cost_note(plan))
    else:
        next_command = command("chat" if plan.is_of_chats else "fetch-and-sample", plan.job_id)
        goes_on = remedy("job-goes-on", {"job_id": plan.job_id})
        note(f"{goes_on}; when it has completed: {next_command}")


def course_of(plan: Plan) -> str:
    """The steps and the processes of a run on this machine, and its time if a forecast has it."""
    from sm_nanogpt.launcher.curve import total_steps
    from sm_nanogpt.launcher.launching.forecasts import forecast_rows

    n_steps = total_steps(plan.request["hyperparameters"]) or 0  # an edited folder may have none
    processes = counted(plan.request["processes_per_host"], "process")
    course = f"it would be {n_steps:,} steps in {processes}"
    if plan.job.resume is not None:
        course = f"it would go on to step {n_steps:,} in {processes}"
    if plan.job.expected is None:  # no run of a forecast
        return course
    for row in forecast_rows(plan.job, plan.channels, plan.settings):
        seconds = row.seconds.get(LOCAL)
        if row.size == plan.job.size and seconds is not None:
            course += f", and take about {duration(seconds)} by the forecast"
    return course


def note_sweep_of(job_id: str) -> None:
    """Say how a sweep continues, if a job of one is resumed."""
    from sm_nanogpt.launcher.launching.names import member_of

    member = member_of(job_id)
    if member is not None:
        again = command("launch", "--resume", member.sweep_id)
        note(f"{job_id} continues alone; its sweep continues with `{again}`")


def submit(plan: Plan) -> None:
    """Start a job, and print its id and the link to the console."""
    job_id = plan.job_id
    stops = f"`{command('stop', job_id)}` stops it{cost_note(plan)}"
    shows = f"`{command('status', job_id)}` shows whether the job was submitted"
    with at_ctrl_c(f"{shows}; {stops}"):
        plan.submit(confirmed=True)
    with at_ctrl_c(f"job {job_id} runs; {stops}"):
        try:
            click.echo(job_id)
        except OSError as error:
            silence(sys.stdout)  # else the flush at exit fails too
            problem = f"{os_reason(error)}: cannot print the job id, {job_id}"
            raise ServiceError(f"{problem}; {stops}") from None
        link = plan.backend.console_link(job_id)
        if link:
            note(f"console: {link}")


def cost_note(plan: Plan) -> str:
    """What a job costs that goes on after Ctrl-C, as a part of a message; '' on this machine."""
    if not plan.backend.bills:
        return ""
    if math.isinf(plan.worst_cost):
        return "; it is billed"
    return f"; it costs at most {plan.worst_cost:.2f} USD"


def follow_job(job_id: str, settings: Settings, stops: bool, costs: str) -> None:
    """Print a job's log to stderr until it ends.

    Ctrl-C, or a closed stderr, stops the job if `stops`; otherwise it stops only the printing.
    costs: the text of `cost_note` for the job.
    """
    from sm_nanogpt.launcher.tracking import TrackedJob

    job = TrackedJob(job_id, settings)
    interrupted = False
    try:
        lines = job.logs(follow=True)
        for line in with_progress_bar(lines, job):
            note(line)
    except (KeyboardInterrupt, BrokenPipeError) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if not interrupted:
            silence(sys.stderr)
        if not stops:
            note(f"the job keeps running{costs}; {remedy('job-goes-on', {'job_id': job_id})}")
            return
        _, description = job.find()
        if description.is_running:
            job.stop()
        try:
            # Stop first: printing fails if the terminal was closed.
            note("stopping the job after a checkpoint; press Ctrl-C again to stop it at once")
            job.wait_for_end()
        except KeyboardInterrupt:
            with suppress(ServiceError):  # it just ended
                job.stop()
    description = job.wait_for_end()
    if description.status == "Completed":
        note(next_step(description, settings))
        return
    explanation = explain(description, settings)
    if interrupted and description.status == "Stopped":
        raise KeyboardInterrupt(explanation)
    raise ServiceError(explanation)
