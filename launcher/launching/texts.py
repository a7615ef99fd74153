"""Find the texts of a job, and check whether its run would take them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sm_nanogpt.entry_point.files import LARGEST_TEXT, TOO_MUCH_TEXT
from sm_nanogpt.launcher.errors import InputError, about
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.job import SEARCH_VARIABLE, Request
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.channels import Channel, Texts, find_channel
from sm_nanogpt.launcher.text.repeats import share_between, share_of_end, warn_of_repeats
from sm_nanogpt.launcher.text.store import VALIDATION_FRACTION, Upload, find_text, last_upload

if TYPE_CHECKING:  # with the readers of all formats
    from sm_nanogpt.launcher.text.reading import File

logger = logging.getLogger(__name__)

# After so many readings of a text, another one is worth much less than new text
# (arXiv:2305.16264).
READINGS = 4
# A run that reads its text more often is warned. On texts of 5 to 100 kB, `cpu` and `quick` have
# their best model at the third to seventh reading; after eleven readings val_loss is 30 % higher,
# and after 17 it is 80 % higher. `baby`, whose weights decay, reads tiny Shakespeare 16 times and
# does not memorize it.
MAX_READINGS = 8
MAX_READINGS_IF_REGULARIZED = 20
# A new model needs at least so many tokens of conversations, since it has to learn the language
# from them, too. From as much plain text, a model learns hardly more than spelling: tiny
# Shakespeare has 320,000 tokens.
MIN_CHAT_TOKENS = 200_000
PARTS = {"data": "training", "validation": "validation"}  # part of the text, by field of a job
FEW_READINGS = 4  # after 1.8 readings, a larger model gains more than a second generation


def find_texts(request: Request, settings: Settings, job_settings: Settings) -> dict[str, Channel]:
    """Find where the job reads its texts, by the job's fields. job_settings have its store."""
    with about("data"):
        data = request.data or last_upload(settings)
    references = {"data": data, "validation": request.validation}
    channels = {}
    for name, reference in references.items():
        if reference:
            with about(name, reference):
                location = find_text(reference, settings)
                channels[name] = find_channel(location, job_settings)
    return channels


def check_texts(channels: Texts, config: Any) -> None:
    """Raise InputError if a run of this config would refuse the texts.

    Warns of conversations that are longer than the context, of a validation text that is also the
    training text, and of one that the training text contains in large part.
    """
    for name, channel in channels.items():
        if channel.upload is not None:
            with about(name, channel.shown):
                check_upload(channel.upload, channel.short_name, config, part_of(name, channels))
            warn_of_long_conversations(channel.upload, config.block_size)

    contents = set()
    for channel in channels.values():
        contents.add(channel.upload.sha256 if channel.upload else channel.uri)
    if len(contents) < len(channels):
        logger.warning("validation is the text to train on: val_loss will not show memorizing")
    else:
        fraction = getattr(config, "validation_fraction", VALIDATION_FRACTION)
        share = repeated_share_of(channels, fraction)
        warn_of_repeats(channels["data"].short_name, share)


def part_of(name: str, texts: Texts) -> str:
    """The part that a text of a job is, a value of PARTS; "" if it holds both parts."""
    return PARTS[name] if "validation" in texts else ""


def check_upload(upload: Upload, name: str, config: Any, part: str) -> None:
    """Raise InputError if a run of this config would refuse a text.

    name is what the message calls the text. part is a value of PARTS, or "" if the text holds both
    parts.
    """
    if not upload.train_tokens and getattr(config, "mask_documents", False):
        problem = "mask_documents needs tokens, whose documents have an end"
        raise InputError(f"{name}: {problem}", code="needs-ends")
    problem = problem_of_upload(upload, config, part)
    if problem:
        raise InputError(f"{name}: {problem}")


def warn_of_long_conversations(upload: Upload, block_size: int) -> None:
    """Warn if conversations are longer than the context of a run."""
    n_long = 0
    for context, n_conversations in upload.contexts.items():
        if context > block_size:
            n_long += n_conversations
    if n_long:
        subject = f"{n_long:,} of {upload.documents:,} conversations"
        problem = f"{subject} are longer than block_size={block_size}"
        effect = "each ends with its last answer that fits; one without is left out"
        logger.warning(f"{problem}: {effect}")


def are_few_conversations(upload: Upload) -> bool:
    """True for conversations that are too few to teach a new model the language."""
    return upload.chats and upload.train_tokens < MIN_CHAT_TOKENS


def warn_of_few_conversations(upload: Upload) -> None:
    """Warn if a new model would learn too little from conversations alone."""
    if are_few_conversations(upload):
        problem = f"{upload.train_tokens:,} tokens of conversations are few for a new model"
        reason = "which learns the language from them, too"
        logger.warning(f"{problem}, {reason}", extra={"code": "base-first"})


def repeated_share_of(
    channels: Texts, validation_fraction: float = VALIDATION_FRACTION
) -> float | None:
    """The share of the validation text, 0 to 1, that the training text contains; None if it was
    not measured.

    For one text, its upload has recorded it of the usual fraction. Of another fraction, and of two
    texts, it is measured here, if they are plain text on this machine.
    """
    data = channels["data"]
    validation = channels.get("validation")
    last_text = validation or data  # which validates, or whose end does
    upload = last_text.upload
    if upload is None:
        return None
    is_recorded = upload.train_tokens > 0 or validation_fraction == VALIDATION_FRACTION
    if validation is None and is_recorded:
        return upload.repeated
    files = files_of(data)
    validation_files = files_of(last_text)
    if not (files and validation_files):
        return None
    if validation is None:
        return share_of_end(files, upload.characters, validation_fraction)
    return share_between(files, validation_files, upload.characters)


