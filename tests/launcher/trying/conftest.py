"""A search of tiny runs, and runs with the seeds of their base."""

from __future__ import annotations

import pytest
import searches

shared_search, tiny_search = searches.shared_search, searches.tiny_search  # fixtures


@pytest.fixture
def same_seeds(monkeypatch):
    """Seeds that are the same each time, so that verdicts of noise are."""
    searches.draw_same_seeds(monkeypatch)
