"""Jobs of this machine that several tests look at."""

from __future__ import annotations

import pytest


@pytest.fixture
def resume(job, cli):
    """Resumes a job of 10 steps that has completed."""
    return lambda *arguments: cli("launch", "--resume", job.job_id, arguments)
