"""The CreateTrainingJob request of a job, as plain data.

Where version 2 of the SageMaker SDK is installed, its PyTorch estimator has to make the same before
it is sent, in `launcher.sagemaker.estimator`.
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

from launcher.errors import InputError
from launcher.files import storage
from launcher.instances import looks_like_gpu
from launcher.job import Request, Scalar, TrainingJob
from launcher.limits import violations
from launcher.sagemaker.caller import our_tags
from launcher.source import Source

CODE_IN_A_CHANNEL = "/opt/ml/input/data/code/sourcedir.tar.gz"
LONGEST_PENDING = 86_400  # seconds that a job waits for GPUs; AWS names no default


@dataclass(frozen=True)
class Placement:
    """What the backend decides about a job; the job itself says the rest.

    owner is who launches it, or OWNER_PLACEHOLDER in a dry run. store is `s3://bucket/prefix`.
    kms_key encrypts the output, volume_kms_key the disks.
    """

    region: str
    owner: str
    role: str
    image_uri: str
    store: str
    hyperparameters: Mapping[str, Any]
    kms_key: str | None
    volume_kms_key: str | None

    def file_uri(self, job_id: str, *parts: str) -> str:
        return storage.join(self.store, "jobs", job_id, *parts)

    def source_uri(self, job_id: str) -> str:
        return self.file_uri(job_id, "source", "sourcedir.tar.gz")

    def checkpoint_uri(self, job_id: str) -> str:
        """The S3 prefix of a job's checkpoints. SageMaker restores all keys that begin with it:
        without the slash, GROUP-1 would also get the checkpoints of GROUP-10."""
        return storage.join(self.store, "checkpoints", job_id, "")


def channels_of(job: TrainingJob) -> dict[str, tuple[str, str | None]]:
    """The S3 prefix, or the file, of each channel, and its input mode, if not that of the job."""
    mode = "FastFile" if job.input_mode == "FastFile" else None
    # S3 knows no directories: without the slash, NAME.json would belong to NAME too.
    return {
        name: (
            uri if uri.lower().endswith((".txt", ".md")) else f"{uri.rstrip('/')}/",
            None if name in ("model", "teacher") else mode,
        )
        for name, uri in job.channels.items()
    }


def tags_of(job: TrainingJob, placement: Placement) -> list[dict[str, str]]:
    """The tags of a job, by which Search finds it, and says what it is."""
    users = [{"Key": key, "Value": value} for key, value in job.tags.items()]
    return [*our_tags(placement.owner, job.name, job.summary), *users]


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
    """One channel: all objects whose keys begin with the URI, copied to each host."""
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    channel: dict[str, Any] = {"ChannelName": name, "DataSource": {"S3DataSource": source}}
    return {**channel, "InputMode": mode} if mode else channel


def toolkit_parameters(job_id: str, job: TrainingJob, placement: Placement) -> dict[str, Any]:
    """What SageMaker's container toolkit reads from the hyperparameters.

    Without a network, the archive of the training folder comes as a channel.
    """
    source = placement.source_uri(job_id)
    values: dict[str, Any] = {
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": CODE_IN_A_CHANNEL if job.network_isolation else source,
        "sagemaker_container_log_level": logging.INFO,
        "sagemaker_job_name": job_id,
        "sagemaker_region": placement.region,
    }
    if len(job.instances) == 1:  # else the toolkit reads the type that the job runs on
        values["sagemaker_instance_type"] = job.instances[0]
    if job.launcher == "torchrun":
        return {**values, "sagemaker_torch_distributed_enabled": True}
    values["sagemaker_distributed_dataparallel_enabled"] = True
    values["sagemaker_distributed_dataparallel_custom_mpi_options"] = mpi_options(job.environment)
    return values


def create_request(job_id: str, job: TrainingJob, placement: Placement) -> dict[str, Any]:
    """The CreateTrainingJob request of a job, equal to the one of the SDK."""
    channels = [input_channel(name, *channel) for name, channel in channels_of(job).items()]
    if job.network_isolation:
        channels.append(input_channel("code", placement.source_uri(job_id), None))
    types = [{"InstanceType": name} for name in job.instances]
    resources = {
        "InstanceCount": job.instance_count,
        "VolumeSizeInGB": job.volume_size,
        **(types[0] if len(types) == 1 else {"InstancePreferences": types}),
        "VolumeKmsKeyId": placement.volume_kms_key,
        "KeepAlivePeriodInSeconds": job.keep_alive,
    }
    stopping = {"MaxRuntimeInSeconds": job.time_limit}
    if job.spot:
        stopping["MaxWaitTimeInSeconds"] = job.wait_limit
    elif looks_like_gpu(job.instance):  # of CPUs and spot, AWS ignores it
        stopping["MaxPendingTimeInSeconds"] = LONGEST_PENDING
    output = {"S3OutputPath": storage.join(placement.store, "jobs"), "KmsKeyId": placement.kms_key}
    vpc = {"Subnets": list(job.subnets), "SecurityGroupIds": list(job.security_group_ids)}
    values = {**placement.hyperparameters, **toolkit_parameters(job_id, job, placement)}
    request = {
        "TrainingJobName": job_id,
        "RoleArn": placement.role,
        "AlgorithmSpecification": {
            "TrainingImage": placement.image_uri,
            "TrainingInputMode": "File",
            "MetricDefinitions": job.metric_definitions(),
        },
        "HyperParameters": {name: json.dumps(value) for name, value in values.items()},
        "InputDataConfig": channels,
        "OutputDataConfig": without_empty(output),
        "CheckpointConfig": {"S3Uri": placement.checkpoint_uri(job_id)},
        "ResourceConfig": without_empty(resources),
        "StoppingCondition": stopping,
        "ProfilerConfig": {"DisableProfiler": True},
        "Tags": tags_of(job, placement),
        "Environment": dict(job.environment),
        "VpcConfig": vpc if job.subnets else None,
        "EnableNetworkIsolation": job.network_isolation,
        "EnableInterContainerTrafficEncryption": job.encrypt_traffic,
        "EnableManagedSpotTraining": job.spot,
    }
    return without_empty(request)


# Which of our fields a part of the request comes from.
CHANNEL_FIELDS = {
    "training": "data",
    "validation": "validation",
    "model": "init_from",
    "teacher": "teacher",
}
FIELDS = {
    "RoleArn": "role",
    "AlgorithmSpecification": "entry_point",
    "HyperParameters": "hyperparameters",
    "OutputDataConfig": "store",
    "CheckpointConfig": "store",
    "Tags": "tags",
}


def check_request(request: Mapping[str, Any], job: TrainingJob, placement: Placement) -> None:
    """Raise InputError if SageMaker's API would refuse a request, which names the field.

    The job has checked the fields that are sent as they are; what is left comes from the settings,
    the store and the training folder, or is too much together.
    """
    for violation in violations(request, "CreateTrainingJobRequest"):
        part, *path = violation.path
        field = FIELDS.get(str(part), "")
        problem = violation.problem
        if part == "InputDataConfig":
            channel = request["InputDataConfig"][path[0]]["ChannelName"]
            field = CHANNEL_FIELDS.get(channel, "store")  # that of the script is in the store
        if isinstance(violation.value, str) and violation.value.startswith(f"{placement.store}/"):
            field = "store"
        if path and path[-1] in ("KmsKeyId", "VolumeKmsKeyId"):
            field = "kms_key"
        if violation.path == ("Tags",):
            ours = len(request["Tags"]) - len(job.tags)
            problem = f"{problem} ({ours} are sm-nanogpt's)"
        if part in ("HyperParameters", "AlgorithmSpecification"):
            problem = f"{'.'.join(map(str, violation.path))} {problem}"
        raise InputError(problem, field=field, value=violation.short_value)


def without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, False, {})}


def sendable_hyperparameters(job: Request) -> dict[str, Scalar]:
    """The hyperparameters to send to SageMaker.

    Toolkits up to 5.1.2, as in the images since 2.11, pass the values through a shell, unquoted, so
    only safe characters are allowed.
    """
    values, explicit = job.all_hyperparameters(), job.explicit_hyperparameters()
    harmless = re.compile(r"[A-Za-z0-9._:/=+-]{1,2500}")
    odd = {name: value for name, value in values.items() if not harmless.fullmatch(str(value))}
    for name, value in odd.items():
        if name in explicit:  # else it is a default of the edited script
            allowed = "SageMaker hyperparameters allow only A-Z a-z 0-9 . _ : / = + -"
            raise InputError(f"{name}={value!r}: {allowed}")
    return {name: value for name, value in values.items() if name not in odd}


# The toolkit starts each rank of `pytorchddp` by `python -m mpi4py train.py`, and AWS's images for
# GPUs have no mpi4py since PyTorch 2.11. Its part there is to end all ranks when one fails, which
# mpirun does by itself, as no rank calls MPI_Init.
MPI4PY = b"""\
import os, runpy, sys

del sys.argv[0]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def source_archive(source: Source, launcher: str) -> bytes:
    """sourcedir.tar.gz: the training folder, and what the launcher needs besides; the same files
    give the same bytes."""
    files = dict(sorted(source.files.items()))
    if launcher == "pytorchddp":
        files |= {"mpi4py/__init__.py": b"", "mpi4py/__main__.py": MPI4PY}
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file,
        tarfile.open(fileobj=file, mode="w") as tar,
    ):
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()
