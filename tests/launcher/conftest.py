"""What tests of several rooms of the launcher share."""

from __future__ import annotations

import io

import launching
import pytest


@pytest.fixture
def chat(tuned, directory, cli, monkeypatch):
    def say(*lines: str, model: str = str(directory), heat: str = "0") -> launching.Ran:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        return cli("chat", model, "--max-new-tokens", "6", "--temperature", heat, "--seed", "5")

    return say
