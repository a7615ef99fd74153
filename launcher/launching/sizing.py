"""Choose the size of a new model for a text, and the hyperparameters that depend on the text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.documents import Scalar
from sm_nanogpt.launcher.job import Request
from sm_nanogpt.launcher.launching.texts import (
    FEW_READINGS,
    READINGS,
    memorizes,
    part_of,
    readings_of,
    steps_for,
    tokens_to_read,
    unit_of,
)
from sm_nanogpt.launcher.text.channels import Channel, Texts
from sm_nanogpt.launcher.text.store import VALIDATION_FRACTION

logger = logging.getLogger(__name__)

SMALL_SIZES = tuple(n / 4 for n in range(1, 13))  # 0.25 to 3
AUTO_SIZES = (*SMALL_SIZES, 3.5, 4, 5, 6, 7, 8, 10, 12, 14, 16)
LARGEST_ON_CPU = 3  # takes some minutes, as `laptop` does
LARGEST_MEASURED = 3  # the largest size with which readings and generations were measured
# A chosen size is worth training on at most so many readings of the text; its run ends after
# MOST_READINGS of them. Sizes up to 1 may be worth MOST_READINGS: with fewer, a short text would
# get size 0.75, which loses, as it has a third of the work of size 1.
AUTO_READINGS = 12  # of a size over 1, up to LARGEST_MEASURED
# The same for two generations of a size up to LARGEST_SHORT. On a short text they gain by a larger
# model, although they do not read it as often as the model is worth (docs/sizes.md).
SHORT_READINGS = 24
LARGEST_SHORT = 1.75
AUTO_GENERATIONS = 2
# With fewer tokens, the size that is chosen by their number lost up to 0.05 nats against the best
# of five sizes (docs/sizes.md).
UNCERTAIN_TOKENS = 60_000
FEW_STEPS = 10  # fewer steps hardly change the model that a run starts from


@dataclass(frozen=True)
class TextLength:
    """The length of a text to train on."""

    n_tokens: int
    unit: str  # tokens, or characters
    is_of_chats: bool


def text_length(request: Request, texts: Texts) -> TextLength:
    """The length of the text that a run of a request trains on. Raises InputError if it is not
    known."""
    data = texts["data"]
    upload = data.upload
    if upload is None:
        problem = "preset=auto and a size need the length of the text, which is known"
        raise InputError(
            f"{data.shown}: {problem} of local texts, and of uploads unless this is a dry run; name"
            " another preset"
        )
    n_tokens = upload.characters
    if "validation" not in texts:
        fraction = value_in_run(request, "validation_fraction", VALIDATION_FRACTION)
        n_tokens = upload.n_training(fraction)
    return TextLength(n_tokens, unit_of(upload), upload.chats)


def value_in_run(request: Request, name: str, default: float) -> float:
    """The value of a hyperparameter in a run of a request; default if its folder does not have it.

    The other hyperparameters may fit only those of a size, so they are not checked here. Raises
    InputError if the value is invalid.
    """
    values = {}
    if name in request.hyperparameters:
        values[name] = request.hyperparameters[name]
    alone = request.model_copy(update={"preset": None, "hyperparameters": values})
    return float(getattr(alone.config(world_size=1), name, default))


def sized(request: Request, texts: Texts) -> Request:
    """The request with the hyperparameters of its size. preset=auto chooses the size."""
    if request.size is not None:
        return with_logged_size(request, request.size, text_length(request, texts))
    if request.preset == "auto":
        length = text_length(request, texts)
        chosen = with_chosen_size(request, size_by_text(request, length), length)
        chosen_generations = chosen.hyperparameters.get("generations")
        takes_generations = chosen_generations != request.hyperparameters.get("generations")
        if takes_generations and length.n_tokens < UNCERTAIN_TOKENS:
            reason = "the length of so short a text does not decide which size is best"
            logger.info(f"size: {reason}", extra={"code": "measure-sizes"})
        return chosen
    return request


def with_chosen_size(request: Request, size: float, length: TextLength) -> Request:
    """The request with a size that was chosen for it, by its text or by the bytes of a page.

    It gets two generations where a second one is known to gain.
    """
    of_size = with_logged_size(request, size, length)
    if "generations" in request.hyperparameters or not may_take_generations(request, length):
        return of_size
    return with_generations(of_size, size, length)


def may_take_generations(request: Request, length: TextLength) -> bool:
    """True if two generations of an open size may be better than one, as measured.

    False for conversations, with which they were not measured, for a run whose steps or teacher are
    set, and for a folder without generations.
    """
    sets_steps = "max_steps" in request.hyperparameters
    if sets_steps or request.teacher is not None or length.is_of_chats:
        return False
    has_generations = bool(request.source.known_hyperparameters({"generations": 0}))
    return has_generations and has_tuned_rates(request)


def with_logged_size(request: Request, size: float, length: TextLength) -> Request:
    """The request with the hyperparameters of a size, which is logged."""
    content = "conversations" if length.is_of_chats else "text"
    logger.info(f"size: {size:g}, for {length.n_tokens:,} {length.unit} of {content}")
    if not has_tuned_rates(request):
        logger.info("learning_rate, weight_decay: the size's are for muon, and left out")
    return with_size(request, size, length)


def with_size(request: Request, size: float, length: TextLength) -> Request:
    """The request with the hyperparameters of a size, except those that the request sets."""
    n_ranks = request.backend_class.count_ranks(request)
    with request.source.user_errors():
        sizes = request.source.module("sizes")
        values = sizes.hyperparameters_for_size(size, length.n_tokens, length.is_of_chats, n_ranks)
    if not has_tuned_rates(request):
        del values["learning_rate"], values["weight_decay"]
    values |= request.hyperparameters
    return request.model_copy(update={"preset": None, "size": size, "hyperparameters": values})


def with_generations(request: Request, size: float, length: TextLength) -> Request:
    """The request with two generations of its size, if the second is known to gain."""
    readings = readings_of(request.config(world_size=1), length.n_tokens)
    if not gains_by_generations(size, readings):
        return request
    reason = f"each reads the text {readings:.1f} times, and the second also learns from the first"
    time = "both take about 2.25 times as long as one"
    logger.info(
        f"generations: {AUTO_GENERATIONS}; {reason}; {time}", extra={"code": "one-generation"}
    )
    return with_hyperparameter(request, "generations", AUTO_GENERATIONS)


def with_hyperparameter(request: Request, name: str, value: Scalar) -> Request:
    hyperparameters = {**request.hyperparameters, name: value}
    return request.model_copy(update={"hyperparameters": hyperparameters})


def gains_by_generations(size: float, readings: float) -> bool:
    """True if a second generation of a size is known to lower the loss, on a text that each
    generation reads `readings` times. It is not known for conversations."""
    return size <= LARGEST_MEASURED and readings >= FEW_READINGS


def has_tuned_rates(request: Request) -> bool:
    """True if the learning rate and weight decay of a size are tuned for a request's optimizer."""
    with request.source.user_errors():
        config = request.source.module("config")
        return bool(config.has_tuned_rates(request.hyperparameters.get("optimizer")))


