"""One AWS session for everything, and AWS's refusals in one line with the action to take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from launcher.errors import InputError, ServiceError

if TYPE_CHECKING:
    from launcher.settings import Settings

EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "UnauthorizedSSOTokenError")
DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "NotAuthorized")
WRONG_KEY = ("InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch")
THROTTLED = (
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequestsException",
)


def aws_session(settings: Settings) -> Any:
    """The boto3 session of the settings.

    Raises:
        InputError: the profile does not exist.
    """
    import boto3
    from botocore.exceptions import ProfileNotFound

    try:
        return boto3.Session(
            profile_name=settings.profile or None, region_name=settings.region or None
        )
    except ProfileNotFound as error:
        raise InputError(f"{error}: see `aws configure list-profiles`") from None


class Missing(ServiceError):
    """What was asked for does not exist."""


@contextmanager
def service_errors(call: str) -> Iterator[None]:
    """Turns what boto3 raises in `call` into a ServiceError of one line that says what to do.

    Raises:
        Missing: AWS says that the thing does not exist.
    """
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        EndpointConnectionError,
        NoCredentialsError,
        NoRegionError,
        PartialCredentialsError,
    )

    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        message = " ".join(error.response.get("Error", {}).get("Message", "").split())
        if re.search(r"not found|does not exist|NoSuch", f"{code} {message}", re.IGNORECASE):
            raise Missing(f"{call}: {message}") from None
        raise ServiceError(f"{call}: {explain_code(code, message)}") from None
    except (NoCredentialsError, PartialCredentialsError):
        raise ServiceError(
            f"{call}: no AWS credentials: `aws configure` or `aws sso login` makes some"
        ) from None
    except NoRegionError:
        raise InputError(
            "no region: name it with --region, SM_NANOGPT_REGION or AWS_REGION"
        ) from None
    except EndpointConnectionError as error:
        raise ServiceError(f"{call}: {error} Check the region's name and the network") from None
    except BotoCoreError as error:
        text = " ".join(str(error).split())
        if type(error).__name__ in EXPIRED or "SSO" in text:
            raise ServiceError(f"{call}: {text}; run `aws sso login`") from None
        raise ServiceError(f"{call}: {text}") from None


def explain_code(code: str, message: str) -> str:
    """AWS's message, and what to do about it."""
    if code in EXPIRED:
        return f"the AWS credentials have expired ({message}); renew them: `aws sso login`"
    if code in WRONG_KEY:
        return f"AWS does not accept the credentials ({message}); check AWS_PROFILE or the keys"
    if code in DENIED:
        return f"not allowed: {message}"
    if code in THROTTLED:
        return f"AWS is throttling ({message}); wait a minute and try again"
    if code == "ResourceLimitExceeded":
        return (
            f"the account's quota is too small: {message} Ask for more in the Service Quotas"
            " console (SageMaker, 'for training job usage'), or take another --instance"
        )
    if "Capacity" in code:
        return f"AWS has no such machine free now: {message} Try later, or another --instance"
    return f"{message} ({code})"
