"""AWS sessions and clients, and errors of AWS as one line with a code."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from launcher.errors import InputError, ServiceError, did_you_mean

if TYPE_CHECKING:
    from launcher.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What an error is, by a part of AWS's code or of the exception's name; the first that fits. The
# command line has words for each.
CODES = {
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
CLOCK_MESSAGES = ("Signature expired", "Signature not yet current")  # a signature has its time
PATIENCE_SECONDS = 300.0  # without an answer, until watching a job fails
AGAIN_SECONDS = 5.0
RETRY_SECONDS = 60.0  # until a job that a quota refused is sent again


def aws_session(settings: Settings) -> Any:
    """The boto3 session of the settings, and of their copies. In a dry run it makes no client."""
    import boto3
    from botocore.exceptions import BotoCoreError

    key = settings.profile, settings.aws_region, settings.offline
    if key in settings._sessions:
        return settings._sessions[key]
    try:
        session = settings._sessions[key] = boto3.Session(
            profile_name=settings.profile or None, region_name=settings.aws_region or None
        )
    except BotoCoreError as error:
        raise InputError(str(error), "other-profile") from None
    if settings.offline:
        session.client = session.get_credentials = not_asked
    return session


def not_asked(*_: object, **__: object) -> NoReturn:
    raise NotAsked("a dry run does not ask AWS")


def make_client(session: Any, service: str, region: str, attempts: int | None = None) -> Any:
    """A client that retries, since a command may watch a job for hours, and whose calls raise as
    service_errors.

    With a number of attempts, it is one for optional calls, which fails within seconds.
    """
    from botocore.config import Config

    retries: dict[str, Any] = {"mode": "standard"}
    if attempts or "AWS_MAX_ATTEMPTS" not in os.environ:
        retries["total_max_attempts"] = attempts or 6
    timeouts = {"connect_timeout": 2, "read_timeout": 3} if attempts else {}
    config = Config(retries=retries, **timeouts)
    with service_errors(service):
        client = session.client(service, region_name=region, config=config)
    call = client._make_api_call  # where botocore's methods, pages and waiters all arrive

    def reported(operation: str, values: Mapping[str, Any]) -> Any:
        with service_errors(operation):
            return call(operation, values)

    client._make_api_call = reported
    return client


def check_region(session: Any) -> str:
    region = str(session.region_name or "")
    if not region:
        raise InputError("no region is set", "no-region")
    known = [
        name
        for partition in session.get_available_partitions()
        for name in session.get_available_regions("sagemaker", partition)
    ]
    if region not in known:
        hint = did_you_mean(region, known) or f"there are {', '.join(known)}"
        raise InputError(f"region {region}: boto3 knows no SageMaker there; {hint}")
    return region


def check_bucket(client: Any, uri: str, field: str, region: str) -> None:
    """Raise InputError if a place on S3 is in another region than the job.

    Each answer of S3 about a bucket names the region, also one that refuses, so this needs no
    permission.
    """
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    prefix = f"{prefix.rstrip('/')}/" if prefix else ""
    try:
        answer = client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
    except ServiceError as error:
        if not (answer := getattr(error.__context__, "response", None)):
            raise
    there = answer["ResponseMetadata"].get("HTTPHeaders", {}).get("x-amz-bucket-region", region)
    if there != region:
        problem = f"is in {there}, and SageMaker in {region} cannot use it"
        raise InputError(problem, "other-region", field, uri, there=there, here=region)


class Missing(ServiceError):
    """The thing that was asked for does not exist."""


class NotAsked(ServiceError):
    """A dry run does not ask AWS."""


class Unreachable(ServiceError):
    """No answer came from AWS, or AWS is throttling or failing."""


class OverQuota(ServiceError):
    """A quota of the account allows no more for now."""


class Denied(ServiceError):
    """The caller lacks the permission."""


def failure(what: str, error: BaseException) -> ServiceError:
    """Turn an exception of boto3 or s3fs, raised in `what`, into an error of one line."""
    from botocore import exceptions

    code, answer = kind_of(error), getattr(cause_of(error), "response", None) or {}
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    lost = isinstance(error, (exceptions.ConnectionError, exceptions.HTTPClientError))
    kinds = {"aws-quota": OverQuota, "aws-denied": Denied, "aws-throttled": Unreachable}
    kind = Unreachable if lost or status == 429 or status >= 500 else kinds.get(code, ServiceError)
    return kind(f"{what}: {why(error)}", code)


def patiently(ask: Callable[[], T], *, job_id: str, code: str, deadline: float = math.inf) -> T:
    """Call `ask` about a job or a sweep that is watched, and retry through an outage of minutes.

    code says how it is watched again; "": the caller does. deadline is in time.monotonic() seconds.
    """
    until = math.inf
    while True:
        try:
            return ask()
        except ServiceError as error:
            now, lost = time.monotonic(), isinstance(error, Unreachable)
            if lost and until == math.inf:
                until = min(deadline, now + PATIENCE_SECONDS)
                goes_on = "retrying (a running job continues meanwhile)"
                logger.info(f"{error}; {goes_on}", extra={"cause": error})
            if not lost or now >= until:  # credentials have expired, for one
                problem = f"{error}; a running job continues and is billed"
                raise ServiceError(problem, code, job_id=job_id) from error
        time.sleep(min(AGAIN_SECONDS, max(0.0, until - time.monotonic())))


class QuotaWait:
    """How long a job waits for a quota of the account: while jobs of ours run, and some minutes
    longer, since SageMaker may count a job for a while after its end."""

    def __init__(self) -> None:
        self.retry_at = 0.0  # in time.monotonic() seconds, as is freed_at
        self.freed_at = -math.inf
        self.waits = False

    @property
    def may_send(self) -> bool:
        return time.monotonic() >= self.retry_at

    def note_end(self) -> None:
        """A job of ours has ended."""
        self.retry_at, self.freed_at = 0.0, time.monotonic()

    def note_sent(self) -> None:
        self.waits = False

    def note_refusal(self, quota: OverQuota, others_run: bool) -> bool:
        """Wait for another minute; True for the first one. Raises the refusal if no job runs that
        could make room."""
        now = time.monotonic()
        if not others_run and now > self.freed_at + PATIENCE_SECONDS:
            raise quota
        is_first, self.waits = not self.waits, True
        self.retry_at = now + RETRY_SECONDS
        return is_first

    def sleep(self) -> None:
        time.sleep(max(0.0, self.retry_at - time.monotonic()))


@contextmanager
def service_errors(call: str) -> Iterator[None]:
    """Turn botocore's exceptions in `call` into a ServiceError of one line: Missing if AWS says
    that the thing does not exist, Unreachable if AWS did not answer."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except (BotoCoreError, ClientError, ResponseParserError) as error:
        code, message = code_and_message(error)
        missing = is_missing(code, message)
        raise Missing(f"{call}: {message}") if missing else failure(call, error) from None


