"""The names of the commands, and of those in groups."""

from __future__ import annotations

import click

from launcher import cli as commands

GROUPS = {name: g for name, g in commands.cli.commands.items() if isinstance(g, click.Group)}
COMMANDS = [name for name in commands.cli.commands if name not in GROUPS] + [
    f"{name} {command}" for name, group in GROUPS.items() for command in group.commands
]
