"""The command `doctor`."""

from __future__ import annotations

import logging
import sys

import click

from launcher.cli.options import JSON, Command, settings_of
from launcher.cli.show import note, print_json, shown, with_options
from launcher.errors import ServiceError


@click.command("doctor", cls=Command)
@click.option(
    "--instance",
    metavar="TYPE",
    default="ml.g5.12xlarge",
    show_default=True,
    help="Instance type to check for; `local` checks only this machine.",
)
@click.option("--no-train", is_flag=True, help="Skip training a tiny model.")
@JSON
@click.pass_context
def doctor_command(context: click.Context, instance: str, no_train: bool, as_json: bool) -> None:
    """Check this machine and the AWS account. Exit code 1 means that a check failed.

    \b
    Example:
      sm-nanogpt doctor --instance ml.g5.xlarge
    """
    from launcher.aws.instances import check_instance
    from launcher.doctor import FAILURE, WARNING, examine

    logging.getLogger("launcher").setLevel(logging.WARNING)  # the findings suffice
    settings = settings_of(context)
    check_instance(instance)

    def show(result: str, check: str, text: str) -> None:
        click.echo(shown(f"{result:<8} {check + ':':<15} {with_options(text)}"))
        sys.stdout.flush()

    findings, left_out = [], []
    for finding in examine(settings, instance, train=not no_train):
        findings.append(finding)
        if as_json or (no_train and finding.check == "local training"):  # the user asked for it
            continue
        if finding.left_out:
            left_out.append(finding.check)
        else:
            show(finding.result, finding.check, finding.text)
    if as_json:
        print_json(findings)
    if left_out:
        show(WARNING, "not checked", f"{', '.join(left_out)} (needs a check that failed)")
    failed = [finding.check for finding in findings if finding.result == FAILURE]
    if failed and instance != "local" and not settings.reaches_aws:
        note("`sm-nanogpt doctor --instance local` checks only this machine")
    if failed:
        raise ServiceError(f"failed: {', '.join(failed)}")
