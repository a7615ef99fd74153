"""The library: what `import sm_nanogpt` gives, whose docstring shows how to use it.

What the caller got wrong raises `InputError`; what failed on the way raises `ServiceError`, or one
of their kinds. Nothing here prints but progress bars, in a terminal or a notebook: what a launch
finds out (image, price, text) is logged at level INFO below the logger `launcher`, so
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
    from launcher.aws import Denied, Missing, OverQuota, Unreachable
    from launcher.errors import InputError, ServiceError
    from launcher.files.documents import Damaged
    from launcher.job import JobDescription, Request
    from launcher.library import Job, Plan, jobs, launch, prepare, sweep
    from launcher.models.load import load_model
    from launcher.models.sample import stream_samples
    from launcher.sagemaker.cost import CeilingTooLow, Unconfirmed
    from launcher.settings import Settings
    from launcher.text.corpus import Upload, upload_data
    from launcher.text.uploads import uploads

_NAMES = {
    "aws": "Denied Missing OverQuota Unreachable",
    "errors": "InputError ServiceError",
    "files.documents": "Damaged",
    "job": "JobDescription Request",
    "library": "Job Plan jobs launch prepare sweep",
    "models.load": "load_model",
    "models.sample": "stream_samples",
    "sagemaker.cost": "CeilingTooLow Unconfirmed",
    "settings": "Settings",
    "text.corpus": "Upload upload_data",
    "text.uploads": "uploads",
}
_MODULE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "CeilingTooLow", "Damaged", "Denied", "InputError", "Job", "JobDescription", "Missing",
    "OverQuota", "Plan", "Request", "ServiceError", "Settings", "Unconfirmed", "Unreachable",
    "Upload", "jobs", "launch", "load_model", "prepare", "stream_samples", "sweep", "upload_data",
    "uploads",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'launcher' has no attribute {name!r}")
    return getattr(importlib.import_module(f"launcher.{_MODULE[name]}"), name)
