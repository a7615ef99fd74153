"""Deploy and destroy the stack of infra/template.yaml."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import WaiterError

from launcher.aws import Missing
from launcher.errors import ServiceError
from launcher.job import RUNNING
from launcher.sagemaker import stack as stacks
from launcher.sagemaker.backend import SageMakerBackend
from launcher.sagemaker.stack import Stack
from launcher.settings import Settings

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).parents[2] / "infra" / "template.yaml"  # also in a wheel
WAIT = {"Delay": 2, "MaxAttempts": 1800}  # seconds; an hour
LEFT_OVER = ("CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED")
PREVIOUS = {"UsePreviousValue": True}


@dataclass(frozen=True)
class ChangeSet:
    """Changes that can be executed. creates means that there is no stack yet.

    changes holds (add, modify, remove, replace, or `modify or replace`; type; logical id).
    """

    id: str
    stack_id: str
    creates: bool
    changes: list[tuple[str, str, str]]


@dataclass(frozen=True)
class Removal:
    """What deleting a stack does: it keeps the bucket, a name, and the key, an ARN. policy has to
    be detached from its holders, (User, Group or Role, name). jobs run with the stack's role."""

    stack_id: str
    status: str
    bucket: str | None
    key: str | None
    policy: str | None
    holders: list[tuple[str, str]]
    jobs: list[str]


