"""Texts, passages and questions for the judge."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

from sm_nanogpt.launcher.judge.evaluation import Passage

STRANGE = "naïve\tcafé – “quoted” …\r\n\tЖук 漢字 🙂🚀👩‍🚀\n"


def plain(content: str | bytes) -> Tensor:
    return anchors_tensor(content.encode() if isinstance(content, str) else content)


def anchors_tensor(content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def documents(n: int, seed: int) -> list[Passage]:
    """Documents of many sizes, and of losses that go with their sizes a little."""
    chance = random.Random(seed)
    passages = []
    for index in range(n):
        size = int(chance.lognormvariate(6, 0.8))
        nats = size * (1.2 + 0.02 * math.log(size) + chance.gauss(0, 0.25))
        passages.append(Passage(str(index), nats, size, size))
    return passages


def chat_of(*texts: str) -> dict[str, Any]:
    messages = []
    for number, text in enumerate(texts):
        role = "assistant" if number % 2 else "user"
        messages.append({"role": role, "content": text})
    return {"messages": messages}
