"""Chats in the zip archives in which programs export them."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest
from exported import conversations

from sm_nanogpt import InputError
from sm_nanogpt.launcher.text.archives import OTHER_FILE
from sm_nanogpt.launcher.text.documents import documents_in
from sm_nanogpt.launcher.text.reading import detect_file
from sm_nanogpt.launcher.text.skipped import Skipped

WHATSAPP = "12/03/24, 14:05 - Ann: How are you?\n12/03/24, 14:06 - Bob: Fine.\n"
MESSAGES = [
    {"sender": "human", "text": "How are you?"},
    {"sender": "assistant", "text": "Fine."},
]
CLAUDE = json.dumps([{"uuid": "u", "chat_messages": MESSAGES}])
USERS = json.dumps([{"id": "U1", "profile": {"display_name": "Bob"}}])
DAY = json.dumps(
    [
        {"type": "message", "user": "U2", "text": "How are you?", "ts": "1710252301.1"},
        {"type": "message", "user": "U1", "text": "Fine.", "ts": "1710252302.1"},
    ]
)
CHAT = ["user\nHow are you?", "assistant\nFine."]


def zip_of(path: Path, contents: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "me"),
    [("data/conversations-000.json", CLAUDE, ""), ("chat", "\ufeff" + WHATSAPP, "Bob")],
)
def test_an_export_is_found_by_what_is_in_it(tmp_path, name, content, me):
    path = zip_of(tmp_path / "export.zip", {name: content})
    assert conversations(path, me)[0] == [CHAT]


def test_an_encoding_is_not_for_an_archive(tmp_path):
    path = zip_of(tmp_path / "export.zip", {"chat.txt": WHATSAPP})
    file = detect_file(path, encoding="cp1252", me="Bob")
    assert [list(document.pieces) for document in documents_in(file, Skipped())] == [CHAT]


def test_a_packed_archive_is_to_be_unpacked_first(tmp_path):
    archive = zip_of(tmp_path / "export.zip", {"chat.txt": WHATSAPP})
    packed = tmp_path / "export.zip.gz"
    packed.write_bytes(gzip.compress(archive.read_bytes()))
    with pytest.raises(InputError, match=r"is a zip archive; `gunzip -k \S*` unpacks it"):
        detect_file(packed)


def test_the_archive_of_slack_has_the_names_of_people(tmp_path):
    days = {f"general/2024-03-{day:02}.json": DAY for day in (2, 1)}
    path = zip_of(tmp_path / "slack.zip", days | {"users.json": USERS, "dms.json": "[]"})
    chats, skipped = conversations(path, me="Bob")
    assert chats == [CHAT, CHAT]
    assert skipped.talks.authors == {"Bob": 2, "U2": 2}
    _, skipped = conversations(zip_of(tmp_path / "days.zip", days), me="U1")
    assert skipped.talks.authors == {"U1": 2, "U2": 2}


def test_a_diary_in_an_archive_is_no_chat(tmp_path, caplog):
    path = zip_of(tmp_path / "diary.zip", {"diary.txt": WHATSAPP.replace("14:06", "21:00")})
    with pytest.raises(InputError, match=r"has no chat .* unpack it"):
        conversations(path)
    [record] = caplog.records
    assert vars(record)["code"] == "read-as-chat"
    assert conversations(path, me="Bob")[0]


def test_other_files_of_an_archive_are_counted(tmp_path):
    others = {"IMG-1.jpg": "\x00\x01\x02", "user.json": '{"id": "u"}', "empty.json": "[]"}
    path = zip_of(tmp_path / "export.zip", {"_chat.txt": WHATSAPP} | others)
    assert conversations(path, me="Bob")[1].talks.left_out == {OTHER_FILE: 2}


def test_json_that_nobody_can_read_beside_an_export_is_named(tmp_path, caplog):
    """ChatGPT exports the files that one gave it."""
    path = zip_of(tmp_path / "export.zip", {"conversations.json": CLAUDE, "file-1.json": "{a: 1}"})
    chats, skipped = conversations(path)
    assert chats == [CHAT]
    assert skipped.talks.left_out == {OTHER_FILE: 1}
    [message] = caplog.messages
    assert "export.zip, file-1.json: not JSON" in message


def test_a_zip_archive_of_anything_else_is_to_be_unpacked(tmp_path):
    path = zip_of(tmp_path / "notes.zip", {"notes.txt": "a"})
    with pytest.raises(InputError, match=r"has no chat .*unpack it: `unzip "):
        conversations(path)


def test_json_that_is_cut_is_an_error(tmp_path):
    path = zip_of(tmp_path / "export.zip", {"conversations.json": CLAUDE[:-3]})
    with pytest.raises(InputError, match=r"export.zip, conversations.json: not JSON"):
        conversations(path)


LOCAL, CENTRAL = b"PK\x03\x04", b"PK\x01\x02"  # how an entry of an archive begins, and of its table


def with_field(content: bytes, offset: int, value: bytes) -> bytes:
    """An archive of one entry with another value in a field; the table has it two bytes later."""
    changed = bytearray(content)
    for start in (content.index(LOCAL) + offset, content.index(CENTRAL) + offset + 2):
        changed[start : start + len(value)] = value
    return bytes(changed)


@pytest.mark.parametrize(
    ("offset", "value", "problem"),
    [
        (6, b"\x01", "is encrypted"),
        (8, b"\x63", "compressed in a way"),
        (14, b"\0\0\0\0", "damaged: Bad CRC"),
    ],
)
def test_a_zip_archive_that_cannot_be_read_says_why(tmp_path, offset, value, problem):
    path = zip_of(tmp_path / "export.zip", {"conversations.json": CLAUDE})
    path.write_bytes(with_field(path.read_bytes(), offset, value))
    with pytest.raises(InputError, match=problem):
        conversations(path)
