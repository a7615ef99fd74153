"""Turn answers of SageMaker about a job into a JobDescription."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

from sm_nanogpt.launcher.description import RUNNING, JobDescription
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.job import SEARCH_VARIABLE
from sm_nanogpt.launcher.locations import is_on_s3
from sm_nanogpt.launcher.sagemaker.caller import NAME_TAG, OWNER_TAG, SUMMARY_TAG

# A FailureReason is the last line of the failed rank, `Name: cause [kind]`. If it left none, the
# toolkit surrounds what it printed with pages of its own, and adds a line for a killed process.
CAUSE_LINE = re.compile(
    r'^(?:AlgorithmError: |ErrorMessage ")(\w+: .*?)(?: \[\w+\])?"?(?:, exit code: \d+)?\s*$',
    re.MULTILINE,
)
EXTRA_INFO_LINE = re.compile(r'^ExtraInfo "(.+?)"?\s*$', re.MULTILINE)


def is_our_job(raw: dict[str, Any]) -> bool:
    """True if a job has our layout of files in S3; other jobs are ignored."""
    output = raw.get("OutputDataConfig", {}).get("S3OutputPath", "")
    checkpoints = raw.get("CheckpointConfig", {}).get("S3Uri", "").rstrip("/")
    store, _, folder = output.rpartition("/")
    if not is_on_s3(store) or folder != "jobs":
        return False
    return bool(checkpoints == f"{store}/checkpoints/{raw['TrainingJobName']}")


def describe_job(raw: dict[str, Any], checkpoint_step: int | None) -> JobDescription:
    """Turn an answer of SageMaker into a JobDescription. checkpoint_step: None if it is unknown.

    Raises ServiceError if the answer lacks something that each launch of sm-nanogpt sets.
    """
    try:
        return read_answer(raw, checkpoint_step)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        subject = f"SageMaker describes job {raw.get('TrainingJobName')}"
        message = f"{subject} as no launch of sm-nanogpt made it ({problem})"
        raise ServiceError(message) from None


def read_answer(raw: dict[str, Any], checkpoint_step: int | None) -> JobDescription:
    status = raw["TrainingJobStatus"]
    checkpoint_uri = raw.get("CheckpointConfig", {}).get("S3Uri")
    channels = uris_of_channels(raw)
    transitions = raw.get("SecondaryStatusTransitions", [])
    resources = raw["ResourceConfig"]
    warm_pool = raw.get("WarmPoolStatus", {})
    warm_seconds = warm_pool.get("ResourceRetainedBillableTimeInSeconds")
    tags = {tag["Key"]: tag["Value"] for tag in raw.get("Tags", [])}  # only Search returns them
    return JobDescription(
        job_id=raw["TrainingJobName"],
        status=status,
        secondary_status=raw.get("SecondaryStatus", status),
        instance=instance_of(resources),
        instance_count=resources.get("SelectedInstanceCount") or resources.get("InstanceCount", 0),
        volume_size=resources.get("VolumeSizeInGB", 0),  # not required by botocore's model
        created=raw["CreationTime"].timestamp(),
        data=channels.get("training", ""),
        hyperparameters=hyperparameters_of(raw),
        name=tags.get(NAME_TAG),
        owner=tags.get(OWNER_TAG),
        summary=tags.get(SUMMARY_TAG),
        search=raw.get("Environment", {}).get(SEARCH_VARIABLE),
        inputs=channels,
        failure_reason=None if status in RUNNING else reason_of_end(raw),
        message=transitions[-1].get("StatusMessage") if transitions else None,
        started=seconds_of(raw.get("TrainingStartTime")),
        ended=seconds_of(raw.get("TrainingEndTime")),
        metrics=metrics_of(raw) or None,
        model_uri=model_of(raw),
        checkpoint_uri=None if checkpoint_step is None else checkpoint_uri,
        checkpoint_step=checkpoint_step,
        billable_seconds=raw.get("BillableTimeInSeconds"),
        training_seconds=raw.get("TrainingTimeInSeconds"),
        keep_alive=resources.get("KeepAlivePeriodInSeconds"),
        warm_pool_seconds=None if warm_pool.get("Status") == "Available" else warm_seconds,
        spot=raw.get("EnableManagedSpotTraining", False),
    )


def uris_of_channels(raw: dict[str, Any]) -> dict[str, str]:
    """The URIs of the channels, by name."""
    channels = {}
    for channel in raw.get("InputDataConfig", []):
        channels[channel["ChannelName"]] = channel["DataSource"]["S3DataSource"]["S3Uri"]
    return channels


def hyperparameters_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of the script, without those of the SDK."""
    hyperparameters = {}
    for name, value in raw.get("HyperParameters", {}).items():
        if not name.startswith("sagemaker_"):
            hyperparameters[name] = json.loads(value)
    return hyperparameters


def metrics_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The newest value of each metric."""
    metrics = {}
    for metric in raw.get("FinalMetricDataList", []):
        metrics[metric["MetricName"]] = metric["Value"]
    if "step" in metrics:
        metrics["step"] = int(metrics["step"])
    return metrics


def model_of(raw: dict[str, Any]) -> str | None:
    """The URI of the model; None until the job has completed."""
    if raw["TrainingJobStatus"] != "Completed":
        return None
    uri: str | None = raw.get("ModelArtifacts", {}).get("S3ModelArtifacts")
    return uri


def instance_of(resources: dict[str, Any]) -> str:
    """The instance type that SageMaker chose; until then, all requested ones."""
    return str(resources.get("SelectedInstanceType") or requested_instance(resources))


def requested_instance(resources: dict[str, Any]) -> str:
    """The instance types of a request, joined by commas."""
    preferences = resources.get("InstancePreferences", [])
    types = [preference["InstanceType"] for preference in preferences]
    return ",".join(types) or str(resources.get("InstanceType", ""))


def reason_of_end(raw: dict[str, Any]) -> str | None:
    """Why a job failed or was stopped; None if SageMaker does not say it."""
    reason = shorten(raw.get("FailureReason", ""))
    if reason:
        return reason
    # An interrupted spot job runs again, so it has not failed.
    limits = ("MaxRuntimeExceeded", "MaxWaitTimeExceeded", "Interrupted")
    secondary: str | None = raw.get("SecondaryStatus")
    return secondary if secondary in limits else None


def seconds_of(moment: datetime | None) -> float | None:
    """A moment in seconds since the epoch."""
    return None if moment is None else moment.timestamp()


def shorten(reason: str) -> str:
    """A FailureReason in one line: the error of train.py; if it has none, all of it."""
    cause = CAUSE_LINE.search(reason) or EXTRA_INFO_LINE.search(reason)
    text = cause[1] if cause else reason
    return " ".join(text.split())
