"""Read documents (JSON, TOML) that a user, another version or an attacker wrote.

A document is a regular file or an S3 object of at most LARGEST bytes. It is parsed into a pydantic
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

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from entry_point.files import read_file
from launcher.errors import InputError, ServiceError, must_be

T = TypeVar("T")

# Bytes; enough for the manifest of 50,000 files, or a tokenizer of 100,000 characters. The worst
# document of this size takes half a gigabyte and five seconds to refuse.
LARGEST = 1 << 21

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Moment = Annotated[float, Field(ge=0, lt=253_402_300_800)]  # seconds since the epoch: to 9999
Integer = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Number = Integer | Annotated[float, Field(allow_inf_nan=False)]
Scalar = Number | bool | str

adapter: Callable[[Any], TypeAdapter[Any]] = lru_cache(TypeAdapter)


class Document(BaseModel):
    """Base class of our documents; numbers are finite."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Damaged(ServiceError):
    """A document does not fit its model."""


def parse(content: bytes | Mapping[str, Any], kind: type[T], name: object) -> T:
    """Validate a JSON document, as bytes or parsed, as `kind`. Raises Damaged, naming `name`."""
    fits: TypeAdapter[T] = adapter(kind)
    try:
        if isinstance(content, bytes):
            return fits.validate_json(content)
        return fits.validate_python(content)
    except ValidationError as error:
        reason = reason_of(error)
    except InputError as error:  # of a TrainingJob
        reason = str(error)
    raise Damaged(f"{name} is damaged, or of another version of sm-nanogpt ({reason})")


def reason_of(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = " ".join(".".join(map(str, first["loc"])).split())
    return f"{place}: {must_be(first['msg'])}".removeprefix(": ")


def read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(read_file(path, LARGEST).decode())
        json.dumps(values, default=str)  # fails for an integer that is too long for any message
        sections = [name for name, value in values.items() if isinstance(value, dict)]
        if not sections:
            return values
        why = f"has a section, [{sections[0]}]; delete this line"
    except OSError as error:
        why = str(error.strerror)
    except (ValueError, RecursionError) as error:
        why = f"not TOML: {error}"
    raise InputError(f"{path}: {why}")
