"""Records: the documents and conversations in lines of JSON.

A reader yields the place of a record, such as `chats.jsonl:12`, and the record itself, as
json.loads returns it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from itertools import count
from typing import IO, Any

from launcher.errors import InputError
from launcher.files.documents import read_text
from launcher.models.encoder import LONGEST
from launcher.text.chats import turns_of

LONGEST_RECORD = 1 << 26  # bytes, or characters: a record is in memory as a whole
PIECE = LONGEST  # characters of a piece; a longer one takes longer than its parts
TEXT = "text"  # the field of the text, unless --column names another
EXAMPLE = 'a record must be like {"text": "..."} or {"messages": [...]}'

Records = Iterator[tuple[str, Any]]


def document_of(record: Any, place: str, column: str = TEXT) -> tuple[bool, Iterator[str]]:
    """Whether a record is a conversation, and its turns or pieces of its text.

    `column` is the field of the text. If it is not the default, it comes before a conversation in
    other fields, and may hold one itself, as a list of messages.

    Raises:
        InputError: the record is neither; the error starts with `place`.
    """
    if not isinstance(record, (dict, list)):
        raise InputError(f"{place}: no JSON object; {EXAMPLE}")
    text = record.get(column) if isinstance(record, dict) else None
    if column == TEXT or text is None:
        pieces = turns_of(record, place)
    else:
        pieces = turns_of(text, place) if isinstance(text, list) else None
    is_chat = pieces is not None
    if pieces is None:
        if text is None and column in record:  # null, as an empty cell of a table
            text = ""
        if not isinstance(text, str):
            raise no_text(place, column, record)
        pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    try:
        for piece in pieces:
            piece.encode()
    except UnicodeEncodeError:
        raise InputError(f"{place}: half of a surrogate pair in its text") from None
    return is_chat, iter(pieces)


def no_text(place: str, column: str, fields: Iterable[str]) -> InputError:
    names = ", ".join(f"`{name}`" for name in fields) or "no others"
    return InputError(
        f"{place}: no text in the field `{column}`; there are {names}: name the one that holds the"
        " text with --column"
    )


def json_lines(file: IO[bytes], path: str) -> Records:
    """Each line of a stream."""
    for number in count(1):
        line = file.readline(LONGEST_RECORD + 1)
        if not line:
            return
        place = f"{path}:{number}"
        if len(line) > LONGEST_RECORD:
            raise InputError(f"{place}: the line is longer than 64 MiB; split it")
        if line.isspace():
            continue
        for _ in read_text(io.BytesIO(line), place, len(line)):  # raises if it is not UTF-8
            pass
        try:
            record = json.loads(line.rstrip())
        except (ValueError, RecursionError) as error:
            raise not_json(place, error) from None
        yield place, record


def not_json(place: str, error: Exception, before: int = 0) -> InputError:
    """The error for what json cannot decode; `before` counts the lines before it in an array."""
    where = ""
    if isinstance(error, json.JSONDecodeError):
        lines = before + error.lineno - 1
        where = f" at {f'line {lines + 1}, ' if lines else ''}column {error.colno}"
    return InputError(f"{place}: not JSON{where} ({getattr(error, 'msg', error)}); {EXAMPLE}")