def size_by_text(request: Request, length: TextLength) -> float:
    """The largest size for which a text is long enough; on a CPU, at most LARGEST_ON_CPU."""
    has_gpus = request.backend_class.has_gpus(request.instance_name)
    limit = AUTO_SIZES[-1] if has_gpus else LARGEST_ON_CPU
    sizes = [size for size in AUTO_SIZES if size <= limit]
    return largest_readable(sizes, request, length)


def largest_readable(sizes: Sequence[float], request: Request, length: TextLength) -> float:
    """The largest of these rising sizes for which a text is long enough; the first if none is.

    A size is worth training on a number of tokens, for which it may read the text several times.
    """
    has_generations = may_take_generations(request, length)
    if has_generations and "generations" in request.hyperparameters:
        has_generations = value_in_run(request, "generations", 1) > 1
    largest = sizes[0]
    with request.source.user_errors():
        dial = request.source.module("sizes")
        for size in sizes:
            readings = max_readings(size, has_generations, dial.MOST_READINGS)
            if dial.tokens_worth_training(size) > readings * length.n_tokens:
                break
            largest = size
    return largest


def max_readings(size: float, has_generations: bool, most_readings: int) -> int:
    """How many readings of the text a size may be worth, if it is chosen for the text."""
    if size <= 1 or size > LARGEST_MEASURED:
        return most_readings
    if has_generations and size <= LARGEST_SHORT:
        return SHORT_READINGS
    return AUTO_READINGS


def with_whole_windows(request: Request, text: Channel) -> Request:
    """The request without the short windows of its preset, if the text is of conversations."""
    if text.upload is None or not text.upload.chats:
        return request
    short_windows = getattr(request.config(world_size=1), "short_windows", 0)
    if "short_windows" in request.hyperparameters or not short_windows:
        return request
    logger.info(f"short_windows=0 (the preset's {short_windows} would cut conversations)")
    return with_hyperparameter(request, "short_windows", 0)


def with_fitting_steps(request: Request, texts: Texts) -> Request:
    """The request with fewer steps, if it starts from a model and would read its text too often.

    The steps stay if they come from the preset, or if the warm-up would take more than the fewer
    steps. The steps of fine-tuning, which an initial model prescribes, replace those of a preset.
    """
    has_own_steps = request.preset is not None and "max_steps" not in request.hyperparameters
    upload = texts["data"].upload
    if request.init_from is None or has_own_steps or upload is None:
        return request
    config = request.config(world_size=1)
    n_tokens = tokens_to_read(upload, config, part_of("data", texts))
    if not memorizes(config, n_tokens):
        return request
    steps = steps_for(config, n_tokens)
    if steps < getattr(config, "warmup_steps", 0):
        return request
    logger.info(f"max_steps={steps}, to read the text {READINGS} times")
    if steps < FEW_STEPS:
        remedy = "add text, or set a smaller batch_size"
        logger.warning(f"a model learns little in so few steps; {remedy}")
    return with_hyperparameter(request, "max_steps", steps)
