"""Find the records in JSON that other programs export, and the command that extracts them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sm_nanogpt.launcher.text.chats import LISTS

MAX_DEPTH = 6  # levels of a value in which records are searched for
MAX_VALUES = 100  # values of each level that are searched
WHOLE_FILE = ", one JSON object"  # the end of the position of a record that is a whole file
NOTEBOOK_FIELDS = {"cells", "nbformat"}
REDIRECT = "FILE > NEW-FILE.jsonl"
# A filter of jq: it joins a text that is a list of strings and of parts with a field `text`.
JOIN_FILTER = 'if type == "array" then map(.text? // .) | join("") else . end'


def is_no_chat(record: Any, column: str) -> bool:
    """True for a record that looks like a conversation, but has a list without messages.

    For chats.py, a message has a field `role`, or `value` beside `from`.
    """
    if isinstance(record, list):
        return are_no_messages(record)
    if not isinstance(record, dict) or isinstance(record.get(column), str):
        return False
    for field in LISTS:
        if isinstance(record.get(field), list):
            return are_no_messages(record[field])
    return False


def are_no_messages(items: Sequence[Any]) -> bool:
    """True for a list of objects of which none is a message of a conversation."""
    if not items or not all(isinstance(item, dict) for item in items):
        return False
    return not any("role" in item or "value" in item for item in items)


def why_no_document(record: Any, position: str, column: str) -> str:
    """Why a record is no document, with a command that makes documents of it; '' if no command is
    known.

    position is as the readers of launcher/text/records.py yield it.
    """
    if re.search(r", row \d+$", position):
        return ""  # the record is of a Parquet file, which jq does not read
    root = "."
    if re.search(r", item \d+$", position):
        root = ".[]"
    if isinstance(record, str):
        command = jq(f"{root} | {{text: .}}")
        return f"a string, and no object; {command} makes records of it"
    if isinstance(record, dict):
        if record.keys() >= NOTEBOOK_FIELDS:
            command = "jupyter nbconvert --to script --stdout FILE > NEW-FILE.py"
            return f"a notebook; `{command}` makes code of it"
        if is_in_parts(record.get(column)) and not position.endswith(WHOLE_FILE):
            command = jq(f"{root.removesuffix('.')}{jq_field(column)} |= ({JOIN_FILTER})")
            problem = f"`{column}` is a list of strings and parts, as Telegram writes it"
            return f"{problem}; {command} joins them"
    records = find_records(record, column)
    if records is None:
        return ""
    problem = f"no field `{column}`"
    if isinstance(record, dict) and column in record:
        problem = f"`{column}` is no text"
    location = "its items"
    if records.name:
        location = f"in `{records.name}`"
    command = jq(records.filter_below(root))
    return f"{problem}; its records may be {location} ({records.number:,}): {command}"


def jq(filter: str) -> str:
    """The command that applies a filter of jq to FILE and writes the records."""
    return f"`jq -c '{filter}' {REDIRECT}`"


def is_in_parts(text: Any) -> bool:
    """True for a text that is a list of strings, and of objects that hold one."""
    if not isinstance(text, list) or not text:
        return False
    for part in text:
        if isinstance(part, dict):
            part = part.get("text")
        if not isinstance(part, str):
            return False
    return True


@dataclass(frozen=True)
class RecordList:
    """A list in a JSON value, which may be the records of a file."""

    path: str  # to the list in the value, in the syntax of jq
    items: list[Any]

    @property
    def name(self) -> str:
        return self.path.removeprefix(".").removesuffix("[]")

    @property
    def number(self) -> int:
        return len(self.items)

    @property
    def are_objects(self) -> bool:
        return all(isinstance(item, dict) for item in self.items)

    @property
    def are_strings(self) -> bool:
        return all(isinstance(item, str) for item in self.items)

    def have(self, column: str) -> bool:
        return self.are_objects and any(column in item for item in self.items[:MAX_VALUES])

    def filter_below(self, root: str) -> str:
        """The filter of jq that yields the items as records, for a value at the path `root`."""
        path = f"{root.removesuffix('.')}{self.path}"
        if not path.startswith("."):
            path = f".{path}"
        if self.are_strings:
            return f"{path} | {{text: .}}"
        return path


def find_records(value: Any, column: str) -> RecordList | None:
    """The list in a value whose items are most likely the records; None if there is no candidate.

    In order of preference: the shallowest list whose objects have the column; the longest list of
    objects; a list of strings with the name of the column; the longest list of strings.
    """

    def preference(records: RecordList) -> tuple[int, int]:
        if records.have(column):
            return 3, 0
        if records.are_objects:
            return 2, records.number
        if records.are_strings and records.name == column:
            return 1, 0
        return 0, records.number

    candidates = [
        records for records in lists_in(value) if records.are_objects or records.are_strings
    ]
    return max(candidates, key=preference, default=None)  # the first of equal ones


def lists_in(document: Any) -> Iterator[RecordList]:
    """Yield what may be a list of records in a JSON value, level by level.

    That is a list, or an object whose values are all of one kind. Lists that have the same path,
    such as `.chats[].messages[]`, are yielded as one.
    """
    values_by_path: dict[str, list[Any]] = {"": [document]}
    for _ in range(MAX_DEPTH):
        next_level: dict[str, list[Any]] = {}
        for path, values in values_by_path.items():
            items: list[Any] = []
            for value in values[:MAX_VALUES]:
                items += list_items(value)
            if items:
                yield RecordList(f"{path}[]", items)
                next_level[f"{path}[]"] = items
            for value in values[:MAX_VALUES]:
                for name, field in quotable_fields(value):
                    next_level.setdefault(f"{path}{jq_field(name)}", []).append(field)
        values_by_path = next_level


def list_items(value: Any) -> list[Any]:
    """The items of a list; or the values of an object whose fields are numbers, or whose values are
    objects of one kind; else []."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict) or len(value) < 2:
        return []
    items = list(value.values())
    if is_numbered(value) or are_alike(items):
        return items
    return []


def are_alike(items: Sequence[Any]) -> bool:
    """True for objects with the same fields, if these are not numbers."""
    first = items[0]
    if not isinstance(first, dict) or is_numbered(first):
        return False
    return all(isinstance(item, dict) and item.keys() == first.keys() for item in items)


def is_numbered(value: dict[str, Any]) -> bool:
    return all(name.isdigit() for name in value)


def quotable_fields(value: Any) -> list[tuple[str, Any]]:
    """The first fields of an object whose names a shell can take in single quotes."""
    if not isinstance(value, dict):
        return []
    fields = list(value.items())[:MAX_VALUES]
    return [(name, field) for name, field in fields if "'" not in name]


def jq_field(name: str) -> str:
    """The filter of jq that yields a field of an object."""
    if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        return f".{name}"
    return f"[{json.dumps(name)}]"
