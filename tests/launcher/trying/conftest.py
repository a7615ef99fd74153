"""A search of tiny runs, and runs with the seeds of their base."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import searches

from sm_nanogpt.launcher.trying import history

shared_search, tiny_search = searches.shared_search, searches.tiny_search  # fixtures


@pytest.fixture
def same_seeds(monkeypatch):
    """Seeds that are the same each time, so that verdicts of noise are."""
    drawn = SimpleNamespace(randbelow=random.Random(1).randrange)
    monkeypatch.setattr(history, "secrets", drawn)
