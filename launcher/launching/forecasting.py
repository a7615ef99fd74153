"""A forecast for a request: its text and training folder, and what is known of its instances."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from launcher.aws import aws_session, check_region
from launcher.errors import InputError, LauncherError
from launcher.files import storage
from launcher.finding import Listing
from launcher.forecast import table
from launcher.job import Request
from launcher.launching.launch import kept_forecast, with_folder
from launcher.launching.texts import Channel, find_texts
from launcher.sagemaker.cost import Prices
from launcher.settings import Settings
from launcher.text.copies import temporary
from launcher.text.formats import stored

if TYPE_CHECKING:  # they import torch
    from entry_point.text import Corpus
    from launcher.forecast.forecast import Forecaster, Place

NEWEST = 200  # jobs that are asked for their speed


def forecast(
    request: Request, settings: Settings, told: Callable[[str], None] = lambda line: None
) -> table.Forecast:
    """What each size would be on the text of a request, here and on its instances.

    told gets a line for each pilot that ends. What was run is kept, also after an interruption.
    Raises InputError if nothing can be known, and ServiceError if a pilot fails.
    """
    from launcher.forecast.forecast import Forecaster

    request = with_folder(request)
    texts = find_texts(request, settings, settings)
    place = kept_forecast(request, texts, settings)
    if place is None:
        raise InputError(f"{texts['data'].named}: its length is not known; upload it from here")
    if texts["data"].upload and texts["data"].upload.chats:
        raise InputError("conversations are not forecast: the law is that of text")
    forecaster = Forecaster(corpus_of(texts, settings), request.source, place, told)
    types = [name for name in request.instances if name != "local"]
    elsewhere = [known(name, forecaster, settings) for name in types]
    local = "local" in request.instances
    return forecaster.forecast(texts["data"].named, elsewhere, local, request.max_cost)


def corpus_of(texts: dict[str, Channel], settings: Settings) -> Corpus:
    """The texts as a job would read them."""
    from entry_point.errors import DataError
    from entry_point.text import read_text, read_tokens

    values: Any = SimpleNamespace(validation_fraction=0.1)
    with temporary(settings) as directory:
        for name, channel in texts.items():
            (directory / name).mkdir()
            for file in channel.sources:
                target = directory / name / file.name
                target.parent.mkdir(parents=True, exist_ok=True)
                with stored(file) as path:
                    shutil.copyfile(path, target)
            if not channel.sources:
                storage.fetch(channel.uri, directory / name, settings=settings)
        data, validation = directory / "data", directory / "validation"
        here: Any = SimpleNamespace(
            training=data, validation=validation if "validation" in texts else None
        )
        try:
            if (data / "meta.json").exists():
                return read_tokens(data, values)
            return read_text(here, values, None)
        except DataError as error:
            raise InputError(str(error)) from None


def known(name: str, forecaster: Forecaster, settings: Settings) -> Place:
    """What the user's own jobs tell of an instance type, and AWS of its price."""
    from launcher.forecast.forecast import Place

    price, flops, around = None, None, 0.0
    with suppress(LauncherError):
        session = aws_session(settings)
        if found := Prices(settings, check_region(session), session).of(name):
            price = found.per_hour / 3600
        jobs = (job for job in islice(Listing(settings), NEWEST) if job.instance == name)
        for job in jobs:
            measured = forecaster.measured(job)
            if measured is not None:
                flops, around = measured
                break
    return Place(name, flops, around, price)
