"""Read records: documents and conversations in JSON lines, JSON arrays, tables, and Parquet files.

Each reader takes the content of a file, and the file. It yields pairs: the position of a record,
such as `chats.jsonl:12`, and the record, as json.loads returns it; or a Talk, if a messenger
exported the file.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from sm_nanogpt.launcher.errors import InputError, did_you_mean, not_installed_error
from sm_nanogpt.launcher.files.progress import CHUNK_BYTES
from sm_nanogpt.launcher.models.encoder import MAX_PIECE
from sm_nanogpt.launcher.text.chats import FIELDS, may_be_chat, turns_of
from sm_nanogpt.launcher.text.encodings import EncodingFault, encoding_error, read_text
from sm_nanogpt.launcher.text.exports import WHOLE_FILE, is_no_chat, why_no_document
from sm_nanogpt.launcher.text.messengers import talks_in_json
from sm_nanogpt.launcher.text.tables import read_rows
from sm_nanogpt.launcher.text.talks import Talk
from sm_nanogpt.launcher.text.unpacking import DETECT_BYTES, Unpacking
from sm_nanogpt.launcher.values import counted, is_utf8

if TYPE_CHECKING:  # it imports this module
    from sm_nanogpt.launcher.text.reading import File

MAX_RECORD_BYTES = 1 << 26  # a record is in memory as a whole
MAX_DOCUMENT_BYTES = 1 << 28  # of a file that is one object
BATCH_ROWS = 128  # of a Parquet file that are in memory at once
LARGE_BATCH_BYTES = 1 << 23  # of a batch whose rows are converted one by one
MAX_FIELDS_SHOWN = 20

Records = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class TextDocument:
    """A document: a text, or a conversation."""

    position: str  # where it begins, such as notes.txt, or chats.jsonl:12
    is_chat: bool
    pieces: Iterator[str]  # of at most MAX_PIECE characters; of a conversation, its turns


def document_of(record: Any, position: str, column: str = "text") -> TextDocument:
    """Make a record a document.

    If the column is not the default, it takes precedence over a conversation in other fields, and
    may itself hold a conversation, as a list of messages. Raises InputError if the record is no
    document.
    """
    turns = chat_turns(record, position, column)
    pieces = text_pieces(record, position, column) if turns is None else turns
    if not all(map(is_utf8, pieces)):
        raise InputError(f"{position}: half of a surrogate pair in its text")
    return TextDocument(position, turns is not None, iter(pieces))


def chat_turns(record: Any, position: str, column: str) -> list[str] | None:
    """The turns of a record that is a conversation; None for any other record."""
    if is_no_chat(record, column):
        return None
    text = record.get(column) if isinstance(record, dict) else None
    if column == "text" or text is None:
        return turns_of(record, position, column)
    if isinstance(text, list):
        return turns_of(text, position)
    return None


def text_pieces(record: Any, position: str, column: str) -> list[str]:
    """The text of a record, in pieces of at most MAX_PIECE characters.

    Raises InputError if there is none.
    """
    if isinstance(record, dict) and column in record:
        text = record[column]
        if text is None:  # null: an empty cell of a table
            text = ""
        if isinstance(text, str):
            return [text[begin : begin + MAX_PIECE] for begin in range(0, len(text), MAX_PIECE)]
    raise no_document_error(record, position, column).within(position)


def no_document_error(record: Any, position: str, column: str) -> InputError:
    """The error for a record that is no document, with a command that makes documents of it."""
    problem = why_no_document(record, position, column)
    if problem:
        return InputError(problem)
    if not isinstance(record, dict):
        return InputError('no JSON object; records are like {"text": "..."} or {"messages": [...]}')
    text_fields = [name for name, value in record.items() if isinstance(value, str)]
    if column in record:
        return no_field_error(f"`{column}` is no text", column, text_fields)
    return no_field_error(f"no field `{column}`", column, text_fields)


# -- JSON ------------------------------------------------------------------------------------------


def read_json(content: IO[bytes], file: File) -> Records:
    """Yield the items of an array, which is in memory as a whole; or the records of any other file,
    as read_json_lines."""
    is_array = content.read(DETECT_BYTES).lstrip().startswith(b"[")
    content.seek(0)
    if not is_array:
        yield from read_json_lines(content, file)
        return
    try:
        items = json.loads("".join(read_text(content, file.shown)))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file.shown}: {json_problem(error)}") from None
    yield from records_in(items, file)


def read_json_lines(content: IO[bytes], file: File) -> Records:
    """Yield the object of each line; or its talks, if a messenger exported it.

    If the file is one value over many lines, yield the object, or the items of the array.
    """
    n_beyond_ascii = 0  # bytes before the line that only UTF-8 has
    is_first = True
    lines = iter(lambda: content.readline(MAX_RECORD_BYTES + 1), b"")
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        position = f"{file.shown}:{number}"
        try:
            text = line.decode()
            record = json.loads(text.rstrip())
        except UnicodeDecodeError as error:
            fault = EncodingFault(line, error.start, n_beyond_ascii=n_beyond_ascii)
            raise encoding_error(position, fault) from None
        except (ValueError, RecursionError) as error:
            value = read_whole_file(content) if is_first else None
            if value is None:
                raise InputError(f"{position}: {line_problem(error)}") from None
            yield from records_in(value, file)
            return
        talks = talks_in_json(record, position) if file.column == "text" else None
        if talks is None:
            yield position, record
        else:
            yield from with_positions(talks, position)
        is_first = False
        n_beyond_ascii += len(line) - len(text)


def read_whole_file(content: IO[bytes]) -> dict[str, Any] | list[Any] | None:
    """Read a file that is one object or one array; None for any other file."""
    content.seek(0)
    document = content.read(MAX_DOCUMENT_BYTES + 1)
    if len(document) > MAX_DOCUMENT_BYTES:
        return None
    try:
        value = json.loads(document)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict | list):
        return value
    return None


def records_in(value: dict[str, Any] | list[Any], file: File) -> Records:
    """Yield the records in the one value of a file; or its talks, if a messenger exported it."""
    talks = talks_in_json(value, file.shown) if file.column == "text" else None
    if talks is not None:
        yield from with_positions(talks, file.shown)
        return
    if isinstance(value, dict):
        yield f"{file.shown}{WHOLE_FILE}", value
        return
    for number, item in enumerate(value, 1):
        yield f"{file.shown}, item {number}", item


def with_positions(talks: Sequence[Talk], name: str) -> Records:
    """Yield talks with their positions, such as `chats.json, chat 3`."""
    for number, talk in enumerate(talks, 1):
        yield f"{name}, chat {number}", talk


def line_problem(error: ValueError | RecursionError) -> str:
    """Why a line is no record, and at which position of the line."""
    if not isinstance(error, json.JSONDecodeError):
        return json_problem(error)
    hint = "a record must be on one line, of at most 64 MiB: `jq -c . FILE`"
    return f"not JSON at column {error.colno} ({error.msg}); {hint}"


def json_problem(error: ValueError | RecursionError) -> str:
    """Why Python could not read JSON, and at which position."""
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON at line {error.lineno} column {error.colno} ({error.msg})"
    if isinstance(error, RecursionError):
        return "not JSON that can be read: it nests too deeply"
    return "not JSON that can be read: a number has too many digits"


# -- tables ----------------------------------------------------------------------------------------


def read_table(content: IO[bytes], file: File) -> Records:
    """Yield each row of a table as a dictionary by the names of its columns."""
    rows = read_rows(content, file.shown)
    first_line, header = next(rows, (1, [file.column]))
    columns = [cell.strip() for cell in header]
    try:
        check_columns(file.column, columns, text_columns=columns)
    except InputError as error:
        raise error.within(f"{file.shown}:{first_line}") from None
    for line_number, row in rows:
        position = f"{file.shown}:{line_number}"
        if len(row) != len(columns):
            problem = f"{counted(len(row), 'cell')}, but the first row has {len(columns):,}"
            raise InputError(f"{position}: {problem}")
        yield position, dict(zip(columns, row, strict=True))


def check_columns(column: str, columns: Sequence[str], text_columns: Sequence[str]) -> None:
    """Raise InputError if two columns have one name, or no column holds a text or a conversation.

    text_columns are the columns whose cells are texts.
    """
    for name, count in Counter(columns).items():
        if name and count > 1:
            raise InputError(f"two columns are called `{name}`")
    if column in columns or may_be_chat(set(columns)):
        return
    problem = f"no field `{column}`"
    if len(columns) == 1:
        separators = re.sub(r"[\w\s.\-/()]", "", columns[0])
        if separators:
            raise InputError(
                f"{problem}, and one column, `{columns[0]}`; a first line `sep={separators[0]}`"
                f" says that {separators[0]} separates cells"
            )
    raise no_field_error(problem, column, text_columns)


def no_field_error(problem: str, column: str, text_fields: Sequence[str]) -> InputError:
    """The error for records without a text in the column, with the fields that hold texts, and
    those whose names are like the column's."""
    if not text_fields:
        return InputError(f"{problem}; fields of text: none")
    fields = ", ".join(f"`{name}`" for name in text_fields[:MAX_FIELDS_SHOWN])
    if len(text_fields) > MAX_FIELDS_SHOWN:
        fields += f" and {len(text_fields) - MAX_FIELDS_SHOWN:,} more"
    problem = f"{problem}; fields of text: {fields}"
    suggestion = did_you_mean(column, text_fields)
    if suggestion:
        problem += f"; {suggestion}"
    return InputError(problem, code="other-column")


