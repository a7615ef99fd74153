"""What was forecast for a job before it was launched, as `launch --forecast` keeps it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.files.documents import Document, parse
from sm_nanogpt.launcher.files.ledger import Ledger
from sm_nanogpt.launcher.job import Expected, Positive, Request
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.channels import Texts

logger = logging.getLogger(__name__)


class ExpectedSize(Document):
    """What is read here of a row of a forecast."""

    size: Positive
    expected: Expected


class ForecastRows(Document):
    rows: list[ExpectedSize]


def forecast_path(request: Request, texts: Texts, settings: Settings) -> Path | None:
    """The ledger of the forecasts of texts; None if they were not uploaded from here."""
    hashes = []
    for channel in texts.values():
        if channel.upload is None:
            return None
        hashes.append(channel.upload.sha256)
    hashes.append(request.source.sha256)
    digest = hashlib.sha256(" ".join(hashes).encode()).hexdigest()
    return settings.home / "forecasts" / f"{digest[:24]}.jsonl"


def recall(path: Path) -> list[ExpectedSize]:
    """The rows of the last forecast, by size; [] if there is none. A damaged one is reported."""
    try:
        forecasts = Ledger(path).of("forecast")
        if not forecasts:
            return []
        forecast = parse(forecasts[-1], ForecastRows, path)
    except ServiceError as error:
        logger.info(f"no forecast is kept with the job: {error}")
        return []
    return sorted(forecast.rows, key=lambda row: row.size)


def expected_of(size: float, rows: Sequence[ExpectedSize]) -> Expected | None:
    """The loss of a size, by its row or between its neighbors' rows; None outside of them."""
    for row in rows:
        if row.size == size:
            return row.expected
    for smaller, larger in pairwise(rows):
        if smaller.size < size < larger.size:
            share = (size - smaller.size) / (larger.size - smaller.size)
            return between(smaller.expected, larger.expected, share)
    return None


def between(start: Expected, end: Expected, share: float) -> Expected:
    """The losses at a share of the way from one to another, of which none was measured."""
    return Expected(
        loss=start.loss + share * (end.loss - start.loss),
        low=start.low + share * (end.low - start.low),
        high=start.high + share * (end.high - start.high),
    )
