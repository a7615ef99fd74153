"""What was forecast for a job before it was launched, as `launch --forecast` keeps it."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from launcher.errors import ServiceError
from launcher.files.documents import Document, parse
from launcher.files.ledger import Ledger
from launcher.job import Expected, Positive, Request
from launcher.settings import Settings
from launcher.text.channels import Texts

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
    digest = hashlib.sha256(" ".join([*hashes, request.source.sha256]).encode()).hexdigest()
    return settings.home / "forecasts" / f"{digest[:24]}.jsonl"


def recall(path: Path, size: float) -> Expected | None:
    """The loss that the last forecast has for a size. One that is damaged is reported."""
    try:
        forecasts = Ledger(path).of("forecast")
        if not forecasts:
            return None
        forecast = parse(forecasts[-1], ForecastRows, path)
    except ServiceError as error:
        logger.info(f"no forecast is kept with the job: {error}")
        return None
    for row in forecast.rows:
        if row.size == size:
            return row.expected
    return None
