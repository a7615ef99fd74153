"""The two kinds of errors, and words that errors share."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

# Pydantic's words, and ours.
WORDS = {
    "Value error, ": "",
    "Input should be": "must be",
    "String should match": "must match",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
}


class InputError(Exception):
    """The user gave something that cannot be used: exit code 2. The text says what to do."""


class ServiceError(Exception):
    """A job, a store or a service failed: exit code 1. The text says what to do next."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came."""


def not_installed(package: str, extra: str) -> InputError:
    """The error for a package that only an extra of pyproject.toml brings."""
    return InputError(
        f"the package {package} is missing; in the clone of sm-nanogpt, install it as you installed"
        f" sm-nanogpt: `pip install -c constraints.txt -e '.[{extra}]'`,"
        f" `uv tool install -c constraints.txt '.[{extra}]'`, or `pipx inject sm-nanogpt {package}`"
    )


def did_you_mean(word: str, known: Iterable[str], n: int = 3, cutoff: float = 0.6) -> str:
    """`did you mean A or B?` for up to n known words that are close; '' if none is."""
    near = difflib.get_close_matches(word, list(known), n, cutoff)
    return f"did you mean {' or '.join(near)}?" if near else ""


def characters(found: Iterable[str]) -> str:
    """Up to 20 characters of a text; a mark that would join the quote before it as U+0301."""
    named = [f"U+{ord(each):04X}" if unicodedata.combining(each) else repr(each) for each in found]
    return ", ".join(named[:20]) + " and more" * (len(named) > 20)


def must_be(message: str) -> str:
    """A message of pydantic in the words of our own errors."""
    for theirs, ours in WORDS.items():
        message = message.replace(theirs, ours)
    return message.partition(", unable to")[0]
