"""Read the exports of messengers and assistants. Each chat is a talk.

ChatGPT, Claude, Telegram, Discord (by DiscordChatExporter) and Slack export JSON; whatsapp.py reads
the text that WhatsApp exports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from html import unescape
from pathlib import Path
from typing import Any

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.text.chats import may_be_chat
from sm_nanogpt.launcher.text.talks import Talk

ASSISTANT = "assistant"
SLACK_FIELDS = ("members", "profile", "service_id", "is_archived")  # of files without messages
SLACK_PEOPLE = "../users.json"  # beside the folders of the channels
SLACK_SIGN = re.compile(r"<([@#!]?)([^<>|]*)(?:\|([^<>]*))?>")
DISCORD_MEDIA = {"attachments": "attached file", "stickers": "sticker"}  # lists of a message
TELEGRAM_MEDIA = {  # what a message holds besides text, by its field
    "photo": "photo",
    "file": "file",
    "poll": "poll",
    "location_information": "location",
    "contact_information": "contact",
    "game_title": "game",
    "todo_list": "to-do list",
}


def talks_in_json(value: Any, name: str) -> list[Talk] | None:
    """The talks in the JSON value of a file; None if no program that is known here exported it.

    Raises InputError if the export of a known program has an unknown form.
    """
    for program, is_export, read in EXPORTS:
        if not is_export(value):
            continue
        try:
            return list(read(value))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"is an export of {program} in a form that is not known here"
            raise InputError(f"{name}: {problem} ({error!r})") from error
    return None


def has_items(value: Any, *fields: str) -> bool:
    """True for a list whose first item is an object with these fields."""
    return isinstance(value, list) and bool(value) and has_fields(value[0], *fields)


def has_fields(value: Any, *fields: str) -> bool:
    return isinstance(value, dict) and all(field in value for field in fields)


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def is_chatgpt(value: Any) -> bool:
    return has_items(value, "mapping") and isinstance(value[0]["mapping"], dict)


def read_chatgpt(conversations: list[Any]) -> Iterator[Talk]:
    """Yield the branch of each conversation that ChatGPT showed last."""
    for conversation in conversations:
        talk = Talk(answers=ASSISTANT)
        nodes = conversation.get("mapping") or {}
        branch = branch_of(nodes, conversation.get("current_node"))
        for node in branch:
            add_chatgpt_message(talk, node.get("message") or {})
        talk.left_out["message of another branch"] += len(nodes) - len(branch)
        yield talk


def branch_of(nodes: dict[str, Any], last_id: Any) -> list[dict[str, Any]]:
    """The nodes from the first message to the one with last_id; without such a node, to the last of
    the nodes."""
    if last_id not in nodes and nodes:
        last_id = list(nodes)[-1]
    branch: list[dict[str, Any]] = []
    while last_id in nodes and len(branch) < len(nodes):  # an id may be its own ancestor
        branch.append(nodes[last_id])
        last_id = nodes[last_id].get("parent")
    return branch[::-1]


def add_chatgpt_message(talk: Talk, message: dict[str, Any]) -> None:
    """Add the message of a person or of the assistant. System messages are dropped uncounted."""
    author = (message.get("author") or {}).get("role")
    content = message.get("content") or {}
    kind = content.get("content_type") or ""
    metadata = message.get("metadata") or {}
    if author not in ("user", ASSISTANT) or metadata.get("is_visually_hidden_from_conversation"):
        if author == "tool":
            talk.left_out["answer of a tool"] += 1
        return
    if kind not in ("text", "multimodal_text") or message.get("recipient", "all") != "all":
        talk.left_out[kind.replace("_", " ") or "message without text"] += 1
        return
    parts = content.get("parts") or []
    texts = [part for part in parts if isinstance(part, str)]
    talk.left_out["image or recording"] += len(parts) - len(texts)
    if any(map(is_text, texts)):
        talk.add(author, "\n".join(texts))


def is_claude(value: Any) -> bool:
    return has_items(value, "chat_messages")


def read_claude(conversations: list[Any]) -> Iterator[Talk]:
    for conversation in conversations:
        talk = Talk(answers=ASSISTANT)
        for message in conversation.get("chat_messages") or []:
            add_claude_message(talk, message)
        yield talk


def add_claude_message(talk: Talk, message: dict[str, Any]) -> None:
    """Add a message with the texts among its parts. Older exports have one text and no parts."""
    texts: list[str] = []
    for part in message.get("content") or []:
        if not has_fields(part, "text"):
            talk.left_out[kind_of_part(part)] += 1
        elif is_text(part["text"]):
            texts.append(part["text"])
    author = ASSISTANT if message.get("sender") == ASSISTANT else "user"
    talk.add(author, "\n".join(texts) or message.get("text") or "")
    for field in ("attachments", "files"):
        talk.left_out["attached file"] += len(message.get(field) or [])


def kind_of_part(part: Any) -> str:
    """The kind of a part of a message that is left out, such as `tool use`."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not is_text(kind):
        return "part of an unknown kind"
    return str(kind).replace("_", " ")


