"""The commands `infra deploy`, `infra show`, `infra destroy` and `doctor`."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from sm_nanogpt.launcher.cli.options import (
    JSON,
    YES,
    Command,
    CommandGroup,
    agree,
    complete_instance,
    settings_of,
)
from sm_nanogpt.launcher.cli.remedies import command, remedies
from sm_nanogpt.launcher.cli.show import note, print_fields, print_json, shown
from sm_nanogpt.launcher.errors import InputError, ServiceError

if TYPE_CHECKING:
    from sm_nanogpt.launcher.sagemaker.deploy import Deployment, Removal
    from sm_nanogpt.launcher.sagemaker.stack import Stack


@click.group("infra", cls=CommandGroup)
def infra_group() -> None:
    """Create the bucket, role and policy that SageMaker needs.

    They form one CloudFormation stack, whose name is --stack before the command. The other commands
    read the bucket and the role from it.

    Example:
      sm-nanogpt infra deploy
    """


@infra_group.command("deploy")
@click.option("--kms", is_flag=True, help="Encrypt with a KMS key of your own (1 USD a month).")
@click.option("--vpc", is_flag=True, help="Allow jobs to run in your VPC (--subnet).")
@click.option("--permissions-boundary", metavar="ARN", help="Policy that bounds the role.")
@click.option("--role-path", metavar="PATH", help="Path of the role, such as /teams/ml/.")
@click.option("--dry-run", is_flag=True, help="Show the changes without making them.")
@YES
def infra_deploy_command(dry_run: bool, yes: bool, **changes: Any) -> None:
    """Create or update the stack and print its outputs.

    Example:
      sm-nanogpt infra deploy --dry-run
      sm-nanogpt --region eu-west-1 infra deploy
    """
    from sm_nanogpt.launcher.sagemaker.deploy import LEFT_OVER, Deployment

    deployment = Deployment(settings_of())
    removal = deployment.removal(LEFT_OVER)
    if removal is not None:
        note(f"stack {deployment.name} is {removal.status}; it has to be deleted first")
        if dry_run:
            note("dry run: nothing was changed; after that, the stack would be created again")
            return
        remove_stack(deployment, removal, yes)
    planned = deployment.plan(**changes)
    if planned is None:
        note(f"stack {deployment.name}: nothing to change")
        print_stack(deployment.show())
        return

    with ExitStack() as unless_agreed:
        unless_agreed.callback(deployment.discard, planned)
        for change in planned.changes:
            note(f"{change.action:<8} {change.resource_type} {change.logical_id}")
        if dry_run:
            note("dry run: nothing was changed")
            return
        owner = account_and_region(planned.stack_id)
        agree(f"Make these changes to stack {deployment.name} in {owner}?", yes)
        unless_agreed.pop_all()
    stack = deployment.execute(planned)
    print_stack(stack)
    note(f"to let others launch jobs, attach the policy {stack.policy}")
    note(f"next: {command('upload-data')}")


@infra_group.command("show")
@JSON
def infra_show_command(as_json: bool) -> None:
    """Print the outputs of the stack.

    Example:
      sm-nanogpt infra show
    """
    from sm_nanogpt.launcher.sagemaker.deploy import Deployment

    stack = Deployment(settings_of()).show()
    if as_json:
        print_json(stack)
    else:
        print_stack(stack)


@infra_group.command("destroy")
@YES
def infra_destroy_command(yes: bool) -> None:
    """Delete the stack. Keeps the bucket, with its data and models, and the KMS key.

    Example:
      sm-nanogpt infra destroy
    """
    from sm_nanogpt.launcher.sagemaker.deploy import Deployment

    deployment = Deployment(settings_of())
    removal = deployment.removal()
    if removal is None:
        note(f"nothing to delete: there is no stack {deployment.name} in {deployment.region}")
        return
    remove_stack(deployment, removal, yes)


def remove_stack(deployment: Deployment, removal: Removal, yes: bool) -> None:
    """Show what deleting a stack does, and delete it after confirmation."""
    if removal.bucket:
        note(f"keep     the bucket; to delete it: aws s3 rb --force s3://{removal.bucket}")
    if removal.key:
        delete_key = f"aws kms schedule-key-deletion --key-id {removal.key}"
        note(f"keep     the key, which decrypts the bucket; to delete it: {delete_key}")
    for kind, name in removal.holders:
        note(f"detach   the launcher policy from {kind.lower()} {name}")
    for job_id in removal.jobs:
        note(f"warning: job {job_id} is running and fails without its role")
    agree(f"Delete stack {deployment.name} in {account_and_region(removal.stack_id)}?", yes)
    deployment.destroy(removal)


def account_and_region(arn: str) -> str:
    _, _, _, region, account, _ = arn.split(":", 5)
    return f"account {account}, {region}"


def print_stack(stack: Stack) -> None:
    fields = {}
    for name, value in asdict(stack).items():
        if value:
            fields[name.replace("_", " ")] = str(value)
    print_fields(fields)


@click.command("doctor", cls=Command)
@click.option(
    "--instance",
    metavar="TYPE",
    shell_complete=complete_instance,
    help="Check price and quota of this instance type too; `local` checks only this machine.",
)
@click.option("--no-train", is_flag=True, help="Skip training a tiny model.")
@JSON
def doctor_command(instance: str | None, no_train: bool, as_json: bool) -> None:
    """Check this machine and, if it is set up here, the AWS account.

    Exit code 1 means that a check failed.

    Example:
      sm-nanogpt doctor --instance ml.g5.xlarge
    """
    from sm_nanogpt.launcher.doctor import FAILURE, run_checks, uses_aws
    from sm_nanogpt.launcher.job import Request

    logging.getLogger("sm_nanogpt").setLevel(logging.WARNING)  # the findings suffice
    settings = settings_of()
    if instance:
        Request(instance=instance)  # which refuses what is no instance type
    if instance and no_train and not uses_aws(settings, instance):
        raise InputError(f"--instance {instance} with --no-train checks nothing: leave one out")

    findings = []
    for finding in run_checks(settings, instance, train=not no_train):
        text = "; ".join([finding.text, *remedies(finding.answer)])
        findings.append({"check": finding.check, "result": finding.result, "text": text})
        if not as_json:
            click.echo(shown(f"{finding.result:<8} {finding.check + ':':<15} {text}"))
    if as_json:
        print_json(findings)
    if not (instance or settings.reaches_aws):
        note("AWS was not checked: no region, profile or keys are set")
    failed = [finding["check"] for finding in findings if finding["result"] == FAILURE]
    if failed:
        raise ServiceError(f"failed: {', '.join(failed)}")
