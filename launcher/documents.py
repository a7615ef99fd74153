"""One door for documents: what a person, another version or an attacker may have written.

A document is a regular file, or an object on S3, of at most LARGEST bytes. It is parsed into a
pydantic model, a dataclass or a typed dict whose bounds hold from then on. pydantic's own parser
refuses nesting deeper than 200 and integers of more than 4,300 digits.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic_core.core_schema import CoreSchema, custom_error_schema

from launcher.errors import InputError, ServiceError, must_be

T = TypeVar("T")

# Bytes: the manifest of some 50,000 files, or a tokenizer of 100,000 characters. Refusing the worst
# document of this size takes half a gigabyte and five seconds.
LARGEST = 1 << 21

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Moment = Annotated[float, Field(ge=0, lt=253_402_300_800)]  # seconds since the epoch: to 9999
Number = (
    Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | Annotated[float, Field(allow_inf_nan=False)]
)


class OneError:
    """Says once what a value of several types must be, and not for each of them."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        said = "Input should be a number, true, false or text"
        return custom_error_schema(handler(source), "scalar", custom_error_message=said)


Scalar = Annotated[bool | Number | str, OneError]


@lru_cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class Document(BaseModel):
    """The base of our documents: every number is finite."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Damaged(ServiceError):
    """A document is not what its model says."""


def open_file(path: Path) -> BufferedReader:
    """Opens a regular file to read: a named pipe would wait for a writer, a device may never end.

    Raises:
        OSError: it is something else, or cannot be opened.
    """

    def without_waiting(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NONBLOCK)
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # which `open` refuses itself
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", name)
        return descriptor

    return open(path, "rb", opener=without_waiting)


def read_file(path: Path) -> bytes:
    """The content of a regular file of at most LARGEST bytes. Raises OSError."""
    with open_file(path) as file:
        return check_size(file.read(LARGEST + 1))


def check_size(content: bytes) -> bytes:
    """The content. Raises OSError if it has more than LARGEST bytes."""
    if len(content) > LARGEST:
        raise OSError(errno.EFBIG, f"larger than {LARGEST >> 20} MiB")
    return content


def parse(content: bytes | Mapping[str, Any], kind: type[T], name: object) -> T:
    """A JSON document, or one that was parsed before, as its kind.

    Raises:
        Damaged: it is not of this kind, as an error in one line that begins with `name`.
    """
    known: Any = kind  # as a type is hashable to lru_cache alone
    try:
        if isinstance(content, bytes):
            value: T = adapter(known).validate_json(content)
        else:
            value = adapter(known).validate_python(content)
        return value
    except ValidationError as error:
        count = error.error_count()
        reason = reason_of(error) if count < 1000 else f"{count:,} values are wrong"
    except InputError as error:  # of a TrainingJob
        reason = str(error)
    raise Damaged(f"{name} is damaged, or of another version of sm-nanogpt ({reason})")


def reason_of(error: ValidationError) -> str:
    """The first thing that is wrong, and where."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = " ".join(".".join(map(str, first["loc"])).split())
    return f"{place}: {must_be(first['msg'])}" if place else must_be(first["msg"])


def read_toml(path: Path, tables: Sequence[str] = ()) -> dict[str, Any]:
    """The values of a TOML file. Raises InputError if it cannot be read, or has other tables."""
    try:
        values = tomllib.loads(read_file(path).decode())
        json.dumps(values, default=str)  # an integer of 5,000 digits, which no error could show
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not TOML: {error}") from None
    for name, value in values.items():
        if isinstance(value, dict) and name not in tables:
            raise InputError(f"{path}: [{name}]: delete this line; the file has no sections")
    return values
