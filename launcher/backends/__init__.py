"""Jobs, wherever they run: one small protocol, and the homes behind it.

A job is known by its id alone; the functions here find the home that it runs in.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from launcher import corpus, money, storage
from launcher.aws import CAPACITY, aws_session, check_region
from launcher.errors import InputError, ServiceError
from launcher.infra import with_stack
from launcher.instances import check_instance, looks_like_gpu
from launcher.job import TrainingJob
from launcher.prices import Price, Prices
from launcher.settings import Settings, Tell, load_settings

CHECKPOINT = re.compile(r"checkpoint-(\d+)\.safetensors")
RUNNING = ("InProgress", "Stopping")

# What to do about a reason that holds these words.
REMEDIES = {
    "CUDA out of memory": "a smaller batch_size, or more gradient_accumulation_steps, needs less",
    "CapacityError": CAPACITY,
    "Data download failed": "the execution role has to be allowed to read the store",
    "MaxRuntimeExceeded": "--max-run gives more time",
    "MaxWaitTimeExceeded": "--max-wait gives more time, --on-demand waits for no spot capacity",
    "No space left on device": "on SageMaker, --volume-size gives more disk",
}


@dataclass(frozen=True)
class JobDescription:
    """A job as it stands.

    status is SageMaker's: InProgress, Stopping, Completed, Failed or Stopped. created, started and
    ended are seconds since the epoch. metrics holds the newest numbers of the curve.
    model_uri and checkpoint_uri are None as long as nothing is there.
    """

    job_id: str
    status: str
    secondary_status: str
    instance: str
    instance_count: int
    created: float
    data: str
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    failure_reason: str | None = None
    started: float | None = None
    ended: float | None = None
    metrics: dict[str, Any] | None = None
    model_uri: str | None = None
    checkpoint_uri: str | None = None
    checkpoint_step: int | None = None  # of the newest
    message: str | None = None  # what the service says of the present state
    billable_seconds: int | None = None  # SageMaker only, as is what follows
    training_seconds: int | None = None
    volume_size: int = 0  # GiB of disk for each instance
    keep_alive: int | None = None  # seconds of warm pool that were asked for
    warm_pool_seconds: int | None = None  # billed after the end; None until the pool is gone
    spot: bool = False
    cost: float | None = None  # USD at `price`, so far or in the end, as launcher.money has it
    price: Price | None = None

    @property
    def is_running(self) -> bool:
        return self.status in RUNNING

    @property
    def has_open_pool(self) -> bool:
        """Whether a warm pool came after the job, and its seconds are not told yet."""
        had_machines = bool(self.billable_seconds or self.started)
        asked = self.ended is not None and self.keep_alive is not None
        return had_machines and asked and self.warm_pool_seconds is None

    def billed_seconds(self, now: float) -> float:
        """Of each instance, in the end or so far.

        What is not told yet is counted by the clock, and a warm pool with all that it may last.
        """
        warm = (self.keep_alive if self.has_open_pool else self.warm_pool_seconds) or 0
        if self.billable_seconds is not None:
            return self.billable_seconds + warm
        if self.started is None:
            return 0.0
        return max(0.0, (self.ended or now) - self.started) + warm


def newest_checkpoint(names: Iterable[str]) -> int | None:
    """The highest step of the checkpoints among these file names."""
    steps = [int(m[1]) for name in names if (m := CHECKPOINT.fullmatch(name))]
    return max(steps, default=None)


class Backend(Protocol):
    """A home for jobs."""

    @property
    def place(self) -> str:
        """Where that is, in words that follow a job's id."""

    @property
    def poll_seconds(self) -> float:
        """How often to ask about a job that is waited for."""

    def check(self, job: TrainingJob, dry_run: bool = False) -> Any:
        """The script's Config of the job. Raises InputError for what this home cannot do."""

    def afford(self, job: TrainingJob, dry_run: bool, tell: Tell) -> TrainingJob:
        """The job within its cost ceiling; tells what it may cost. Raises InputError if it cannot
        be held, or the account may not run such a job."""

    def submit(self, job_id: str, job: TrainingJob) -> None:
        """Starts a job that was checked and whose data is a URI."""

    def describe(self, job_id: str) -> JobDescription | None:
        """None when the job is not of this home."""

    def job(self, job_id: str) -> TrainingJob:
        """What was submitted."""

    def list(self) -> Iterator[JobDescription]:
        """Newest first."""

    def stop(self, job_id: str) -> None:
        """Asks the job to stop, and returns at once."""

    def dry_run(self, job_id: str, job: TrainingJob) -> dict[str, Any]:
        """The request that submit would send. Raises InputError where none is sent."""

    def console_link(self, job_id: str) -> str | None:
        """Where a browser shows the job, if one can."""

    def logs(self, job_id: str, follow: bool) -> Iterator[str]:
        """Lines of all hosts, without line ends; with follow, until the job ends."""


