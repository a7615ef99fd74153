"""One AWS session for everything, and AWS's refusals in one line with the action to take."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from launcher.errors import InputError, ServiceError, did_you_mean

if TYPE_CHECKING:
    from launcher.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOGIN = "`aws login`, `aws sso login` or `aws configure`"
RENEW = f"renew them: {LOGIN}"

THROTTLED = (
    "RequestLimitExceeded",
    "SlowDown",
    "ThrottledException",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
)

# What to do about an error code of AWS, S3's among them.
ACTIONS: dict[str, str] = {
    **dict.fromkeys(
        (
            "ExpiredToken",
            "ExpiredTokenException",
            "RequestExpired",
            "TokenRefreshRequired",
            "UnauthorizedException",
        ),
        f"the AWS credentials have expired; {RENEW}",
    ),
    **dict.fromkeys(
        (
            "InvalidAccessKeyId",
            "InvalidClientTokenId",
            "InvalidSignatureException",
            "InvalidToken",
            "SignatureDoesNotMatch",
            "UnrecognizedClientException",
        ),
        "AWS does not accept the credentials; check AWS_PROFILE or the keys",
    ),
    # S3 answers HEAD with a number alone.
    "400": f"AWS does not accept the request; if the credentials have expired, {RENEW}",
    "403": "not allowed, or the credentials are wrong; check AWS_PROFILE and the keys, ask for the"
    " permission, or use another store",
    **dict.fromkeys(
        (
            "AccessDenied",
            "AccessDeniedException",
            "AllAccessDisabled",
            "NotAuthorized",
            "UnauthorizedOperation",
        ),
        "not allowed; ask for the permission, or use another AWS_PROFILE",
    ),
    **dict.fromkeys(THROTTLED, "AWS is throttling; wait a minute and try again"),
    **dict.fromkeys(
        (
            "301",
            "AuthorizationHeaderMalformed",
            "IllegalLocationConstraintException",
            "PermanentRedirect",
        ),
        "it is in another region; name that with --region",
    ),
    "ResourceLimitExceeded": "the account's quota is too small; ask for more in the Service Quotas"
    " console (SageMaker, 'for training job usage'), or take another --instance",
    "NoSuchBucket": "there is no such bucket; none is created, so check the store's name",
}
# A signature tells the time at which it was made.
CLOCK = "the clock here is wrong, so AWS does not take what is signed by it; set it right"
CLOCK_MESSAGES = ("Signature expired", "Signature not yet current")
# What it raises to read an answer that is null, too deep, badly dated, or lacks something.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
NOT_AWS = "the answer is not in AWS's words; check the network (is a proxy in between?)"
CAPACITY = (
    "AWS has no such machine free now; try later, or name several types: --instance TYPE,TYPE,..."
)
PATIENCE_SECONDS = 300.0  # without an answer, until a job is no longer watched
AGAIN_SECONDS = 5.0


def aws_session(settings: Settings) -> Any:
    """The boto3 session of the settings.

    Raises:
        InputError: the profile does not exist, or the AWS configuration cannot be read.
    """
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        return boto3.Session(
            profile_name=settings.profile or None, region_name=settings.aws_region or None
        )
    except BotoCoreError as error:
        raise InputError(f"{error}; `aws configure list-profiles` shows the profiles") from None


def steady_client(session: Any, service: str, region: str) -> Any:
    """A client that tries again: a job is watched for hours, and one lost packet is no failure."""
    from botocore.config import Config

    retries = {"mode": "standard", "total_max_attempts": max_attempts()}
    with service_errors(service):
        return session.client(service, region_name=region, config=Config(retries=retries))


def max_attempts() -> int:
    """How often a call is tried.

    Raises InputError if AWS_MAX_ATTEMPTS is none; botocore's own error would not name it.
    """
    word = os.environ.get("AWS_MAX_ATTEMPTS", "6")
    if not word.isdecimal() or int(word) < 1:
        raise InputError(f"AWS_MAX_ATTEMPTS={word!r}: must be a number, at least 1; or unset it")
    return int(word)


def quick_client(session: Any, service: str, region: str, attempts: int = 1) -> Any:
    """A client for what a command can do without: it fails within seconds."""
    from botocore.config import Config

    config = Config(
        connect_timeout=3,
        read_timeout=3,
        retries={"mode": "standard", "total_max_attempts": attempts},
    )
    return session.client(service, region_name=region, config=config)


def check_region(session: Any) -> str:
    """The session's region.

    Raises:
        InputError: none is said, or SageMaker is not in it as far as boto3 knows.
    """
    region = str(session.region_name or "")
    if not region:
        raise InputError("no region: name it with --region, SM_NANOGPT_REGION or AWS_REGION")
    known = [
        name
        for partition in session.get_available_partitions()
        for name in session.get_available_regions("sagemaker", partition)
    ]
    if region not in known:
        hint = did_you_mean(region, known) or f"there are {', '.join(known)}"
        raise InputError(f"region {region}: SageMaker is not there, as boto3 knows it; {hint}")
    return region


class Missing(ServiceError):
    """What was asked for does not exist."""


class Unreachable(ServiceError):
    """No answer came, or none to the question: AWS is busy or broken, or a proxy answered."""


def failure(what: str, error: BaseException) -> ServiceError:
    """The error of one line for what boto3 or s3fs raised in `what`."""
    return (Unreachable if is_outage(error) else ServiceError)(f"{what}: {why(error)}")


def is_outage(error: BaseException) -> bool:
    """Whether what boto3 or s3fs raised may be otherwise in a minute, and says nothing of the job.

    Exceptions are told by names, as importing botocore would cost local commands a quarter of a
    second.
    """
    names = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
    lost = {"botocore.exceptions.ConnectionError", "botocore.exceptions.HTTPClientError"}
    answer = getattr(cause_of(error), "response", None) or {}
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    throttled = status == 429 or code_and_message(cause_of(error))[0] in THROTTLED
    return bool(names & lost) or is_foreign(error) or throttled or status >= 500


def is_foreign(error: BaseException) -> bool:
    """Whether an answer is not AWS's, but a proxy's own page.

    boto3 takes what it cannot read for an error whose code is the HTTP status; of AWS's own
    answers only those to a HEAD, which have no words, look so. A page with status 200 lacks what
    AWS always says, or holds it in another shape.
    """
    cause, module = cause_of(error), type(cause_of(error)).__module__
    if isinstance(cause, UNREADABLE) and module != "botocore.exceptions":
        return True
    if type(cause).__name__ == "ResponseParserError":
        return True
    is_head = getattr(cause, "operation_name", "").startswith("Head")
    return code_and_message(cause)[0].isdigit() and not is_head


def patiently(ask: Callable[[], T], follow: str, deadline: float = math.inf) -> T:
    """What `ask` answers about a job on SageMaker that is watched: an outage of minutes ends no
    watching. follow is the command that watches it again.

    Raises:
        ServiceError: AWS refuses, or no answer came for PATIENCE_SECONDS, or until the deadline, by
            time.monotonic.
    """
    goes_on = f"if the job still runs, it goes on and is billed: `{follow}` follows it"
    until = None
    while True:
        try:
            return ask()
        except Unreachable as error:
            if until is None:
                until = min(deadline, time.monotonic() + PATIENCE_SECONDS)
                logger.info(f"{error}; a job that runs goes on meanwhile, and it is tried again")
            if time.monotonic() >= until:
                raise ServiceError(f"{error}; {goes_on}") from None
        except ServiceError as error:  # credentials have expired, for one
            raise ServiceError(f"{error}; {goes_on}") from None
        time.sleep(min(AGAIN_SECONDS, max(0.0, until - time.monotonic())))


@contextmanager
def service_errors(call: str) -> Iterator[None]:
    """Turns what boto3 raises in `call` into a ServiceError of one line that says what to do.

    One of UNREADABLE is an answer that is not of AWS's shape, as a proxy gives it.

    Raises:
        Missing: AWS says that the thing does not exist.
        Unreachable: AWS says nothing of the matter.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as error:
        code, message = code_and_message(error)
        if is_missing(code, message) and not is_foreign(error):
            raise Missing(f"{call}: {message}") from None
        raise failure(call, error) from None
    except (BotoCoreError, ResponseParserError, *UNREADABLE) as error:
        raise failure(call, error) from None


