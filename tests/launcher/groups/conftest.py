"""Short waits for the commands that run a sweep."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from sm_nanogpt.launcher.groups import run


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    """Between two looks at its jobs, a command waits half a second at least; here it does not."""
    clock = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, 0.05)), time=time.time)
    monkeypatch.setattr(run, "time", clock)
