"""The command `report`."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.cli.options import GROUP, Command, complete_job, settings_of
from launcher.cli.show import note
from launcher.errors import InputError, ServiceError


@click.command("report", cls=Command)
@click.argument("job_ids", metavar="[JOB-ID...]", nargs=-1, shell_complete=complete_job)
@GROUP
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write (default: report-JOB-ID.html, or report-N-runs.html).",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
@click.pass_context
def report_command(
    context: click.Context,
    job_ids: tuple[str, ...],
    group: str | None,
    output: Path | None,
    opens: bool,
) -> None:
    """Write a report of jobs, or of a sweep, as one HTML file. Print its path.

    \b
    Example:
      sm-nanogpt report latest --open
      sm-nanogpt report JOB-ID JOB-ID -o comparison.html
      sm-nanogpt report --group latest
    """
    from launcher.report import compare, read_runs
    from launcher.report_page import check_packages, page
    from launcher.storage import write_text
    from launcher.sweeps import find_sweep
    from launcher.tracking import metrics

    check_packages()
    settings = settings_of(context)
    if bool(job_ids) == (group is not None):
        raise InputError("give a JOB-ID, or --group with the id of a sweep")
    if group is not None:
        group, tries = find_sweep(group, settings)
        found = [each[-1] for _, each in sorted(tries.items())]
        # SageMaker lists the metrics of a running job late; its log has them.
        drawn = [d for d in found if d.metrics or metrics(d.job_id, settings).rows]
        job_ids = tuple(d.job_id for d in drawn)
        if not job_ids:
            raise ServiceError(
                f"no job of this sweep has a curve yet; `sm-nanogpt jobs --group {group}` lists"
                " them"
            )
        for d in found:
            if d not in drawn:
                note(f"{d.job_id} is left out: it is {d.state} and has no curve yet")
    report = compare(read_runs(job_ids, settings))
    several = len(report.runs) > 1
    what = f"{len(report.runs)}-runs" if several else report.runs[0].description.job_id
    output = output or Path(f"report-{what}.html")
    if output.is_symlink() or (output.exists() and not output.is_file()):
        raise InputError(f"{output}: not a regular file; name another one with --output")
    write_text(str(output), page(report))
    click.echo(output)
    if opens:
        import webbrowser

        webbrowser.open(output.absolute().as_uri())
