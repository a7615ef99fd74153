"""Complete, check and submit a job: from a TrainingJob to a running one.

Called by `launch` of the command line, by the Python API and by `doctor`.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

from launcher import corpus, sizing, starting, storage
from launcher.aws.images import TORCHRUN_ALONE, default_launcher
from launcher.aws.instances import has_local_storage, log_instance, looks_like_gpu
from launcher.aws.stack import with_stack
from launcher.backends import Backend
from launcher.backends.sagemaker import SageMakerBackend
from launcher.documents import check_regular
from launcher.errors import InputError, ServiceError
from launcher.job import JobDescription, TrainingJob
from launcher.settings import Settings, load_settings
from launcher.source import Source, find_source, keep
from launcher.tracking import backend_for, find

logger = logging.getLogger(__name__)

PRESCRIBED = ("subnets", "security_group_ids", "network_isolation", "encrypt_traffic", "tags")


def launch(job: TrainingJob, settings: Settings | None = None) -> str:
    """Start a training job and return its id at once.

    A local path as data is uploaded first; without data, the job uses the last upload. With
    `resume`, fields that the job leaves out come from the earlier job.

    Raises:
        InputError: the job cannot run; nothing was started.
        ServiceError: the store or the service failed.
        KeyboardInterrupt: names the job if it may have been submitted.
    """
    ready = prepare(job, settings or load_settings())
    ready.upload()
    job_id = new_job_id()
    with naming(job_id):
        ready.submit(job_id)
    return job_id


@dataclass(frozen=True)
class Ready:
    """A job that can be submitted, complete and checked, once its texts are uploaded.

    settings have the store and role that the job uses.
    """

    job: TrainingJob
    plan: Any
    channels: list[Channel]
    backend: Backend
    settings: Settings

    def upload(self, progress: storage.Progress = lambda n: None) -> None:
        """Put the texts where the job reads them."""
        local = self.job.instance == "local"
        for channel in self.channels:
            if channel.upload is not None:
                if channel.upload.uploaded and not local:
                    logger.info(f"upload: {channel.named} to {channel.uri}")
                corpus.send(channel.upload, channel.sources, near(self.settings, local), progress)

    def submit(self, job_id: str) -> None:
        with storage.reported(str(self.settings.home)):
            keep(self.job.source, self.settings)  # models and resumed jobs need it
        self.backend.submit(job_id, self.job, self.plan)

    def request(self, job_id: str) -> dict[str, Any]:
        """What `submit` would send to SageMaker."""
        return self.backend.request(job_id, self.job, self.plan)


def cloud_settings(settings: Settings, dry_run: bool = False) -> Settings:
    """The settings with a store that SageMaker can read and an execution role.

    They come from the settings, else the stack, else the role of the SageMaker notebook that this
    runs in and the account's default SageMaker bucket. No bucket is created.

    Raises:
        InputError: there is no store.
        ServiceError: AWS cannot be asked.
    """
    settings = with_stack(settings, offline=dry_run)
    backend = SageMakerBackend(settings)
    if not settings.role and not dry_run and (role := backend.notebook_role()):
        logger.info(f"role: {role} (from this SageMaker notebook)")
        settings = settings.model_copy(update={"role": role})
    if settings.store:
        return settings
    how = "set --store or SM_NANOGPT_STORE to s3://bucket/prefix"
    if dry_run:
        region = "" if backend.session.region_name else ", and --region or AWS_REGION to a region"
        raise InputError(
            f"a dry run does not ask AWS, and no stack is known here yet: {how}{region}; or, if you"
            f" have a stack, run `sm-nanogpt infra show` once"
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


def near(settings: Settings, local: bool) -> Settings:
    """The settings whose store holds a job's texts. Those of a local job stay on this machine."""
    return settings.model_copy(update={"store": ""}) if local else settings


