"""Conversations for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def asked(question: str, answer: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_chats(path: Path, count: int = 200) -> Path:
    chats = [asked(f"What is {n} + {n}?", str(2 * n)) for n in range(count)]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path
