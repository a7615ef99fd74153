"""The text of a chat that WhatsApp exports, as its users have described it."""

from __future__ import annotations

import pytest
from exported import ANDROID, ASKED, conversations

from sm_nanogpt.launcher.text.reading import detect_file
from sm_nanogpt.launcher.text.whatsapp import is_chat

IOS = """\
[12.03.24, 14:05:33] Ann: \u200eMessages and calls are end-to-end encrypted.
[12.03.24, 14:05:34] Ann: How are you?
[12.03.24, 14:06:01] Bob: Fine.
[12.03.24, 14:06:02] Bob: And you?
\u200e[12.03.24, 14:07:10] Ann: \u200eimage omitted
[12.03.24, 14:07:11] Ann: \u200eThis message was deleted.
[13.03.24, 14:08:00] Ann: Two
lines: and this
[13.03.24, 14:09:00] Bob: Yes. \u200e<This message was edited>
"""
TALK = "12/03/2024 14:05 - Ann: How are you?\n12/03/2024 14:06 - Bob: Fine.\n"
AMERICAN = ANDROID.replace("14:0", "2:0").replace(" - ", "\u202fPM - ").replace("9:3", "9:3")


@pytest.mark.parametrize("text", [ANDROID, IOS, AMERICAN], ids=["Android", "iOS", "12 hours"])
def test_whatsapps_text_is_read_in_each_style(tmp_path, text):
    (tmp_path / "chat.txt").write_text(text, "utf-8")
    chats, skipped = conversations(tmp_path / "chat.txt", me="Bob")
    assert chats == [ASKED, ["user\nTwo\nlines: and this", "assistant\nYes."]]
    left_out = {"note of the service": 1, "photo, recording, or file": 1, "deleted message": 1}
    assert skipped.talks.left_out == left_out


@pytest.mark.parametrize(
    "text",
    ["IMG-1.jpg (file attached)\nA caption.", "A caption. \u200e<attached: 00000012-PHOTO.jpg>"],
)
def test_the_caption_of_a_photo_of_whatsapp_stays(tmp_path, text):
    lines = f"12/03/24, 14:05 - Ann: {text}\n12/03/24, 14:06 - Bob: Nice!\n"
    (tmp_path / "chat.txt").write_text(lines, "utf-8")
    chats, skipped = conversations(tmp_path / "chat.txt", me="Bob")
    assert chats == [["user\nA caption.", "assistant\nNice!"]]
    assert skipped.talks.left_out == {"photo, recording, or file": 1}


def test_a_file_of_whatsapp_without_a_caption_is_left_out(tmp_path):
    line = "12/03/24, 14:05 - Ann: Contract.pdf • \u200e2 pages \u200edocument omitted\n"
    (tmp_path / "chat.txt").write_text(line, "utf-8")
    chats, skipped = conversations(tmp_path / "chat.txt", me="Ann")
    assert chats == []
    assert skipped.talks.left_out == {"photo, recording, or file": 1}


@pytest.mark.parametrize("text", ["Call \u200e+49 30 1234!", "<html>\n<body>"])
def test_what_people_write_in_whatsapp_stays(tmp_path, text):
    """Also the mark of WhatsApp's own words, which keyboards and telephone numbers have, too."""
    lines = f"12/03/24, 14:05 - Ann: {text}\n12/03/24, 14:06 - Bob: Fine.\n"
    (tmp_path / "chat.txt").write_text(lines, "utf-8")
    chats, skipped = conversations(tmp_path / "chat.txt", me="Bob")
    assert chats == [[f"user\n{text}", "assistant\nFine."]]
    assert not skipped.talks.left_out


def test_whatsapps_date_may_have_no_comma(tmp_path):
    (tmp_path / "chat.txt").write_text(f"12/03/2024 14:05 - Nem o WhatsApp pode ler.\n{TALK}")
    chats, _ = conversations(tmp_path / "chat.txt", me="Bob")
    assert chats == [["user\nHow are you?", "assistant\nFine."]]