# -- Parquet ---------------------------------------------------------------------------------------


def read_parquet(content: IO[bytes], file: File) -> Records:
    """Yield each row of a Parquet file, with the columns that document_of reads.

    Raises InputError if the schema has no text, or if the file is damaged or unpacks to far more
    than its size.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise not_installed_error("pyarrow") from None
    name = file.shown
    column = file.column
    unpacking = Unpacking(name, content.seek(0, io.SEEK_END))
    content.seek(0)
    number = 0
    try:
        table = ParquetFile(content, buffer_size=CHUNK_BYTES, pre_buffer=False)
        try:
            check_schema(table.schema_arrow, column)
        except InputError as error:
            raise error.within(name) from None
        columns = [field for field in table.schema_arrow.names if field in {column, *FIELDS}]
        for batch in table.iter_batches(BATCH_ROWS, columns=columns):
            for row in rows_in(batch):
                number += 1
                if isinstance(row.get(column), bytes):
                    row[column] = row[column].decode()
                unpacking.add(sum(len(value) for value in row.values() if isinstance(value, str)))
                yield f"{name}, row {number}", row
        return
    except UnicodeDecodeError:
        problem = f", row {number}: `{column}` holds bytes that are not UTF-8 text"
    except (ArithmeticError, LookupError) as error:
        problem = f", row {number + 1}: a value that Python does not know ({error})"
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        problem = f": damaged: {error}"
    raise InputError(f"{name}{problem}")


def check_schema(schema: Any, column: str) -> None:
    """Raise InputError if the columns of a Parquet file hold no text."""
    names = schema.names
    text_columns = [field.name for field in schema if is_text_type(field.type)]
    check_columns(column, names, text_columns)
    if column not in names or (column == "text" and may_be_chat(set(names))):
        return
    kind = schema.field(column).type
    if not may_be_text_type(kind):
        problem = f"`{column}` is {str(kind)[:80]}, which is no text"
        raise no_field_error(problem, column, text_columns)


def is_text_type(kind: Any) -> bool:
    """True for a type of Arrow whose values are strings."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def may_be_text_type(kind: Any) -> bool:
    """True for a type of Arrow whose values may be texts or conversations."""
    from pyarrow import types

    tests = (
        is_text_type,
        types.is_binary,
        types.is_large_binary,
        types.is_binary_view,
        types.is_null,
        types.is_list,
        types.is_large_list,
        types.is_list_view,
    )
    return any(test(kind) for test in tests)


def rows_in(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch as dictionaries. Rows of a large batch are converted one by one."""
    n_at_once = BATCH_ROWS if batch.nbytes < LARGE_BATCH_BYTES else 1
    for first in range(0, batch.num_rows, n_at_once):
        yield from batch.slice(first, n_at_once).to_pylist()
