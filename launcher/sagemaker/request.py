"""Make the CreateTrainingJob request of a job, as plain data.

If version 2 of the SageMaker SDK is installed, its PyTorch estimator has to make the same request
before it is sent, in `launcher.sagemaker.estimator`.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sm_nanogpt.entry_point.files import is_text_name
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.instances import looks_like_gpu
from sm_nanogpt.launcher.job import Request, Scalar, TrainingJob
from sm_nanogpt.launcher.limits import Violation, violations
from sm_nanogpt.launcher.sagemaker.caller import our_tags
from sm_nanogpt.launcher.source import Source

CODE_CHANNEL_ARCHIVE = "/opt/ml/input/data/code/sourcedir.tar.gz"
MAX_PENDING_SECONDS = 86_400  # a job waits so long for GPUs; AWS names no default


@dataclass(frozen=True)
class Placement:
    """What the backend decides about a job, in addition to the fields of the job."""

    region: str
    owner: str  # who launches it, or OWNER_PLACEHOLDER in a dry run
    role: str
    image_uri: str
    store: str  # s3://bucket/prefix
    hyperparameters: Mapping[str, Any]
    kms_key: str | None  # encrypts the output
    volume_kms_key: str | None  # encrypts the disks

    def file_uri(self, job_id: str, *parts: str) -> str:
        return storage.join(self.store, "jobs", job_id, *parts)

    def source_uri(self, job_id: str) -> str:
        return self.file_uri(job_id, "source", "sourcedir.tar.gz")

    def checkpoint_uri(self, job_id: str) -> str:
        """The S3 prefix of a job's checkpoints.

        SageMaker restores all keys that begin with it. Without the slash at its end, GROUP-1 would
        also get the checkpoints of GROUP-10.
        """
        return storage.join(self.store, "checkpoints", job_id, "")


def channels_of(job: TrainingJob) -> dict[str, tuple[str, str | None]]:
    """The S3 prefix, or the file, of each channel; and its input mode, if it is not the job's."""
    channels = {}
    for name, uri in job.channels.items():
        # S3 has no directories: without the slash, NAME.json would belong to NAME.
        if not is_text_name(uri):
            uri = f"{uri.rstrip('/')}/"
        streams = job.input_mode == "FastFile" and name not in ("model", "teacher")
        channels[name] = (uri, "FastFile" if streams else None)
    return channels


def tags_of(job: TrainingJob, placement: Placement) -> list[dict[str, str]]:
    """The tags of a job: ours, by which Search finds it, and those of the user."""
    tags = our_tags(placement.owner, job.name, job.summary)
    tags += [{"Key": key, "Value": value} for key, value in job.tags.items()]
    return tags


def mpi_options(environment: Mapping[str, str]) -> str:
    """The option of mpirun that sets NCCL_DEBUG.

    The toolkit sets NCCL_DEBUG=INFO for all ranks, whatever the job's environment says, and
    CloudWatch bills each line. Only this option changes that.
    """
    debug = environment.get("NCCL_DEBUG") or "WARN"
    if not debug.isalnum():  # the toolkit passes it through a shell
        raise InputError(f"NCCL_DEBUG={debug!r}: must be one word, such as WARN or INFO")
    return f"--NCCL_DEBUG {debug}"


def input_channel(name: str, uri: str, mode: str | None) -> dict[str, Any]:
    """A channel that gives each host all objects whose keys begin with the URI."""
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    channel: dict[str, Any] = {"ChannelName": name, "DataSource": {"S3DataSource": source}}
    if mode is not None:
        channel["InputMode"] = mode
    return channel


def toolkit_parameters(job_id: str, job: TrainingJob, placement: Placement) -> dict[str, Any]:
    """The hyperparameters that SageMaker's container toolkit reads, and that the script does not.

    In a job without a network, the archive of the training folder is a channel.
    """
    parameters: dict[str, Any] = {
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": placement.source_uri(job_id),
        "sagemaker_container_log_level": logging.INFO,
        "sagemaker_job_name": job_id,
        "sagemaker_region": placement.region,
    }
    if job.network_isolation:
        parameters["sagemaker_submit_directory"] = CODE_CHANNEL_ARCHIVE
    if len(job.instances) == 1:  # else the toolkit reads the type that the job runs on
        parameters["sagemaker_instance_type"] = job.instances[0]
    if job.launcher == "torchrun":
        parameters["sagemaker_torch_distributed_enabled"] = True
    else:
        ddp = "sagemaker_distributed_dataparallel"
        parameters[f"{ddp}_enabled"] = True
        parameters[f"{ddp}_custom_mpi_options"] = mpi_options(job.environment)
    return parameters


