"""What identity policies of IAM allow, judged offline: deny over allow over nothing.

As https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements.html has it. What is
not known here raises, so that no policy passes for the wrong reason.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Context = Mapping[str, str | list[str]]

VARIABLE = re.compile(r"\$\{([^{}]*)\}")
WILDCARDS = {"*": ".*", "?": "."}
NO_WILDCARDS: dict[str, str] = {}


def allowed(
    documents: Sequence[dict[str, Any]], action: str, resource: str, context: Context
) -> bool:
    """Whether identity policies allow an action (`s3:GetObject`) on a resource (its ARN, or `*`).

    context holds the request's condition keys, their names in any case.

    Raises:
        NotImplementedError: a policy uses what is not judged here.
    """
    lowered = {name.lower(): value for name, value in context.items()}
    effects = {
        statement["Effect"]
        for document in documents
        for statement in statements(document)
        if applies(statement, action, resource, lowered)
    }
    return effects == {"Allow"}


def statements(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The statements of a document, which knows variables only in the newer version."""
    if document.get("Version") != "2012-10-17":
        raise NotImplementedError(f"policy version {document.get('Version')!r}")
    actual = document["Statement"]
    return [actual] if isinstance(actual, dict) else list(actual)


def applies(statement: dict[str, Any], action: str, resource: str, context: Context) -> bool:
    """Whether a statement speaks of this request. The names in context are in lower case."""
    elements = {"Sid", "Effect", "Action", "NotAction", "Resource", "NotResource", "Condition"}
    if unknown := statement.keys() - elements:
        raise NotImplementedError(f"in an identity policy: {sorted(unknown)}")
    return (
        any_matches(statement, "Action", lambda pattern: action_matches(pattern, action))
        and any_matches(statement, "Resource", lambda p: resource_matches(p, resource, context))
        and all(
            condition_holds(operator, key, listed(values), context)
            for operator, keys in statement.get("Condition", {}).items()
            for key, values in keys.items()
        )
    )


def any_matches(statement: dict[str, Any], element: str, matches: Callable[[str], bool]) -> bool:
    """Whether Action or Resource names it, or NotAction or NotResource does not."""
    if (element in statement) == (f"Not{element}" in statement):
        raise ValueError(f"a statement has either {element} or Not{element}")
    if element in statement:
        return any(matches(pattern) for pattern in listed(statement[element]))
    return not any(matches(pattern) for pattern in listed(statement[f"Not{element}"]))


@functools.cache
def action_matches(pattern: str, action: str) -> bool:
    return bool(expression(pattern.lower(), WILDCARDS, {}).fullmatch(action.lower()))


def resource_matches(pattern: str, resource: str, context: Context) -> bool:
    """A pattern that ends early goes on with wildcards; variables stand in its last part alone."""
    if pattern == "*":
        return True
    parts = split_arn(pattern)
    if any(VARIABLE.search(part) for part in parts[:5]):
        return False
    try:
        return arn_matches(":".join(parts + ["*"] * (6 - len(parts))), resource, context)
    except KeyError:  # a variable without a value
        return False


def arn_matches(pattern: str, arn: str, context: Context) -> bool:
    """Wildcards stay inside one of the six parts; the last holds colons and slashes too."""
    expected, actual = split_arn(pattern), arn.split(":", 5)
    if len(expected) != 6:
        raise NotImplementedError(f"an ARN of fewer than six parts: {pattern}")
    return len(actual) == 6 and all(
        expression(part, WILDCARDS, context).fullmatch(value)
        for part, value in zip(expected, actual, strict=True)
    )


def split_arn(pattern: str) -> list[str]:
    """As split(":", 5), but a variable keeps its colon."""
    hidden = VARIABLE.sub(lambda match: match[0].replace(":", "\0"), pattern)
    return [part.replace("\0", ":") for part in hidden.split(":", 5)]


def expression(pattern: str, wildcards: Mapping[str, str], context: Context) -> re.Pattern[str]:
    """A regular expression for a pattern with its variables filled in, by their letter.

    Raises:
        KeyError: a variable has no single value.
    """
    parts = VARIABLE.split(pattern)  # text, variable, text, ...
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = re.escape(variable(part, context))
        else:
            parts[i] = "".join(wildcards.get(letter, re.escape(letter)) for letter in part)
    return re.compile("".join(parts), re.DOTALL)


def variable(name: str, context: Context) -> str:
    if name in ("*", "?", "$"):
        return name
    key, comma, default = name.partition(",")
    value = context.get(key.strip().lower())
    if isinstance(value, str):
        return value
    if comma and value is None:
        return default.strip()[1:-1]
    raise KeyError(key)


def listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, (str, bool)) else list(value)


# -- conditions ------------------------------------------------------------------------------------


def text_is(pattern: str, value: str, context: Context) -> bool:
    return bool(expression(pattern, NO_WILDCARDS, context).fullmatch(value))


def text_is_like(pattern: str, value: str, context: Context) -> bool:
    return bool(expression(pattern, WILDCARDS, context).fullmatch(value))


def truth_is(pattern: str, value: str, context: Context) -> bool:
    return str(pattern).lower() == value.lower()


OPERATORS: dict[str, Callable[[str, str, Context], bool]] = {
    "StringEquals": text_is,
    "StringLike": text_is_like,
    "ArnEquals": arn_matches,  # AWS makes no difference between the two
    "ArnLike": arn_matches,
    "Bool": truth_is,
}
NEGATED = {
    "StringNotEquals": "StringEquals",
    "StringNotLike": "StringLike",
    "ArnNotEquals": "ArnEquals",
    "ArnNotLike": "ArnLike",
}


def condition_holds(operator: str, key: str, expected: Sequence[str], context: Context) -> bool:
    """Whether one key of a condition holds; several values of a policy are alternatives."""
    actual = context.get(key.lower())
    if operator == "Null":
        return (actual is None) == (str(expected[0]).lower() == "true")
    every, colon, name = operator.rpartition(":")
    if colon and every not in ("ForAllValues", "ForAnyValue"):
        raise NotImplementedError(f"condition operator {operator}")
    name, if_exists = name.removesuffix("IfExists"), name.endswith("IfExists")
    negated = name in NEGATED
    matches = OPERATORS.get(NEGATED.get(name, name))
    if matches is None:
        raise NotImplementedError(f"condition operator {operator}")
    if actual is None:
        return if_exists or every == "ForAllValues" or (negated and not every)
    if not every and not isinstance(actual, str):
        raise NotImplementedError(f"{operator} of {key}, which has several values")

    def holds(value: str) -> bool:
        return any(met(matches, pattern, value, context) for pattern in expected) != negated

    quantifier = any if every == "ForAnyValue" else all
    return quantifier(holds(value) for value in listed(actual))


def met(
    matches: Callable[[str, str, Context], bool], pattern: str, value: str, context: Context
) -> bool:
    try:
        return matches(pattern, value, context)
    except KeyError:  # a variable without a value matches nothing
        return False
