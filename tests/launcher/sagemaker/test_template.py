"""The template of infra/: what it allows, and what the launcher needs."""

from __future__ import annotations

import sys
from typing import Any

import boto3
import pytest
from sagemaker_jobs import deploy_stack

from sm_nanogpt.launcher.sagemaker import deploy
from sm_nanogpt.launcher.sagemaker.stack import DESCRIPTION_BEGINNING


def test_the_template_matches_the_launcher():
    from cfnlint import decode

    template: Any = decode.decode(str(deploy.TEMPLATE))[0]
    assert template["Description"].startswith(DESCRIPTION_BEGINNING)
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
    actions = set[str]()
    for statement in document.statements:
        if "*" in statement.resources:
            actions.update(statement.actions)
    return actions


def test_a_role_for_a_vpc_has_the_required_actions(account):
    role = deploy_stack(vpc=True).role
    network = {action for action in wide(policy_of(role)) if "ec2:" in action}
    assert network == {
        "ec2:CreateNetworkInterface",
        "ec2:CreateNetworkInterfacePermission",
        "ec2:DeleteNetworkInterface",
        "ec2:DeleteNetworkInterfacePermission",
        "ec2:DescribeDhcpOptions",
        "ec2:DescribeNetworkInterfaces",
        "ec2:DescribeSecurityGroups",
        "ec2:DescribeSubnets",
        "ec2:DescribeVpcs",
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
    deletable = []
    for statement in role.statements:
        if not {"s3:DeleteObject", "s3:*"}.isdisjoint(statement.actions):
            deletable += statement.resources
    assert [resource.partition("/")[2] for resource in deletable] == ["nanogpt/checkpoints/*"]
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
