"""The stack of infra/template.yaml: deployed and destroyed here, and found by the other commands.

Its outputs say where the store is and which role SageMaker acts as, so that nobody types them. What
was last seen of a stack lies in HOME/stacks.json, for a dry run, which calls nobody.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher import storage
from launcher.aws import (
    Missing,
    aws_session,
    check_region,
    quick_client,
    retrying,
    service_errors,
)
from launcher.errors import InputError, ServiceError
from launcher.settings import Settings, Tell

TEMPLATE = Path(__file__).parent.parent / "infra" / "template.yaml"  # a wheel holds it there too
POLL_SECONDS = 2.0
LEFT_OVER = ("REVIEW_IN_PROGRESS", "ROLLBACK_COMPLETE")  # never came to be, and holds nothing
KEPT = ("Bucket", "BucketPolicy", "Key")  # what the template retains


@dataclass(frozen=True)
class Stack:
    """What the other commands take from a deployed stack. policy is the launcher policy's ARN."""

    name: str
    status: str
    store: str
    role: str
    kms_key: str | None
    policy: str


# -- found by the other commands -------------------------------------------------------------------


def with_stack(
    settings: Settings,
    names: tuple[str, ...] = ("store", "role", "kms_key"),
    offline: bool = False,
    tell: Tell = lambda line: None,
) -> Settings:
    """The settings, with what they leave open taken from the stack, if there is one.

    Nobody is asked where store and role are set; offline, the stack is as it was last seen.

    Raises:
        ServiceError: AWS cannot be asked, or the stack is not whole.
    """
    if settings.store and (settings.role or "role" not in names):
        return settings
    session = aws_session(settings)
    region = session.region_name
    stack = remembered(settings, region) if offline else find_stack(settings, session)
    if stack is None:
        return settings
    if settings.store and not f"{settings.store}/".startswith(f"{stack.store}/"):
        tell(f"the role of stack {stack.name} is not taken: it reaches {stack.store} alone")
        return settings
    found = {
        name: getattr(stack, name)
        for name in names
        if getattr(stack, name) and not getattr(settings, name)
    }
    source = f"stack {stack.name}{', as last seen' if offline else ''}"
    for name, value in found.items():
        tell(f"{name.replace('_', ' ')}: {value} ({source})")
    return settings.model_copy(update=found)


def find_stack(settings: Settings, session: Any) -> Stack | None:
    """The stack that the settings name, in one call; None where there is none.

    Raises:
        InputError: no region is known.
        ServiceError: AWS cannot be asked, or the stack is not whole.
    """
    region = check_region(session)
    with service_errors("DescribeStacks"):
        client = quick_client(session, "cloudformation", region, attempts=3)
    raw = describe(client, settings.stack)
    stack = None if raw is None else read_stack(raw)
    remember(settings, region, stack)
    return stack


def describe(client: Any, name: str) -> dict[str, Any] | None:
    """What DescribeStacks says of a stack; None where there is none."""
    try:
        with service_errors("DescribeStacks"):
            return dict(client.describe_stacks(StackName=name)["Stacks"][0])
    except Missing:
        return None


def read_stack(raw: dict[str, Any]) -> Stack:
    """Raises ServiceError for a stack without our outputs, or one that is being deleted."""
    name, status, outputs = raw["StackName"], raw["StackStatus"], outputs_of(raw)
    if status.startswith("DELETE") or not is_ours(raw):
        raise ServiceError(
            f"stack {name} is {status} and cannot be used: `sm-nanogpt infra deploy` makes it, and"
            " --stack names another"
        )
    return Stack(
        name=name,
        status=status,
        store=outputs["Store"],
        role=outputs["RoleArn"],
        kms_key=outputs.get("KmsKeyArn"),
        policy=outputs["LauncherPolicyArn"],
    )


def outputs_of(raw: dict[str, Any]) -> dict[str, str]:
    return {output["OutputKey"]: output["OutputValue"] for output in raw.get("Outputs", [])}


def is_ours(raw: dict[str, Any]) -> bool:
    return {"Store", "RoleArn", "LauncherPolicyArn"} <= outputs_of(raw).keys()


def remember(settings: Settings, region: str, stack: Stack | None) -> None:
    """Notes what a stack is, or that there is none, unless that is known."""
    if remembered(settings, region) == stack:
        return
    known = read_memory(settings)
    here = {name: value for name, value in known.get(region, {}).items() if name != settings.stack}
    if stack is not None:
        here[settings.stack] = asdict(stack)
    text = json.dumps({**known, region: here}, indent=2) + "\n"
    storage.write_text(str(settings.last_stacks), text)


