"""Train a GPT of your own in three calls, on Amazon SageMaker or on this machine.

    import sm_nanogpt as sm

    data = sm.upload_data("input.txt")
    job = sm.launch(sm.Request(instance="local", data=data.uri, preset="cpu")).wait()
    print(job.sample("ROMEO:"))

docs/python.md tells of all names. What the caller got wrong raises `InputError`; what failed on the
way raises `ServiceError`, or one of their kinds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from launcher.aws import Denied, Missing, OverQuota, Unreachable
from launcher.errors import InputError, ServiceError
from launcher.files.documents import Damaged
from launcher.forecast.table import Forecast
from launcher.job import JobDescription, Request
from launcher.library import Job, Plan, forecast, job, jobs, launch, prepare, sweep
from launcher.sagemaker.cost import CeilingTooLow, Unconfirmed
from launcher.settings import Settings
from launcher.text.corpus import Upload, upload_data
from launcher.text.uploads import uploads
from launcher.tracking import NotYours

if TYPE_CHECKING:
    from launcher.models.load import load_model
    from launcher.models.sample import stream_samples

__all__ = [
    "CeilingTooLow", "Damaged", "Denied", "Forecast", "InputError", "Job", "JobDescription",
    "Missing", "NotYours", "OverQuota", "Plan", "Request", "ServiceError", "Settings",
    "Unconfirmed", "Unreachable", "Upload", "forecast", "job", "jobs", "launch", "load_model",
    "prepare", "stream_samples", "sweep", "upload_data", "uploads",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Names of modules that import torch, which takes seconds."""
    modules = {"load_model": "launcher.models.load", "stream_samples": "launcher.models.sample"}
    if name not in modules:
        raise AttributeError(f"module 'sm_nanogpt' has no attribute {name!r}")
    return getattr(import_module(modules[name]), name)
