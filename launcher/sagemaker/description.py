"""What SageMaker says of a job, as a JobDescription."""

from __future__ import annotations

import json
import re
from typing import Any

from launcher.errors import ServiceError
from launcher.job import (
    NAME_TAG,
    OWNER_TAG,
    RUNNING,
    SEARCH_VARIABLE,
    SUMMARY_TAG,
    JobDescription,
)

# A FailureReason is the last line of the failed rank, `Name: cause [kind]`. If it left none, the
# toolkit surrounds what it printed with pages of its own, and adds a line for a killed process.
CAUSE = re.compile(
    r'^(?:AlgorithmError: |ErrorMessage ")(\w+: .*?)(?: \[\w+\])?"?(?:, exit code: \d+)?\s*$',
    re.MULTILINE,
)
EXTRA = re.compile(r'^ExtraInfo "(.+?)"?\s*$', re.MULTILINE)


def is_our_job(raw: dict[str, Any]) -> bool:
    """Whether a job has our layout of files in S3; other jobs are ignored."""
    output = raw.get("OutputDataConfig", {}).get("S3OutputPath", "")
    checkpoints = raw.get("CheckpointConfig", {}).get("S3Uri", "").rstrip("/")
    store, _, folder = output.rpartition("/")
    ours = store.startswith("s3://") and folder == "jobs"
    return ours and checkpoints == f"{store}/checkpoints/{raw['TrainingJobName']}"


def describe_job(raw: dict[str, Any], checkpoint_step: int | None) -> JobDescription:
    """Turn an answer of SageMaker into a JobDescription; checkpoint_step None means unknown."""
    try:
        return read_answer(raw, checkpoint_step)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        job_id, problem = raw.get("TrainingJobName"), f"{type(error).__name__}: {error}"
        raise ServiceError(
            f"SageMaker describes job {job_id} as no launch of sm-nanogpt made it ({problem})"
        ) from None


def read_answer(raw: dict[str, Any], checkpoint_step: int | None) -> JobDescription:
    status, place = raw["TrainingJobStatus"], raw.get("CheckpointConfig", {}).get("S3Uri")
    channels = {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in raw.get("InputDataConfig", [])
    }
    hyperparameters = {
        name: json.loads(value)
        for name, value in raw.get("HyperParameters", {}).items()
        if not name.startswith("sagemaker_")
    }
    metrics = {each["MetricName"]: each["Value"] for each in raw.get("FinalMetricDataList", [])}
    if "step" in metrics:
        metrics["step"] = int(metrics["step"])
    artifacts = raw.get("ModelArtifacts", {})
    secondary = raw.get("SecondaryStatus", status)
    transitions = raw.get("SecondaryStatusTransitions", [])
    limits = ("MaxRuntimeExceeded", "MaxWaitTimeExceeded", "Interrupted")
    # An interrupted spot job runs again, so it has not failed.
    reason = in_short(raw.get("FailureReason", "")) or (secondary if secondary in limits else None)
    resources, pool = raw["ResourceConfig"], raw.get("WarmPoolStatus", {})
    warm_seconds = pool.get("ResourceRetainedBillableTimeInSeconds")
    # Until SageMaker chooses one of several types, the instance is all of them.
    candidates = ",".join(each["InstanceType"] for each in resources.get("InstancePreferences", []))
    chosen = resources.get("SelectedInstanceType") or candidates
    count = resources.get("SelectedInstanceCount") or resources.get("InstanceCount", 0)
    moments = (raw.get(name) for name in ("TrainingStartTime", "TrainingEndTime"))
    started, ended = (moment and moment.timestamp() for moment in moments)
    tags = {tag["Key"]: tag["Value"] for tag in raw.get("Tags", [])}  # only Search tells them
    return JobDescription(
        job_id=raw["TrainingJobName"],
        status=status,
        secondary_status=secondary,
        instance=chosen or resources.get("InstanceType", ""),
        instance_count=count,
        volume_size=resources.get("VolumeSizeInGB", 0),  # not required by botocore's model
        created=raw["CreationTime"].timestamp(),
        data=channels.get("training", ""),
        hyperparameters=hyperparameters,
        name=tags.get(NAME_TAG),
        owner=tags.get(OWNER_TAG),
        summary=tags.get(SUMMARY_TAG),
        search=raw.get("Environment", {}).get(SEARCH_VARIABLE),
        inputs=channels,
        failure_reason=None if status in RUNNING else reason,
        message=transitions[-1].get("StatusMessage") if transitions else None,
        started=started,
        ended=ended,
        metrics=metrics or None,
        model_uri=artifacts.get("S3ModelArtifacts") if status == "Completed" else None,
        checkpoint_uri=None if checkpoint_step is None else place,
        checkpoint_step=checkpoint_step,
        billable_seconds=raw.get("BillableTimeInSeconds"),
        training_seconds=raw.get("TrainingTimeInSeconds"),
        keep_alive=resources.get("KeepAlivePeriodInSeconds"),
        warm_pool_seconds=None if pool.get("Status") == "Available" else warm_seconds,
        spot=raw.get("EnableManagedSpotTraining", False),
    )


def in_short(reason: str) -> str:
    """A FailureReason in one line: the error of train.py, else all of it."""
    found = CAUSE.search(reason) or EXTRA.search(reason)
    return " ".join((found[1] if found else reason).split())
