"""The command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.options import GROUP, Command, Job, settings_of, valued
from launcher.cli.words import options
from launcher.errors import InputError

if TYPE_CHECKING:
    from launcher.job import TrainingJob


@click.command("report", cls=Command)
@click.argument("job_ids", metavar="[JOB-ID...]", nargs=-1, type=Job())
@GROUP
@valued(
    "-o --output FILE",
    "File to write (default: report-JOB-ID.html, or report-N-runs.html).",
    type=click.Path(dir_okay=False, path_type=Path),
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
    from launcher.files.storage import write_bytes
    from launcher.launching.sweeps import find_sweep
    from launcher.views.page import page
    from launcher.views.report import compare, read_runs

    settings = settings_of()
    if group is not None:
        group, tries = find_sweep(group, settings)
        job_ids = tuple(each[-1].job_id for _, each in sorted(tries.items()))
    report = compare(read_runs(job_ids, settings))
    several = len(report.runs) > 1
    what = f"{len(report.runs)}-runs" if several else report.runs[0].description.job_id
    output = output or Path(f"report-{what}.html")
    if output.is_symlink() or (output.exists() and not output.is_file()):
        raise InputError(f"{output}: not a regular file; name another one with --output")
    write_bytes(str(output), page(report, launch_again).encode())
    click.echo(output)
    if opens:
        import webbrowser

        webbrowser.open(output.absolute().as_uri())


def launch_again(job: TrainingJob) -> str:
    """The command that repeats a job. Values of its environment may be secret."""
    from launcher.job import Request

    asked = Request.model_fields.keys() - {"name", "instance"}
    given = job.model_dump(exclude_defaults=True, include=asked)
    if job.environment:
        given["environment"] = dict.fromkeys(job.environment, "...")
    return " \\\n  ".join([f"sm-nanogpt launch --instance {job.instance}", *options(given)])
