"""The command `delete`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from launcher.cli.options import GROUP, YES, Command, Job, agree, can_ask, settings_of
from launcher.cli.show import byte_progress, note
from launcher.errors import InputError, ServiceError

if TYPE_CHECKING:
    from launcher.settings import Settings


def in_units(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1000
    return f"{size:.1f} GB"


@click.command("delete", cls=Command)
@click.argument("job_ids", metavar="[JOB-ID...]", nargs=-1, type=Job(acts=True))
@GROUP
@click.option(
    "--keep-model", is_flag=True, help="Keep the model on this machine; fetch it first if needed."
)
@YES
@click.pass_context
def delete_command(
    context: click.Context, job_ids: tuple[str, ...], group: str | None, keep_model: bool, yes: bool
) -> None:
    """Delete jobs with their files and models.

    This covers their files here and on S3, their fetched models, and their entries in the list of
    jobs. Uploaded text stays.

    \b
    Example:
      sm-nanogpt delete JOB-ID --keep-model
      sm-nanogpt delete --group latest
    """
    settings = settings_of(context)
    if bool(job_ids) == (group is not None):
        raise InputError("give a JOB-ID, or --group with the id of a sweep")
    can_ask(yes)
    if group is None:
        delete_jobs(job_ids, settings, keep_model, yes)
    else:
        delete_sweep(group, settings, keep_model, yes)


def delete_sweep(word: str, settings: Settings, keep_model: bool, yes: bool) -> None:
    """Delete a sweep, which no command may run meanwhile: it would start jobs of no sweep."""
    from launcher.files.storage import remove
    from launcher.finding import backend_for
    from launcher.launching.records import record_of
    from launcher.launching.sweeps import alone, find_sweep, stop_mark

    group, marks = find_sweep(word, settings)[0], []
    with alone(group, settings):
        tries = find_sweep(group, settings)[1]  # a command may have just started another
        every = [job for each in tries.values() for job in each]
        for job in every[:1]:
            place = backend_for(job.instance, settings).places(job.job_id)[0]
            marks = [stop_mark(job.job_id, group, place, settings)]
        delete_jobs([job.job_id for job in every], settings, keep_model, yes)
        for mark in marks:
            if mark.startswith("s3://"):
                remove(mark, settings)
        for path in record_of("*", settings).parent.glob(f"{group}.*"):
            path.unlink()


def delete_jobs(job_ids: Sequence[str], settings: Settings, keep_model: bool, yes: bool) -> None:
    """Delete jobs after confirmation."""
    from launcher.models.fetch import fetch_described
    from launcher.tracking import delete, places_of

    found = []
    for job_id in dict.fromkeys(job_ids):
        description, places = places_of(job_id, settings)
        if keep_model:
            if description.model_uri is None:
                raise ServiceError(
                    f"job {job_id} is {description.status} and has no model to keep; leave out"
                    " --keep-model"
                )
            places = places[1:]
        found.append((description, places))
    for description, places in found:
        note(f"{description.named}, {description.status}:")
        for place in places:
            if place.files:
                note(f"  {in_units(place.size):>8} in {place.files} files: {place.uri}")
    agree("Delete these files?", yes)
    for description, places in found:
        if keep_model:
            with byte_progress("fetch") as progress:
                click.echo(fetch_described(description, settings, progress, None))
        delete(description.job_id, places, settings)
        freed = in_units(sum(place.size for place in places))
        note(f"deleted {description.job_id}: {freed}")
