"""Records: documents and conversations in JSON lines, JSON arrays, tables, and Parquet files.

Each reader yields the place of a record, such as `chats.jsonl:12`, and the record itself, as
json.loads returns it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import IO, Any

from launcher.errors import InputError, not_installed
from launcher.files.documents import not_text, read_text
from launcher.models.encoder import LONGEST as PIECE
from launcher.models.encoder import is_utf8
from launcher.text.chats import FIELDS, may_be_chat, turns_of

LONGEST_RECORD = 1 << 26  # bytes, or characters: a record is in memory as a whole
CHUNK = 1 << 20  # bytes of a file that are read at once
ROWS = 128  # rows of a Parquet file that are in memory at once

Records = Iterator[tuple[str, Any]]


def document_of(record: Any, place: str, column: str = "text") -> tuple[bool, Iterator[str]]:
    """Whether a record is a conversation, and its turns or pieces of its text.

    `column` is the field of the text. If it is not the default, it comes before a conversation in
    other fields, and may hold one itself, as a list of messages. Raises InputError.
    """
    fields = record if isinstance(record, dict) else {}
    text = fields.get(column)
    if column == "text" or text is None:
        pieces = turns_of(record, place, column)
    else:
        pieces = turns_of(text, place) if isinstance(text, list) else None
    if text is None and column in fields:  # null, as an empty cell of a table
        text = ""
    is_chat = pieces is not None
    if pieces is None and isinstance(text, str):
        pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    if pieces is not None:
        if all(map(is_utf8, pieces)):
            return is_chat, iter(pieces)
        error = InputError("half of a surrogate pair in its text")
    elif fields is not record or "mapping" in fields:
        what = "ChatGPT's own export is not read" if fields else "no JSON object"
        error = InputError(f'{what}; records are like {{"text": "..."}} or {{"messages": [...]}}')
    else:
        texts = [f"`{name}`" for name, value in fields.items() if isinstance(value, str)]
        what = f"`{column}` is no text" if column in fields else f"no field `{column}`"
        names = ", ".join(texts) or "none"
        error = InputError(f"{what}; fields of text: {names}", "other-column")
    raise error.within(place)


def json_lines(file: IO[bytes], path: str) -> Records:
    lines = iter(lambda: file.readline(LONGEST_RECORD + 1), b"")
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        place = f"{path}:{number}"
        try:
            record = json.loads(line.decode().rstrip())
        except UnicodeDecodeError as error:
            raise not_text(place, line, error.start) from None
        except (ValueError, RecursionError) as error:
            column, why = getattr(error, "colno", 1), getattr(error, "msg", error)
            hint = "a record must be on one line, of at most 64 MiB: `jq -c . FILE`"
            raise InputError(f"{place}: not JSON at column {column} ({why}); {hint}") from None
        yield place, record


def json_array(file: IO[bytes], path: str) -> Records:
    """Each item of an array, which is in memory as a whole."""
    try:
        items = json.loads("".join(part for _, part in read_text(file, path, CHUNK)))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error})") from None
    for number, item in enumerate(items, 1):
        yield f"{path}, item {number}", item


def table(file: IO[bytes], path: str) -> Records:
    """Each row of a table, below the names of its columns. Excel may separate by semicolons; one
    column needs no separator, and may hold any."""
    csv.field_size_limit(LONGEST_RECORD)
    lines = io.TextIOWrapper(file, "utf-8", newline="")
    first = lines.readline()
    delimiter = max("\x1f,;\t", key=first.count)
    rows = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
    names, line, problem = list[str](), 1, ""
    try:
        for row in rows:
            names = names or row
            problem = twins(names) if row is names else ""
            if row and len(row) != len(names):
                problem = f"{len(row)} cells, but the first row has {len(names)}"
            if problem:
                break
            if row and row is not names:
                yield f"{path}:{line}", dict(zip(names, row, strict=True))
            line = rows.line_num + 1
    except csv.Error as error:
        problem = f'{error}; a cell that begins with " ends with ", and each " between is doubled'
    if problem:
        raise InputError(f"{path}:{line}: {problem}")


def twins(names: Sequence[str]) -> str:
    """What is wrong with the names of columns, or ''."""
    return next((f"two columns are called `{n}`" for n in names if n and names.count(n) > 1), "")


def parquet(file: IO[bytes], path: str, column: str = "text") -> Records:
    """Each row of a Parquet file, with those columns that document_of looks at."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise not_installed("pyarrow", "data") from None
    try:
        source = ParquetFile(file, buffer_size=CHUNK, pre_buffer=False)
        names = source.schema_arrow.names
        problem = twins(names)
        has_text = column in names or may_be_chat(set(names))
        wanted = [name for name in names if not has_text or name in {column, *FIELDS}]
        batches = [] if problem else source.iter_batches(ROWS, columns=wanted)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(rows, 1):
            yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = f"damaged: {error}"
    if problem:
        raise InputError(f"{path}: {problem}")
