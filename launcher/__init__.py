"""Train a GPT of your own in three calls, on Amazon SageMaker or on this machine.

    from launcher import Request, launch, sample, upload_data, wait

    data = upload_data("input.txt")
    job_id = launch(Request(instance="local", data=data.uri, preset="cpu"))
    wait(job_id)
    print(sample(job_id, prompt="ROMEO:")[0])

`jobs`, `describe`, `logs`, `metrics` and `stop` look after jobs that exist, and `fetch_model` gives
the directory of a trained model, which `transformers` loads too. Each takes a `Settings` where the
defaults (environment, then config file) are not wanted. What the caller got wrong raises
`InputError`; what failed on the way raises `ServiceError`. Nothing here prints: what a launch finds
out (image, price, text) is logged at level INFO below the logger `launcher`, so
`logging.basicConfig(level=logging.INFO)` shows it.

Names are imported when they are first used, so importing this package costs nothing. Importing it
raises ImportError where another package `entry_point` hides that of this project.
"""

from __future__ import annotations

import importlib
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

_own = str(Path(__file__).parents[1] / "entry_point")
_spec = find_spec("entry_point")  # a name that another project, or a copied folder, may have too
_found = (_spec.submodule_search_locations or [str(_spec.origin)])[0] if _spec else _own
if _found != _own:
    raise ImportError(
        f"package entry_point is {_found}, which hides {_own}: rename it, or start Python elsewhere"
    )

logging.getLogger(__name__).addHandler(logging.NullHandler())

if TYPE_CHECKING:
    from launcher.errors import InputError, ServiceError
    from launcher.job import JobDescription, Request
    from launcher.launching.launch import launch
    from launcher.models.fetch import fetch_model
    from launcher.models.load import load_model
    from launcher.models.sample import sample, stream_samples
    from launcher.settings import Settings
    from launcher.text.corpus import Upload, upload_data
    from launcher.text.uploads import uploads
    from launcher.tracking import describe, jobs, logs, metrics, stop, wait

_NAMES = {
    "errors": "InputError ServiceError",
    "job": "JobDescription Request",
    "launching.launch": "launch",
    "models.fetch": "fetch_model",
    "models.load": "load_model",
    "models.sample": "sample stream_samples",
    "settings": "Settings",
    "text.corpus": "Upload upload_data",
    "text.uploads": "uploads",
    "tracking": "describe jobs logs metrics stop wait",
}
_MODULE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "InputError", "JobDescription", "Request", "ServiceError", "Settings", "Upload", "describe",
    "fetch_model", "jobs", "launch", "load_model", "logs", "metrics", "sample", "stop",
    "stream_samples", "upload_data", "uploads", "wait",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'launcher' has no attribute {name!r}")
    return getattr(importlib.import_module(f"launcher.{_MODULE[name]}"), name)
