"""The emulator with jobs that really run, and the commands as a user types them."""

from __future__ import annotations

import os

import container
import launching
import pytest
from launching import Ran
from sagemaker_service import SageMaker
from training_runs import Containers

RATE = 40.0  # SageMaker's seconds in one of the tests'


@pytest.fixture
def aws(emulator, s3, tmp_path, monkeypatch):
    """SageMaker with one rank on each host, and a person who may use it."""
    container.require()
    runs = Containers(tmp_path / "machines", gpus=1, rate=RATE, threads=1)
    runs.attach(emulator)
    emulator.reset(SageMaker(runs, RATE))
    monkeypatch.setenv("SM_NANOGPT_ROLE", "arn:aws:iam::123456789012:role/training")
    monkeypatch.setenv("SM_NANOGPT_ASK_ABOVE", "inf")  # the tests have no terminal
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setattr("launcher.sagemaker.backend.SageMakerBackend.poll_seconds", 0.2)
    monkeypatch.setattr("launcher.sagemaker.backend.QUIET_SECONDS", 1.0)
    yield emulator
    runs.close()


@pytest.fixture
def user(aws):
    """The environment of that person's shell."""
    return {name: v for name, v in os.environ.items() if name.startswith(("AWS_", "SM_NANOGPT_"))}


@pytest.fixture
def command(user, home):
    """sm-nanogpt as a process of its own, as that person types it."""

    def run(*words: str) -> Ran:
        return launching.command(*words, home=home, env=user)

    return run
