"""Train a GPT of your own in three calls, on Amazon SageMaker or on this machine.

    import sm_nanogpt as sm

    data = sm.upload_data("input.txt")
    job = sm.launch(sm.Request(instance="local", data=data.uri, preset="cpu")).wait()
    print(job.sample("ROMEO:"))

docs/python.md tells of all names. What the caller got wrong raises `InputError`; what failed on the
way raises `ServiceError`, or one of their kinds. The logger `sm_nanogpt` says at level INFO what a
launch finds out.

The command line and the processes that it starts import this package too, so a name is imported
when it is first used.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sm_nanogpt.launcher.aws import Denied, Missing, OverQuota, Unreachable
    from sm_nanogpt.launcher.description import JobDescription
    from sm_nanogpt.launcher.errors import InputError, ServiceError
    from sm_nanogpt.launcher.files.documents import Damaged
    from sm_nanogpt.launcher.job import Request
    from sm_nanogpt.launcher.launching.forecasts import Forecast
    from sm_nanogpt.launcher.library import (
        Job,
        Plan,
        forecast,
        job,
        jobs,
        launch,
        prepare,
        sweep,
    )
    from sm_nanogpt.launcher.models.load import load_model
    from sm_nanogpt.launcher.models.sample import stream_samples
    from sm_nanogpt.launcher.sagemaker.cost import CeilingTooLow, Unconfirmed
    from sm_nanogpt.launcher.settings import Settings
    from sm_nanogpt.launcher.text.corpus import upload_data
    from sm_nanogpt.launcher.text.store import Upload
    from sm_nanogpt.launcher.text.uploads import uploads
    from sm_nanogpt.launcher.tracking import NotYours

MODULES = {
    "aws": ["Denied", "Missing", "OverQuota", "Unreachable"],
    "errors": ["InputError", "ServiceError"],
    "description": ["JobDescription"],
    "files.documents": ["Damaged"],
    "launching.forecasts": ["Forecast"],
    "job": ["Request"],
    "library": ["Job", "Plan", "forecast", "job", "jobs", "launch", "prepare", "sweep"],
    "models.load": ["load_model"],
    "models.sample": ["stream_samples"],
    "sagemaker.cost": ["CeilingTooLow", "Unconfirmed"],
    "settings": ["Settings"],
    "text.corpus": ["upload_data"],
    "text.store": ["Upload"],
    "text.uploads": ["uploads"],
    "tracking": ["NotYours"],
}
MODULE_OF = {name: module for module, names in MODULES.items() for name in names}

__all__ = [
    "CeilingTooLow", "Damaged", "Denied", "Forecast", "InputError", "Job", "JobDescription",
    "Missing", "NotYours", "OverQuota", "Plan", "Request", "ServiceError", "Settings",
    "Unconfirmed", "Unreachable", "Upload", "forecast", "job", "jobs", "launch", "load_model",
    "prepare", "stream_samples", "sweep", "upload_data", "uploads",
]  # fmt: skip

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF:
        raise AttributeError(f"module 'sm_nanogpt' has no attribute {name!r}")
    value = getattr(import_module(f"sm_nanogpt.launcher.{MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
