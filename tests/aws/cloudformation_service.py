"""moto's CloudFormation, made to do what AWS's does where our template or commands meet the gap.

AWS::NoValue leaves a list; a bucket policy is a resource; a change set may be empty, and lists no
resource whose condition is false; executed, it
gives the stack its outputs and parameters, tells of each resource, and rolls back when one fails,
which keeps what is to be retained unless RetainExceptOnCreate is said; change sets of a stack that
is not made yet share it; the policies of roles and keys are text; an update reaches what only
conditions change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock, patch

from moto.cloudformation import models, parsing, responses
from moto.core.common_models import CloudFormationModel

describe_stacks = models.CloudFormationBackend.describe_stacks
create_change_set = models.CloudFormationBackend.create_change_set
clean_json, create_resource = parsing.clean_json, parsing.parse_and_create_resource


class BucketPolicy(CloudFormationModel):
    """AWS::S3::BucketPolicy, which moto finds among the subclasses, as one of its own modules'.

    It is not put into force: moto would leave out its conditions, and deny everything.
    """

    __module__ = "moto.s3.models"

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket

    @property
    def physical_resource_id(self) -> str:
        return self.bucket

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::S3::BucketPolicy"

    @staticmethod
    def cloudformation_name_type() -> str:
        return ""

    @classmethod
    def create_from_cloudformation_json(
        cls,
        resource_name: str,
        cloudformation_json: Any,
        account_id: str,
        region_name: str,
        **kwargs: Any,
    ) -> BucketPolicy:
        return cls(cloudformation_json["Properties"]["Bucket"])


def clean(value: Any, resources: Any) -> Any:
    cleaned = clean_json(value, resources)
    return [each for each in cleaned if each is not None] if isinstance(cleaned, list) else cleaned


class CloudFormation:
    """What a test may look at or change."""

    def __init__(self) -> None:
        self.refuse: dict[str, str] = {}  # resources that fail, by logical id, and why
        self.described = 0  # calls of DescribeStacks
        self.hangs = False  # whether what is executed stays in progress

    def set_status(self, stack_id: str, status: str) -> None:
        for regions in models.cloudformation_backends.values():
            for backend in regions.values():
                if stack_id in backend.stacks:
                    backend.stacks[stack_id].status = status

    def describe(self, backend: Any, *names: str) -> Any:
        self.described += 1
        return describe_stacks(backend, *names)

    def create_resource(
        self, name: str, document: Any, resources: Any, account_id: str, region_name: str
    ) -> Any:
        backend = models.cloudformation_backends[account_id][region_name]
        stack = backend.get_stack(resources.stack_id)
        kind = document["Type"]
        if name in self.refuse:
            other = next(
                each for each in resources if each not in (name, *resources._parsed_resources)
            )
            event(stack, other, "", "CREATE_FAILED", "Resource creation cancelled")
            event(stack, name, kind, "CREATE_FAILED", self.refuse[name])
            raise RuntimeError(self.refuse[name])
        resource = create_resource(name, document, resources, account_id, region_name)
        if resource is not None and kind == "AWS::IAM::Role":
            resource.policies = {
                each: as_text(policy) for each, policy in resource.policies.items()
            }
        if resource is not None and kind == "AWS::KMS::Key":
            resource.policy = as_text(resource.policy)
        if resource is not None:
            event(stack, name, kind, "CREATE_COMPLETE")
        return resource

    def execute(self, backend: Any, change_set_name: str, keep: bool) -> None:
        """execute_change_set, all of it at once. keep: what is to be retained, in a rollback."""
        change_set = backend.change_sets[change_set_name]
        stack, kind = backend.stacks[change_set.stack_id], change_set.change_set_type
        stack._add_stack_event(f"{kind}_IN_PROGRESS", "User Initiated")
        stack.description = change_set.template_dict.get("Description")
        if self.hangs:
            stack.status = f"{kind}_IN_PROGRESS"
            return
        try:
            change_set.apply()
            refresh(stack.resource_map)
            status = f"{kind}_COMPLETE"
            stack.template, stack.template_dict = change_set.template, change_set.template_dict
            stack.output_map = stack._create_output_map()
            stack.parameters = dict(stack.resource_map.resolved_parameters)
        except RuntimeError:
            if kind == "CREATE":
                roll_back(stack.resource_map, keep)
            status = "ROLLBACK_COMPLETE" if kind == "CREATE" else "UPDATE_ROLLBACK_COMPLETE"
            stack._add_stack_event(status.replace("COMPLETE", "IN_PROGRESS"), "It failed")
        stack._add_stack_event(status)
        stack.status = status


def refresh(resources: Any) -> None:
    """An update also reaches what differs by a condition alone; moto leaves that as it was."""
    for name, resource in list(resources._parsed_resources.items()):
        if resource is None or name not in resources._resource_json_map:
            continue
        document = parsing.parse_resource(resources._resource_json_map[name], resources)[1]
        found = document["Properties"]
        if document["Type"] == "AWS::IAM::Role":
            resource.policies = {
                each["PolicyName"]: as_text(each["PolicyDocument"]) for each in found["Policies"]
            }
        elif document["Type"] == "AWS::IAM::ManagedPolicy":
            for version in resource.versions:
                version.document = as_text(found["PolicyDocument"])
        elif document["Type"] == "AWS::S3::Bucket":
            encryption = parsing.resource_class_from_type("AWS::S3::Bucket")
            scope = (resources._account_id, resources._region_name)
            encryption.update_from_cloudformation_json(resource, name, document, *scope)


def roll_back(resources: Any, keep: bool) -> None:
    """Deletes what was made; moto keeps what is to be retained."""
    if not keep:
        for each in resources._resource_json_map.values():
            each.pop("DeletionPolicy", None)
    resources.delete()
    parsed = resources._parsed_resources  # the others would be made when they are looked at
    resources._resource_json_map = {
        name: each for name, each in resources._resource_json_map.items() if name in parsed
    }


def create(backend: Any, **arguments: Any) -> tuple[str, str]:
    """create_change_set, which takes the stack that is there if it is not made yet."""
    before = [each for each in backend.stacks.values() if each.name == arguments["stack_name"]]
    change_set_id, stack_id = create_change_set(backend, **arguments)
    if arguments["change_set_type"] == "CREATE" and before:
        assert before[0].status == "REVIEW_IN_PROGRESS", "AWS refuses to create it again"
        del backend.stacks[stack_id]
        change_set = backend.change_sets[change_set_id]
        change_set.stack, change_set.stack_id = before[0], before[0].stack_id
    change_set = backend.change_sets[change_set_id]
    if arguments["change_set_type"] == "CREATE":
        omitted = conditional_resources(change_set)
        change_set.changes = [
            change for change in change_set.changes if change.logical_resource_id not in omitted
        ]
    return change_set_id, change_set.stack_id


def conditional_resources(change_set: Any) -> set[str]:
    """The resources of a change set whose condition is false, which AWS does not list."""
    template = change_set.template_dict
    stack = change_set.stack
    resources = parsing.ResourceMap(
        stack.stack_id,
        stack.name,
        change_set.parameters,
        {},
        stack.region_name,
        stack.account_id,
        template,
        None,
    )
    resources.load_parameters()
    resources.load_conditions()
    conditions = {
        name: resource["Condition"]
        for name, resource in template["Resources"].items()
        if "Condition" in resource
    }
    return {
        name
        for name, condition in conditions.items()
        if not resources.lazy_condition_map[condition]
    }


def as_text(document: Any) -> str:
    """A policy as the API keeps it."""
    return document if isinstance(document, str) else json.dumps(document)


def event(stack: Any, name: str, kind: str, status: str, reason: str | None = None) -> None:
    stack.events.append(
        models.Event(stack.stack_id, stack.name, name, name, kind, status, reason, "")
    )


@contextmanager
def repaired() -> Iterator[CloudFormation]:
    """Restores moto, and forgets all stacks, in the end."""
    service = CloudFormation()

    def execute_change_set(response: Any) -> Any:
        keep = not response._get_bool_param("RetainExceptOnCreate", False)
        name = response._get_param("ChangeSetName")
        service.execute(response.cloudformation_backend, name, keep)
        return responses.EmptyResult()

    for known in (parsing.get_model_list, parsing.get_model_map, parsing.get_name_type_map):
        known.cache_clear()
    with (
        patch.object(parsing, "clean_json", clean),
        patch.object(parsing, "parse_and_create_resource", service.create_resource),
        # An update without changes is refused only where no change set is asked for.
        patch.multiple(
            responses.CloudFormationResponse,
            _validate_different_update=MagicMock(),
            execute_change_set=execute_change_set,
        ),
        patch.multiple(
            models.CloudFormationBackend,
            describe_stacks=lambda backend, *names: service.describe(backend, *names),
            create_change_set=create,
        ),
    ):
        yield service
    for regions in models.cloudformation_backends.values():
        for backend in regions.values():  # its own reset would forget all that moto holds
            backend.stacks.clear()
            backend.change_sets.clear()
