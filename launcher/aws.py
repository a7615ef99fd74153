"""AWS sessions and clients, and errors of AWS as one line that says what to do."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from launcher.errors import InputError, ServiceError, did_you_mean

if TYPE_CHECKING:
    from launcher.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOGIN = "`aws login`, `aws sso login` or `aws configure`"

CAPACITY = "AWS has no capacity now; try later, or name several types with --instance TYPE,TYPE,..."
EXPIRED = f"the AWS credentials have expired; renew them with {LOGIN}"
REJECTED = "AWS rejects the credentials; check AWS_PROFILE or the keys"
DENIED = "not allowed; ask for the permission, or use another AWS_PROFILE"
THROTTLED = "AWS is throttling; wait a minute and try again"
REGION = "it is in another region; set --region"
NETWORK = "check the region's name and the network"
# A signature contains its time.
CLOCK = "the clock of this machine is wrong, so AWS rejects its signatures; correct it"
CLOCK_MESSAGES = ("Signature expired", "Signature not yet current")
QUOTA = "request an increase in the Service Quotas console, or use another --instance"
# What to do, by a part of AWS's error code or of the exception's name; the first that fits.
REMEDIES = {
    "LoginInsufficientPermissions": "",
    "Expired|TokenRefresh|TokenRetrieval|SSO|UnauthorizedException|Login": EXPIRED,
    "Credential": f"no AWS credentials: run {LOGIN}",
    "MissingDependency": "the package awscrt is missing: install sm-nanogpt again",  # `aws login`
    "TooSkewed": CLOCK,
    "Signature|InvalidAccessKey|InvalidClientToken|InvalidToken|UnrecognizedClient": REJECTED,
    "Denied|AllAccessDisabled|NotAuthorized|Unauthorized": DENIED,
    # S3 answers HEAD with only a number.
    "400": f"AWS rejects the request; if the credentials have expired, renew them with {LOGIN}",
    "403": "not allowed, or the credentials are wrong; check AWS_PROFILE and the keys, ask for the"
    " permission, or use another store",
    "301|Redirect|AuthorizationHeaderMalformed|IllegalLocationConstraint": REGION,
    "RequestLimitExceeded|SlowDown|Throttl|TooManyRequests": THROTTLED,
    "Capacity": CAPACITY,
    "ResourceLimitExceeded": QUOTA,
    "NoSuchBucket": "there is no such bucket; check the name of the store",
    "EndpointConnection|ConnectTimeout|ClientConnector": NETWORK,
}
PATIENCE_SECONDS = 300.0  # without an answer, until watching a job fails
AGAIN_SECONDS = 5.0


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
        raise InputError(f"{error}; `aws configure list-profiles` shows the profiles") from None
    if settings.offline:
        session.client = session.get_credentials = not_asked
    return session


def not_asked(*_: object, **__: object) -> NoReturn:
    raise NotAsked("a dry run does not ask AWS")


def make_client(session: Any, service: str, region: str, attempts: int | None = None) -> Any:
    """A client that retries, since a command may watch a job for hours.

    With a number of attempts, it is one for optional calls, which fails within seconds.
    """
    from botocore.config import Config

    retries: dict[str, Any] = {"mode": "standard"}
    if attempts or "AWS_MAX_ATTEMPTS" not in os.environ:
        retries["total_max_attempts"] = attempts or 6
    timeouts = {"connect_timeout": 2, "read_timeout": 3} if attempts else {}
    with service_errors(service):
        return session.client(
            service, region_name=region, config=Config(retries=retries, **timeouts)
        )


def check_region(session: Any) -> str:
    """The session's region."""
    region = str(session.region_name or "")
    if not region:
        raise InputError("no region: set --region, SM_NANOGPT_REGION or AWS_REGION")
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
    from botocore.exceptions import ClientError

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    with service_errors("ListObjectsV2"):
        try:
            prefix = f"{prefix.rstrip('/')}/" if prefix else ""
            answer = client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
        except ClientError as error:
            answer = error.response
    there = answer["ResponseMetadata"].get("HTTPHeaders", {}).get("x-amz-bucket-region", region)
    if there != region:
        problem = f"is in {there}, and SageMaker in {region} cannot use it"
        raise InputError(problem, "other-region", field=field, value=uri, region=there)


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
    kind = {QUOTA: OverQuota, DENIED: Denied}.get(remedy_of(error), ServiceError)
    return (Unreachable if is_outage(error) else kind)(f"{what}: {why(error)}")


