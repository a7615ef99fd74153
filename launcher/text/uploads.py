"""What was uploaded, on this machine and on S3: list it, and delete it.

An upload is STORE/data/NAME, or STORE/models/NAME for a model of --init-from, beside its manifest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.errors import InputError, ServiceError
from launcher.files import storage
from launcher.files.moved import UPLOAD_NAME, text_id
from launcher.finding import Listing
from launcher.job import JobDescription
from launcher.sagemaker.stack import with_stack
from launcher.settings import Settings, load_settings
from launcher.text import corpus


@dataclass(frozen=True)
class Stored:
    name: str
    uri: str
    kind: str  # text, tokens, conversations, model; incomplete: after an interruption
    size: int  # bytes
    written: float  # seconds since the epoch
    jobs: list[str]  # ids of all that read it, newest first
    running: list[str]  # those of them that have not ended
    owners: list[str]  # of those on SageMaker, by name
    manifest: corpus.Upload | None  # None: incomplete


def uploads(settings: Settings | None = None) -> list[Stored]:
    """The uploads in this machine's store and in the one that is set, newest first.

    Raises InputError or ServiceError if AWS did not list all of them, or all jobs that use them.
    """
    found, failure = find_uploads(settings or load_settings())
    if failure:
        raise failure
    return found


def find_uploads(settings: Settings) -> tuple[list[Stored], InputError | ServiceError | None]:
    """As `uploads`, also if the list is incomplete: then with the reason."""
    found = list[Stored]()
    listing = Listing(settings, everyone=True)
    jobs = list(listing)
    try:
        found += uploads_in(settings.local_store, jobs, settings)
        if settings.reaches_aws:
            settings = with_stack(settings, names=("store",))
        if corpus.place(settings.data_store) != corpus.place(settings.local_store):
            found += uploads_in(settings.data_store, jobs, settings)
    except (InputError, ServiceError) as error:
        listing.failure = error
    return sorted(found, key=lambda each: each.written, reverse=True), listing.failure


def full_name(reference: str, settings: Settings) -> str:
    """The name of the upload that a part of a name means; the reference itself if there is none.

    Raises InputError if several match, and ServiceError if AWS did not list all of them.
    """
    found, failure = find_uploads(settings)
    name = corpus.choose(reference, {upload.name for upload in found})
    if failure:
        raise failure.within(f"cannot resolve {reference!r} to the name of an upload")
    return name or reference


def uploads_in(store: str, jobs: Sequence[JobDescription], settings: Settings) -> Iterator[Stored]:
    for kind in ("text", "model"):
        root = storage.join(corpus.place(store), "models" if kind == "model" else "data")
        folders: dict[str, dict[str, storage.Entry]] = defaultdict(dict)
        for path, entry in storage.list_entries(root, settings).items():
            name, _, file = path.partition("/")
            folders[name if file else name.removesuffix(".json")][file] = entry
        for name in filter(UPLOAD_NAME.fullmatch, folders):
            uri, files, what = storage.join(root, name), folders[name], kind
            manifest_entry = files.pop("", None)
            entry = manifest_entry or next(iter(files.values()))
            sizes = {file: each.size for file, each in files.items()}
            upload = corpus.read_manifest(uri, settings)
            if upload is None or not upload.is_whole(sizes):
                upload, what = None, "incomplete"
            elif upload.train_tokens:
                what = "conversations" if upload.chats else "tokens"
            readers = [job for job in jobs if reads(job, uri)]
            yield Stored(
                name=name,
                uri=uri,
                kind=what,
                size=sum(sizes.values()),
                written=entry.written,
                jobs=[job.job_id for job in readers],
                running=[job.job_id for job in readers if job.is_running],
                owners=sorted({job.owner for job in readers if job.owner}),
                manifest=upload,
            )


def reads(job: JobDescription, uri: str) -> bool:
    """Whether a job reads an upload, or one of the same name in a copy of this machine's store."""
    inputs = [each.rstrip("/") for each in job.inputs.values()]
    if uri.startswith("s3://"):
        return uri in inputs
    return text_id(uri) in [text_id(each) for each in inputs if not each.startswith("s3://")]


def delete(upload: Stored, settings: Settings) -> None:
    """Delete an upload, its manifest first: what an interruption leaves is no upload."""
    storage.remove(f"{upload.uri}.json", settings)
    storage.remove(upload.uri, settings)
