"""The judge of a search: what a model loses on text that no run has seen."""

from __future__ import annotations

from pathlib import Path

from entry_point.errors import TrainingError
from entry_point.text import Tokenizer
from launcher.errors import LauncherError
from launcher.judge.causality import CUTS, NotCausal, check_causal
from launcher.judge.score import losses
from launcher.judge.texts import Text, encode
from launcher.judge.worker import Worker
from launcher.settings import Settings
from launcher.source import Source
from launcher.trying.refusal import Refused

MODELS = 4  # of fresh seeds, at least, decide whether a folder is kept, and share the cuts


class Judge:
    """Judges models by one text, each in processes of its own."""

    def __init__(self, content: bytes, tokenizer: Tokenizer, settings: Settings) -> None:
        self.content, self.tokenizer, self.settings = content, tokenizer, settings
        self.encoded = encode([Text("judge", [content.decode()])], tokenizer)

    def loss_of(self, model: Path, source: Source, tested_below: float) -> float:
        """The nats per token that a model loses on the text.

        One that loses less than `tested_below` must neither look ahead nor learn while it is
        judged. Raises Refused.
        """
        try:
            with self.worker(model, source) as worker:
                [nats] = losses(worker, self.encoded)
            loss = float(nats.mean())
            if loss < tested_below:
                with self.worker(model, source) as other:
                    check_causal(other, self.encoded, [nats], CUTS // MODELS)
        except (LauncherError, TrainingError) as error:
            raise Refused(str(error), is_final=isinstance(error, NotCausal)) from None
        return loss

    def worker(self, model: Path, source: Source) -> Worker:
        """A process that computes a model by the folder as it was kept, not as the run left it."""
        folder = self.settings.home / "sources" / source.sha256
        return Worker(model, self.settings, folder, self.tokenizer, silent=True)
