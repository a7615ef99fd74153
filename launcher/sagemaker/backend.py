"""The backend for Amazon SageMaker, which asks AWS by boto3.

A job keeps its files below its own prefixes in the store:

    STORE/jobs/JOB-ID/job.json                    the job, as it was submitted
    STORE/jobs/JOB-ID/source/sourcedir.tar.gz     the training folder
    STORE/jobs/JOB-ID/output/model.tar.gz         /opt/ml/model, packed by SageMaker
    STORE/jobs/JOB-ID/output/output.tar.gz
    STORE/checkpoints/JOB-ID/                     /opt/ml/checkpoints, which SageMaker syncs; S3 may
                                                  expire them
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from sm_nanogpt.launcher import aws, machines
from sm_nanogpt.launcher.aws import Offline
from sm_nanogpt.launcher.backends import Backend
from sm_nanogpt.launcher.curve import (
    MAX_CURVE_BYTES,
    Row,
    newest_curve_file,
    rows_of_file,
    rows_of_log,
)
from sm_nanogpt.launcher.description import (
    RUNNING,
    JobDescription,
    UnreadableJob,
    checkpoints_among,
)
from sm_nanogpt.launcher.errors import InputError, ServiceError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.instances import assume_gpus, has_local_disks, looks_like_gpu
from sm_nanogpt.launcher.job import Request, TrainingJob
from sm_nanogpt.launcher.locations import is_on_s3
from sm_nanogpt.launcher.sagemaker import caller, cost
from sm_nanogpt.launcher.sagemaker.account import Account
from sm_nanogpt.launcher.sagemaker.checks import (
    check_gpus,
    check_regions,
    check_volume,
    check_vpc,
    default_image,
    log_instances,
)
from sm_nanogpt.launcher.sagemaker.cost import Prices
from sm_nanogpt.launcher.sagemaker.description import describe_job, requested_instance
from sm_nanogpt.launcher.sagemaker.logs import LOG_GROUP, Event, last_lines, lines_of, new_events
from sm_nanogpt.launcher.sagemaker.request import (
    Placement,
    check_request,
    create_request,
    sendable_hyperparameters,
)
from sm_nanogpt.launcher.sagemaker.rules import check_fields
from sm_nanogpt.launcher.sagemaker.stack import notebook_role, with_stack
from sm_nanogpt.launcher.sagemaker.submission import Submission
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)

# Placeholders of a dry run, which does not ask AWS.
ROLE_PLACEHOLDER = "arn:aws:iam::111122223333:role/ROLE-NOT-KNOWN-YET"
OWNER_PLACEHOLDER = "OWNER-NOT-KNOWN-YET"
QUIET_SECONDS = 15.0  # after a job's end; if no line comes for so long, the log is complete


class SageMakerBackend(Backend):
    """Runs jobs on SageMaker."""

    title = "SageMaker"
    is_remote = True
    bills = True
    stops_at_ctrl_c = False
    saves_when_stopped = False
    shares_cores = False
    logs_more_than_script = True
    poll_seconds = 5.0
    run_maker = "sm_nanogpt.launcher.trying.cloud.SageMakerRuns"

    def __init__(self, settings: Settings, attempts: int | None = None) -> None:
        super().__init__(settings)
        self.account = Account(settings, attempts)

    @property
    def location(self) -> str:
        return f"in {self.account.region}"

    @classmethod
    def why_not_configured(cls, settings: Settings) -> str:
        return "" if settings.reaches_aws else "AWS_REGION is not set"

    @classmethod
    def launched_last(cls, settings: Settings) -> Sequence[str]:
        return [launched.job_id for launched in caller.last_launches(settings)]

    # -- launch -----------------------------------------------------------------------------------

    @classmethod
    def takes_field(cls, name: str) -> bool:
        return True

    @classmethod
    def check_fields(cls, request: Request) -> None:
        check_fields(request)

    @classmethod
    def count_ranks(cls, request: Request) -> int:
        """The number of ranks. A type whose GPUs are not known counts as 8 GPUs."""
        gpus_per_instance = [assume_gpus(name) for name in request.instances]
        ranks_per_instance = [max(1, gpus) for gpus in gpus_per_instance]
        return math.lcm(*ranks_per_instance) * (request.instance_count or 1)

    @classmethod
    def has_gpus(cls, instance: str) -> bool:
        return looks_like_gpu(instance)

    @classmethod
    def disk_of(cls, instance: str) -> Literal["instance", "volume"]:
        return "instance" if has_local_disks(instance) else "volume"

    @classmethod
    def default_launcher(cls, instance: str) -> str:
        return machines.default_launcher(instance)

    def launch_settings(self) -> Settings:
        """The settings with a store that SageMaker can read and an execution role.

        They come from the settings, or else from the stack, or else they are the role of the
        SageMaker notebook in which this runs and the account's default SageMaker bucket. No bucket
        is created.
        """
        has_region = bool(self.account.session.region_name)
        if self.settings.offline and not (has_region or self.settings.store):
            problem = "a dry run does not ask AWS, and neither a region nor a store is set"
            raise InputError(problem, code="no-region-and-store")
        settings = with_stack(self.settings)
        if not settings.role:
            role = notebook_role(self.account.client)
            if role:
                logger.info(f"role: {role} (from this SageMaker notebook)")
                settings = settings.model_copy(update={"role": role})
        if settings.store:
            return settings
        try:
            bucket = self.account.default_bucket()
        except Offline as error:
            raise InputError(
                f"{error}, and no stack is known here yet", code="no-stack-seen"
            ) from None
        if bucket is None:
            raise InputError(
                "no store is set, and the account has no default bucket", code="no-store"
            )
        store = f"s3://{bucket}/sm-nanogpt"
        logger.info(f"store: {store} (the account's default SageMaker bucket)")
        return settings.model_copy(update={"store": store})

    def check(self, job: TrainingJob) -> Placement:
        """Decide the role, the image, and the keys of a job. A dry run has placeholders.

        Raises InputError if SageMaker cannot run the job.
        """
        release = None
        image_uri = job.image_uri
        if image_uri is None:
            release = machines.find_image(job.pytorch_version)
            image_uri = default_image(job, self.account.region)
        check_volume(job)
        if not is_on_s3(self.settings.data_store):
            raise InputError(
                f"SageMaker cannot read {self.settings.data_store}", code="store-on-s3"
            )
        problem = machines.image_problem(image_uri, release, job.instance, job.launcher)
        if problem:
            raise InputError(problem)
        check_vpc(job, self.settings, self.account.region)
        check_gpus(job)
        hyperparameters = sendable_hyperparameters(job)

        log_instances(job)
        if release:
            logger.info(f"image: {machines.name_of(image_uri)} (Python {release.python})")
        owner, role = self.find_owner_and_role(job)
        kms_key = job.kms_key or self.settings.kms_key or None
        volume_kms_key = kms_key
        if all(has_local_disks(instance) for instance in job.instances):
            volume_kms_key = None  # AWS refuses a key for local disks, which are always encrypted
        return Placement(
            region=self.account.region,
            owner=owner,
            role=role,
            image_uri=image_uri,
            store=self.settings.data_store,
            hyperparameters=hyperparameters,
            kms_key=kms_key,
            volume_kms_key=volume_kms_key,
        )

    def find_owner_and_role(self, job: TrainingJob) -> tuple[str, str]:
        """Return the owner of a job and its execution role.

        Raises InputError if there is no role, or the job reads a bucket of another region.
        """
        role = self.settings.role
        try:
            owner = self.account.caller().owner
            check_regions(job, self.settings, self.account)
        except Offline:
            return OWNER_PLACEHOLDER, role or ROLE_PLACEHOLDER
        if not role:
            problem = "no execution role, by which SageMaker reads and writes the store"
            raise InputError(problem, code="no-role")
        return owner, role

    def price(
        self, job: TrainingJob, earlier: tuple[TrainingJob, JobDescription] | None
    ) -> TrainingJob:
        prices = Prices(self.settings)
        spent: float | None = 0.0
        if earlier is not None:
            spent = cost.earlier_cost(*earlier, prices)
        return cost.afford(job, self.settings, prices, spent)

    def request(self, job_id: str, job: TrainingJob, placement: Placement) -> dict[str, Any]:
        """Make the CreateTrainingJob request of a job. It needs no credentials, and sends nothing.

        If version 2 of the SDK is installed, its estimator has to make the same request, except in
        a dry run. Raises InputError if SageMaker's API would refuse the request, and ServiceError
        if the estimator would send another request than is shown, priced, and agreed to.
        """
        request = create_request(job_id, job, placement)
        check_request(request, job, placement)
        if placement.owner == OWNER_PLACEHOLDER:
            return request
        from sm_nanogpt.launcher.sagemaker import estimator  # the import takes seconds

        try:
            sdk_request = estimator.create_request(job_id, job, placement)
        except ImportError:  # no SDK, version 3, or what an installation of both leaves
            return request
        differing = []
        for name in sorted({*sdk_request, *request}):
            if sdk_request.get(name) != request.get(name):
                differing.append(name)
        if differing:
            parts = ", ".join(differing)
            problem = f"the SageMaker SDK would send another {parts} than was planned"
            raise ServiceError(f"{problem}, so nothing was sent", code="sdk-differs")
        return request

    def submit(
        self, job_id: str, job: TrainingJob, placement: Placement, request: Mapping[str, Any]
    ) -> None:
        """As Submission.send."""
        Submission(job_id, job, placement, self.account, self.settings).send(request)

    def console_link(self, job_id: str) -> str | None:
        return self.account.console_link(job_id)

    # -- after ------------------------------------------------------------------------------------

    def describe(self, job_id: str) -> JobDescription | None:
        raw = self.account.find_raw(job_id)
        if raw is None:
            return None
        checkpoint_step = None
        if raw["TrainingJobStatus"] not in RUNNING:
            names = storage.list_files(raw["CheckpointConfig"]["S3Uri"], self.settings)
            checkpoint_step = max(checkpoints_among(names), default=None)
        return describe_job(raw, checkpoint_step)

    def job(self, job_id: str) -> TrainingJob:
        raw = self.account.raw_job(job_id)
        uri = storage.join(raw["OutputDataConfig"]["S3OutputPath"], job_id, "job.json")
        job = storage.read_document(uri, TrainingJob, self.settings)
        if job is None:
            raise ServiceError(f"{uri} is missing, so the submitted job is unknown")
        # Other people may write to the store. So its record of the job chooses neither the
        # container, nor its environment, nor the instances.
        resources = raw["ResourceConfig"]
        update = {
            "environment": raw.get("Environment", {}),
            "instance": requested_instance(resources),
            "instance_count": resources["InstanceCount"],
        }
        if job.image_uri:
            update["image_uri"] = raw["AlgorithmSpecification"]["TrainingImage"]
        return job.model_copy(update=update)

    def list(
        self, everyone: bool = False, name: str | None = None
    ) -> Iterator[JobDescription | UnreadableJob]:
        """Yield jobs; each page is asked for when it is needed.

        This fails in seconds if AWS does not answer.
        """
        self.account.caller(patient=False)
        for raw in self.account.search_raw(everyone, name):
            try:
                yield describe_job(raw, None)
            except ServiceError as error:
                yield UnreadableJob(raw["TrainingJobName"], error)

    def other_owner(self, job: JobDescription) -> str:
        owner = job.owner or self.account.owner(job.job_id)
        if owner is None:
            return "somebody whom SageMaker does not name yet"
        return "" if owner == self.account.caller().owner else owner

    @classmethod
    def check_no_later(cls, job: JobDescription, settings: Settings, acts: bool) -> None:
        """Log that the caller launched a later job than `job` from here, in another region.

        acts: the job is to be changed; then this raises InputError. This asks AWS.
        """
        for later in caller.last_launches(settings):
            if later.job_id <= job.job_id:
                continue
            account = Account(settings)
            other_account = Account(settings.model_copy(update={"region": later.region}))
            is_elsewhere = later.caller == account.caller() and later.region != account.region
            if not is_elsewhere or other_account.find_raw(later.job_id) is None:
                continue
            problem = f"{later.job_id} was launched after {job.job_id}, in {later.region}"
            if acts:
                raise InputError(problem, code="in-another-region", region=later.region)
            logger.info(problem, extra={"code": "in-another-region", "region": later.region})

    def stop(self, job_id: str) -> None:
        try:
            self.account.client("sagemaker").stop_training_job(TrainingJobName=job_id)
        except ServiceError:
            raw = self.account.find_raw(job_id)
            if raw is None or raw["TrainingJobStatus"] in RUNNING:
                raise
            # It ended since the caller looked, and SageMaker refuses to stop it.

    def curve(self, job_id: str) -> tuple[Sequence[Row], str]:
        """Read the log while the job runs, as files arrive late; after its end, read the file."""
        raw = self.account.raw_job(job_id)
        if raw["TrainingJobStatus"] not in RUNNING:
            checkpoints = raw["CheckpointConfig"]["S3Uri"]
            names = storage.list_files(checkpoints, self.settings)
            uri = storage.join(checkpoints, newest_curve_file(names))
            content = storage.read_bytes(uri, self.settings, MAX_CURVE_BYTES)
            if content is not None:
                return rows_of_file(content.splitlines(), uri), uri
        return rows_of_log(self.logs(job_id, follow=False)), f"the log in {LOG_GROUP}"

    def directories(self, job_id: str) -> Sequence[str]:
        raw = self.account.raw_job(job_id)
        directory = storage.join(raw["OutputDataConfig"]["S3OutputPath"], job_id)
        return [directory, raw["CheckpointConfig"]["S3Uri"]]

    def forget(self, job_id: str) -> None:
        self.account.client("sagemaker").delete_training_job(TrainingJobName=job_id)

    def logs(
        self, job_id: str, follow: bool, raw: bool = False, tail: int | None = None
    ) -> Iterator[str]:
        if tail is not None:
            return iter(last_lines(self.account.client("logs"), job_id, tail, raw))
        return lines_of(self.events(job_id, follow), raw)

    def events(self, job_id: str, follow: bool) -> Iterator[Event]:
        """Yield the CloudWatch events of all hosts, in the order of time.

        follow: wait for new events until the job ends. Its last lines come after its end, so this
        ends when no line has come for QUIET_SECONDS.
        """
        tokens: dict[str, str] = {}
        poll = partial(self.poll, job_id, tokens)
        if not follow:
            _, events = poll()
            yield from events
            return

        last_event_time = time.monotonic()
        has_ended = False
        said_pending = False
        while True:
            raw, events = aws.patiently(poll, job_id=job_id, code="job-goes-on", bills=self.bills)
            yield from events
            if events or not has_ended:
                last_event_time = time.monotonic()
            has_ended = raw is None or raw["TrainingJobStatus"] not in RUNNING
            if has_ended and time.monotonic() - last_event_time > QUIET_SECONDS:
                return
            if raw and raw.get("SecondaryStatus") == "Pending" and not said_pending:
                said_pending = True
                describe_job(raw, None).log_pending()
            time.sleep(self.poll_seconds)

    def poll(
        self, job_id: str, tokens: dict[str, str]
    ) -> tuple[dict[str, Any] | None, Sequence[Event]]:
        """The answer of SageMaker about a job, and its new events, as new_events returns them."""
        raw = self.account.find_raw(job_id)
        return raw, new_events(self.account.client("logs"), job_id, tokens)
