"""What is shown of a job."""

from __future__ import annotations

import pytest
from jobs import stopped_job

from sm_nanogpt.launcher.views.job_fields import columns_of, texts_of


@pytest.mark.parametrize(
    ("metrics", "checkpoint_step", "step"),
    [
        (None, None, None),
        ({"step": 100}, 145, "145/600"),
        ({"step": 200}, 100, "200/600"),
    ],
)
def test_a_step_is_that_of_the_curve_or_of_a_later_checkpoint(metrics, checkpoint_step, step):
    job = stopped_job(
        data="file:///home/ann/store/data/notes-0123456789ab",
        hyperparameters={"max_steps": 600},
        metrics=metrics,
        checkpoint_step=checkpoint_step,
    )
    assert texts_of(job)["step"] == step
    assert columns_of([job])["STEP"] == [step]