def is_missing(code: str, message: str) -> bool:
    """Whether an error says that a thing does not exist; SageMaker and CloudFormation have no code
    of their own for it."""
    return (
        code in ("404", "NoSuchBucket", "ResourceNotFound", "ResourceNotFoundException")
        or (code, message[:28]) == ("ValidationException", "Requested resource not found")
        or (code == "ValidationError" and message.endswith("does not exist"))
    )


def cause_of(error: BaseException) -> BaseException:
    """What boto3 raised; s3fs has errors of its own in front of it."""
    return error if getattr(error, "response", None) else error.__cause__ or error


def code_and_message(error: BaseException) -> tuple[str, str]:
    said = (getattr(error, "response", None) or {}).get("Error", {})  # None: it never came
    return str(said.get("Code", "")), " ".join(str(said.get("Message", "")).split())


def why(error: BaseException) -> str:
    """What an error of boto3 or s3fs says, and what to do about it, in one line."""
    if is_foreign(error):  # whose texts are a whole page or a bare name
        return NOT_AWS
    cause = cause_of(error)
    code, message = code_and_message(cause)
    if code:
        action = CAPACITY if "Capacity" in code else ACTIONS.get(code)
        if code == "RequestTimeTooSkewed" or any(sign in message for sign in CLOCK_MESSAGES):
            action = CLOCK
        return f"{action} ({message})" if action else f"{message} ({code})"
    kind, text = type(cause).__name__, " ".join(str(cause).split()) or type(cause).__name__
    if kind in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        return f"no AWS credentials ({text}): {LOGIN} makes some"
    if kind == "MissingDependencyException":  # the credentials of `aws login` need awscrt
        return f"the package awscrt is missing: install sm-nanogpt again ({text})"
    if kind == "LoginInsufficientPermissions":
        return text
    if "SSO" in kind or kind == "TokenRetrievalError" or kind.startswith("Login"):
        return f"the AWS credentials have expired ({text}); {RENEW}"
    if kind in ("EndpointConnectionError", "ConnectTimeoutError", "ClientConnectorError"):
        return f"{text}; check the region's name and the network"
    return text
