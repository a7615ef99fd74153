"""Conversations in records: which there are, and what of them can teach."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from talks import exchange, messages
from token_texts import BPE, encode_text

from sm_nanogpt import InputError
from sm_nanogpt.launcher.text.chats import turns_of
from sm_nanogpt.launcher.text.documents import Survey, survey_documents
from sm_nanogpt.launcher.text.reading import detect_file
from sm_nanogpt.launcher.text.skipped import Skipped, Unlearnable

PART = {"type": "text", "text": "a"}
ASKED = ["user\na", "assistant\nb"]
WITH_SYSTEM = ["system\nc", *ASKED]


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"messages": messages("a", "b")}, ASKED),
        (messages("a", "b"), ASKED),
        ({"messages": messages("c", "a", "b", roles="developer user assistant")}, WITH_SYSTEM),
        ({"messages": messages(" ", "a", "b", roles="system user assistant")}, ASKED),
        ({"messages": messages([PART, PART], "b")}, ["user\naa", "assistant\nb"]),
        ({"conversations": messages("a", "b", roles="human gpt", to="from value")}, ASKED),
        ({"conversations": messages("a", "b"), "system": "c"}, WITH_SYSTEM),
        ({"instruction": "a", "input": "", "output": "b"}, ASKED),
        ({"instruction": "a", "input": "c", "output": "b"}, ["user\na\n\nc", "assistant\nb"]),
        ({"prompt": "a", "completion": "b", "messages": None, "label": True}, ASKED),
        ({"prompt": messages("a"), "completion": messages("b", roles="assistant")}, ASKED),
        ({"instruction": None, "input": "a", "output": "b"}, ASKED),
        ({"messages": [], "prompt": None, "conversations": messages("a", "b")}, ASKED),
        ({"text": "a", "instruction": "", "output": " "}, None),
        ({"prompt": "a"}, None),
    ],
)
def test_each_form_of_a_conversation_gives_its_turns(record, turns):
    assert turns_of(record, "") == turns


@pytest.mark.parametrize(
    ("record", "facts"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": {}}, "`messages`"),
        (["a"], "message 1 role"),
        ({"messages": messages("a", " \n")}, "message 2 no text"),
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
    for fact in facts.split():
        assert fact in str(error.value)


def sums(count: int) -> list[Any]:
    return [{"messages": exchange(f"What is {n} + {n}?", str(2 * n))} for n in range(count)]


@pytest.fixture
def write(tmp_path):
    """Writes records as JSON lines."""

    def write(records: Sequence[Any]) -> Path:
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


def survey(path: Path) -> Survey:
    return survey_documents([detect_file(path)])


def test_a_bad_line_uploads_nothing_and_is_numbered(cli, home, write):
    path = write([*sums(20), 0])
    ran = cli("upload-data", path, BPE)
    assert ran.failed(2, "chats.jsonl:21: ")
    assert not ran.out
    assert not (home / "store/data").exists()


def test_what_cannot_teach_is_left_out_and_counted(cli, home, write):
    empty = {"messages": exchange("Why?", "")}
    silent: dict[str, Any] = {"messages": []}
    tool = {"messages": [{"role": "tool", "content": "a"}]}
    path = write([empty, *sums(200), silent, empty, tool])
    ran = cli("upload-data", path, BPE).good
    (line,) = [line for line in ran.err.splitlines() if "left out" in line]
    assert line.startswith("warning: 4 of 204 conversations left out: ")
    assert re.search(r"no text \(2: \S*chats\.jsonl:1; \S*chats\.jsonl:203\)", line)
    assert re.search(r"no messages \(1: \S*chats\.jsonl:202\)", line)
    assert re.search(r"'tool'.* \(1: \S*chats\.jsonl:204\)", line)
    assert "200 conversations, " in ran.err


def test_what_is_left_out_does_not_change_the_data(write):
    whole = survey(write(sums(9)))
    with_empty = survey(write([{"messages": []}, *sums(9)]))
    assert with_empty.sha256 == whole.sha256


def test_half_of_the_conversations_may_be_left_out():
    skipped = Skipped()
    for n in range(40):
        skipped.add(Unlearnable("", reason="`output` has no text"), f"chats.jsonl:{n}")
    skipped.check(40)
    with pytest.raises(InputError, match=r"40 of 79 .*: `output` has no text \(40: "):
        skipped.check(39)


def test_an_empty_pair_beside_texts_is_an_empty_document(write):
    nothing = {"prompt": None, "completion": None}
    surveyed = survey(write([{"text": "a", **nothing}, {"text": "", **nothing}]))
    assert surveyed.documents == surveyed.empty == 1
    assert surveyed.chats == 0


CHAT: dict[str, Any] = {"messages": exchange("a", "b")}
TEXT = {"text": "a"}


@pytest.mark.parametrize(("records", "line"), [([CHAT, TEXT], 2), ([TEXT, TEXT, CHAT], 3)])
def test_texts_beside_conversations_are_refused(records, line, write):
    problem = f"chats.jsonl:{line}: some documents are conversations"
    with pytest.raises(InputError, match=re.escape(problem)):
        survey(write(records))


def test_one_conversation_alone_is_refused(write, tokenizer, tmp_path):
    path = write([{"messages": exchange("a", "b")}])
    with pytest.raises(InputError, match="one conversation is too little"):
        encode_text(path, tokenizer, tmp_path)


def test_where_a_turn_ends_changes_the_data(write):
    one = survey(write([{"messages": exchange("a", "bassistant\nc")}]))
    two_answers = [*exchange("a", "b"), *exchange("a", "c")[1:]]
    assert survey(write([{"messages": two_answers}])).sha256 != one.sha256