def files_of(channel: Channel) -> tuple[File, ...]:
    """The files of a plain text on this machine; () for a text on S3, or of tokens."""
    if channel.sources:
        return tuple(channel.sources)
    directory = storage.local_path(channel.uri)
    upload = channel.upload
    if directory is None or upload is None or upload.train_tokens:
        return ()
    from sm_nanogpt.launcher.text.reading import File  # with the readers of all formats

    return tuple(File(name, directory / name) for name in upload.files)


def problem_of_upload(upload: Upload, config: Any, part: str) -> str:
    """Why a run of this config would refuse a text, or ''. part is as for check_upload."""
    if upload.train_tokens and part:
        return "it holds tokens, with their own validation part; leave validation out"
    if not upload.train_tokens and upload.size > LARGEST_TEXT:
        return TOO_MUCH_TEXT
    if 0 < getattr(config, "vocab_size", 0) < upload.vocabulary_size:
        limit = f"vocab_size={config.vocab_size}"
        return f"it has {upload.vocabulary_size} different {unit_of(upload)}, more than {limit}"
    if upload.chats and getattr(config, "short_windows", False):
        return "short_windows cuts conversations; leave it out"
    return problem_of_answers(upload, config) or problem_of_length(upload, config, part)


def unit_of(upload: Upload) -> str:
    return "tokens" if upload.train_tokens else "characters"


def problem_of_answers(upload: Upload, config: Any) -> str:
    """Why no conversation teaches an answer, or ''."""
    for part, shortest in upload.answers.items():
        if shortest > config.block_size:
            window = f"within block_size={config.block_size} tokens"
            problem = f"no conversation in {part} has an answer {window}"
            advice = f"it needs block_size={shortest} or more; train the base model with that too"
            return f"{problem}; {advice}"
    return ""


def problem_of_length(upload: Upload, config: Any, part: str) -> str:
    """Why a text is too short for one window, or ''. part is as for check_upload."""
    if upload.chats:
        return ""
    min_length = config.block_size + 1
    for name, length in lengths_of(upload, config, part).items():
        if length < min_length:
            need = f"one window of block_size={config.block_size} needs {min_length}"
            problem = f"the {name} text has {length} {unit_of(upload)}, and {need}"
            return f"{problem}; use more text or a smaller block_size"
    return ""


def lengths_of(upload: Upload, config: Any, part: str) -> dict[str, int]:
    """The tokens or characters of each part of a text. part is as for check_upload."""
    if upload.train_tokens:
        return {"training": upload.train_tokens, "validation": upload.val_tokens}
    if part:
        return {part: upload.characters}
    n_training = upload.n_training(config.validation_fraction)
    return {"training": n_training, "validation": upload.characters - n_training}


def check_readings(request: Request, config: Any, n_tokens: int) -> None:
    """Warn if a run of this config reads its text too often, or too seldom for generations.

    The remedy depends on request, the one of the user. n_tokens is the length of the text, in
    tokens or characters.
    """
    readings = readings_of(config, n_tokens)
    if memorizes(config, n_tokens):
        problem = f"the run reads the text {readings:.0f} times, and will memorize it"
        steps = steps_for(config, n_tokens)
        logger.warning(problem, extra=remedy_for_readings(request, steps))
    if getattr(config, "generations", 1) > 1 and readings < FEW_READINGS:
        problem = f"each model reads the text {readings:.1f} times; below {FEW_READINGS}"
        logger.warning(f"{problem}, a larger model gains more than another generation")


def memorizes(config: Any, n_tokens: int) -> bool:
    """True if a run of this config reads a text so often that its loss rises again."""
    is_regularized = any(getattr(config, name, 0) for name in ("weight_decay", "dropout"))
    max_readings = MAX_READINGS_IF_REGULARIZED if is_regularized else MAX_READINGS
    return readings_of(config, n_tokens) > max_readings


def steps_for(config: Any, n_tokens: int) -> int:
    """The steps in which a run of this config reads a text READINGS times."""
    return max(1, READINGS * n_tokens // (config.batch_size * config.block_size))


def tokens_to_read(upload: Upload, config: Any, part: str) -> int:
    """The tokens or characters that a run counts when it reads a text once.

    A run counts whole rows, and those of conversations may be half empty. part is as for
    check_upload.
    """
    rows_per_text = 2 if upload.chats else 1
    return rows_per_text * lengths_of(upload, config, part)["training"]


def readings_of(config: Any, n_tokens: int) -> float:
    """How often each generation of a run of this config reads a text."""
    return float(config.max_steps * config.batch_size * config.block_size / n_tokens)


def remedy_for_readings(request: Request, steps: int) -> dict[str, object]:
    """The code and the facts of the remedy for a run that reads its text too often; {} if the user
    can change nothing. In `steps` the run reads the text READINGS times.
    """
    if request.resume is not None or SEARCH_VARIABLE in request.environment:
        return {}  # the job that began it chose text and size
    if request.init_from is not None or "max_steps" in request.hyperparameters:
        return {"code": "fewer-steps", "steps": steps, "n": READINGS}
    if request.has_open_size:
        return {"code": "more-text"}
    return {"code": "fitting-size"}
