"""The stack: deployed, found by the other commands, destroyed; and what the template says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import Mock

import boto3
import click
import cloudformation_service
import pytest
from cfnlint import decode
from cloudsplaining.scan.policy_document import PolicyDocument
from launching import Ran

from launcher.errors import ServiceError
from launcher.sagemaker import deploy
from launcher.sagemaker.stack import DESCRIPTION, remembered, with_stack
from launcher.settings import load_settings
from launcher.text.corpus import last_upload

NOBODY = "http://127.0.0.1:9"
TEMPLATE: Any = decode.decode(str(deploy.TEMPLATE))[0]

Cli = Callable[..., Ran]


@pytest.fixture
def account(s3, monkeypatch):
    """CloudFormation in an account without a stack, and a person who has set neither store nor
    role."""
    monkeypatch.delenv("SM_NANOGPT_STORE")
    monkeypatch.setitem(deploy.WAIT, "Delay", 0.01)
    with cloudformation_service.repaired() as service:
        yield service


@pytest.fixture
def deployed(account):
    """A stack that is there."""
    deployment = deploy.Deployment(load_settings())
    change_set = deployment.plan()
    assert change_set is not None
    stack = deployment.execute(change_set)
    account.described = 0
    return stack


def buckets() -> list[str]:
    found = boto3.client("s3").list_buckets()["Buckets"]
    return [bucket["Name"] for bucket in found if bucket["Name"].startswith("sm-nanogpt-bucket")]


# -- deploy ----------------------------------------------------------------------------------------


def test_deploy_shows_the_changes_and_prints_the_outputs(account, cli):
    ran = cli("infra", "deploy", "--yes")
    assert ran.code == 0
    assert "add      AWS::IAM::Role Role" in ran.err
    assert "waiting for stack sm-nanogpt" in ran.err
    outputs = dict(line.split(":", 1) for line in ran.out.splitlines())
    assert outputs["store"].strip() == f"s3://{buckets()[-1]}/nanogpt"
    assert outputs["role"].strip().startswith("arn:aws:iam::123456789012:role/")


def test_a_second_deployment_changes_nothing(deployed, cli):
    ran = cli("infra", "deploy", "--yes")
    assert (ran.code, ran.err) == (0, "stack sm-nanogpt: nothing to change\n")
    assert deployed.store in ran.out


def test_a_dry_run_leaves_nothing_behind(account, cli):
    ran = cli("infra", "deploy", "--dry-run")
    assert ran.code == 0
    assert "add      AWS::S3::Bucket Bucket" in ran.err
    assert boto3.client("cloudformation").describe_stacks()["Stacks"] == []


def test_deploy_without_a_terminal_requires_yes(account, cli):
    ran = cli("infra", "deploy")
    assert ran.code == 2
    assert "--yes" in ran.error
    assert account.described == 0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([False], "not confirmed; nothing was changed"),
        (click.Abort, "interrupted"),
        (KeyboardInterrupt, "interrupted"),
    ],
)
def test_a_declined_deployment_leaves_nothing(account, cli, monkeypatch, answer, said):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("click.confirm", Mock(side_effect=answer))
    ran = cli("infra", "deploy")
    assert (ran.code, ran.err.splitlines()[-1]) == (1, said)
    assert boto3.client("cloudformation").describe_stacks()["Stacks"] == []


def test_an_outage_after_the_answer_does_not_hide_the_answer(account, cli, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("click.confirm", Mock(return_value=False))
    outage = Mock(side_effect=ServiceError("DeleteChangeSet: no connection"))
    monkeypatch.setattr(deploy.Deployment, "discard", outage)
    said = cli("infra", "deploy").err.splitlines()
    assert said[-2:] == [
        "not confirmed; nothing was changed",
        "could not delete the change set: DeleteChangeSet: no connection",
    ]


def test_a_failed_deployment_names_the_first_failed_resource(account, cli):
    account.refuse["Role"] = "API: iam:CreateRole User: me is not authorized"
    ran = cli("infra", "deploy", "--yes")
    assert ran.code == 1
    assert ran.error == (
        "stack sm-nanogpt is ROLLBACK_COMPLETE: Role: API: iam:CreateRole User: me is not"
        " authorized; correct that and deploy again"
    )


def test_the_next_deployment_deletes_a_failed_stack(account, cli):
    account.refuse["Role"] = "no"
    cli("infra", "deploy", "--yes")
    account.refuse.clear()
    ran = cli("infra", "deploy", "--yes")
    assert ran.code == 0
    assert "ROLLBACK_COMPLETE; it has to be deleted first" in ran.err


def test_a_failed_deployment_leaves_neither_bucket_nor_key(account, cli):
    before = buckets(), boto3.client("kms").list_keys()["Keys"]
    account.refuse["Role"] = "no"
    ran = cli("infra", "deploy", "--yes", "--kms")
    assert ran.code == 1
    events = boto3.client("cloudformation").describe_stack_events(StackName=stack_id())
    made = [(e["LogicalResourceId"], e["ResourceStatus"]) for e in events["StackEvents"]]
    assert ("Key", "CREATE_COMPLETE") in made
    assert (buckets(), boto3.client("kms").list_keys()["Keys"]) == before


def test_without_retain_except_on_create_a_bucket_remains(account):
    before = buckets()
    account.refuse["Role"] = "no"
    change_set = deploy.Deployment(load_settings()).plan()
    assert change_set is not None
    boto3.client("cloudformation").execute_change_set(ChangeSetName=change_set.id)
    assert len(buckets()) == len(before) + 1


@pytest.mark.parametrize("agreed", [True, False])
def test_a_failed_stack_is_deleted_only_after_agreement(account, cli, monkeypatch, agreed):
    account.refuse["Role"] = "no"
    cli("infra", "deploy", "--yes")
    account.refuse.clear()
    confirm = Mock(return_value=agreed)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("click.confirm", confirm)
    assert cli("infra", "deploy").code == (0 if agreed else 1)
    assert confirm.call_args_list[0].args == (
        "Delete stack sm-nanogpt in account 123456789012, us-east-1?",
    )
    (stack,) = boto3.client("cloudformation").describe_stacks()["Stacks"]
    assert stack["StackStatus"] == ("CREATE_COMPLETE" if agreed else "ROLLBACK_COMPLETE")


def test_a_dry_run_of_deploy_deletes_nothing(account, cli):
    account.refuse["Role"] = "no"
    cli("infra", "deploy", "--yes")
    ran = cli("infra", "deploy", "--dry-run")
    assert ran.code == 0
    assert "ROLLBACK_COMPLETE; it has to be deleted first" in ran.err
    assert "nothing was changed" in ran.err
    (stack,) = boto3.client("cloudformation").describe_stacks()["Stacks"]
    assert stack["StackStatus"] == "ROLLBACK_COMPLETE"


@pytest.mark.parametrize("command", ["deploy", "destroy"])
def test_a_failed_stack_of_another_project_is_left_alone(account, cli, command):
    client = boto3.client("cloudformation")
    template = json.dumps({"Resources": {"Theirs": {"Type": "AWS::S3::Bucket"}}})
    made = client.create_stack(StackName="theirs", TemplateBody=template)
    account.set_status(made["StackId"], "ROLLBACK_COMPLETE")
    ran = cli("infra", command, "--stack", "theirs", "--yes")
    assert ran.code == 2
    assert "does not belong to sm-nanogpt" in ran.error
    assert len(client.describe_stacks()["Stacks"]) == 1


def test_a_failure_reason_is_never_a_cancellation(account, cli):
    account.refuse["Role"] = "no"
    ran = cli("infra", "deploy", "--yes")
    assert "cancelled" not in ran.error
    assert "Role: no" in ran.error


def test_an_interrupted_deployment_continues_and_says_so(account, cli, monkeypatch):
    account.hangs = True
    monkeypatch.setattr("botocore.waiter.time.sleep", Mock(side_effect=KeyboardInterrupt))
    ran = cli("infra", "deploy", "--yes")
    assert ran.code == 1
    assert "CloudFormation continues by itself" in ran.err
    shown = cli("infra", "show")
    assert "stack sm-nanogpt is CREATE_IN_PROGRESS" in shown.err
    assert "CREATE_IN_PROGRESS and cannot be used: try again" in shown.error


@pytest.fixture
def pending(account):
    """The id of a change set that somebody else has not executed yet."""
    made = boto3.client("cloudformation").create_change_set(
        StackName="sm-nanogpt",
        ChangeSetName="pending",
        ChangeSetType="CREATE",
        TemplateBody=deploy.TEMPLATE.read_text(),
        Capabilities=["CAPABILITY_IAM"],
    )
    return str(made["Id"])


def test_a_leftover_change_set_does_not_block_deploy(pending, cli):
    assert "there is no stack" in cli("infra", "show").error
    assert cli("infra", "deploy", "--yes").code == 0
    assert len(boto3.client("cloudformation").describe_stacks()["Stacks"]) == 1


def test_an_unreadable_plan_leaves_nothing(account, emulator, cli):
    emulator.refuse["DescribeChangeSet"] = ("AccessDenied", "no such luck")
    ran = cli("infra", "deploy", "--yes")
    assert ran.code == 1
    assert "DescribeChangeSet" in ran.error
    assert boto3.client("cloudformation").describe_stacks()["Stacks"] == []


@pytest.mark.parametrize("words", [("deploy", "--dry-run"), ("destroy", "--yes")])
def test_a_leftover_empty_stack_is_deleted(pending, cli, words):
    client = boto3.client("cloudformation")
    client.delete_change_set(ChangeSetName=pending)
    assert cli("infra", *words).code == 0
    assert client.describe_stacks()["Stacks"] == []


def test_destroy_deletes_what_a_killed_deployment_left(account, cli):
    assert deploy.Deployment(load_settings()).plan() is not None
    ran = cli("infra", "destroy", "--yes")
    assert ran.code == 0
    assert "nothing to delete" not in ran.err
    assert boto3.client("cloudformation").describe_stacks()["Stacks"] == []


@pytest.mark.parametrize("words", [("deploy", "--dry-run"), ("destroy", "--yes")])
def test_dry_run_and_destroy_keep_a_foreign_change_set(pending, cli, words):
    assert cli("infra", *words).code == 0
    client = boto3.client("cloudformation")
    assert client.describe_change_set(ChangeSetName=pending)["Status"] == "CREATE_COMPLETE"
    assert len(client.describe_stacks()["Stacks"]) == 1


@pytest.mark.parametrize("command", ["deploy", "destroy"])
def test_a_stack_of_another_project_is_left_alone(account, cli, command):
    boto3.client("cloudformation").create_stack(
        StackName="theirs",
        TemplateBody=json.dumps({"Resources": {"Theirs": {"Type": "AWS::S3::Bucket"}}}),
    )
    ran = cli("infra", command, "--stack", "theirs", "--yes")
    assert ran.code == 2
    assert "does not belong to sm-nanogpt" in ran.error


def test_a_key_stays_once_it_was_created(account, cli):
    assert "kms key:" in cli("infra", "deploy", "--yes", "--kms").out
    ran = cli("infra", "deploy", "--yes")
    assert "nothing to change" in ran.err
    assert "kms key:" in ran.out


def test_two_stacks_have_nothing_in_common(deployed, cli):
    ran = cli("infra", "deploy", "--stack", "other", "--yes")
    assert ran.code == 0
    assert "next: sm-nanogpt --stack other upload-data" in ran.err
    other = json.loads(cli("infra", "show", "--stack", "other", "--json").out)
    assert not {other["store"], other["role"], other["policy"]} & set(asdict(deployed).values())


def test_a_stack_name_that_is_invalid_in_aws_is_refused(home, cli):
    ran = cli("infra", "show", "--stack", "my_stack")
    assert ran.code == 2
    assert "letters, digits and dashes" in ran.error


def test_infra_requires_a_region(account, cli, monkeypatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    ran = cli("infra", "deploy", "--yes")
    assert ran.code == 2
    assert "--region" in ran.error


# -- show and destroy ------------------------------------------------------------------------------


def test_without_a_stack_show_says_how_to_make_one(account, cli):
    ran = cli("infra", "show")
    assert ran.code == 1
    assert "`sm-nanogpt infra deploy`" in ran.error


def stack_id() -> str:
    return str(boto3.client("cloudformation").describe_stacks()["Stacks"][0]["StackId"])


@pytest.mark.parametrize(
    "status, advice",
    [
        ("DELETE_IN_PROGRESS", "try again when that has ended"),
        ("DELETE_FAILED", "deletes it and creates it again"),
    ],
)
def test_an_unusable_stack_names_a_remedy(account, deployed, cli, status, advice):
    account.set_status(stack_id(), status)
    assert advice in cli("infra", "show").error


def test_a_failed_rollback_says_how_to_continue(account, deployed, cli):
    account.set_status(stack_id(), "UPDATE_ROLLBACK_FAILED")
    ran = cli("infra", "deploy", "--yes")
    assert ran.code == 1
    assert "continue-update-rollback --stack-name sm-nanogpt" in ran.error


def test_show_tells_why_a_deployment_failed(account, cli):
    account.refuse["Role"] = "no"
    cli("infra", "deploy", "--yes")
    ran = cli("infra", "show")
    assert ran.code == 1
    assert "stack sm-nanogpt is ROLLBACK_COMPLETE: Role: no" in ran.err
    assert "`sm-nanogpt infra deploy`" in ran.error


def test_show_says_why_a_deployment_is_rolled_back(account, cli):
    account.refuse["Role"] = "no"
    cli("infra", "deploy", "--yes")
    account.set_status(stack_id(), "ROLLBACK_IN_PROGRESS")
    assert "stack sm-nanogpt is ROLLBACK_IN_PROGRESS: Role: no" in cli("infra", "show").err


def test_show_works_without_permission_to_read_events(account, emulator, deployed, cli):
    account.set_status(stack_id(), "UPDATE_ROLLBACK_COMPLETE")
    emulator.refuse["DescribeStackEvents"] = ("AccessDenied", "not you")
    ran = cli("infra", "show")
    assert ran.code == 0
    assert "why is not known (DescribeStackEvents: not allowed" in ran.err
    assert deployed.store in ran.out


def test_the_bucket_and_its_texts_outlive_the_stack(deployed, cli, text_file):
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


def test_destroy_detaches_the_policy_from_its_users(deployed, cli):
    iam = boto3.client("iam")
    iam.create_user(UserName="ci")
    iam.attach_user_policy(UserName="ci", PolicyArn=deployed.policy)
    ran = cli("infra", "destroy", "--yes")
    assert ran.code == 0
    assert "detached the launcher policy from user ci" in ran.err
    iam.delete_user(UserName="ci")


def test_destroy_first_names_affected_users_and_running_jobs(
    deployed, emulator, cli, text_file, monkeypatch
):
    iam = boto3.client("iam")
    iam.create_user(UserName="ci")
    iam.attach_user_policy(UserName="ci", PolicyArn=deployed.policy)
    monkeypatch.setattr("sagemaker_service.STAGES", (("Training", 60.0),))
    job_id = cli("launch", "--data", str(text_file)).out.strip()
    job = emulator.sagemaker.jobs[job_id]
    for name, role, secondary in (
        ("of-another-role", f"{job.request['RoleArn']}-2", job.secondary),
        ("ended-already", job.request["RoleArn"], "Completed"),
    ):
        checkpoints = job.request["CheckpointConfig"]["S3Uri"].replace(job_id, name)
        changes = {"TrainingJobName": name, "RoleArn": role}
        changes["CheckpointConfig"] = {"S3Uri": checkpoints}
        request = {**job.request, **changes}
        emulator.sagemaker.jobs[name] = replace(job, request=request, secondary=secondary)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("click.confirm", Mock(side_effect=click.Abort))
    ran = cli("infra", "destroy")
    assert ran.code == 1
    assert "detach   the launcher policy from user ci" in ran.err
    running = [line for line in ran.err.splitlines() if " is running" in line]
    assert [line.split()[2] for line in running] == [job_id], ran.err
    assert cli("infra", "show").code == 0
    assert iam.list_attached_user_policies(UserName="ci")["AttachedPolicies"]
    cli("stop", job_id)
    iam.detach_user_policy(UserName="ci", PolicyArn=deployed.policy)
    iam.delete_user(UserName="ci")


def test_destroy_ends_if_the_stack_is_already_deleted(deployed):
    deployment = deploy.Deployment(load_settings())
    removal = deployment.removal()
    assert removal is not None
    boto3.client("cloudformation").delete_stack(StackName=removal.stack_id)
    deployment.destroy(removal)


def test_destroy_without_a_stack_succeeds(account, cli):
    ran = cli("infra", "destroy", "--yes")
    assert (ran.code, ran.out) == (0, "")
    assert "nothing to delete" in ran.err


def test_destroy_without_a_terminal_requires_yes(deployed, cli):
    assert cli("infra", "destroy").code == 2
    assert cli("infra", "show").code == 0


def test_a_new_stack_gets_a_new_bucket(deployed, cli):
    cli("infra", "destroy", "--yes")
    ran = cli("infra", "deploy", "--yes")
    assert ran.code == 0
    assert deployed.store not in ran.out


# -- found by the other commands -------------------------------------------------------------------


def test_an_upload_goes_to_the_stacks_store(account, deployed, cli, text_file):
    ran = cli("upload-data", str(text_file))
    assert ran.out.startswith(deployed.store + "/data/")
    assert f"store: {deployed.store} (stack sm-nanogpt)" in ran.err
    assert account.described == 1


def test_an_upload_stays_here_without_a_stack(account, cli, text_file):
    assert cli("upload-data", str(text_file)).out.startswith("file:")


@pytest.mark.parametrize("way", ["words", "environment", "file"])
def test_a_named_stack_that_is_missing_is_an_error(account, cli, home, text_file, monkeypatch, way):
    home.mkdir(exist_ok=True)
    if way == "file":
        (home / "config.toml").write_text('stack = "thre"\n')
    if way == "environment":
        monkeypatch.setenv("SM_NANOGPT_STACK", "thre")
    words = ("--stack", "thre") if way == "words" else ()
    role = ("--role", "arn:aws:iam::123456789012:role/mine")
    for command in (("upload-data", str(text_file)), ("launch", "--data", str(text_file))):
        ran = cli(*words, *role, *command)
        assert (ran.code, ran.out) == (1, "")
        assert "there is no stack thre in us-east-1" in ran.error


def test_naming_a_stack_uses_aws(home, cli, text_file):
    ran = cli("--stack", "three", "upload-data", str(text_file))
    assert "could not look for a stack (no region" in ran.err


def test_an_upload_without_aws_stays_local_and_says_so(account, cli, text_file, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOBODY)
    ran = cli("upload-data", str(text_file))
    assert (ran.code, ran.out[:5]) == (0, "file:")
    assert "could not look for a stack" in ran.err


def test_a_launch_reads_the_stack_in_one_call(account, deployed):
    settings = with_stack(load_settings())
    assert (settings.store, settings.role) == (deployed.store, deployed.role)
    assert account.described == 1


def test_a_dry_run_uses_the_remembered_stack_offline(deployed, cli, text_file, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOBODY)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    ran = cli("launch", "--dry-run", "--data", str(text_file))
    request = json.loads(ran.out)
    assert request["RoleArn"] == deployed.role
    assert request["OutputDataConfig"]["S3OutputPath"].startswith(deployed.store)
    assert "as last seen" in ran.err


def test_a_stack_is_remembered_for_the_profile_that_saw_it(deployed, monkeypatch):
    assert remembered(load_settings(), "us-east-1") == deployed
    assert remembered(load_settings(profile="other"), "us-east-1") is None
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert remembered(load_settings(), "us-east-1") is None


def test_a_destroyed_stack_is_forgotten(deployed, cli):
    cli("infra", "destroy", "--yes")
    assert remembered(load_settings(), "us-east-1") is None


def test_a_stack_that_vanished_is_forgotten(deployed):
    assert remembered(load_settings(), "us-east-1") == deployed
    boto3.client("cloudformation").delete_stack(StackName="sm-nanogpt")
    assert with_stack(load_settings()).store == ""
    assert remembered(load_settings(), "us-east-1") is None


ROLE = "arn:aws:iam::123456789012:role/mine"


def test_a_launch_with_a_role_does_not_need_to_read_the_stack(caplog, account, emulator):
    emulator.refuse["DescribeStacks"] = ("AccessDenied", "not you")
    settings = load_settings(role=ROLE)
    caplog.set_level("INFO", "launcher")
    assert with_stack(settings) == settings
    assert "not using a stack: DescribeStacks: not allowed" in caplog.messages[-1]


def test_a_launch_with_a_role_ignores_a_failed_deployment(caplog, account, cli):
    account.refuse["Role"] = "no"
    cli("infra", "deploy", "--yes")
    settings = load_settings(role=ROLE)
    caplog.set_level("INFO", "launcher")
    assert with_stack(settings) == settings
    assert "ROLLBACK_COMPLETE" in caplog.messages[-1]


def test_an_unreadable_stack_is_an_error_if_it_was_used_before(deployed, emulator):
    emulator.refuse["DescribeStacks"] = ("AccessDenied", "not you")
    with pytest.raises(ServiceError, match="not allowed"):
        with_stack(load_settings(role=ROLE))


@pytest.mark.parametrize("text", ["[1", "5", '{"us-east-1": null}', '{"us-east-1": {"a": 1}}'])
def test_an_unreadable_memory_of_stacks_is_ignored(deployed, text):
    settings = load_settings()
    settings.last_stacks.write_text(text)
    assert remembered(settings, "us-east-1") is None
    assert with_stack(settings).store == deployed.store
    assert remembered(settings, "us-east-1") == deployed


def test_the_stacks_key_encrypts_the_model(account, cli, text_file):
    cli("infra", "deploy", "--yes", "--kms")
    key = json.loads(cli("infra", "show", "--json").out)["kms_key"]
    request = json.loads(cli("launch", "--dry-run", "--data", str(text_file)).out)
    assert request["OutputDataConfig"]["KmsKeyId"] == key
    request = json.loads(
        cli("launch", "--dry-run", "--data", str(text_file), "--kms-key", "mine").out
    )
    assert request["OutputDataConfig"]["KmsKeyId"] == "mine"


SUBNET = ("--subnet", "subnet-1", "--security-group", "sg-1")


def test_a_subnet_needs_a_role_that_may_join_a_vpc(account, cli, text_file):
    launch = ("launch", "--data", str(text_file), *SUBNET)
    cli("infra", "deploy", "--yes", "--kms")
    for words in ((), ("--dry-run",)):
        ran = cli(*launch, *words)
        assert ran.code == 2
        assert (
            "the role of stack sm-nanogpt may not join a VPC: allow it with `sm-nanogpt infra"
            in ran.error
        )
    assert cli("--role", f"{ROLE}-of-mine", *launch, "--dry-run").code == 0
    ran = cli("infra", "deploy", "--yes", "--vpc")
    assert ("kms key:" in ran.out, "vpc:" in ran.out) == (True, True)
    request = json.loads(cli(*launch, "--dry-run").out)
    assert request["VpcConfig"]["Subnets"] == ["subnet-1"]
    assert "vpc:" in cli("infra", "deploy", "--yes").out  # it stays so


def test_a_role_gets_its_boundary_and_path_and_keeps_them(account, cli):
    boundary = "arn:aws:iam::123456789012:policy/bound"
    words = ("--permissions-boundary", boundary, "--role-path", "/teams/ml/")
    assert cli("infra", "deploy", "--yes", *words).code == 0
    for _ in range(2):
        role = json.loads(cli("infra", "show", "--json").out)["role"]
        assert ":role/teams/ml/" in role
        found = boto3.client("iam").get_role(RoleName=role.rpartition("/")[2])["Role"]
        assert found["PermissionsBoundary"]["PermissionsBoundaryArn"] == boundary
        assert cli("infra", "deploy", "--yes", "--vpc").code == 0


@pytest.mark.parametrize("command", ["deploy", "destroy"])
def test_a_wrong_profile_is_named_before_a_question(account, cli, command):
    ran = cli("--profile", "nope", "infra", command)
    assert (ran.code, "profile (nope)" in ran.error) == (2, True)


def test_a_named_store_and_role_make_no_request(account, deployed, monkeypatch):
    monkeypatch.setenv("SM_NANOGPT_STORE", "s3://mine/prefix")
    settings = load_settings(role="arn:aws:iam::123456789012:role/mine")
    assert with_stack(settings) == settings
    assert account.described == 0


def test_a_named_role_overrides_the_stacks(deployed):
    role = "arn:aws:iam::123456789012:role/mine"
    settings = with_stack(load_settings(role=role))
    assert (settings.store, settings.role) == (deployed.store, role)


def test_the_stacks_role_is_not_used_for_another_store(deployed, cli, text_file):
    ran = cli("--store", "s3://mine/prefix", "launch", "--data", str(text_file))
    assert ran.code == 2
    assert f"it can access only {deployed.store}" in ran.err
    assert "no execution role" in ran.error


@pytest.mark.parametrize("way", ["words", "environment", "file"])
def test_the_stacks_name_is_a_setting(deployed, cli, home, monkeypatch, way):
    (home / "config.toml").write_text('stack = "by-file"\n')
    if way != "file":
        monkeypatch.setenv("SM_NANOGPT_STACK", "by-environment")
    words = ("--stack", "by-words") if way == "words" else ()
    assert f"no stack by-{way} in us-east-1" in cli(*words, "infra", "show").error


def test_a_launch_refuses_an_incomplete_stack(account, cli, text_file):
    account.refuse["Role"] = "no"
    cli("infra", "deploy", "--yes")
    ran = cli("launch", "--data", str(text_file))
    assert ran.code == 1
    assert "ROLLBACK_COMPLETE" in ran.error
    assert "`sm-nanogpt infra deploy`" in ran.error


def test_a_local_launch_without_text_makes_no_request(deployed, cli, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOBODY)
    ran = cli("launch", "--instance", "local")
    assert ran.code == 2
    assert "nothing was uploaded" in ran.error


def test_the_last_upload_may_be_in_the_stacks_store(deployed, text_file, cli):
    uri = cli("upload-data", str(text_file)).out.strip()
    assert last_upload(load_settings()) == uri


# -- the template ----------------------------------------------------------------------------------


def test_a_stack_is_known_by_the_templates_description():
    assert TEMPLATE["Description"].startswith(DESCRIPTION)


def test_destroy_names_what_the_template_retains():
    resources = TEMPLATE["Resources"].items()
    assert {name for name, each in resources if each.get("DeletionPolicy") == "Retain"} == set(
        deploy.KEPT
    )


@pytest.fixture
def documents(account):
    """What the role and the launchers may do, once deployed with a key."""
    deployment = deploy.Deployment(load_settings())
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


def test_only_actions_without_resources_apply_to_everything(documents):
    assert wide(documents["role"]) == {"cloudwatch:PutMetricData", "ecr:GetAuthorizationToken"}
    assert wide(documents["launcher"]) == {
        "pricing:GetProducts",
        "sagemaker:Search",
        "servicequotas:ListServiceQuotas",
    }


def test_a_role_for_a_vpc_has_sagemakers_required_actions(account, cli):
    assert cli("infra", "deploy", "--yes", "--vpc").code == 0
    role = json.loads(cli("infra", "show", "--json").out)["role"].rpartition("/")[2]
    policy = boto3.client("iam").get_role_policy(RoleName=role, PolicyName="training-job")
    network = {
        action for action in wide(PolicyDocument(policy["PolicyDocument"])) if "ec2:" in action
    }
    interface = ("NetworkInterface", "NetworkInterfacePermission")
    described = ("DhcpOptions", "NetworkInterfaces", "SecurityGroups", "Subnets", "Vpcs")
    assert network == {
        *(f"ec2:{verb}{noun}" for verb in ("Create", "Delete") for noun in interface),
        *(f"ec2:Describe{noun}" for noun in described),
    }


def test_the_role_can_delete_only_checkpoints(documents):
    places = [
        resource
        for statement in documents["role"].statements
        if any(action in ("s3:DeleteObject", "s3:*") for action in statement.actions)
        for resource in statement.resources
    ]
    assert [place.partition("/")[2] for place in places] == ["nanogpt/checkpoints/*"]


def wide(document: PolicyDocument) -> set[str]:
    return {
        action
        for statement in document.statements
        if "*" in statement.resources
        for action in statement.actions
    }


def test_no_policy_has_a_known_weakness(documents):
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
