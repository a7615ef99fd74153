"""Conversations for the tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import copy
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from sm_nanogpt.launcher.models.chat import Chat, Message


def exchange(question: str, answer: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_chats(path: Path, count: int = 200) -> Path:
    chats = [exchange(f"What is {n} + {n}?", str(2 * n)) for n in range(count)]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


STRANGE = (
    "naïve café",
    "漢字かな交じり文",
    "🙂🚀👩‍🚀",
    "def f(x):\n    return x**2\n",
    "  leading",
    "\n\nlines",
    "a\tb",
    "1234567890",
    "Жук",
    '{"k": [1, 2]}',
    "\r\n",
    "<|im_end|",
    "assistant\n",
)
HELLO = [{"role": "user", "content": "Hello"}]


def messages(*texts: Any, roles: str = "user assistant", to: str = "role content") -> list[Any]:
    """Messages of these texts, by turns from these roles."""
    role_key, text_key = to.split()
    return [{role_key: role, text_key: text} for role, text in zip(cycle(roles.split()), texts)]


def ids_of(chat: Chat, *turns: Message) -> list[int]:
    """Those of a whole conversation."""
    chat = copy(chat)
    chat.context_size = 1 << 30
    return chat.fit(turns, 1).ids


def tensor(ids: Iterable[int]) -> torch.Tensor:
    return torch.tensor([*ids], dtype=torch.int32)
