"""Conversations as others write them, as turns, which launcher/models/chat.py encodes.

docs/chat.md has the table of forms.
"""

from __future__ import annotations

from typing import Any

from launcher.models.chat import SPEAKS
from launcher.text.skipped import EXAMPLE, Unlearnable

ROLES = {role: role for role in ("system", "user", "assistant")}
ROLES |= {"developer": "system", "human": "user", "gpt": "assistant"}
ROLES |= {"chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}  # as ShareGPT has them
LISTS = ("messages", "conversations")
PAIRS = {"output": "instruction", "completion": "prompt"}  # an answer, and its question
FIELDS = {*LISTS, *PAIRS, *PAIRS.values(), "system", "input", "history", "label", "kto_tag"}


class Fault(Exception):
    """Why no model can learn from a conversation: its message or field, and what is wrong."""

    def __init__(self, subject: str, problem: str) -> None:
        super().__init__(f"{subject} {problem}")
        kind = "a message" if subject.startswith("message ") else subject
        self.reason = f"{kind} {problem}"


def turns_of(record: Any, place: str, column: str = "text") -> list[str] | None:
    """The turns of a conversation, each as `role\\ncontent`; None if the record is none.

    column is the field that holds a text, if the record is one. Raises Unlearnable, which starts
    with `place`, if no model can learn from it.
    """
    try:
        messages = messages_of(record, column)
        return None if messages is None else turns_in(messages)
    except Fault as fault:
        problem = f"{place}: {fault}; a conversation is like {EXAMPLE}"
        raise Unlearnable(problem, fault.reason, place) from None


def may_be_chat(fields: set[str]) -> bool:
    pairs = ({question, answer} for answer, question in PAIRS.items())
    return not fields.isdisjoint(LISTS) or any(pair <= fields for pair in pairs)


def is_empty(value: Any) -> bool:
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def messages_of(record: Any, column: str) -> dict[str, Any] | None:
    """The messages of a record by their names in an error; None if it is no conversation.

    Tables that were joined have empty columns, so the first form that holds anything counts. If
    all are empty, a record that has the column of a text is that text.
    """
    if isinstance(record, list):
        return numbered(record)
    if not isinstance(record, dict) or not may_be_chat(set(record)):
        return None
    filled = {field: value for field, value in record.items() if not is_empty(value)}
    system = {}
    if "system" in filled:
        system["`system`"] = message("system", filled["system"])
    for field in LISTS:
        if field in filled:
            if not isinstance(filled[field], list):
                raise Fault(f"`{field}`", "is no list of messages")
            return system | numbered(filled[field])
    pairs = [(q, a) for a, q in PAIRS.items() if {q, a} <= record.keys()]
    for question, answer in pairs:
        if question in filled or answer in filled:
            return system | messages_of_pair(filled, question, answer)
    return None if column in record else {}


def messages_of_pair(filled: dict[str, Any], question: str, answer: str) -> dict[str, Any]:
    if filled.get("label") is False or filled.get("kto_tag") is False:
        raise Fault(f"`{answer}`", "is labeled as a bad answer, and all are learned")
    if "history" in filled:
        raise Fault("`history`", "is not read; write all of it as `messages`")
    asked, answered = filled.get(question), filled.get(answer)
    if isinstance(asked, list) and isinstance(answered, list):
        return numbered(asked + answered)
    if answer == "output" and "input" in filled:
        asked = asked_with_input(asked, filled["input"])
    return {f"`{question}`": message("user", asked), f"`{answer}`": message("assistant", answered)}


def asked_with_input(instruction: Any, context: Any) -> Any:
    """An instruction and its input after a blank line, as in Alpaca's own prompt."""
    if instruction is None:
        return context
    return [{"type": "text", "text": text} for text in (instruction, "\n\n", context)]


def message(role: str, content: Any) -> dict[str, Any]:
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
            raise Fault(name, fault)
        turns.append(f"{ROLES[role]}\n{text}")
    if not messages:
        raise Fault("the conversation", "has no messages")
    if not any(turn.startswith(SPEAKS) for turn in turns):
        raise Fault("the assistant", "says nothing")
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
