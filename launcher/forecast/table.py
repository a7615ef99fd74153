"""A forecast as data."""

from __future__ import annotations

from sm_nanogpt.launcher.files.documents import Count, Document
from sm_nanogpt.launcher.job import Expected, Positive


class Change(Document):
    """What the loss of a run changes by, in nats; its 80 % interval is low to high."""

    nats: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.nats:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


class Row(Document):
    """What a run of a size would be."""

    size: Positive
    parameters: Count
    readings: Positive  # how often it reads the text
    expected: Expected  # loss
    bits_per_byte: Positive
    seconds: dict[str, Positive | None]  # by instance type; None where no speed is known
    dollars: dict[str, Positive | None]  # USD; None where no speed or price is known


class Forecast(Document):
    """What each size would be on a text, up to that of the lowest loss.

    The best size is that of the lowest loss, or the smallest that is hardly worse; affordable is
    the best below the ceiling, None if there is none. twice_text and twice_compute are what the
    loss of the best size changes by with twice as much of each, None if the law does not hold.
    """

    text: str
    unit: str  # characters or tokens
    tokens: Count  # of the text, in its unit
    pilots: Count  # how many were run
    pilot_seconds: float
    rows: list[Row]  # by size, the smallest first
    best: Positive
    affordable: Positive | None
    twice_text: Change | None
    twice_compute: Change | None
    overfits: bool  # True if a size over the largest of the rows loses more
    busy: bool = False  # other programs used this machine: its times are by the pilots' processors
    notes: list[str]


class Pilot(Document):
    """What a run here gave."""

    loss: Positive
    bits_per_byte: Positive
    step_seconds: Positive  # without the few steps that took unusually long
    around: float  # seconds before, between and after the steps
    seconds: Positive  # of the whole process
    cpu_seconds: Positive | None = None  # of the whole process, by all of its threads
    train_loss: Positive | None = None  # the mean over all steps
