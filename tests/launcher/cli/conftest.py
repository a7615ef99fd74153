"""Jobs for the commands."""

from __future__ import annotations

import json

import pytest
from jobs import NEWER


@pytest.fixture
def newer(job):
    """The directory of a later job, of which there is only a record."""
    directory = job.home / "jobs" / NEWER
    directory.mkdir()
    record = json.loads((job.directory / "job.json").read_text())
    (directory / "job.json").write_text(json.dumps({**record, "created": 4e9}))
    return directory
