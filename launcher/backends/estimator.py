"""The only module that uses the SageMaker SDK (v2): it turns a job into a request.

The SDK's PyTorch estimator makes the CreateTrainingJob request, both to send and to show. It gets
image, role, source archive and S3 locations, so that it does not call AWS itself. The v2 SDK ends
in 2027; its replacement has to replace only this module. Called by `launcher.backends.sagemaker`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import storage
from launcher.aws.images import find_image
from launcher.aws.instances import looks_like_gpu
from launcher.aws.session import service_errors
from launcher.errors import InputError
from launcher.job import LONGEST_RUN, TAG_KEY, TAG_VALUE, TrainingJob


@dataclass(frozen=True)
class Plan:
    """What the backend decides about a job; the job itself says the rest.

    store is `s3://bucket/prefix`. kms_key encrypts the output, volume_kms_key the disks.
    """

    region: str
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


LONGEST_PENDING = 86_400  # seconds that a job waits for GPUs; AWS names no default

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


def training_image(region: str, pytorch_version: str, gpu: bool, home: Path) -> str:
    """The URI of AWS's PyTorch training image for GPU or CPU.

    Raises:
        InputError: there is no image of that version, or no such region.
    """
    image = find_image(pytorch_version)
    try:
        with quiet_sdk(home):
            from sagemaker import image_uris

            # The newest image that the SDK knows; all of them lie in one registry of each region.
            known = image_uris.retrieve(
                "pytorch",
                region,
                version="2.8.0",
                py_version="py312",
                image_scope="training",
                instance_type="ml.m5.xlarge",
            )
    except ValueError as error:
        raise InputError(f"region {region}: {error}") from None
    return f"{known.partition('/')[0]}/{image.name(gpu)}"


def distribution(launcher: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The SDK's `distribution` for a launcher."""
    if launcher == "torchrun":
        return {"torch_distributed": {"enabled": True}}
    # The toolkit sets NCCL_DEBUG=INFO for all ranks, whatever the job's environment says, and
    # CloudWatch bills each line. Only this option changes that.
    debug = environment.get("NCCL_DEBUG") or "WARN"
    if not debug.isalnum():  # the toolkit passes it through a shell
        raise InputError(f"NCCL_DEBUG={debug!r}: must be one word, such as WARN or INFO")
    # With `enable`, as in a well-known tutorial, each host would train alone.
    return {"pytorchddp": {"enabled": True, "custom_mpi_options": f"--NCCL_DEBUG {debug}"}}


def notebook_role(session: Any, home: Path) -> str:
    """The execution role of the SageMaker notebook or Studio space that this runs in, or ''.

    Elsewhere the caller may also be a role, as after `aws sso login`, but SageMaker cannot use it.

    Raises:
        ServiceError: AWS cannot be asked.
    """
    with quiet_sdk(home), service_errors("get_execution_role"):
        import sagemaker.session as sdk

        if not Path(sdk.NOTEBOOK_METADATA_FILE).exists():
            return ""
        try:
            return str(sdk.get_execution_role(sdk.Session(boto_session=session)))
        except ValueError:  # the caller is a user
            return ""


def take_config_as_it_is(config: dict[Any, Any]) -> None:
    """Replaces the SDK's validation of its config."""


@contextmanager
def no_tensorboard() -> Iterator[None]:
    """Keep estimators from making a TensorBoard client.

    They make it from boto3's default session, which fails if the default profile's login has
    expired, even if another profile launches.
    """
    import sagemaker.estimator

    module: Any = sagemaker.estimator
    app = module.TensorBoardApp
    module.TensorBoardApp = lambda region: None
    try:
        yield
    finally:
        module.TensorBoardApp = app


@contextmanager
def trusted_config() -> Iterator[None]:
    """Keep the SDK from validating its config, our constant, at each of fifty look-ups (2 s)."""
    import sagemaker.config.config
    import sagemaker.utils

    validate = sagemaker.utils.validate_sagemaker_config
    modules: tuple[Any, ...] = (sagemaker.config.config, sagemaker.utils)
    for module in modules:
        module.validate_sagemaker_config = take_config_as_it_is
    try:
        yield
    finally:
        for module in modules:
            module.validate_sagemaker_config = validate


def create_request(job_id: str, job: TrainingJob, plan: Plan, home: Path) -> dict[str, Any]:
    """The CreateTrainingJob request that the SDK makes for a job. Sends nothing.

    Raises:
        InputError: the text is not on S3, or the SDK refuses the job.
    """
    with quiet_sdk(home), trusted_config(), no_tensorboard():
        return record_request(job_id, job, plan)


def channels_of(job: TrainingJob) -> dict[str, str]:
    """The S3 prefix, or `*.txt` object, of each channel."""
    channels = {}
    places = {"training": job.data, "validation": job.validation, "model": job.init_from}
    for name, uri in places.items():
        if uri is None:
            continue
        if not uri.startswith("s3://"):
            raise InputError(f"{uri}: SageMaker reads only from s3://")
        # S3 knows no directories: without the slash, NAME.json would belong to NAME too.
        channels[name] = uri if uri.endswith(".txt") else f"{uri.rstrip('/')}/"
    return channels


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
    max_wait = job.max_wait or min(2 * job.time_limit, LONGEST_RUN)
    output_uri = storage.join(plan.store, "jobs")
    tags = {TAG_KEY: TAG_VALUE, **job.tags}
    try:
        estimator = PyTorch(
            entry_point="train.py",
            source_dir=plan.source_uri(job_id),
            image_uri=plan.image_uri,  # framework_version would end pytorchddp at PyTorch 2.2
            distribution=distribution(job.launcher, job.environment),
            role=plan.role,
            instance_type=job.instances[0],
            instance_count=job.instance_count,
            hyperparameters=dict(plan.hyperparameters),
            metric_definitions=job.module.metric_definitions(),
            output_path=output_uri,
            code_location=output_uri,
            checkpoint_s3_uri=plan.checkpoint_uri(job_id),
            use_spot_instances=job.spot,
            max_run=job.time_limit,
            max_wait=max_wait if job.spot else None,
            keep_alive_period_in_seconds=job.keep_alive,
            volume_size=job.volume_size,
            environment=dict(job.environment) or None,
            tags=[{"Key": key, "Value": value} for key, value in tags.items()],
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