def prepare(job: TrainingJob, settings: Settings, dry_run: bool = False) -> Ready:
    """Complete and check a job, without a change to the store.

    A dry run does not ask the store what is there already.

    Raises:
        InputError, ServiceError: as launch.
    """
    asked = job
    if job.resume is not None and job.preset == "auto":
        raise InputError("--preset auto is for a new run; leave it out with --resume")
    if job.resume is not None and job.init_from is not None:
        raise InputError("--init-from starts a new run; leave it out with --resume")
    if job.resume is not None:
        home, earlier = find(job.resume, settings)
        job = ready_to_resume(job, home, earlier, settings)
    local = job.instance == "local"
    if not local:
        settings = cloud_settings(settings, dry_run)
    backend = backend_for(job.instance, settings)
    if not local:
        for instance in job.instances:
            log_instance(instance)
    if job.resume is not None:
        job, before = take_over(job, home, earlier, settings)
    if not local:
        job = with_prescribed(job, settings)
    if job.entry_point is not None:
        place = storage.path_of(job.entry_point).absolute()
        source = Source.read(place)
        source.check()
        job = job.model_copy(update={"entry_point": source.directory})
    model = tokenizer = None
    if asked.init_from is not None:
        job, model, tokenizer = start_from(job, asked.init_from, near(settings, local), dry_run)
    elif job.preset is None and job.resume is None and looks_like_gpu(job.instance):
        job = job.model_copy(update={"preset": "baby"})
    channels: dict[str, Channel] = {}
    if job.preset == "auto":
        channels = find_channels(job, settings, dry_run)
        n_tokens, vocabulary_size = size_of(channels["data"], dry_run)
        job = sizing.fitted(job, n_tokens, vocabulary_size)
    moves = job.resume is not None and not looks_like_gpu(earlier.instance)
    asks = "device" in (asked if moves else job).hyperparameters
    if looks_like_gpu(job.instance) and getattr(job.config(1), "device", "") == "cpu" and not asks:
        what = f"--preset {job.preset}" if job.preset else "the job"
        raise InputError(
            f"{what} trains on the CPU, and {job.instance} has GPUs; add `--set device=auto`, or"
            " `--set device=cpu` if you mean it"
        )
    launcher = default_launcher(job.instance)
    if "launcher" not in job.model_fields_set and job.launcher != launcher:
        job = job.model_copy(update={"launcher": launcher})
        logger.info(
            f"launcher: {launcher}, since the SageMaker SDK refuses pytorchddp on {TORCHRUN_ALONE}"
        )
    plan = backend.check(job, dry_run)
    job = backend.afford(job, dry_run)
    channels = channels or find_channels(job, settings, dry_run)
    if tokenizer is not None:
        for channel in channels.values():
            starting.check_known(channel.named, channel.upload, tokenizer, asked.init_from or "")
    check_texts(channels, job.config(1))
    if channels["data"].upload is not None:
        sizing.check_readings(job, size_of(channels["data"])[0])
    known = channels["data"].upload
    sizing.check_memory(job, known.vocabulary_size if known else 0)
    places = {name: channel.uri for name, channel in channels.items()}
    job = job.model_copy(update={**places, "source_sha256": job.source.sha256})
    if job.resume is not None:
        job.check_resumable(before, earlier)
    if not local:  # before anything is uploaded
        backend.request(f"{new_job_id()}-100-10", job, plan)
    named, last = channels["data"].named, asked.data is None and asked.resume is None
    origin = f" (the last upload{f', {named}' * (named != job.data)})" if last else ""
    logger.info(f"data: {job.data}{origin}")
    if job.preset and not asked.preset:
        logger.info(f"preset: {job.preset}")
    every = [*channels.values(), *([model] if model else [])]
    return Ready(job, plan, every, backend, settings)


def with_prescribed(job: TrainingJob, settings: Settings) -> TrainingJob:
    """The job with defaults from the settings, such as subnets; tags are merged.

    Raises:
        InputError: the settings hold something that no job may have.
    """
    prescribed = {name: value for name in PRESCRIBED if (value := getattr(settings, name))}
    given = {name: getattr(job, name) for name in job.model_fields_set}
    added = sorted(prescribed.keys() - given.keys() | prescribed.keys() & {"tags"})
    if not added:
        return job
    logger.info(f"configured: {', '.join(added)}")
    tags = {**settings.tags, **job.tags}
    try:
        ready = TrainingJob(**{**prescribed, **given, "tags": tags})
    except InputError as error:
        raise InputError(f"from the settings: {error}") from None
    ready._taken_over = job._taken_over
    return ready


