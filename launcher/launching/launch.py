"""Check and submit a job. A Plan is a job that is complete, checked, and priced."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sm_nanogpt.launcher.backends import Backend, rents_gpus
from sm_nanogpt.launcher.errors import InputError, about
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.progress import byte_progress
from sm_nanogpt.launcher.job import Request, TrainingJob
from sm_nanogpt.launcher.launching.draft import Draft, fill
from sm_nanogpt.launcher.launching.names import name_reserved
from sm_nanogpt.launcher.launching.resume import EarlierJob, check_resumable
from sm_nanogpt.launcher.launching.texts import (
    check_readings,
    check_texts,
    part_of,
    tokens_to_read,
    warn_of_few_conversations,
)
from sm_nanogpt.launcher.sagemaker.cost import ceiling_of, check_confirmed
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.source import keep_source
from sm_nanogpt.launcher.text.channels import Channel, Texts
from sm_nanogpt.launcher.tracking import TrackedJob

logger = logging.getLogger(__name__)


@dataclass
class Plan:
    """A job that is complete, checked, and priced. It can be submitted once.

    request is the request of CreateTrainingJob, or the record of a job on this machine. worst_cost
    is what the job costs if it runs to its time limit, in USD: 0 on this machine, and infinite if
    its price is unknown. ceiling is the most that it may cost, in USD. placement is what the
    backend decided. The settings of backend have the store and role of the job. channels are by the
    job's fields. new_name is the job's name, unless it is that of the job that it resumes.
    """

    job_id: str
    job: TrainingJob = field(repr=False)
    request: Mapping[str, Any] = field(repr=False)
    worst_cost: float
    ceiling: float | None
    placement: Any = field(repr=False)
    channels: Mapping[str, Channel] = field(repr=False)
    backend: Backend = field(repr=False)
    settings: Settings = field(repr=False)
    new_name: str | None = field(default=None, repr=False)
    submitted: bool = field(default=False, repr=False)

    @property
    def is_of_chats(self) -> bool:
        """True if the text is of conversations."""
        uploads = [channel.upload for channel in self.channels.values()]
        return any(upload is not None and upload.chats for upload in uploads)

    def upload(self) -> None:
        """Upload the texts and models that the store lacks."""
        from sm_nanogpt.launcher.text import corpus  # with the readers of all formats

        with byte_progress("upload") as progress:
            for channel in self.channels.values():
                if channel.upload is None:
                    continue
                if channel.upload.uploaded and self.backend.is_remote:
                    logger.info(f"upload: {channel.shown} to {channel.uri}")
                corpus.send(channel.upload, channel.sources, self.backend.settings, progress)

    def submit(self, confirmed: bool = False) -> TrackedJob:
        """Upload the texts, start the job, and return it.

        If this is interrupted, the job may still run, and cost money: `library.job` finds it.
        Raises Unconfirmed if the job may cost more than the setting ask_above, or its price is
        unknown, unless it is confirmed, or max_cost was chosen for it or in the settings; and
        InputError if another launch here has taken the name since the plan was made.
        """
        if self.submitted:  # a second time would overwrite the files of the job that runs
            raise InputError(f"the plan of job {self.job_id} was submitted before; make another")
        if self.backend.bills and not confirmed:
            # A ceiling that was chosen for the job that this one resumes is no consent.
            max_cost = None if self.job.origin("max_cost") else self.job.max_cost
            check_confirmed(self.worst_cost, max_cost, self.settings)
        self.upload()
        with storage.errors_about(str(self.backend.settings.home)):
            # The models of the job need its folder, and so do the jobs that resume it.
            keep_source(self.job.source, self.backend.settings)
        new_name = None if self.backend.is_remote else self.new_name
        with name_reserved(new_name, self.settings):
            self.submitted = True
            self.backend.submit(self.job_id, self.job, self.placement, self.request)
        return TrackedJob(self.job_id, self.settings)


def prepare(
    request: Request,
    settings: Settings,
    job_id: str | None = None,
    texts: Texts | None = None,
) -> Plan:
    """Make a Plan of a Request: a job that is complete, checked, and priced.

    Nothing in the store changes. texts: the channels of another plan with the same texts, so that
    they are not read again.
    """
    job_id = job_id or new_job_id()
    draft = fill(request, settings, texts)
    check(draft)
    backend = draft.backend
    placement: Any = backend.check(draft.job)
    job = backend.price(draft.job, draft.earlier)
    aws_request = backend.request(job_id, job, placement)
    log_choices(request, job, draft.texts["data"])
    channels = dict(draft.texts)
    for name, model in draft.models.items():
        channels[name] = model.channel
    worst_cost = 0.0
    ceiling = None
    if backend.bills:
        worst_cost = math.inf if job.worst_cost is None else job.worst_cost
        ceiling = ceiling_of(job, settings)
    return Plan(
        job_id=job_id,
        job=job,
        request=aws_request,
        worst_cost=worst_cost,
        ceiling=ceiling.amount if ceiling else None,
        placement=placement,
        channels=channels,
        backend=backend,
        settings=settings,
        new_name=draft.new_name,
    )


# -- check, without the network --------------------------------------------------------------------


def check(draft: Draft) -> None:
    """Raise InputError if the run would refuse its texts, or leave its GPUs idle.

    Warns if the run would memorize its text.
    """
    job, earlier = draft.job, draft.earlier
    check_device(job, "device" in draft.original.hyperparameters, earlier)
    if earlier is not None:
        check_resumable(job, earlier)
    check_models(draft)
    config = job.config()
    check_texts(draft.texts, config)
    upload = draft.texts["data"].upload
    if upload is not None and job.init_from is None and earlier is None:
        warn_of_few_conversations(upload)
    if upload is not None:
        n_tokens = tokens_to_read(upload, config, part_of("data", draft.texts))
        check_readings(draft.original, config, n_tokens)


def check_device(job: TrainingJob, is_explicit: bool, earlier: EarlierJob | None) -> None:
    """Raise InputError for a job that would leave its GPUs idle, unless the user chose the device.

    A job may take over the device of an earlier job, if that ran on GPUs.
    """
    ran_on_gpus = earlier is not None and rents_gpus(earlier.description.instance)
    if is_explicit or (ran_on_gpus and "device" in job.hyperparameters):
        return
    if rents_gpus(job.instance) and getattr(job.config(), "device", "") == "cpu":
        subject = f"preset {job.preset}" if job.preset else "the job"
        problem = f"{subject} trains on the CPU, and {job.instance} has GPUs"
        with about("instance", job.instance):
            raise InputError(problem, code="idle-gpus")


def check_models(draft: Draft) -> None:
    """Raise InputError if the tokens of a model are not those of a text, or if the context of the
    teacher is shorter than that of the run."""
    for model in draft.models.values():
        for text in draft.texts.values():
            model.check_text(text)
    teacher = draft.models.get("teacher")
    if teacher is None:
        return
    with draft.job.source.user_errors():
        huggingface = draft.job.source.module("huggingface")
        if hasattr(huggingface, "check_teacher"):  # in an older folder, only the run checks
            block_size = draft.job.config().block_size
            huggingface.check_teacher(teacher.hyperparameters, block_size)


def log_choices(request: Request, job: TrainingJob, text: Channel) -> None:
    """Log the text and the preset that were chosen for the request."""
    if request.data != job.data:
        origin = ""
        if request.data is None and request.resume is None:
            name = f", {text.shown}" if text.shown != job.data else ""
            origin = f" (the last upload{name})"
        logger.info(f"data: {job.data}{origin}")
    if job.preset and not request.preset:
        logger.info(f"preset: {job.preset}")


def new_job_id() -> str:
    """A unique id with the time in UTC, valid as a SageMaker job name."""
    return f"sm-nanogpt-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
