"""Read tables in text files: their separator, the names of their columns, and their rows."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import IO, Literal

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.text.encodings import as_utf8

MAX_CELL_CHARACTERS = 1 << 26
MAX_HEADER_CHARACTERS = 1 << 20
SEPARATORS = "\t|;,"  # the first one is taken if two are equally frequent
NO_SEPARATOR = "\x1f"
WHOLE_CELL = re.compile(r'"[^"]*(?:""[^"]*)*"')  # a cell in quotes; quotes inside are doubled
PLAIN_NAME = re.compile(r"[\w .\-/()]*")
QUOTING = 'a cell that begins with " ends with ", and each " between is doubled'


@dataclass(frozen=True)
class Header:
    """The lines of a table up to the names of its columns."""

    lines: list[str]  # the lines with the names
    separator: str
    n_skipped: int  # lines before the names, which are blank or Excel's `sep=;`

    @property
    def columns(self) -> list[str]:
        """The names of the columns. Raises csv.Error."""
        row = next(csv.reader(self.lines, delimiter=self.separator), [])
        return [name.strip() for name in row]


def read_header(lines: Iterator[str]) -> Header:
    """Read the lines of a table up to the names of its columns."""
    n_skipped = 0
    separator = ""
    first_line = ""
    for line in lines:
        excel_line = re.fullmatch(r'"?sep=([^"])"?\s*', line, re.IGNORECASE)
        if excel_line:
            separator = excel_line[1]
        elif line.strip():
            first_line = line
            break
        n_skipped += 1
    header_lines = complete_cells(first_line, lines)
    if not separator:
        separator = separator_of("".join(header_lines))
    return Header(header_lines, separator, n_skipped)


def complete_cells(line: str, lines: Iterator[str]) -> list[str]:
    """Read the lines after a line, until all quotes are closed: a name may have a line break.

    Returns the line and these lines.
    """
    header_lines: list[str] = []
    n_characters = 0
    n_quotes = 0
    for next_line in chain([line], lines):
        header_lines.append(next_line)
        n_characters += len(next_line)
        n_quotes += next_line.count('"')
        if n_quotes % 2 == 0 or n_characters >= MAX_HEADER_CHARACTERS:
            break
    return header_lines


def separator_of(header: str) -> str:
    """The separator between the names of columns. Text in quotes does not count."""
    unquoted = WHOLE_CELL.sub("", header)
    return max(NO_SEPARATOR + SEPARATORS, key=unquoted.count)


def columns_in(text: str) -> list[str]:
    """The names of the columns, if `text` is the beginning of a table; else []."""
    lines = text.splitlines(keepends=True)
    if len(lines) > 1:
        lines.pop()  # the last line may be incomplete
    unread_lines = iter(lines)
    header = read_header(unread_lines)
    try:
        columns = header.columns
        rows = [row for row in csv.reader(unread_lines, delimiter=header.separator) if row]
    except csv.Error:
        return []
    is_regular = all(len(row) == len(columns) for row in rows)
    are_different = len(columns) == len(set(columns))
    if is_regular and are_different and all(map(looks_like_name, columns)):
        return columns
    return []


def looks_like_name(text: str) -> bool:
    return len(text) < 40 and PLAIN_NAME.fullmatch(text) is not None


def read_rows(content: IO[bytes], name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each row of a table: the number of its first line, and its cells.

    The first row has the names of the columns. The separator is the one that this row has most
    often, unless a line of Excel before it, such as `sep=;`, names another one. A table of one
    column has no separator, and its cells may contain any character. name: what errors call the
    file. Raises InputError.
    """
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    text_file = io.TextIOWrapper(as_utf8(content, name), "utf-8", newline="")
    header = read_header(lines_of(text_file))
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL
    if quotes_are_letters(lines_of(text_file), header):
        quoting = csv.QUOTE_NONE
    lines = islice(lines_of(text_file), header.n_skipped, None)
    rows = csv.reader(lines, delimiter=header.separator, quoting=quoting, strict=True)
    line_number = header.n_skipped + 1
    try:
        for row in rows:
            if row:
                yield line_number, row
            line_number = header.n_skipped + rows.line_num + 1
    except csv.Error as error:
        raise InputError(f"{name}:{line_number}: {error}; {QUOTING}") from None


def lines_of(text_file: io.TextIOWrapper) -> Iterator[str]:
    """The lines of a file from its beginning."""
    text_file.seek(0)
    return iter(text_file)


def quotes_are_letters(lines: Iterator[str], header: Header) -> bool:
    """True if quotes are characters of cells, as in tables of programs that quote nothing.

    The signs: each line has the same number of tabs or bars, and a cell begins with a quote that
    does not enclose the whole cell.
    """
    if header.separator not in ("\t", "|"):
        return False
    n_separators = header.lines[0].count(header.separator)
    has_open_quote = False
    for line in islice(lines, header.n_skipped, None):
        line = line.rstrip("\r\n")
        if line and line.count(header.separator) != n_separators:
            return False
        if '"' in line and not has_open_quote:
            has_open_quote = any(map(opens_quote, line.split(header.separator)))
    return has_open_quote


def opens_quote(cell: str) -> bool:
    """True if a cell begins with a quote that does not enclose the whole cell."""
    return cell.startswith('"') and WHOLE_CELL.fullmatch(cell) is None
