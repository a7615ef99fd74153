"""The help of each command."""

from __future__ import annotations

import pytest
from commands import COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_commands_help_shows_an_example(home, cli, command):
    ran = cli(command.split(), "--help")
    assert ran.code == 0
    assert ran.err == ""
    assert f"Example:\n    sm-nanogpt {command}" in ran.out, (
        f"{command}: its docstring ends with an example, which a user can copy; see another command"
    )
    assert not home.exists()
