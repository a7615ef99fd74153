"""The stack: deployed, found by the other commands, destroyed; and what the template says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import boto3
import click
import cloudformation_service
import pytest
from cfnlint import decode
from cloudformation_service import CloudFormation
from cloudsplaining.scan.policy_document import PolicyDocument
from launching import Ran

from launcher import infra
from launcher.infra import Stack
from launcher.settings import load_settings

NOBODY = "http://127.0.0.1:9"
TEMPLATE: Any = decode.decode(str(infra.TEMPLATE))[0]

Cli = Callable[..., Ran]


@pytest.fixture
def account(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudFormation]:
    """CloudFormation in an account without a stack, and a person who has set neither store nor
    role."""
    monkeypatch.delenv("SM_NANOGPT_STORE")
    monkeypatch.setattr(infra, "POLL_SECONDS", 0.01)
    with cloudformation_service.repaired() as service:
        yield service


@pytest.fixture
def deployed(account: CloudFormation) -> Stack:
    """A stack that is there."""
    deployment = infra.Deployment(load_settings())
    change_set = deployment.plan()
    assert change_set is not None
    stack = deployment.execute(change_set)
    account.described = 0
    return stack


def buckets() -> list[str]:
    found = boto3.client("s3").list_buckets()["Buckets"]
    return [bucket["Name"] for bucket in found if bucket["Name"].startswith("sm-nanogpt-bucket")]


# -- deploy ----------------------------------------------------------------------------------------


def test_a_deployment_shows_the_changes_and_prints_the_outputs(
    account: CloudFormation, cli: Cli
) -> None:
    ran = cli("infra", "deploy", "--yes")
    assert ran.code == 0
    assert "add      AWS::IAM::Role Role" in ran.err
    assert "CREATE_COMPLETE      AWS::S3::Bucket Bucket" in ran.err
    outputs = dict(line.split(":", 1) for line in ran.out.splitlines())
    assert outputs["store"].strip() == f"s3://{buckets()[-1]}/nanogpt"
    assert outputs["role"].strip().startswith("arn:aws:iam::123456789012:role/")


def test_a_second_deployment_changes_nothing(deployed: Stack, cli: Cli) -> None:
    ran = cli("infra", "deploy", "--yes")
    assert (ran.code, ran.err) == (0, "stack sm-nanogpt: nothing to change\n")
    assert deployed.store in ran.out


def test_a_dry_run_leaves_nothing_behind(account: CloudFormation, cli: Cli) -> None:
    ran = cli("infra", "deploy", "--dry-run")
    assert ran.code == 0
    assert "add      AWS::S3::Bucket Bucket" in ran.err
    assert boto3.client("cloudformation").describe_stacks()["Stacks"] == []


def test_without_a_terminal_a_deployment_has_to_be_agreed_to_beforehand(
    account: CloudFormation, cli: Cli
) -> None:
    ran = cli("infra", "deploy")
    assert ran.code == 2
    assert "--yes" in ran.error
    assert account.described == 0


@pytest.mark.parametrize("answer", [click.Abort, KeyboardInterrupt])
def test_a_deployment_that_is_not_agreed_to_leaves_nothing_behind(
    account: CloudFormation, cli: Cli, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    def confirm(*words: Any, **options: Any) -> None:
        raise answer

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("click.confirm", confirm)
    ran = cli("infra", "deploy")
    assert (ran.code, ran.err.splitlines()[-1]) == (1, "interrupted")
    assert boto3.client("cloudformation").describe_stacks()["Stacks"] == []


def test_a_failed_deployment_names_the_resource_that_failed_first(
    account: CloudFormation, cli: Cli
) -> None:
    account.refuse["Role"] = "API: iam:CreateRole User: me is not authorized"
    ran = cli("infra", "deploy", "--yes")
    assert ran.code == 1
    assert ran.error == (
        "stack sm-nanogpt is ROLLBACK_COMPLETE: Role: API: iam:CreateRole User: me is not"
        " authorized; put that right and deploy again"
    )


def test_what_a_failed_deployment_left_is_deleted_by_the_next(
    account: CloudFormation, cli: Cli
) -> None:
    account.refuse["Role"] = "no"
    cli("infra", "deploy", "--yes")
    account.refuse.clear()
    ran = cli("infra", "deploy", "--yes")
    assert ran.code == 0
    assert "ROLLBACK_COMPLETE and empty; deleting it first" in ran.err


def test_a_change_set_that_somebody_left_is_in_nobodys_way(
    account: CloudFormation, cli: Cli
) -> None:
    boto3.client("cloudformation").create_change_set(
        StackName="sm-nanogpt",
        ChangeSetName="left",
        ChangeSetType="CREATE",
        TemplateBody=infra.TEMPLATE.read_text(),
        Capabilities=["CAPABILITY_IAM"],
    )
    ran = cli("infra", "deploy", "--yes")
    assert ran.code == 0
    assert "REVIEW_IN_PROGRESS and empty; deleting it first" in ran.err


@pytest.mark.parametrize("command", ["deploy", "destroy"])
def test_a_stack_of_somebody_else_is_left_alone(
    account: CloudFormation, cli: Cli, command: str
) -> None:
    boto3.client("cloudformation").create_stack(
        StackName="theirs",
        TemplateBody=json.dumps({"Resources": {"Theirs": {"Type": "AWS::S3::Bucket"}}}),
    )
    ran = cli("infra", command, "--stack", "theirs", "--yes")
    assert ran.code == 2
    assert "without sm-nanogpt's outputs" in ran.error


def test_a_key_once_made_stays(account: CloudFormation, cli: Cli) -> None:
    assert "kms key:" in cli("infra", "deploy", "--yes", "--kms").out
    ran = cli("infra", "deploy", "--yes")
    assert "nothing to change" in ran.err
    assert "kms key:" in ran.out


def test_two_stacks_have_nothing_in_common(deployed: Stack, cli: Cli) -> None:
    ran = cli("infra", "deploy", "--stack", "other", "--yes")
    assert ran.code == 0
    assert "SM_NANOGPT_STACK=other" in ran.err
    other = json.loads(cli("infra", "show", "--stack", "other", "--json").out)
    assert not {other["store"], other["role"], other["policy"]} & set(asdict(deployed).values())


def test_a_stack_name_that_aws_would_refuse_is_refused_here(home: Path, cli: Cli) -> None:
    ran = cli("infra", "show", "--stack", "my_stack")
    assert ran.code == 2
    assert "letters, digits and dashes" in ran.error


def test_a_region_has_to_be_known(
    account: CloudFormation, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    ran = cli("infra", "deploy", "--yes")
    assert ran.code == 2
    assert "--region" in ran.error


# -- show and destroy ------------------------------------------------------------------------------


def test_without_a_stack_show_says_how_to_make_one(account: CloudFormation, cli: Cli) -> None:
    ran = cli("infra", "show")
    assert ran.code == 1
    assert "`sm-nanogpt infra deploy`" in ran.error


def test_the_bucket_and_its_texts_outlive_the_stack(
    deployed: Stack, cli: Cli, text_file: Path
) -> None:
    uri = cli("upload-data", str(text_file)).out.strip()
    ran = cli("infra", "destroy", "--yes")
    bucket = deployed.store.split("/")[2]
    assert ran.code == 0
    assert f"keep     AWS::S3::Bucket {bucket}" in ran.err
    assert "remove   AWS::IAM::Role" in ran.err
    assert f"aws s3 rb --force s3://{bucket}" in ran.err
    assert cli("infra", "show").code == 1
    objects = boto3.client("s3").list_objects_v2(Bucket=bucket)["Contents"]
    assert any(uri.endswith(each["Key"].rpartition("/")[0]) for each in objects)


def test_the_policy_is_taken_from_those_who_have_it_when_the_stack_goes(
    deployed: Stack, cli: Cli
) -> None:
    iam = boto3.client("iam")
    iam.create_user(UserName="ci")
    iam.attach_user_policy(UserName="ci", PolicyArn=deployed.policy)
    ran = cli("infra", "destroy", "--yes")
    assert ran.code == 0
    assert "the launcher policy is taken from user ci" in ran.err
    iam.delete_user(UserName="ci")


def test_what_is_not_there_need_not_be_destroyed(account: CloudFormation, cli: Cli) -> None:
    ran = cli("infra", "destroy", "--yes")
    assert (ran.code, ran.out) == (0, "")
    assert "nothing to delete" in ran.err


def test_without_a_terminal_a_deletion_has_to_be_agreed_to_beforehand(
    deployed: Stack, cli: Cli
) -> None:
    assert cli("infra", "destroy").code == 2
    assert cli("infra", "show").code == 0


def test_a_new_stack_does_not_meet_the_bucket_of_the_old_one(deployed: Stack, cli: Cli) -> None:
    cli("infra", "destroy", "--yes")
    ran = cli("infra", "deploy", "--yes")
    assert ran.code == 0
    assert deployed.store not in ran.out


# -- found by the other commands -------------------------------------------------------------------


def test_an_upload_goes_to_the_stacks_store(
    account: CloudFormation, deployed: Stack, cli: Cli, text_file: Path
) -> None:
    ran = cli("upload-data", str(text_file))
    assert ran.out.startswith(deployed.store + "/data/")
    assert f"store: {deployed.store} (stack sm-nanogpt)" in ran.err
    assert account.described == 1


def test_an_upload_stays_here_without_a_stack(
    account: CloudFormation, cli: Cli, text_file: Path
) -> None:
    assert cli("upload-data", str(text_file)).out.startswith("file:")


def test_an_upload_stays_here_and_says_so_where_nobody_can_be_asked(
    account: CloudFormation, cli: Cli, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOBODY)
    ran = cli("upload-data", str(text_file))
    assert (ran.code, ran.out[:5]) == (0, "file:")
    assert "no stack can be asked for a store" in ran.err


def test_a_launch_takes_store_and_role_from_the_stack_in_one_call(
    account: CloudFormation, deployed: Stack
) -> None:
    settings = infra.with_stack(load_settings())
    assert (settings.store, settings.role) == (deployed.store, deployed.role)
    assert account.described == 1


def test_a_dry_run_takes_them_as_they_were_last_seen_and_asks_nobody(
    deployed: Stack, cli: Cli, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOBODY)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    ran = cli("launch", "--dry-run", "--data", str(text_file))
    request = json.loads(ran.out)
    assert request["RoleArn"] == deployed.role
    assert request["OutputDataConfig"]["S3OutputPath"].startswith(deployed.store)
    assert "as last seen" in ran.err


def test_a_destroyed_stack_is_forgotten(deployed: Stack, cli: Cli) -> None:
    cli("infra", "destroy", "--yes")
    assert infra.remembered(load_settings(), "us-east-1") is None


def test_a_memory_that_cannot_be_read_is_none(home: Path) -> None:
    home.mkdir()
    (home / "stacks.json").write_text("[1")
    assert infra.remembered(load_settings(), "us-east-1") is None


def test_the_stacks_key_encrypts_the_model(
    account: CloudFormation, cli: Cli, text_file: Path
) -> None:
    cli("infra", "deploy", "--yes", "--kms")
    key = json.loads(cli("infra", "show", "--json").out)["kms_key"]
    request = json.loads(cli("launch", "--dry-run", "--data", str(text_file)).out)
    assert request["OutputDataConfig"]["KmsKeyId"] == key
    request = json.loads(
        cli("launch", "--dry-run", "--data", str(text_file), "--kms-key", "mine").out
    )
    assert request["OutputDataConfig"]["KmsKeyId"] == "mine"


def test_who_names_store_and_role_asks_nobody(
    account: CloudFormation, deployed: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM_NANOGPT_STORE", "s3://mine/prefix")
    settings = load_settings(role="arn:aws:iam::123456789012:role/mine")
    assert infra.with_stack(settings) == settings
    assert account.described == 0


def test_a_role_that_is_named_goes_over_the_stacks(deployed: Stack) -> None:
    role = "arn:aws:iam::123456789012:role/mine"
    settings = infra.with_stack(load_settings(role=role))
    assert (settings.store, settings.role) == (deployed.store, role)


def test_the_stacks_role_is_not_taken_for_a_store_that_it_cannot_read(
    deployed: Stack, cli: Cli, text_file: Path
) -> None:
    ran = cli("--store", "s3://mine/prefix", "launch", "--data", str(text_file))
    assert ran.code == 2
    assert f"it reaches {deployed.store} alone" in ran.err
    assert "no execution role" in ran.error


@pytest.mark.parametrize("way", ["words", "environment", "file"])
def test_the_stacks_name_is_a_setting_like_the_others(
    deployed: Stack,
    cli: Cli,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    (home / "config.toml").write_text('stack = "by-file"\n')
    if way != "file":
        monkeypatch.setenv("SM_NANOGPT_STACK", "by-environment")
    words = ("--stack", "by-words") if way == "words" else ()
    assert f"no stack by-{way} in us-east-1" in cli(*words, "infra", "show").error


def test_a_stack_that_is_not_whole_is_an_error_of_the_launch(
    account: CloudFormation, cli: Cli, text_file: Path
) -> None:
    account.refuse["Role"] = "no"
    cli("infra", "deploy", "--yes")
    ran = cli("launch", "--data", str(text_file))
    assert ran.code == 1
    assert "ROLLBACK_COMPLETE" in ran.error
    assert "`sm-nanogpt infra deploy`" in ran.error


def test_a_local_launch_without_text_in_the_stacks_store_asks_nobody(
    deployed: Stack, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOBODY)
    ran = cli("launch", "--instance", "local")
    assert ran.code == 2
    assert "nothing was uploaded" in ran.error


def test_a_local_launch_takes_the_last_upload_even_if_it_went_to_the_stacks_store(
    deployed: Stack, text_file: Path, cli: Cli
) -> None:
    from launcher.backends import last_data

    uri = cli("upload-data", str(text_file)).out.strip()
    settings = load_settings()
    assert last_data(settings, settings, dry_run=False) == uri


# -- the template ----------------------------------------------------------------------------------


def test_what_destroy_says_is_kept_is_what_the_template_retains() -> None:
    resources = TEMPLATE["Resources"].items()
    assert {name for name, each in resources if each.get("DeletionPolicy") == "Retain"} == set(
        infra.KEPT
    )


@pytest.fixture
def documents(account: CloudFormation) -> dict[str, PolicyDocument]:
    """What the role and the launchers may do, once deployed with a key."""
    deployment = infra.Deployment(load_settings())
    change_set = deployment.plan(kms=True)
    assert change_set is not None
    stack = deployment.execute(change_set)
    iam = boto3.client("iam")
    of_role = dict(RoleName=stack.role.rpartition("/")[2], PolicyName="training-job")
    of_launcher = dict(PolicyArn=stack.policy, VersionId="v1")
    return {
        "role": PolicyDocument(iam.get_role_policy(**of_role)["PolicyDocument"]),
        "launcher": PolicyDocument(
            iam.get_policy_version(**of_launcher)["PolicyVersion"]["Document"]
        ),
    }


def test_a_permission_on_everything_is_only_for_what_knows_no_resource_of_ours(
    documents: dict[str, PolicyDocument],
) -> None:
    assert wide(documents["role"]) == {"cloudwatch:PutMetricData", "ecr:GetAuthorizationToken"}
    assert wide(documents["launcher"]) == {
        "pricing:GetProducts",
        "sagemaker:Search",
        "servicequotas:GetServiceQuota",
        "servicequotas:ListServiceQuotas",
    }


def wide(document: PolicyDocument) -> set[str]:
    return {
        action
        for statement in document.statements
        if "*" in statement.resources
        for action in statement.actions
    }


def test_no_policy_holds_what_an_attacker_looks_for(documents: dict[str, PolicyDocument]) -> None:
    for name, document in documents.items():
        assert not document.contains_statement_using_not_action
        assert not document.allows_privilege_escalation
        assert not document.allows_data_exfiltration_actions
        assert not document.permissions_management_without_constraints
        assert not document.write_actions_without_constraints
        assert not document.infrastructure_modification
        assert not document.service_wildcard
        # A pull of an image begins with a login, which gives a token.
        login = ["ecr:GetAuthorizationToken"] if name == "role" else []
        assert document.credentials_exposure == login
