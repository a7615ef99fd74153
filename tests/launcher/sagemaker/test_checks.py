"""What is checked of a job before it is paid."""

from __future__ import annotations

import pytest

from sm_nanogpt import InputError
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.sagemaker.checks import check_memory


@pytest.mark.parametrize(
    ("instance", "layers", "optimizer", "fits"),
    [
        ("ml.g5.xlarge", 8, "muon", True),  # 1.6 billion parameters in matrices
        ("ml.g5.xlarge", 12, "muon", False),
        ("ml.g5.48xlarge", 12, "muon", True),  # eight GPUs share the momentum
        ("ml.g5.48xlarge", 12, "adamw", False),
        ("ml.m5.xlarge", 12, "muon", True),
    ],
)
def test_a_model_that_no_gpu_can_hold_is_refused(instance, layers, optimizer, fits):
    job = TrainingJob(
        instance=instance,
        data="s3://bucket/data",
        hyperparameters={"n_layer": layers, "n_embd": 4096, "n_head": 32, "optimizer": optimizer},
    )
    if fits:
        check_memory(job, instance)
    else:
        with pytest.raises(InputError, match="24 GB"):
            check_memory(job, instance)
