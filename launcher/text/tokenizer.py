"""Find, learn, and compare tokenizers."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from sm_nanogpt.entry_point.conversations import END_OF_TURN, TURN
from sm_nanogpt.entry_point.errors import DataError
from sm_nanogpt.entry_point.files import read_json
from sm_nanogpt.entry_point.text import Tokenizer
from sm_nanogpt.launcher.aws import Missing
from sm_nanogpt.launcher.errors import InputError, did_you_mean
from sm_nanogpt.launcher.files.models import is_path
from sm_nanogpt.launcher.files.progress import Progress, no_progress
from sm_nanogpt.launcher.files.storage import path_of
from sm_nanogpt.launcher.models.encoder import QWEN35_PATTERN, published_tokenizer
from sm_nanogpt.launcher.models.fetch import fetch_model
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text import LEARN_BPE
from sm_nanogpt.launcher.text.documents import Survey, read_documents
from sm_nanogpt.launcher.text.reading import File
from sm_nanogpt.launcher.text.threads import in_thread

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
# Names of the end of a text in published tokenizers, for a tokenizer_config.json without one.
USUAL_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
SAMPLE_BYTES = 1 << 27  # of a text from which a vocabulary is learned


def fingerprint(tokenizer: Tokenizer) -> str:
    """The SHA-256 of the bytes of all tokens, in the order of their ids."""
    return hashlib.sha256(repr(tokenizer.words).encode()).hexdigest()


def find_tokenizer(typed: str, settings: Settings) -> Tokenizer:
    """Return the tokenizer that a user named by a file, a directory, or a job."""
    if is_path(typed) or typed.endswith(".json"):
        return open_tokenizer(path_of(typed))
    try:
        directory = fetch_model(typed, settings)
    except Missing:
        suggestion = did_you_mean(typed.lower(), [LEARN_BPE])
        if suggestion:
            raise InputError(f"there is no tokenizer {typed!r}; {suggestion}") from None
        raise
    return open_tokenizer(directory)


def open_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json, or in a directory that has one.

    Raises InputError if there is none, or if it is neither of BPE over bytes nor of characters.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    config_file = file.with_name("tokenizer_config.json")
    try:
        document = read_json(file)
        config = read_json(config_file) if config_file.exists() else {}
    except DataError as error:
        raise InputError(str(error)) from None
    model = document.get("model")
    if isinstance(model, dict):
        model.setdefault("type", "BPE")  # GPT-2's own file has none
    try:
        tokenizer = Tokenizer(document)
        published_tokenizer(document)
        end = end_of_text_in(tokenizer, config)
        if end is not None:
            tokenizer = Tokenizer(document, end)
    except (DataError, InputError) as error:
        problem = str(error).removeprefix("tokenizer.json ")
        raise InputError(f"{file}: {problem}") from None
    if end is None and tokenizer.unit != "characters":
        problem = "no token for the end of a text; name one as eos_token in tokenizer_config.json"
        raise InputError(f"{file}: {problem}")
    return tokenizer


def end_of_text_in(tokenizer: Tokenizer, config: Mapping[str, Any]) -> str | None:
    """The token that ends a text: the one that tokenizer_config.json names, or one with a usual
    name; else None."""
    end = config.get("eos_token")
    if isinstance(end, dict):
        end = end.get("content")
    if isinstance(end, str):
        return end
    for name in USUAL_ENDS:
        if name in tokenizer.special:
            return name
    return None


def fitting_size(characters: int) -> int:
    """A vocabulary size for a text: the largest power of two that leaves 512 characters for each
    token, from 512 to 16,384."""
    exponent = (characters // 512).bit_length() - 1
    return 1 << min(max(exponent, 9), 14)


def learn_tokenizer(
    files: Sequence[File], vocab_size: int, progress: Progress = no_progress
) -> Tokenizer:
    """Learn BPE over bytes (arXiv:1508.07909, and section 2.2 of GPT-2's paper) from documents.

    At most SAMPLE_BYTES are read. The vocabulary is smaller than vocab_size if each word of the
    text is one token before.
    """
    logger.info(f"tokenizer: learning {vocab_size:,} tokens")
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    by_words = pre_tokenizers.Split(Regex(QWEN35_PATTERN), "isolated")
    # A text without breaks, such as DNA, would be one long word, in which each merge takes time.
    by_length = pre_tokenizers.Split(Regex(r"[\s\S]{256}"), "isolated")
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence([by_words, by_length, of_bytes])
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT, TURN, END_OF_TURN],  # the last two: later chats
        show_progress=False,
    )

    survey = Survey()
    is_stopped = Event()

    def sample() -> Iterator[str]:
        for piece in read_documents(files, survey):
            if survey.size > SAMPLE_BYTES or is_stopped.is_set():
                return
            if piece:
                yield piece

    # The library does not handle Ctrl-C. In a thread, Ctrl-C ends the wait for it.
    training = in_thread(partial(library.train_from_iterator, sample(), trainer))
    try:
        wait_and_report(training, survey, progress)
    finally:
        is_stopped.set()
    training.result()
    library.pre_tokenizer = pre_tokenizers.Sequence([by_words, of_bytes])
    tokenizer = Tokenizer(json.loads(library.to_str()), END_OF_TEXT)
    if len(tokenizer) < vocab_size:
        count = f"{len(tokenizer):,} tokens, not {vocab_size:,}"
        logger.info(f"tokenizer: {count}: the text has no more to learn")
    return tokenizer


def wait_and_report(training: Future[Any], survey: Survey, progress: Progress) -> None:
    """Wait until the library has learned, and report the bytes that were read into the survey."""
    reported = 0
    is_done = False
    while not is_done:
        is_done = bool(wait([training], 0.1).done)
        size = survey.size
        progress(size - reported)
        reported = size
