"""Forecast for the text and the training folder of a request, on the instance types of interest."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from sm_nanogpt.launcher.backends import backend_class
from sm_nanogpt.launcher.errors import InputError, LauncherError
from sm_nanogpt.launcher.finding import Listing
from sm_nanogpt.launcher.job import Request, TrainingJob
from sm_nanogpt.launcher.launching.draft import with_training_folder
from sm_nanogpt.launcher.launching.forecasts import Forecast, forecast_path
from sm_nanogpt.launcher.launching.texts import check_texts, find_texts, repeated_share_of
from sm_nanogpt.launcher.sagemaker.cost import Prices, rate
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.channels import Channel, Texts
from sm_nanogpt.launcher.text.run_corpus import corpus_of
from sm_nanogpt.launcher.text.store import known_upload

if TYPE_CHECKING:  # they import torch
    from sm_nanogpt.launcher.forecast.times import InstanceType

logger = logging.getLogger(__name__)

ALLOWED_FIELDS = {"instance", "data", "validation", "entry_point"}  # that a request for it may have
MAX_JOBS = 200  # the newest jobs, whose speeds are read
MAX_REPEATED_SHARE = 0.5  # of a validation text, in the training text
LONG_CONTEXT_SIZE = 4.0  # no size has a longer context


def forecast(
    request: Request,
    settings: Settings,
    max_cost: float | None = None,
) -> Forecast:
    """Forecast the loss, time, and cost of each size on the text of a request, on this machine and
    on its instance types.

    Each pilot that ends is logged. max_cost is the most that a job on SageMaker may
    cost, in USD. Pilots that have ended are kept, also after an interruption. Raises InputError if
    nothing can be forecast, and ServiceError if a pilot fails.
    """
    from sm_nanogpt.launcher.forecast.forecaster import Forecaster

    if max_cost is not None and not 0 < max_cost < math.inf:
        raise InputError("must be more than 0", field="max_cost", value=max_cost)
    other_fields = sorted(request.explicit_fields().keys() - ALLOWED_FIELDS)
    if other_fields:
        raise InputError("a forecast takes no such option; leave it out", field=other_fields[0])
    request = with_training_folder(request)
    texts = find_texts(request, settings, settings)
    ledger_path = forecast_path(request, texts, settings)
    for channel in texts.values():
        problem = problem_of_text(channel)
        if problem:
            raise InputError(f"{channel.shown}: {problem}")
    check_repeats(texts)
    assert ledger_path is not None  # as each text has an upload
    corpus = corpus_of(texts, settings)
    upload = texts["data"].upload
    n_tokens = None
    if upload is not None and upload.train_tokens:  # of tokens, the corpus has the beginning
        n_tokens = upload.train_tokens
    forecaster = Forecaster(corpus, request.source, ledger_path, n_tokens)
    check_texts(texts, forecaster.sizes.config(LONG_CONTEXT_SIZE))
    instances = instances_to_forecast(request, len(corpus.tokenizer), settings)
    return forecaster.forecast(texts["data"].shown, instances, max_cost)


def problem_of_text(channel: Channel) -> str:
    """Why nothing can be forecast for a text, or ''."""
    if channel.upload is None:
        return "its length is not known; upload it from here"
    if channel.upload.chats:
        return "conversations are not forecast: the law is that of text"
    return ""


def check_repeats(texts: Texts) -> None:
    """Raise InputError if the training text contains so much of the validation text that losses
    measure memory."""
    share = repeated_share_of(texts)
    if share is not None and share > MAX_REPEATED_SHARE:
        repeats = f"{share:.0%} of the validation text stands in the training text"
        problem = f"no forecast: {repeats}, so losses measure memory"
        raise InputError(f"{texts['data'].shown}: {problem}", code="text-repeats")


def instances_to_forecast(
    request: Request, default_vocabulary_size: int, settings: Settings
) -> list[InstanceType]:
    """The instance types of the request, and the types on which a job of the user has ended.

    The speed of a type is the speed of the newest such job that has one, and its price is AWS's.
    default_vocabulary_size: the vocabulary size of a job whose text is gone.
    """
    from sm_nanogpt.launcher.forecast.times import InstanceType, speed_of

    measured = dict[str, InstanceType]()
    listing = Listing(settings)
    for job in islice(listing, MAX_JOBS):
        if not backend_class(job.instance).bills or job.instance_count > 1:
            continue
        if job.instance not in measured:
            vocabulary_size = partial(
                vocabulary_size_of, job.data, settings, default_vocabulary_size
            )
            instance = speed_of(job, request.source, vocabulary_size)
            if instance is not None:
                measured[job.instance] = instance
    if listing.failure is not None:
        logger.info(str(listing.failure))

    instances = []
    for name in dict.fromkeys([*request.instances, *measured]):
        if backend_class(name).bills:
            instance = measured.get(name, InstanceType(name))
            instances.append(replace(instance, usd_per_second=usd_per_second_of(name, settings)))
    return instances


def vocabulary_size_of(uri: str, settings: Settings, default: int) -> int:
    """The number of different characters or tokens of an upload; the default if it is unknown."""
    upload = known_upload(uri, settings)
    return default if upload is None else upload.vocabulary_size or default


def usd_per_second_of(name: str, settings: Settings) -> float | None:
    """What a second of a job on an instance type costs, with its disk, in USD.

    If that is unknown, returns None, and logs why.
    """
    try:
        price = Prices(settings).of(name)
    except LauncherError as error:
        logger.info(f"the price of {name} is not known: {error}")
        return None
    if price is None:
        logger.info(f"the price of {name} is not known")
        return None
    job = TrainingJob(instance=name, data="s3://any")  # with a disk of the default size
    return rate(job, price) / 3600
