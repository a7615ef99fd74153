"""The commands `infra deploy`, `infra show` and `infra destroy`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from launcher.cli.options import JSON, STACK, YES, Group, agree, can_ask, settings_of
from launcher.cli.show import note, print_fields, print_json
from launcher.errors import ServiceError

if TYPE_CHECKING:
    from launcher.aws.infra import Deployment, Removal
    from launcher.aws.stack import Stack


@click.group("infra", cls=Group)
def infra_group() -> None:
    """Make what jobs on SageMaker need in an AWS account: a bucket, a role, a policy.

    They are one CloudFormation stack. Once it is there, the other commands find bucket and role.

    \b
    Example:
      sm-nanogpt infra deploy
    """


@infra_group.command("deploy")
@STACK
@click.option("--kms", is_flag=True, help="With a key of your own, which costs 1 USD a month.")
@click.option("--vpc", is_flag=True, help="Let jobs run in a VPC of your own (--subnet).")
@click.option("--dry-run", is_flag=True, help="Only show what would change.")
@YES
@click.pass_context
def infra_deploy_command(
    context: click.Context, stack: str | None, kms: bool, vpc: bool, dry_run: bool, yes: bool
) -> None:
    """Make the stack, or bring it up to date, and print its outputs.

    \b
    Example:
      sm-nanogpt infra deploy --dry-run
      sm-nanogpt --region eu-west-1 infra deploy
    """
    from launcher.aws.infra import Deployment

    can_ask(yes or dry_run)
    deployment = Deployment(settings_of(context, stack=stack))
    if left := deployment.left_over():
        note(f"stack {deployment.name} is {left.status}; what is left of it is deleted first")
        if dry_run:
            show_removal(left)
            note("a dry run: nothing was changed; the stack would be made anew after that")
            return
        remove_stack(deployment, left, yes)
    planned = deployment.plan(kms, vpc)
    if planned is None:
        note(f"stack {deployment.name}: nothing to change")
        print_stack(deployment.show())
        return
    try:
        for change in planned.changes:
            note(f"{change.action:<8} {change.kind} {change.resource}")
        if not dry_run:
            place = account_and_region(planned.stack_id)
            agree(f"Make this in {place}, as stack {deployment.name}?", yes)
    except BaseException:
        try:
            deployment.discard(planned)
        except ServiceError as error:  # beside what went wrong first
            note(f"the change set is left in AWS: {error}")
        raise
    if dry_run:
        deployment.discard(planned)
        note("a dry run: nothing was changed")
        return
    made = deployment.execute(planned)
    print_stack(made)
    note(f"whoever else launches jobs needs the policy {made.policy}")
    note(f"next: {deployment.settings.command('upload-data')}")


@infra_group.command("show")
@STACK
@JSON
@click.pass_context
def infra_show_command(context: click.Context, stack: str | None, as_json: bool) -> None:
    """Print what the stack gives to the other commands.

    \b
    Example:
      sm-nanogpt infra show
    """
    from launcher.aws.infra import Deployment

    found = Deployment(settings_of(context, stack=stack)).show()
    if as_json:
        print_json(found)
    else:
        print_stack(found)


@infra_group.command("destroy")
@STACK
@YES
@click.pass_context
def infra_destroy_command(context: click.Context, stack: str | None, yes: bool) -> None:
    """Delete the stack. The bucket stays, with its texts and models, and so does the key.

    \b
    Example:
      sm-nanogpt infra destroy
    """
    from launcher.aws.infra import Deployment

    can_ask(yes)
    deployment = Deployment(settings_of(context, stack=stack))
    removal = deployment.removal()
    if removal is None:
        note(f"there is no stack {deployment.name} in {deployment.region}; nothing to delete")
        return
    remove_stack(deployment, removal, yes)


def show_removal(removal: Removal) -> None:
    for action, resources in (("keep", removal.kept), ("remove", removal.removed)):
        for _, kind, place in resources:
            note(f"{action:<8} {kind} {place}")
    for kind, name in removal.holders:
        note(f"detach   the launcher policy from {kind.lower()} {name}")
    for job_id in removal.jobs:
        note(f"warning: job {job_id} is running; without its role it ends without a model")


def remove_stack(deployment: Deployment, removal: Removal, yes: bool) -> None:
    """Deletes a stack if the person agrees, and says how to delete what is kept."""
    show_removal(removal)
    agree(f"Delete stack {deployment.name} in {account_and_region(removal.stack_id)}?", yes)
    deployment.destroy(removal)
    kept = {name: place for name, _, place in removal.kept}
    if "Bucket" in kept:
        note(f"the bucket is kept; to delete it: aws s3 rb --force s3://{kept['Bucket']}")
    if "Key" in kept:
        note(
            "the key is kept, without which the bucket cannot be read; to delete it:"
            f" aws kms schedule-key-deletion --key-id {kept['Key']}"
        )


def account_and_region(arn: str) -> str:
    """Where the thing behind an ARN is."""
    _, _, _, region, account, _ = arn.split(":", 5)
    return f"account {account}, {region}"


def print_stack(stack: Stack) -> None:
    lines = {
        "stack": f"{stack.name} ({stack.status})",
        "store": stack.store,
        "role": stack.role,
        "kms key": stack.kms_key,
        "vpc": "jobs may run in one" if stack.vpc else None,
        "policy": stack.policy,
    }
    print_fields(lines)
