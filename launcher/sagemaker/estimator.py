"""The only module that uses the SageMaker SDK (v2): its estimator turns a job into a request.

The PyTorch estimator gets image, role, source archive and S3 locations, so that it does not call
AWS itself. Version 2 of the SDK ends in July 2027; `launcher.sagemaker.request` makes the same
request without it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.errors import InputError
from launcher.files import storage
from launcher.job import TrainingJob
from launcher.machines import looks_like_gpu
from launcher.sagemaker.request import (
    LONGEST_PENDING,
    Plan,
    channels_of,
    max_wait_of,
    mpi_options,
    tags_of,
)

# os.environ belongs to the process: two threads that change it at once would restore each other's
# values.
ONE_AT_A_TIME = threading.Lock()
CONFIG = "SchemaVersion: '1.0'\nSageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}\n"


@contextmanager
def quiet_sdk(home: Path) -> Iterator[None]:
    """Turn off side effects of the SDK, and restore the process afterwards.

    These are telemetry, a banner, INFO logs of all libraries, defaults from configuration files of
    the user and the machine, and a look-up of AWS_PROFILE, which fails if that profile is gone.
    """
    from botocore.session import Session

    config = str(home / "sagemaker-sdk.yaml")
    if storage.read_bytes(config) != CONFIG.encode():
        storage.write_text(config, CONFIG)
    ours = {
        "DISABLE_JUMPSTART_LOGGING": "1",  # it warns on import if credentials have expired
        "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
        "SAGEMAKER_ADMIN_CONFIG_OVERRIDE": config,
        "SAGEMAKER_USER_CONFIG_OVERRIDE": config,
    }
    with ONE_AT_A_TIME:
        # Keep an existing profile: another thread may need it.
        there = Session().available_profiles
        named = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
        gone = [name for name in named if name in os.environ and os.environ[name] not in there]
        before = {name: os.environ.get(name) for name in {*ours, *gone}}
        loggers = (None, "sagemaker", "sagemaker.config")
        root, *of_sdk = (logging.getLogger(name) for name in loggers)
        levels = {logger: logger.level for logger in (root, *of_sdk)}
        handlers = root.handlers[:]
        try:
            os.environ.update(ours)
            for name in gone:
                del os.environ[name]
            for logger in of_sdk:
                logger.setLevel(logging.WARNING)
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            for logger, level in levels.items():
                logger.setLevel(level)
            root.handlers[:] = handlers


@contextmanager
def lean_sdk() -> Iterator[None]:
    """Keep the SDK from validating its config, and estimators from making a TensorBoard client.

    The config is our constant, and fifty look-ups would each validate it (2 s). The client comes
    from boto3's default session, which fails if the default profile's login has expired, even if
    another profile launches.
    """
    import sagemaker.config.config
    import sagemaker.estimator
    import sagemaker.utils

    replaced: list[tuple[Any, str, Any]] = [
        (module, name, getattr(module, name))
        for module, name in (
            (sagemaker.config.config, "validate_sagemaker_config"),
            (sagemaker.utils, "validate_sagemaker_config"),
            (sagemaker.estimator, "TensorBoardApp"),
        )
    ]
    try:
        for module, name, _ in replaced:
            setattr(module, name, lambda *_, **__: None)
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


def create_request(job_id: str, job: TrainingJob, plan: Plan, home: Path) -> dict[str, Any]:
    """The CreateTrainingJob request that the SDK makes for a job. Sends nothing.

    Raises:
        InputError: the text is not on S3, or the SDK refuses the job.
    """
    with quiet_sdk(home), lean_sdk():
        return record_request(job_id, job, plan)


def record_request(job_id: str, job: TrainingJob, plan: Plan) -> dict[str, Any]:
    """The request, recorded just before the SDK would send it."""
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
    unsigned = boto3.Session("none", "none", region_name=plan.region)
    session = Recorder(boto_session=unsigned)
    output_uri = storage.join(plan.store, "jobs")
    if job.launcher == "torchrun":
        distribution: dict[str, Any] = {"torch_distributed": {"enabled": True}}
    else:  # with `enable`, as in a well-known tutorial, each host would train alone
        options = mpi_options(job.environment)
        distribution = {"pytorchddp": {"enabled": True, "custom_mpi_options": options}}
    try:
        estimator = PyTorch(
            entry_point="train.py",
            source_dir=plan.source_uri(job_id),
            image_uri=plan.image_uri,  # framework_version would end pytorchddp at PyTorch 2.2
            distribution=distribution,
            role=plan.role,
            instance_type=job.instances[0],
            instance_count=job.instance_count,
            hyperparameters=dict(plan.hyperparameters),
            metric_definitions=job.metric_definitions(),
            output_path=output_uri,
            code_location=output_uri,
            checkpoint_s3_uri=plan.checkpoint_uri(job_id),
            use_spot_instances=job.spot,
            max_run=job.time_limit,
            max_wait=max_wait_of(job) if job.spot else None,
            keep_alive_period_in_seconds=job.keep_alive,
            volume_size=job.volume_size,
            environment=dict(job.environment) or None,
            tags=tags_of(job, plan),
            output_kms_key=plan.kms_key,
            volume_kms_key=plan.volume_kms_key,
            subnets=list(job.subnets) or None,
            security_group_ids=list(job.security_group_ids) or None,
            enable_network_isolation=job.network_isolation,
            encrypt_inter_container_traffic=job.encrypt_traffic,
            disable_profiler=True,
            debugger_hook_config=False,
            sagemaker_session=session,
        )
        inputs = {
            name: TrainingInput(
                uri, input_mode=None if name == "model" or job.input_mode == "File" else "FastFile"
            )
            for name, uri in channels_of(job).items()
        }
        estimator.fit(inputs, job_name=job_id, wait=False)
    except ValueError as error:  # the SDK's table of supported combinations
        raise InputError(
            f"the SageMaker SDK refuses this job: {' '.join(str(error).split())}"
        ) from None
    if len(job.instances) > 1:
        prefer(job.instances, session.request)
    if looks_like_gpu(job.instance) and not job.spot:  # of CPUs and spot, AWS ignores it
        session.request["StoppingCondition"]["MaxPendingTimeInSeconds"] = LONGEST_PENDING
    return session.request


def prefer(instance_types: Sequence[str], request: dict[str, Any]) -> None:
    """Change the request to run on the first of these types that has capacity; the v2 SDK lacks
    this option."""
    resources = request["ResourceConfig"]
    del resources["InstanceType"]
    resources["InstancePreferences"] = [{"InstanceType": name} for name in instance_types]
    # Without it, the toolkit configures the network for the type that the job runs on.
    request["HyperParameters"].pop("sagemaker_instance_type", None)