def is_outage(error: BaseException) -> bool:
    """Whether an exception of boto3 or s3fs is temporary.

    Compares names of classes, since importing botocore takes a quarter of a second.
    """
    names = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
    lost = {"botocore.exceptions.ConnectionError", "botocore.exceptions.HTTPClientError"}
    answer = getattr(cause_of(error), "response", None) or {}
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    throttled = status == 429 or remedy_of(error) == THROTTLED
    return bool(names & lost) or throttled or status >= 500


def patiently(ask: Callable[[], T], job_id: str, deadline: float = math.inf) -> T:
    """Call `ask` about a job that is watched, and retry through an outage of minutes.

    deadline is in time.monotonic() seconds.
    """
    until = math.inf
    while True:
        try:
            return ask()
        except ServiceError as error:
            now, lost = time.monotonic(), isinstance(error, Unreachable)
            if lost and until == math.inf:
                until = min(deadline, now + PATIENCE_SECONDS)
                logger.info(f"{error}; retrying (a running job continues meanwhile)")
            if not lost or now >= until:  # credentials have expired, for one
                problem = f"{error}; a running job continues and is billed"
                raise ServiceError(problem, "job-goes-on", job_id=job_id) from None
        time.sleep(min(AGAIN_SECONDS, max(0.0, until - time.monotonic())))


@contextmanager
def service_errors(call: str) -> Iterator[None]:
    """Turn botocore's exceptions in `call` into a ServiceError of one line that says what to do.

    Raises:
        Missing: AWS says that the thing does not exist.
        Unreachable: AWS did not answer.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as error:
        code, message = code_and_message(error)
        if is_missing(code, message):
            raise Missing(f"{call}: {message}") from None
        raise failure(call, error) from None
    except (BotoCoreError, ResponseParserError) as error:
        raise failure(call, error) from None


def is_missing(code: str, message: str) -> bool:
    """Whether an error says that a thing does not exist. SageMaker and CloudFormation have no code
    for that."""
    return (
        code in ("404", "NoSuchBucket", "NoSuchEntity", "ResourceNotFound")
        or code == "ResourceNotFoundException"
        or (code, message[:28]) == ("ValidationException", "Requested resource not found")
        or (code == "ValidationError" and message.endswith("does not exist"))
    )


def cause_of(error: BaseException) -> BaseException:
    """The exception of boto3 behind one of s3fs."""
    return error if getattr(error, "response", None) else error.__cause__ or error


def code_and_message(error: BaseException) -> tuple[str, str]:
    details = (getattr(error, "response", None) or {}).get("Error", {})
    return str(details.get("Code", "")), " ".join(str(details.get("Message", "")).split())


def remedy_of(error: BaseException) -> str:
    """What to do about an exception of boto3 or s3fs, or ''."""
    code, message = code_and_message(cause_of(error))
    if any(sign in message for sign in CLOCK_MESSAGES):
        return CLOCK
    name = code or type(cause_of(error)).__name__
    return next((remedy for sign, remedy in REMEDIES.items() if re.search(sign, name)), "")


def why(error: BaseException) -> str:
    """The message of an exception of boto3 or s3fs, and what to do, in one line."""
    cause, remedy = cause_of(error), remedy_of(error)
    code, message = code_and_message(cause)
    text = message or " ".join(str(cause).split()) or type(cause).__name__
    if remedy == QUOTA and (found := re.search(r"'[^']+' is \d+", text)):
        return f"the account's quota {found[0]}: {remedy} ({text})"
    if remedy == NETWORK:
        return f"{text}; {remedy}"
    return f"{remedy} ({text})" if remedy else f"{text} ({code})" if code else text
