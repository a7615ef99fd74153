"""Tables as text: what separates their cells, the names of their columns, and their rows."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import IO, Literal

from launcher.errors import InputError
from launcher.text.encodings import as_utf8

LONGEST_LINE = 1 << 26  # characters
LONGEST_HEADER = 1 << 20
SEPARATORS = "\t|;,"  # of two that are as frequent, the first
NO_SEPARATOR = "\x1f"
WHOLE_CELL = re.compile(r'"[^"]*(?:""[^"]*)*"')  # in quotes, each of its own doubled
PLAIN_NAME = re.compile(r"[\w .\-/()]*")
QUOTING = 'a cell that begins with " ends with ", and each " between is doubled'


@dataclass(frozen=True)
class Header:
    """The lines of a table up to the names of its columns."""

    lines: list[str]  # those with the names
    separator: str
    n_skipped: int  # blank lines, and Excel's `sep=;`, before them

    @property
    def names(self) -> list[str]:
        """The names of the columns. Raises csv.Error."""
        row = next(csv.reader(self.lines, delimiter=self.separator), [])
        return [name.strip() for name in row]


def read_header(lines: Iterator[str]) -> Header:
    """The header of a table, from its lines."""
    n_skipped, separator, line = 0, "", ""
    for line in lines:
        by_excel = re.fullmatch(r'"?sep=([^"])"?\s*', line, re.IGNORECASE)
        if by_excel:
            separator = by_excel[1]
        elif line.strip():
            break
        n_skipped += 1
    header = [line]
    size, n_quotes = len(line), line.count('"')
    while n_quotes % 2 and size < LONGEST_HEADER:  # a name with a line break
        line = next(lines, "")
        if not line:
            break
        header.append(line)
        size += len(line)
        n_quotes += line.count('"')
    return Header(header, separator or separator_of("".join(header)), n_skipped)


def separator_of(header: str) -> str:
    """What separates the names of columns; what stands in quotes does not count."""
    unquoted = WHOLE_CELL.sub("", header)
    return max(NO_SEPARATOR + SEPARATORS, key=unquoted.count)


def names_in(text: str) -> list[str]:
    """The names of the columns, if the beginning of a text is the beginning of a table."""
    lines = text.splitlines(keepends=True)
    if len(lines) > 1:
        lines.pop()  # it may be cut
    remaining = iter(lines)
    header = read_header(remaining)
    try:
        names = header.names
        rows = [row for row in csv.reader(remaining, delimiter=header.separator) if row]
    except csv.Error:
        return []
    is_regular = all(len(row) == len(names) for row in rows)
    are_names = all(len(name) < 40 and PLAIN_NAME.fullmatch(name) for name in names)
    return names if is_regular and are_names and len(names) == len(set(names)) else []


def rows_of(file: IO[bytes], path: str) -> Iterator[tuple[int, list[str]]]:
    """The first line and the cells of each row of a table, the names of its columns first.

    The separator is the one that the names show, or that Excel's first line `sep=;` names. One
    column needs none, and may hold any. Raises InputError.
    """
    csv.field_size_limit(LONGEST_LINE)
    text = io.TextIOWrapper(as_utf8(file, path), "utf-8", newline="")
    header = read_header(lines_of(text, path))
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL
    if quotes_are_letters(lines_of(text, path), header):
        quoting = csv.QUOTE_NONE
    lines = islice(lines_of(text, path), header.n_skipped, None)
    rows = csv.reader(lines, delimiter=header.separator, quoting=quoting, strict=True)
    line = header.n_skipped + 1
    try:
        for row in rows:
            if row:
                yield line, row
            line = header.n_skipped + rows.line_num + 1
    except csv.Error as error:
        raise InputError(f"{path}:{line}: {error}; {QUOTING}") from None


def lines_of(text: io.TextIOWrapper, path: str) -> Iterator[str]:
    """The lines of a file from its beginning. Raises InputError if one is too long."""
    text.seek(0)
    for number, line in enumerate(iter(lambda: text.readline(LONGEST_LINE + 1), ""), 1):
        if len(line) > LONGEST_LINE:
            raise InputError(f"{path}:{number}: a line of over 64 MiB")
        yield line


def quotes_are_letters(lines: Iterator[str], header: Header) -> bool:
    """Whether quotes do not enclose cells, as in tables of programs that quote nothing.

    It is so where tabs or bars part each line alike, and a cell begins with a quote that encloses
    no whole cell.
    """
    if header.separator not in ("\t", "|"):
        return False
    n_separators = header.lines[0].count(header.separator)
    opens = False
    for line in islice(lines, header.n_skipped, None):
        line = line.rstrip("\r\n")
        if line and line.count(header.separator) != n_separators:
            return False
        cells = line.split(header.separator) if '"' in line else []
        opens = opens or any(cell[:1] == '"' and not WHOLE_CELL.fullmatch(cell) for cell in cells)
    return opens
