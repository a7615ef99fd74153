"""List and delete uploads, on this machine and on S3.

An upload is STORE/data/NAME, or STORE/models/NAME for a model of --init-from, beside its manifest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.moved import UPLOAD_NAME, text_id
from sm_nanogpt.launcher.files.storage import Entry
from sm_nanogpt.launcher.finding import Listing, similar_jobs
from sm_nanogpt.launcher.locations import is_on_s3
from sm_nanogpt.launcher.sagemaker.stack import with_stack
from sm_nanogpt.launcher.settings import Settings, load_settings
from sm_nanogpt.launcher.text.store import (
    Upload,
    check_store_directory,
    choose_upload,
    read_manifest,
    store_uri,
    upload_suggestion,
)


@dataclass(frozen=True)
class StoredUpload:
    """An upload in a store, and the jobs that read it."""

    name: str
    uri: str
    kind: str  # text, tokens, conversations, or model; incomplete after an interruption
    size: int  # bytes
    written: float  # seconds since the epoch
    jobs: list[str]  # ids of all jobs that read it, newest first
    running: list[str]  # ids of the jobs that have not ended
    owners: list[str]  # of its jobs on SageMaker, by name
    manifest: Upload | None  # None: incomplete


def uploads(settings: Settings | None = None) -> list[StoredUpload]:
    """The uploads in this machine's store and in the store of the settings, newest first.

    Raises InputError or ServiceError if AWS did not list all uploads, or all jobs that read them.
    """
    listed, failure = find_uploads(settings or load_settings())
    if failure:
        raise failure
    return listed


def find_uploads(settings: Settings) -> tuple[list[StoredUpload], InputError | ServiceError | None]:
    """Return the uploads as `uploads` does. If AWS fails, return an incomplete list and the error.

    Raises InputError if the store is a directory that does not exist or may not be read.
    """
    check_store_directory(settings)
    listing = Listing(settings, everyone=True)
    jobs = list(listing)
    listed: list[StoredUpload] = []
    try:
        listed += uploads_in(settings.local_store, jobs, settings)
        if settings.reaches_aws:
            settings = with_stack(settings, names=("store",))
        if store_uri(settings.data_store) != store_uri(settings.local_store):
            listed += uploads_in(settings.data_store, jobs, settings)
    except (InputError, ServiceError) as error:
        listing.failure = error
    listed.sort(key=lambda upload: upload.written, reverse=True)
    return listed, listing.failure


def full_name(reference: str, settings: Settings) -> str:
    """The full name of the upload whose name has a part, the reference; without one, the reference.

    Raises InputError if several names match, or if none does and an upload has a similar name;
    ServiceError if AWS did not list all uploads.
    """
    listed, failure = find_uploads(settings)
    names = {upload.name for upload in listed}
    name = choose_upload(reference, names)
    if failure:
        raise failure.within(f"cannot resolve {reference!r} to the name of an upload")
    if name is not None:
        return name
    suggestion = upload_suggestion(reference, names)
    if suggestion and not similar_jobs(reference, settings):
        raise InputError(f"there is neither a job nor an upload {reference}; {suggestion}")
    return reference


def uploads_in(
    store: str, jobs: Sequence[JobDescription], settings: Settings
) -> Iterator[StoredUpload]:
    """Yield the uploads of texts in a store, and then those of models."""
    for folder in ("data", "models"):
        root = storage.join(store_uri(store), folder)
        for name, entries in entries_by_upload(root, settings).items():
            uri = storage.join(root, name)
            yield stored_upload(name, uri, folder, entries, jobs, settings)


def entries_by_upload(root: str, settings: Settings) -> dict[str, dict[str, Entry]]:
    """The files of each upload below a URI, by the names of upload and file.

    The name of the manifest is ''.
    """
    entries: dict[str, dict[str, Entry]] = defaultdict(dict)
    for path, entry in storage.list_entries(root, settings).items():
        name, is_below, file = path.partition("/")
        if not is_below:
            name = name.removesuffix(".json")
        if UPLOAD_NAME.fullmatch(name):
            entries[name][file] = entry
    return entries


def stored_upload(
    name: str,
    uri: str,
    folder: str,
    entries: dict[str, Entry],
    jobs: Sequence[JobDescription],
    settings: Settings,
) -> StoredUpload:
    """Describe an upload by its files and the jobs that read it."""
    sizes = {file: entry.size for file, entry in entries.items() if file}
    written = max(entry.written for entry in entries.values())
    upload = read_manifest(uri, settings)
    if upload is not None and not upload.is_whole(sizes):
        upload = None
    readers = [job for job in jobs if reads(job, uri)]
    return StoredUpload(
        name=name,
        uri=uri,
        kind=kind_of(upload, folder),
        size=sum(sizes.values()),
        written=written,
        jobs=[job.job_id for job in readers],
        running=[job.job_id for job in readers if job.is_running],
        owners=sorted({job.owner for job in readers if job.owner}),
        manifest=upload,
    )


def kind_of(upload: Upload | None, folder: str) -> str:
    """The kind of an upload in a folder of a store, data or models. None: it is incomplete."""
    if upload is None:
        return "incomplete"
    if folder == "models":
        return "model"
    if upload.chats:
        return "conversations"
    if upload.train_tokens:
        return "tokens"
    return "text"


def reads(job: JobDescription, uri: str) -> bool:
    """True if a job reads an upload, or reads it from a copy of this machine's store."""
    inputs = [location.rstrip("/") for location in job.inputs.values()]
    if is_on_s3(uri):
        return uri in inputs
    local_inputs = [location for location in inputs if not is_on_s3(location)]
    return text_id(uri) in map(text_id, local_inputs)


def delete(upload: StoredUpload, settings: Settings) -> None:
    """Delete an upload. The manifest goes first, so that an interruption leaves no upload."""
    storage.remove(f"{upload.uri}.json", settings)
    storage.remove(upload.uri, settings)
