"""Records: documents and conversations in JSON lines, JSON arrays, tables, and Parquet files.

Each reader yields the place of a record, such as `chats.jsonl:12`, and the record itself, as
json.loads returns it.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import IO, Any

from launcher.errors import InputError, not_installed
from launcher.models.encoder import LONGEST as PIECE
from launcher.text.chats import FIELDS, may_be_chat, turns_of
from launcher.text.encodings import not_text, read_text
from launcher.text.exports import WHOLE, explain, is_no_chat
from launcher.text.tables import rows_of
from launcher.text.unpacking import CHUNK, Unpacking
from launcher.values import is_utf8

LONGEST_RECORD = 1 << 26  # bytes: a record is in memory as a whole
LONGEST_WHOLE = 1 << 28  # bytes of a file that is one object
ROWS = 128  # rows of a Parquet file that are in memory at once
LARGE_BATCH = 1 << 23  # bytes
MANY = 20  # fields that an error names

Records = Iterator[tuple[str, Any]]


def document_of(record: Any, place: str, column: str = "text") -> tuple[bool, Iterator[str]]:
    """Whether a record is a conversation, and its turns or pieces of its text.

    `column` is the field of the text. If it is not the default, it comes before a conversation in
    other fields, and may hold one itself, as a list of messages. Raises InputError.
    """
    fields = record if isinstance(record, dict) else {}
    text = fields.get(column)
    if is_no_chat(record, column):
        pieces = None
    elif column == "text" or text is None:
        pieces = turns_of(record, place, column)
    else:
        pieces = turns_of(text, place) if isinstance(text, list) else None
    if text is None and column in fields:  # null, as an empty cell of a table
        text = ""
    is_chat = pieces is not None
    if pieces is None and isinstance(text, str):
        pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    if pieces is None:
        raise no_document(record, place, column).within(place)
    if not all(map(is_utf8, pieces)):
        raise InputError(f"{place}: half of a surrogate pair in its text")
    return is_chat, iter(pieces)


def no_document(record: Any, place: str, column: str) -> InputError:
    """Why a record is no document, and what to do."""
    problem = explain(record, place, column)
    if problem:
        return InputError(problem)
    if not isinstance(record, dict):
        return InputError('no JSON object; records are like {"text": "..."} or {"messages": [...]}')
    texts = [name for name, value in record.items() if isinstance(value, str)]
    problem = f"`{column}` is no text" if column in record else ""
    return no_field(column, texts, problem)


def json_lines(file: IO[bytes], path: str) -> Records:
    """Each line, or the only object or the items of a file that is one value over many lines."""
    lines = iter(lambda: file.readline(LONGEST_RECORD + 1), b"")
    is_first, n_beyond_ascii = True, 0  # bytes before the line
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        place = f"{path}:{number}"
        try:
            text = line.decode()
            record = json.loads(text.rstrip())
        except UnicodeDecodeError as error:
            raise not_text(place, line, error.start, n_before=n_beyond_ascii) from None
        except (ValueError, RecursionError) as error:
            whole = read_whole(file) if is_first else None
            if whole is None:
                raise InputError(f"{place}: {json_fault(error, in_line=True)}") from None
            if isinstance(whole, dict):
                yield f"{path}{WHOLE}", whole
            else:
                yield from items_of(whole, path)
            return
        is_first = False
        n_beyond_ascii += len(line) - len(text)
        yield place, record


def read_whole(file: IO[bytes]) -> dict[str, Any] | list[Any] | None:
    """The one object or array that a file holds; None if it holds anything else."""
    file.seek(0)
    content = file.read(LONGEST_WHOLE + 1)
    if len(content) > LONGEST_WHOLE:
        return None
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def json_array(file: IO[bytes], path: str) -> Records:
    """Each item of an array, which is in memory as a whole."""
    try:
        items = json.loads("".join(part for _, part in read_text(file, path, CHUNK)))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {json_fault(error)}") from None
    yield from items_of(items, path)


def items_of(items: list[Any], path: str) -> Records:
    for number, item in enumerate(items, 1):
        yield f"{path}, item {number}", item


def json_fault(error: ValueError | RecursionError, in_line: bool = False) -> str:
    """Why Python did not read some JSON, in words that are not Python's own, and where."""
    if isinstance(error, RecursionError):
        return "not JSON that can be read: it nests too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return "not JSON that can be read: a number has over 4,300 digits"
    if not in_line:
        return f"not JSON at line {error.lineno} column {error.colno} ({error.msg})"
    hint = "a record must be on one line, of at most 64 MiB: `jq -c . FILE`"
    return f"not JSON at column {error.colno} ({error.msg}); {hint}"


