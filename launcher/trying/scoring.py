"""The judge of a search: what a model loses on text that no run has seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sm_nanogpt.entry_point.errors import TrainingError
from sm_nanogpt.entry_point.text import Tokenizer
from sm_nanogpt.launcher.errors import LauncherError
from sm_nanogpt.launcher.judge.causality import CUTS, NotCausal, check_causal
from sm_nanogpt.launcher.judge.score import cut_windows, losses
from sm_nanogpt.launcher.judge.texts import Text, encode
from sm_nanogpt.launcher.judge.worker import Worker
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.trying.refusal import Refused

# Tokens of a window. In one of the whole text, a model could learn from the text as it reads it.
LONGEST_WINDOW = 1 << 10
LONGEST_REASON = 500  # characters; a model's own words could hold the whole text of the judge
MODELS = 4  # of fresh seeds, at least, decide whether a folder is kept, and share the cuts
N_CUTS = CUTS // MODELS


@dataclass(frozen=True)
class Score:
    """What a model loses on the text of the judge."""

    loss: float  # nats per token
    seconds: float  # processor time of the process that computed it


class Judge:
    """Judges models by one text, each in processes of its own."""

    def __init__(self, content: bytes, tokenizer: Tokenizer, settings: Settings) -> None:
        self.content = content
        self.tokenizer = tokenizer
        self.settings = settings
        self.encoded = encode([Text("judge", [content.decode()])], tokenizer)

    def score(
        self, model: Path, source: Source, leak_check_bound: float, limit: float = math.inf
    ) -> Score:
        """What a model loses on the text, if its process computes for at most `limit` seconds.

        One that loses less than `leak_check_bound` must neither look ahead nor learn while it is
        judged. Raises Refused.
        """
        try:
            with self.worker(model, source, limit) as worker:
                [nats] = losses(worker, self.encoded)
            score = Score(float(nats.mean()), worker.cpu_seconds)
            if score.loss < leak_check_bound:
                check_limit = limit * self.rows_of_check(worker.block_size)
                with self.worker(model, source, check_limit) as other:
                    check_causal(other, self.encoded, [nats], N_CUTS)
        except (LauncherError, TrainingError) as error:
            reason = str(error)[:LONGEST_REASON]
            raise Refused(reason, is_final=isinstance(error, NotCausal)) from None
        return score

    def rows_of_check(self, block_size: int) -> float:
        """The rows of the check for one of the score, at least 1. It counts each twice, since a
        short row takes longer than its part of a whole one."""
        windows = cut_windows(self.encoded, self.tokenizer.start, block_size)
        return max(1.0, 2 * N_CUTS / len(windows))

    def worker(self, model: Path, source: Source, limit: float) -> Worker:
        """A process that computes a model by the folder as it was kept, not as the run left it."""
        folder = self.settings.home / "sources" / source.sha256
        worker = Worker(model, self.settings, folder, self.tokenizer, silent=True, limit=limit)
        worker.block_size = min(worker.block_size, LONGEST_WINDOW)
        return worker
