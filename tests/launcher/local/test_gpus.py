"""How many processes a job on this machine has."""

from __future__ import annotations

import pytest

from sm_nanogpt import InputError
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.local import backend


@pytest.mark.parametrize(
    ("arguments", "gpus", "expected"),
    [
        ({}, 4, (4, 4)),
        ({"processes_per_instance": 3, "hyperparameters": {"device": "cpu"}}, 4, (3, 0)),
        ({"preset": "baby"}, 0, (4, 0)),
        ({"processes_per_instance": 3}, 0, (3, 0)),
    ],
)
def test_each_gpu_gets_one_process(monkeypatch, arguments, gpus, expected):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    monkeypatch.setattr("sm_nanogpt.launcher.machines.cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    placement = backend.plan_processes(TrainingJob(data="/data", **arguments))
    assert (placement.processes, placement.gpus) == expected


def test_a_job_that_would_leave_gpus_idle_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(InputError, match="has 4 GPUs"):
        backend.plan_processes(TrainingJob(data="/data", processes_per_instance=2))
