"""Tokenizers: read one, learn one, and tell two apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import wait
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Event

from entry_point.conversations import END_OF_TURN, TURN
from entry_point.errors import DataError
from entry_point.text import Tokenizer, read_json
from launcher.errors import InputError
from launcher.files.models import is_path
from launcher.files.progress import Progress, no_progress
from launcher.files.storage import path_of
from launcher.models.encoder import QWEN35, published_tokenizer
from launcher.models.fetch import fetch_model
from launcher.settings import Settings
from launcher.text.copies import in_thread
from launcher.text.formats import Counts, File, documents

END_OF_TEXT = "<|endoftext|>"
# Names of the end of a document in published tokenizers, where tokenizer_config.json names none.
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
SAMPLE = 1 << 27  # bytes to learn a vocabulary from


def fingerprint(tokenizer: Tokenizer) -> str:
    """A SHA-256 of the bytes that each id stands for."""
    return hashlib.sha256(repr(tokenizer.words).encode()).hexdigest()


def find_tokenizer(typed: str, settings: Settings) -> Tokenizer:
    """Return the tokenizer that a user named by a file, a directory or a job."""
    if is_path(typed) or typed.endswith(".json"):
        return open_tokenizer(path_of(typed))
    return open_tokenizer(fetch_model(typed, settings))


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json, or in a directory as of Hugging Face or of a model.

    Raises InputError if there is none, or it is not of BPE over bytes or of characters.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    beside = file.with_name("tokenizer_config.json")
    try:
        document, config = read_json(file), read_json(beside) if beside.exists() else {}
    except DataError as error:
        raise InputError(str(error)) from None
    try:
        document["model"].setdefault("type", "BPE")  # GPT-2's own file has none
        contents = [token["content"] for token in document["added_tokens"] if token["special"]]
        end = config.get("eos_token")
        end = end.get("content") if isinstance(end, dict) else end
        if not isinstance(end, str):
            end = next((name for name in KNOWN_ENDS if name in contents), None)
        tokenizer = Tokenizer(document, end)
        published_tokenizer(document)
        if end is not None or tokenizer.unit == "characters":
            return tokenizer
        why = "no token for the end of a text; name one as eos_token in tokenizer_config.json"
    except (DataError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"not a tokenizer of BPE over bytes: {error}"
    raise InputError(f"{file}: {why}")


def fitting_size(characters: int) -> int:
    """The largest power of two with 512 characters for each token, from 512 to 16,384."""
    return 1 << min(max((characters // 512).bit_length() - 1, 9), 14)


def learn_tokenizer(
    files: Sequence[File], vocab_size: int, progress: Progress = no_progress
) -> Tokenizer:
    """Learn BPE over bytes (arXiv:1508.07909, and section 2.2 of GPT-2's paper) from documents.

    It reads at most SAMPLE bytes. The vocabulary is smaller where each word is one token before.
    """
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    by_words = pre_tokenizers.Split(Regex(QWEN35), "isolated")
    # A text without breaks, as of DNA, is one word, for which each merge takes time.
    cut = pre_tokenizers.Split(Regex(r"[\s\S]{256}"), "isolated")
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence([by_words, cut, of_bytes])
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT, TURN, END_OF_TURN],  # of turns, for conversations later
        show_progress=False,
    )
    read, left = Counts(), Event()
    pieces = filter(None, documents(files, read))
    some = takewhile(lambda _: read.size <= SAMPLE and not left.is_set(), pieces)
    # The library looks at no signals: here, Ctrl-C ends the wait for it.
    learned = in_thread(partial(library.train_from_iterator, some, trainer))
    try:
        told, ended = 0, False
        while not ended:
            ended = bool(wait([learned], 0.1).done)
            progress(read.size - told)
            told = read.size
    finally:
        left.set()
    learned.result()
    library.pre_tokenizer = pre_tokenizers.Sequence([by_words, of_bytes])
    return Tokenizer(json.loads(library.to_str()), END_OF_TEXT)