def all_backends(settings: Settings) -> Iterator[Backend]:
    """The homes, this machine first; the next is not touched before it is asked for."""
    from launcher.backends.local import LocalBackend

    yield LocalBackend(settings)
    if settings.reaches_aws:
        from launcher.backends.sagemaker import SageMakerBackend

        yield SageMakerBackend(settings)


def backend_for(instance: str, settings: Settings) -> Backend:
    """Raises InputError when nothing here runs such an instance."""
    if instance == "local":
        from launcher.backends.local import LocalBackend

        return LocalBackend(settings)
    check_instance(instance)
    from launcher.backends.sagemaker import SageMakerBackend

    return SageMakerBackend(settings)


def cloud_settings(
    settings: Settings, dry_run: bool = False, tell: Tell = lambda line: None
) -> Settings:
    """The settings with a store that SageMaker can read, and a role: as set, else the stack's.

    Without a stack, the store is the account's default bucket of SageMaker.

    Raises:
        InputError: no store is set, and none is there; none is created.
        ServiceError: AWS cannot be asked.
    """
    settings = with_stack(settings, offline=dry_run, tell=tell)
    if settings.store:
        return settings
    how = "set --store or SM_NANOGPT_STORE to s3://bucket/prefix"
    if dry_run:
        raise InputError(
            f"a dry run asks AWS for nothing, and no stack was seen from here yet: {how}, or run"
            " `sm-nanogpt infra show` once"
        )
    from launcher.backends.sagemaker import SageMakerBackend

    bucket = SageMakerBackend(settings).default_bucket()
    if bucket is None:
        raise InputError(
            "no store is set, and the account has no default bucket yet: `sm-nanogpt infra deploy`"
            f" makes one, or {how}"
        )
    store = f"s3://{bucket}/sm-nanogpt"
    tell(f"store: {store} (the account's default bucket of SageMaker)")
    return settings.model_copy(update={"store": store})


def find(job_id: str, settings: Settings) -> tuple[Backend, JobDescription]:
    """The home of a job, and the job as it stands.

    Raises:
        ServiceError: no home knows the id.
    """
    backend = None
    for backend in all_backends(settings):
        description = backend.describe(job_id)
        if description is not None:
            return backend, description
    where = backend.place if backend else ""
    raise ServiceError(
        f"there is no job {job_id!r} {where}: `sm-nanogpt jobs` lists those there are"
    )


def new_job_id() -> str:
    """Unique and valid as a SageMaker job name: letters, digits and dashes, 63 at most."""
    return f"sm-nanogpt-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def launch(job: TrainingJob, settings: Settings | None = None) -> str:
    """Starts a training and returns its id at once.

    Without data it trains on the last upload; a path is uploaded first. With `resume`, what the job
    does not say is taken over from the earlier one.

    Raises:
        InputError: the job asks for something impossible; nothing was started.
        ServiceError: the store or the service refuses.
    """
    settings = settings or load_settings()
    if job.instance != "local":
        settings = cloud_settings(settings)
    backend = backend_for(job.instance, settings)
    return submit(prepare(job, settings), backend)


def submit(job: TrainingJob, backend: Backend) -> str:
    job_id = new_job_id()
    backend.submit(job_id, job)
    return job_id


def prepare(
    job: TrainingJob,
    settings: Settings,
    progress: storage.Progress = lambda n: None,
    dry_run: bool = False,
    tell: Tell = lambda line: None,
) -> TrainingJob:
    """The job with everything filled in: what it takes over from another, and data as URIs.

    A dry run sends nothing, and asks nobody whether what it would send is there already.

    Raises:
        InputError, ServiceError: as launch.
    """
    before, step = None, 0
    if job.resume is not None:
        job, before, step = take_over(job, settings, tell)
    if job.entry_point is not None:
        job = job.model_copy(update={"entry_point": job.entry_point.expanduser().absolute()})
    if job.preset is None and job.resume is None and looks_like_gpu(job.instance):
        job = job.model_copy(update={"preset": "baby"})
    # All is checked before anything is uploaded.
    backend = backend_for(job.instance, settings)
    config = backend.check(job, dry_run)
    job = backend.afford(job, dry_run, tell)
    # A path given to a local job goes no further than this machine.
    here = settings.model_copy(update={"store": ""})
    near = here if job.instance == "local" else settings
    data = job.data if job.data is not None else last_data(settings, here, dry_run)
    texts = {"data": survey(data, near, dry_run)}
    if job.validation is not None:
        texts["validation"] = survey(job.validation, near, dry_run)
    check_length(texts, config)
    job = job.model_copy(update={channel: text.uri for channel, text in texts.items()})
    if before is not None:
        job.check_resumable(before, step)
    for text in texts.values():
        if text.upload is not None and not dry_run:
            corpus.send(text.upload, text.sources, progress)
    return job


