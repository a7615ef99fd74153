"""The commands `data` and `delete`: what takes space, and how to free it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.options import GROUP, JSON, YES, Command, Job, agree, settings_of
from launcher.cli.remedies import command, sentence
from launcher.cli.show import moment, note, print_columns, print_json
from launcher.errors import InputError, ServiceError

if TYPE_CHECKING:
    from launcher.settings import Settings
    from launcher.text.uploads import Stored


def in_units(size: float) -> str:
    from tqdm import tqdm

    return f"{tqdm.format_sizeof(size)}B"


@click.command("data", cls=Command)
@JSON
def data_command(as_json: bool) -> None:
    """List what was uploaded, and which jobs used it.

    Example:
      sm-nanogpt data
    """
    from launcher.text.corpus import last_upload
    from launcher.text.uploads import find_uploads

    settings = settings_of()
    found, failure = find_uploads(settings)
    (print_json if as_json else print_uploads)(found)
    if failure:
        raise failure
    with suppress(InputError):
        note(f"`{command('launch')}` without --data takes {last_upload(settings)}")
    if not found:
        note(f"nothing was uploaded yet: {command('upload-data', 'FILE')}")


def print_uploads(found: list[Stored]) -> None:
    columns = defaultdict[str, list[str | None]](list)
    for each in found:
        columns["NAME"].append(each.name)
        columns["KIND"].append(each.kind)
        columns["SIZE"].append(in_units(each.size))
        for name in ("characters", "train_tokens", "documents"):
            n = getattr(each.manifest, name, 0)
            columns[name.upper().replace("_", " ")].append(f"{n:,}" if n else None)
        columns["UPLOADED"].append(moment(each.written))
        more = f" and {len(each.jobs) - 3} more" * (len(each.jobs) > 3)
        columns["USED BY"].append(", ".join(job_id[-6:] for job_id in each.jobs[:3]) + more)
        columns["URI"].append(each.uri)
    print_columns(columns, optional=("URI", "DOCUMENTS", "TRAIN TOKENS", "CHARACTERS"))


@click.command("delete", cls=Command)
@click.argument(
    "job_ids", metavar="[JOB-ID|UPLOAD...]", nargs=-1, type=Job(acts=True, uploads=True)
)
@GROUP
@click.option(
    "--keep-model", is_flag=True, help="Keep the model on this machine; fetch it first if needed."
)
@YES
def delete_command(
    job_ids: tuple[str, ...], group: str | None, keep_model: bool, yes: bool
) -> None:
    """Delete jobs with their files and models, or uploads.

    For a job, this covers its files here and on S3, its fetched model, and its entry in the list of
    jobs. For an upload, by its name in `sm-nanogpt data` or a part of it, it covers its files here
    and on S3; by its URI, those of that place. The jobs that used it stay, with their models.

    Example:
      sm-nanogpt delete JOB-ID --keep-model
      sm-nanogpt delete --group latest
      sm-nanogpt delete input-3270fd896e2e
    """
    from launcher.files.moved import UPLOAD_NAME
    from launcher.files.scratch import remove_all_leftovers

    settings = settings_of()
    remove_all_leftovers(settings)
    if names := {each for each in job_ids if UPLOAD_NAME.fullmatch(Path(each).name)}:
        if keep_model or names < set(job_ids):
            raise InputError("delete uploads without --keep-model, and jobs in another command")
        delete_uploads(names, settings, yes)
    elif group is None:
        delete_jobs(job_ids, settings, keep_model, yes)
    else:
        delete_group(group, settings, keep_model, yes)


def delete_group(reference: str, settings: Settings, keep_model: bool, yes: bool) -> None:
    """Delete the jobs of a sweep, with its ledger, or those of a search, whose ledger stays."""
    from launcher.groups.find import find_group

    group = find_group(reference, settings)
    if group.is_search:
        delete_jobs([job.job_id for job in group.jobs], settings, keep_model, yes)
    else:
        delete_sweep(group.id, settings, keep_model, yes)


def delete_sweep(group: str, settings: Settings, keep_model: bool, yes: bool) -> None:
    """Delete a sweep, which no command may run meanwhile: it would start jobs of no sweep."""
    from launcher.backends import backend_for
    from launcher.files.storage import remove
    from launcher.groups.find import find_group
    from launcher.groups.stop import lock_group, stop_mark
    from launcher.launching.names import ledger_path

    mark = ""
    with lock_group(group, settings):
        jobs = find_group(group, settings).jobs  # a command may have just started another
        if jobs:
            first = jobs[0]
            directory = backend_for(first.instance, settings).directories(first.job_id)[0]
            mark = stop_mark(group, directory, settings)
        delete_jobs([job.job_id for job in jobs], settings, keep_model, yes)
        if mark:
            remove(mark, settings)
        for path in ledger_path("*", settings).parent.glob(f"{group}.*"):
            path.unlink()


def delete_jobs(job_ids: Sequence[str], settings: Settings, keep_model: bool, yes: bool) -> None:
    from launcher.models.fetch import keep_model as fetch
    from launcher.tracking import delete, other_owner, places_of

    found = []
    for job_id in dict.fromkeys(job_ids):
        description, places = places_of(job_id, settings)
        if keep_model:
            del places[next(iter(places))]  # of its fetched models
        found.append((description, places))
    for description, places in found:
        owner = other_owner(description, settings)
        whose = f", of {owner}" if owner else ""
        note(f"{description.named}, {description.status}{whose}:")
        for place, sizes in places.items():
            if sizes:
                note(f"  {in_units(sum(sizes.values())):>8} in {len(sizes)} files: {place}")
    agree("Delete these files?", yes)
    for description, places in found:
        if keep_model:
            click.echo(fetch(description, settings))
        delete(description.job_id, places, settings)
        freed = sum(size for sizes in places.values() for size in sizes.values())
        note(f"deleted {description.job_id}: {in_units(freed)}")


def delete_uploads(names: set[str], settings: Settings, yes: bool) -> None:
    """Delete uploads, by their names or URIs, after confirmation, on this machine and on S3."""
    from launcher.text.uploads import delete, find_uploads

    listed, failure = find_uploads(settings)
    found = [each for each in listed if names & {each.name, each.uri}]
    unknown = names.difference(*({each.name, each.uri} for each in found))
    if failure:
        if unknown or any(each.uri.startswith("s3:") for each in found):
            raise failure  # it may be there, or a running job may read it
        note(f"{sentence(failure)}; only what is on this machine will be deleted")
    if unknown:
        raise InputError(f"there is no upload {min(unknown)}: `{command('data')}` lists them")
    for each in found:
        for job_id in each.running:
            raise ServiceError(
                f"job {job_id} is reading {each.name}", "job-is-running", job_id=job_id
            )
        note(f"{each.name}, {each.kind}{uploaded_by(each)}, {used_by(each)}:")
        note(f"  {in_units(each.size):>8}: {each.uri}")
    if any(each.jobs for each in found):
        note("jobs and models stay; `launch --resume` of a job then needs the same upload again")
    agree(f"Delete these files, {in_units(sum(each.size for each in found))}?", yes)
    for each in found:
        delete(each, settings)
        note(f"deleted {each.uri}: {in_units(each.size)}")


def uploaded_by(upload: Stored) -> str:
    """Who uploaded to S3, as a part of a line."""
    if not upload.uri.startswith("s3:"):
        return ""
    owner = upload.manifest.owner if upload.manifest else ""
    return f", uploaded by {owner or 'nobody that is known'}"


def used_by(upload: Stored) -> str:
    """How many jobs used an upload, and whose they are, as a part of a line."""
    n = len(upload.jobs)
    owners = f" of {' and '.join(upload.owners)}" if upload.owners else ""
    return f"used by {n} job{'s' * (n != 1)}{owners}"
