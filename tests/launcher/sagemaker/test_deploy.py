"""The stack: deployed, shown, and destroyed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import Mock

import boto3
import click
import pytest
from sagemaker_jobs import LAUNCH, OWN_ROLE

from sm_nanogpt.launcher.sagemaker import deploy
from sm_nanogpt.launcher.sagemaker.stack import last_seen_stack
from sm_nanogpt.launcher.settings import load_settings


@pytest.fixture
def failed(account, cli):
    """A stack whose creation failed, as its role could not be created."""
    account.refuse["Role"] = "no such right"
    ran = cli("infra", "deploy", "--yes", "--kms")
    account.refuse.clear()
    return ran


@pytest.fixture
def question(monkeypatch):
    """Somebody sits at a terminal, and is asked this."""
    confirm = Mock()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("click.confirm", confirm)
    return confirm


def buckets() -> list[str]:
    listed = boto3.client("s3").list_buckets()["Buckets"]
    return [bucket["Name"] for bucket in listed if bucket["Name"].startswith("sm-nanogpt-bucket")]


def stacks() -> list[Any]:
    return list(boto3.client("cloudformation").describe_stacks()["Stacks"])


def statuses() -> list[str]:
    return [stack["StackStatus"] for stack in stacks()]


# -- deploy ----------------------------------------------------------------------------------------


def test_deploy_shows_its_changes_and_repeats_none(account, cli):
    dry = cli("infra", "deploy", "--dry-run")
    assert dry.code == 0
    assert stacks() == []
    ran = cli("infra", "deploy", "--yes").good
    for printed in (dry.err, ran.err):
        assert "add      AWS::IAM::Role Role" in printed
        assert "AWS::KMS::Key" not in printed
    outputs = dict(line.split(":", 1) for line in ran.out.splitlines())
    assert outputs["store"].strip() == f"s3://{buckets()[-1]}/nanogpt"
    assert outputs["role"].strip().startswith("arn:aws:iam::123456789012:role/")
    again = cli("infra", "deploy", "--yes")
    assert again.code == 0
    assert again.out == ran.out
    assert again.err == "stack sm-nanogpt: nothing to change\n"


def test_without_a_terminal_yes_is_needed(account, cli):
    assert cli("infra", "deploy").failed(2, "--yes")
    assert stacks() == []
    cli("infra", "deploy", "--yes")
    assert cli("infra", "destroy").failed(2, "--yes")
    assert cli("infra", "show").code == 0


@pytest.mark.parametrize(
    ("answer", "message"), [([False], "not confirmed"), (click.Abort, "interrupted")]
)
def test_a_declined_deployment_leaves_nothing(account, cli, question, answer, message):
    question.side_effect = answer
    ran = cli("infra", "deploy")
    assert ran.code == 1
    assert ran.err.splitlines()[-1].startswith(message)
    assert stacks() == []


def test_a_failed_stack_tells_why_and_is_not_used(account, failed, cli, short_text_file):
    """The cause is the first resource that failed, and no cancellation of another one."""
    cause = "ROLLBACK_COMPLETE: Role: no such right"
    assert failed.failed(1, f"stack sm-nanogpt is {cause};")
    shown, launched = cli("infra", "show"), cli(LAUNCH, "--data", short_text_file)
    assert cause in shown.err
    assert "ROLLBACK_COMPLETE" in launched.error
    for ran in (shown, launched):
        assert ran.failed(1, "`sm-nanogpt infra deploy`")
    account.set_status(stacks()[0]["StackId"], "ROLLBACK_IN_PROGRESS")
    assert "ROLLBACK_IN_PROGRESS: Role: no such right" in cli("infra", "show").err


def test_a_failed_deployment_leaves_no_bucket_or_key(account, cli):
    kms, buckets_before = boto3.client("kms"), buckets()
    keys = kms.list_keys()["Keys"]
    account.refuse["Role"] = "no"
    assert cli("infra", "deploy", "--yes", "--kms").code == 1
    name = stacks()[0]["StackId"]
    events = boto3.client("cloudformation").describe_stack_events(StackName=name)["StackEvents"]
    resources = {
        each["LogicalResourceId"] for each in events if "COMPLETE" in each["ResourceStatus"]
    }
    assert "Key" in resources
    assert buckets() == buckets_before
    assert kms.list_keys()["Keys"] == keys


@pytest.mark.parametrize(
    ("arguments", "answers", "code", "status"),
    [
        (["--dry-run"], [], 0, "ROLLBACK_COMPLETE"),
        ([], [False], 1, "ROLLBACK_COMPLETE"),
        ([], [True, True], 0, "CREATE_COMPLETE"),
        (["--yes"], [], 0, "CREATE_COMPLETE"),
    ],
)
def test_a_failed_stack_is_replaced_if_agreed(
    failed, cli, question, arguments, answers, code, status
):
    question.side_effect = answers
    ran = cli("infra", "deploy", arguments)
    assert ran.code == code
    assert "ROLLBACK_COMPLETE" in ran.err
    assert statuses() == [status]
    assert question.call_count == len(answers)
    prompt = "Delete stack sm-nanogpt in account 123456789012, us-east-1?"
    assert not answers or question.call_args_list[0].args[0] == prompt


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("deploy --yes", "ROLLBACK_COMPLETE"),  # which it would replace
        ("destroy --yes", "CREATE_COMPLETE"),
        ("show", "CREATE_COMPLETE"),
    ],
)
def test_another_projects_stack_is_left_alone(account, cli, command, status):
    template = json.dumps({"Resources": {"Theirs": {"Type": "AWS::S3::Bucket"}}})
    client = boto3.client("cloudformation")
    created = client.create_stack(StackName="theirs", TemplateBody=template)
    account.set_status(created["StackId"], status)
    ran = cli("--stack", "theirs", "infra", command.split())
    assert ran.failed(2, f"theirs is {status} and does not belong", "--stack")
    assert statuses() == [status]


def test_an_interrupted_deployment_continues(account, cli, monkeypatch):
    account.hangs = True
    monkeypatch.setattr("botocore.waiter.time.sleep", Mock(side_effect=KeyboardInterrupt))
    ran = cli("infra", "deploy", "--yes")
    assert ran.code == 1
    assert "`sm-nanogpt infra show`" in ran.err
    assert "is CREATE_IN_PROGRESS" in cli("infra", "show").error


@pytest.fixture
def pending(account):
    """The id of a change set that somebody else has not executed yet."""
    change_set = boto3.client("cloudformation").create_change_set(
        StackName="sm-nanogpt",
        ChangeSetName="pending",
        ChangeSetType="CREATE",
        TemplateBody=deploy.TEMPLATE.read_text(),
        Capabilities=["CAPABILITY_IAM"],
    )
    return str(change_set["Id"])


def test_a_leftover_change_set_does_not_block_deploy(pending, cli):
    assert "there is no stack" in cli("infra", "show").error
    assert cli("infra", "deploy", "--yes").code == 0
    assert len(stacks()) == 1


def test_a_declined_plan_leaves_a_stack_that_others_made(account, pending):
    deployment = deploy.Deployment(load_settings())
    planned = deployment.plan()
    assert planned is not None
    boto3.client("cloudformation").execute_change_set(ChangeSetName=pending)
    deployment.discard(planned)
    assert statuses() == ["CREATE_COMPLETE"]


def test_two_stacks_have_nothing_in_common(deployed, cli):
    ran = cli("--stack", "other", "infra", "deploy", "--yes").good
    assert "next: sm-nanogpt --stack other upload-data" in ran.err
    other = json.loads(cli("--stack", "other", "infra", "show", "--json").out)
    assert not {other["store"], other["role"], other["policy"]} & set(asdict(deployed).values())


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ("infra deploy --yes", "--region"),
        ("--stack my_stack infra show", "--stack my_stack: must match"),
        ("--profile nope infra destroy", "profile (nope)"),  # before it asks for --yes
    ],
)
def test_infra_refuses_unusable_settings(account, cli, monkeypatch, arguments, fact):
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert cli(arguments.split()).failed(2, fact)


def test_a_role_keeps_its_boundary_and_path(account, cli):
    boundary = "arn:aws:iam::123456789012:policy/bound"
    for arguments in (["--permissions-boundary", boundary, "--role-path", "/teams/ml/"], ["--vpc"]):
        assert cli("infra", "deploy", "--yes", arguments).code == 0
        role = json.loads(cli("infra", "show", "--json").out)["role"]
        assert ":role/teams/ml/" in role
        deployed_role = boto3.client("iam").get_role(RoleName=role.rpartition("/")[2])["Role"]
        assert deployed_role["PermissionsBoundary"]["PermissionsBoundaryArn"] == boundary


# -- show and destroy ------------------------------------------------------------------------------


def test_without_a_stack_show_fails(account, cli):
    assert cli("infra", "show").failed(1, "`sm-nanogpt infra deploy`")
    ran = cli("infra", "destroy", "--yes")
    assert ran.code == 0
    assert ran.out == ""
    assert "nothing to delete" in ran.err


@pytest.mark.parametrize(
    ("status", "command", "remedy"),
    [
        ("UPDATE_IN_PROGRESS", "destroy --yes", "try again"),
        ("DELETE_IN_PROGRESS", "show", "try again"),
        ("DELETE_FAILED", "show", "`sm-nanogpt infra deploy`"),
        ("UPDATE_ROLLBACK_FAILED", "deploy --yes", "continue-update-rollback --stack-name"),
    ],
)
def test_an_unusable_stack_names_a_remedy(account, deployed, cli, status, command, remedy):
    account.set_status(stacks()[0]["StackId"], status)
    ran = cli("infra", command.split())
    assert ran.failed(1, f"stack sm-nanogpt is {status}", remedy)


def test_show_works_if_events_cannot_be_read(account, emulator, deployed, cli):
    account.set_status(stacks()[0]["StackId"], "UPDATE_ROLLBACK_COMPLETE")
    emulator.refuse["DescribeStackEvents"] = ("AccessDenied", "not you")
    ran = cli("infra", "show").good
    assert deployed.store in ran.out
    assert "stack sm-nanogpt is UPDATE_ROLLBACK_COMPLETE\n" in ran.err


@pytest.fixture
def user(deployed):
    """A user who has the launcher policy."""
    iam = boto3.client("iam")
    iam.create_user(UserName="ci")
    iam.attach_user_policy(UserName="ci", PolicyArn=deployed.policy)
    yield
    for policy in iam.list_attached_user_policies(UserName="ci")["AttachedPolicies"]:
        iam.detach_user_policy(UserName="ci", PolicyArn=policy["PolicyArn"])
    iam.delete_user(UserName="ci")


def test_destroy_keeps_the_bucket_with_its_texts(deployed, user, cli, short_text_file):
    uri = cli("upload-data", short_text_file).out.strip()
    ran = cli("infra", "destroy", "--yes")
    bucket = deployed.store.split("/")[2]
    assert ran.code == 0
    for message in (
        f"keep     the bucket; to delete it: aws s3 rb --force s3://{bucket}",
        "detached the launcher policy from user ci",
    ):
        assert message in ran.err
    assert cli("infra", "show").code == 1
    assert last_seen_stack(load_settings(), "us-east-1") is None
    objects = boto3.client("s3").list_objects_v2(Bucket=bucket)["Contents"]
    assert any(uri.endswith(each["Key"].rpartition("/")[0]) for each in objects)
    again = cli("infra", "deploy", "--yes")
    assert again.code == 0
    assert deployed.store not in again.out


def test_destroy_names_users_and_running_jobs(
    deployed, user, emulator, cli, short_text_file, monkeypatch, question
):
    monkeypatch.setattr("sagemaker_service.LOOKS", math.inf)
    job_id = cli(LAUNCH, "--data", short_text_file).out.strip()
    job = emulator.sagemaker.jobs[job_id]
    role = job.request["RoleArn"]
    for name, its_role, secondary in (
        ("of-another-role", f"{role}-2", job.secondary),
        ("ended-already", role, "Completed"),
    ):
        checkpoints = job.request["CheckpointConfig"]["S3Uri"].replace(job_id, name)
        changes = {"TrainingJobName": name, "CheckpointConfig": {"S3Uri": checkpoints}}
        request = {**job.request, **changes, "RoleArn": its_role}
        emulator.sagemaker.jobs[name] = replace(job, request=request, secondary=secondary)
    question.side_effect = click.Abort
    ran = cli("infra", "destroy")
    assert ran.code == 1
    assert "detach   the launcher policy from user ci" in ran.err
    running = [line for line in ran.err.splitlines() if " is running" in line]
    assert [line.split()[2] for line in running] == [job_id], ran.err
    assert cli("infra", "show").code == 0
    assert boto3.client("iam").list_attached_user_policies(UserName="ci")["AttachedPolicies"]


def test_destroy_ends_if_the_stack_is_already_deleted(deployed):
    deployment = deploy.Deployment(load_settings())
    removal = deployment.removal()
    assert removal is not None
    boto3.client("cloudformation").delete_stack(StackName=removal.stack_id)
    deployment.destroy(removal)
    assert last_seen_stack(load_settings(), "us-east-1") is None


def test_the_stacks_key_stays_and_encrypts_the_model(account, cli, short_text_file):
    assert "kms key:" in cli("infra", "deploy", "--yes", "--kms").out
    again = cli("infra", "deploy", "--yes")
    assert "nothing to change" in again.err
    assert "kms key:" in again.out
    key = json.loads(cli("infra", "show", "--json").out)["kms_key"]
    for arguments, used in (((), key), (("--kms-key", "mine"), "mine")):
        ran = cli(LAUNCH, "--data", short_text_file, "--dry-run", arguments)
        assert json.loads(ran.out)["OutputDataConfig"]["KmsKeyId"] == used


def test_a_subnet_needs_a_role_that_may_join_a_vpc(account, cli, short_text_file):
    subnet = ("--subnet", "subnet-1", "--security-group", "sg-1")
    launch = (*LAUNCH, "--data", str(short_text_file), *subnet)
    cli("infra", "deploy", "--yes", "--kms")
    for arguments in ((), ("--dry-run",)):
        assert cli(launch, arguments).failed(2, "VPC; allow it with `sm-nanogpt infra")
    assert cli("--role", OWN_ROLE, launch, "--dry-run").code == 0
    ran = cli("infra", "deploy", "--yes", "--vpc")
    assert "kms key:" in ran.out
    assert "vpc:" in ran.out
    request = json.loads(cli(launch, "--dry-run").out)
    assert request["VpcConfig"]["Subnets"] == ["subnet-1"]
    assert "vpc:" in cli("infra", "deploy", "--yes").out  # it stays so