@pytest.mark.parametrize(
    ("author", "name"), [("~", "~"), ("~\u202f", "~"), ("~\u202fAnn", "Ann"), ("~ Ann", "Ann")]
)
def test_who_is_no_contact_of_whatsapp_is_a_person(tmp_path, author, name):
    """A tilde marks them, also where they have not set a name."""
    lines = f"12/03/24, 14:05 - {author}: How are you?\n12/03/24, 14:06 - Bob: Fine.\n"
    (tmp_path / "chat.txt").write_text(lines, "utf-8")
    chats, skipped = conversations(tmp_path / "chat.txt", me="Bob")
    assert chats == [["user\nHow are you?", "assistant\nFine."]]
    assert skipped.talks.authors == {name: 1, "Bob": 1}
    assert not skipped.talks.left_out


def test_a_note_of_two_lines_is_no_message(tmp_path):
    note = "12/03/24, 14:04 - Ann changed the description\nRules: be kind\n"
    (tmp_path / "chat.txt").write_text(f"{note}{ANDROID}", "utf-8")
    _, skipped = conversations(tmp_path / "chat.txt", me="Bob")
    assert set(skipped.talks.authors) == {"Ann", "Bob"}
    assert skipped.talks.left_out["note of the service"] == 2


@pytest.mark.parametrize(
    "line",
    ["2024-03-12 14:05:33 - start: now\n", "12/03/2024 14:05 - Went to the sea\n"],
)
def test_a_log_with_times_is_no_chat_of_whatsapp(tmp_path, line):
    (tmp_path / "a.txt").write_text(line * 9)
    assert detect_file(tmp_path / "a.txt").format.is_plain


DIARY = """\
12/03/2024 14:05 - Had breakfast: eggs
12/03/2024 14:30 - Called Mom: all is well
13/03/2024 09:00 - To do: the dishes
13/03/2024 21:00 - To do: sleep
"""
LEVELS = """\
12/03/2024 14:05 - INFO: started
12/03/2024 14:05 - WARNING: the disk is nearly full
"""


@pytest.mark.parametrize("text", [DIARY, LEVELS], ids=["diary", "levels"])
def test_a_diary_is_text_and_a_line_says_so(tmp_path, caplog, text):
    (tmp_path / "diary.txt").write_text(text)
    assert detect_file(tmp_path / "diary.txt").format.is_plain
    [record] = caplog.records
    assert record.getMessage().endswith(
        "diary.txt: has times as a chat of WhatsApp has, but is read as text"
    )
    assert vars(record)["code"] == "read-as-chat"


def test_a_short_chat_is_known_by_a_name_or_its_file(tmp_path):
    (tmp_path / "a.txt").write_text(TALK)
    assert detect_file(tmp_path / "a.txt").format.is_plain
    assert not detect_file(tmp_path / "a.txt", me="Bob").format.is_plain
    (tmp_path / "WhatsApp Chat with Ann.txt").write_text(TALK)
    assert not detect_file(tmp_path / "WhatsApp Chat with Ann.txt").format.is_plain


def test_a_chat_is_known_by_names_that_answer_each_other(tmp_path):
    (tmp_path / "a.txt").write_text(TALK * 2)
    assert not detect_file(tmp_path / "a.txt").format.is_plain
    later = TALK.replace("14:06", "16:06")
    (tmp_path / "b.txt").write_text(later * 2)
    assert detect_file(tmp_path / "b.txt").format.is_plain


def test_a_sign_of_whatsapp_makes_a_text_its_chat():
    """The mark that iOS writes, or the note on how safe the program is, in any language."""
    assert is_chat("[12.03.24, 14:05:33] Ann: \u200eimage omitted\n", "a.txt", "")
    assert is_chat("12/03/2024 14:05 - Nem o WhatsApp pode ler.\n", "a.txt", "")
    assert not is_chat("12/03/2024 14:05 - Wrote on WhatsApp: to Ann\n", "a.txt", "")
