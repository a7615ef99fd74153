"""Check a job before its launch: its image, disk, network, batch, memory, and regions."""

from __future__ import annotations

import logging
import math
from typing import Any

from sm_nanogpt.entry_point.config import OPTIMIZERS
from sm_nanogpt.launcher import aws, machines
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.instances import (
    assume_gpus,
    count_gpus,
    describe_instance,
    gpu_of,
    has_local_disks,
    looks_like_gpu,
)
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.locations import is_on_s3
from sm_nanogpt.launcher.sagemaker.account import Account
from sm_nanogpt.launcher.sagemaker.stack import last_seen_stack
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)


def default_image(job: TrainingJob, region: str) -> str:
    """The URI of AWS's image for the job's version and instance."""
    return machines.training_image(region, job.pytorch_version, looks_like_gpu(job.instance))


def check_volume(job: TrainingJob) -> None:
    """Raise InputError if a volume is requested for an instance that takes none."""
    if "volume_size" not in job.explicit_fields():
        return
    for instance in job.instances:
        if has_local_disks(instance):
            problem = f"{instance} has local disks and takes no volume"
            raise InputError(problem, field="volume_size", value=job.volume_size)


def check_vpc(job: TrainingJob, settings: Settings, region: str) -> None:
    """Raise InputError if the role of the stack may not join the job's subnets."""
    stack = last_seen_stack(settings, region)
    if not job.subnets or stack is None or stack.vpc:
        return
    if stack.role == settings.role:
        problem = f"the role of stack {stack.name} may not join a VPC"
        raise InputError(problem, code="allow-vpc", field="subnets", value=",".join(job.subnets))


def check_regions(job: TrainingJob, settings: Settings, account: Account) -> None:
    """Raise InputError if the job reads a bucket of another region. This asks S3."""
    uris = {
        "init_from": job.init_from,
        "teacher": job.teacher,
        "validation": job.validation,
        "data": job.data,
        "store": settings.data_store,
    }
    fields = {}  # a field whose URI is in the bucket, by bucket
    for field, uri in uris.items():
        if uri and is_on_s3(uri):
            fields[uri.split("/")[2]] = field
    for field in fields.values():
        aws.check_bucket(account.client("s3"), str(uris[field]), field, account.region)


def check_gpus(job: TrainingJob) -> None:
    """Raise InputError if the model does not fit a GPU, or a batch cannot be shared evenly.

    Types whose GPUs are not known are not checked.
    """
    ranks_per_instance = []
    for instance in job.instances:
        n_gpus = count_gpus(instance)
        if n_gpus is not None:
            ranks_per_instance.append(max(1, n_gpus))
            check_memory(job, instance)
    ranks = [job.instance_count * n_ranks for n_ranks in ranks_per_instance]
    job.config(world_size=math.lcm(*ranks))  # raises if they cannot share a batch


def log_instances(job: TrainingJob) -> None:
    for instance in job.instances:
        is_known = count_gpus(instance) is not None
        level = logging.INFO if is_known else logging.WARNING
        logger.log(level, describe_instance(instance))


def check_memory(job: TrainingJob, instance: str) -> None:
    """Raise InputError if the layers of the model alone fill the GPUs of an instance type.

    An edited folder may train other parameters than its Config counts, and is not checked.
    """
    gpu = gpu_of(instance)
    config = job.config()
    if gpu is None or config.device == "cpu" or not job.source.is_packaged:
        return
    n_ranks = job.instance_count * assume_gpus(instance)
    gigabytes = config.matrix_parameters * bytes_per_parameter(config, n_ranks) / 2**30
    if gigabytes > gpu.memory:
        billions = config.matrix_parameters / 1e9
        raise InputError(
            f"weights, gradients and momentum of {billions:.1f} billion parameters take"
            f" {gigabytes:,.0f} GB of each {gpu.name} of {instance}, which has {gpu.memory} GB",
            code="gpu-too-small",
        )


def bytes_per_parameter(config: Any, n_ranks: int) -> float:
    """The least bytes that a rank needs for a parameter of a layer, without activations.

    docs/hyperparameters.md has the arithmetic. An embedding takes more, and does not count, since
    the number of characters or tokens is not known here.
    """
    copy = 0 if config.precision == "float32" else 2
    averages = OPTIMIZERS[config.optimizer].averages_per_rank(n_ranks)
    return 4 * (2 + averages) + copy  # weight, gradient, and its averages are in float32
