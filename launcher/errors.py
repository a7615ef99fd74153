"""The two kinds of errors. Each has a message and facts, from which the command line makes advice.

A message names an argument as the library does, `max_wait=60`, and not the option. Below
launcher.cli, no message names a command or an option. launcher.cli.remedies has those, by code. It
also writes the option in place of another argument, which a message has as `resume=`.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

# Phrases of pydantic's messages, and the phrases that replace them.
PYDANTIC_PHRASES = {
    "Value error, ": "",
    "Input should be": "must be",
    "String should match": "must match",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
}

MAX_MESSAGE = 1000  # characters; a user may give a whole text in place of a path
MAX_VALUE = 200  # characters of a value in a message
MAX_CHARACTERS_SHOWN = 20


class LauncherError(Exception):
    """An error whose message is one sentence. Its facts are attributes, such as `error.job_id`.

    code is the key of a remedy in REMEDIES of launcher.cli.remedies; "" if there is none. field is
    the argument that is wrong, by its name in Request, Settings, or a function, and value is its
    value. A message of over MAX_MESSAGE characters is cut in the middle.
    """

    def __init__(
        self, problem: str, code: str = "", field: str = "", value: object = None, **facts: Any
    ) -> None:
        problem = shortened(problem)
        message = problem
        if field:
            argument = field
            if value is not None:
                argument = shortened(f"{field}={text_of(value)}", MAX_VALUE)
            message = f"{argument}: {problem}"
        super().__init__(message)

        self.problem = problem
        self.code = code
        self.field = field
        self.value = value
        self.names_field = bool(field)  # in its message
        self.facts = facts
        vars(self).update(facts)

    if TYPE_CHECKING:  # the facts are attributes

        def __getattr__(self, name: str) -> Any: ...

    def within(self, context: str) -> Self:
        """Return the same error with a context before its message: `context: ...`."""
        error = type(self)(f"{context}: {self}", self.code, **self.facts)
        error.field = self.field
        error.value = self.value
        return error


@contextmanager
def about(field: str, value: object = None) -> Iterator[None]:
    """Set the field and the value of a LauncherError that the body raises, unless it has a field.

    Its message does not change.
    """
    try:
        yield
    except LauncherError as error:
        if not error.field:
            error.field = field
            error.value = value
        raise


class InputError(LauncherError):
    """The user gave an argument or a file that cannot be used: exit code 2."""


class ServiceError(LauncherError):
    """A job, a store or a service failed: exit code 1."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came."""


def shortened(text: str, limit: int = MAX_MESSAGE) -> str:
    """Cut the middle out of a text of more than `limit` characters.

    The end stays, since the end of a message says what to do.
    """
    if len(text) <= limit:
        return text
    return f"{text[: limit * 7 // 10]} ... {text[-limit * 3 // 10 :]}"


def joined(*parts: str) -> str:
    """Join the parts of a message by semicolons. After a question, a space is enough."""
    text = ""
    for part in parts:
        if text:
            text += " " if text.endswith("?") else "; "
        text += part
    return text


def text_of(value: object) -> str:
    """A value in a message, as a user types it: a float of -1 is `-1`."""
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def not_installed_error(package: str) -> InputError:
    """Return the error for a missing package, which the extra `data` installs."""
    return InputError(
        f"the package {package} is missing; in the clone of sm-nanogpt, install it as you installed"
        " sm-nanogpt: `pip install -c constraints.txt -e '.[data]'`,"
        f" `uv tool install -c constraints.txt '.[data]'`, or `pipx inject sm-nanogpt {package}`"
    )


def did_you_mean(typed: str, names: Iterable[str], limit: int = 3, cutoff: float = 0.6) -> str:
    """Return `did you mean A or B?` with up to `limit` names that resemble `typed`, or ''."""
    matches = difflib.get_close_matches(typed, list(names), limit, cutoff)
    if not matches:
        return ""
    return f"did you mean {' or '.join(matches)}?"


def unknown_characters_error(name: str, unknown: Iterable[str]) -> InputError:
    """Return the error for a text with characters that the model's vocabulary lacks.

    name is that of the text.
    """
    unknown = set(unknown)
    if unknown == {"\r"}:  # the text is of Windows, and the model has seen LF alone
        problem = "ends its lines in CRLF, and the model has only seen LF"
        return InputError(f"{name} {problem}", "leave-out-returns")
    return InputError(
        f"{name} has characters that the model has never seen: {list_characters(sorted(unknown))};"
        " replace them or leave them out, or use a model of tokens, which knows all",
        "use-tokens",
    )


def list_characters(characters: list[str]) -> str:
    """Quote up to MAX_CHARACTERS_SHOWN characters for a message.

    A combining mark would join the quote before it, so it is shown as U+0301, for example.
    """
    shown = []
    for character in characters[:MAX_CHARACTERS_SHOWN]:
        if unicodedata.combining(character):
            shown.append(f"U+{ord(character):04X}")
        else:
            shown.append(repr(character))
    text = ", ".join(shown)
    if len(characters) > MAX_CHARACTERS_SHOWN:
        text += " and more"
    return text


def rephrased(message: str) -> str:
    """Rephrase a message of pydantic as our own errors are phrased."""
    for phrase, replacement in PYDANTIC_PHRASES.items():
        message = message.replace(phrase, replacement)
    return message.partition(", unable to")[0]
