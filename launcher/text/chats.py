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

    Raises InputError, which starts with `place`, if a model cannot learn from it.
    """
    try:
        messages = messages_of(record)
        return None if messages is None else turns_in(messages)
    except InputError as error:
        raise InputError(f"{place}: {error}; a conversation is like {EXAMPLE}") from None


def may_be_chat(fields: set[str]) -> bool:
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
        role, content = str(fields.get("role") or fields.get("from")), fields.get("content")
        text = text_of(fields.get("value") if content is None else content)
        if ROLES.get(role) == "system" and text is not None and not text.strip():
            continue
        if fault := fault_of(fields, role, text, not turns):
            raise InputError(f"{name} {fault}")
        turns.append(f"{ROLES[role]}\n{text}")
    if not any(turn.startswith(SPEAKS) for turn in turns):
        raise InputError("the assistant says nothing")
    return turns


def text_of(content: Any) -> str | None:
    """The text of a message: a string, or parts of the type text; else None."""
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        texts: list[Any] = [p.get("text") if p.get("type") == "text" else None for p in parts]
        return "".join(texts) if all(isinstance(text, str) for text in texts) else None
    return content if isinstance(content, str) else None


def fault_of(fields: dict[str, Any], role: str, text: str | None, is_first: bool) -> str:
    """Why a message cannot be learned, or ''."""
    if role not in ROLES:
        return f"has the role {role[:20]!r}, not one of {', '.join(ROLES)}"
    for calls in filter(fields.get, ("tool_calls", "function_call")):
        return f"has {calls}, which no model here can learn"
    if fields.get("weight") == 0:
        return "has the weight 0, but the loss counts every answer"
    if ROLES[role] == "system" and not is_first:
        return "is the system's, which can only be the first"
    if isinstance(fields.get("content"), list) and text is None:
        return "has a part that is not text"
    return "" if text and not text.isspace() else "has no text"