def is_telegram_chat(value: Any) -> bool:
    return has_fields(value, "messages", "type") and has_items(value["messages"], "type", "date")


def is_telegram(value: Any) -> bool:
    return bool(telegram_chats(value))


def telegram_chats(value: Any) -> list[Any]:
    """The chats in the export of a chat, or of an account; [] for any other value."""
    if is_telegram_chat(value):
        return [value]
    chats = []
    if has_fields(value, "chats"):
        for group in (value["chats"], value.get("left_chats")):
            if has_fields(group, "list"):
                chats += [chat for chat in group["list"] if is_telegram_chat(chat)]
    return chats


def read_telegram(value: dict[str, Any]) -> Iterator[Talk]:
    for chat in telegram_chats(value):
        talk = Talk()
        for message in chat["messages"]:
            add_telegram_message(talk, message)
        yield talk


def add_telegram_message(talk: Talk, message: dict[str, Any]) -> None:
    """Add a message that a person wrote. Photos and the like are counted, their captions added."""
    text = telegram_text(message.get("text"))
    if message.get("type") != "message":
        talk.left_out["note of the service"] += 1
        return
    if "forwarded_from" in message:
        talk.left_out["forwarded message"] += 1
        return
    media = telegram_media(message)
    if media:
        talk.left_out[media] += 1
    if text.strip() or not media:
        author = message.get("from") or message.get("from_id") or "deleted account"
        talk.add(author, text, seconds_of(message))


def telegram_media(message: dict[str, Any]) -> str:
    """What a message holds besides its text, such as `voice message`; or ''."""
    if "media_type" in message:
        return str(message["media_type"]).replace("_", " ")
    for field, kind in TELEGRAM_MEDIA.items():
        if field in message:
            return kind
    return ""


def telegram_text(text: Any) -> str:
    """The text of a message, in which Telegram has links and the like as objects."""
    if isinstance(text, str):
        return text
    parts = text if isinstance(text, list) else []
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in parts)


def seconds_of(message: dict[str, Any]) -> float:
    """When a message was written, in seconds since the epoch; 0 if it has no date in ISO 8601."""
    if "date_unixtime" in message:
        return float(message["date_unixtime"])
    date: Any = message.get("date") or message.get("timestamp")
    try:
        return datetime.fromisoformat(date).timestamp()
    except (TypeError, ValueError):
        return 0.0


def is_discord(value: Any) -> bool:
    return has_fields(value, "channel", "messages") and has_items(
        value["messages"], "author", "content", "timestamp"
    )


def read_discord(value: dict[str, Any]) -> Iterator[Talk]:
    talk = Talk()
    for message in value["messages"]:
        add_discord_message(talk, message)
    yield talk


