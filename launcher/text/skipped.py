"""Conversations that are left out of an upload, since no model can learn from them."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from launcher.errors import InputError

logger = logging.getLogger("launcher.text")  # which gives copies the names of their sources

LIMIT = 0.5  # the share of conversations that may be left out
MAX_REASONS, MAX_PLACES = 20, 3


class Unlearnable(InputError):
    """A conversation from which no model can learn: `reason`, which many share, and its `place`."""

    def __init__(self, problem: str, reason: str, place: str) -> None:
        super().__init__(problem)
        self.reason, self.place = reason, place


@dataclass
class Skipped:
    """The conversations that are left out, by reason: how many, and the places of the first."""

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, error: Unlearnable) -> None:
        is_new = error.reason not in self.counts
        reason = "others" if is_new and len(self.counts) >= MAX_REASONS else error.reason
        self.counts[reason] += 1
        if len(self.places[reason]) < MAX_PLACES:
            self.places[reason].append(error.place)

    def check(self, n_learnable: int) -> None:
        """Warn of what is left out beside n_learnable conversations.

        Raises InputError if it is more than LIMIT of all.
        """
        n_skipped = self.counts.total()
        n_all = n_skipped + n_learnable
        if not n_skipped:
            return
        if n_skipped > LIMIT * n_all:
            problem = f"{n_skipped:,} of {n_all:,} conversations cannot be learned: {self}"
            raise InputError(f"{problem}; a conversation is like {EXAMPLE}")
        logger.warning(f"{n_skipped:,} of {n_all:,} conversations left out: {self}")

    def __str__(self) -> str:
        """Such as: "`output` has no text (2: a.json, item 18; a.json, item 91)"."""
        parts = []
        for reason, count in self.counts.most_common():
            places = "; ".join(self.places[reason])
            if count > len(self.places[reason]):
                places += "; ..."
            parts.append(f"{reason} ({count:,}: {places})")
        return ", ".join(parts)


EXAMPLE = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)
