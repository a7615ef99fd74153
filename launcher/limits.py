"""Check values against the limits of SageMaker's API: lengths, counts, ranges, and characters.

boto3 has these limits in its model of the API. It only checks the types of a request itself, so AWS
would refuse the request later.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import StringConstraints, TypeAdapter, ValidationError
from pydantic_core import SchemaError

from sm_nanogpt.launcher.values import is_utf8

MAX_SHOWN = 60  # characters of a value in a message

Shape = Mapping[str, Any]  # a type of the API, as botocore's JSON file describes it


@dataclass(frozen=True)
class Violation:
    """A value that SageMaker would refuse, and why."""

    path: tuple[str | int, ...]  # of the value: names of members, keys, and indices of lists
    value: object
    problem: str

    @property
    def short_value(self) -> str | None:
        """The value for a message, cut if it is long; None if it is neither a text nor a number."""
        if not isinstance(self.value, str | int):
            return None
        text = str(self.value)
        if len(text) <= MAX_SHOWN:
            return text
        return f"{text[:MAX_SHOWN]}..."


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
    """Yield what SageMaker would refuse in a value of this shape: first the value, then its parts.

    shape may be the name of a shape. path is that of the value. Enumerations are not checked, since
    boto3 may be older than an instance type.
    """
    if isinstance(shape, str):
        shape = shapes()[shape]
    problem = limit_problem(value, shape)
    if problem:
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
    """Why a value, without its parts, does not fit its shape; '' if it fits."""
    match shape["type"]:
        case "integer" | "long":
            return range_problem(value, f"is {value:,}", shape)
        case "list" | "map":
            return range_problem(len(value), f"has {len(value):,} entries", shape)
        case "string":
            problem = range_problem(len(value), f"has {len(value):,} characters", shape)
            return problem or text_problem(value, shape)
        case _:
            return ""


def range_problem(size: int, subject: str, shape: Shape) -> str:
    """Why a number, or the length of a text or a list, is out of range; or ''."""
    minimum, maximum = shape.get("min"), shape.get("max")
    if maximum is not None and size > maximum:
        return f"{subject}, and SageMaker takes at most {maximum:,}"
    if minimum is not None and size < minimum:
        return f"{subject}, and SageMaker takes at least {minimum:,}"
    return ""


def text_problem(text: str, shape: Shape) -> str:
    """Why the characters of a text do not fit its shape, or ''."""
    if not is_utf8(text):
        return "is not UTF-8"
    pattern = shape.get("pattern")
    if pattern and not fits_pattern(text, pattern):
        return f"must match {pattern}"
    return ""


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
    """The adapter that checks a text by a pattern; None if only Java can read the pattern."""
    try:
        return TypeAdapter(Annotated[str, StringConstraints(pattern=f"^(?:{pattern})$")])
    except SchemaError:
        return None
