"""Complete, check and submit a job: from a Request to a TrainingJob that runs."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field, fields
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

from launcher import machines
from launcher.aws import Offline
from launcher.errors import InputError, ServiceError, about
from launcher.files import storage
from launcher.files.progress import byte_progress
from launcher.finding import Backend, Listing, find
from launcher.forecast import table
from launcher.job import Expected, JobDescription, Request, TrainingJob
from launcher.launching import start
from launcher.launching.records import recorded_as
from launcher.launching.texts import check_readings, check_texts, find_texts
from launcher.local.backend import LocalBackend
from launcher.sagemaker.backend import SageMakerBackend
from launcher.sagemaker.caller import remembered
from launcher.sagemaker.stack import notebook_role, with_stack
from launcher.settings import Settings
from launcher.source import find_source, keep
from launcher.text import corpus
from launcher.text.channels import Channel, Texts

logger = logging.getLogger(__name__)

PRESCRIBED = ("subnets", "security_group_ids", "network_isolation", "encrypt_traffic", "tags")
# What a job does not take over as it is.
NEW = {"name", "resume", "preset", "size", "hyperparameters"}


@dataclass
class Plan:
    """A job that can be submitted, once: complete, checked and priced.

    request is that of CreateTrainingJob, and empty for a job of this machine. placement is what the
    backend decided, whose settings have the store and role that the job uses.
    """

    job_id: str
    job: TrainingJob
    request: Mapping[str, Any]
    placement: Any
    channels: Mapping[str, Channel]  # by the fields of the job
    backend: Backend
    submitted: bool = field(default=False, init=False)

    def upload(self) -> None:
        with byte_progress("upload") as progress:
            for channel in self.channels.values():
                if channel.upload is not None:
                    if channel.upload.uploaded and not self.job.is_local:
                        logger.info(f"upload: {channel.named} to {channel.uri}")
                    corpus.send(channel.upload, channel.sources, self.backend.settings, progress)

    def submit(self) -> str:
        """Upload the texts, start the job, and return its id.

        After an interruption the job may run, and cost money.
        """
        if self.submitted:  # again, it would take the files of the job that runs
            raise InputError(f"the plan of job {self.job_id} was submitted before; make another")
        self.upload()
        with storage.reported(str(self.backend.settings.home)):
            keep(self.job.source, self.backend.settings)  # models and resumed jobs need it
        self.submitted = True
        self.backend.submit(self.job_id, self.job, self.placement, self.request)
        return self.job_id


def prepare(
    request: Request, settings: Settings, job_id: str | None = None, texts: Texts | None = None
) -> Plan:
    """Make a Request into a job that is complete, checked and priced. Changes nothing in the store.

    texts: the channels of a plan with the same texts, which are not read again.
    """
    job_id = job_id or new_job_id()
    draft = fill(request, settings, texts)
    check(draft)
    job, backend = draft.job, draft.backend
    placement: Any = backend.check(job)
    job = backend.price(job, draft.earlier)
    made = backend.request(job_id, job, placement)
    log_choices(request, job, draft.texts["data"])
    channels = {**draft.texts, **{name: each.channel for name, each in draft.models.items()}}
    return Plan(job_id, job, made, placement, channels, backend)


# -- fill what is open -----------------------------------------------------------------------------


class Earlier(NamedTuple):
    """A job that another one resumes: as it was submitted, and how it stands."""

    job: TrainingJob
    description: JobDescription


@dataclass(frozen=True)
class Draft:
    """A job with every field filled, and what its checks need; its backend has its store."""

    asked: Request
    job: TrainingJob
    texts: Texts
    models: Mapping[str, start.InitialModel]  # by the fields init_from and teacher
    earlier: Earlier | None
    backend: Backend


def fill(asked: Request, settings: Settings, known: Texts | None = None) -> Draft:
    """Choose what a request leaves open: from the earlier job, the settings, the initial model, the
    text, and the defaults of the machine."""
    with about("resume", asked.resume):
        request, earlier = asked, find_earlier(asked, settings)
    if earlier is not None:
        request, earlier = resumed(asked, earlier, settings)
    check_name(request, settings)
    backend: Backend
    if request.is_local:
        backend = LocalBackend(settings.model_copy(update={"store": ""}))
    else:
        backend = SageMakerBackend(settings)
        settings = backend.settings = cloud_settings(backend)
        request = prescribed(request, settings)
    near = backend.settings
    with about("entry_point", request.entry_point):
        request = with_folder(request)
    models, base = dict[str, start.InitialModel](), earlier.job.base if earlier else None
    if asked.init_from is not None:
        with about("init_from", asked.init_from):
            models["init_from"] = model = start.find_model(request, near)
        values = {"hyperparameters": model.hyperparameters, "init_from": model.channel.uri}
        request, base = request.model_copy(update=values), model.name
    if asked.teacher is not None:
        with about("teacher", asked.teacher):
            models["teacher"] = teacher = start.find_model(request, near, "teacher")
        request = request.model_copy(update={"teacher": teacher.channel.uri})
    gpu = machines.looks_like_gpu(request.instance or "local")
    if gpu and request.preset is request.size is None and not (asked.resume or asked.init_from):
        request = request.model_copy(update={"preset": "baby"})
    if request.preset != "auto" and request.size is None:
        request.config(1)  # tells of a mistake before a long text is read
    texts = known or find_texts(request, settings, near)
    with about("data", request.data):
        request = start.sized(request, texts)
    request = start.with_whole_windows(request, texts["data"])
    job = complete(request, texts, base)
    summary = summary_of(job, asked.hyperparameters.keys())
    expected = forecast_of(job, texts, near)
    if earlier is not None and job.config(1) == earlier.job.config(1):  # it is the same run
        expected = earlier.job.expected
        if earlier.job.summary.startswith("size "):
            summary = f"{earlier.job.summary} resumes {request.resume}"
    job = job.model_copy(update={"summary": summary, "expected": expected})
    return Draft(asked, job, texts, models, earlier, backend)


def check_name(request: Request, settings: Settings) -> None:
    """Raise InputError if a job of the caller, or a sweep of this machine, has the name."""
    if request.name is None:
        return
    listing = Listing(settings, name=request.name)
    elsewhere = not request.is_local or remembered(settings)
    jobs = iter(listing) if elsewhere else listing.read(LocalBackend)
    if taken := recorded_as(request.name, settings) or next((job.job_id for job in jobs), None):
        raise InputError(f"{taken} has this name", field="name", value=request.name)
    if listing.failure is not None:
        if not (request.is_local or isinstance(listing.failure, Offline)):
            raise listing.failure
        none = f"of the jobs of this machine, none is named {request.name}"
        logger.info(f"{listing.failure}; {none}", extra={"cause": listing.failure})


def cloud_settings(backend: SageMakerBackend) -> Settings:
    """The settings with a store that SageMaker can read and an execution role.

    They come from the settings, else the stack, else the role of the SageMaker notebook that this
    runs in and the account's default SageMaker bucket. No bucket is created.
    """
    settings = with_stack(backend.settings)
    if not settings.role and (role := notebook_role(backend.client)):
        logger.info(f"role: {role} (from this SageMaker notebook)")
        settings = settings.model_copy(update={"role": role})
    if settings.store:
        return settings
    try:
        bucket = backend.default_bucket()
    except Offline as error:
        raise InputError(f"{error}, and no stack is known here yet", "no-stack-seen") from None
    if bucket is None:
        raise InputError("no store is set, and the account has no default bucket", "no-store")
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


def find_earlier(request: Request, settings: Settings) -> Earlier | None:
    """The job that a request resumes, which a dry run looks up too."""
    if request.resume is None:
        return None
    new = {"init_from": request.init_from, "teacher": request.teacher}
    new["preset"] = request.preset if request.preset == "auto" else None
    for name, value in new.items():
        if value is not None:
            raise InputError("is for a new run, without resume", field=name, value=value)
    backend, description = find(request.resume, settings.with_offline(False))
    is_it = f"job {request.resume} is {description.status}"
    if description.is_running:
        raise ServiceError(is_it, "job-is-running", job_id=request.resume)
    if description.checkpoint_uri is None:
        raise ServiceError(f"{is_it}, and left no checkpoint to resume from")
    return Earlier(backend.job(description.job_id), description)


def resumed(request: Request, earlier: Earlier, settings: Settings) -> tuple[Request, Earlier]:
    """Fill the fields that a request leaves out from the job that it resumes.

    Hyperparameters, variables and tags are merged one by one. Logs the earlier hyperparameters
    that this folder does not have. Returns the request, and the earlier job as this folder computes
    it.
    """
    before, description, given = earlier.job, earlier.description, request.given()
    here = given.setdefault("instance", before.instance)
    if (description.instance == "local") != (here == "local"):
        ran = f"job {request.resume}, which ran on {description.instance}"
        raise InputError(f"cannot read the checkpoints of {ran}", field="instance", value=here)
    if request.entry_point is None and before.entry_point is not None:
        source = find_source(before.source_sha256 or "", settings)
        given["entry_point"] = source.directory
        request = request.model_copy(update={"entry_point": source.directory})
    config = request.source.module("config").Config
    sent, known = description.hyperparameters, {f.name for f in fields(config)}
    if unknown := sorted(sent.keys() - known):
        folder = request.source.directory
        logger.info(f"{folder} has no {', '.join(unknown)}; the earlier job's values are left out")
    sent = {name: value for name, value in sent.items() if name in known}
    update = {"preset": None, "hyperparameters": sent, "entry_point": request.entry_point}
    before = before.model_copy(update=update)
    hyperparameters = {**sent, **request.explicit_hyperparameters(asdict(before.config(1)))}
    kept = before.model_dump(include=set(Request.model_fields) - NEW, exclude_defaults=True)
    if given.get("spot", before.spot) != before.spot:  # each belongs to one kind of capacity
        kept.pop("max_wait" if before.spot else "keep_alive", None)
    if any(map(machines.has_local_storage, machines.types_of(here))):
        kept.pop("volume_size", None)
    for name, other in permutations(("image_uri", "pytorch_version")):
        if name in given:
            kept.pop(other, None)
    for name in given.keys() & kept.keys() & {"environment", "tags"}:
        given[name] = {**kept[name], **given[name]}
    after = Request(**{**kept, **given, "preset": None, "hyperparameters": hyperparameters})
    after._inherited = frozenset(kept) - frozenset(given)
    return after, Earlier(before, description)


def with_folder(request: Request) -> Request:
    """The request with its training folder, which is read here and not again."""
    source = request.source
    if request.entry_point is not None:
        source.check_complete()
        request = request.model_copy(update={"entry_point": source.directory})
    request._source = source
    return request


def complete(request: Request, texts: Texts, base: str | None) -> TrainingJob:
    """The job with the places of its texts, and with the launcher for its instance type; base names
    the model that it starts from."""
    places = {name: text.uri for name, text in texts.items()}
    chosen = {**request.given(), **places, "source_sha256": request.source.sha256}
    if not request.is_local:
        chosen.setdefault("launcher", machines.default_launcher(request.instance or ""))
    job = TrainingJob(**chosen, base=base)
    job._inherited, job._source = request._inherited, request._source
    return job


def forecast_of(job: TrainingJob, texts: Texts, settings: Settings) -> Expected | None:
    """The loss that was forecast for a job's size on its texts, if the job is that run."""
    if job.size is None or job.teacher is not None:
        return None
    place = kept_forecast(job, texts, settings)
    with job.source.running():
        dialed = job.source.module("sizes").dial(job.size, *start.size_of(texts))
    given = {name: value for name, value in job.hyperparameters.items() if name != "seed"}
    return table.recall(place, job.size) if place and given == dialed else None


