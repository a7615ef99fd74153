"""Deploy and destroy the stack of infra/template.yaml."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import WaiterError

from sm_nanogpt.launcher.aws import Missing
from sm_nanogpt.launcher.description import RUNNING
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.sagemaker import stack as stacks
from sm_nanogpt.launcher.sagemaker.account import Account
from sm_nanogpt.launcher.sagemaker.stack import Stack
from sm_nanogpt.launcher.settings import Settings

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).parents[2] / "infra" / "template.yaml"
WAIT = {"Delay": 2, "MaxAttempts": 1800}  # every 2 seconds, for an hour
# Statuses of a stack that cannot be changed, only deleted.
LEFT_OVER = ("CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED")


@dataclass(frozen=True)
class Change:
    """A change of a resource of a stack."""

    action: str  # add, modify, remove, replace, or `modify or replace`
    resource_type: str
    logical_id: str


@dataclass(frozen=True)
class ChangeSet:
    """Changes that can be executed."""

    id: str
    stack_id: str
    creates: bool  # True if there is no stack yet
    changes: list[Change]


@dataclass(frozen=True)
class Removal:
    """What stays if a stack is deleted, and who loses a policy or a running job."""

    stack_id: str
    status: str
    bucket: str | None  # the name of the bucket, which is kept
    key: str | None  # the ARN of the key, which is kept
    policy: str | None  # the ARN of the launcher policy
    holders: list[tuple[str, str]]  # of the policy, as (User, Group or Role; name)
    jobs: list[str]  # ids of the running jobs that have the role of the stack


class Deployment:
    """The stack that the settings name, to create, update and delete."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.name = settings.stack
        self.account = Account(settings)
        self.region = self.account.region
        self.client = self.account.client("cloudformation")
        self.iam = self.account.client("iam")

    def plan(
        self,
        kms: bool = False,
        vpc: bool = False,
        permissions_boundary: str | None = None,
        role_path: str | None = None,
    ) -> ChangeSet | None:
        """Create a change set; return None if nothing would change.

        kms adds a key, and vpc allows jobs in a VPC. permissions_boundary, an ARN, and role_path
        are for the role. What a plan leaves out stays as it was. A stack in a status of LEFT_OVER
        has to be deleted first.
        """
        raw = self.describe_changeable()
        if raw is not None and raw["StackStatus"] == "UPDATE_ROLLBACK_FAILED":
            raise stacks.unusable_stack_error(raw)
        response = self.client.create_change_set(
            StackName=self.name,
            ChangeSetName=f"sm-nanogpt-{time.strftime('%Y%m%d-%H%M%S')}",
            ChangeSetType="CREATE" if raw is None else "UPDATE",
            TemplateBody=TEMPLATE.read_text(),
            Parameters=parameters_for(
                raw,
                {
                    "Kms": "true" if kms else None,
                    "Vpc": "true" if vpc else None,
                    "PermissionsBoundary": permissions_boundary,
                    "RolePath": role_path,
                },
            ),
            Capabilities=["CAPABILITY_IAM"],
        )
        changes = self.wait_for_changes(response["Id"])
        change_set = ChangeSet(response["Id"], response["StackId"], raw is None, changes or [])
        if changes is None:
            self.discard(change_set)
            return None
        return change_set

    def describe_changeable(self) -> dict[str, Any] | None:
        """Return the answer of DescribeStacks; None if there is no stack.

        Raises `unusable_stack_error` for a stack that is not ours, or in an operation.
        """
        raw = stacks.describe_stack(self.client, self.name)
        if raw is not None:
            is_busy = raw["StackStatus"].endswith("_IN_PROGRESS")
            if is_busy or not stacks.is_our_stack(raw):
                raise stacks.unusable_stack_error(raw)
        return raw

    def wait_for_changes(self, change_set_id: str) -> list[Change] | None:
        """Wait until CloudFormation has made a change set, and return its changes.

        None if nothing would change. Raises ServiceError for any other failure.
        """
        with suppress(WaiterError):  # the pages below have the reason
            waiter = self.client.get_waiter("change_set_create_complete")
            waiter.wait(ChangeSetName=change_set_id, WaiterConfig=WAIT)
        paginator = self.client.get_paginator("describe_change_set")
        pages = list(paginator.paginate(ChangeSetName=change_set_id))
        if pages[0]["Status"] == "CREATE_COMPLETE":
            changes: list[Change] = []
            for page in pages:
                changes += map(read_change, page["Changes"])
            return changes
        reason = pages[0].get("StatusReason", "")
        if "didn't contain changes" in reason or "No updates are to be performed" in reason:
            return None
        problem = reason or pages[0]["Status"]
        raise ServiceError(f"CloudFormation cannot change stack {self.name}: {problem}")

    def discard(self, change_set: ChangeSet) -> None:
        """Delete a change set, and its stack if that is still empty."""
        self.client.delete_change_set(ChangeSetName=change_set.id)
        if change_set.creates and stacks.describe_stack(self.client, change_set.stack_id) is None:
            self.client.delete_stack(StackName=change_set.stack_id)

    def execute(self, change_set: ChangeSet) -> Stack:
        """Make the changes, wait for their end, and return the stack."""
        # If the creation fails, also delete what the template retains: it is empty, and a key costs
        # money.
        self.client.execute_change_set(ChangeSetName=change_set.id, RetainExceptOnCreate=True)
        kind = "create" if change_set.creates else "update"
        self.wait(f"stack_{kind}_complete", change_set.stack_id)
        return self.show()

    def show(self) -> Stack:
        """Read the stack, and log the state of its last operation if that failed."""
        raw = stacks.describe_stack(self.client, self.name)
        if raw is not None and not stacks.has_succeeded(raw["StackStatus"]):
            logger.info(self.state(raw))
        return stacks.cache_stack(self.settings, self.region, raw)

    def removal(self, statuses: Collection[str] = ()) -> Removal | None:
        """Return what deleting the stack would do; None if there is no stack.

        statuses: if there are any, also None for a stack in another status.
        """
        raw = self.describe_changeable()
        if raw is None or (statuses and raw["StackStatus"] not in statuses):
            return None
        outputs = stacks.outputs_of(raw)  # a stack whose creation failed lacks some
        bucket = None
        if "Store" in outputs:
            bucket = outputs["Store"].split("/")[2]
        policy = outputs.get("LauncherPolicyArn")
        role = outputs.get("RoleArn")
        return Removal(
            stack_id=raw["StackId"],
            status=raw["StackStatus"],
            bucket=bucket,
            key=outputs.get("KmsKeyArn"),
            policy=policy,
            holders=self.holders(policy) if policy else [],
            jobs=self.running_jobs(role) if role else [],
        )

    def holders(self, policy: str) -> list[tuple[str, str]]:
        """The users, groups and roles that have a policy, as (kind, name)."""
        holders = []
        with suppress(Missing):
            paginator = self.iam.get_paginator("list_entities_for_policy")
            for page in paginator.paginate(PolicyArn=policy):
                for kind in ("User", "Group", "Role"):
                    for entity in page[f"Policy{kind}s"]:
                        holders.append((kind, entity[f"{kind}Name"]))
        return holders

    def running_jobs(self, role: str) -> list[str]:
        """The ids of the running jobs that have a role."""
        jobs = [raw for raw in self.account.search_raw() if raw.get("RoleArn") == role]
        return [raw["TrainingJobName"] for raw in jobs if raw["TrainingJobStatus"] in RUNNING]

    def destroy(self, removal: Removal) -> None:
        """Delete the stack, and wait for that. Retained resources stay.

        IAM does not delete an attached policy, so it is detached first.
        """
        for kind, name in removal.holders:
            detach_policy = getattr(self.iam, f"detach_{kind.lower()}_policy")
            detach_policy(PolicyArn=removal.policy, **{f"{kind}Name": name})
            logger.info(f"detached the launcher policy from {kind.lower()} {name}")
        self.client.delete_stack(StackName=removal.stack_id)
        self.wait("stack_delete_complete", removal.stack_id)
        stacks.remember_stack(self.settings, self.region, None)

    def wait(self, waiter_name: str, stack_id: str) -> None:
        """Wait for an operation, by a waiter of boto3. Raises ServiceError if it failed."""
        logger.info(f"waiting for stack {self.name}; CloudFormation takes a minute or two")
        try:
            with suppress(WaiterError, Missing):
                self.client.get_waiter(waiter_name).wait(StackName=stack_id, WaiterConfig=WAIT)
            raw = stacks.describe_stack(self.client, stack_id)
        except (KeyboardInterrupt, ServiceError):
            logger.info("CloudFormation continues by itself", extra={"code": "show-stack"})
            raise
        if raw is not None and not stacks.has_succeeded(raw["StackStatus"]):
            raise ServiceError(f"{self.state(raw)}; correct that and try again")

    def state(self, raw: dict[str, Any]) -> str:
        """Describe the status of a stack, with the first failure of its last operation, if any."""
        failure = ""
        with suppress(ServiceError):
            for event in self.events(raw["StackId"]):
                reason = event.get("ResourceStatusReason", "")
                if reason == "User Initiated":  # older events are of another operation
                    break
                if event["ResourceStatus"].endswith("_FAILED") and "cancelled" not in reason:
                    failure = f": {event['LogicalResourceId']}: {' '.join(reason.split())}"
        return f"stack {self.name} is {raw['StackStatus']}{failure}"

    def events(self, stack_id: str) -> Iterator[dict[str, Any]]:
        """Yield the events of a stack, the newest first."""
        paginator = self.client.get_paginator("describe_stack_events")
        for page in paginator.paginate(StackName=stack_id):
            yield from page["StackEvents"]


def parameters_for(
    raw: dict[str, Any] | None, values: Mapping[str, str | None]
) -> list[dict[str, Any]]:
    """The parameters of a change set. A value of None keeps that of the stack of an answer."""
    deployed = {} if raw is None else stacks.parameters_of(raw)  # an older stack lacks some
    parameters: list[dict[str, Any]] = []
    for name, value in values.items():
        if value:
            parameters.append({"ParameterKey": name, "ParameterValue": value})
        elif name in deployed:
            parameters.append({"ParameterKey": name, "UsePreviousValue": True})
    return parameters


def read_change(raw: dict[str, Any]) -> Change:
    """Read a change of a change set from the answer of DescribeChangeSet."""
    change = raw["ResourceChange"]
    replaces = {"True": "replace", "Conditional": "modify or replace"}
    action = replaces.get(change.get("Replacement"), change["Action"].lower())
    return Change(action, change["ResourceType"], change["LogicalResourceId"])
