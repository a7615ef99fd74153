"""Values that other libraries made, as Python's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

PLAIN = (str, int, float, bool, type(None))


def plain(value: Any) -> Any:
    """A value that a user passes, as Python's own kinds.

    Numbers, texts and truth values of NumPy, pandas and PyTorch become Python's, and their arrays
    lists. A path becomes its text, an upload its URI, and a job its id. Lists, tuples and
    dictionaries are converted inside. What is of no such kind stays as it is.
    """
    if type(value) in PLAIN:
        return value
    if hasattr(value, "tolist"):  # an array, or a number of one
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {plain(name): plain(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    for name in ("uri", "id"):
        if type(getattr(value, name, None)) is str:
            return getattr(value, name)
    return value
