"""The command `track`."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.options import Command, complete_job, settings_of
from launcher.cli.show import note

if TYPE_CHECKING:
    from launcher.backends import Backend
    from launcher.curves import Curve
    from launcher.job import JobDescription
    from launcher.settings import Settings

POLL_SECONDS = 5.0


@click.command("track", cls=Command)
@click.argument(
    "job_ids", metavar="JOB-ID...", nargs=-1, required=True, shell_complete=complete_job
)
@click.option(
    "--tensorboard",
    metavar="DIR",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Write event files to DIR/JOB-ID.",
)
@click.option("--follow", is_flag=True, help="Add new rows until the jobs end.")
@click.pass_context
def track_command(
    context: click.Context,
    job_ids: tuple[str, ...],
    tensorboard: Path,
    follow: bool,
) -> None:
    """Show the curves of jobs in TensorBoard. The jobs may still run.

    \b
    Example:
      sm-nanogpt track JOB-ID --tensorboard runs --follow
    """
    settings = settings_of(context)
    try:
        add(list(dict.fromkeys(job_ids)), tensorboard, settings, follow)
    except KeyboardInterrupt:
        what = "the jobs keep running, and the same command adds the rest"
        raise KeyboardInterrupt(*[what] * follow) from None


def add(job_ids: list[str], directory: Path, settings: Settings, follow: bool) -> None:
    """Bring the event files up to date; with follow, until the jobs end."""
    from tqdm import tqdm

    from launcher.trackers import Board, with_times

    sent: dict[str, tuple[Curve, str]] = {}
    times: dict[str, dict[int, float]] = {job_id: {} for job_id in job_ids}
    boards = {job_id: Board(directory, job_id) for job_id in job_ids}
    backends: dict[str, Backend] = {}
    quiet = not (follow and sys.stderr.isatty())
    with ExitStack() as stack:
        bars = {
            job_id: stack.enter_context(tqdm(desc=job_id, disable=quiet, leave=False))
            for job_id in job_ids
        }
        while job_ids:
            for job_id in list(job_ids):
                description, curve = state(job_id, settings, backends)
                curve = with_times(curve, description, times[job_id])
                if sent.get(job_id) != (curve, description.status):
                    boards[job_id].update(curve, description)
                    sent[job_id] = curve, description.status
                step = int(curve.rows[-1]["step"]) if curve.rows else 0
                bars[job_id].total = description.hyperparameters.get("max_steps")
                bars[job_id].update(step - bars[job_id].n)
                if not (follow and description.is_running):
                    job_ids.remove(job_id)
                    bars[job_id].close()
                    note(f"{job_id}: {len(curve.rows)} rows to step {step}; {description.state}")
                    click.echo(boards[job_id].place)
            if job_ids:
                time.sleep(POLL_SECONDS)


def state(
    job_id: str, settings: Settings, backends: dict[str, Backend]
) -> tuple[JobDescription, Curve]:
    """A job and its curve. Keeps its backend, and then retries during an outage of minutes."""
    from launcher.aws.session import patiently
    from launcher.tracking import curve_of, find

    def ask() -> tuple[JobDescription, Curve]:
        # In this order, so that the curve of a job that has ended is complete.
        description = backends[job_id].describe(job_id) if job_id in backends else None
        if description is None:
            backends[job_id], description = find(job_id, settings)
        return description, curve_of(backends[job_id], job_id, with_samples=True)

    if job_id not in backends or (settings.jobs_dir / job_id).exists():
        return ask()
    return patiently(ask, f"sm-nanogpt logs {job_id} --follow")
