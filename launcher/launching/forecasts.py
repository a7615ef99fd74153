"""Keep the forecasts of texts, in a ledger for each text and training folder,
HOME/forecasts/ID.jsonl. The kinds of its entries:

    pilot      the losses and the times of a run on this machine; the last of a name counts
    forecast   the loss, time, and cost of each size
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.files.documents import Count, Document, parse
from sm_nanogpt.launcher.files.ledger import Ledger
from sm_nanogpt.launcher.job import Expected, Positive, Request
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.channels import Texts

logger = logging.getLogger(__name__)

MIN_TRAINING_TOKENS = 18_000  # nine tenths of a text of 20,000; pilots learn too little of fewer
# By how much the log loss of two generations is below that of one run: a line over the readings of
# each, through 81 pairs on 22 texts, and their deviation from it (docs/generations.md).
GAIN_OF_GENERATIONS = 0.012
GAIN_PER_READING = 0.003
DEVIATION_OF_GAIN = 0.017
Z_80 = 1.2816  # standard deviations to either side of the mean hold 80 %


class Change(Document):
    """A change of a loss, in nats, with its 80 % interval from low to high."""

    nats: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.nats:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


class Row(Document):
    """A forecast for a run of a size."""

    size: Positive
    parameters: Count
    readings: Positive  # how often it reads the text
    expected: Expected  # loss
    bits_per_byte: Positive
    seconds: dict[str, Positive | None]  # by instance type; None where no speed is known
    dollars: dict[str, Positive | None]  # USD; None where no speed or price is known


class Forecast(Document):
    """A forecast for each size on a text, up to the size with the lowest loss.

    best is the size with the lowest loss, or the smallest size that is hardly worse. affordable is
    the best size whose cost is below the ceiling, None if there is none. twice_text and
    twice_compute say how the loss of the best size changes with twice the text, and with twice the
    compute; None if the law does not hold.
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
    overfits: bool  # True if a size over that of the last row loses more
    busy: bool = False  # True: other programs used this machine, so times come from the pilots
    notes: list[str]


class Pilot(Document):
    """The losses and the times of a run on this machine."""

    loss: Positive
    bits_per_byte: Positive
    step_seconds: Positive  # without the few steps that took unusually long
    around: float  # seconds before, between and after the steps
    seconds: Positive  # of the whole process
    cpu_seconds: Positive | None = None  # of the whole process, by all of its threads
    train_loss: Positive | None = None  # the mean over all steps


class ForecastLedger(Ledger):
    """The ledger of the forecasts of a text. Raises ServiceError if an entry was changed."""

    @property
    def pilots(self) -> dict[str, Pilot]:
        """The pilots by their names."""
        pilots = dict[str, Pilot]()
        for entry in self.of("pilot"):
            pilots[entry["name"]] = parse(entry["outcome"], Pilot, self.path)
        return pilots

    @property
    def last_forecast(self) -> Forecast | None:
        forecasts = self.of("forecast")
        return parse(forecasts[-1], Forecast, self.path) if forecasts else None

    def add_pilot(self, name: str, pilot: Pilot) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.add("pilot", name=name, outcome=pilot.model_dump(mode="json"))

    def add_forecast(self, forecast: Forecast) -> None:
        self.add("forecast", **forecast.model_dump(mode="json"))


def forecast_path(request: Request, texts: Texts, settings: Settings) -> Path | None:
    """The path of the ledger of forecasts for texts; None if they were not uploaded from here."""
    hashes = []
    for channel in texts.values():
        if channel.upload is None:
            return None
        hashes.append(channel.upload.sha256)
    hashes.append(request.source.sha256)
    digest = hashlib.sha256(" ".join(hashes).encode()).hexdigest()
    return settings.home / "forecasts" / f"{digest[:24]}.jsonl"


def forecast_rows(request: Request, texts: Texts, settings: Settings) -> list[Row]:
    """The rows of the last forecast for texts, by size; [] if there is none.

    A damaged forecast is logged.
    """
    path = forecast_path(request, texts, settings)
    if path is None:
        return []
    try:
        forecast = ForecastLedger(path).last_forecast
    except ServiceError as error:
        logger.info(f"no forecast is kept with the job: {error}")
        return []
    return [] if forecast is None else forecast.rows


def expected_of(size: float, rows: Sequence[Row]) -> Expected | None:
    """The loss of a size, by its row, or between two rows; None for a size outside of the rows."""
    for row in rows:
        if row.size == size:
            return row.expected
    for smaller, larger in pairwise(rows):
        if smaller.size < size < larger.size:
            share = (size - smaller.size) / (larger.size - smaller.size)
            return between(smaller.expected, larger.expected, share)
    return None


def in_two_generations(expected: Expected, readings: float) -> Expected:
    """The loss of two generations, by that of one run. Its interval includes how much the gain
    differs between texts.

    readings: how often each generation reads the text.
    """
    gain = GAIN_OF_GENERATIONS + GAIN_PER_READING * readings
    low_margin = math.hypot(math.log(expected.loss / expected.low), Z_80 * DEVIATION_OF_GAIN)
    high_margin = math.hypot(math.log(expected.high / expected.loss), Z_80 * DEVIATION_OF_GAIN)
    loss = expected.loss * math.exp(-gain)
    low = loss * math.exp(-low_margin)
    high = loss * math.exp(high_margin)
    return Expected(loss=loss, low=low, high=high)


def between(start: Expected, end: Expected, share: float) -> Expected:
    """The loss, and its interval, at a share of the way from one forecast to another."""
    return Expected(
        loss=start.loss + share * (end.loss - start.loss),
        low=start.low + share * (end.low - start.low),
        high=start.high + share * (end.high - start.high),
    )