def table(file: IO[bytes], path: str, column: str = "text") -> Records:
    """Each row of a table, below the names of its columns."""
    rows = rows_of(file, path)
    line, header = next(rows, (1, [column]))
    names = [name.strip() for name in header]
    try:
        check_names(names)
        check_fields(column, names, names)
    except InputError as error:
        raise error.within(f"{path}:{line}") from None
    for line, row in rows:
        if len(row) != len(names):
            cells = f"{len(row):,} cell{'s' * (len(row) != 1)}"
            what = f"{cells}, but the first row has {len(names):,}"
            raise InputError(f"{path}:{line}: {what}")
        yield f"{path}:{line}", dict(zip(names, row, strict=True))


def check_names(names: Sequence[str]) -> None:
    """Raise InputError if two columns have one name."""
    twins = [name for name, n in Counter(names).items() if name and n > 1]
    if twins:
        raise InputError(f"two columns are called `{twins[0]}`")


def check_fields(column: str, names: Sequence[str], texts: Sequence[str]) -> None:
    """Raise InputError if a table has neither the column nor a conversation. texts: of text."""
    if column in names or may_be_chat(set(names)):
        return
    separators = re.sub(r"[\w\s.\-/()]", "", names[0]) if len(names) == 1 else ""
    if not separators:
        raise no_field(column, texts)
    example = f"a first line `sep={separators[0]}` says that {separators[0]} separates cells"
    raise InputError(f"no field `{column}`, and one column, `{names[0]}`; {example}")


def no_field(column: str, texts: Sequence[str], what: str = "") -> InputError:
    """The error for records without a field; texts are their fields of text."""
    names = ", ".join(f"`{name}`" for name in texts[:MANY])
    if len(texts) > MANY:
        names += f" and {len(texts) - MANY:,} more"
    problem = f"{what or f'no field `{column}`'}; fields of text: {names or 'none'}"
    if not texts:
        return InputError(problem)
    return InputError(problem, "other-column")


def parquet(file: IO[bytes], path: str, column: str = "text") -> Records:
    """Each row of a Parquet file, with those columns that document_of looks at.

    Raises InputError, by the schema if there is no text, and if it unpacks to far too much.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise not_installed("pyarrow", "data") from None
    number, unpacking = 0, Unpacking(path, file.seek(0, io.SEEK_END))
    file.seek(0)
    try:
        source = ParquetFile(file, buffer_size=CHUNK, pre_buffer=False)
        check_schema(source.schema_arrow, column)
        fields = [name for name in source.schema_arrow.names if name in {column, *FIELDS}]
        check_unpacked_size(source, fields, path)
        for batch in source.iter_batches(ROWS, columns=fields):
            for row in rows_in(batch):
                number += 1
                if isinstance(row.get(column), bytes):
                    row[column] = row[column].decode()
                unpacking.add(sum(len(value) for value in row.values() if isinstance(value, str)))
                yield f"{path}, row {number:d}", row
        return
    except InputError as error:
        raise error if str(error).startswith(path) else error.within(path) from None
    except UnicodeDecodeError:
        problem = f", row {number}: `{column}` holds bytes that are not UTF-8 text"
    except (ArithmeticError, LookupError) as error:
        problem = f", row {number + 1}: a value that Python does not know ({error})"
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        problem = f": damaged: {error}"
    raise InputError(f"{path}{problem}")


def check_schema(schema: Any, column: str) -> None:
    """Raise InputError if the columns of a Parquet file hold no text."""
    from pyarrow import types

    def is_text(type: Any) -> bool:
        values = type.value_type if types.is_dictionary(type) else type
        kinds = (types.is_string, types.is_large_string, types.is_string_view)
        return any(is_kind(values) for is_kind in kinds)

    def may_be_text(type: Any) -> bool:
        kinds = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_null)
        nested = (types.is_list, types.is_large_list, types.is_list_view)
        return is_text(type) or any(is_kind(type) for is_kind in kinds + nested)

    names = schema.names
    check_names(names)
    texts = [field.name for field in schema if is_text(field.type)]
    check_fields(column, names, texts)
    is_chat = column == "text" and may_be_chat(set(names))
    if column in names and not is_chat and not may_be_text(schema.field(column).type):
        kind = str(schema.field(column).type)[:80]
        raise no_field(column, texts, f"`{column}` is {kind}, which is no text")


def check_unpacked_size(source: Any, fields: Collection[str], path: str) -> None:
    """Raise InputError if a Parquet file says that its fields unpack to far more than its size."""
    columns = [
        number for number, name in enumerate(source.schema) if name.path.partition(".")[0] in fields
    ]
    for number in range(source.num_row_groups):
        group = source.metadata.row_group(number)
        chunks = [group.column(column) for column in columns]
        packed = sum(chunk.total_compressed_size for chunk in chunks)
        Unpacking(path, packed).add(sum(chunk.total_uncompressed_size for chunk in chunks))


def rows_in(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a batch; where they are large, one after the other."""
    step = ROWS if batch.nbytes < LARGE_BATCH else 1
    for first in range(0, batch.num_rows, step):
        yield from batch.slice(first, step).to_pylist()
