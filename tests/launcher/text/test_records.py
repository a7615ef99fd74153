"""Records: JSON lines, JSON arrays, tables, and Parquet files."""

from __future__ import annotations

import csv
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from texts import stored

from sm_nanogpt import InputError
from sm_nanogpt.launcher.text import records
from sm_nanogpt.launcher.text.reading import File
from sm_nanogpt.launcher.text.records import TextDocument

TEXTS = ["a", 'He said "no";\r\nand, "yes"\n', "", "漢字 🙂\u2028\ttab", " [{,}] ", "x" * 200_000]
CHAT = [{"role": "user", "content": "a\n"}, {"role": "assistant", "content": 'b "c"'}]
HEAD = b"id,text\n1,a\n"


def table(rows: list[dict[str, Any]]) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, **options)
    return file.getvalue()


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


WRITE: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "a.jsonl": lines,
    "a.json": lambda rows: json.dumps(rows, indent=1, ensure_ascii=False).encode(),
    "a.csv": table,
    "a.parquet": parquet,
}
READERS = {
    ".jsonl": records.read_json_lines,
    ".json": records.read_json,
    ".csv": records.read_table,
    ".parquet": records.read_parquet,
}


def read(name: str, content: bytes, column: str = "text") -> list[TextDocument]:
    file = File(name, Path(name), column=column)
    rows = READERS[Path(name).suffix](io.BytesIO(content), file)
    return [records.document_of(record, position, column) for position, record in rows]


@pytest.mark.parametrize("name", WRITE)
def test_each_format_holds_the_same_documents(name):
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    documents = read(name, WRITE[name](rows))
    assert ["".join(document.pieces) for document in documents] == TEXTS
    assert not any(document.is_chat for document in documents)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_conversations_are_in_each_format_that_nests(name):
    rows: list[dict[str, Any]] = [{"messages": CHAT, "text": None}, {"messages": None, "text": "b"}]
    chat, text = read(name, WRITE[name](rows))
    assert chat.is_chat
    assert list(chat.pieces) == ["user\na\n", 'assistant\nb "c"']
    assert not text.is_chat
    assert list(text.pieces) == ["b"]


@pytest.mark.parametrize(
    ("column", "pieces"),
    [
        ("text", ["user\na", "assistant\nb"]),
        ("body", ["c"]),
        ("chosen", ["user\na\n", 'assistant\nb "c"']),
    ],
)
def test_a_named_column_comes_before_a_conversation(column, pieces):
    row = {"prompt": "a", "completion": "b", "body": "c", "chosen": CHAT}
    (document,) = read("a.parquet", parquet([row]), column)
    assert list(document.pieces) == pieces
    assert document.is_chat == (column != "body")


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("a.json", "a.json, item 1", "a.json, item 2"),
        ("a.csv", "a.csv:2", "a.csv:4"),
        ("a.parquet", "a.parquet, row 1", "a.parquet, row 2"),
    ],
)
def test_positions_are_lines_or_counts_of_items(name, first, second):
    documents = read(name, WRITE[name]([{"text": "a\nb"}, {"text": "c"}]))
    assert [document.position for document in documents] == [first, second]


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("a.jsonl", lines([{"text": 5, "body": "b"}]), (":1: ", "`text`", "of text: `body`")),
        ("a.jsonl", b"5\n", (":1: ", "no JSON object")),
        ("a.jsonl", b'{\n"text": "a"\n}\n' * 2, (":1: ", "on one line, ", "`jq -c . FILE`")),
        ("a.json", b'[{"text": "a"}\n {"text": "b"}]', ("not JSON at line 2 ",)),
        ("a.json", b"[" * 100_000, ("not JSON that can be read: ",)),
        ("a.json", b"[%s]" % (b"9" * 5_000), ("not JSON that can be read: ", "too many digits")),
        ("a.csv", b"id,body\n1,a\n", (":1: ", "`text`", "fields of text: `id`, `body`")),
        ("a.csv", b"text,text\na,b\n", ("two columns", "`text`")),
        ("a.csv", HEAD + b'2,"b\n', (":3: ", "doubled")),
        ("a.csv", HEAD + b"2,b,c\n", (":3: ", "3 cells", "has 2")),
        ("a.parquet", b"PAR1" + b"x" * 100, ("damaged",)),
    ],
)
def test_a_record_without_text_is_refused_with_its_position(name, content, facts):
    with pytest.raises(InputError) as raised:
        read(name, content)
    message = str(raised.value)
    assert message.startswith(name)
    for fact in facts:
        assert fact in message
    assert "\n" not in message


