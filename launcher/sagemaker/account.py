"""One region of an AWS account: its clients, the caller, and our training jobs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from sm_nanogpt.launcher import aws
from sm_nanogpt.launcher.aws import Missing, aws_session, make_client
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.sagemaker import caller
from sm_nanogpt.launcher.sagemaker.caller import (
    Caller,
    LaunchedJob,
    our_tags,
    search_jobs,
    with_last,
)
from sm_nanogpt.launcher.sagemaker.description import describe_job, is_our_job
from sm_nanogpt.launcher.settings import Settings

CONSOLES = {
    "aws": "console.aws.amazon.com",
    "aws-cn": "console.amazonaws.cn",
    "aws-us-gov": "console.amazonaws-us-gov.com",
}


class Account:
    """One region of the account that the settings name. AWS is asked only when that is needed."""

    def __init__(self, settings: Settings, attempts: int | None = None) -> None:
        """attempts: as for make_client of launcher/aws.py."""
        self.settings = settings
        self.attempts = attempts
        self.session = aws_session(settings)
        self.clients: dict[str, Any] = {}

    @cached_property
    def region(self) -> str:
        return aws.check_region(self.session)

    def client(self, service: str) -> Any:
        if service not in self.clients:
            self.clients[service] = make_client(self.session, service, self.region, self.attempts)
        return self.clients[service]

    def caller(self, patient: bool = True) -> Caller:
        return caller.caller_of(self.session, self.region, patient)

    def default_bucket(self) -> str | None:
        """SageMaker's default bucket of the account and region, if it exists."""
        account = self.caller().account
        bucket = f"sagemaker-{self.region}-{account}"
        try:
            self.client("s3").head_bucket(Bucket=bucket, ExpectedBucketOwner=account)
        except Missing:
            return None
        except ServiceError as error:
            raise error.within(f"s3://{bucket}, the default bucket") from None
        return bucket

    def find_raw(self, job_id: str) -> dict[str, Any] | None:
        """The answer of DescribeTrainingJob; None if there is no such job.

        Raises ServiceError if the job is not one of sm-nanogpt.
        """
        try:
            raw = dict(self.client("sagemaker").describe_training_job(TrainingJobName=job_id))
        except Missing:
            return None
        if not is_our_job(raw):
            raise ServiceError(f"{job_id} is a training job that sm-nanogpt did not launch")
        return raw

    def raw_job(self, job_id: str) -> dict[str, Any]:
        """As `find_raw`, but raises ServiceError if there is no such job."""
        raw = self.find_raw(job_id)
        if raw is None:
            raise ServiceError(f"there is no job {job_id!r} in {self.region}")
        return raw

    def search_raw(
        self, everyone: bool = True, name: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Search the account's jobs by our tags; yield SageMaker's answers, the newest first.

        Search does not have new jobs yet, so the job that the caller launched last from here is
        asked for by its id.
        """
        current = self.caller()
        owner = None if everyone else current.owner
        jobs = filter(is_our_job, search_jobs(self.client("sagemaker"), owner, name))
        for last in caller.last_launches(self.settings):
            is_ours = last.caller == current and last.region == self.region
            if is_ours and name in (None, last.name):
                return with_last(jobs, last.job_id, self.find_launched(last))
        return jobs

    def find_launched(self, last: LaunchedJob) -> Iterator[dict[str, Any]]:
        """Yield the job that was launched last, if it exists, with the tags that Search adds."""
        raw = self.find_raw(last.job_id)
        if raw is not None:
            yield {**raw, "Tags": our_tags(last.caller.owner, last.name, last.summary)}

    def owner(self, job_id: str) -> str | None:
        """The owner of a job; None if Search does not have the job yet, as in its first seconds."""
        for last in caller.last_launches(self.settings):
            if last.job_id == job_id:
                return last.caller.owner
        for raw in search_jobs(self.client("sagemaker"), job_id=job_id):
            return describe_job(raw, None).owner
        return None

    def console_link(self, job_id: str) -> str | None:
        """The address of a job's page in AWS's console; None if the console is not known."""
        region = self.region
        console = CONSOLES.get(self.session.get_partition_for_region(region))
        if console is None:
            return None
        return f"https://{region}.{console}/sagemaker/home?region={region}#/jobs/{job_id}"
