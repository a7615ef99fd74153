"""Chats that programs export, after the descriptions that their makers or users have published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from exported import ANDROID, ASKED, conversations

from sm_nanogpt import InputError
from sm_nanogpt.launcher.text.documents import survey_documents
from sm_nanogpt.launcher.text.messengers import talks_in_json
from sm_nanogpt.launcher.text.reading import detect_file
from sm_nanogpt.launcher.text.skipped import Skipped


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1), "utf-8")
    return path


# -- assistants ------------------------------------------------------------------------------------


def node(role: str, parts: list[Any], parent: str, kind: str = "text", **fields: Any) -> Any:
    content = {"content_type": kind, "parts": parts}
    return {"message": {"author": {"role": role}, "content": content, **fields}, "parent": parent}


HIDDEN: dict[str, Any] = {"metadata": {"is_visually_hidden_from_conversation": True}}
CHATGPT = {
    "title": "How are you?",
    "create_time": 1700000000.0,
    "current_node": "e",
    "mapping": {
        "root": {"message": None, "parent": None},
        "a": node("system", [""], "root", **HIDDEN),
        "b": node("user", ["How are you?", {"content_type": "image_asset_pointer"}], "a"),
        "old": node("assistant", ["An answer that was made again."], "b"),
        "c": node("assistant", ["search()"], "b", "code", recipient="browser"),
        "d": node("tool", ["{}"], "c"),
        "e": node("assistant", ["Fine.\nAnd you?"], "d"),
    },
}


def test_chatgpts_export_has_the_branch_shown_last(tmp_path):
    path = write_json(tmp_path / "conversations.json", [CHATGPT])
    chats, skipped = conversations(path)
    assert chats == [ASKED]
    left_out = {"image or recording": 1, "code": 1, "answer of a tool": 1}
    assert skipped.talks.left_out == {**left_out, "message of another branch": 1}


def test_an_export_of_another_form_is_an_error_of_one_line(tmp_path):
    content = {"content_type": "text", "parts": 3}
    mapping = {"e": {"parent": None, "message": {"author": {"role": "user"}, "content": content}}}
    path = write_json(tmp_path / "conversations.json", [{**CHATGPT, "mapping": mapping}])
    with pytest.raises(InputError, match="is an export of ChatGPT in a form that is not known"):
        conversations(path)


def test_claudes_export_has_its_conversations(tmp_path):
    parts = [{"type": "text", "text": "Fine."}, {"type": "tool_use", "name": "search"}]
    messages = [
        {"sender": "human", "text": "How are you?", "attachments": [{"file_name": "a.pdf"}]},
        {"sender": "assistant", "text": "Fine.", "content": parts},
        {"sender": "assistant", "text": "And you?", "content": []},
    ]
    path = write_json(tmp_path / "conversations.json", [{"uuid": "u", "chat_messages": messages}])
    chats, skipped = conversations(path)
    assert chats == [ASKED]
    assert skipped.talks.left_out == {"attached file": 1, "tool use": 1}


@pytest.mark.parametrize("part", [{"type": None}, "Fine."])
def test_a_part_of_an_unknown_kind_alone_is_left_out(tmp_path, part):
    messages = [
        {"sender": "human", "text": "How are you?"},
        {"sender": "assistant", "content": [{"type": "text", "text": "Fine.\nAnd you?"}, part]},
    ]
    path = write_json(tmp_path / "conversations.json", [{"chat_messages": messages}])
    chats, skipped = conversations(path)
    assert chats == [ASKED]
    assert skipped.talks.left_out == {"part of an unknown kind": 1}


def test_a_message_of_chatgpt_without_a_kind_alone_is_left_out(tmp_path):
    without_kind = {"message": {"author": {"role": "user"}, "content": {"content_type": None}}}
    export: Any = json.loads(json.dumps(CHATGPT))
    export["mapping"]["root"] = {**without_kind, "parent": None}
    chats, skipped = conversations(write_json(tmp_path / "conversations.json", [export]))
    assert chats == [ASKED]
    assert skipped.talks.left_out["message without text"] == 1


# -- messengers ------------------------------------------------------------------------------------


def telegram_message(author: str, text: Any, minute: int, **fields: Any) -> dict[str, Any]:
    date = f"2024-03-12T14:{minute:02}:00"
    return {"type": "message", "date": date, "from": author, "text": text, **fields}


TELEGRAM = {
    "name": "Bob",
    "type": "personal_chat",
    "id": 1,
    "messages": [
        {"type": "service", "date": "2024-03-12T14:00:00", "action": "phone_call"},
        telegram_message("Ann", ["How are ", {"type": "bold", "text": "you"}, "?"], 5),
        telegram_message("Bob", "Fine.", 6),
        telegram_message("Bob", "And you?", 6),
        telegram_message("Ann", "", 7, photo="photos/1.jpg"),
        telegram_message("Ann", "News", 8, forwarded_from="A channel"),
    ],
}


@pytest.mark.parametrize(
    "value", [TELEGRAM, {"chats": {"list": [TELEGRAM]}, "contacts": {}}], ids=["chat", "account"]
)
def test_telegrams_result_is_read(tmp_path, value):
    chats, skipped = conversations(write_json(tmp_path / "result.json", value), me="Bob")
    assert chats == [ASKED]
    left_out = {"note of the service": 1, "photo": 1, "forwarded message": 1}
    assert skipped.talks.left_out == left_out


def test_an_export_on_one_line_is_an_export(tmp_path):
    (tmp_path / "result.jsonl").write_text(json.dumps(TELEGRAM))
    assert conversations(tmp_path / "result.jsonl", me="Bob")[0] == [ASKED]


MEDIA: list[tuple[str, dict[str, Any]]] = [
    ("voice message", {"media_type": "voice_message", "file": "voice_messages/1.ogg"}),
    ("poll", {"poll": {"question": "When?"}}),
]


@pytest.mark.parametrize(("kind", "fields"), MEDIA)
def test_what_telegram_has_beside_a_text_is_counted(tmp_path, kind, fields):
    messages = [
        telegram_message("Ann", "How are you?", 5, **fields),
        telegram_message("Bob", "Fine.\nAnd you?", 6),
        telegram_message("Ann", "", 7, **fields),
    ]
    value = {**TELEGRAM, "messages": messages}
    chats, skipped = conversations(write_json(tmp_path / "result.json", value), me="Bob")
    assert chats == [ASKED]
    assert skipped.talks.left_out == {kind: 2}


def discord_message(author: str, text: str, minute: int, **fields: Any) -> dict[str, Any]:
    return {
        "type": "Default",
        "timestamp": f"2024-03-12T14:{minute:02}:00.123+00:00",
        "content": text,
        "author": {"id": "1", "name": author.lower(), "nickname": author, "isBot": False},
        "attachments": [],
        **fields,
    }


def test_the_json_of_discords_exporter_is_read(tmp_path):
    messages = [
        discord_message("Ann", "How are you?", 5, attachments=[{"fileName": "a.png"}]),
        discord_message("Bob", "Fine.", 6, type="Reply"),
        discord_message("Bob", "And you?", 6),
        discord_message("Bob", "Pinned a message.", 6, type="ChannelPinnedMessage"),
        discord_message("Ann", "", 7, stickers=[{"id": "1", "name": "wave"}]),
        discord_message("Bot", "beep", 7),
    ]
    messages[-1]["author"]["isBot"] = True
    value = {"guild": {"id": "0"}, "channel": {"id": "1"}, "messages": messages}
    chats, skipped = conversations(write_json(tmp_path / "a.json", value), me="Bob")
    assert chats == [ASKED]
    left_out = {"attached file": 1, "note of the service": 1, "sticker": 1, "message of a bot": 1}
    assert skipped.talks.left_out == left_out


def slack_message(author: str, text: str, seconds: int, **fields: Any) -> dict[str, Any]:
    profile = {"real_name": f"{author} Smith", "display_name": author}
    return {
        "type": "message",
        "user": f"U{author}",
        "text": text,
        "ts": f"{1710252300 + seconds}.000100",
        "user_profile": profile,
        **fields,
    }


def test_the_folder_of_slack_is_read(tmp_path, caplog):
    folder = tmp_path / "slack"
    write_json(folder / "users.json", [{"id": "UAnn", "profile": {}}])
    messages = [
        slack_message("Ann", "How is <@UBob|Bob>, and <https://a.example|the page>?", 1),
        slack_message("Bob", "Fine today &amp; after.", 2),
        slack_message("Bob", "<@UBob> has joined", 3, subtype="channel_join"),
    ]
    path = write_json(folder / "general/2024-03-01.json", messages)
    chats, skipped = conversations(path, me="Bob")
    assert chats == [["user\nHow is @Bob, and the page?", "assistant\nFine today & after."]]
    skipped.talks.check()
    assert caplog.messages == ["left out of chats: message of the kind channel_join (1)"]


def test_ids_of_slack_have_their_names_from_users_json(tmp_path):
    folder = tmp_path / "slack"
    profile = {"real_name": "Ann Smith", "display_name": ""}
    users = [{"id": "U1", "profile": profile}, {"id": "U2", "profile": {"display_name": "Bob"}}]
    write_json(folder / "users.json", users)
    messages = [
        {"type": "message", "user": "U1", "text": "<@U2>, how is <@U3>?", "ts": "1710252301.1"},
        {"type": "message", "user": "U2", "text": "Fine.", "ts": "1710252302.1"},
    ]
    path = write_json(folder / "general/2024-03-01.json", messages)
    chats, skipped = conversations(path, me="Bob")
    assert chats == [["user\n@Bob, how is @U3?", "assistant\nFine."]]
    assert skipped.talks.authors == {"Ann Smith": 1, "Bob": 1}


def test_ids_of_slack_stay_without_a_users_json(tmp_path):
    message = {"type": "message", "user": "U1", "text": "Hi", "ts": "1710252301.1"}
    path = write_json(tmp_path / "slack/general/2024-03-01.json", [message])
    _, skipped = conversations(path, me="U1")
    assert skipped.talks.authors == {"U1": 1}


SLACK_LISTS = {
    "programs": {"user_id": "U1", "date": "1710252301", "change_type": "added"},
    "canvases": {"id": "F1", "created": 1710252301, "name": "A_canvas", "filetype": "quip"},
    "dms": {"id": "D1", "created": 1710252301, "members": ["U1", "U2"]},
}


@pytest.mark.parametrize("name", SLACK_LISTS)
def test_the_lists_of_slack_hold_no_messages(tmp_path, name):
    chats, skipped = conversations(write_json(tmp_path / "a.json", [SLACK_LISTS[name]]))
    assert chats == []
    assert not skipped.counts


RECORDS: list[dict[str, Any]] = [
    {"id": 1, "filetype": "md", "content": "To be"},
    {"id": 1, "created": 2, "filetype": "md", "text": "To be"},
    {"id": 1, "members": 2, "messages": [{"role": "user", "content": "Hi"}]},
]


@pytest.mark.parametrize("record", RECORDS)
def test_records_with_a_field_of_slack_are_records(record):
    assert talks_in_json([record], "a.json") is None


# -- whose messages --------------------------------------------------------------------------------


def test_without_a_name_those_in_the_chat_are_listed(cli, tmp_path):
    (tmp_path / "chat.txt").write_text(ANDROID * 9)
    ran = cli("upload-data", "chat.txt", "--tokenizer", "bpe")
    assert ran.failed(2, "is a chat of Bob (27), Ann (18)", "--me NAME says whose messages")


def people_problem(skipped: Skipped) -> str:
    with pytest.raises(InputError) as refused:
        skipped.talks.check()
    return str(refused.value)


def test_the_people_of_all_chats_are_listed(tmp_path):
    for name, other in (("a.txt", "Ann"), ("b.txt", "Cat")):
        (tmp_path / name).write_text(ANDROID.replace("Ann", other))
    survey = survey_documents([detect_file(tmp_path / name) for name in ("a.txt", "b.txt")])
    problem = people_problem(survey.skipped)
    assert problem.endswith("a.txt and 1 more: chats of Bob (6), Ann (2), Cat (2)")


def test_a_name_that_nobody_has_is_refused_with_those_there(tmp_path):
    (tmp_path / "chat.txt").write_text(ANDROID)
    _, skipped = conversations(tmp_path / "chat.txt", me="Eve")
    assert people_problem(skipped) == "me=Eve: wrote no message; these did: Bob (3), Ann (2)"


def test_a_name_is_for_chats_alone(cli, tmp_path):
    (tmp_path / "a.txt").write_text("To be, or not to be.\n" * 99)
    ran = cli("upload-data", "a.txt", "--me", "Ann")
    assert ran.failed(2, "add --tokenizer bpe")
    ran = cli("upload-data", "a.txt", "--me", "Ann", "--tokenizer", "bpe")
    assert ran.failed(2, "--me Ann: is for chats between people")


def test_in_a_group_others_are_named(tmp_path):
    lines = ["Ann: Who comes?", "Cat: I do.", "Bob: Me too."]
    (tmp_path / "chat.txt").write_text("".join(f"12/03/24, 14:05 - {line}\n" for line in lines))
    chats, _ = conversations(tmp_path / "chat.txt", me="Bob")
    assert chats == [["user\nAnn: Who comes?\nCat: I do.", "assistant\nMe too."]]


def test_a_long_chat_is_cut_after_an_answer(tmp_path):
    """Here after the one with which it has over 1000 characters."""
    long = "a" * 250
    question_and_answer = f"12/03/24, 14:05 - Ann: {long}\n12/03/24, 14:06 - Bob: {long}\n"
    (tmp_path / "chat.txt").write_text(question_and_answer * 8)
    chats, _ = conversations(tmp_path / "chat.txt", me="Bob")
    assert [len(turns) for turns in chats] == [6, 6, 4]
