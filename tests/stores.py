"""Files of a store: names that S3 allows, and the progress of what is sent."""

from __future__ import annotations

ODD_NAMES = ["with space", "naïve Ж 漢字", "100%41", "a#b?c", "[x]*", "a::b", "a+b&c"]


class Expecting(list[int]):
    """A progress hook that records what it is told to expect, and what then came."""

    def __call__(self, n: int) -> None:
        self.append(n)

    def expect(self, n: int) -> None:
        assert not self, "it was told too late"
        self.expected = n
