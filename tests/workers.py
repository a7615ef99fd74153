"""The process that runs a model's code: started at once, or something in its place."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import warm
from models import tokenizer_of
from torch import Tensor

from sm_nanogpt.launcher.judge import worker as worker_module
from sm_nanogpt.launcher.judge.worker import Worker
from sm_nanogpt.launcher.local.process import Program


class Warm(Program):
    """A worker's process that starts at once, outside of a sandbox."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.is_wrapped = False
        self.status = None
        self.cpu_seconds = 0.0
        options["env"] = dict(os.environ)
        start = warm.replacing(warm.Process).Popen
        self.process = start(command, start_new_session=True, cwd=Path.cwd(), **options)
        self.pid, self.output = self.process.pid, self.process.stdout

    def has_ended(self, within: float = 0.0) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.status = self.process.wait(within)
        return self.status is not None


def start_workers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "Program", Warm)
    monkeypatch.setattr(worker_module, "confined", lambda command, sandbox: command)


class Fake(Worker):
    """A worker without a process, whose logits and samples are given by functions."""

    chats = False
    directory = Path("fake")

    def __init__(self, vocabulary: str, logits: Any = None, samples: Any = None) -> None:
        self.tokenizer = tokenizer_of(vocabulary)
        self.block_size = 16
        self.n_logits = len(vocabulary)
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
    worker.directory, worker.max_answer_seconds = Path("model"), patience
    worker.tokenizer = tokenizer_of("abc")
    worker.program = Mock(kill=theirs.close)
    worker.describe_end = lambda: "answers no more"  # type: ignore[method-assign]
    for message in messages:
        theirs.send_bytes(message)
    return worker