@dataclass(frozen=True)
class Text:
    """What the user named as a channel. upload is None where nobody here ever read it."""

    named: str
    uri: str
    upload: corpus.Upload | None
    sources: list[Path]


def last_data(settings: Settings, here: Settings, dry_run: bool) -> str:
    """The last upload to the store; without any, the last to this machine's own.

    What was last uploaded from here goes first if it stayed on this machine, as it does where the
    account could not be asked, and earlier ones went to the store. Where no store is set, it may
    have gone to a stack's. A dry run does not ask a remote store; it knows what was uploaded from
    here.
    """
    noted = corpus.read_noted(settings)
    newest = list(noted)[-1:]
    remote = storage.local_path(settings.data_store) is None
    if newest == [here.data_store] and remote and settings.data_store in noted:
        return corpus.last_upload(here).uri
    if not settings.store and newest and storage.local_path(newest[0]) is None:
        return noted[newest[0]]
    try:
        if dry_run and settings.data_store != here.data_store:
            return noted.get(settings.data_store) or corpus.last_upload(here).uri
        return corpus.last_upload(settings).uri
    except corpus.NothingUploaded as nothing:
        try:
            return corpus.last_upload(here).uri
        except corpus.NothingUploaded:
            raise nothing from None


def survey(location: str, settings: Settings, offline: bool = False) -> Text:
    """Text that is where the job reads it stays there; what is on this machine goes there."""
    uri, path = storage.to_uri(location), storage.local_path(location)
    if path is None and offline:
        return Text(location, uri, None, [])
    known = corpus.find_upload(uri)
    if known is not None and (path is None or storage.local_path(settings.data_store) is not None):
        return Text(location, uri, replace(known, uploaded=False), [])
    if path is None:
        there = storage.list_files(uri)
        if not any(name.endswith(".txt") for name in there):
            what = "no *.txt file is there" if there else "nothing is there"
            raise InputError(f"{location}: {what}")
        return Text(location, uri, None, [])
    upload, sources = corpus.survey(path, settings, offline)
    return Text(location, upload.uri, upload, sources)


def check_length(texts: Mapping[str, Text], config: Any) -> None:
    """Raises InputError when a text is too short for the job's context."""
    parts = []
    for channel, text in texts.items():
        if text.upload is None:
            continue
        n = text.upload.characters
        if len(texts) == 1:
            n_train = int(n * (1 - config.validation_fraction))
            parts += [(text, "training", n_train), (text, "validation", n - n_train)]
        else:
            parts.append((text, "training" if channel == "data" else channel, n))
    for text, name, length in parts:
        if length < config.block_size + 1:
            raise InputError(
                f"{text.named}: the {name} part has {length} characters, and one window of"
                f" block_size={config.block_size} needs {config.block_size + 1}; bring more text,"
                " or set a smaller block_size"
            )


def take_over(
    job: TrainingJob, settings: Settings, tell: Tell = lambda line: None
) -> tuple[TrainingJob, TrainingJob, int]:
    """The job on top of the one it resumes: what it does not say itself is as it was there.

    Hyperparameters that the script does not have, another one or another version, are told.

    Returns it, the earlier job, and the step that the earlier one came to.
    """
    assert job.resume is not None
    backend, earlier = find(job.resume, settings)
    if earlier.is_running:
        raise ServiceError(
            f"job {job.resume} is {earlier.status}; stop it first: `sm-nanogpt stop {job.resume}`"
        )
    if earlier.checkpoint_uri is None:
        raise ServiceError(f"job {job.resume} ({earlier.status}) left no checkpoint to resume from")
    if (earlier.instance == "local") != (job.instance == "local"):
        raise InputError(
            f"job {job.resume} ran on {earlier.instance}; its checkpoints are not where"
            f" --instance {job.instance} reads them"
        )
    before = backend.job(job.resume)
    said = {
        name: getattr(job, name) for name in job.model_fields_set if getattr(job, name) is not None
    }
    if job.entry_point is None:  # whose presets the words of this job mean
        job = job.model_copy(update={"entry_point": before.entry_point})
    sent, known = earlier.hyperparameters, job.hyperparameter_names()
    if unknown := sorted(sent.keys() - known):
        tell(f"{job.script} has no {', '.join(unknown)}; the earlier job's values are left out")
    sent = {name: value for name, value in sent.items() if name in known}
    before = before.model_copy(
        update={"preset": None, "hyperparameters": sent, "entry_point": job.entry_point}
    )
    hyperparameters = {**sent, **job.explicit_hyperparameters()}
    own = {"resume", "preset", "hyperparameters", "affordable_run"}
    kept = before.model_dump(exclude=own, exclude_defaults=True)
    if said.get("spot", before.spot) != before.spot:  # what goes with the other capacity alone
        kept.pop("max_wait" if before.spot else "keep_alive", None)
    if before.max_cost is not None and settings.max_cost is not None:
        kept["max_cost"] = min(before.max_cost, settings.max_cost)
    after = TrainingJob(**{**kept, **said, "preset": None, "hyperparameters": hyperparameters})
    return after, before, earlier.checkpoint_step or 0


