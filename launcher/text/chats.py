"""Read conversations in the forms in which other programs write them.

The result is turns, which launcher/models/chat.py encodes. docs/chat.md has the table of forms.
"""

from __future__ import annotations

from typing import Any

from sm_nanogpt.launcher.models.encoder import ASSISTANT_PREFIX
from sm_nanogpt.launcher.text.skipped import EXAMPLE, Unlearnable

ROLES = {  # our role, by the name that a program has for it
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",  # ShareGPT writes this and the next two
    "bing": "assistant",
    "bard": "assistant",
}
LISTS = ("messages", "conversations")
QUESTIONS = {"output": "instruction", "completion": "prompt"}  # by the answer's field
FIELDS = {
    *LISTS,
    *QUESTIONS.keys(),
    *QUESTIONS.values(),
    "system",
    "input",
    "history",
    "label",
    "kto_tag",
}


def unlearnable_error(subject: str, problem: str) -> Unlearnable:
    """The error for a conversation. subject: the message or the field that has the problem."""
    reason = f"{subject} {problem}"
    if subject.startswith("message "):  # such as message 3
        reason = f"a message {problem}"
    return Unlearnable(f"{subject} {problem}; a conversation is like {EXAMPLE}", reason=reason)


def turns_of(record: Any, position: str, column: str = "text") -> list[str] | None:
    """The turns of a conversation, each as `role\\ncontent`; None if the record is no conversation.

    column is the field of the text in records that are texts. Raises Unlearnable, whose message
    starts with `position`, if no model can learn from the conversation.
    """
    try:
        messages = messages_of(record, column)
        if messages is None:
            return None
        return turns_of_messages(messages)
    except Unlearnable as error:
        raise error.within(position) from None


def may_be_chat(fields: set[str]) -> bool:
    """True if a record with these fields may be a conversation."""
    if not fields.isdisjoint(LISTS):
        return True
    return any({question, answer} <= fields for answer, question in QUESTIONS.items())


def is_empty(value: Any) -> bool:
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def messages_of(record: Any, column: str) -> dict[str, Any] | None:
    """The messages of a record, by their names in errors; None if the record is no conversation.

    Tables that were joined have empty columns, so the first form counts whose fields are not empty.
    If all are empty, and the record has the column of a text, it is a text.
    """
    if isinstance(record, list):
        return number_messages(record)
    if not isinstance(record, dict) or not may_be_chat(set(record)):
        return None
    fields = {field: value for field, value in record.items() if not is_empty(value)}
    messages: dict[str, Any] = {}
    if "system" in fields:
        messages["`system`"] = make_message("system", fields["system"])
    for field in LISTS:
        if field in fields:
            if not isinstance(fields[field], list):
                raise unlearnable_error(f"`{field}`", "is no list of messages")
            return messages | number_messages(fields[field])
    for answer, question in QUESTIONS.items():
        has_columns = question in record and answer in record
        if has_columns and (question in fields or answer in fields):
            return messages | question_and_answer(fields, question, answer)
    if column in record:
        return None
    return {}


def question_and_answer(fields: dict[str, Any], question: str, answer: str) -> dict[str, Any]:
    """The messages of a record with a field for the question and one for the answer.

    Returns them by their names in errors. Raises Unlearnable.
    """
    if fields.get("label") is False or fields.get("kto_tag") is False:
        raise unlearnable_error(f"`{answer}`", "is labeled as a bad answer, and all are learned")
    if "history" in fields:
        raise unlearnable_error("`history`", "is not read; write all of it as `messages`")
    user = fields.get(question)
    assistant = fields.get(answer)
    if isinstance(user, list) and isinstance(assistant, list):
        return number_messages(user + assistant)
    if answer == "output" and "input" in fields:
        user = add_input(user, fields["input"])
    return {
        f"`{question}`": make_message("user", user),
        f"`{answer}`": make_message("assistant", assistant),
    }


def add_input(instruction: Any, context: Any) -> Any:
    """Append the input to an instruction, after a blank line, as Alpaca's own prompt does."""
    if instruction is None:
        return context
    return [{"type": "text", "text": text} for text in (instruction, "\n\n", context)]


def make_message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def number_messages(messages: list[Any]) -> dict[str, Any]:
    return {f"message {number}": message for number, message in enumerate(messages, 1)}


def turns_of_messages(messages: dict[str, Any]) -> list[str]:
    """Each message as a turn; empty system messages are dropped. Raises Unlearnable."""
    if not messages:
        raise unlearnable_error("the conversation", "has no messages")
    turns: list[str] = []
    for name, message in messages.items():
        if not isinstance(message, dict):
            message = {}
        role = role_of(message)
        text = text_of(message_content(message))
        if ROLES.get(role) == "system" and text is not None and not text.strip():
            continue
        problem = message_problem(message, role, text, is_first=not turns)
        if problem:
            raise unlearnable_error(name, problem)
        turns.append(f"{ROLES[role]}\n{text}")
    if not any(turn.startswith(ASSISTANT_PREFIX) for turn in turns):
        raise unlearnable_error("the assistant", "says nothing")
    return turns


def role_of(message: dict[str, Any]) -> str:
    return str(message.get("role") or message.get("from"))


def message_content(message: dict[str, Any]) -> Any:
    content = message.get("content")
    if content is None:
        return message.get("value")
    return content


def text_of(content: Any) -> str | None:
    """The text of a message, which is a string or a list of parts of the type text; else None."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            return None
        if not isinstance(part.get("text"), str):
            return None
        texts.append(part["text"])
    return "".join(texts)


def message_problem(message: dict[str, Any], role: str, text: str | None, is_first: bool) -> str:
    """Why a message cannot be learned, or ''."""
    if role not in ROLES:
        return f"has the role {role[:20]!r}, not one of {', '.join(ROLES)}"
    for field in ("tool_calls", "function_call"):
        if message.get(field):
            return f"has {field}, which no model here can learn"
    if message.get("weight") == 0:
        return "has the weight 0, but the loss counts every answer"
    if ROLES[role] == "system" and not is_first:
        return "is the system's, which can only be the first"
    if isinstance(message.get("content"), list) and text is None:
        return "has a part that is not text"
    if not text or text.isspace():
        return "has no text"
    return ""
