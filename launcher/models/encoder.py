"""Encode text by a tokenizer.json."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from entry_point.cores import cores
from launcher.errors import InputError

if TYPE_CHECKING:
    import tokenizers
    from tiktoken import Encoding

    from entry_point.text import Tokenizer

# The expressions by which tokenizers split a text: those of GPT-2, Qwen, and Llama 3; that of
# Qwen3.5, which keeps combining marks with their letters, as Hindi, Thai, or Arabic with vowels
# need it; and ours of characters.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN35 = QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
PATTERNS = (GPT2, QWEN, LLAMA3, QWEN35, r"[\s\S]")

# Characters encoded as one string: tiktoken panics at a million spaces, and ids take far more
# memory than their text.
LONGEST = 1 << 18
SPEAKS = "assistant\n"  # a turn of the assistant begins so
AT_ONCE = 16  # strings of this length, for threads to share


def published_tokenizer(document: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The library's tokenizer of a tokenizer.json. It encodes special tokens as ordinary text.

    It gets only what encodes, and of that only what published tokenizers of BPE over bytes have:
    other parts of a stranger's file can abort the process, or take any time and memory.
    """
    from tokenizers import Tokenizer

    try:
        before, model = document["pre_tokenizer"], document["model"]
        if before is None:
            raise ValueError("has no pre_tokenizer, which splits a text")
        steps = before["pretokenizers"] if before["type"] == "Sequence" else [before]
        if not steps:
            raise ValueError("has a pre_tokenizer without steps")
        unknown = model.get("unk_token")
        if unknown is not None and unknown not in model["vocab"]:
            raise ValueError(f"has the unk_token {unknown!r}, which its vocabulary lacks")
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


def pattern_of(document: Mapping[str, Any]) -> str | None:
    """The expression by which a tokenizer.json splits a text; None: in another way."""
    plain = {"type": "ByteLevel", "add_prefix_space": False}
    before = document["pre_tokenizer"]
    *first, last = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    if plain.items() <= last.items():
        if not first and last.get("use_regex", True):
            return GPT2
        if len(first) == 1 and first[0]["type"] == "Split" and not last.get("use_regex", True):
            how = (first[0]["behavior"], first[0]["invert"])
            return first[0]["pattern"].get("Regex") if how == ("Isolated", False) else None
    return None


def fast_encoding(tokenizer: Tokenizer, library: tokenizers.Tokenizer) -> Encoding | None:
    """The tokenizer in tiktoken, which is four times as fast; None if it might find other ids.

    tiktoken merges the pair that makes the lowest id, the library the pair that comes first in its
    list of merges. That is the same if the merges make the ids in their order, and the bytes of
    each id, by themselves, become that id.
    """
    document = tokenizer.document
    pattern, model = pattern_of(document), document["model"]
    if pattern is None or model["type"] != "BPE" or model.get("ignore_merges"):
        return None
    ids = {content: id for id, content in enumerate(tokenizer.words) if content}
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    merged = {model["vocab"][token]: token for token in map("".join, pairs)}
    if (
        not all(token["special"] for token in document["added_tokens"])
        or list(merged) != sorted(merged)
        or len(merged) != len(model["merges"])
        or {*merged, *(ids.get(bytes([byte])) for byte in range(256))} != set(ids.values())
        or any([t.id for t in library.model.tokenize(s)] != [id] for id, s in merged.items())
    ):
        return None
    import tiktoken

    return tiktoken.Encoding("ours", pat_str=pattern, mergeable_ranks=ids, special_tokens={})


class Encoder:
    """Turns text into ids, as bytes of the type `code`, in threads on all cores."""

    def __init__(self, tokenizer: Tokenizer, code: str) -> None:
        self.tokenizer, self.code = tokenizer, code
        self.library = published_tokenizer(tokenizer.document)
        normalizer = self.library.normalizer
        # Qwen's changes é of two characters to é of one, which is the same text.
        self.same = str if normalizer is None else normalizer.normalize_str
        self.fast = fast_encoding(tokenizer, self.library)

    def encode(self, pieces: Sequence[str]) -> list[bytes]:
        """The ids of each piece, which must come back from them. A long one is encoded in parts."""
        if max(map(len, pieces), default=0) > LONGEST:
            return [b"".join(chain.from_iterable(map(self.encode, cut(piece)))) for piece in pieces]
        pieces = [self.same(piece) for piece in pieces]
        if self.fast:
            found = self.fast.encode_ordinary_batch(pieces, num_threads=cores())
        else:
            found = self.ask(pieces)
        for piece, ids in zip(pieces, found, strict=True):
            content = b"".join(map(self.tokenizer.words.__getitem__, ids))
            if content != piece.encode():
                back = content.decode(errors="replace")
                differ = (n for n, (a, b) in enumerate(zip(piece, back, strict=False)) if a != b)
                at = next(differ, len(back))
                what = f"{piece[at : at + 20]!r} decodes to {back[at : at + 20]!r}"
                raise InputError(f"the tokenizer changes the text: {what}", "text-changes")
        return [array(self.code, ids).tobytes() for ids in found]

    def ask(self, pieces: Sequence[str]) -> list[list[int]]:
        found = self.library.encode_batch_fast(pieces, add_special_tokens=False)
        return [each.ids for each in found]


def cut(text: str) -> Iterator[list[str]]:
    """A text in parts of LONGEST characters, AT_ONCE at a time."""
    parts = (text[i : i + LONGEST] for i in range(0, len(text) or 1, LONGEST))
    return iter(lambda: list(islice(parts, AT_ONCE)), [])
