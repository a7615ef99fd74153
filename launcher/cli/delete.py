"""The commands `data` and `delete`: what takes space, and how to free it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sm_nanogpt.launcher.cli.options import (
    GROUP,
    JSON,
    YES,
    Command,
    JobParameter,
    agree,
    settings_of,
)
from sm_nanogpt.launcher.cli.remedies import command, sentence
from sm_nanogpt.launcher.cli.show import local_time, note, print_columns, print_json
from sm_nanogpt.launcher.cli.sweep import group_of
from sm_nanogpt.launcher.errors import InputError, ServiceError, did_you_mean, joined
from sm_nanogpt.launcher.locations import is_on_s3
from sm_nanogpt.launcher.values import counted, in_units

if TYPE_CHECKING:
    from sm_nanogpt.launcher.settings import Settings
    from sm_nanogpt.launcher.text.uploads import StoredUpload
    from sm_nanogpt.launcher.tracking import JobFiles


@click.command("data", cls=Command)
@JSON
def data_command(as_json: bool) -> None:
    """List what was uploaded, and which jobs used it.

    Example:
      sm-nanogpt data
    """
    from sm_nanogpt.launcher.text.store import last_upload, store_uri
    from sm_nanogpt.launcher.text.uploads import find_uploads

    settings = settings_of()
    uploads, failure = find_uploads(settings)
    if as_json:
        print_json(uploads)
    else:
        print_uploads(uploads)
    if failure:
        raise failure
    with suppress(InputError):  # there is none
        note(f"`{command('launch')}` without --data takes {last_upload(settings)}")
    to_store = ""
    if settings.store:
        to_store = f" to {settings.store}"
        prefix = f"{store_uri(settings.store)}/"
        uploads = [upload for upload in uploads if upload.uri.startswith(prefix)]
    if not uploads:
        note(f"nothing was uploaded{to_store} yet: {command('upload-data', 'FILE')}")


def print_uploads(uploads: list[StoredUpload]) -> None:
    columns: dict[str, list[str | None]] = {
        "NAME": [upload.name for upload in uploads],
        "KIND": [upload.kind for upload in uploads],
        "SIZE": [in_units(upload.size) for upload in uploads],
        "CHARACTERS": [count_of(upload, "characters") for upload in uploads],
        "TRAIN TOKENS": [count_of(upload, "train_tokens") for upload in uploads],
        "DOCUMENTS": [count_of(upload, "documents") for upload in uploads],
        "UPLOADED": [local_time(upload.written) for upload in uploads],
        "USED BY": [ends_of(upload.jobs) for upload in uploads],
        "URI": [upload.uri for upload in uploads],
    }
    print_columns(columns, optional=("URI", "DOCUMENTS", "TRAIN TOKENS", "CHARACTERS"))


def count_of(upload: StoredUpload, field: str) -> str | None:
    """A number of its manifest; None if it has none, or that is 0."""
    number = getattr(upload.manifest, field, 0)
    return f"{number:,}" if number else None


def ends_of(job_ids: Sequence[str]) -> str:
    """The ends of the first three ids, and how many more there are."""
    from sm_nanogpt.launcher.description import end_of

    text = ", ".join(end_of(job_id) for job_id in job_ids[:3])
    if len(job_ids) > 3:
        text += f" and {len(job_ids) - 3} more"
    return text


@click.command("delete", cls=Command)
@click.argument(
    "job_ids", metavar="[JOB-ID|UPLOAD...]", nargs=-1, type=JobParameter(acts=True, uploads=True)
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
    from sm_nanogpt.launcher.files.moved import UPLOAD_NAME
    from sm_nanogpt.launcher.files.scratch import remove_all_leftovers

    settings = settings_of()
    remove_all_leftovers(settings)
    names = {name for name in job_ids if UPLOAD_NAME.fullmatch(Path(name).name)}
    if names:
        check_uploads_alone(names, job_ids, keep_model)
        delete_uploads(names, settings, yes)
    elif group is None:
        delete_jobs(job_ids, settings, keep_model, yes)
    else:
        delete_group(group, settings, keep_model, yes)


def delete_group(reference: str, settings: Settings, keep_model: bool, yes: bool) -> None:
    """Delete the jobs of a sweep, with its ledger, or those of a search, whose ledger stays."""
    group = group_of(reference, settings)
    if group.is_search:
        delete_jobs([job.job_id for job in group.jobs], settings, keep_model, yes)
    else:
        delete_sweep(group.id, settings, keep_model, yes)


def delete_sweep(group: str, settings: Settings, keep_model: bool, yes: bool) -> None:
    """Delete a sweep, which no command may run meanwhile: it would start jobs of no sweep."""
    from sm_nanogpt.launcher.backends import backend_for
    from sm_nanogpt.launcher.files.storage import remove
    from sm_nanogpt.launcher.groups.find import find_group
    from sm_nanogpt.launcher.groups.stop import lock_sweep, mark_of
    from sm_nanogpt.launcher.launching.names import ledger_path

    mark = ""
    with lock_sweep(group, settings):
        sweep = find_group(group, settings)  # a command may have just started another job
        if sweep.tries:
            backend = backend_for(sweep.newest[0].instance, settings)
            mark = mark_of(sweep, backend, settings)
        delete_jobs([job.job_id for job in sweep.jobs], settings, keep_model, yes)
        if mark:
            remove(mark, settings)
        for path in ledger_path("*", settings).parent.glob(f"{group}.*"):
            path.unlink()


def delete_jobs(job_ids: Sequence[str], settings: Settings, keep_model: bool, yes: bool) -> None:
    """Delete jobs with their files, after confirmation."""
    from sm_nanogpt.launcher.models.fetch import keep_model as fetch
    from sm_nanogpt.launcher.tracking import TrackedJob

    files_of = {}
    for job_id in dict.fromkeys(job_ids):
        files_of[job_id] = TrackedJob(job_id, settings).files(keep_model)
    for files in files_of.values():
        note_files(files, settings)
    agree("Delete these files?", yes)
    for job_id, files in files_of.items():
        if keep_model:
            click.echo(fetch(files.job, settings))
        TrackedJob(job_id, settings).remove(files.sizes)
        note(f"deleted {job_id}: {in_units(files.size)}")
    for name in {files.job.name for files in files_of.values() if files.job.name}:
        note_next_of_name(name, settings)


def note_next_of_name(name: str, settings: Settings) -> None:
    """Print which job of this machine a name means, after the newest job that had it was deleted.

    A resumed job and the job that it resumes have one name.
    """
    from sm_nanogpt.launcher.finding import Listing

    job = next(Listing(settings, name=name).of_this_machine(), None)
    if job is not None:
        deletion = command("delete", job.job_id)
        note(f"{name} now means {job.job_id}; `{deletion}` deletes that too")


def note_files(files: JobFiles, settings: Settings) -> None:
    """Print whose job it is, and how much each of its directories holds."""
    from sm_nanogpt.launcher.tracking import other_owner

    owner = other_owner(files.job, settings)
    of_owner = f", of {owner}" if owner else ""
    note(f"{files.job.named}, {files.job.status}{of_owner}:")
    for directory, sizes in files.sizes.items():
        if sizes:
            note(f"  {in_units(sum(sizes.values())):>8} in {len(sizes)} files: {directory}")


def check_uploads_alone(names: set[str], references: Sequence[str], keep_model: bool) -> None:
    """Raise InputError if uploads are to be deleted with what is none, or as jobs are."""
    upload = min(names)
    if keep_model:
        raise InputError(f"--keep-model is for jobs, and {upload} is an upload")
    others = set(references) - names
    if others:
        problem = f"{upload} is an upload, and {min(others)} is not"
        raise InputError(f"{problem}: delete uploads and jobs in two commands")


def delete_uploads(names: set[str], settings: Settings, yes: bool) -> None:
    """Delete uploads, by their names or URIs, after confirmation, on this machine and on S3."""
    from sm_nanogpt.launcher.text.uploads import delete

    uploads = uploads_named(names, settings)
    for upload in uploads:
        check_unused(upload, settings)
        note(f"{upload.name}, {upload.kind}{uploaded_by(upload)}, {used_by(upload)}:")
        note(f"  {in_units(upload.size):>8}: {upload.uri}")
    if any(upload.jobs for upload in uploads):
        note("jobs and models stay; `launch --resume` of a job then needs the same upload again")
    total = sum(upload.size for upload in uploads)
    agree(f"Delete these files, {in_units(total)}?", yes)
    for upload in uploads:
        delete(upload, settings)
        note(f"deleted {upload.uri}: {in_units(upload.size)}")


def uploads_named(names: set[str], settings: Settings) -> list[StoredUpload]:
    """The uploads with these names or URIs, on this machine and on S3.

    If AWS does not list all uploads, those of this machine alone are returned, with a note. Raises
    AWS's error if that may not be all that is meant, and InputError if a name means no upload.
    """
    from sm_nanogpt.launcher.text.uploads import find_uploads

    all_uploads, failure = find_uploads(settings)
    uploads = [upload for upload in all_uploads if names & {upload.name, upload.uri}]
    unknown = set(names)
    for upload in uploads:
        unknown -= {upload.name, upload.uri}
    if failure:
        if unknown or any(is_on_s3(upload.uri) for upload in uploads):
            raise failure  # it may be there, or a running job may read it
        note(joined(sentence(failure), "only what is on this machine will be deleted"))
    if unknown:
        name = min(unknown)
        suggestion = did_you_mean(name, [upload.name for upload in all_uploads])
        hint = suggestion or f"`{command('data')}` lists them"
        raise InputError(f"there is no upload {name}; {hint}")
    return uploads


def check_unused(upload: StoredUpload, settings: Settings) -> None:
    """Raise ServiceError if a running job reads an upload."""
    from sm_nanogpt.launcher.tracking import TrackedJob, other_owner

    for job_id in upload.running:
        _, description = TrackedJob(job_id, settings).find()
        owner = other_owner(description, settings)
        of_owner = f" of {owner}" if owner else ""
        problem = f"job {job_id}{of_owner} is reading {upload.name}"
        raise ServiceError(problem, "job-is-running", job_id=job_id)


def uploaded_by(upload: StoredUpload) -> str:
    """Who uploaded to S3, or that an upload may be under way, as a part of a line."""
    if upload.manifest is None:
        since = local_time(upload.written)
        return f" since {since}: interrupted, or still under way, maybe by somebody else"
    if not is_on_s3(upload.uri):
        return ""
    return f", uploaded by {upload.manifest.owner or 'nobody that is known'}"


def used_by(upload: StoredUpload) -> str:
    """How many jobs used an upload, and whose they are, as a part of a line."""
    jobs = counted(len(upload.jobs), "job")
    owners = f" of {' and '.join(upload.owners)}" if upload.owners else ""
    return f"used by {jobs}{owners}"
