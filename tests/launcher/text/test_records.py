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

from sm_nanogpt import InputError
from sm_nanogpt.launcher.text import records
from sm_nanogpt.launcher.text.records import TextDocument

TEXTS = ["a", 'He said "no";\r\nand, "yes"\n', "", "漢字 🙂\u2028\ttab", " [{,}] ", "x" * 200_000]
CHAT = [{"role": "user", "content": "a\n"}, {"role": "assistant", "content": 'b "c"'}]
HEAD = b"id,text\n1,a\n"


def table(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, rows[0], delimiter=delimiter)
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
    "excel.csv": lambda rows: table(rows, ";"),
    "a.tsv": lambda rows: table(rows, "\t"),
    "a.parquet": parquet,
}


def read(name: str, content: bytes, column: str = "text") -> list[TextDocument]:
    file = io.BytesIO(content)
    suffix = Path(name).suffix
    texts = {
        ".jsonl": lambda: records.read_json_lines(file, name),
        ".json": lambda: records.read_json_array(file, name),
        ".csv": lambda: records.read_table(file, name),
        ".tsv": lambda: records.read_table(file, name),
        ".parquet": lambda: records.read_parquet(file, name, column),
    }[suffix]()
    return [records.document_of(record, position, column) for position, record in texts]


@pytest.mark.parametrize("name", WRITE)
def test_each_format_holds_the_same_documents(name):
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    documents = read(name, WRITE[name](rows))
    assert ["".join(document.pieces) for document in documents] == TEXTS
    assert not any(document.is_chat for document in documents)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"text\na\tb\n", "a\tb"),
        (b"text\na, b\n", "a, b"),
        (b'text,"n\tm"\na;b,c\n', "a;b"),
    ],
)
def test_the_first_row_shows_what_separates_cells(content, text):
    (document,) = read("a.csv", content)
    assert document.position == "a.csv:2"
    assert list(document.pieces) == [text]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_conversations_are_in_each_format_that_nests(name):
    rows: list[dict[str, Any]] = [{"messages": CHAT, "text": None}, {"messages": None, "text": "b"}]
    chat, text = read(name, WRITE[name](rows))
    assert chat.is_chat
    assert list(chat.pieces) == ["user\na\n", 'assistant\nb "c"']
    assert not text.is_chat
    assert list(text.pieces) == ["b"]


def test_a_named_column_comes_before_a_conversation():
    row = {"prompt": "a", "completion": "b", "body": "c", "chosen": CHAT}
    pieces_of_column = {
        "text": ["user\na", "assistant\nb"],
        "body": ["c"],
        "chosen": ["user\na\n", 'assistant\nb "c"'],
    }
    for column, pieces in pieces_of_column.items():
        for name in ("a.jsonl", "a.parquet"):
            (document,) = read(name, WRITE[name]([row]), column)
            assert list(document.pieces) == pieces
            assert document.is_chat == (column != "body")


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("a.jsonl", "a.jsonl:1", "a.jsonl:2"),
        ("a.json", "a.json, item 1", "a.json, item 2"),
        ("a.csv", "a.csv:2", "a.csv:4"),
        ("a.parquet", "a.parquet, row 1", "a.parquet, row 2"),
    ],
)
def test_places_are_lines_or_counts_of_items(name, first, second):
    documents = read(name, WRITE[name]([{"text": "a\nb"}, {"text": "c"}]))
    assert [document.position for document in documents] == [first, second]


def twins() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, ["text", "text"]), file)
    return file.getvalue()


TWINS = twins()
DEEP = b"[" * 100_000
LONG_NUMBER = b"9" * 5_000


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        (
            "a.jsonl",
            lines([{"text": 5, "body": "b"}]),
            (":1: ", "`text`", "`body`", "fields of text"),
        ),
        ("a.jsonl", lines([{}]), (":1: ", "`text`")),
        ("a.jsonl", lines([{"text": ["a"]}]), (":1: ", "`text`", "`jq -c '.text |= ")),
        ("a.jsonl", b'"a"\n', (":1: ", "no object", "`jq -c '. | {text: .}' ")),
        ("a.jsonl", b"5\n", (":1: ", "no JSON object")),
        ("a.json", b'[{"text": "a"}\n {"text": "b"}]', ("not JSON", "line 2 ")),
        ("a.json", b'[{"text": "a"}, {"text": "b"', ("not JSON", "line 1 ")),
        ("a.json", b'[{"text": "a"}]\n[{"text": "b"}]', ("Extra data", "line 2 ")),
        ("a.json", DEEP, ("not JSON", "nests too deeply")),
        ("a.jsonl", DEEP, (":1: ", "nests too deeply")),
        ("a.json", b"[%s]" % LONG_NUMBER, ("not JSON", "4,300 digits")),
        ("a.jsonl", LONG_NUMBER, (":1: ", "4,300 digits")),
        ("a.json", b"[1]", ("item 1", "no JSON object")),
        ("a.csv", b"id,body\n1,a\n", (":1: ", "`text`", "`id`, `body`", "fields of text")),
        ("a.csv", HEAD + b'2,"b\n', (":3: ", "doubled")),
        ("a.csv", HEAD + b'2,"b"c\n', (":3: ", "doubled")),
        ("a.csv", HEAD + b"2,b,c\n", (":3: ", "3 cells", "has 2")),
        ("a.csv", HEAD + b"2\n", (":3: ", "1 cell", "has 2")),
        ("a.parquet", parquet([{"id": 1, "body": "a"}]), (": ", "`text`", "of text: `body`")),
        ("a.parquet", parquet([{"text": 1, "b": "a"}]), ("`text` is int64", "of text: `b`")),
        ("a.parquet", TWINS, ("two columns", "`text`")),
        ("a.csv", b"text,text\na,b\n", ("two columns", "`text`")),
        ("a.jsonl", b'{\n"text": "a"\n}\n' * 2, (":1: ", "on one line, ", "`jq -c . FILE`")),
        ("a.parquet", b"PAR1" + b"x" * 100, ("damaged",)),
        ("a.parquet", parquet([{"text": "a" * 9999}], compression=None)[:5000], ("damaged",)),
    ],
)
def test_a_record_without_text_is_refused_with_its_place(name, content, facts, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as raised:
        read(str(tmp_path / name), content)
    assert str(raised.value).startswith(f"{tmp_path / name}")
    assert all(fact in str(raised.value) for fact in facts), raised.value
    assert "\n" not in str(raised.value)


def parquet_of(**columns: pa.Array) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


NEVER = pa.array([253402300800000], pa.timestamp("ms"))  # 10000-01-01, which Python has not
STRUCT = pa.array([{"title": "a"}])


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (parquet_of(body=pa.array(["a"]), until=NEVER), ("no field `text`", "of text: `body`")),
        (parquet_of(body=STRUCT), ("no field `text`", "of text: none")),
        (parquet_of(text=STRUCT), ("`text` is struct<title: string>",)),
        (parquet_of(text=pa.array([b"\xff"])), ("row 1", "bytes that are not UTF-8")),
        (parquet_of(messages=NEVER), ("row 1", "does not know")),
        (parquet_of(text=pa.array([["a"]])), ("row 1", "`text` is no text", "of text: none")),
        (parquet([{f"c{n}": "a" for n in range(999)}]), ("`c19` and 979 more",)),
    ],
)
def test_a_schema_names_the_columns_of_text(content, facts):
    with pytest.raises(InputError) as refused:
        read("a.parquet", content)
    assert all(fact in str(refused.value) for fact in facts), refused.value


