"""Jobs of this machine that several tests look at."""

from __future__ import annotations

import pytest


@pytest.fixture
def resume(job, cli):
    """Resumes a job of 10 steps that has completed."""
    return lambda *words: cli("launch", "--resume", job.job_id, words)