def is_missing(code: str, message: str) -> bool:
    """Whether an error says that a thing does not exist. SageMaker and CloudFormation have no code
    for that."""
    return (
        re.fullmatch("404|NoSuchBucket|NoSuchEntity|ResourceNotFound(Exception)?", code) is not None
        or (code, message[:28]) == ("ValidationException", "Requested resource not found")
        or (code == "ValidationError" and message.endswith("does not exist"))
    )


def cause_of(error: BaseException) -> BaseException:
    """The exception of boto3 behind one of s3fs."""
    return error if getattr(error, "response", None) else error.__cause__ or error


def code_and_message(error: BaseException) -> tuple[str, str]:
    details = (getattr(error, "response", None) or {}).get("Error", {})
    return str(details.get("Code", "")), " ".join(str(details.get("Message", "")).split())


def kind_of(error: BaseException) -> str:
    """What an exception of boto3 or s3fs is, as one of CODES, or ''."""
    code, message = code_and_message(cause_of(error))
    if any(sign in message for sign in CLOCK_MESSAGES):
        return "aws-clock"
    name = code or type(cause_of(error)).__name__
    return next((kind for sign, kind in CODES.items() if re.search(sign, name)), "")


def why(error: BaseException) -> str:
    """The message of an exception of boto3 or s3fs, in one line."""
    cause = cause_of(error)
    code, message = code_and_message(cause)
    text = message or " ".join(str(cause).split()) or type(cause).__name__
    return f"{text} ({code})" if code and code not in text else text
