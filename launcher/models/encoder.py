"""Encode text by the tokenizer of a tokenizer.json."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sm_nanogpt.entry_point.cores import cores
from sm_nanogpt.entry_point.files import member
from sm_nanogpt.launcher.errors import InputError

if TYPE_CHECKING:
    import tokenizers
    from tiktoken import Encoding

    from sm_nanogpt.entry_point.text import Tokenizer

# The expressions by which tokenizers split a text: of GPT-2, Qwen, Llama 3, and Qwen3.5. The last
# keeps combining marks with their letters, as Hindi, Thai, or Arabic with vowels need it. The last
# in PATTERNS is that of our tokenizers of characters.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN35_PATTERN = QWEN_PATTERN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}", r"[^\s\p{L}\p{M}"
)
PATTERNS = (GPT2_PATTERN, QWEN_PATTERN, LLAMA3_PATTERN, QWEN35_PATTERN, r"[\s\S]")

# Characters that are encoded as one string: tiktoken panics at a million spaces, and ids take far
# more memory than their text.
MAX_PIECE = 1 << 18
PIECES_PER_BATCH = 16  # threads share them
ASSISTANT_PREFIX = "assistant\n"  # the beginning of a turn of the assistant


def published_tokenizer(document: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Make the library's tokenizer of a tokenizer.json. It encodes special tokens as plain text.

    The library gets only the parts that encode, in the form of published tokenizers of BPE over
    bytes. Other parts of a stranger's file could abort the process, or take any time and memory.
    Raises InputError if the file has another form.
    """
    from tokenizers import Tokenizer

    try:
        check_document(document)
        tokenizer = Tokenizer.from_str(json.dumps(encoding_parts(document)))
    except Exception as error:  # the library raises no class of its own
        raise InputError(f"tokenizer.json {error}") from None
    tokenizer.encode_special_tokens = True
    return tokenizer


def check_document(document: Mapping[str, Any]) -> None:
    """Raise ValueError if a tokenizer.json has an unknown form, or may change a text."""
    if document.get("pre_tokenizer") is None:
        raise ValueError("has no pre_tokenizer, which splits a text")
    steps = splitting_steps(document)
    if not steps:
        raise ValueError("has a pre_tokenizer without steps")
    model = member(document, "model", dict)
    vocab = member(model, "vocab", dict)
    unknown_token = model.get("unk_token")
    if unknown_token is not None and unknown_token not in vocab:
        raise ValueError(f"has the unk_token {unknown_token!r}, which its vocabulary lacks")
    normalizer = document.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}):
        kind = normalizer.get("type") if isinstance(normalizer, dict) else normalizer
        raise ValueError(f"has a normalizer, {kind}, that may change the text")
    for step in steps:
        if not is_known_step(step):
            raise ValueError(f"splits text in an unknown way: {json.dumps(step)}")


def is_known_step(step: Any) -> bool:
    """Return True if a step only splits a text, in a way that is known here."""
    if not isinstance(step, dict):
        return False
    if step.get("type") != "Split":
        return step.get("type") in ("ByteLevel", "Digits")
    pattern = step.get("pattern")
    return isinstance(pattern, dict) and pattern.get("Regex") in PATTERNS


def splitting_steps(document: Mapping[str, Any]) -> list[Any]:
    """Return the steps in which a tokenizer.json splits a text before it merges bytes.

    Raises ValueError if the steps are no list.
    """
    pre_tokenizer = document["pre_tokenizer"]
    if isinstance(pre_tokenizer, dict) and pre_tokenizer.get("type") == "Sequence":
        return member(pre_tokenizer, "pretokenizers", list)
    return [pre_tokenizer]


