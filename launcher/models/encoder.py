"""Encode text by a tokenizer.json, in several processes.

It imports no torch, so that its processes start at once.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import unicodedata
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import launcher
from launcher.errors import InputError, ServiceError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Batch = list[str | None]  # pieces of text; None stands where a document ends

# The pre-tokenizer of `learn_words`, as in GPT-2's encoder.py. [^\W\d_] is \p{L} there, and \d is
# \p{N}, but for strange characters.
WORD = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
# The same for ASCII, in two thirds of the time.
ASCII_WORD = re.compile(
    r"'(?:[sdmt]|ll|ve|re)| ?(?:[a-zA-Z]+|[0-9]+|[^\sa-zA-Z0-9]+)|\s+(?!\S)|\s+", re.ASCII
)
LINE = re.compile(r"(?<=\S\n)(?=\S)")  # a cut that leaves the words as they are
# The expressions by which tokenizers split a text: ours of characters, and those of GPT-2, Llama 3
# and Qwen.
PATTERNS = (
    r"[\s\S]",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    *(
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        for digits in (r"\p{N}{1,3}", r"\p{N}")
    ),
)
REMEMBERED = 1 << 27  # bytes of words and their ids


def is_strange(character: str) -> bool:
    """Whether Python and Unicode 3.2 disagree about it: as letter, number, space, or none."""
    category = unicodedata.ucd_3_2_0.category(character)
    space = category.startswith("Z") or character in "\t\n\v\f\r\x85"
    kinds = (category.startswith("L"), category.startswith("N"), space, category == "Cn")
    letter = re.match(r"[^\W\d_]", character) is not None
    return kinds != (letter, character.isdecimal(), character.isspace(), False)


@lru_cache
def strange() -> re.Pattern[str]:
    """A character for which the library has to find the words: also any of CJK and beyond."""
    known = "".join(re.escape(c) for c in map(chr, range(0x3000)) if not is_strange(c))
    return re.compile(f"[^{known}]")


def load_words(content: str) -> Tokenizer:
    """The library's tokenizer, which encodes special tokens in a text as ordinary text.

    It gets only what encodes, and of that only what published tokenizers of BPE over bytes have:
    other parts of a stranger's file can abort the process, or take any time and memory.

    Raises:
        InputError: the file has other parts.
    """
    from tokenizers import Tokenizer

    try:
        document = json.loads(content)
        before, model = document["pre_tokenizer"], document["model"]
        steps = before["pretokenizers"] if before["type"] == "Sequence" else [before]
        if (found := document["normalizer"]) not in (None, {"type": "NFC"}):
            raise ValueError(f"has a normalizer, {found['type']}, that may change the text")
        for step in steps:
            known = step["pattern"]["Regex"] in PATTERNS if step["type"] == "Split" else True
            if step["type"] not in ("ByteLevel", "Digits", "Split") or not known:
                raise ValueError(f"splits text in an unknown way: {json.dumps(step)}")
        kept = ("type", "vocab", "merges", "ignore_merges", "unk_token")
        plain = {
            "version": "1.0",
            **{name: document[name] for name in ("added_tokens", "normalizer", "pre_tokenizer")},
            "model": {name: model[name] for name in kept if model.get(name) is not None},
        }
        tokenizer = Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises no class of its own
        raise InputError(f"tokenizer.json: {error}") from None
    tokenizer.encode_special_tokens = True
    return tokenizer


def splits_as_gpt2(document: dict[str, Any]) -> bool:
    """Whether a tokenizer.json finds the words in a text as WORD does."""
    plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    found = {"use_regex": True, **(document.get("pre_tokenizer") or {})}
    return (
        document.get("normalizer") is None
        and all(token["special"] for token in document["added_tokens"])
        and {name: found.get(name) for name in plain} == plain
    )


class Encoder:
    """Turns text into ids, as bytes of the type `code`.

    Most of a text is words that were there before, whose ids it remembers: on one core it is three
    times as fast as the library. words holds the bytes of each id: text must come back from them.
    """

    def __init__(self, content: str, words: Sequence[bytes], code: str) -> None:
        self.tokenizer, self.words, self.code = load_words(content), words, code
        normalizer = self.tokenizer.normalizer
        # Qwen's changes é of two characters to é of one, which is the same text.
        composes = normalizer is not None and json.loads(content)["normalizer"] == {"type": "NFC"}
        self.same = normalizer.normalize_str if composes else str
        self.finds_words = splits_as_gpt2(json.loads(content))
        self.known: dict[str, bytes] = {}
        self.size = 0

    def ask(self, pieces: Sequence[str]) -> list[bytes]:
        """The ids by the library, which uses all cores.

        Raises:
            InputError: they stand for another text.
        """
        encoded = self.tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        for piece, found in zip(pieces, encoded, strict=True):
            back = b"".join(map(self.words.__getitem__, found.ids))
            if back != self.same(piece).encode():
                raise InputError(lost(self.same(piece), back.decode(errors="replace")))
        return [array(self.code, each.ids).tobytes() for each in encoded]

    def encode(self, pieces: Sequence[str]) -> list[bytes]:
        """The ids of each piece."""
        if not self.finds_words:
            return self.ask(pieces)
        return [b"".join(map(self.part, self.parts(piece))) for piece in pieces]

    def parts(self, piece: str) -> list[str]:
        """The piece, or its lines, most of which may be ASCII."""
        return [piece] if piece.isascii() else LINE.split(piece)

    def part(self, text: str) -> bytes:
        if text.isascii():
            words = ASCII_WORD.findall(text)
        elif strange().search(text):
            return self.ask([text])[0]
        else:
            words = WORD.findall(text)
        try:
            return b"".join(map(self.known.__getitem__, words))
        except KeyError:
            new = [word for word in set(words) if word not in self.known]
            self.known.update(zip(new, self.ask(new), strict=True))
        found = b"".join(map(self.known.__getitem__, words))
        self.size += sum(200 + len(word) for word in new)
        if self.size > REMEMBERED:
            self.known, self.size = {}, 0
        return found


def lost(text: str, back: str) -> str:
    """Says where a text and what comes back from its ids differ."""
    at = next((n for n, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), len(back))
    return (
        f"the tokenizer changes the text: {text[at : at + 20]!r} decodes to"
        f" {back[at : at + 20]!r}; use another tokenizer, or --tokenizer bpe"
    )


def encoded(
    batches: Iterator[Batch], how: tuple[str, Sequence[bytes], str], processes: int
) -> Iterator[tuple[Batch, list[bytes]]]:
    """Each batch with the ids of its pieces, in order; `how` is what an Encoder is made of.

    Raises:
        InputError: the text does not come back from its ids.
        ServiceError: one of the processes was killed.
    """

    def pieces(batch: Batch) -> list[str]:
        return [piece for piece in batch if piece is not None]

    if processes == 1:
        encoder = Encoder(*how)
        for batch in batches:
            yield batch, encoder.encode(pieces(batch))
        return
    waiting: deque[tuple[Batch, subprocess.Popen[bytes]]] = deque()

    def result() -> tuple[Batch, list[bytes]]:
        batch, worker = waiting.popleft()
        assert worker.stdout is not None
        ids = pickle.load(worker.stdout)
        if isinstance(ids, InputError):
            raise ids
        return batch, ids

    try:
        with ExitStack() as stack:
            workers = [stack.enter_context(start()) for _ in range(processes)]
            for worker in workers:
                stack.callback(worker.kill)  # which the context then waits for
                send(worker, how)
            for number, batch in enumerate(batches):
                if len(waiting) == processes:  # so that none of them waits with a full pipe
                    yield result()
                worker = workers[number % processes]
                send(worker, pieces(batch))
                waiting.append((batch, worker))
            while waiting:
                yield result()
    except (EOFError, BrokenPipeError):
        raise ServiceError(
            "a process that encodes the text ended; was there too little memory?"
        ) from None


def start() -> subprocess.Popen[bytes]:
    here = str(Path(launcher.__file__).absolute().parents[1])
    paths = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher.models.encoder"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"},
        process_group=0,  # Ctrl-C is for the command, which ends them
    )


def send(worker: subprocess.Popen[bytes], value: object) -> None:
    assert worker.stdin is not None
    pickle.dump(value, worker.stdin)
    worker.stdin.flush()


def serve() -> None:
    """Encode what arrives, until nothing does."""
    encoder = Encoder(*pickle.load(sys.stdin.buffer))
    while True:
        try:
            pieces: Sequence[str] = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            found: list[bytes] | InputError = encoder.encode(pieces)
        except InputError as error:
            found = error
        pickle.dump(found, sys.stdout.buffer)
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
