"""JSON that holds records somewhere in it, as other programs export it: where they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.text.chats import LISTS

DEPTH = 6  # levels of a value in which records are looked for
SOME = 100  # values of a level that are looked at
WHOLE = ", one JSON object"  # ends the place of a record that is a whole file
NOTEBOOK = {"cells", "nbformat"}
OUT = "FILE > RECORDS.jsonl"
CLAUDE = "{messages: [.chat_messages[] | {role: .sender, content: .text}]}"
# Joins a text that is a list of strings and of parts with a field `text`.
JOIN = 'if type == "array" then map(.text? // .) | join("") else . end'


def is_no_chat(record: Any, column: str) -> bool:
    """Whether a record looks like a conversation, but lists records that are no messages.

    Messages have a role, or a value beside `from`, as chats.py reads them.
    """
    if isinstance(record, list):
        return are_records(record) and not any(map(is_message, record))
    if not isinstance(record, dict) or isinstance(record.get(column), str):
        return False
    lists = [record[name] for name in LISTS if isinstance(record.get(name), list)]
    return bool(lists) and are_records(lists[0]) and not any(map(is_message, lists[0]))


def is_message(item: dict[str, Any]) -> bool:
    return "role" in item or "value" in item


def are_records(items: Sequence[Any]) -> bool:
    return bool(items) and all(isinstance(item, dict) for item in items)


def explain(record: Any, place: str, column: str) -> str:
    """Why a record is no document, and what makes documents of it; '' if that is not known.

    place is where it stands, as the readers of launcher/text/records.py say it.
    """
    if re.search(r", row \d+$", place):
        return ""  # of a Parquet file, which jq does not read
    root = ".[]" if re.search(r", item \d+$", place) else "."
    if isinstance(record, str):
        return f"a string, and no object; `jq -c '{root} | {{text: .}}' {OUT}` makes records of it"
    if isinstance(record, dict):
        special = explain_export(record, root)
        if special:
            return special
        if is_in_parts(record.get(column)) and not place.endswith(WHOLE):
            what = f"`{column}` is a list of strings and parts, as Telegram writes it"
            path = f"{root.removesuffix('.')}{step(column)}"
            return f"{what}; `jq -c '{path} |= ({JOIN})' {OUT}` joins them"
    records = find_records(record, column)
    if not records:
        return ""
    path = f"{root.removesuffix('.')}{records.path}"
    if not path.startswith("."):
        path = f".{path}"
    if records.are_strings:
        path = f"{path} | {{text: .}}"
    where = f"in `{records.name}`" if records.name else "its items"
    problem = f"`{column}` is no text" if has_field(record, column) else f"no field `{column}`"
    return f"{problem}; its records may be {where} ({records.number:,}): `jq -c '{path}' {OUT}`"


def has_field(record: Any, column: str) -> bool:
    return isinstance(record, dict) and column in record


def explain_export(record: dict[str, Any], root: str) -> str:
    """What a record is that some program exports, and how to go on; '' if it is none of these."""
    if "mapping" in record:
        example = 'records are like {"text": "..."} or {"messages": [...]}'
        return f"ChatGPT's own export is not read; {example}"
    if "chat_messages" in record:
        return f"Claude's own export; `jq -c '{root} | {CLAUDE}' {OUT}` makes conversations of it"
    if record.keys() >= NOTEBOOK:
        return "a notebook; `jupyter nbconvert --to script FILE` makes code of it"
    return ""


def is_in_parts(text: Any) -> bool:
    """Whether a text is a list of strings, and of objects that hold one."""
    if not isinstance(text, list) or not text:
        return False
    texts = [part.get("text") if isinstance(part, dict) else part for part in text]
    return all(isinstance(part, str) for part in texts)


@dataclass(frozen=True)
class Records:
    """A list in a JSON value."""

    path: str  # jq's, below the value
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
        return self.are_objects and any(column in item for item in self.items[:SOME])


def find_records(value: Any, column: str) -> Records | None:
    """The list in a value whose items are likely to be the records.

    The shallowest whose objects have the column comes first, then the longest of objects, then that
    of strings which is called like the column, then the longest of strings.
    """
    lists = list(lists_in(value))
    by_length = sorted(lists, key=lambda records: records.number, reverse=True)
    choices = [
        *(records for records in lists if records.have(column)),
        *(records for records in by_length if records.are_objects),
        *(records for records in lists if records.are_strings and records.name == column),
        *(records for records in by_length if records.are_strings),
    ]
    return choices[0] if choices else None


def lists_in(value: Any) -> Iterator[Records]:
    """Each list in a JSON value, the shallowest first; those of a list's items are one list."""
    level = [("", [value])]
    for _ in range(DEPTH):
        below = list[tuple[str, list[Any]]]()
        for path, values in level:
            items = [item for value in values[:SOME] for item in items_in(value)]
            if items:
                yield Records(f"{path}[]", items)
                below.append((f"{path}[]", items))
            fields = dict[str, list[Any]]()
            for value in values[:SOME]:
                for name, field in fields_in(value):
                    fields.setdefault(f"{path}{step(name)}", []).append(field)
            below += fields.items()
        level = below


def items_in(value: Any) -> list[Any]:
    """The items of a list, or of an object that numbers them or names objects of one kind."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict) or len(value) < 2:
        return []
    items = list(value.values())
    if is_numbered(value):
        return items
    are_alike = isinstance(items[0], dict) and not is_numbered(items[0])
    are_alike = are_alike and all(
        isinstance(item, dict) and item.keys() == items[0].keys() for item in items
    )
    return items if are_alike else []


def is_numbered(value: dict[str, Any]) -> bool:
    return all(name.isdigit() for name in value)


def fields_in(value: Any) -> list[tuple[str, Any]]:
    """Some of the fields of an object, with names that a shell takes in quotes."""
    if not isinstance(value, dict):
        return []
    return [(name, field) for name, field in list(value.items())[:SOME] if "'" not in name]


def step(name: str) -> str:
    """jq's path to a field."""
    return f".{name}" if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else f"[{json.dumps(name)}]"