def test_bytes_of_text_are_text():
    (document,) = read("a.parquet", parquet_of(text=pa.array(["é".encode()])))
    assert list(document.pieces) == ["é"]


@pytest.mark.parametrize("dictionary", [True, False])
def test_a_small_parquet_file_unpacks_to_little(dictionary, monkeypatch):
    monkeypatch.setattr("sm_nanogpt.launcher.text.unpacking.RATIO_FREE_BYTES", 1 << 20)
    rows = [{"text": "a" * 10_000}] * 2_000
    content = parquet(rows, use_dictionary=dictionary, compression="zstd")
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


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"pyarrow.*\[data\]"):
        next(records.read_parquet(io.BytesIO(), "a.parquet"))


def test_parquet_reads_only_columns_of_text():
    file = io.BytesIO(parquet([{"id": 1, "image": b"x", "text": "a", "system": "b"}]))
    rows = [record for _, record in records.read_parquet(file, "")]
    assert rows == [{"text": "a", "system": "b"}]


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_long_file_is_not_in_memory_as_a_whole(name, tmp_path):
    rows = [{"text": f"{number} " * 500} for number in range(5_000)]  # 13 MB
    (tmp_path / name).write_bytes(WRITE[name](rows))
    with (tmp_path / name).open("rb") as file:
        tracemalloc.start()
        texts = (
            records.read_table(file, name) if name == "a.csv" else records.read_parquet(file, name)
        )
        assert sum(1 for _ in texts) == len(rows)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 8e6


def ids(cli: Callable[..., Any], path: Path, *options: str) -> list[bytes]:
    """The ids that an upload of a file makes, of train and of val."""
    upload = cli("upload-data", path, "--tokenizer", "bpe", "--vocab-size", "300", options).good
    directory = Path(upload.out.strip().removeprefix("file://"))
    return [(directory / f"{part}-00000.bin").read_bytes() for part in ("train", "val")]


def test_each_format_of_documents_gives_the_same_ids(cli, tmp_path):
    texts = [f"{text[:2000]} {number}" for text in TEXTS for number in range(9)]
    (tmp_path / "expected.jsonl").write_bytes(lines([{"text": text} for text in texts]))
    expected = ids(cli, tmp_path / "expected.jsonl")
    for name, write in WRITE.items():
        for column in ("text", "body"):
            (tmp_path / name).write_bytes(write([{"id": 1, column: text} for text in texts]))
            assert ids(cli, tmp_path / name, "--column", column) == expected, (name, column)


def test_each_form_of_conversations_gives_the_same_ids(cli, tmp_path):
    openai = list[Any]()
    nanochat = list[Any]()
    sharegpt = list[Any]()
    alpaca = list[Any]()
    trl = list[Any]()
    for n in range(30):
        question = f"What, exactly, is {n} + {n}?\n"
        answer = f'"{2 * n}"'
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        openai.append({"messages": messages})
        nanochat.append(messages)
        sharegpt.append({"conversations": turns})
        alpaca.append({"instruction": question, "input": "", "output": answer})
        trl.append({"prompt": question, "completion": answer})

    contents = {
        "openai.jsonl": lines(openai),
        "openai.parquet": parquet(openai),
        "nanochat.json": json.dumps(nanochat).encode(),
        "sharegpt.json": json.dumps(sharegpt).encode(),
        "sharegpt.parquet": parquet(sharegpt),
        "alpaca.csv": table(alpaca),
        "trl.jsonl": lines(trl),
    }
    ids_of_form = {}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        ids_of_form[name] = ids(cli, tmp_path / name)
    for name in contents:
        assert ids_of_form[name] == ids_of_form["openai.jsonl"], name
