"""Find the deployed CloudFormation stack, which provides store and execution role.

HOME/stacks.json remembers each stack for a dry run, which does not call AWS.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_nanogpt.launcher import aws
from sm_nanogpt.launcher.aws import Denied, Missing, Offline, aws_session
from sm_nanogpt.launcher.errors import InputError, LauncherError, ServiceError
from sm_nanogpt.launcher.files.cache import Cache
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)

DESCRIPTION_BEGINNING = (
    "Where sm-nanogpt keeps texts and models"  # of the template; marks our stacks
)
REVIEW_STATUS = "REVIEW_IN_PROGRESS"  # only change sets; there is no stack yet
# In this file, SageMaker describes a notebook instance or Studio space. The SDK also reads it.
NOTEBOOK_METADATA = Path("/opt/ml/metadata/resource-metadata.json")


@dataclass(frozen=True)
class Stack:
    """A deployed stack."""

    name: str
    status: str
    store: str
    role: str
    kms_key: str | None
    policy: str  # the ARN of the launcher policy
    vpc: bool = False  # the role may run jobs in a VPC


CACHE_FILE = "stacks.json"
CachedStacks = dict[str, Stack | None]  # by cache_key; None: there was none


def with_stack(
    settings: Settings, names: tuple[str, ...] = ("store", "role", "kms_key")
) -> Settings:
    """Return the settings with the store, role, and key of the stack, where they have none.

    AWS is not called if store and role are set, nor in a dry run, which uses the stack as it was
    last seen. If a role is set, and no stack was seen before, a user without the permission to ask
    for the stack goes on without it.
    """
    if settings.store and (settings.role or "role" not in names):
        return settings
    session = aws_session(settings)
    last_seen = last_seen_stack(settings, session.region_name)
    note = ""
    try:
        stack = find_stack(settings, session)
    except Offline:
        stack = last_seen
        note = ", as last seen"
    except Denied as error:
        if last_seen or not settings.role or "role" not in names:
            raise
        logger.info(f"not using a stack: {error}")
        return settings
    if stack is None:
        return settings
    if settings.store and not f"{settings.store}/".startswith(f"{stack.store}/"):
        logger.info(f"not using the role of stack {stack.name}: it can access only {stack.store}")
        return settings
    update = {}
    for name in names:
        value = getattr(stack, name)
        if value and not getattr(settings, name):
            update[name] = value
            logger.info(f"{name.replace('_', ' ')}: {value} (stack {stack.name}{note})")
    return settings.model_copy(update=update)


def find_stack(settings: Settings, session: Any) -> Stack | None:
    """Ask for the stack of the settings; return None if it does not exist, and nobody named it.

    Raises Missing if the user named a stack that does not exist, and the errors of read_stack.
    """
    region = aws.check_region(session)
    client = aws.make_client(session, "cloudformation", region, attempts=3)
    raw = describe_stack(client, settings.stack)
    if raw is not None or settings.names_stack:
        return cache_stack(settings, region, raw)
    remember_stack(settings, region, None)
    return None


def cache_stack(settings: Settings, region: str, raw: dict[str, Any] | None) -> Stack:
    """Read and remember an answer of describe_stack. Raises Missing if it is None."""
    stack = None if raw is None else read_stack(raw)
    remember_stack(settings, region, stack)
    if stack is None:
        raise Missing(f"there is no stack {settings.stack} in {region}", code="deploy-stack")
    return stack


def describe_stack(client: Any, name: str) -> dict[str, Any] | None:
    """The answer of DescribeStacks for a name or id; None if there is no stack."""
    try:
        raw = dict(client.describe_stacks(StackName=name)["Stacks"][0])
    except Missing:
        return None
    return None if raw["StackStatus"] == REVIEW_STATUS else raw


def read_stack(raw: dict[str, Any]) -> Stack:
    """Read an answer of describe_stack.

    Raises unusable_stack_error for a stack that is not ours, not complete, or being deleted.
    """
    status = raw["StackStatus"]
    outputs = outputs_of(raw)
    is_complete = {"Store", "RoleArn", "LauncherPolicyArn"} <= outputs.keys()
    if not is_our_stack(raw) or status.startswith("DELETE") or not is_complete:
        raise unusable_stack_error(raw)
    return Stack(
        name=raw["StackName"],
        status=status,
        store=outputs["Store"],
        role=outputs["RoleArn"],
        kms_key=outputs.get("KmsKeyArn"),
        policy=outputs["LauncherPolicyArn"],
        vpc=parameters_of(raw).get("Vpc") == "true",
    )


def parameters_of(raw: dict[str, Any]) -> dict[str, str]:
    parameters = raw.get("Parameters", [])
    return {parameter["ParameterKey"]: parameter["ParameterValue"] for parameter in parameters}


def outputs_of(raw: dict[str, Any]) -> dict[str, str]:
    return {output["OutputKey"]: output["OutputValue"] for output in raw.get("Outputs", [])}


def is_our_stack(raw: dict[str, Any]) -> bool:
    """True if a stack has the description of the template.

    A stack has its description from the start, and its outputs only at the end.
    """
    return str(raw.get("Description", "")).startswith(DESCRIPTION_BEGINNING)


def has_succeeded(status: str) -> bool:
    """True if the last operation of a stack has succeeded."""
    return status.endswith("_COMPLETE") and "ROLLBACK" not in status


def unusable_stack_error(raw: dict[str, Any]) -> LauncherError:
    """The error for a stack that cannot be used or changed now."""
    stack = f"stack {raw['StackName']} is {raw['StackStatus']}"
    if not is_our_stack(raw):
        return InputError(f"{stack} and does not belong to sm-nanogpt", code="name-other-stack")
    if raw["StackStatus"].endswith("_IN_PROGRESS"):
        return ServiceError(f"{stack}; try again when that has ended")
    if raw["StackStatus"] == "UPDATE_ROLLBACK_FAILED":
        command = f"aws cloudformation continue-update-rollback --stack-name {raw['StackName']}"
        return ServiceError(f"{stack}; first run `{command}`")
    return ServiceError(f"{stack}, and cannot be used", code="deploy-stack-again")


def stack_cache(settings: Settings) -> Cache[CachedStacks]:
    return Cache(settings.home / CACHE_FILE, CachedStacks)


def remember_stack(settings: Settings, region: str, stack: Stack | None) -> None:
    """Record the stack of the settings, or that there is none."""
    cache = stack_cache(settings)
    stacks = cache.read()
    stacks[cache_key(settings, region)] = stack
    cache.write(stacks)


def last_seen_stack(settings: Settings, region: str | None) -> Stack | None:
    """The stack as it was last seen from this machine."""
    return stack_cache(settings).read().get(cache_key(settings, region))


def cache_key(settings: Settings, region: str | None) -> str:
    """The region, profile and name of a stack, since profiles may have different accounts."""
    return "/".join((region or "", settings.aws_profile, settings.stack))


def notebook_role(client: Callable[[str], Any]) -> str:
    """The execution role of the SageMaker notebook or Studio space in which this runs, or ''.

    Elsewhere the caller may have a role, too, as after `aws sso login`; SageMaker cannot use it.
    """
    try:
        metadata = json.loads(NOTEBOOK_METADATA.read_bytes())
    except (OSError, ValueError):
        return ""
    role = metadata.get("ExecutionRoleArn") or ""
    if not role and "DomainId" not in metadata:  # it is no Studio space, which has no such call
        with suppress(Offline):
            name = metadata["ResourceName"]
            answer = client("sagemaker").describe_notebook_instance(NotebookInstanceName=name)
            role = answer["RoleArn"]
    return str(role)