def encoding_parts(document: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a tokenizer.json that determine how a text is encoded."""
    parts: dict[str, Any] = {"version": "1.0"}
    for name in ("added_tokens", "normalizer", "pre_tokenizer"):
        parts[name] = document.get(name)
    model = {}
    for name in ("type", "vocab", "merges", "ignore_merges", "unk_token"):
        if document["model"].get(name) is not None:
            model[name] = document["model"][name]
    parts["model"] = model
    return parts


def pattern_of(document: Mapping[str, Any]) -> str | None:
    """Return the one expression by which a tokenizer.json splits a text.

    None if it splits the text in another way: by several expressions, or after a space was put in
    front of it.
    """
    *earlier_steps, byte_step = splitting_steps(document)
    if byte_step.get("type") != "ByteLevel" or byte_step.get("add_prefix_space") is not False:
        return None
    byte_step_splits = byte_step.get("use_regex", True)
    if not earlier_steps:
        return GPT2_PATTERN if byte_step_splits else None
    if len(earlier_steps) > 1 or byte_step_splits:
        return None
    return pattern_of_split(earlier_steps[0])


def pattern_of_split(step: Mapping[str, Any]) -> str | None:
    """The expression of a step that keeps each match as one piece; None for another step."""
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"] is not False:
        return None
    pattern: str | None = step["pattern"].get("Regex")
    return pattern


def tiktoken_encoding(tokenizer: Tokenizer, library: tokenizers.Tokenizer) -> Encoding | None:
    """Make the tokenizer for tiktoken, which is four times as fast as the library.

    Returns None if its ids might differ from the library's ids.
    """
    document = tokenizer.document
    model = document["model"]
    pattern = pattern_of(document)
    if pattern is None or model["type"] != "BPE" or model.get("ignore_merges"):
        return None
    if not all(token["special"] for token in document["added_tokens"]):
        return None
    ids = {content: id for id, content in enumerate(tokenizer.words) if content}
    if not gives_same_ids(model, ids, library):
        return None

    import tiktoken

    return tiktoken.Encoding("ours", pat_str=pattern, mergeable_ranks=ids, special_tokens={})


def gives_same_ids(
    model: Mapping[str, Any], ids: Mapping[bytes, int], library: tokenizers.Tokenizer
) -> bool:
    """Return True if tiktoken gives the same ids as the library.

    tiktoken first merges the pair with the lowest id, and the library the pair that comes first in
    its list of merges. Both are the same if the list makes ids in rising order, and if the bytes of
    each id, encoded alone, give that id. `ids` has the id of each token by its bytes.
    """
    merged_tokens = {}  # by id
    for pair in model["merges"]:
        parts = pair.split(" ") if isinstance(pair, str) else pair
        token = "".join(parts)
        merged_tokens[model["vocab"][token]] = token
    merged_ids = list(merged_tokens)
    if merged_ids != sorted(merged_ids) or len(merged_ids) != len(model["merges"]):
        return False
    byte_ids = [ids.get(bytes([byte])) for byte in range(256)]
    if {*merged_ids, *byte_ids} != set(ids.values()):
        return False
    for id, token in merged_tokens.items():
        if [part.id for part in library.model.tokenize(token)] != [id]:
            return False
    return True


class Encoder:
    """Encodes texts as ids, in threads on all cores. type_code: of an id, as for array."""

    def __init__(self, tokenizer: Tokenizer, type_code: str) -> None:
        self.tokenizer = tokenizer
        self.type_code = type_code
        self.library = published_tokenizer(tokenizer.document)
        normalizer = self.library.normalizer
        # Qwen's normalizer makes one character of é in two characters. It is the same text.
        self.normalize = str if normalizer is None else normalizer.normalize_str
        self.fast = tiktoken_encoding(tokenizer, self.library)

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Encode each text as the bytes of its ids. A long text is encoded in pieces.

        Raises InputError if the ids do not decode to the text.
        """
        if any(len(text) > MAX_PIECE for text in texts):
            return [self.encode_in_pieces(text) for text in texts]
        texts = [self.normalize(text) for text in texts]
        contents = []
        for text, ids in zip(texts, self.encode_batch(texts), strict=True):
            self.check_decodes(ids, text)
            contents.append(array(self.type_code, ids).tobytes())
        return contents

    def encode_in_pieces(self, text: str) -> bytes:
        ids = b""
        for pieces in piece_batches(text):
            ids += b"".join(self.encode(pieces))
        return ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if self.fast is not None:
            return self.fast.encode_ordinary_batch(texts, num_threads=cores())
        return self.encode_by_library(texts)

    def encode_by_library(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self.library.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def check_decodes(self, ids: Sequence[int], text: str) -> None:
        """Raise InputError, with the first difference, if ids do not decode to `text`."""
        content = b"".join([self.tokenizer.words[id] for id in ids])
        if content == text.encode():
            return
        decoded = content.decode(errors="replace")
        start = 0
        for character, decoded_character in zip(text, decoded, strict=False):
            if character != decoded_character:
                break
            start += 1
        change = f"{text[start : start + 20]!r} decodes to {decoded[start : start + 20]!r}"
        raise InputError(f"the tokenizer changes the text: {change}", code="text-changes")


def piece_batches(text: str) -> Iterator[list[str]]:
    """Yield a text in pieces of MAX_PIECE characters, PIECES_PER_BATCH at a time."""
    starts = range(0, len(text), MAX_PIECE)
    for first in range(0, len(starts), PIECES_PER_BATCH):
        batch = starts[first : first + PIECES_PER_BATCH]
        yield [text[start : start + MAX_PIECE] for start in batch]
