"""The judge of a search, who scores models on a text that no run has seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sm_nanogpt.entry_point.errors import TrainingError
from sm_nanogpt.entry_point.text import Tokenizer
from sm_nanogpt.launcher.errors import LauncherError
from sm_nanogpt.launcher.judge.causality import TOTAL_CUTS, NotCausal, check_causal
from sm_nanogpt.launcher.judge.score import cut_windows, losses_of_documents
from sm_nanogpt.launcher.judge.texts import Text, encode_texts
from sm_nanogpt.launcher.judge.worker import Worker
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.trying.refusal import Refused

# In tokens. In a window as long as the text, a model could learn from the text while it is scored.
MAX_WINDOW_TOKENS = 1 << 10
MAX_REASON_LENGTH = 500  # characters: a model's own message could contain the whole judge's text
# At least so many models of fresh seeds decide on a folder, and share the cuts.
MIN_FRESH_MODELS = 4
CUTS_PER_MODEL = TOTAL_CUTS // MIN_FRESH_MODELS


@dataclass(frozen=True)
class Score:
    """The loss of a model on the text of the judge."""

    loss: float  # nats per token
    seconds: float  # processor time of the process that computed it


class Judge:
    """Scores models on one text, each in processes of its own."""

    def __init__(self, content: bytes, tokenizer: Tokenizer, settings: Settings) -> None:
        self.content = content
        self.tokenizer = tokenizer
        self.settings = settings
        self.encoded = encode_texts([Text("judge", [content.decode()])], tokenizer)

    def score(
        self, model: Path, source: Source, leak_check_bound: float, max_seconds: float = math.inf
    ) -> Score:
        """Score a model, whose process may compute for max_seconds.

        If its loss is below leak_check_bound, another process checks that it neither looks ahead
        nor learns from the windows before. Raises Refused if it does, or if a process fails.
        """
        try:
            with self.worker(model, source, max_seconds) as worker:
                [nats] = losses_of_documents(worker, self.encoded)
            score = Score(float(nats.mean()), worker.cpu_seconds)
            if score.loss < leak_check_bound:
                check_seconds = max_seconds * self.check_rows_ratio(worker.block_size)
                with self.worker(model, source, check_seconds) as other:
                    check_causal(other, self.encoded, [nats], CUTS_PER_MODEL)
        except (LauncherError, TrainingError) as error:
            reason = str(error)[:MAX_REASON_LENGTH]
            raise Refused(reason, is_final=isinstance(error, NotCausal)) from None
        return score

    def check_rows_ratio(self, block_size: int) -> float:
        """The rows of the check divided by the rows of the score, at least 1.

        Each row of the check counts twice: a short row takes longer than its share of a whole row.
        """
        windows = cut_windows(self.encoded, self.tokenizer.start, block_size)
        return max(1.0, 2 * CUTS_PER_MODEL / len(windows))

    def worker(self, model: Path, source: Source, max_seconds: float) -> Worker:
        """Start a process that computes a model by the kept folder, which no run can change."""
        folder = self.settings.home / "sources" / source.sha256
        worker = Worker(
            model, self.settings, folder, self.tokenizer, silent=True, max_cpu_seconds=max_seconds
        )
        worker.block_size = min(worker.block_size, MAX_WINDOW_TOKENS)
        return worker