def ready_to_resume(
    job: TrainingJob, home: Backend, earlier: JobDescription, settings: Settings
) -> TrainingJob:
    """The job with the instance types of the job that it resumes, unless it names some.

    Raises:
        InputError: one job is local and the other on SageMaker.
        ServiceError: the earlier job still runs, or left no checkpoint.
    """
    if earlier.is_running:
        raise ServiceError(
            f"job {job.resume} is {earlier.status}; stop it first: `sm-nanogpt stop {job.resume}`"
        )
    if earlier.checkpoint_uri is None:
        raise ServiceError(f"job {job.resume} ({earlier.status}) left no checkpoint to resume from")
    if job.instance_is_open:
        # A new TrainingJob, so that it is validated for this instance; with all types that the
        # earlier job named, not only the one that it ran on.
        given = {name: getattr(job, name) for name in job.model_fields_set}
        return TrainingJob(**given, instance=home.job(earlier.job_id).instance)
    if (earlier.instance == "local") != (job.instance == "local"):
        raise InputError(
            f"job {job.resume} ran on {earlier.instance}, and --instance {job.instance} cannot read"
            " its checkpoints"
        )
    return job


def take_over(
    job: TrainingJob, home: Backend, earlier: JobDescription, settings: Settings
) -> tuple[TrainingJob, TrainingJob]:
    """Fill the fields that a job leaves out from the job that it resumes.

    Hyperparameters, variables and tags are merged one by one. Logs the earlier hyperparameters
    that this folder does not have.

    Returns:
        The job, and the earlier job, which ran at `home`.
    """
    assert job.resume is not None
    before = home.job(job.resume)
    given = {
        name: getattr(job, name) for name in job.model_fields_set if getattr(job, name) is not None
    }
    if job.entry_point is None and before.entry_point is not None:
        source = find_source(before.source_sha256 or "", settings)
        job = job.model_copy(update={"entry_point": source.directory})
    sent, known = earlier.hyperparameters, job.hyperparameter_names()
    if unknown := sorted(sent.keys() - known):
        logger.info(
            f"{job.source.directory} has no {', '.join(unknown)};"
            " the earlier job's values are left out"
        )
    sent = {name: value for name, value in sent.items() if name in known}
    before = before.model_copy(
        update={"preset": None, "hyperparameters": sent, "entry_point": job.entry_point}
    )
    hyperparameters = {**sent, **job.explicit_hyperparameters(asdict(before.config(1)))}
    own = {"resume", "preset", "hyperparameters", "affordable_run", "worst_cost", "source_sha256"}
    kept = before.model_dump(exclude=own, exclude_defaults=True)
    if given.get("spot", before.spot) != before.spot:  # each belongs to one kind of capacity
        kept.pop("max_wait" if before.spot else "keep_alive", None)
    if any(map(has_local_storage, job.instances)):
        kept.pop("volume_size", None)
    for name, other in permutations(("image_uri", "pytorch_version")):
        if name in given:
            kept.pop(other, None)
    for name in given.keys() & kept.keys() & {"environment", "tags"}:
        given[name] = {**kept[name], **given[name]}
    after = TrainingJob(**{**kept, **given, "preset": None, "hyperparameters": hyperparameters})
    after._taken_over = frozenset(kept) - frozenset(given)
    return after, before


@dataclass(frozen=True)
class Channel:
    """The text or model of one channel: the name that the user gave, its URI, files to upload.

    upload is None for text on S3 that `upload-data` did not put there; its length is unknown.
    """

    named: str
    uri: str
    upload: corpus.Upload | None
    sources: list[Path]


def find_channel(location: str, settings: Settings, offline: bool = False) -> Channel:
    """Find where the job reads a text; survey a local one for its upload."""
    uri, path = storage.to_uri(location), storage.local_path(location)
    if path is None and offline:
        return Channel(location, uri, None, [])
    known = corpus.find_upload(uri, settings)
    if known is None and corpus.read_manifest(uri, settings) is not None:
        raise InputError(f"{location}: a file of this upload is missing; upload the text again")
    if known is not None and path is not None:
        check_regular(path)
    if known is not None and (path is None or storage.local_path(settings.data_store) is not None):
        return Channel(location, uri, replace(known, uploaded=False), [])
    if path is None:
        there = storage.list_files(uri, settings)
        if not any(name.endswith(".txt") or name == "meta.json" for name in there):
            what = "no *.txt file is there" if there else "nothing is there"
            raise InputError(f"{location}: {what}")
        return Channel(location, uri, None, [])
    if known is not None and known.train_tokens:  # made here, before there was a store on S3
        sources = [path / name for name in known.files]
        uri = storage.join(settings.data_store, "data", path.name)
        upload = replace(known, uri=uri, uploaded=offline or not corpus.find_upload(uri, settings))
    else:
        upload, sources = corpus.survey(path, settings, offline)
    return Channel(location, upload.uri, upload, sources)


