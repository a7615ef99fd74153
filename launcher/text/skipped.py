"""Conversations that are left out of an upload, since no model can learn from them."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.text.talks import Talks

logger = logging.getLogger(__name__)

MAX_SKIPPED_SHARE = 0.5  # of all conversations
MAX_REASONS = 20
MAX_POSITIONS = 3  # that a warning names for a reason
EXAMPLE = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)


class Unlearnable(InputError):
    """A conversation from which no model can learn. Its fact `reason` is the same for many."""


@dataclass
class Skipped:
    """The conversations that are left out: by reason, how many, and where the first are."""

    counts: Counter[str] = field(default_factory=Counter)
    positions: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    talks: Talks = field(default_factory=Talks)  # what is left out of exported chats

    def add(self, error: Unlearnable, position: str) -> None:
        """Count a conversation by the reason of its error. position: where it is."""
        reason = error.reason
        if reason not in self.counts and len(self.counts) >= MAX_REASONS:
            reason = "others"
        self.counts[reason] += 1
        if len(self.positions[reason]) < MAX_POSITIONS:
            self.positions[reason].append(position)

    def check(self, n_learnable: int) -> None:
        """Warn of what is left out beside n_learnable conversations.

        Raises InputError if it is more than MAX_SKIPPED_SHARE of all.
        """
        self.talks.check()
        n_skipped = self.counts.total()
        n_all = n_skipped + n_learnable
        if not n_skipped:
            return
        if n_skipped > MAX_SKIPPED_SHARE * n_all:
            problem = f"{n_skipped:,} of {n_all:,} conversations cannot be learned: {self}"
            raise InputError(f"{problem}; a conversation is like {EXAMPLE}")
        logger.warning(f"{n_skipped:,} of {n_all:,} conversations left out: {self}")

    def __str__(self) -> str:
        """Such as: "`output` has no text (2: a.json, item 18; a.json, item 91)"."""
        parts = []
        for reason, count in self.counts.most_common():
            positions = "; ".join(self.positions[reason])
            if count > len(self.positions[reason]):
                positions += "; ..."
            parts.append(f"{reason} ({count:,}: {positions})")
        return ", ".join(parts)
