"""Conversations as others write them, as turns, which launcher/models/chat.py encodes.

docs/chat.md has the table of forms.
"""

from __future__ import annotations

from typing import Any

from launcher.errors import InputError
from launcher.models.chat import SPEAKS

ROLES = {role: role for role in ("system", "user", "assistant")}
ROLES |= {"developer": "system", "human": "user", "gpt": "assistant"}
LISTS = ("messages", "conversations")
PAIRS = {"output": "instruction", "completion": "prompt"}  # an answer, and what was asked
FIELDS = {*LISTS, *PAIRS, *PAIRS.values(), "system", "input", "history", "label", "kto_tag"}
EXAMPLE = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)


def turns_of(record: Any, place: str) -> list[str] | None:
    """The turns of a conversation, each as `role\\ncontent`; None if the record is none.

    Raises:
        InputError: a message is no text that a model can learn, or the assistant says nothing; the
            error starts with `place`.
    """
    try:
        messages = messages_of(record)
        return None if messages is None else turns_in(messages)
    except InputError as error:
        raise InputError(f"{place}: {error}; a conversation is like {EXAMPLE}") from None


def may_be_chat(fields: set[str]) -> bool:
    """Whether a record with these fields can be a conversation."""
    pairs = ({question, answer} for answer, question in PAIRS.items())
    return not fields.isdisjoint(LISTS) or any(pair <= fields for pair in pairs)


def messages_of(record: Any) -> dict[str, Any] | None:
    """The messages of a record by their names in an error; None if it is no conversation."""
    if isinstance(record, list):
        return numbered(record)
    if not isinstance(record, dict) or record.keys().isdisjoint((*LISTS, *PAIRS)):
        return None
    given = {field: value for field, value in record.items() if value not in (None, "")}
    system = {"`system`": said("system", given["system"])} if "system" in given else {}
    for field in LISTS:
        if field in given:
            if not isinstance(given[field], list):
                raise InputError(f"`{field}` is no list of messages")
            return system | numbered(given[field])
    for answer, question in PAIRS.items():
        if answer in record and question in record:
            return system | pair_of(given, question, answer)
    return None


def pair_of(given: dict[str, Any], question: str, answer: str) -> dict[str, Any]:
    """The messages of a record with a question and an answer."""
    if given.get("label") is False or given.get("kto_tag") is False:
        raise InputError(f"`{answer}` is labeled as a bad answer, and all are learned")
    if given.get("history"):
        raise InputError("`history` is not read; write all of it as `messages`")
    asked, answered = given.get(question), given.get(answer)
    if isinstance(asked, list) and isinstance(answered, list):
        return numbered(asked + answered)
    if answer == "output" and "input" in given:  # after a blank line, as in Alpaca's own prompt
        asked = [{"type": "text", "text": text} for text in (asked, "\n\n", given["input"])]
    return {f"`{question}`": said("user", asked), f"`{answer}`": said("assistant", answered)}


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def numbered(messages: list[Any]) -> dict[str, Any]:
    return {f"message {number}": message for number, message in enumerate(messages, 1)}


def turns_in(messages: dict[str, Any]) -> list[str]:
    """Each message as a turn. An empty one of the system is left out."""
    turns: list[str] = []
    for name, message in messages.items():
        fields = message if isinstance(message, dict) else {}
        role = fields.get("role") or fields.get("from")
        if not isinstance(role, str) or role not in ROLES:
            known = ", ".join(ROLES)
            raise InputError(f"{name} has the role {str(role)[:20]!r}, not one of {known}")
        for calls in ("tool_calls", "function_call"):
            if fields.get(calls):
                raise InputError(f"{name} has {calls}, which no model here can learn")
        if fields.get("weight") == 0:
            raise InputError(f"{name} has the weight 0, but the loss counts every answer")
        role, text = ROLES[role], text_of(fields, name)
        is_empty = not text or text.isspace()
        if role == "system" and is_empty:
            continue
        if role == "system" and turns:
            raise InputError(f"{name} is the system's, which can only be the first")
        if is_empty:
            raise InputError(f"{name} has no text")
        turns.append(f"{role}\n{text}")
    if not any(turn.startswith(SPEAKS) for turn in turns):
        raise InputError("the assistant says nothing")
    return turns


def text_of(fields: dict[str, Any], name: str) -> str:
    """The text of a message: a string, or parts of the type text."""
    content = fields.get("content")
    if content is None:
        content = fields.get("value")
    if isinstance(content, list):
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise InputError(f"{name} has a part of the type {str(kind)[:20]!r}, not text")
            texts.append(part["text"])
        content = "".join(texts)
    if not isinstance(content, str):
        raise InputError(f"{name} has no text")
    return content
