"""Deploy and destroy the stack of infra/template.yaml."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError, WaiterError

from launcher.aws import aws_session, check_region, make_client, service_errors
from launcher.errors import InputError, ServiceError
from launcher.job import RUNNING
from launcher.sagemaker.backend import SageMakerBackend
from launcher.sagemaker.stack import (
    REVIEW,
    Stack,
    cache_stack,
    describe_stack,
    is_our_stack,
    is_whole,
    no_stack,
    not_ours,
    outputs_of,
    parameters_of,
    remedy,
    remember,
)
from launcher.settings import Settings

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).parents[2] / "infra" / "template.yaml"  # also in a wheel
WAIT = {"Delay": 2, "MaxAttempts": 1800}  # seconds; an hour
CHANGE_SET = "sm-nanogpt-"  # prefix of our change sets
LEFT_OVER = ("CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED")
PREVIOUS = {"UsePreviousValue": True}
KEPT = ("Bucket", "BucketPolicy", "Key")  # the template retains them


@dataclass(frozen=True)
class Change:
    """A change of one resource. action is add, modify, remove, replace, or `modify or replace`."""

    action: str
    resource: str
    kind: str


@dataclass(frozen=True)
class ChangeSet:
    """Changes that can be executed. creates means that there is no stack yet."""

    id: str
    stack_id: str
    creates: bool
    changes: list[Change]


@dataclass(frozen=True)
class Removal:
    """What deleting a stack does.

    removed and kept hold (logical id, type, physical id). policy has to be detached from its
    holders, (User, Group or Role, name). jobs run with the stack's role.
    """

    stack_id: str
    status: str
    removed: list[tuple[str, str, str]]
    kept: list[tuple[str, str, str]]
    policy: str | None
    holders: list[tuple[str, str]]
    jobs: list[str]


class Deployment:
    """The stack that the settings name, to create, update and delete."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.name = settings, settings.stack
        session = aws_session(settings)
        self.region = check_region(session)
        self.client = make_client(session, "cloudformation", self.region)
        self.iam = make_client(session, "iam", self.region)

    def plan(
        self, kms: bool = False, vpc: bool = False, boundary: str = "", role_path: str = ""
    ) -> ChangeSet | None:
        """Create a change set; None if nothing would change.

        kms adds a key, and vpc allows jobs in a VPC. boundary, an ARN, and role_path are of the
        role. A later plan that leaves them out keeps them. Delete what `left_over` finds first.

        Raises:
            InputError: the stack does not belong to sm-nanogpt.
            ServiceError: AWS refuses, or the stack cannot be changed now.
        """
        there = self.changeable()
        if there is not None and there["StackStatus"] == "UPDATE_ROLLBACK_FAILED":
            raise ServiceError(f"stack {self.name} is UPDATE_ROLLBACK_FAILED: {remedy(there)}")
        raw = None if there is None or there["StackStatus"] == REVIEW else there
        known = {} if raw is None else parameters_of(raw)  # an older stack lacks some
        given = {
            "Kms": "true" * kms,
            "Vpc": "true" * vpc,
            "PermissionsBoundary": boundary,
            "RolePath": role_path,
        }
        parameters: list[dict[str, Any]] = [
            {"ParameterKey": name, **({"ParameterValue": value} if value else PREVIOUS)}
            for name, value in given.items()
            if value or name in known
        ]
        with service_errors("CreateChangeSet"):
            made = self.client.create_change_set(
                StackName=self.name,
                ChangeSetName=f"{CHANGE_SET}{time.strftime('%Y%m%d-%H%M%S')}",
                ChangeSetType="CREATE" if raw is None else "UPDATE",
                TemplateBody=TEMPLATE.read_text(),
                Parameters=parameters,
                Capabilities=["CAPABILITY_IAM"],
            )
        change_set = ChangeSet(made["Id"], made["StackId"], creates=raw is None, changes=[])
        try:
            changes = self.read_changes(change_set)
        except BaseException:
            with suppress(ServiceError):  # report the first error
                self.discard(change_set)
            raise
        if changes is None:
            self.discard(change_set)
            return None
        return replace(change_set, changes=changes)

    def changeable(self) -> dict[str, Any] | None:
        """The answer of DescribeStacks if the stack can be changed; None if there is none."""
        raw = describe_stack(self.client, self.name)
        if raw is None or raw["StackStatus"] == REVIEW:
            return raw
        if not is_our_stack(raw):
            raise InputError(not_ours(raw))
        if raw["StackStatus"].endswith("_IN_PROGRESS"):
            then = remedy(raw)
            raise ServiceError(f"stack {self.name} is {raw['StackStatus']}; {then}")
        return raw

    def read_changes(self, change_set: ChangeSet) -> list[Change] | None:
        """Wait for a change set and read it; None if nothing would change."""
        with service_errors("DescribeChangeSet"):
            with suppress(WaiterError):  # the pages say why
                waiter = self.client.get_waiter("change_set_create_complete")
                waiter.wait(ChangeSetName=change_set.id, WaiterConfig=WAIT)
            paginator = self.client.get_paginator("describe_change_set")
            pages = list(paginator.paginate(ChangeSetName=change_set.id))
        if pages[0]["Status"] == "CREATE_COMPLETE":
            return [read_change(change) for page in pages for change in page["Changes"]]
        reason = pages[0].get("StatusReason", "")
        if "didn't contain changes" in reason or "No updates are to be performed" in reason:
            return None
        raise ServiceError(
            f"CloudFormation cannot change stack {self.name}: {reason or pages[0]['Status']}"
        )

    def discard(self, change_set: ChangeSet) -> None:
        """Delete a change set, and its empty stack unless others have change sets there."""
        with service_errors("DeleteChangeSet"):
            self.client.delete_change_set(ChangeSetName=change_set.id)
        if change_set.creates and not self.waiting(change_set.stack_id).keys() - {change_set.id}:
            with service_errors("DeleteStack"):
                self.client.delete_stack(StackName=change_set.stack_id)

    def waiting(self, stack_id: str) -> dict[str, str]:
        """The change sets of a stack, by id."""
        with service_errors("ListChangeSets"):
            pages = self.client.get_paginator("list_change_sets").paginate(StackName=stack_id)
            return {
                each["ChangeSetId"]: each["ChangeSetName"]
                for page in pages
                for each in page["Summaries"]
            }

    def execute(self, change_set: ChangeSet) -> Stack:
        """Execute the changes and wait until they end.

        Raises:
            ServiceError: a resource failed; CloudFormation rolls the changes back.
        """
        with service_errors("ExecuteChangeSet"):
            # If the creation fails, also delete what the template retains: it is empty, and a
            # key costs money.
            self.client.execute_change_set(ChangeSetName=change_set.id, RetainExceptOnCreate=True)
        kind = "create" if change_set.creates else "update"
        self.wait(f"stack_{kind}_complete", change_set.stack_id, "deploy again")
        return self.show()

    def show(self) -> Stack:
        """The stack. Logs the state of its last operation, unless that succeeded.

        Raises:
            ServiceError: there is no stack, or it is incomplete.
        """
        raw = describe_stack(self.client, self.name)
        if raw is not None and raw["StackStatus"] != REVIEW and is_our_stack(raw):
            status = raw["StackStatus"]
            if not is_whole(status):
                why = ""
                if "ROLLBACK" in status or status.endswith("_FAILED"):
                    try:
                        why = f": {self.failure(raw['StackId'])}"
                    except ServiceError as error:
                        why = f": why is not known ({error})"
                logger.info(f"stack {self.name} is {status}{why}")
        stack = cache_stack(self.settings, self.region, raw)
        if stack is None:
            raise no_stack(self.settings, self.region)
        return stack

    def left_over(self) -> Removal | None:
        """What a failed creation or deletion left behind, which prevents a new stack."""
        raw = self.changeable()
        return self.read_removal(raw) if raw and raw["StackStatus"] in LEFT_OVER else None

    def removal(self) -> Removal | None:
        """What destroy would do; None if there is no stack.

        A name with only change sets counts as a stack if all of them are ours, which a deployment
        leaves if it is killed while it waits for confirmation.
        """
        raw = self.changeable()
        if raw is None:
            return None
        if raw["StackStatus"] == REVIEW:
            names = self.waiting(raw["StackId"]).values()
            if not all(name.startswith(CHANGE_SET) for name in names):
                return None
        return self.read_removal(raw)

    def read_removal(self, raw: dict[str, Any]) -> Removal:
        with service_errors("ListStackResources"):
            pages = self.client.get_paginator("list_stack_resources").paginate(StackName=self.name)
            held = [
                (each["LogicalResourceId"], each["ResourceType"], each["PhysicalResourceId"])
                for page in pages
                for each in page["StackResourceSummaries"]
                if each.get("PhysicalResourceId") and each["ResourceStatus"] != "DELETE_COMPLETE"
            ]
        policy = next((place for name, _, place in held if name == "LauncherPolicy"), None)
        role = outputs_of(raw).get("RoleArn")
        return Removal(
            stack_id=raw["StackId"],
            status=raw["StackStatus"],
            removed=[each for each in held if each[0] not in KEPT],
            kept=[each for each in held if each[0] in KEPT],
            policy=policy,
            holders=self.holders(policy) if policy else [],
            jobs=self.running_jobs(role) if role else [],
        )

    def holders(self, policy: str) -> list[tuple[str, str]]:
        """The users, groups and roles that have a policy, as (kind, name)."""
        with service_errors("ListEntitiesForPolicy"):
            paginator = self.iam.get_paginator("list_entities_for_policy")
            return [
                (kind, entity[f"{kind}Name"])
                for page in paginator.paginate(PolicyArn=policy)
                for kind in ("User", "Group", "Role")
                for entity in page[f"Policy{kind}s"]
            ]

    def running_jobs(self, role: str) -> list[str]:
        """The running jobs that use a role."""
        with service_errors("Search"):
            return [
                raw["TrainingJobName"]
                for raw in SageMakerBackend(self.settings).all_raw()
                if raw["TrainingJobStatus"] in RUNNING and raw.get("RoleArn") == role
            ]

    def destroy(self, removal: Removal) -> None:
        """Delete the stack and wait for its end; retained resources stay.

        IAM does not delete an attached policy, so it is detached first.

        Raises:
            ServiceError: a resource could not be deleted.
        """
        for kind, name in removal.holders:
            with service_errors(f"Detach{kind}Policy"):
                take = getattr(self.iam, f"detach_{kind.lower()}_policy")
                take(PolicyArn=removal.policy, **{f"{kind}Name": name})
            logger.info(f"detached the launcher policy from {kind.lower()} {name}")
        with service_errors("DeleteStack"):
            self.client.delete_stack(StackName=removal.stack_id)
        self.wait("stack_delete_complete", removal.stack_id, "delete it again")
        remember(self.settings, self.region, None)

    def wait(self, end: str, stack_id: str, again: str) -> None:
        """Wait until the stack is at this end, a waiter's name. `again` is what a failure advises.

        Raises:
            ServiceError: it came to another end.
        """
        logger.info(f"waiting for stack {self.name}; CloudFormation takes a minute or two")
        ended: dict[str, Any] = {}
        try:
            with service_errors("DescribeStacks"):
                try:
                    self.client.get_waiter(end).wait(StackName=stack_id, WaiterConfig=WAIT)
                except WaiterError as error:
                    ended = error.last_response
                    if "Error" in ended:
                        raise ClientError(error.last_response, "DescribeStacks") from None
        except (KeyboardInterrupt, ServiceError):
            logger.info(
                "CloudFormation continues by itself; `sm-nanogpt infra show` shows its state"
            )
            raise
        if ended:
            raise ServiceError(
                f"stack {self.name} is {ended['Stacks'][0]['StackStatus']}:"
                f" {self.failure(stack_id)}; correct that and {again}"
            )

    def failure(self, stack_id: str) -> str:
        """Why the last operation failed: the first resource that failed, and its reason."""
        failed = "CloudFormation gives no reason"
        with service_errors("DescribeStackEvents"):
            pages = self.client.get_paginator("describe_stack_events").paginate(StackName=stack_id)
            for event in (event for page in pages for event in page["StackEvents"]):
                why = event.get("ResourceStatusReason", "")
                if why == "User Initiated":  # the events before are of another operation
                    break
                if event["ResourceStatus"].endswith("_FAILED") and "cancelled" not in why:
                    failed = f"{event['LogicalResourceId']}: {' '.join(why.split())}"
        return failed


def read_change(raw: dict[str, Any]) -> Change:
    change = raw["ResourceChange"]
    replacement = change.get("Replacement")
    action = "replace" if replacement == "True" else change["Action"].lower()
    if replacement == "Conditional":
        action += " or replace"
    return Change(action, change["LogicalResourceId"], change["ResourceType"])
