"""AWS sessions and clients, and errors of AWS as one line with a code."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from sm_nanogpt.launcher.errors import InputError, ServiceError, did_you_mean

if TYPE_CHECKING:
    from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Codes of remedies in launcher.cli.remedies, by patterns for the code of an error of AWS, or for
# the name of an exception. The first pattern that matches counts.
REMEDY_CODES = {
    "LoginInsufficientPermissions": "",
    "Expired|TokenRefresh|TokenRetrieval|SSO|UnauthorizedException|Login": "aws-expired",
    "Credential": "aws-no-credentials",
    "MissingDependency": "aws-crt",  # `aws login` needs it
    "TooSkewed": "aws-clock",
    "Signature|InvalidAccessKey|InvalidClientToken|InvalidToken|UnrecognizedClient": "aws-rejected",
    "Denied|AllAccessDisabled|NotAuthorized|Unauthorized": "aws-denied",
    "400": "aws-400",  # S3 answers HEAD with only a number
    "403": "aws-403",
    "301|Redirect|AuthorizationHeaderMalformed|IllegalLocationConstraint": "aws-elsewhere",
    "RequestLimitExceeded|SlowDown|Throttl|TooManyRequests": "aws-throttled",
    "Capacity": "aws-capacity",
    "ResourceLimitExceeded": "aws-quota",
    "NoSuchBucket": "aws-no-bucket",
    "EndpointConnection|ConnectTimeout|ClientConnector": "aws-network",
}
# AWS refuses a signature whose time is far from its own.
CLOCK_MESSAGES = ("Signature expired", "Signature not yet current")
PATIENT_ATTEMPTS = 6  # of a call
QUICK_TIMEOUTS = {"connect_timeout": 2, "read_timeout": 3}  # seconds, by botocore's names
PATIENCE_SECONDS = 300.0  # how long AWS may give no answer until watching a job fails
OUTAGE_RETRY_SECONDS = 5.0  # between two calls in an outage
QUOTA_RETRY_SECONDS = 60.0  # after which a job that a quota refused is sent again


def aws_session(settings: Settings) -> Any:
    """The boto3 session of the settings, one for all their copies. In a dry run it makes no client.

    Raises InputError if there is no such profile.
    """
    import boto3
    from botocore.exceptions import BotoCoreError

    key = (settings.profile, settings.aws_region, settings.offline)
    if key in settings._sessions:
        return settings._sessions[key]
    try:
        session = boto3.Session(
            profile_name=settings.profile or None, region_name=settings.aws_region or None
        )
    except BotoCoreError as error:
        raise InputError(str(error), code="other-profile") from None
    if settings.offline:
        session.client = raise_offline
        session.get_credentials = raise_offline
    settings._sessions[key] = session
    return session


def raise_offline(*_: object, **__: object) -> NoReturn:
    raise Offline("a dry run does not ask AWS")


def make_client(session: Any, service: str, region: str, attempts: int | None = None) -> Any:
    """Make a client of a service of AWS, whose calls raise the errors of service_errors.

    By default a call gets AWS_MAX_ATTEMPTS attempts, or PATIENT_ATTEMPTS, with the timeouts of
    botocore: a command may watch a job for hours. A number of attempts is for calls
    that a command can do without; QUICK_TIMEOUTS then make them fail within seconds.
    """
    from botocore.config import Config

    retries: dict[str, Any] = {"mode": "standard"}
    timeouts = {}
    if attempts is not None:
        retries["total_max_attempts"] = attempts
        timeouts = QUICK_TIMEOUTS
    elif "AWS_MAX_ATTEMPTS" not in os.environ:
        retries["total_max_attempts"] = PATIENT_ATTEMPTS
    config = Config(retries=retries, **timeouts)
    with service_errors(service):
        client = session.client(service, region_name=region, config=config)

    # botocore's methods, pages and waiters all call this.
    make_api_call = client._make_api_call

    def make_api_call_with_our_errors(operation: str, arguments: Mapping[str, Any]) -> Any:
        with service_errors(operation):
            return make_api_call(operation, arguments)

    client._make_api_call = make_api_call_with_our_errors
    return client


# Regions that AWS opened after the boto3 of constraints.txt. Endpoints follow from the names.
NEWER_REGIONS = ("me-west-1", "sa-west-1")


def check_region(session: Any) -> str:
    """Return the region of a session. Raises InputError if it has none, or SageMaker is not there.

    This does not call AWS: boto3 has a list of the regions of SageMaker.
    """
    region = str(session.region_name or "")
    if not region:
        raise InputError("no region is set", code="no-region")
    regions = [*NEWER_REGIONS]
    for partition in session.get_available_partitions():
        regions += session.get_available_regions("sagemaker", partition)
    if region not in regions:
        hint = did_you_mean(region, regions) or f"there are {', '.join(regions)}"
        raise InputError(f"region {region}: boto3 knows no SageMaker there; {hint}")
    return region


def check_bucket(client: Any, uri: str, field: str, region: str) -> None:
    """Raise InputError if a bucket is in another region than the job.

    uri is s3://bucket/prefix, and field names the argument with it. This needs no permission: each
    answer of S3 about a bucket names the region, also a refusal.
    """
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    if prefix:
        prefix = f"{prefix.rstrip('/')}/"
    try:
        response = client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
    except ServiceError as error:
        response = response_in(error.__context__)
        if not response:
            raise
    headers = response["ResponseMetadata"].get("HTTPHeaders", {})
    bucket_region = headers.get("x-amz-bucket-region", region)
    if bucket_region != region:
        problem = f"is in {bucket_region}, and SageMaker in {region} cannot use it"
        raise InputError(
            problem,
            code="other-region",
            field=field,
            value=uri,
            bucket_region=bucket_region,
            job_region=region,
        )


class Missing(ServiceError):
    """What a call of AWS names does not exist."""


class Offline(ServiceError):
    """A dry run does not ask AWS."""


class Unreachable(ServiceError):
    """No answer came from AWS, or AWS is throttling or failing."""


class OverQuota(ServiceError):
    """A quota of the account allows no more for now."""


class Denied(ServiceError):
    """The caller lacks the permission."""


# The types of errors by the codes of their remedies.
ERROR_TYPES = {"aws-quota": OverQuota, "aws-denied": Denied, "aws-throttled": Unreachable}


def service_error(subject: str, error: BaseException) -> ServiceError:
    """Turn an exception of boto3 or s3fs into an error of one line.

    subject, with which the line begins, is a call of AWS's API, or a URI.
    """
    from botocore import exceptions

    code = remedy_code(error)
    response = response_in(boto_error(error))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    is_unanswered = isinstance(error, (exceptions.ConnectionError, exceptions.HTTPClientError))
    if is_unanswered or status == 429 or status >= 500:
        error_type: type[ServiceError] = Unreachable
    else:
        error_type = ERROR_TYPES.get(code, ServiceError)
    return error_type(f"{subject}: {message_of(error)}", code)


def patiently(
    call: Callable[[], T], *, job_id: str, code: str, bills: bool, deadline: float = math.inf
) -> T:
    """Make a call about a job or a sweep that is watched, and retry it during an outage.

    deadline is in time.monotonic() seconds. code is that of the remedy, which says how to watch the
    job again. bills: the jobs cost money while they run. Raises ServiceError if the outage lasts
    for PATIENCE_SECONDS; other errors, such as expired credentials, are raised at once.
    """
    give_up_at = math.inf
    while True:
        try:
            return call()
        except ServiceError as error:
            now = time.monotonic()
            is_outage = isinstance(error, Unreachable)
            if is_outage and give_up_at == math.inf:
                give_up_at = min(deadline, now + PATIENCE_SECONDS)
                retrying = "retrying (a running job continues meanwhile)"
                logger.info(f"{error}; {retrying}", extra={"cause": error})
            if not is_outage or now >= give_up_at:
                continues = "continues and is billed" if bills else "continues"
                problem = f"{error}; a running job {continues}"
                raise ServiceError(problem, code=code, job_id=job_id) from error
        time.sleep(min(OUTAGE_RETRY_SECONDS, max(0.0, give_up_at - time.monotonic())))


class QuotaWait:
    """The wait of a job for a quota of the account.

    A job waits while jobs of ours run, and some minutes longer: SageMaker may count a job for a
    while after its end.
    """

    def __init__(self) -> None:
        self.retry_at = 0.0  # in time.monotonic() seconds, as is freed_at
        self.freed_at = -math.inf
        self.is_waiting = False

    @property
    def may_send(self) -> bool:
        return time.monotonic() >= self.retry_at

    def note_end(self) -> None:
        """Note that a job of ours has ended."""
        self.retry_at = 0.0
        self.freed_at = time.monotonic()

    def note_sent(self) -> None:
        self.is_waiting = False

    def note_refusal(self, error: OverQuota, others_run: bool) -> bool:
        """Note that the job was refused, and may be sent again in QUOTA_RETRY_SECONDS.

        Returns True at its first refusal. Raises the refusal if none of our jobs runs or has just
        ended: then waiting is in vain.
        """
        now = time.monotonic()
        if not others_run and now > self.freed_at + PATIENCE_SECONDS:
            raise error
        is_first = not self.is_waiting
        self.is_waiting = True
        self.retry_at = now + QUOTA_RETRY_SECONDS
        return is_first


@contextmanager
def service_errors(call: str) -> Iterator[None]:
    """Turn exceptions of botocore in a call of AWS's API into a ServiceError of one line.

    That is Missing if what the call names does not exist, and Unreachable if AWS did not answer.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except (BotoCoreError, ClientError, ResponseParserError) as error:
        answer = AwsAnswer.of(error)
        if answer.is_missing:
            raise Missing(f"{call}: {answer.message}") from None
        raise service_error(call, error) from None


