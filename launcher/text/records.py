"""Records: documents and conversations in JSON lines, JSON arrays, tables, and Parquet files.

Each reader yields the place of a record, such as `chats.jsonl:12`, and the record itself, as
json.loads returns it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterator
from itertools import chain, count, islice
from json.decoder import WHITESPACE  # type: ignore[attr-defined]
from typing import IO, Any

from launcher.errors import InputError, not_installed
from launcher.files.documents import not_text, read_text
from launcher.models.encoder import LONGEST
from launcher.text.chats import FIELDS, may_be_chat, turns_of

LONGEST_RECORD = 1 << 26  # bytes, or characters: a record is in memory as a whole
CHUNK = 1 << 20  # bytes of an array that are read at once
ROWS = 128  # rows of a Parquet file that are in memory at once
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
            fields: Any = record  # a dict, since a list is a conversation
            if "mapping" in fields:
                raise InputError(f"{place}: ChatGPT's own export is not read; {EXAMPLE}")
            texts = [name for name, value in fields.items() if isinstance(value, str)]
            raise no_text(place, column, texts, column in fields)
        pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    try:
        for piece in pieces:
            piece.encode()
    except UnicodeEncodeError:
        raise InputError(f"{place}: half of a surrogate pair in its text") from None
    return is_chat, iter(pieces)


def no_text(place: str, column: str, texts: Collection[str], has_it: bool = False) -> InputError:
    problem = f"`{column}` is no text" if has_it else f"no field `{column}`"
    names = ", ".join(f"`{name}`" for name in texts) or "none"
    return InputError(f"{place}: {problem}; --column takes another field, of text: {names}")


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
        try:
            record = json.loads(line.decode().rstrip())
        except UnicodeDecodeError as error:
            raise not_text(place, line, error.start) from None
        except (ValueError, RecursionError) as error:
            column, why = getattr(error, "colno", 1), getattr(error, "msg", error)
            hint = "a record must be on one line: `jq -c . FILE`"
            raise InputError(f"{place}: not JSON at column {column} ({why}); {hint}") from None
        yield place, record


def json_array(file: IO[bytes], path: str) -> Records:
    """Each item of an array, of which some megabytes at a time are in memory."""
    parts = (part for _, part in read_text(file, path, CHUNK))
    decode, skip = json.JSONDecoder().raw_decode, WHITESPACE.match
    text, end, lines = "", 0, 0  # read up to `end`, after so many lines
    number, sign = 1, "["
    while True:
        place = f"{path}, item {number}"
        try:
            begin = skip(text, end).end()
            if number > 1 and text.startswith("]", begin):
                break
            if not text.startswith(sign, begin):
                raise json.JSONDecodeError(f"Expecting '{sign}'", text, begin)
            inner = skip(text, begin + 1).end()
            if number == 1 and text.startswith("]", inner):
                begin = inner
                break
            item, after = decode(text, inner)
        except (ValueError, RecursionError) as error:  # wrong, or not yet read as a whole
            rest = text[end:]
            more = "".join(islice(parts, 1 + len(rest) // CHUNK))
            if not more or len(rest) > LONGEST_RECORD:
                line, why = lines + getattr(error, "lineno", 1), getattr(error, "msg", error)
                raise InputError(f"{place}: not JSON at line {line} ({why})") from None
            lines += text.count("\n", 0, end)
            text, end = rest + more, 0
        else:
            yield place, item
            number, sign, end = number + 1, ",", after
    if text[begin + 1 :].strip() or any(part.strip() for part in parts):
        raise InputError(f"{path}: more than one JSON array")


def table(file: IO[bytes], path: str, delimiter: str) -> Records:
    """Each row of a table whose first row names the columns. Excel may separate by semicolons."""
    csv.field_size_limit(LONGEST_RECORD)
    lines = io.TextIOWrapper(file, "utf-8", newline="")
    first = lines.readline()
    delimiter = max(delimiter + ",;\t", key=first.count)
    rows = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
    names, line = list[str](), 1
    try:
        for row in rows:
            place, line = f"{path}:{line}", rows.line_num + 1
            if not names:
                names = row
                refuse_twins(path, names)
            elif row and len(row) != len(names):
                raise InputError(f"{place}: {len(row)} cells, but the first row has {len(names)}")
            elif row:
                yield place, dict(zip(names, row, strict=True))
    except csv.Error as error:
        hint = 'a cell that begins with " ends with ", and each " between is doubled'
        raise InputError(f"{path}:{line}: {error}; {hint}") from None


def refuse_twins(path: str, names: list[str]) -> None:
    for name in names:
        if name and names.count(name) > 1:
            raise InputError(f"{path}: two columns are called `{name}`; rename one")


def parquet(file: IO[bytes], path: str, column: str = TEXT) -> Records:
    """Each row of a Parquet file, with those columns that document_of looks at."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise not_installed("pyarrow", "data") from None
    try:
        source = ParquetFile(file, buffer_size=CHUNK, pre_buffer=False)
        names = source.schema_arrow.names
        refuse_twins(path, names)
        if column not in names and not may_be_chat(set(names)):
            schema = source.schema_arrow
            raise no_text(path, column, [f.name for f in schema if str(f.type).endswith("string")])
        wanted = [name for name in names if name in {column, *FIELDS}]
        batches = source.iter_batches(ROWS, columns=wanted)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(rows, 1):
            yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: damaged: {error}") from None
