"""Jobs whose price the table of this project has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sm_nanogpt import JobDescription, Settings
from sm_nanogpt.launcher.job import TrainingJob

TWO = "ml.g6.12xlarge,ml.g5.12xlarge"  # 5.752 and 7.09 USD an hour
HOURLY = 7.09  # of ml.g5.12xlarge in us-east-1
P4D = "ml.p4d.24xlarge"
UNPRICED = "the price of ml.p4d.24xlarge in us-east-1 is unknown"


def job(**values: Any) -> TrainingJob:
    return TrainingJob(**{"instance": "ml.g5.12xlarge", "data": "s3://bucket/text", **values})


def description(**values: Any) -> JobDescription:
    running_job = JobDescription("j", "InProgress", "Training", "ml.g5.12xlarge", 1, 0.0, "")
    return replace(running_job, **values)


def offline(home: Path, **values: Any) -> Settings:
    """The settings of a dry run, which asks for no price."""
    return Settings(home=home, region="us-east-1", **values).with_offline(True)
