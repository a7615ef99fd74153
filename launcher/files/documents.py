"""Read documents (JSON, TOML) that a user, another version or an attacker wrote.

A document is a regular file or an S3 object of at most MAX_BYTES. It is parsed into a pydantic
model, a dataclass or a typed dict, which enforces bounds. Pydantic's parser refuses nesting deeper
than 200 and integers of more than 4,300 digits.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from sm_nanogpt.entry_point.errors import os_reason
from sm_nanogpt.entry_point.files import read_file
from sm_nanogpt.launcher.errors import InputError, ServiceError, rephrased
from sm_nanogpt.launcher.values import parse_bytes

T = TypeVar("T")

# Enough for the manifest of 50,000 files, or a tokenizer of 100,000 characters. To refuse the worst
# document of this size takes half a gigabyte and five seconds.
MAX_BYTES = 1 << 21

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, le=10**12)]  # or as 1MB
Moment = Annotated[float, Field(ge=0, lt=253_402_300_800)]  # seconds since the epoch: to 9999
Integer = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Number = Integer | Annotated[float, Field(allow_inf_nan=False)]
Scalar = Number | bool | str

adapter_for: Callable[[Any], TypeAdapter[Any]] = lru_cache(TypeAdapter)


class Document(BaseModel):
    """The base class of our documents. Numbers in them are finite."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Damaged(ServiceError):
    """A document does not fit its model."""


def parse(content: bytes | Mapping[str, Any], kind: type[T], name: object) -> T:
    """Validate a JSON document, as bytes or parsed, as `kind`.

    name: what the error calls the document. Raises Damaged.
    """
    adapter: TypeAdapter[T] = adapter_for(kind)
    try:
        if isinstance(content, bytes):
            return adapter.validate_json(content)
        return adapter.validate_python(content)
    except ValidationError as error:
        problem = first_problem(error)
    except InputError as error:  # raised by TrainingJob
        problem = str(error)
    raise Damaged(f"{name} is damaged, or of another version of sm-nanogpt ({problem})")


def first_problem(error: ValidationError) -> str:
    """The first field that pydantic refused, and why: `rows.3.loss: must be at least 0`."""
    details = error.errors(include_url=False, include_input=False)[0]
    problem = rephrased(details["msg"])
    field = " ".join(".".join(map(str, details["loc"])).split())
    if not field:
        return problem
    return f"{field}: {problem}"


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file of plain values.

    Raises InputError if it cannot be read, or if a value is a table.
    """
    try:
        values = tomllib.loads(read_file(path, MAX_BYTES).decode())
        # tomllib reads an integer of any length. One with over 4,300 digits, which no message could
        # show, fails here; the JSON is not needed.
        json.dumps(values, default=str)
    except OSError as error:
        raise InputError(f"{path}: {os_reason(error)}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not TOML: {error}") from None
    for name, value in values.items():
        if isinstance(value, dict):
            problem = f"has a section [{name}], or a table of that name; give plain values"
            raise InputError(f"{path}: {problem}")
    return values
