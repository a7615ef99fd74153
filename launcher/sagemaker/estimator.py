"""The only module that uses the SageMaker SDK (v2): its estimator turns a job into a request.

The PyTorch estimator gets image, role, source archive and S3 locations, so that it does not call
AWS itself. Version 2 of the SDK ends in July 2027; `launcher.sagemaker.request` makes the same
request without it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from sm_nanogpt.launcher.aws import service_errors
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.instances import looks_like_gpu
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.sagemaker.request import (
    MAX_PENDING_SECONDS,
    Placement,
    channels_of,
    instance_choice,
    mpi_options,
    tags_of,
)

SDK_LOCK = threading.Lock()  # two threads would restore each other's values
# The SDK gets this instead of files of the user and the machine, whose defaults would change the
# request.
NO_TELEMETRY = {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}
CONFIG = {"SchemaVersion": "1.0", "SageMaker": NO_TELEMETRY}


@contextmanager
def quiet_sdk() -> Iterator[None]:
    """Silence the SDK, and restore the loggers that its import sets up.

    Otherwise the SDK would validate CONFIG at its start and in fifty look-ups (2 s). It would also
    make a TensorBoard client from boto3's default session, which fails if the login of the default
    profile has expired.
    """
    os.environ.setdefault("DISABLE_JUMPSTART_LOGGING", "1")  # it warns of expired credentials
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
    root = logging.getLogger("root")
    with SDK_LOCK, ExitStack() as restored:
        restored.callback(root.setLevel, root.level)
        restored.enter_context(patch.object(root, "handlers", root.handlers[:]))
        for name in ("sagemaker", "sagemaker.config"):
            logger = logging.getLogger(name)
            restored.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.WARNING)
        import_module("sagemaker.pytorch")  # raises ImportError if it is not of version 2
        restored.enter_context(patch("sagemaker.session.validate_sagemaker_config"))
        restored.enter_context(patch("sagemaker.utils.validate_sagemaker_config"))
        restored.enter_context(patch("sagemaker.estimator.TensorBoardApp"))
        yield


@service_errors("the SageMaker SDK")
@quiet_sdk()
def create_request(job_id: str, job: TrainingJob, placement: Placement) -> dict[str, Any]:
    """Make the CreateTrainingJob request of a job. It is recorded before the SDK would send it."""
    import boto3
    import sagemaker
    from sagemaker.inputs import TrainingInput
    from sagemaker.pytorch import PyTorch

    class Recorder(sagemaker.Session):
        """A session that records the request instead of sending it."""

        request: dict[str, Any]

        def _intercept_create_request(
            self, request: dict[str, Any], create: Any, func_name: str | None = None
        ) -> None:
            self.request = request

    # Nothing is signed; with dummy keys boto3 does not look for credentials.
    unsigned = boto3.Session("none", "none", region_name=placement.region)
    session = Recorder(boto_session=unsigned, sagemaker_config=CONFIG)
    output_uri = storage.join(placement.store, "jobs")
    if job.launcher == "torchrun":
        distribution: dict[str, Any] = {"torch_distributed": {"enabled": True}}
    else:  # with `enable`, as in a well-known tutorial, each host would train alone
        options = mpi_options(job.environment)
        distribution = {"pytorchddp": {"enabled": True, "custom_mpi_options": options}}
    estimator = PyTorch(
        entry_point="train.py",
        source_dir=placement.source_uri(job_id),
        image_uri=placement.image_uri,  # framework_version would end pytorchddp at PyTorch 2.2
        distribution=distribution,
        role=placement.role,
        instance_type=job.instances[0],
        instance_count=job.instance_count,
        hyperparameters=dict(placement.hyperparameters),
        metric_definitions=job.metric_definitions(),
        output_path=output_uri,
        code_location=output_uri,
        checkpoint_s3_uri=placement.checkpoint_uri(job_id),
        use_spot_instances=job.spot,
        max_run=job.time_limit,
        max_wait=job.wait_limit if job.spot else None,
        keep_alive_period_in_seconds=job.keep_alive,
        volume_size=job.volume_size,
        environment=dict(job.environment) or None,
        tags=tags_of(job, placement),
        output_kms_key=placement.kms_key,
        volume_kms_key=placement.volume_kms_key,
        subnets=list(job.subnets) or None,
        security_group_ids=list(job.security_group_ids) or None,
        enable_network_isolation=job.network_isolation,
        encrypt_inter_container_traffic=job.encrypt_traffic,
        disable_profiler=True,
        debugger_hook_config=False,
        sagemaker_session=session,
    )
    inputs = {}
    for name, (uri, mode) in channels_of(job).items():
        inputs[name] = TrainingInput(uri, input_mode=mode)
    estimator.fit(inputs, job_name=job_id, wait=False)

    # Version 2 of the SDK lacks these options.
    if len(job.instances) > 1:
        resources = session.request["ResourceConfig"]
        del resources["InstanceType"]
        resources |= instance_choice(job)
        # Without it, the toolkit configures the network for the type that the job runs on.
        session.request["HyperParameters"].pop("sagemaker_instance_type", None)
    if looks_like_gpu(job.instance) and not job.spot:  # of CPUs and spot, AWS ignores it
        session.request["StoppingCondition"]["MaxPendingTimeInSeconds"] = MAX_PENDING_SECONDS
    return session.request
