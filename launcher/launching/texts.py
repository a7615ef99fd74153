"""The texts of a job, and whether a run would take them."""

from __future__ import annotations

import logging
from typing import Any

from entry_point.files import LARGEST_TEXT, TOO_MUCH_TEXT
from launcher.errors import InputError, about
from launcher.files import storage
from launcher.job import SEARCH_VARIABLE, Request
from launcher.settings import Settings
from launcher.text import corpus
from launcher.text.channels import Channel, Texts, find_channel
from launcher.text.reading import File
from launcher.text.repeats import share_between, warn_of_repeats

logger = logging.getLogger(__name__)

# A text may be read so often before another reading is worth much less than new text
# (arXiv:2305.16264).
READINGS = 4
# Readings before a warning. `cpu` and `quick` have their best model of texts of 5 to 100 kB at the
# third to seventh reading; after eleven, val_loss is 30 % higher, after 17, 80 %. `baby`, whose
# weights decay, reads tiny Shakespeare 16 times, and does not memorize it.
MOST_READINGS, MOST_IF_REGULARIZED = 8, 20
FEW_READINGS = 4  # of a text: after 1.8 a larger model gains more than a second generation


def find_texts(request: Request, settings: Settings, near: Settings) -> dict[str, Channel]:
    """Where the job, whose store is that of `near`, reads its texts, by the job's fields."""
    with about("data"):
        data = request.data or corpus.last_upload(settings)
    named, channels = {"data": data, "validation": request.validation}, {}
    for name, text in named.items():
        if text:
            with about(name, text):
                channels[name] = find_channel(corpus.find_text(text, settings), near)
    return channels


def check_texts(channels: Texts, config: Any) -> None:
    """Raise InputError if a run of this config would refuse the texts. Warn of equal ones."""
    texts = {text.upload.sha256 if text.upload else text.uri for text in channels.values()}
    if len(texts) < len(channels):
        logger.warning("validation is the text to train on: val_loss will not show memorizing")
    for name, channel in channels.items():
        if (text := channel.upload) is None:
            continue
        with about(name, channel.shown):
            if not text.train_tokens and getattr(config, "mask_documents", False):
                problem = "mask_documents needs tokens, whose documents have an end"
                raise InputError(f"{channel.shown}: {problem}", "needs-ends")
            if problem := problem_of(text, config, "" if len(channels) == 1 else name):
                raise InputError(f"{channel.shown}: {problem}")
        if longer := sum(n for context, n in text.contexts.items() if context > config.block_size):
            many = f"{longer:,} of {text.documents:,} conversations are longer than"
            end = "they end with the last answer that fits, or are left out"
            logger.warning(f"{many} block_size={config.block_size}: {end}")
    if len(texts) == len(channels):
        warn_of_repeats(channels["data"].shown, repeated_share(channels))


def repeated_share(channels: Texts) -> float | None:
    """The share of the validation text that stands in the training text; None if not known.

    It is not known of texts on S3, but for those that hold their own validation part.
    """
    data, validation = channels["data"], channels.get("validation")
    if validation is None:
        return data.upload.repeated if data.upload else None
    files, other_files = files_of(data), files_of(validation)
    if not (files and other_files and validation.upload):
        return None
    return share_between(files, other_files, validation.upload.characters)


def files_of(channel: Channel) -> tuple[File, ...]:
    """The files of a plain text on this machine; none if it is elsewhere, or tokens."""
    directory, upload = storage.local_path(channel.uri), channel.upload
    if channel.sources or upload is None or upload.train_tokens or directory is None:
        return tuple(channel.sources)
    return tuple(File(name, directory / name) for name in upload.files)


def problem_of(text: corpus.Upload, config: Any, field: str) -> str:
    """Why a run of this config refuses a text, or ''; field is that of one text of two."""
    size, unit = config.block_size, "tokens" if text.train_tokens else "characters"
    if text.train_tokens and field:
        return "it holds tokens, with their own validation part; leave validation out"
    if not text.train_tokens and text.size > LARGEST_TEXT:
        return TOO_MUCH_TEXT
    if 0 < getattr(config, "vocab_size", 0) < text.vocabulary_size:
        most = f"vocab_size={config.vocab_size}"
        return f"it has {text.vocabulary_size} different {unit}, more than {most}"
    if text.chats and getattr(config, "short_windows", False):
        return "short_windows cuts conversations; leave it out"
    for part, needed in text.answers.items():
        if needed > size:
            none = f"no conversation in {part} has an answer within block_size={size} tokens"
            more = f"it needs block_size={needed} or more; train the base model with that too"
            return f"{none}; {more}"
    if text.train_tokens:
        parts = {"training": text.train_tokens, "validation": text.val_tokens}
    elif not field:
        n_train = int(text.characters * (1 - config.validation_fraction))
        parts = {"training": n_train, "validation": text.characters - n_train}
    else:
        parts = {"training" if field == "data" else field: text.characters}
    for part, length in parts.items():
        if length < size + 1 and not text.chats:
            needs = f"one window of block_size={size} needs {size + 1}"
            what = f"the {part} text has {length} {unit}, and {needs}"
            return f"{what}; use more text or a smaller block_size"
    return ""


def check_readings(request: Request, config: Any, tokens: int) -> None:
    """Warn if a run of this config reads its text too often, or too seldom for generations.

    request is what the user asked for, which decides what to do about it.
    """
    step = config.batch_size * config.block_size
    regularized = any(getattr(config, name, 0) for name in ("weight_decay", "dropout"))
    most = MOST_IF_REGULARIZED if regularized else MOST_READINGS
    if (readings := config.max_steps * step / tokens) > most:
        often = f"the run reads the text {readings:.0f} times, and will memorize it"
        steps = max(1, READINGS * tokens // step)
        logger.warning(often, extra=remedy_for_readings(request, steps))
    if getattr(config, "generations", 1) > 1 and readings < FEW_READINGS:
        each = f"each model reads the text {readings:.1f} times; below {FEW_READINGS}"
        logger.warning(f"{each}, a larger model gains more than another generation")


def remedy_for_readings(request: Request, steps: int) -> dict[str, object]:
    """The code and the facts of what helps a run that reads its text too often; empty if nothing
    is open. `steps` read the text READINGS times.
    """
    if request.resume is not None or SEARCH_VARIABLE in request.environment:
        return {}  # its text and its size are those of its beginning
    if request.init_from is not None or "max_steps" in request.hyperparameters:
        return {"code": "fewer-steps", "steps": steps, "n": READINGS}
    if request.preset == "auto":
        return {"code": "more-text"}
    return {"code": "fitting-size"}
