"""The commands `jobs`, `status`, `metrics`, `logs`, `report`, `wait` and `stop`."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sm_nanogpt.launcher.cli.options import (
    GROUP,
    JOB_ID,
    JSON,
    RUN_ID,
    YES,
    Command,
    JobParameter,
    OutputFile,
    ask_if_not_yours,
    check_output_file,
    settings_of,
    value_option,
)
from sm_nanogpt.launcher.cli.remedies import command, launch_options, reason_of
from sm_nanogpt.launcher.cli.show import (
    at_ctrl_c,
    local_time,
    next_step,
    note,
    print_columns,
    print_curve,
    print_fields,
    print_json,
    print_table,
    print_text,
    report_end,
    shown,
    with_progress_bar,
)
from sm_nanogpt.launcher.cli.sweep import group_of, print_ranking
from sm_nanogpt.launcher.errors import InputError, LauncherError, ServiceError

if TYPE_CHECKING:
    from sm_nanogpt.launcher.curve import Curve, Row
    from sm_nanogpt.launcher.description import JobDescription
    from sm_nanogpt.launcher.job import TrainingJob
    from sm_nanogpt.launcher.settings import Settings


@click.command("jobs", cls=Command)
@GROUP
@click.option(
    "--status",
    type=click.Choice(["InProgress", "Stopping", "Completed", "Failed", "Stopped"]),
    help="Only jobs in this state.",
)
@value_option("--limit N", "Only the newest N jobs.")
@click.option("--everyone", is_flag=True, help="Also the jobs of others in the AWS account.")
@JSON
def jobs_command(
    group: str | None, status: str | None, limit: int | None, everyone: bool, as_json: bool
) -> None:
    """List your jobs, newest first.

    With --group, rank those of a sweep by their validation loss, or list those of a search.

    Example:
      sm-nanogpt jobs --status Completed --limit 10
      sm-nanogpt jobs --group latest
    """
    from sm_nanogpt.launcher.finding import Listing
    from sm_nanogpt.launcher.groups.sweep import SweepLedger
    from sm_nanogpt.launcher.tracking import with_costs
    from sm_nanogpt.launcher.views.job_fields import json_fields_of

    if group is not None and (limit or status):
        raise InputError("--group needs all its jobs, so neither --limit nor --status")
    settings = settings_of()
    listing = Listing(settings, everyone)
    job_group = None
    jobs: Iterable[JobDescription] = listing
    if group is not None:
        job_group = group_of(group, settings, everyone)
        jobs = job_group.newest
    if status is not None:
        jobs = (job for job in jobs if job.status == status)
    selected = list(islice(jobs, limit))
    for job in listing.unreadable:
        note(f"job {job.job_id} is left out: {job.error}")
    selected = with_costs(selected, settings)
    if as_json:
        print_json([json_fields_of(job) for job in selected])
    elif job_group is not None and not job_group.is_search:
        print_ranking(job_group, SweepLedger(job_group.id, settings).sweep)
    elif selected:
        print_jobs(selected, everyone)
    elif not (listing.failure or listing.unreadable or status):
        note(f"no jobs yet; next: {first_step(settings)}")
    if listing.failure is not None:
        raise listing.failure


def first_step(settings: Settings) -> str:
    """The command that a person without jobs types next. Raises InputError if the store is a
    directory that does not exist, or may not be read.

    If S3 does not say whether the last upload is complete, that step is `upload-data`.
    """
    from sm_nanogpt.launcher.cli.upload import next_command
    from sm_nanogpt.launcher.text.store import check_store_directory, known_upload, last_upload

    check_store_directory(settings)
    upload = None
    with suppress(InputError, ServiceError):
        upload = known_upload(last_upload(settings), settings)
    return command("upload-data", "FILE") if upload is None else next_command(upload)


def print_jobs(jobs: list[JobDescription], everyone: bool) -> None:
    from sm_nanogpt.launcher.views.job_fields import BY_KEY, COLUMNS, HIDDEN_IF_NARROW, columns_of

    keys = [key for key in COLUMNS if everyone or key != "owner"]
    print_columns(columns_of(jobs, keys), optional=[BY_KEY[key].column for key in HIDDEN_IF_NARROW])


@click.command("status", cls=Command)
@JOB_ID
@JSON
def status_command(job_id: str, as_json: bool) -> None:
    """Show the state of a job.

    Example:
      sm-nanogpt status JOB-ID
    """
    from sm_nanogpt.launcher.tracking import TrackedJob
    from sm_nanogpt.launcher.views.job_fields import json_fields_of, texts_of

    settings = settings_of()
    tracked = TrackedJob(job_id, settings)
    job = with_owner(tracked.describe(), settings)
    curve = None
    try:
        curve = tracked.curve()
    except ServiceError as error:
        note(f"no curve: {error}")
    if job.is_running and curve is not None and curve.rows:
        # SageMaker describes a job with its newest values late.
        job = replace(job, metrics={**(job.metrics or {}), **curve.newest})
    if as_json:
        print_json(json_fields_of(job))
        return

    times = {
        "created": local_time(job.created),
        "started": local_time(job.started),
        "ended": local_time(job.ended),
    }
    print_fields({**texts_of(job), **times, "reason": reason_of(job)})
    if curve:
        print_curve(curve)
    if not job.is_running:
        note(next_step(job, settings))
    elif job.search:
        note(
            f"it has no curve; `{command('logs', job_id)}` shows the runs of its search that ended"
        )
    if job.status == "Failed":
        print_last_lines(list(tracked.logs(tail=10)))


def with_owner(job: JobDescription, settings: Settings) -> JobDescription:
    """The job with the name of its owner, if that is somebody else. A failure to ask is a note."""
    from sm_nanogpt.launcher.tracking import other_owner

    try:
        owner = other_owner(job, settings)
    except LauncherError as error:
        note(f"its owner is not known: {error}")
        return job
    return replace(job, owner=owner or job.owner)


def print_last_lines(lines: list[str]) -> None:
    """Print the end of a log, each line cut to 200 characters."""
    if lines:
        click.echo("last lines of its log:")
    for line in lines:
        short_line = line if len(line) <= 200 else f"{line[:199]}…"
        click.echo(shown(f"  {short_line}"))


@click.command("metrics", cls=Command)
@RUN_ID
@click.option("--csv", "output_format", flag_value="csv", help="Print CSV.")
@click.option("--json", "output_format", flag_value="json", help="Print JSON.")
def metrics_command(job_id: str, output_format: str | None) -> None:
    """Print the rows of a job's training curve. The job may still run.

    Example:
      sm-nanogpt metrics JOB-ID --csv > curve.csv
    """
    from sm_nanogpt.launcher.tracking import TrackedJob

    curve = TrackedJob(job_id, settings_of()).curve()
    if not curve.rows:
        raise ServiceError(f"job {job_id} has written no metrics")
    note(f"source: {curve.source}")
    names = column_names(curve)
    if output_format == "json":
        print_json(curve.rows)
    elif output_format == "csv":
        table = csv.DictWriter(sys.stdout, names, lineterminator="\n")
        table.writeheader()
        table.writerows(curve.rows)
    else:
        names = [name for name in names if name != "time"]
        rows = [[cell_of(row, name) for name in names] for row in curve.rows]
        print_table([names, *rows], align=">")


def column_names(curve: Curve) -> list[str]:
    """The names of the values in a curve. The step and the losses come first."""
    values = curve.newest
    first = ["step", "train_loss", "val_loss", "best_loss", "bits_per_byte"]
    names = [name for name in first if name in values]
    names += [name for name in values if name not in first]
    return names


# How `metrics` formats the values of a curve, by their names; all others as LOSS_FORMAT.
FORMATS = {"step": "d", "learning_rate": ".7f", "tokens_per_second": ",.0f"}
LOSS_FORMAT = ".5f"


def cell_of(row: Row, name: str) -> str:
    """A value of a curve as text, or '' if the row lacks it."""
    if name not in row:
        return ""
    return format(row[name], FORMATS.get(name, LOSS_FORMAT))


@click.command("logs", cls=Command)
@JOB_ID
@click.option("--follow", is_flag=True, help="Print new lines until the job ends.")
@value_option("--tail N", "Print only the last N lines.", type=click.IntRange(min=0))
@click.option("--raw", is_flag=True, help="Include the lines of the SageMaker toolkit.")
def logs_command(job_id: str, follow: bool, tail: int | None, raw: bool) -> None:
    """Print the output of a job's training script.

    Example:
      sm-nanogpt logs JOB-ID --follow
      sm-nanogpt logs JOB-ID --tail 20
    """
    from sm_nanogpt.launcher.backends import backend_class
    from sm_nanogpt.launcher.tracking import TrackedJob

    job = TrackedJob(job_id, settings_of())
    has_printed = False
    lines = job.logs(follow, tail, raw)
    if follow:
        lines = with_progress_bar(lines, job)
    try:
        for line in lines:
            print_text(line)
            has_printed = True
    except KeyboardInterrupt:
        if not follow:
            raise
        note("the job keeps running")
        return
    asks_for_lines = tail != 0
    if asks_for_lines and not has_printed and not follow:
        description = job.describe()
        yet = " yet" if description.is_running else ""
        has_more = backend_class(description.instance).logs_more_than_script and not raw
        more = "; --raw shows all lines" if has_more else ""
        note(f"the script printed nothing{yet}; the job is {description.state}{more}")


@click.command("report", cls=Command)
@click.argument("job_ids", metavar="[JOB-ID...]", nargs=-1, type=JobParameter(reads="curve"))
@GROUP
@value_option(
    "-o --output FILE",
    "File to write (default: report-JOB-ID.html, or report-N-runs.html).",
    type=OutputFile(),
)
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
def report_command(
    job_ids: tuple[str, ...], group: str | None, output: Path | None, opens: bool
) -> None:
    """Write a report of jobs, or of a sweep, as one HTML file. Print its path.

    Example:
      sm-nanogpt report latest --open
      sm-nanogpt report JOB-ID JOB-ID -o comparison.html
      sm-nanogpt report --group latest
    """
    from sm_nanogpt.launcher.files.storage import write_bytes
    from sm_nanogpt.launcher.views.page import report_html
    from sm_nanogpt.launcher.views.report import compare, read_runs

    settings = settings_of()
    if group is not None:
        job_ids = jobs_with_curves(group, settings)
    report = compare(read_runs(list(dict.fromkeys(job_ids)), settings))
    if output is None:
        output = report_path([run.description.job_id for run in report.runs])
        check_output_file(output)
    write_bytes(str(output), report_html(report, launch_again).encode())
    click.echo(output)
    if opens:
        import webbrowser

        webbrowser.open(output.absolute().as_uri())


def report_path(job_ids: Sequence[str]) -> Path:
    """The default file of a report on these jobs."""
    if len(job_ids) == 1:
        return Path(f"report-{job_ids[0]}.html")
    return Path(f"report-{len(job_ids)}-runs.html")


def jobs_with_curves(reference: str, settings: Settings) -> tuple[str, ...]:
    """The ids of the jobs of a sweep. Raises ServiceError if it has none, or is a search."""
    group = group_of(reference, settings)
    if group.is_search:
        shows = command("try", "log", group.id)
        raise ServiceError(
            f"the jobs of search {group.id} have no curves; `{shows}` shows its runs"
        )
    if not group.tries:
        raise ServiceError(f"sweep {group.id} has no job yet")
    return tuple(job.job_id for job in group.newest)


def launch_again(job: TrainingJob) -> str:
    """The command that repeats a job. In place of the values of its environment, which may be
    secret, it has `...`."""
    from sm_nanogpt.launcher.job import Request

    names = Request.model_fields.keys() - {"name", "instance"}
    fields = job.model_dump(exclude_defaults=True, include=names)
    if job.environment:
        fields["environment"] = dict.fromkeys(job.environment, "...")
    lines = [f"sm-nanogpt launch --instance {job.instance}", *launch_options(fields)]
    return " \\\n  ".join(lines)


@click.command("wait", cls=Command)
@JOB_ID
def wait_command(job_id: str) -> None:
    """Wait until a job ends. Exit code 0 means that it completed.

    Example:
      sm-nanogpt wait JOB-ID && sm-nanogpt fetch-and-sample JOB-ID
    """
    from sm_nanogpt.launcher.tracking import TrackedJob

    settings = settings_of()
    with at_ctrl_c("the job keeps running"):
        description = TrackedJob(job_id, settings).wait_for_end()
    report_end(description, settings, "Completed")


@click.command("stop", cls=Command)
@click.argument("job_id", metavar="[JOB-ID]", required=False, type=JobParameter(acts=True))
@GROUP
@YES
def stop_command(job_id: str | None, group: str | None, yes: bool) -> None:
    """Stop a running job, or all jobs of a sweep or of a search. A local job first writes a
    checkpoint; SageMaker keeps the newest one. Before it stops a job of somebody else, it asks.

    Example:
      sm-nanogpt stop JOB-ID
      sm-nanogpt stop --group latest
    """
    from sm_nanogpt.launcher.backends import backend_class
    from sm_nanogpt.launcher.tracking import TrackedJob

    settings = settings_of()
    if group is not None:
        stop_jobs_of(group, settings, yes)
        return
    assert job_id is not None
    job = TrackedJob(job_id, settings)
    description = ask_if_not_yours(job.stop, f"Stop job {job_id}?", yes)
    if backend_class(description.instance).saves_when_stopped:
        note("stopping after a checkpoint")
    else:
        note("stopping (this may take two minutes)")
    report_end(job.wait_for_end(), settings, "Completed", "Stopped")


def stop_jobs_of(reference: str, settings: Settings, yes: bool) -> None:
    """Stop the jobs of a sweep or of a search, and say how it continues."""
    from sm_nanogpt.launcher.groups.stop import stop_group
    from sm_nanogpt.launcher.tracking import TrackedJob

    group = group_of(reference, settings)
    if not group.tries:  # a sweep: find_group finds a search by its jobs
        raise ServiceError(f"sweep {group.id} has no job yet: press Ctrl-C where `launch` runs it")
    if group.is_search:
        kind = "search"
        again = command("try", "run", "DIR", "--group", group.id)
    else:
        kind = "sweep"
        again = command("launch", "--resume", group.id)
    stop_jobs = partial(stop_group, group, settings)
    stopped_jobs = ask_if_not_yours(stop_jobs, f"Stop {kind} {group.id}?", yes)
    for job in stopped_jobs:
        note(f"stopping {job.job_id}")
        TrackedJob(job.job_id, settings).wait_for_end()
    note(f"{kind} {group.id} is stopped; `{again}` continues it")
