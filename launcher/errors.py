"""The two kinds of errors: what is wrong, and the facts from which to act on it.

A message says what is wrong, in the names of the library: `max_wait=60`, not the option. Below
launcher.cli no message names a command or an option; launcher.cli.words has those, by code.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

# Pydantic's words, and ours.
WORDS = {
    "Value error, ": "",
    "Input should be": "must be",
    "String should match": "must match",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
}


LONGEST = 1000  # characters of a message; somebody may pass a text where a path belongs


class LauncherError(Exception):
    """What is wrong, in one sentence, with facts to act on, which are attributes: `error.job_id`.

    code says which remedy fits, by its key in launcher.cli.words.REMEDIES; "": none. field is the
    argument that is wrong, by its name in Request, Settings or a function, and value what it was.
    A long message is cut in the middle.
    """

    def __init__(
        self, problem: str, code: str = "", field: str = "", value: object = None, **facts: Any
    ) -> None:
        problem = shortened(problem)
        subject = field if value is None else shortened(f"{field}={value}", 200)
        super().__init__(f"{subject}: {problem}" if field else problem)
        self.facts = facts
        vars(self).update(facts)
        self.problem, self.code, self.field, self.value = problem, code, field, value
        self.names_field = bool(field)  # in its message

    if TYPE_CHECKING:  # the facts are attributes

        def __getattr__(self, name: str) -> Any: ...

    def within(self, context: str) -> Self:
        """The same error with more to its message: `context: ...`."""
        error = type(self)(f"{context}: {self}", self.code, **self.facts)
        error.field, error.value = self.field, self.value
        return error


@contextmanager
def about(field: str, value: object = None) -> Iterator[None]:
    """Let an error that has no field have this one. Its message stays as it is."""
    try:
        yield
    except LauncherError as error:
        if not error.field:
            error.field, error.value = field, value
        raise


class InputError(LauncherError):
    """The user gave something that cannot be used: exit code 2."""


class ServiceError(LauncherError):
    """A job, a store or a service failed: exit code 1."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came."""


def shortened(text: str, limit: int = LONGEST) -> str:
    """A text of at most about `limit` characters: the middle of a longer one is left out, since
    the end of a message says what to do."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 7 // 10]} ... {text[-limit * 3 // 10 :]}"


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


def unknown_characters(name: str, unknown: Iterable[str]) -> InputError:
    """The error for a text of this name with characters that a model of characters lacks."""
    problem = f"{name} has characters that the model has never seen: {characters(sorted(unknown))}"
    what_to_do = "replace them or leave them out, or use a model of tokens, which knows all"
    return InputError(f"{problem}; {what_to_do}", "use-tokens")


def must_be(message: str) -> str:
    """A message of pydantic in the words of our own errors."""
    for theirs, ours in WORDS.items():
        message = message.replace(theirs, ours)
    return message.partition(", unable to")[0]
