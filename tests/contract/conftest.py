"""Fixtures of the contract tests: jobs that several tests look at are run once."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import container
import pytest


@pytest.fixture(scope="session", autouse=True)
def containers():
    container.require()


@pytest.fixture(scope="session")
def excerpt(text):
    """Enough text for a tiny model, strange characters included."""
    return text[-60_000:]


@pytest.fixture(scope="session")
def finished(tmp_path_factory, excerpt):
    """Runs a job to its end, once for all the workers of a test run, and returns its hosts."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def run(name: str, **options: Any) -> list[container.Host]:
        directory = base / f"contract-{name}"
        with Path(f"{directory}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not directory.exists():
                with container.Job(directory, text=excerpt, **options) as job:
                    job.wait()
        return [container.Host(path) for path in sorted(directory.glob("algo-*"))]

    return run
