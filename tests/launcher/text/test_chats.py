"""Conversations in records: which there are, and what of them can teach."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launching import Ran
from talks import exchange, messages

from sm_nanogpt import InputError
from sm_nanogpt.launcher.text.chats import turns_of

PART = {"type": "text", "text": "a"}
ASKED = ["user\na", "assistant\nb"]
WITH_SYSTEM = ["system\nc", *ASKED]


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"messages": messages("a", "b")}, ASKED),
        ({"messages": messages("a", "b"), "text": "c", "tools": None}, ASKED),
        (messages("a", "b"), ASKED),
        ({"messages": messages("c", "a", "b", roles="developer user assistant")}, WITH_SYSTEM),
        ({"messages": messages(" ", "a", "b", roles="system user assistant")}, ASKED),
        (
            {"messages": messages("c", "a", "b", roles="user user assistant")},
            ["user\nc", *ASKED],
        ),
        ({"messages": messages([PART, PART], "b")}, ["user\naa", "assistant\nb"]),
        ({"conversations": messages("a", "b", roles="human gpt", to="from value")}, ASKED),
        ({"conversations": messages("a", "b"), "system": "c"}, WITH_SYSTEM),
        ({"instruction": "a", "input": "", "output": "b"}, ASKED),
        ({"instruction": "a", "output": "b", "system": "c", "history": []}, WITH_SYSTEM),
        ({"instruction": "a", "input": "c", "output": "b"}, ["user\na\n\nc", "assistant\nb"]),
        ({"prompt": "a", "completion": "b", "messages": None, "label": True}, ASKED),
        ({"prompt": messages("a"), "completion": messages("b", roles="assistant")}, ASKED),
        ({"instruction": None, "input": "a", "output": "b"}, ASKED),
        ({"conversations": messages("a", "b", roles="user bing", to="from value")}, ASKED),
        (
            {
                "messages": [],
                "prompt": None,
                "completion": "",
                "conversations": messages("a", "b"),
            },
            ASKED,
        ),
        ({"text": "a", "messages": None}, None),
        ({"text": "a", "messages": []}, None),
        ({"text": "a", "prompt": None, "completion": None}, None),
        ({"text": "a", "instruction": "", "output": " "}, None),
        ({"text": None, "prompt": None, "completion": None}, None),
        ({"prompt": "a"}, None),
    ],
)
def test_each_form_of_a_conversation_gives_its_turns(record, turns):
    assert turns_of(record, "") == turns


@pytest.mark.parametrize(
    ("record", "facts"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": None}, "no messages"),
        ({"prompt": None, "completion": ""}, "no messages"),
        ({"messages": {}}, "`messages`"),
        ({"messages": "[]"}, "`messages`"),
        (["a"], "message 1 role"),
        ({"messages": messages("a", roles="tool")}, "message 1 'tool'"),
        ({"messages": messages("a", " \n")}, "message 2 no text"),
        ({"messages": messages("a", None)}, "message 2 no text"),
        ({"messages": messages("a", [])}, "message 2 no text"),
        ({"messages": messages("a", [PART, {"type": "image_url"}])}, "message 2 part"),
        (
            {"messages": messages("a", "b", "c", roles="user assistant system")},
            "message 3 first",
        ),
        ({"messages": messages("a")}, "says nothing"),
        (
            {"messages": [*messages("a", "b"), {**messages("c")[0], "weight": 0}]},
            "message 3 weight",
        ),
        (
            {"messages": [messages("a")[0], {"role": "gpt", "tool_calls": [0]}]},
            "message 2 tool_calls",
        ),
        (
            {"conversations": messages("a", "b", roles="human ape", to="from value")},
            "message 2 'ape'",
        ),
        ({"instruction": "a", "output": ""}, "`output` no text"),
        ({"instruction": "a", "input": {}, "output": "b"}, "`instruction` text"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "`history`"),
        ({"prompt": None, "completion": "b"}, "`prompt` no text"),
        ({"prompt": "a", "completion": "b", "label": False}, "`completion` bad"),
    ],
)
def test_what_cannot_be_learned_is_named(record, facts):
    with pytest.raises(InputError) as error:
        turns_of(record, "file:7")
    assert str(error.value).startswith("file:7: ")
    assert all(fact in str(error.value) for fact in facts.split()), error.value


def test_a_column_of_text_beats_an_empty_pair():
    record = {"story": "a", "prompt": None, "completion": None}
    assert turns_of(record, "", column="story") is None


def upload_records(cli: Any, path: Path, records: Sequence[Any]) -> Ran:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return cli("upload-data", path, "--tokenizer", "bpe", "--vocab-size", "300")


def sums(count: int) -> list[Any]:
    return [{"messages": exchange(f"What is {n} + {n}?", str(2 * n))} for n in range(count)]


def test_a_bad_line_uploads_nothing_and_is_numbered(cli, home, tmp_path):
    for record in ({"text": "a"}, 0):
        ran = upload_records(cli, tmp_path / "chats.jsonl", [*sums(200), record])
        assert ran.failed(2, "chats.jsonl:201: ") and not ran.out
        assert not (home / "store/data").exists()


def test_what_cannot_teach_is_left_out_and_counted(cli, home, tmp_path):
    empty = {"messages": exchange("Why?", "")}
    silent: dict[str, Any] = {"messages": []}
    tool = {"messages": [{"role": "tool", "content": "a"}]}
    records = [empty, *sums(200), silent, empty, tool]
    ran = upload_records(cli, tmp_path / "chats.jsonl", records).good
    (line,) = [line for line in ran.err.splitlines() if "left out" in line]
    assert line.startswith("warning: 4 of 204 conversations left out: ")
    assert re.search(r"no text \(2: \S*chats\.jsonl:1; \S*chats\.jsonl:203\)", line)
    assert re.search(r"no messages \(1: \S*chats\.jsonl:202\)", line)
    assert re.search(r"'tool'.* \(1: \S*chats\.jsonl:204\)", line)
    assert "200 conversations, " in ran.err
    assert upload_records(cli, tmp_path / "chats.jsonl", sums(200)).out == ran.out


def test_data_of_which_most_cannot_teach_is_refused(cli, home, tmp_path):
    empty = {"instruction": "Why?", "output": ""}
    assert upload_records(cli, tmp_path / "half.jsonl", [empty] * 40 + sums(40)).good
    ran = upload_records(cli, tmp_path / "most.jsonl", [empty] * 41 + sums(40))
    assert ran.failed(2, "41 of 81 conversations", "`output` has no text (41: ", "most.jsonl:1; ")


def test_empty_pairs_beside_texts_are_columns(cli, tmp_path):
    texts = [{"text": f"Line {n}. " * 9, "prompt": None, "completion": None} for n in range(99)]
    texts.append({"text": "", "prompt": None, "completion": None})
    ran = upload_records(cli, tmp_path / "rows.jsonl", texts).good
    assert "99 documents, " in ran.err
    assert "1 of 100 documents left out: no text" in ran.err


def test_both_kinds_or_one_conversation_alone_are_refused(cli, tmp_path):
    chat, text = (
        json.dumps({"messages": exchange("a", "b" * 700)}) + "\n",
        '{"text": "a"}\n',
    )
    for content, fact in ((chat + text, ".jsonl:2: "), (text * 2 + chat, ".jsonl:3: "), (chat, "")):
        (tmp_path / "a.jsonl").write_text(content)
        ran = cli("upload-data", "a.jsonl", "--tokenizer", "bpe", "--vocab-size", "260")
        assert ran.failed(2, fact)


def test_where_a_turn_ends_changes_the_data_set(cli, tmp_path):
    hashes = set()
    for chat in (
        exchange("a", "bassistant\nc"),
        [*exchange("a", "b"), *exchange("a", "c")[1:]],
    ):
        lines = (
            json.dumps({"messages": chat})
            + "\n"
            + json.dumps({"messages": exchange("x" * 700, "y")})
        )
        (tmp_path / "a.jsonl").write_text(lines)
        ran = cli("upload-data", "a.jsonl", "--tokenizer", "bpe", "--vocab-size", "260")
        assert ran.code == 0, ran.err
        hashes.add(ran.out)
    assert len(hashes) == 2