def kept_forecast(request: Request, texts: Texts, settings: Settings) -> Path | None:
    """The file that keeps the forecast of texts; None if they were not uploaded from here."""
    hashes = [channel.upload.sha256 for channel in texts.values() if channel.upload]
    if len(hashes) < len(texts):
        return None
    digest = hashlib.sha256(" ".join([*hashes, request.source.sha256]).encode()).hexdigest()
    return settings.home / "forecasts" / f"{digest[:24]}.json"


def summary_of(job: TrainingJob, asked: Set[str] = frozenset()) -> str:
    """The size and what was asked for besides, or the preset or the nearest one and what differs;
    whether the training folder is edited, and which model and job it continues.

    Hyperparameters that an initial model prescribes are left out.
    """
    source, hidden = job.source, {"device"}  # which differs by machine
    module, base = source.module("config"), dict[str, Any]()
    presets = [job.preset] if job.preset else list(module.PRESETS)
    if job.init_from is not None:
        base = source.module("huggingface").FINE_TUNING
        hidden |= {f.name for f in fields(module.Config) if f.metadata["shape"]}
        presets = [job.preset or ""]
    values = {name: v for name, v in asdict(job.config(1)).items() if name not in hidden}

    def words(preset: str) -> list[str]:
        usual = {**asdict(module.Config()), **module.PRESETS.get(preset, {}), **base}
        changed = [f"{name}={shortest(v)}" for name, v in values.items() if usual[name] != v]
        return [*([preset] if preset else []), *changed]

    if job.size:
        given = sorted(values.keys() & asked)
        found = [f"size {job.size:g}", *(f"{n}={shortest(values[n])}" for n in given)]
    else:
        found = min(map(words, presets), key=len)
    found += [] if source.is_packaged else ["edited"]
    found += [f"from {job.base}"] if job.init_from is not None else []
    found += [f"taught by {start.base_of(job.teacher)}"] if job.teacher is not None else []
    found += [f"resumes {job.resume}"] if job.resume is not None else []
    return " ".join(found)