def add_discord_message(talk: Talk, message: dict[str, Any]) -> None:
    """Add the message of a person. Attached files are counted, and their captions added."""
    author = message["author"]
    if message.get("type", "Default") not in ("Default", "Reply"):
        talk.left_out["note of the service"] += 1
        return
    if author.get("isBot"):
        talk.left_out["message of a bot"] += 1
        return
    for field, kind in DISCORD_MEDIA.items():
        talk.left_out[kind] += len(message.get(field) or [])
    if message["content"].strip():
        name = author.get("nickname") or author.get("name") or author.get("id")
        talk.add(str(name), message["content"], seconds_of(message))


def is_slack(value: Any) -> bool:
    """True for a file of Slack: the messages of a day, or a list of people, channels, files, or
    programs, which has no messages."""
    if has_items(value, "type", "ts"):
        return True
    if has_items(value, "user_id", "change_type"):  # the log of programs
        return True
    if not has_items(value, "id") or "text" in value[0] or may_be_chat(set(value[0])):
        return False
    is_file = has_items(value, "created", "filetype")
    return is_file or any(field in value[0] for field in SLACK_FIELDS)


def read_slack(items: list[Any]) -> Iterator[Talk]:
    """Yield one talk. It is empty if the items are no messages, but people or channels."""
    talk = Talk(people_file=SLACK_PEOPLE)
    for item in items:
        if item.get("type") == "message" and "ts" in item:
            add_slack_message(talk, item)
    yield talk


def add_slack_message(talk: Talk, message: dict[str, Any]) -> None:
    if message.get("subtype") not in (None, "thread_broadcast", "me_message"):
        talk.left_out[f"message of the kind {message['subtype']}"] += 1
        return
    talk.left_out["attached file"] += len(message.get("files") or [])
    text = slack_text(message.get("text") or "")
    if text.strip():
        user_id = message.get("user") or "somebody"  # name_people replaces it
        author = name_in_profile(message.get("user_profile")) or user_id
        talk.add(author, text, float(message["ts"]))


def name_in_profile(profile: Any) -> str:
    """The name in a profile of Slack, or ''."""
    profile = profile or {}
    return profile.get("display_name") or profile.get("real_name") or ""


def read_slack_people(path: Path) -> dict[str, str]:
    """Read the names of people, by id, from the users.json of Slack; {} if it cannot be read."""
    try:
        return read_slack_people_once(path, path.stat().st_mtime_ns)
    except OSError:
        return {}


@lru_cache(maxsize=8)  # it is read for the file of each day
def read_slack_people_once(path: Path, mtime_ns: int) -> dict[str, str]:
    """As read_slack_people; mtime_ns, when the file was last changed, is for the cache alone."""
    return parse_slack_people(path.read_bytes())


def parse_slack_people(content: bytes) -> dict[str, str]:
    """The names of people, by id, in the content of a users.json; {} if it has another form."""
    try:
        names = {user["id"]: name_in_profile(user.get("profile")) for user in json.loads(content)}
    except (AttributeError, LookupError, TypeError, ValueError):
        return {}
    return {user_id: name for user_id, name in names.items() if name}


def slack_text(text: str) -> str:
    """A text of Slack, in which links, channels, and people have their names, not addresses."""

    def readable(sign: re.Match[str]) -> str:
        kind, target, name = sign.groups()
        if kind == "!":
            return f"@{target.partition('^')[0]}"
        return f"{kind}{name or target}"

    return unescape(SLACK_SIGN.sub(readable, text))


EXPORTS: tuple[tuple[str, Callable[[Any], bool], Callable[[Any], Iterator[Talk]]], ...] = (
    ("ChatGPT", is_chatgpt, read_chatgpt),
    ("Claude", is_claude, read_claude),
    ("Telegram", is_telegram, read_telegram),
    ("Discord", is_discord, read_discord),
    ("Slack", is_slack, read_slack),
)
