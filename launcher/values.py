"""Convert values to Python's own types, check texts for UTF-8, and format numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

PLAIN = (str, int, float, bool, type(None))
BYTE_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
}


def plain(value: Any) -> Any:
    """Convert a value that a user passes to one of Python's own types.

    Numbers, texts and truth values of NumPy, pandas and PyTorch become Python's, and their arrays
    become lists. A path becomes its text, an upload its URI, and a job its id. The items of lists,
    tuples and dictionaries are converted too. A value of another type is returned as it is.
    """
    if type(value) in PLAIN:
        return value
    if hasattr(value, "tolist"):  # an array, or a number from an array
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


def is_utf8(text: str) -> bool:
    """False if a text has lone surrogates, as Python decodes an argument that is not UTF-8."""
    return text.isascii() or not re.search("[\ud800-\udfff]", text)


def parse_bytes(value: object) -> object:
    """The bytes of a text such as 250kB, 1 MB or 1.5MiB; any other value is returned as it is.

    Raises ValueError if a text is no number of bytes.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?((?:[kmg]i?)?)b?", value.strip().lower())
    if match is None:
        raise ValueError("must be a number of bytes, such as 250kB or 1MB")
    return int(float(match[1]) * BYTE_UNITS[match[2]])


def in_units(n_bytes: float) -> str:
    """A number of bytes as text, such as `1.01kB` or `12.3MB`."""
    from tqdm import tqdm

    return f"{tqdm.format_sizeof(n_bytes)}B"


def counted(n: int, noun: str) -> str:
    """A number of things as text, such as `1 file` or `2,000 files`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