def parquet_of(**columns: pa.Array) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


NEVER = pa.array([253402300800000], pa.timestamp("ms"))  # 10000-01-01, which Python has not
STRUCT = pa.array([{"title": "a"}])


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (parquet_of(body=STRUCT), ("no field `text`", "of text: none")),
        (parquet_of(text=STRUCT), ("`text` is struct<title: string>",)),
        (parquet_of(text=pa.array([b"\xff"])), ("row 1", "bytes that are not UTF-8")),
        (parquet_of(messages=NEVER), ("row 1", "does not know")),
        (parquet_of(text=pa.array([["a"]])), ("row 1", "`text` is no text", "of text: none")),
    ],
)
def test_a_schema_names_the_columns_of_text(content, facts):
    with pytest.raises(InputError) as refused:
        read("a.parquet", content)
    for fact in facts:
        assert fact in str(refused.value)


def test_bytes_of_text_are_text():
    (document,) = read("a.parquet", parquet_of(text=pa.array(["é".encode()])))
    assert list(document.pieces) == ["é"]


def test_a_small_parquet_file_unpacks_to_little(monkeypatch):
    monkeypatch.setattr("sm_nanogpt.launcher.text.unpacking.RATIO_FREE_BYTES", 1 << 20)
    content = parquet([{"text": "a" * 10_000}] * 200, compression="zstd")
    with pytest.raises(InputError, match=r"^a\.parquet: unpacks to over"):
        read("a.parquet", content)


def test_a_table_with_many_columns_is_read_in_a_moment():
    names = [f"c{number}" for number in range(50_000)]
    content = f"{','.join(names)},text\n{',' * len(names)}a\n".encode()
    (document,) = read("a.csv", content)
    assert list(document.pieces) == ["a"]
    with pytest.raises(InputError, match="`c19` and 49,980 more"):
        read("a.csv", ",".join(names).encode())


def test_an_empty_array_has_no_records():
    assert read("a.json", b" [ ]\n") == []


PARQUET_FILE = File("a.parquet", Path("a.parquet"))


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"pyarrow.*\[data\]"):
        next(records.read_parquet(io.BytesIO(), PARQUET_FILE))


def test_parquet_reads_only_columns_of_text():
    content = io.BytesIO(parquet([{"id": 1, "image": b"x", "text": "a", "system": "b"}]))
    rows = [record for _, record in records.read_parquet(content, PARQUET_FILE)]
    assert rows == [{"text": "a", "system": "b"}]


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_long_file_is_not_in_memory_as_a_whole(name, tmp_path):
    rows = [{"text": f"{number} " * 500} for number in range(3_000)]  # 7 MB
    (tmp_path / name).write_bytes(WRITE[name](rows))
    with (tmp_path / name).open("rb") as content:
        tracemalloc.start()
        texts = READERS[Path(name).suffix](content, File(name, tmp_path / name))
        assert sum(1 for _ in texts) == len(rows)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 6e6


def ids(cli: Callable[..., Any], path: Path, *options: str) -> list[bytes]:
    """The ids that an upload of a file has, of train and of val."""
    upload = cli("upload-data", path, "--tokenizer", "bpe", "--vocab-size", "300", options).good
    directory = stored(upload.out.strip())
    return [(directory / f"{part}-00000.bin").read_bytes() for part in ("train", "val")]


def test_a_format_and_a_column_make_no_other_ids(cli, tmp_path):
    texts = [f"{text[:2000]} {number}" for text in TEXTS for number in range(9)]
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": text} for text in texts]))
    (tmp_path / "a.parquet").write_bytes(parquet([{"id": 1, "body": text} for text in texts]))
    expected = ids(cli, tmp_path / "a.jsonl")
    assert ids(cli, tmp_path / "a.parquet", "--column", "body") == expected
