"""The commands `hyperparameters` and `copy-script`, of the training folder."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from sm_nanogpt.entry_point.errors import os_reason
from sm_nanogpt.launcher.cli.options import DIRECTORY, Command, complete_search, value_option
from sm_nanogpt.launcher.cli.remedies import command
from sm_nanogpt.launcher.cli.show import note, print_text
from sm_nanogpt.launcher.errors import InputError


@click.command("hyperparameters", cls=Command)
@value_option("--entry-point DIR", "List those of your edited training folder.", type=DIRECTORY)
def hyperparameters_command(entry_point: Path | None) -> None:
    """List what `launch --set` takes: ranges and defaults.

    Example:
      sm-nanogpt hyperparameters
    """
    from sm_nanogpt.launcher.source import Source

    source = Source.read(entry_point) if entry_point else Source.packaged()
    table = source.module("command_line").hyperparameter_table()
    print_text(table.strip("\n").replace("  --", "  "))  # --set takes names without dashes


@click.command("copy-script", cls=Command)
@click.argument("directory", metavar="[DIR]", type=DIRECTORY, default="my_gpt")
@value_option(
    "--from search_name NAME",
    "The folder that a search has kept, from `try start NAME`.",
    shell_complete=complete_search,
)
def copy_script_command(directory: Path, search_name: str | None) -> None:
    """Copy the training folder to DIR (default: my_gpt). Edit the model or the recipe there.

    Example:
      sm-nanogpt copy-script my_gpt
      sm-nanogpt launch --instance local --entry-point my_gpt
    """
    from sm_nanogpt.launcher.source import Source

    folder = shlex.quote(str(directory))
    if search_name is None:
        source = Source.packaged()
        next_command = f"launch --instance local --entry-point {folder}"
    else:
        from sm_nanogpt.launcher.cli.search import open_search

        search = open_search(search_name)
        source = search.source(search.ledger.base)
        next_command = f"try run {folder} --group {search_name}"
    try:
        directory.mkdir(parents=True)
        source.write(directory)
    except OSError as error:
        raise InputError(f"{directory}: {os_reason(error)}; name another directory") from None
    click.echo(directory)
    note(f"edit a file in {directory}; then")
    note(f"next: {command(next_command)}")
