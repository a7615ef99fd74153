"""Complete, check and submit a job: from a Request to a TrainingJob that runs."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import permutations
from typing import TYPE_CHECKING, Any

from launcher import machines
from launcher.errors import InputError, ServiceError
from launcher.files import storage
from launcher.finding import Backend, Listing, backend_for, find
from launcher.job import JobDescription, Request, TrainingJob
from launcher.launching import start
from launcher.launching.records import recorded_as
from launcher.launching.summary import summary_of
from launcher.launching.texts import (
    Channel,
    check_texts,
    find_texts,
    n_training,
    size_of,
    with_whole_windows,
)
from launcher.sagemaker.backend import SageMakerBackend
from launcher.sagemaker.caller import remembered
from launcher.sagemaker.stack import notebook_role, with_stack
from launcher.settings import Settings
from launcher.source import Source, find_source, keep
from launcher.text import corpus

if TYPE_CHECKING:  # it imports torch
    from entry_point.data import Tokenizer

logger = logging.getLogger(__name__)

PRESCRIBED = ("subnets", "security_group_ids", "network_isolation", "encrypt_traffic", "tags")
NEW = {"name", "resume", "preset", "hyperparameters"}  # what a job does not take over as it is


@dataclass(frozen=True)
class Ready:
    """A job that can be submitted, complete and checked, once its texts are uploaded.

    plan is what the backend decided; settings have the store and role that the job uses.
    """

    job_id: str
    job: TrainingJob
    plan: Any
    channels: list[Channel]
    backend: Backend
    settings: Settings

    def upload(self, progress: storage.Progress = lambda n: None) -> None:
        """Put the texts where the job reads them."""
        for channel in self.channels:
            if channel.upload is not None:
                if channel.upload.uploaded and not self.job.is_local:
                    logger.info(f"upload: {channel.named} to {channel.uri}")
                corpus.send(channel.upload, channel.sources, self.settings, progress)

    def go(self, progress: storage.Progress = lambda n: None) -> str:
        """Upload the texts, submit the job, and return its id.

        Raises:
            KeyboardInterrupt: names the job if it may run, and cost money.
        """
        self.upload(progress)
        with storage.reported(str(self.settings.home)):
            keep(self.job.source, self.settings)  # models and resumed jobs need it
        try:
            self.backend.submit(self.job_id, self.job, self.plan)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"`sm-nanogpt status {self.job_id}` shows whether the job was submitted;"
                f" `sm-nanogpt stop {self.job_id}` stops it"
            ) from None
        return self.job_id

    @property
    def place(self) -> str:
        """Where the files of the job are going to be."""
        return storage.join(self.settings.data_store, "jobs", self.job_id)


def prepare(request: Request, settings: Settings, job_id: str | None = None) -> Ready:
    """Make a Request into a job that is complete and checked. Changes nothing in the store."""
    job_id = job_id or new_job_id()
    asked, before, base = request, None, None
    if earlier := find_earlier(request, settings):
        request, before = resumed(request, earlier, settings)
        base = earlier.job.base
    check_name(request, settings)
    if request.is_local and settings.offline:
        raise InputError("--dry-run shows the request to SageMaker; --instance local sends none")
    backend = backend_for(request.instance or "local", settings)
    if isinstance(backend, SageMakerBackend):
        settings = backend.settings = cloud_settings(backend)
        request = prescribed(request, settings)
    request = with_folder(request)
    # The texts of a local job stay on this machine.
    near = settings.model_copy(update={"store": ""}) if request.is_local else settings
    model = tokenizer = None
    if named := asked.init_from or "":
        base = start.base_of(named)
        request, model, tokenizer = started(request, named, near)
    gpu = machines.looks_like_gpu(request.instance or "local")
    if gpu and request.preset is None and not (asked.resume or asked.init_from):
        request = request.model_copy(update={"preset": "baby"})
    if request.preset != "auto":
        request.config(1)  # tells of a mistake before a long text is read
    data = request.data or corpus.last_upload(settings)
    texts = find_texts(data, request.validation, settings, near)
    if request.preset == "auto":
        request = start.fitted(request, *size_of(texts["data"], near))
    request = with_whole_windows(request, texts["data"])
    job = complete(request, texts, base)
    check_device(job, "device" in asked.hyperparameters, earlier)
    if earlier is not None and before is not None:
        job.check_resumable(before, earlier.description)
    if tokenizer is not None:
        for text in texts.values():
            start.check_known(text.named, text.upload, tokenizer, named)
    check_texts(texts, job.config(1))
    if (upload := texts["data"].upload) is not None:
        padding = 1 + upload.chats  # rows of conversations may be half empty
        start.check_readings(job, n_training(upload) * padding)
    job, plan = backend.plan(job_id, job)
    log_choices(asked, job, texts["data"])
    channels = [*texts.values(), *([model] if model else [])]
    return Ready(job_id, job, plan, channels, backend, near)


def check_name(request: Request, settings: Settings) -> None:
    """Raise InputError if a job of the caller, or a sweep of this machine, has the name."""
    if request.name is None:
        return
    if group := recorded_as(request.name, settings):
        raise InputError(f"--name {request.name}: sweep {group} has this name; choose another")
    listing = Listing(settings, name=request.name)
    elsewhere = not settings.offline and (not request.is_local or remembered(settings))
    if taken := next(iter(listing) if elsewhere else listing.local(), None):
        raise InputError(f"--name {request.name}: job {taken.job_id} has this name; choose another")
    if listing.failure is not None:
        if not request.is_local:
            raise listing.failure
        logger.info(f"{listing.failure}; of the jobs of this machine, none is named {request.name}")


def cloud_settings(backend: SageMakerBackend) -> Settings:
    """The settings with a store that SageMaker can read and an execution role.

    They come from the settings, else the stack, else the role of the SageMaker notebook that this
    runs in and the account's default SageMaker bucket. No bucket is created.
    """
    settings = with_stack(backend.settings, session=backend.session)
    if not settings.role and not settings.offline and (role := notebook_role(backend.client)):
        logger.info(f"role: {role} (from this SageMaker notebook)")
        settings = settings.model_copy(update={"role": role})
    if settings.store:
        return settings
    how = "set --store or SM_NANOGPT_STORE to s3://bucket/prefix"
    if settings.offline:
        raise InputError(
            f"a dry run does not ask AWS, and no stack is known here yet: {how}; or, if you have a"
            " stack, run `sm-nanogpt infra show` once"
        )
    bucket = backend.default_bucket()
    if bucket is None:
        raise InputError(
            "no store is set, and the account has no default bucket: create one with"
            f" `sm-nanogpt infra deploy`, or {how}"
        )
    store = f"s3://{bucket}/sm-nanogpt"
    logger.info(f"store: {store} (the account's default SageMaker bucket)")
    return settings.model_copy(update={"store": store})


def prescribed(request: Request, settings: Settings) -> Request:
    """The request with defaults from the settings, such as subnets; tags are merged."""
    values = {name: value for name in PRESCRIBED if (value := getattr(settings, name))}
    added = sorted(values.keys() - request.given().keys() | values.keys() & {"tags"})
    if not added:
        return request
    logger.info(f"configured: {', '.join(added)}")
    tags = {**settings.tags, **request.tags}
    try:
        return request.replaced(**{**values, **request.given(), "tags": tags})
    except InputError as error:
        raise InputError(f"from the settings: {error}") from None


@dataclass(frozen=True)
class Earlier:
    """A job that another one resumes: as it was submitted, and how it stands."""

    job: TrainingJob
    description: JobDescription


def find_earlier(request: Request, settings: Settings) -> Earlier | None:
    """The job that a request resumes."""
    if request.resume is None:
        return None
    if request.preset == "auto":
        raise InputError("--preset auto is for a new run; leave it out with --resume")
    if request.init_from is not None:
        raise InputError("--init-from starts a new run; leave it out with --resume")
    backend, description = find(request.resume, settings)
    if description.is_running:
        raise ServiceError(
            f"job {request.resume} is {description.status}; stop it first:"
            f" `sm-nanogpt stop {request.resume}`"
        )
    if description.checkpoint_uri is None:
        raise ServiceError(
            f"job {request.resume} ({description.status}) left no checkpoint to resume from"
        )
    return Earlier(backend.job(description.job_id), description)


def resumed(request: Request, earlier: Earlier, settings: Settings) -> tuple[Request, TrainingJob]:
    """Fill the fields that a request leaves out from the job that it resumes.

    Hyperparameters, variables and tags are merged one by one. Logs the earlier hyperparameters
    that this folder does not have.

    Returns:
        The request, and the earlier job as this folder computes it.
    """
    before, description, given = earlier.job, earlier.description, request.given()
    given.setdefault("instance", before.instance)
    if (description.instance == "local") != (given["instance"] == "local"):
        raise InputError(
            f"job {request.resume} ran on {description.instance}, and --instance"
            f" {given['instance']} cannot read its checkpoints"
        )
    if request.entry_point is None and before.entry_point is not None:
        source = find_source(before.source_sha256 or "", settings)
        given["entry_point"] = source.directory
        request = request.model_copy(update={"entry_point": source.directory})
    sent, known = description.hyperparameters, {f.name for f in fields(request.module.Config)}
    if unknown := sorted(sent.keys() - known):
        logger.info(
            f"{request.source.directory} has no {', '.join(unknown)};"
            " the earlier job's values are left out"
        )
    sent = {name: value for name, value in sent.items() if name in known}
    before = before.model_copy(
        update={"preset": None, "hyperparameters": sent, "entry_point": request.entry_point}
    )
    hyperparameters = {**sent, **request.explicit_hyperparameters(asdict(before.config(1)))}
    kept = before.model_dump(include=set(Request.model_fields) - NEW, exclude_defaults=True)
    if given.get("spot", before.spot) != before.spot:  # each belongs to one kind of capacity
        kept.pop("max_wait" if before.spot else "keep_alive", None)
    if any(map(machines.has_local_storage, machines.types_of(given["instance"]))):
        kept.pop("volume_size", None)
    for name, other in permutations(("image_uri", "pytorch_version")):
        if name in given:
            kept.pop(other, None)
    for name in given.keys() & kept.keys() & {"environment", "tags"}:
        given[name] = {**kept[name], **given[name]}
    after = Request(**{**kept, **given, "preset": None, "hyperparameters": hyperparameters})
    after._inherited = frozenset(kept) - frozenset(given)
    return after, before


def with_folder(request: Request) -> Request:
    """The request with its training folder, which is read here and not again."""
    if request.entry_point is None:
        source = request.source
    else:
        source = Source.read(storage.path_of(request.entry_point).absolute())
        source.check()
        request = request.model_copy(update={"entry_point": source.directory})
    request._source = source
    return request


def started(request: Request, named: str, settings: Settings) -> tuple[Request, Channel, Tokenizer]:
    """The request with the shape of the model that it starts from, the model, its tokenizer."""
    with start.opened(named, settings) as (directory, uri):
        request, tokenizer = start.with_values(request, directory)
        if uri is not None:
            channel = Channel(named, uri, None, [])
        elif storage.local_path(settings.data_store) is not None:
            channel = Channel(named, storage.to_uri(directory), None, [])
        else:
            upload, sources = start.survey(named, directory, settings)
            channel = Channel(named, upload.uri, upload, sources)
    return request.model_copy(update={"init_from": channel.uri}), channel, tokenizer


def complete(request: Request, texts: Mapping[str, Channel], base: str | None) -> TrainingJob:
    """The job with the places of its texts, with the launcher for its instance type, and with what
    it is in words; base names the model that it starts from."""
    places = {name: text.uri for name, text in texts.items()}
    chosen = {**request.given(), **places, "source_sha256": request.source.sha256}
    if not request.is_local:
        for instance in request.instances:
            machines.log_instance(instance)
        default = machines.default_launcher(request.instance or "")
        if chosen.setdefault("launcher", default) == default != "pytorchddp":
            logger.info(
                f"launcher: {default}, since the SageMaker SDK refuses pytorchddp on"
                f" {machines.TORCHRUN_ALONE}"
            )
    job = TrainingJob(**chosen, base=base)
    job._inherited, job._source = request._inherited, request._source
    return job.model_copy(update={"summary": summary_of(job)})


def check_device(job: TrainingJob, asked: bool, earlier: Earlier | None) -> None:
    """Raise InputError for a job that would leave its GPUs idle, unless the user asked for that.

    The device of an earlier job on the CPU is not asked for.
    """
    stays = earlier is not None and machines.looks_like_gpu(earlier.description.instance)
    if asked or (stays and "device" in job.hyperparameters):
        return
    if machines.looks_like_gpu(job.instance) and getattr(job.config(1), "device", "") == "cpu":
        what = f"--preset {job.preset}" if job.preset else "the job"
        raise InputError(
            f"{what} trains on the CPU, and {job.instance} has GPUs; add `--set device=auto`, or"
            " `--set device=cpu` if you mean it"
        )


def log_choices(asked: Request, job: TrainingJob, text: Channel) -> None:
    last = asked.data is None and asked.resume is None
    origin = f" (the last upload{f', {text.named}' * (text.named != job.data)})" if last else ""
    if asked.data != job.data:
        logger.info(f"data: {job.data}{origin}")
    if job.preset and not asked.preset:
        logger.info(f"preset: {job.preset}")


def new_job_id() -> str:
    """A unique id with the time in UTC, valid as a SageMaker job name."""
    return f"sm-nanogpt-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
