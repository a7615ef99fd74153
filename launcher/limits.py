"""What SageMaker's API takes, by boto3's own model of it: lengths, counts, ranges and characters.

boto3 itself checks only that a request has the right types, so AWS would refuse the rest later.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import StringConstraints, TypeAdapter, ValidationError
from pydantic_core import SchemaError

Shape = Mapping[str, Any]  # a type of the API, as botocore's JSON file describes it


@dataclass(frozen=True)
class Violation:
    """A value that SageMaker would refuse, and why. path leads to it: the names of members and
    keys, and positions in lists."""

    path: tuple[str | int, ...]
    value: object
    problem: str

    @property
    def short_value(self) -> str | None:
        """The value for a message, cut if it is long; None if it is a list or the like."""
        if not isinstance(self.value, str | int):
            return None
        text = str(self.value)
        return text if len(text) <= 60 else f"{text[:60]}..."


@functools.cache
def shapes() -> dict[str, Shape]:
    """The shapes of SageMaker's API by name. Reading them takes a tenth of a second."""
    from botocore.loaders import create_loader

    model = create_loader().load_service_model("sagemaker", "service-2")
    return dict(model["shapes"])


def instance_types() -> Sequence[str]:
    """The training instance types that boto3 knows; SageMaker may have newer ones."""
    return tuple(shapes()["TrainingInstanceType"]["enum"])


def violations(
    value: Any, shape: str | Shape, path: tuple[str | int, ...] = ()
) -> Iterator[Violation]:
    """Yield what SageMaker would refuse of a value of this shape, from the outside in.

    Choices among words are not checked: boto3 may be older than an instance type.
    """
    shape = shapes()[shape] if isinstance(shape, str) else shape
    if problem := limit_problem(value, shape):
        yield Violation(path, value, problem)
    if shape["type"] == "list":
        for index, item in enumerate(value):
            yield from violations(item, shape["member"]["shape"], (*path, index))
    elif shape["type"] == "map":
        for key, item in value.items():
            yield from violations(key, shape["key"]["shape"], path)
            yield from violations(item, shape["value"]["shape"], (*path, key))
    elif shape["type"] == "structure":
        for name, item in value.items():
            yield from violations(item, shape["members"][name]["shape"], (*path, name))


def limit_problem(value: Any, shape: Shape) -> str:
    """Why a value does not fit its shape, without what is in it; '' if it fits."""
    minimum, maximum = shape.get("min"), shape.get("max")
    if shape["type"] in ("integer", "long"):
        verb, unit, size = "is", "", value
    elif shape["type"] == "string":
        verb, unit, size = "has", " characters", len(value)
    elif shape["type"] in ("list", "map"):
        verb, unit, size = "has", " entries", len(value)
    else:
        return ""
    if maximum is not None and size > maximum:
        return f"{verb} {size:,}{unit}, and SageMaker takes at most {maximum:,}"
    if minimum is not None and size < minimum:
        return f"{verb} {size:,}{unit}, and SageMaker takes at least {minimum:,}"
    if shape["type"] == "string" and not is_utf8(value):
        return "is not UTF-8"
    pattern = shape.get("pattern", "")
    if pattern and not fits_pattern(value, pattern):
        return f"must match {pattern}"
    return ""


def is_utf8(text: str) -> bool:
    """False for what Python makes of an argument with other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def fits_pattern(text: str, pattern: str) -> bool:
    """True if a pattern of the API matches all of a text, or cannot be read here.

    Patterns are Java's, with classes such as \\p{L}, which Python's `re` lacks and pydantic has.
    """
    adapter = adapter_for(pattern)
    if adapter is None:
        return True
    try:
        adapter.validate_python(text)
    except ValidationError:
        return False
    return True


@functools.cache
def adapter_for(pattern: str) -> TypeAdapter[str] | None:
    """What checks a text by a pattern; None if only Java reads the pattern: AWS checks it then."""
    try:
        return TypeAdapter(Annotated[str, StringConstraints(pattern=f"^(?:{pattern})$")])
    except SchemaError:
        return None
