"""Resume a job: find it, take over the fields that a request leaves out, and check that the new job
can continue it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from sm_nanogpt.launcher.backends import backend_class
from sm_nanogpt.launcher.curve import total_steps
from sm_nanogpt.launcher.description import JobDescription
from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.files.moved import text_id
from sm_nanogpt.launcher.finding import find
from sm_nanogpt.launcher.instances import has_local_disks, types_of
from sm_nanogpt.launcher.job import Request, TrainingJob
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.source import find_source
from sm_nanogpt.launcher.tracking import still_runs_error

logger = logging.getLogger(__name__)

# Fields that a job does not take over, or not unchanged.
NOT_INHERITED = {"resume", "preset", "size", "hyperparameters"}
# Fields of which a job sets at most one, each with the other of its pair.
OTHER_FIELD = {"image_uri": "pytorch_version", "pytorch_version": "image_uri"}


class EarlierJob(NamedTuple):
    """A job that is resumed: the job as it was submitted, and its state."""

    job: TrainingJob
    description: JobDescription


def find_earlier_job(request: Request, reference: str, settings: Settings) -> EarlierJob:
    """Find the job that a request resumes, by its id or name. A dry run also asks AWS for it.

    Raises InputError if the request sets fields for new runs, and ServiceError if the job still
    runs, or has no checkpoint.
    """
    new_run_fields = {"init_from": request.init_from, "teacher": request.teacher}
    if request.preset == "auto":
        new_run_fields["preset"] = request.preset
    for name, value in new_run_fields.items():
        if value is not None:
            raise InputError("is for a new run, without `resume=`", field=name, value=value)

    backend, description = find(reference, settings.with_offline(False))
    if description.is_running:
        raise still_runs_error(description, settings.with_offline(False))
    if description.checkpoint_uri is None:
        state = f"job {reference} is {description.status}"
        raise ServiceError(f"{state}, and left no checkpoint to resume from")
    job = backend.job(description.job_id)
    if backend.other_owner(description):  # the name is one of the owner's jobs
        job = job.model_copy(update={"name": None})
    return EarlierJob(job, description)


def check_reach(request: Request, earlier: EarlierJob) -> None:
    """Raise InputError if a job would run on another backend than the job that it resumes, whose
    checkpoints it could not read."""
    instance = request.instance or earlier.job.instance
    if backend_class(instance) is not backend_class(earlier.description.instance):
        job = f"job {request.resume}, which ran on {earlier.description.instance}"
        problem = f"cannot read the checkpoints of {job}"
        raise InputError(problem, field="instance", value=instance)


def with_earlier_folder(request: Request, job: TrainingJob, settings: Settings) -> Request:
    """The request with the training folder of the earlier job, if the request names none."""
    if request.entry_point is not None or job.entry_point is None:
        return request
    source = find_source(job.source_sha256 or "", settings)
    return request.model_copy(update={"entry_point": source.directory})


def with_known_hyperparameters(request: Request, earlier: EarlierJob) -> EarlierJob:
    """The earlier job, with only the hyperparameters that the request's training folder has.

    Hyperparameters that the folder does not have are logged.
    """
    source = request.source
    recorded = earlier.description.hyperparameters
    hyperparameters = source.known_hyperparameters(recorded)
    unknown = sorted(recorded.keys() - hyperparameters.keys())
    if unknown:
        options = ", ".join(unknown)
        logger.info(f"{source.directory} has no {options}; the earlier job's values are left out")

    update = {
        "preset": None,
        "hyperparameters": hyperparameters,
        "entry_point": request.entry_point,
    }
    return earlier._replace(job=earlier.job.model_copy(update=update))


def with_earlier_fields(request: Request, earlier_job: TrainingJob) -> Request:
    """The request, with fields of the earlier job in place of those that it leaves out.

    Hyperparameters, variables, and tags of both are merged.
    """
    chosen = {"instance": earlier_job.instance, **request.explicit_fields()}
    inherited = compatible_fields(earlier_job, chosen)
    merged: dict[str, Any] = {}
    for name in ("environment", "tags"):
        if name in chosen and name in inherited:
            merged[name] = {**inherited[name], **chosen[name]}
    changes = request.explicit_hyperparameters(defaults=asdict(earlier_job.config()))
    merged["hyperparameters"] = {**earlier_job.hyperparameters, **changes}
    merged["preset"] = None  # its values are among the hyperparameters
    completed = Request(**{**inherited, **chosen, **merged})
    completed.mark_inherited(inherited.keys() - chosen.keys())
    return completed


def compatible_fields(earlier_job: TrainingJob, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an earlier job that can be combined with the chosen fields of a new one."""
    names = set(Request.model_fields) - NOT_INHERITED
    inherited = earlier_job.model_dump(include=names, exclude_defaults=True)
    if chosen.get("spot", earlier_job.spot) != earlier_job.spot:
        # max_wait is for spot capacity, and keep_alive for capacity on demand.
        inherited.pop("max_wait" if earlier_job.spot else "keep_alive", None)
    if any(has_local_disks(name) for name in types_of(chosen["instance"])):
        inherited.pop("volume_size", None)
    for name, other in OTHER_FIELD.items():
        if name in chosen:
            inherited.pop(other, None)
    return inherited


def check_resumable(job: TrainingJob, earlier: EarlierJob) -> None:
    """Raise InputError unless a job can continue the earlier one.

    A job that reached its last step, and wrote no model, may be resumed to write it.
    """
    config = job.config()
    states = (state_of(earlier.job), state_of(job))
    with job.source.user_errors():
        job.source.module("config").check_resumable(*states)
    step = earlier.description.checkpoint_step or 0
    total = total_steps(asdict(config))
    is_complete = step == total and earlier.description.model_uri is not None
    if step > total or is_complete:
        n_generations = getattr(config, "generations", 1)
        if n_generations > 1:
            problem = f"the earlier job has done its {n_generations} generations"
            raise InputError(problem, code="start-from-model", job_id=earlier.description.job_id)
        problem = f"max_steps={config.max_steps}: the earlier job has already reached step {step}"
        raise InputError(problem, code="train-further", step=step)


def state_of(job: TrainingJob) -> dict[str, Any]:
    """The config and the texts of a job, in the form in which a checkpoint has them."""
    texts = (text_id(job.data), text_id(job.validation))
    return {"config": asdict(job.config()), "corpus_sha256": texts}