def describe(job_id: str, settings: Settings | None = None) -> JobDescription:
    """A job as it stands. Raises ServiceError when there is no such job."""
    return find(job_id, settings or load_settings())[1]


def jobs(settings: Settings | None = None) -> list[JobDescription]:
    """All jobs, newest first."""
    found = [d for backend in all_backends(settings or load_settings()) for d in backend.list()]
    return sorted(found, key=lambda description: description.created, reverse=True)


def with_costs(
    found: Sequence[JobDescription], settings: Settings, tell: Tell
) -> list[JobDescription]:
    """The descriptions with what each job on SageMaker has cost, as far as prices are known."""
    if all(description.instance == "local" for description in found):
        return list(found)
    session = aws_session(settings)
    prices = Prices(settings, check_region(session), session)
    known: dict[str, Price | None] = {"local": None}
    told = []
    for description in found:
        if description.instance not in known:
            known[description.instance] = prices.of(description.instance)
        price = known[description.instance]
        if price is not None:
            cost = money.cost_of(description, price, time.time())
            description = replace(description, cost=cost, price=price)
        told.append(description)
    if prices.trouble:
        tell(prices.trouble)
    unknown = sorted(name for name, price in known.items() if price is None and name != "local")
    if unknown:
        tell(f"what {' and '.join(unknown)} costs in {prices.region} is not known here")
    return told


def logs(job_id: str, follow: bool = False, settings: Settings | None = None) -> Iterator[str]:
    """The lines of a job's log. Raises ServiceError when there is no such job."""
    backend, _ = find(job_id, settings or load_settings())
    return backend.logs(job_id, follow)


def stop(job_id: str, settings: Settings | None = None) -> JobDescription:
    """Asks a running job to stop, and returns at once.

    A local job writes a checkpoint first; SageMaker ends a job in two minutes without telling it,
    so that the newest checkpoint of its timer remains.

    Raises:
        ServiceError: there is no such job, or it has ended.
    """
    backend, description = find(job_id, settings or load_settings())
    if not description.is_running:
        raise ServiceError(f"job {job_id} has ended already: {description.status}")
    backend.stop(job_id)
    return description


def wait(
    job_id: str, settings: Settings | None = None, timeout: float | None = None
) -> JobDescription:
    """Waits for a job's end and returns what became of it.

    Raises:
        ServiceError: there is no such job, or no longer, or it still runs after `timeout` seconds.
    """
    settings = settings or load_settings()
    deadline = None if timeout is None else time.monotonic() + timeout
    backend, description = find(job_id, settings)
    while description.is_running:
        if deadline is not None and time.monotonic() > deadline:
            raise ServiceError(f"job {job_id} is still {description.status} after {timeout} s")
        time.sleep(backend.poll_seconds)
        now = backend.describe(job_id)
        if now is None:
            raise ServiceError(
                f"job {job_id} was deleted before its end: `sm-nanogpt jobs` lists those there are"
            )
        description = now
    return description


def explain(description: JobDescription) -> str:
    """What became of a job that has ended, why, and what to do next, in one line."""
    job_id, reason = description.job_id, description.failure_reason
    for sign, remedy in REMEDIES.items():
        if reason and sign in reason:
            reason = f"{reason} ({remedy})"
    told = f"job {job_id} {description.status.lower()}{f': {reason}' if reason else ''}"
    if description.status == "Completed":
        return f"{told}; next: sm-nanogpt fetch-and-sample {job_id}"
    if description.checkpoint_uri is not None:
        return (
            f"{told}; go on from its checkpoint of step {description.checkpoint_step}:"
            " `sm-nanogpt launch --instance"
            f" {description.instance} --resume {job_id}`"
        )
    return f"{told}; no checkpoint is left; its log: `sm-nanogpt logs {job_id}`"


__all__ = [
    "Backend",
    "JobDescription",
    "describe",
    "explain",
    "find",
    "jobs",
    "launch",
    "logs",
    "stop",
    "wait",
]