@dataclass(frozen=True)
class AwsAnswer:
    """The answer of AWS to a call that failed. Both fields are '' if AWS did not answer."""

    aws_code: str  # such as AccessDenied
    message: str  # in one line

    @classmethod
    def of(cls, error: BaseException) -> AwsAnswer:
        """The answer in an exception of boto3."""
        details = response_in(error).get("Error", {})
        message = " ".join(str(details.get("Message", "")).split())
        return cls(str(details.get("Code", "")), message)

    @property
    def is_missing(self) -> bool:
        """True if what the call names does not exist.

        SageMaker and CloudFormation have no code for that, so the message decides.
        """
        if re.fullmatch(
            "404|NoSuchBucket|NoSuchEntity|ResourceNotFound(Exception)?", self.aws_code
        ):
            return True
        if self.aws_code == "ValidationException":
            return self.message.startswith("Requested resource not found")
        return self.aws_code == "ValidationError" and self.message.endswith("does not exist")


def response_in(error: BaseException | None) -> dict[str, Any]:
    """The response of AWS in an exception of boto3; {} if there is none.

    The exception is the __context__ of the ServiceError that service_errors raises.
    """
    return getattr(error, "response", None) or {}


def boto_error(error: BaseException) -> BaseException:
    """The exception of boto3 that caused one of s3fs; for an exception of boto3, itself."""
    if response_in(error):
        return error
    return error.__cause__ or error


def remedy_code(error: BaseException) -> str:
    """The remedy for an exception of boto3 or s3fs: a value of REMEDY_CODES, or ''."""
    cause = boto_error(error)
    answer = AwsAnswer.of(cause)
    if any(message in answer.message for message in CLOCK_MESSAGES):
        return "aws-clock"
    name = answer.aws_code or type(cause).__name__
    for pattern, code in REMEDY_CODES.items():
        if re.search(pattern, name):
            return code
    return ""


def message_of(error: BaseException) -> str:
    """The message of an exception of boto3 or s3fs, in one line, with AWS's code."""
    cause = boto_error(error)
    answer = AwsAnswer.of(cause)
    message = answer.message or " ".join(str(cause).split()) or type(cause).__name__
    if not answer.aws_code or answer.aws_code in message:
        return message
    return f"{message} ({answer.aws_code})"
