"""The emulator with jobs that really run, and the commands as a user types them."""

from __future__ import annotations

import os

import container
import launching
import pytest
import training_runs
from sagemaker_service import SageMaker

from sm_nanogpt.launcher.sagemaker import deploy

RATE = 10.0  # SageMaker's seconds in one of the tests': an hour, the limit of a job, is six minutes


@pytest.fixture
def containers():
    """Has the jobs of a test run in containers, in which the toolkit starts their ranks."""
    container.require()


@pytest.fixture
def aws(emulator, s3, tmp_path, monkeypatch, request):
    """SageMaker with one rank on each host, and a person who may use it."""
    forked = "containers" not in request.fixturenames
    machines = tmp_path / "machines"
    runs = training_runs.Containers(machines, gpus=1, rate=RATE, threads=1, forked=forked)
    runs.attach(emulator)
    emulator.reset(SageMaker(runs, RATE))
    monkeypatch.setenv("SM_NANOGPT_ROLE", "arn:aws:iam::123456789012:role/training")
    monkeypatch.setenv("SM_NANOGPT_ASK_ABOVE", "inf")  # the tests have no terminal
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setattr("sm_nanogpt.launcher.sagemaker.backend.SageMakerBackend.poll_seconds", 0.2)
    monkeypatch.setattr("sm_nanogpt.launcher.sagemaker.backend.QUIET_SECONDS", 0.3)
    for name in ("START_SECONDS", "GRACE_SECONDS"):  # waiting proves nothing here
        monkeypatch.setattr(training_runs, name, 1.0)
    yield emulator
    runs.close()


@pytest.fixture
def stacks(monkeypatch):
    """CloudFormation without its waits."""
    import cloudformation_service  # which imports most of moto

    monkeypatch.setitem(deploy.WAIT, "Delay", 0.01)
    with cloudformation_service.repaired():
        yield


@pytest.fixture
def impatience():
    """Code for a process of that person, which then waits as little as this one."""
    return """
from sm_nanogpt.launcher.sagemaker import backend
backend.QUIET_SECONDS, backend.SageMakerBackend.poll_seconds = 0.3, 0.2
"""


@pytest.fixture
def command(aws, home, impatience, monkeypatch):
    """sm-nanogpt as a process of its own, as that person types it."""
    *python, code = launching.PROGRAM
    monkeypatch.setattr(launching, "PROGRAM", (*python, impatience + code))
    variables = {}
    for name, value in os.environ.items():
        if name.startswith(("AWS_", "SM_NANOGPT_")):
            variables[name] = value
    return lambda *arguments: launching.command(*arguments, home=home, env=variables)
