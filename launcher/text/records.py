"""Records: the documents and conversations in lines of JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from itertools import count
from typing import IO, Any

from launcher.errors import InputError
from launcher.files.documents import read_text
from launcher.models.encoder import LONGEST
from launcher.text.chats import turns_of

LONGEST_LINE = 1 << 26  # bytes: a document of *.jsonl is in memory as a whole
PIECE = LONGEST  # characters of a piece; a longer one takes longer than its parts
EXAMPLE = 'a line must be like {"text": "..."} or {"messages": [...]}'


def json_lines(file: IO[bytes], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of a stream of JSON lines, and its place, such as `chats.jsonl:12`."""
    for number in count(1):
        line = file.readline(LONGEST_LINE + 1)
        if not line:
            return
        if len(line) > LONGEST_LINE:
            raise InputError(f"{path}:{number}: the line is longer than 64 MiB; split it")
        if line.isspace():
            continue
        yield f"{path}:{number}", object_of(line.rstrip(), f"{path}:{number}")


def document_of(found: dict[str, Any], place: str) -> tuple[bool, Iterator[str]]:
    """Whether a record is a conversation, and its turns or pieces of its text."""
    if "messages" in found:
        return True, iter(turns_of(found, place))
    text = text_of(found, place)
    return False, (text[i : i + PIECE] for i in range(0, len(text), PIECE))


def object_of(line: bytes, name: str) -> dict[str, Any]:
    """The object in a line of *.jsonl. Raises InputError; its message starts with `name`."""
    for _ in read_text(io.BytesIO(line), name, len(line)):  # raises if it is not UTF-8
        pass
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        problem = f"not JSON at column {error.pos + 1} ({error.msg})"
    except (ValueError, RecursionError) as error:
        problem = f"not JSON ({error})"
    else:
        if isinstance(found, dict):
            return found
        problem = "no JSON object"
    raise InputError(f"{name}: {problem}; {EXAMPLE}")


def text_of(found: dict[str, Any], name: str) -> str:
    """The text of a document. Raises InputError; its message starts with `name`."""
    text = found.get("text")
    if not isinstance(text, str):
        raise InputError(f"{name}: no string in the field `text`; {EXAMPLE}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name}: half of a surrogate pair in `text`; {EXAMPLE}") from None
    return text
