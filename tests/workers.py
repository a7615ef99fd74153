"""The worker that runs a model's code, in place of its process."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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

    def sample(
        self, prompts: Sequence[Any], max_new_tokens: int, num_samples: int = 1, **sampling: Any
    ) -> list[str]:
        sampling |= {"max_new_tokens": max_new_tokens, "num_samples": num_samples}
        samples: list[str] = self.samples_function(prompts, **sampling)
        return samples


def worker_that_sends(*messages: bytes, patience: float = 60.0) -> Worker:
    """The judge's end of a process that sends messages and then waits, until it is killed."""
    worker = Worker.__new__(Worker)
    worker.pipe, theirs = Pipe()
    worker.directory, worker.patience = Path("model"), patience
    worker.tokenizer = tokenizer_of("abc")
    worker.program = Mock(kill=theirs.close)
    worker.describe_end = lambda: "answers no more"  # type: ignore[method-assign]
    for message in messages:
        theirs.send_bytes(message)
    return worker
