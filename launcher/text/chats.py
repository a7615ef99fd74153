"""Conversations: lines of *.jsonl with `messages`, which launcher/models/chat.py encodes."""

from __future__ import annotations

from typing import Any

from launcher.errors import InputError
from launcher.models.chat import SPEAKS

ROLES = ("system", "user", "assistant")
EXAMPLE = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)


def turns_of(found: dict[str, Any], name: str) -> list[str]:
    """The turns of a conversation, each as `role\\ncontent`.

    Raises:
        InputError: it is no conversation, or the assistant says nothing; the message starts with
            `name`.
    """

    def wrong(problem: str) -> InputError:
        return InputError(f"{name}: {problem}; a line must be like {EXAMPLE}")

    messages, turns = found["messages"], []
    if not isinstance(messages, list) or not messages:
        raise wrong("`messages` is no list of messages")
    for number, message in enumerate(messages, 1):
        fields = message if isinstance(message, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if role not in ROLES:
            raise wrong(
                f"message {number} has the role {str(role)[:20]!r}, not one of {', '.join(ROLES)}"
            )
        if not isinstance(content, str) or not content.strip():
            raise wrong(f"message {number} has no text as content")
        for calls in ("tool_calls", "function_call"):
            if fields.get(calls):
                raise wrong(f"message {number} has {calls}, which no model here can learn")
        if fields.get("weight") == 0:
            raise wrong(f"message {number} has the weight 0, but the loss counts every answer")
        if role == "system" and number > 1:
            raise wrong(f"message {number} is the system's, which can only be the first")
        turns.append(f"{role}\n{content}")
    if not any(turn.startswith(SPEAKS) for turn in turns):
        raise wrong("the assistant says nothing")
    try:
        "".join(turns).encode()
    except UnicodeEncodeError:
        raise wrong("half of a surrogate pair") from None
    return turns
