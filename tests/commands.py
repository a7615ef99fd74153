"""The names of the commands, and of those in groups."""

from __future__ import annotations

import click

from sm_nanogpt.launcher import cli as commands

GROUPS = {}
COMMANDS = []
for name, command in commands.cli.commands.items():
    if isinstance(command, click.Group):
        GROUPS[name] = command
        COMMANDS += [f"{name} {subcommand}" for subcommand in command.commands]
    else:
        COMMANDS.append(name)
