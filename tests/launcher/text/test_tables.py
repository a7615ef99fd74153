"""Tables as spreadsheets and databases write them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from sm_nanogpt import InputError
from sm_nanogpt.launcher.text import records
from sm_nanogpt.launcher.text.reading import File
from sm_nanogpt.launcher.text.tables import columns_in


def read(content: str, column: str = "text") -> list[tuple[str, str]]:
    """The position and the text of each row."""
    rows = records.read_table(
        io.BytesIO(content.encode()), File("a.csv", Path("a.csv"), column=column)
    )
    return [(position, row[column]) for position, row in rows]


TABLES = {
    "a line of Excel": ("sep=^\r\nid^text\r\n1^a, b\r\n", 3),
    "a blank line": ('\nid,text\n1,"a, b"\n', 3),
    "separators in quotes": ('"id";"name, as it is, in full";"text"\n1;x;a, b\n', 2),
    "a line break in quotes": ('"id\nof it",text\n1,"a, b"\n', 3),
    "bars": ("id|text\n1|a, b\n", 2),
    "spaces around names": ('id, text\n1,"a, b"\n', 2),
    "lines that end in CR": ('id,text\r1,"a, b"\r', 2),
}


@pytest.mark.parametrize("form", TABLES)
def test_a_table_is_read_as_its_program_meant_it(form):
    content, line = TABLES[form]
    assert read(content) == [(f"a.csv:{line}", "a, b")]


def test_quotes_are_letters_where_nothing_is_quoted():
    content = 'id\ttext\n1\t"Hello" he said\n2\t5" disk\n3\t"\n'
    assert [text for _, text in read(content)] == ['"Hello" he said', '5" disk', '"']


def test_quotes_enclose_cells_where_each_is_whole():
    assert read('id\ttext\n1\t"a ""b"""\n2\t"c\nd"\n') == [
        ("a.csv:2", 'a "b"'),
        ("a.csv:3", "c\nd"),
    ]


def test_no_advice_leads_to_whole_rows():
    with pytest.raises(InputError) as refused:
        read("id^text\n1^a\n")
    assert "`sep=^`" in str(refused.value)
    assert refused.value.code != "other-column"


def test_a_column_with_a_slip_names_those_that_are_there():
    with pytest.raises(InputError, match=r"did you mean body\?$"):
        read("id,body\n1,a\n", "bdoy")
    with pytest.raises(InputError) as refused:
        read("id,body\n1,a\n", "comment")
    assert "did you mean" not in str(refused.value)


def test_one_column_may_have_any_name():
    assert read("review\na; b\n", "review") == [("a.csv:2", "a; b")]
    with pytest.raises(InputError, match="fields of text: `review`"):
        read("review\na; b\n")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("id,text\n1,a\n2,b\n", ["id", "text"]),
        ("Dear reader, welcome\nto these pages.\nHere, as there, we\n", []),
        ("Shall I compare thee to a summer's day, and to a night?\nThou art, too\n", []),
    ],
)
def test_a_table_is_known_by_its_beginning(text, names):
    assert columns_in(text) == names
