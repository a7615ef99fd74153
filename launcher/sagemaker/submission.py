"""Send a job to SageMaker: the files that it needs, and then its request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sm_nanogpt.launcher.aws import response_in
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.sagemaker.account import Account
from sm_nanogpt.launcher.sagemaker.caller import LaunchedJob, remember_launch
from sm_nanogpt.launcher.sagemaker.request import Placement, source_archive
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Submission:
    """A planned job on its way to SageMaker. The settings have its store."""

    job_id: str
    job: TrainingJob
    placement: Placement
    account: Account
    settings: Settings

    def send(self, request: Mapping[str, Any]) -> None:
        """Send the files, and then the request of CreateTrainingJob.

        Raises ServiceError with the code `job-may-exist` if it is not known whether the job exists.
        """
        account = self.account
        launched = LaunchedJob(
            account.caller(), account.region, self.job_id, self.job.name, self.job.summary
        )
        try:
            self.send_files()
        except BaseException:  # also Ctrl-C
            self.remove_files()
            raise
        may_exist = True  # also if Ctrl-C comes before the answer
        try:
            account.client("sagemaker").create_training_job(**request)
        except ServiceError as error:
            response = response_in(error.__context__)
            was_created = self.was_created(response)
            if was_created:
                return
            if was_created is None:
                raise ServiceError(str(error), code="job-may-exist", job_id=self.job_id) from None
            may_exist = False
            # If the id is in use, the files belong to the job that has it.
            if response["Error"]["Code"] != "ResourceInUse":
                self.remove_files()
            raise
        finally:
            if may_exist:
                remember_launch(launched, self.settings)

    def send_files(self) -> None:
        """Write the training folder, the checkpoints of a resumed job, and the submitted job."""
        job, placement = self.job, self.placement
        archive = source_archive(job.source, job.launcher)
        storage.write_bytes(placement.source_uri(self.job_id), archive, self.settings)
        if job.resume is not None:
            source = self.account.raw_job(job.resume)["CheckpointConfig"]["S3Uri"]
            if not storage.copy(source, placement.checkpoint_uri(self.job_id), self.settings):
                raise ServiceError(f"job {job.resume} has no checkpoints at {source}")
        record = job.model_dump(mode="json", exclude_defaults=True)
        storage.write_json(placement.file_uri(self.job_id, "job.json"), record, self.settings)

    def remove_files(self) -> None:
        """Remove the files of a job that does not exist, which `delete` could not find."""
        uris = (self.placement.file_uri(self.job_id), self.placement.checkpoint_uri(self.job_id))
        for uri in uris:
            try:
                storage.remove(uri, self.settings)
            except ServiceError as error:
                logger.info(f"{uri} is left behind: {error}")

    def was_created(self, response: Mapping[str, Any]) -> bool | None:
        """True if the job exists after an error response to its request; None if that is unknown.

        If the first attempt was refused, the job does not exist. After any other response, it may
        have been created, so AWS is asked for it.
        """
        metadata = response.get("ResponseMetadata", {})
        is_refusal = metadata.get("HTTPStatusCode", 500) < 500
        if is_refusal and not metadata.get("RetryAttempts"):
            return False
        try:
            if self.account.find_raw(self.job_id) is not None:
                return True
        except ServiceError:
            return None
        return False if is_refusal else None
