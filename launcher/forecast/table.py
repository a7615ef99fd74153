"""A forecast as data."""

from __future__ import annotations

from launcher.files.documents import Count, Document
from launcher.job import Expected, Positive


class Change(Document):
    """What the loss of a run changes by, in nats; its 80 % interval is low to high."""

    nats: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.nats:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


class Row(Document):
    """What a size would be: its parameters, how often it reads the text, its loss, and by instance
    its seconds and USD, None where no speed or price is known."""

    size: Positive
    parameters: Count
    readings: Positive
    expected: Expected
    bits_per_byte: Positive
    seconds: dict[str, Positive | None]
    dollars: dict[str, Positive | None]


class Forecast(Document):
    """What each size would be on a text of so many tokens, by so many pilots.

    best is the size of the lowest loss, or the smallest that is hardly worse; affordable is that
    below the ceiling, None if there is none. twice_text and twice_compute are what the loss of the
    best size changes by with twice as much of each. busy: other programs used this machine while
    its speed was measured, so its seconds may be too many.
    """

    text: str
    unit: str
    tokens: Count
    pilots: Count
    pilot_seconds: float
    rows: list[Row]
    best: Positive
    affordable: Positive | None
    twice_text: Change
    twice_compute: Change
    busy: bool = False
    notes: list[str]


class Pilot(Document):
    """What a run here gave: its loss, bits per byte, and seconds: of a step, without the few that
    took unusually long; around all steps; and of the whole process. busy: other programs used this
    machine meanwhile."""

    loss: Positive
    bits_per_byte: Positive
    step_seconds: Positive
    around: float
    seconds: Positive
    busy: bool = False