class Deployment:
    """The stack that the settings name, to create, update and delete."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.name = settings, settings.stack
        self.backend = SageMakerBackend(settings)
        self.region = self.backend.region
        self.client, self.iam = map(self.backend.client, ("cloudformation", "iam"))

    def plan(
        self,
        kms: bool = False,
        vpc: bool = False,
        permissions_boundary: str | None = None,
        role_path: str | None = None,
    ) -> ChangeSet | None:
        """Create a change set; None if nothing would change.

        kms adds a key, and vpc allows jobs in a VPC; the others, an ARN and a path, are of the
        role. A later plan that leaves them out keeps them. Delete what is left over first.
        """
        raw = self.changeable("UPDATE_ROLLBACK_FAILED")
        known = {} if raw is None else stacks.parameters_of(raw)  # an older stack lacks some
        given = {
            "Kms": "true" * kms,
            "Vpc": "true" * vpc,
            "PermissionsBoundary": permissions_boundary,
            "RolePath": role_path,
        }
        parameters: list[dict[str, Any]] = [
            {"ParameterKey": name, **({"ParameterValue": value} if value else PREVIOUS)}
            for name, value in given.items()
            if value or name in known
        ]
        made = self.client.create_change_set(
            StackName=self.name,
            ChangeSetName=f"sm-nanogpt-{time.strftime('%Y%m%d-%H%M%S')}",
            ChangeSetType="CREATE" if raw is None else "UPDATE",
            TemplateBody=TEMPLATE.read_text(),
            Parameters=parameters,
            Capabilities=["CAPABILITY_IAM"],
        )
        changes = self.read_changes(made["Id"])
        change_set = ChangeSet(made["Id"], made["StackId"], raw is None, changes or [])
        if changes is None:
            self.discard(change_set)
            return None
        return change_set

    def changeable(self, *but: str) -> dict[str, Any] | None:
        """The answer of DescribeStacks for a stack that is ours, in no operation, and not in the
        statuses `but`; None if there is none."""
        raw = stacks.describe_stack(self.client, self.name)
        if raw is not None:
            busy = raw["StackStatus"].endswith(("_IN_PROGRESS", *but))
            if busy or not stacks.is_our_stack(raw):
                raise stacks.unusable(raw)
        return raw

    def read_changes(self, change_set_id: str) -> list[tuple[str, str, str]] | None:
        """Wait for a change set and read it; None if nothing would change."""
        with suppress(WaiterError):  # the pages say why
            waiter = self.client.get_waiter("change_set_create_complete")
            waiter.wait(ChangeSetName=change_set_id, WaiterConfig=WAIT)
        paginator = self.client.get_paginator("describe_change_set")
        pages = list(paginator.paginate(ChangeSetName=change_set_id))
        if pages[0]["Status"] == "CREATE_COMPLETE":
            return [read_change(change) for page in pages for change in page["Changes"]]
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
        # If the creation fails, also delete what the template retains: it is empty, and a key costs
        # money.
        self.client.execute_change_set(ChangeSetName=change_set.id, RetainExceptOnCreate=True)
        kind = "create" if change_set.creates else "update"
        self.wait(f"stack_{kind}_complete", change_set.stack_id)
        return self.show()

    def show(self) -> Stack:
        """The stack. Logs the state of its last operation, unless that succeeded."""
        raw = stacks.describe_stack(self.client, self.name)
        if raw is not None and not stacks.is_whole(raw["StackStatus"]):
            logger.info(self.state(raw))
        return stacks.cache_stack(self.settings, self.region, raw)

    def removal(self, only: Collection[str] = ()) -> Removal | None:
        """What deleting the stack does; None if there is none, or it has none of these statuses."""
        raw = self.changeable()
        if raw is None or (only and raw["StackStatus"] not in only):
            return None
        outputs = stacks.outputs_of(raw)
        policy, role = outputs.get("LauncherPolicyArn"), outputs.get("RoleArn")
        return Removal(
            stack_id=raw["StackId"],
            status=raw["StackStatus"],
            bucket=outputs["Store"].split("/")[2] if "Store" in outputs else None,
            key=outputs.get("KmsKeyArn"),
            policy=policy,
            holders=self.holders(policy) if policy else [],
            jobs=self.running_jobs(role) if role else [],
        )

    def holders(self, policy: str) -> list[tuple[str, str]]:
        """The users, groups and roles that have a policy, as (kind, name)."""
        with suppress(Missing):
            paginator = self.iam.get_paginator("list_entities_for_policy")
            return [
                (kind, entity[f"{kind}Name"])
                for page in paginator.paginate(PolicyArn=policy)
                for kind in ("User", "Group", "Role")
                for entity in page[f"Policy{kind}s"]
            ]
        return []

    def running_jobs(self, role: str) -> list[str]:
        return [
            raw["TrainingJobName"]
            for raw in self.backend.all_raw()
            if raw["TrainingJobStatus"] in RUNNING and raw.get("RoleArn") == role
        ]

    def destroy(self, removal: Removal) -> None:
        """Delete the stack and wait for its end; retained resources stay.

        IAM does not delete an attached policy, so it is detached first.
        """
        for kind, name in removal.holders:
            take = getattr(self.iam, f"detach_{kind.lower()}_policy")
            take(PolicyArn=removal.policy, **{f"{kind}Name": name})
            logger.info(f"detached the launcher policy from {kind.lower()} {name}")
        self.client.delete_stack(StackName=removal.stack_id)
        self.wait("stack_delete_complete", removal.stack_id)
        stacks.remember(self.settings, self.region, None)

    def wait(self, end: str, stack_id: str) -> None:
        """Wait until the stack is at this end, a waiter's name."""
        logger.info(f"waiting for stack {self.name}; CloudFormation takes a minute or two")
        try:
            with suppress(WaiterError, Missing):
                self.client.get_waiter(end).wait(StackName=stack_id, WaiterConfig=WAIT)
            raw = stacks.describe_stack(self.client, stack_id)
        except (KeyboardInterrupt, ServiceError):
            logger.info("CloudFormation continues by itself", extra={"code": "show-stack"})
            raise
        if raw is not None and not stacks.is_whole(raw["StackStatus"]):
            raise ServiceError(f"{self.state(raw)}; correct that and try again")

    def state(self, raw: dict[str, Any]) -> str:
        """The status of a stack, and the first failure of its last operation if it can be read."""
        failed = ""
        with suppress(ServiceError):
            paginator = self.client.get_paginator("describe_stack_events")
            pages = paginator.paginate(StackName=raw["StackId"])
            for event in (event for page in pages for event in page["StackEvents"]):
                why = event.get("ResourceStatusReason", "")
                if why == "User Initiated":  # the events before are of another operation
                    break
                if event["ResourceStatus"].endswith("_FAILED") and "cancelled" not in why:
                    failed = f": {event['LogicalResourceId']}: {' '.join(why.split())}"
        return f"stack {self.name} is {raw['StackStatus']}{failed}"


def read_change(raw: dict[str, Any]) -> tuple[str, str, str]:
    change = raw["ResourceChange"]
    replaces = {"True": "replace", "Conditional": "modify or replace"}
    action = replaces.get(change.get("Replacement"), change["Action"].lower())
    return action, change["ResourceType"], change["LogicalResourceId"]