def shortest(value: Any) -> str:
    """A value as `--set` takes it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- check, without the network --------------------------------------------------------------------


def check(draft: Draft) -> None:
    """Raise InputError if the run would refuse its texts or idle; warn of memorizing."""
    job, earlier, config = draft.job, draft.earlier, draft.job.config(1)
    check_device(job, "device" in draft.asked.hyperparameters, earlier)
    if earlier is not None:
        job.check_resumable(earlier.job, earlier.description)
    for model in draft.models.values():
        for text in draft.texts.values():
            model.check_known(text)
    if (teacher := draft.models.get("teacher")) is not None:
        with job.source.running():
            huggingface = job.source.module("huggingface")
            if hasattr(huggingface, "check_teacher"):  # in an older folder, only the run checks
                huggingface.check_teacher(teacher.hyperparameters, config.block_size)
    check_texts(draft.texts, config)
    if (upload := draft.texts["data"].upload) is not None:
        padding = 1 + upload.chats  # rows of conversations may be half empty
        check_readings(draft.asked, config, upload.n_training * padding)


def check_device(job: TrainingJob, asked: bool, earlier: Earlier | None) -> None:
    """Raise InputError for a job that would leave its GPUs idle, unless the user asked for that.

    The device of an earlier job on the CPU is not asked for.
    """
    stays = earlier is not None and machines.looks_like_gpu(earlier.description.instance)
    if asked or (stays and "device" in job.hyperparameters):
        return
    if machines.looks_like_gpu(job.instance) and getattr(job.config(1), "device", "") == "cpu":
        what = f"preset {job.preset}" if job.preset else "the job"
        problem = f"{what} trains on the CPU, and {job.instance} has GPUs"
        with about("instance", job.instance):
            raise InputError(problem, "idle-gpus")


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