def start_from(
    job: TrainingJob, named: str, settings: Settings, offline: bool
) -> tuple[TrainingJob, Channel, Any]:
    """The job with the shape of the model that it starts from, the model, and its tokenizer."""
    with starting.opened(named, settings) as (directory, uri):
        job, tokenizer = starting.with_values(job, directory)
        if uri is not None:
            channel = Channel(named, uri, None, [])
        elif storage.local_path(settings.data_store) is not None:
            channel = Channel(named, storage.to_uri(directory), None, [])
        else:
            upload, sources = starting.survey(named, directory, settings, offline)
            channel = Channel(named, upload.uri, upload, sources)
    return job.model_copy(update={"init_from": channel.uri}), channel, tokenizer


def find_channels(job: TrainingJob, settings: Settings, offline: bool) -> dict[str, Channel]:
    """Where the job reads its texts, by the job's fields."""
    local = job.instance == "local"
    data = job.data if job.data is not None else corpus.last_upload(settings, offline, local)
    named = {"data": data, "validation": job.validation}
    near_by = near(settings, local)
    return {name: find_channel(text, near_by, offline) for name, text in named.items() if text}


def size_of(channel: Channel, offline: bool = False) -> tuple[int, int]:
    """The tokens to train on, or characters, and how many different ones there are.

    Raises:
        InputError: `upload-data` did not put the text there.
    """
    if channel.upload is None and offline:
        raise InputError(
            f"{channel.named}: --preset auto needs the length of the text, and a dry run does not"
            " ask S3; name a preset, or a local text"
        )
    if channel.upload is None:
        raise InputError(
            f"{channel.named}: --preset auto needs text that `upload-data` put there; name a preset"
        )
    n = channel.upload.train_tokens or int(0.9 * channel.upload.characters)
    return n, channel.upload.vocabulary_size


def check_texts(channels: Mapping[str, Channel], config: Any) -> None:
    """Raise InputError if a run of this config would refuse the texts."""
    parts = []
    for name, channel in channels.items():
        if channel.upload is None:
            continue
        if channel.upload.train_tokens and len(channels) > 1:
            raise InputError(
                f"{channel.named}: it holds tokens, with their own validation part; leave out"
                " --validation, or give two texts"
            )
        if not channel.upload.train_tokens and getattr(config, "mask_documents", False):
            raise InputError(
                f"{channel.named}: mask_documents needs tokens, whose documents have an end; leave"
                " it out, or encode the text with `upload-data --tokenizer`"
            )
        if 0 < getattr(config, "vocab_size", 0) < channel.upload.vocabulary_size:
            unit = "tokens" if channel.upload.train_tokens else "characters"
            raise InputError(
                f"{channel.named}: it has {channel.upload.vocabulary_size} different {unit}, more"
                f" than vocab_size={config.vocab_size}"
            )
        n = channel.upload.characters
        if channel.upload.train_tokens:
            parts += [(channel, "training", channel.upload.train_tokens)]
            parts += [(channel, "validation", channel.upload.val_tokens)]
        elif len(channels) == 1:
            n_train = int(n * (1 - config.validation_fraction))
            parts += [(channel, "training", n_train), (channel, "validation", n - n_train)]
        else:
            parts.append((channel, "training" if name == "data" else name, n))
    for channel, part, length in parts:
        assert channel.upload is not None
        unit = "tokens" if channel.upload.train_tokens else "characters"
        if length < config.block_size + 1:
            raise InputError(
                f"{channel.named}: the {part} text has {length} {unit}, and one window of"
                f" block_size={config.block_size} needs {config.block_size + 1}; use more text or"
                " a smaller block_size"
            )


@contextmanager
def naming(job_id: str) -> Iterator[None]:
    """Name the job when its submission is interrupted: it may run, and cost money."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"`sm-nanogpt status {job_id}` shows whether the job was submitted;"
            f" `sm-nanogpt stop {job_id}` stops it"
        ) from None


def new_job_id() -> str:
    """A unique id with the time in UTC, valid as a SageMaker job name."""
    return f"sm-nanogpt-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