def remembered(settings: Settings, region: str | None) -> Stack | None:
    """The stack as it was last seen from this machine."""
    try:
        return Stack(**read_memory(settings)[region or ""][settings.stack])
    except (KeyError, TypeError):
        return None


def read_memory(settings: Settings) -> dict[str, dict[str, Any]]:
    text = storage.read_text(str(settings.last_stacks))
    try:
        return dict(json.loads(text)) if text else {}
    except (ValueError, TypeError):
        return {}


# -- deployed and destroyed ------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What happens to one resource. action: add, modify, remove or replace, or what may happen."""

    action: str
    resource: str
    kind: str


@dataclass(frozen=True)
class ChangeSet:
    """Changes that wait to be executed. creates: the stack exists for them alone so far."""

    id: str
    stack_id: str
    creates: bool
    changes: list[Change]


class Deployment:
    """The stack that the settings name, for those who make and delete it.

    `tell` is told what happens in AWS, line by line.
    """

    def __init__(self, settings: Settings, tell: Tell = lambda line: None) -> None:
        self.settings, self.name, self.tell = settings, settings.stack, tell
        self.session = aws_session(settings)
        self.region = check_region(self.session)
        self.client = self.service("cloudformation")

    def service(self, name: str) -> Any:
        with service_errors(name):
            return self.session.client(name, region_name=self.region, config=retrying())

    def plan(self, kms: bool = False) -> ChangeSet | None:
        """What a deployment would change, made ready in AWS; None where nothing would.

        kms makes the key; a key that was made stays. What a creation that failed left is deleted.

        Raises:
            InputError: the stack is somebody else's.
            ServiceError: AWS refuses, or the stack cannot be changed now.
        """
        raw = self.changeable()
        if raw is not None and raw["StackStatus"] in LEFT_OVER:
            self.tell(f"stack {self.name} is {raw['StackStatus']} and empty; deleting it first")
            self.delete(raw["StackId"])
            raw = None
        parameters: list[dict[str, Any]] = []
        if kms:
            parameters = [{"ParameterKey": "Kms", "ParameterValue": "true"}]
        elif raw is not None:
            parameters = [{"ParameterKey": "Kms", "UsePreviousValue": True}]
        with service_errors("CreateChangeSet"):
            made = self.client.create_change_set(
                StackName=self.name,
                ChangeSetName=f"sm-nanogpt-{time.strftime('%Y%m%d-%H%M%S')}",
                ChangeSetType="CREATE" if raw is None else "UPDATE",
                TemplateBody=TEMPLATE.read_text(),
                Parameters=parameters,
                Capabilities=["CAPABILITY_IAM"],
            )
        return self.changes(made["Id"], made["StackId"], creates=raw is None)

    def changeable(self) -> dict[str, Any] | None:
        """The stack as DescribeStacks has it, if it may be changed."""
        raw = describe(self.client, self.name)
        if raw is None or raw["StackStatus"] in LEFT_OVER:
            return raw
        status = raw["StackStatus"]
        if status.endswith("_IN_PROGRESS"):
            raise ServiceError(f"stack {self.name} is {status}; try again when that is over")
        if not is_ours(raw):
            raise InputError(
                f"stack {self.name} is there already ({status}), without sm-nanogpt's outputs; name"
                " another with --stack, or delete it in the CloudFormation console"
            )
        return raw

    def changes(self, id: str, stack_id: str, creates: bool) -> ChangeSet | None:
        """Waits until a change set is ready, and reads it; one that is empty is removed."""
        while True:
            with service_errors("DescribeChangeSet"):
                pages = list(
                    self.client.get_paginator("describe_change_set").paginate(ChangeSetName=id)
                )
            if pages[0]["Status"] in ("CREATE_COMPLETE", "FAILED"):
                break
            time.sleep(POLL_SECONDS)
        found = [read_change(change) for page in pages for change in page["Changes"]]
        change_set = ChangeSet(id, stack_id, creates, found)
        if pages[0]["Status"] == "CREATE_COMPLETE":
            return change_set
        self.discard(change_set)
        reason = pages[0].get("StatusReason", "")
        if "didn't contain changes" in reason or "No updates are to be performed" in reason:
            return None
        raise ServiceError(f"CloudFormation cannot change stack {self.name}: {reason}")

    def discard(self, change_set: ChangeSet) -> None:
        """Removes a change set, and the empty stack that it made."""
        with service_errors("DeleteChangeSet"):
            self.client.delete_change_set(ChangeSetName=change_set.id)
        if change_set.creates:
            with service_errors("DeleteStack"):
                self.client.delete_stack(StackName=change_set.stack_id)

    def execute(self, change_set: ChangeSet) -> Stack:
        """Makes the changes, and waits for their end.

        Raises:
            ServiceError: a resource could not be made; CloudFormation takes the changes back.
        """
        seen = {event["EventId"] for event in self.events(change_set.stack_id)}
        with service_errors("ExecuteChangeSet"):
            self.client.execute_change_set(ChangeSetName=change_set.id)
        status, reason = self.follow(change_set.stack_id, seen)
        if status not in ("CREATE_COMPLETE", "UPDATE_COMPLETE"):
            raise ServiceError(
                f"stack {self.name} is {status}: {reason}; put that right and deploy again"
            )
        return self.show()

    def show(self) -> Stack:
        """The stack as it stands. Raises ServiceError where there is none."""
        stack = find_stack(self.settings, self.session)
        if stack is None:
            raise ServiceError(
                f"there is no stack {self.name} in {self.region}: `sm-nanogpt infra deploy`"
                " makes it"
            )
        return stack

    def resources(self) -> list[tuple[str, str, str]] | None:
        """(logical id, type, physical id) of what the stack holds; None where there is none.

        Raises:
            InputError, ServiceError: as plan.
        """
        if self.changeable() is None:
            return None
        with service_errors("ListStackResources"):
            pages = self.client.get_paginator("list_stack_resources").paginate(StackName=self.name)
            return [
                (each["LogicalResourceId"], each["ResourceType"], each["PhysicalResourceId"])
                for page in pages
                for each in page["StackResourceSummaries"]
                if each.get("PhysicalResourceId")
            ]

    def destroy(self) -> None:
        """Deletes the stack and waits for its end; what the template retains stays.

        Raises:
            ServiceError: a resource could not be deleted.
        """
        raw = self.changeable()
        if raw is None:
            return
        policy = outputs_of(raw).get("LauncherPolicyArn")
        if policy:
            self.detach(policy)
        self.delete(raw["StackId"])
        remember(self.settings, self.region, None)

    def detach(self, policy: str) -> None:
        """Takes a policy from all who have it; IAM deletes none that somebody has."""
        iam = self.service("iam")
        with service_errors("ListEntitiesForPolicy"):
            pages = list(iam.get_paginator("list_entities_for_policy").paginate(PolicyArn=policy))
        for kind in ("User", "Group", "Role"):
            for page in pages:
                for entity in page[f"Policy{kind}s"]:
                    name = entity[f"{kind}Name"]
                    self.tell(f"the launcher policy is taken from {kind.lower()} {name}")
                    with service_errors(f"Detach{kind}Policy"):
                        take = getattr(iam, f"detach_{kind.lower()}_policy")
                        take(PolicyArn=policy, **{f"{kind}Name": name})

    def delete(self, stack_id: str) -> None:
        seen = {event["EventId"] for event in self.events(stack_id)}
        with service_errors("DeleteStack"):
            self.client.delete_stack(StackName=stack_id)
        status, reason = self.follow(stack_id, seen)
        if status != "DELETE_COMPLETE":
            raise ServiceError(
                f"stack {self.name} is {status}: {reason}; put that right and delete it again"
            )

    def follow(self, stack_id: str, seen: set[str]) -> tuple[str, str]:
        """Tells of each event that is not in `seen`, to the end of what the stack does.

        Returns the status at the end, and why the first resource failed that did.
        """
        reason = ""
        while True:
            fresh = [event for event in self.events(stack_id) if event["EventId"] not in seen]
            for event in reversed(fresh):  # the newest comes first
                seen.add(event["EventId"])
                status, why = event["ResourceStatus"], event.get("ResourceStatusReason", "")
                of_stack = event["PhysicalResourceId"] == stack_id
                if of_stack and not status.endswith("_IN_PROGRESS"):
                    return status, reason or why or "CloudFormation gives no reason"
                failed = status.endswith("_FAILED")
                if failed and not reason and "cancelled" not in why:
                    reason = f"{event['LogicalResourceId']}: {' '.join(why.split())}"
                self.tell(f"{status:<20} {event['ResourceType']} {event['LogicalResourceId']}")
            time.sleep(POLL_SECONDS)

    def events(self, stack_id: str) -> Iterator[dict[str, Any]]:
        """What has happened to a stack, the newest first."""
        with service_errors("DescribeStackEvents"):
            pages = self.client.get_paginator("describe_stack_events").paginate(StackName=stack_id)
            for page in pages:
                yield from page["StackEvents"]


def read_change(raw: dict[str, Any]) -> Change:
    change = raw["ResourceChange"]
    replacement = change.get("Replacement")
    action = "replace" if replacement == "True" else change["Action"].lower()
    if replacement == "Conditional":
        action += " or replace"
    return Change(action, change["LogicalResourceId"], change["ResourceType"])
