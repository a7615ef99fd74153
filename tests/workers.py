"""The worker that runs a model's code, in place of its process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models import tokenizer_of
from torch import Tensor

from sm_nanogpt.launcher.judge.worker import Worker


class Fake(Worker):
    """A worker without a process, whose logits and samples are given by functions."""

    chats = False
    directory = Path("fake")

    def __init__(self, vocabulary: str, logits: Any = None, samples: Any = None) -> None:
        self.tokenizer = tokenizer_of(vocabulary)
        self.block_size = 16
        self.size = len(vocabulary)
        self.logits_function = logits
        self.samples_function = samples

    def logits(self, ids: Tensor) -> Tensor:
        return self.logits_function(ids)

    def sample(self, prompts: Sequence[Any], **sampling: Any) -> list[str]:
        return self.samples_function(prompts, **sampling)
