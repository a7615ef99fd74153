"""The template of infra/: what it allows, and what the launcher needs."""

from __future__ import annotations

import sys
from typing import Any

import boto3
import pytest
from sagemaker_jobs import deploy_stack

from launcher.sagemaker import deploy
from launcher.sagemaker.stack import DESCRIPTION


def test_the_template_matches_the_launcher():
    from cfnlint import decode

    template: Any = decode.decode(str(deploy.TEMPLATE))[0]
    assert template["Description"].startswith(DESCRIPTION)
    resources = template["Resources"].items()
    retained = {name for name, each in resources if each.get("DeletionPolicy") == "Retain"}
    assert retained == {"Bucket", "BucketPolicy", "Key"}  # which `destroy` says it keeps


def policy_of(role: str) -> Any:
    """What a role may do."""
    names = dict(RoleName=role.rpartition("/")[2], PolicyName="training-job")
    return scanned(boto3.client("iam").get_role_policy(**names)["PolicyDocument"])


def scanned(policy: dict[str, Any]) -> Any:
    if sys.version_info >= (3, 15):
        pytest.skip("cloudsplaining needs orjson, which has no wheel for Python 3.15")
    from cloudsplaining.scan.policy_document import PolicyDocument

    return PolicyDocument(policy)


def wide(document: Any) -> set[str]:
    return {
        action
        for statement in document.statements
        if "*" in statement.resources
        for action in statement.actions
    }


def test_a_role_for_a_vpc_has_the_required_actions(account):
    role = deploy_stack(vpc=True).role
    network = {action for action in wide(policy_of(role)) if "ec2:" in action}
    interface = ("NetworkInterface", "NetworkInterfacePermission")
    described = ("DhcpOptions", "NetworkInterfaces", "SecurityGroups", "Subnets", "Vpcs")
    assert network == {
        *(f"ec2:{verb}{noun}" for verb in ("Create", "Delete") for noun in interface),
        *(f"ec2:Describe{noun}" for noun in described),
    }


def test_the_policies_are_narrow(account):
    """The scanner sees no weakness; only actions without resources apply to everything; and a role
    deletes only checkpoints."""
    stack = deploy_stack(kms=True)
    version = boto3.client("iam").get_policy_version(PolicyArn=stack.policy, VersionId="v1")
    launcher = scanned(version["PolicyVersion"]["Document"])
    role = policy_of(stack.role)
    assert wide(role) == {"cloudwatch:PutMetricData", "ecr:GetAuthorizationToken"}
    wildcards = {"pricing:GetProducts", "sagemaker:Search", "servicequotas:ListServiceQuotas"}
    assert wide(launcher) == wildcards
    resources = [
        resource
        for statement in role.statements
        if any(action in ("s3:DeleteObject", "s3:*") for action in statement.actions)
        for resource in statement.resources
    ]
    assert [place.partition("/")[2] for place in resources] == ["nanogpt/checkpoints/*"]
    for document in (role, launcher):
        weaknesses = (
            document.contains_statement_using_not_action,
            document.allows_privilege_escalation,
            document.allows_data_exfiltration_actions,
            document.permissions_management_without_constraints,
            document.write_actions_without_constraints,
            document.infrastructure_modification,
            document.service_wildcard,
        )
        assert not any(weaknesses), weaknesses
    # A pull of an image begins with a login, which gives a token.
    assert role.credentials_exposure == ["ecr:GetAuthorizationToken"]
    assert launcher.credentials_exposure == []