def create_request(job_id: str, job: TrainingJob, placement: Placement) -> dict[str, Any]:
    """Make the CreateTrainingJob request of a job, as the SDK would make it."""
    channels = [input_channel(name, uri, mode) for name, (uri, mode) in channels_of(job).items()]
    if job.network_isolation:
        channels.append(input_channel("code", placement.source_uri(job_id), None))
    resources = {
        "InstanceCount": job.instance_count,
        "VolumeSizeInGB": job.volume_size,
        "VolumeKmsKeyId": placement.volume_kms_key,
        "KeepAlivePeriodInSeconds": job.keep_alive,
        **instance_choice(job),
    }
    stopping = {"MaxRuntimeInSeconds": job.time_limit}
    if job.spot:
        stopping["MaxWaitTimeInSeconds"] = job.wait_limit
    elif looks_like_gpu(job.instance):  # of CPUs and spot, AWS ignores it
        stopping["MaxPendingTimeInSeconds"] = MAX_PENDING_SECONDS
    output = {"S3OutputPath": storage.join(placement.store, "jobs"), "KmsKeyId": placement.kms_key}
    vpc = None
    if job.subnets:
        vpc = {"Subnets": list(job.subnets), "SecurityGroupIds": list(job.security_group_ids)}
    parameters = {**placement.hyperparameters, **toolkit_parameters(job_id, job, placement)}
    request = {
        "TrainingJobName": job_id,
        "RoleArn": placement.role,
        "AlgorithmSpecification": {
            "TrainingImage": placement.image_uri,
            "TrainingInputMode": "File",
            "MetricDefinitions": job.metric_definitions(),
        },
        "HyperParameters": {name: json.dumps(value) for name, value in parameters.items()},
        "InputDataConfig": channels,
        "OutputDataConfig": without_empty(output),
        "CheckpointConfig": {"S3Uri": placement.checkpoint_uri(job_id)},
        "ResourceConfig": without_empty(resources),
        "StoppingCondition": stopping,
        "ProfilerConfig": {"DisableProfiler": True},
        "Tags": tags_of(job, placement),
        "Environment": dict(job.environment),
        "VpcConfig": vpc,
        "EnableNetworkIsolation": job.network_isolation,
        "EnableInterContainerTrafficEncryption": job.encrypt_traffic,
        "EnableManagedSpotTraining": job.spot,
    }
    return without_empty(request)


def instance_choice(job: TrainingJob) -> dict[str, Any]:
    """The part of ResourceConfig with the instance types of a job, in the order of preference."""
    if len(job.instances) == 1:
        return {"InstanceType": job.instances[0]}
    return {"InstancePreferences": [{"InstanceType": name} for name in job.instances]}


# The field of a job that a channel of its request comes from.
FIELD_OF_CHANNEL = {
    "training": "data",
    "validation": "validation",
    "model": "init_from",
    "teacher": "teacher",
}
# The field of a job, or the setting, that a part of its request comes from.
FIELD_OF_PART = {
    "RoleArn": "role",
    "AlgorithmSpecification": "entry_point",
    "HyperParameters": "hyperparameters",
    "OutputDataConfig": "store",
    "CheckpointConfig": "store",
    "Tags": "tags",
}


def check_request(request: Mapping[str, Any], job: TrainingJob, placement: Placement) -> None:
    """Raise InputError, which names a field, if SageMaker's API would refuse a request.

    The job has checked the fields that are sent as they are. The other parts come from the
    settings, the store, and the training folder, or are too long together.
    """
    violation = next(violations(request, "CreateTrainingJobRequest"), None)
    if violation is None:
        return
    problem = violation.problem
    if violation.path == ("Tags",):
        n_own = len(request["Tags"]) - len(job.tags)
        problem = f"{problem} ({n_own} are sm-nanogpt's)"
    if violation.path[0] in ("HyperParameters", "AlgorithmSpecification"):
        problem = f"{'.'.join(map(str, violation.path))} {problem}"
    field = field_of(violation, request, placement.store)
    raise InputError(problem, field=field, value=violation.short_value)


def field_of(violation: Violation, request: Mapping[str, Any], store: str) -> str:
    """The field of a job, or the setting, that a refused part of a request comes from; or ''."""
    part, *path = violation.path
    if path and path[-1] in ("KmsKeyId", "VolumeKmsKeyId"):
        return "kms_key"
    if isinstance(violation.value, str) and violation.value.startswith(f"{store}/"):
        return "store"
    if part == "InputDataConfig":
        channel = request["InputDataConfig"][path[0]]["ChannelName"]
        return FIELD_OF_CHANNEL.get(channel, "store")  # the channel of the code is in the store
    return FIELD_OF_PART.get(str(part), "")


def without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a request without the values that are None, False, or {}."""
    return {name: value for name, value in values.items() if value not in (None, False, {})}


def sendable_hyperparameters(job: Request) -> dict[str, Scalar]:
    """Return the hyperparameters to send to SageMaker.

    Toolkits up to 5.1.2, as in the images since 2.11, pass the values through a shell, unquoted, so
    only harmless characters are allowed. If a default of an edited folder has others, it is left
    out, since the folder knows it. Raises InputError if the user set such a value.
    """
    harmless = re.compile(r"[A-Za-z0-9._:/=+-]{1,2500}")
    explicit = job.explicit_hyperparameters()
    sendable = {}
    for name, value in job.all_hyperparameters().items():
        if harmless.fullmatch(str(value)):
            sendable[name] = value
        elif name in explicit:
            allowed = "SageMaker hyperparameters allow only A-Z a-z 0-9 . _ : / = + -"
            raise InputError(f"{name}={value!r}: {allowed}")
    return sendable


# This replaces mpi4py. The toolkit starts each rank of `pytorchddp` by `python -m mpi4py train.py`,
# and AWS's images for GPUs have no mpi4py since PyTorch 2.11. There it only ends all ranks when one
# fails, which mpirun does itself, since no rank calls MPI_Init.
MPI4PY = b"""\
import os, runpy, sys

del sys.argv[0]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def source_archive(source: Source, launcher: str) -> bytes:
    """Pack sourcedir.tar.gz: the training folder, and the files that the launcher needs.

    The same files give the same bytes.
    """
    files = dict(sorted(source.files.items()))
    if launcher == "pytorchddp":
        files["mpi4py/__init__.py"] = b""
        files["mpi4py/__main__.py"] = MPI4PY
    archive = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=archive, mode="wb", mtime=0) as file,
        tarfile.open(fileobj=file, mode="w") as tar,
    ):
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o644
            tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()
