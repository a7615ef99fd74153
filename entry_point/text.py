"""The text: characters, or tokens that `upload-data --tokenizer` made."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .config import Config
from .container import Container
from .conversations import END_OF_TURN, Packed, pack
from .errors import DataError, counted
from .files import open_file, read_file

if TYPE_CHECKING:
    from .distributed import Group


@dataclass(frozen=True)
class Corpus:
    """The text as ids: train and val are 1-D, of the smallest type that holds the vocabulary."""

    tokenizer: Tokenizer
    train: Tensor | Shards | Packed
    val: Tensor | Shards | Packed
    sha256: str

    @property
    def is_chat(self) -> bool:
        return isinstance(self.train, Packed)


def load_corpus(container: Container, config: Config, group: Group) -> Corpus:
    """The tokens in the channel, or else its text by characters.

    Raises:
        DataError: text is missing, unreadable, not UTF-8, or too short.
        ConfigError: it is not the same on every host.
    """
    if container.training is None:
        raise DataError("no text: name it with --data FILE")
    start = read_tokenizer(container.init_from) if container.init_from else None
    tokens = (container.training / "meta.json").exists()
    if start is not None and start.unit == "tokens" and not tokens:
        raise DataError(
            f"the initial model was trained on subword tokens, and this is text; {ENCODE_AGAIN}"
        )
    corpus = read_tokens(container, config) if tokens else read_text(container, config, start)
    if start is not None and corpus.tokenizer.words != start.words:
        raise DataError(f"the tokens are not those of the initial model; {ENCODE_AGAIN}")
    advice = "every host needs all of it (on SageMaker: S3DataDistributionType FullyReplicated)"
    group.check_same({"the SHA-256 of the text": corpus.sha256}, advice)
    if config.mask_documents and corpus.tokenizer.end is None:
        raise DataError("mask_documents needs tokens, whose documents have an end; leave it out")
    if 0 < config.vocab_size < len(corpus.tokenizer):
        raise DataError(
            f"vocab_size={config.vocab_size}: the text has {len(corpus.tokenizer)} different"
            f" {corpus.tokenizer.unit}"
        )
    for name, part in (("training", corpus.train), ("validation", corpus.val)):
        if len(part) < config.block_size + 1:
            raise DataError(
                f"the {name} text has {len(part)} {corpus.tokenizer.unit}, and one window of"
                f" block_size={config.block_size} needs {config.block_size + 1};"
                " add more text, or set a smaller block_size"
            )
    return corpus


ENCODE_AGAIN = "encode the text with its tokenizer, by upload-data --tokenizer"


def read_text(container: Container, config: Config, start: Tokenizer | None) -> Corpus:
    """The text by characters: those of `start`, the initial model's tokenizer, or else its own.

    Without a validation channel, the end of the text is kept for validation, as in
    nanoGPT's data/shakespeare_char/prepare.py.
    """
    sha256, parts = hashlib.sha256(), []
    for channel in (container.training, container.validation):
        if channel is None:
            continue
        digest = hashlib.sha256()
        parts.append([piece for path in text_files(channel) for piece in code_points(path, digest)])
        if not parts[-1]:
            raise DataError(f"{channel}: no text in it")
        sha256.update(digest.hexdigest().encode())
    seen = torch.cat([distinct(part) for part in parts]).unique()
    characters = [] if start is None else [word.decode() for word in start.words]
    if any(len(character) != 1 for character in characters):
        raise DataError("the initial model has words, not characters, and this is text")
    known = seen if start is None else torch.tensor([*map(ord, characters)])
    if unknown := seen[~torch.isin(seen, known)].tolist():
        raise DataError(
            f"the text has {counted(len(unknown), 'character')} that the initial model does not"
            f" know: {', '.join(repr(chr(code)) for code in unknown[:20])}"
        )
    dtype = torch.uint8 if len(known) <= 1 << 8 else torch.int32
    ids = torch.zeros(int(known.max()) + 1, dtype=dtype)
    ids[known] = torch.arange(len(known), dtype=dtype)
    train, *rest = [look_up(ids, part) for part in parts]
    if not rest:
        n_train = int(len(train) * (1 - config.validation_fraction))
        train, rest = train[:n_train], [train[n_train:]]
    tokenizer = Tokenizer(character_tokenizer("".join(map(chr, known.tolist()))))
    return Corpus(tokenizer, train, rest[0], sha256.hexdigest())


def text_files(path: Path) -> list[Path]:
    """The file itself, or *.txt and *.md below a directory, sorted. Raises DataError for none."""
    if path.is_file():
        return [path]
    ends = (".txt", ".md")
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in ends and p.is_file())
    if not files:
        there = "no *.txt or *.md file in it" if path.is_dir() else "no such file or directory"
        raise DataError(f"{path}: {there}")
    return files


PIECE = 1 << 22  # bytes of a text at a time, so that what is made of them stays in the cache


def code_points(path: Path, digest: Any) -> Iterator[Tensor]:
    """Yield the characters of a text file in pieces: uint8 [n] if all are ASCII, else int32 [n].

    The digest gets the bytes of the file. Raises DataError if it cannot be read, or is not UTF-8.
    """
    decoder, position, content = codecs.getincrementaldecoder("utf-8-sig")(), 0, b" "
    try:
        with open_file(path) as file:
            while content:
                content = file.read(PIECE)
                digest.update(content)
                position += len(content)
                text = decoder.decode(content, final=not content)
                if text:
                    ascii_only = text.isascii()
                    codes = bytearray(text, "ascii" if ascii_only else "utf-32-le")
                    yield torch.frombuffer(codes, dtype=torch.uint8 if ascii_only else torch.int32)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = position - len(error.object) + error.start
        raise DataError(f"{path}: not UTF-8 text (byte {byte})") from None
    digest.update(position.to_bytes(8, "little"))  # the ends of files count too


def distinct(pieces: Sequence[Tensor]) -> Tensor:
    """The different characters of a text, sorted: int64. torch.unique would sort the whole text."""
    counts = (torch.bincount(piece, minlength=1 << 7) for piece in pieces)
    return torch.cat([count.nonzero().flatten() for count in counts]).unique()


def look_up(table: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    """table[codes] of all pieces, one after the other."""
    found = torch.empty(sum(map(len, pieces)), dtype=table.dtype)
    for into, piece in zip(found.split([len(piece) for piece in pieces]), pieces, strict=True):
        torch.index_select(table, 0, piece.int(), out=into)
    return found


def read_tokens(container: Container, config: Config) -> Corpus:
    """Maps the shards that `upload-data --tokenizer` wrote; meta.json describes them."""
    directory = container.training
    assert directory is not None
    if container.validation is not None:
        raise DataError("the tokens hold their own validation text; leave out the other channel")
    try:
        meta = read_json(directory / "meta.json")
        tokenizer = Tokenizer(read_json(directory / "tokenizer.json"), meta["end_of_text"])
        dtypes = {"uint16": torch.int16, "uint32": torch.int32, "int32": torch.int32}
        dtype, chats = dtypes[meta["dtype"]], meta["dtype"] == "int32"
        parts = []
        for name in ("train", "val"):
            shards = []
            for shard in meta[name]["shards"]:
                path = directory / plain_name(shard["name"])
                shards.append(mapped(path, shard["tokens"], dtype))
                if not len(shards[-1]) <= len(shards[0]) == len(shards[max(0, len(shards) - 2)]):
                    raise DataError(f"{path}: only the last shard may be shorter than the others")
                # Only the first million ids: on FastFile, to read a shard is to download it.
                first = unsigned(shards[-1][: 1 << 20])
                if int((first ^ (first >> 63)).max()) >= len(tokenizer):
                    raise DataError(f"{path} has ids beyond the {len(tokenizer)} of the tokenizer")
            ends = tokenizer.end, tokenizer.special.get(END_OF_TURN)
            parts.append(pack(name, torch.cat(shards), *ends, config) if chats else Shards(shards))
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{directory / 'meta.json'} cannot be read: {error!r}") from None
    sha256 = hashlib.sha256((directory / "meta.json").read_bytes()).hexdigest()
    return Corpus(tokenizer, parts[0], parts[1], sha256)


def mapped(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    """The ids in a file, read from it as they are used. Raises DataError."""
    if path.stat().st_size != size * dtype.itemsize:
        raise DataError(f"{path} is damaged: its size is not that in meta.json")
    try:  # not shared, since a FUSE mount, as FastFile's, may refuse shared maps
        return torch.from_file(str(path), shared=False, size=size, dtype=dtype)
    except RuntimeError as error:
        raise DataError(f"{path}: {error}; --input-mode File copies it first") from None


class Shards:
    """Ids in files of equal length (but the last), mapped into memory; one sequence, as a tensor.

    They are of int16, which may stand for uint16, or int32.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts, self.each = parts, len(parts[0])

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, places: Tensor) -> Tensor:
        found = torch.empty_like(places, dtype=self.parts[0].dtype)
        shards = places // self.each
        for index in shards.unique().tolist():
            here = shards == index
            found[here] = self.parts[index][places[here] - index * self.each]
        return found


def unsigned(ids: Tensor) -> Tensor:
    """The ids as int64; int16 stands for uint16."""
    return ids.long() & 0xFFFF if ids.dtype == torch.int16 else ids.long()


def plain_name(name: Any) -> str:
    """The name of a file. Raises DataError if it may lie in another directory."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise DataError(f"{name!r} is no plain name of a file")
    return name


MOST_IDS = 1 << 20


class Tokenizer:
    """A tokenizer.json (huggingface.co/docs/tokenizers) of characters, or of BPE over bytes.

    words holds the bytes of each id. end_of_text is the token that ends a document, and `end` its
    id; text of characters has neither. `chats`: the model has learned from conversations.
    Raises DataError if it is of another type.
    """

    def __init__(
        self, document: Mapping[str, Any], end_of_text: str | None = None, chats: bool = False
    ) -> None:
        self.document, self.end_of_text, self.chats = document, end_of_text, chats
        try:
            vocab, added = document["model"]["vocab"], document["added_tokens"]
            special = {token["id"]: token["content"] for token in added if token["special"]}
            if self.unit == "characters":
                if sorted(vocab.values()) != [*range(len(vocab))]:
                    raise DataError("tokenizer.json lacks an id, or has one twice")
                words = {id: word.encode() for word, id in vocab.items()}
            else:
                byte = byte_characters()
                plain = (word for word in vocab if byte.keys() >= set(word))
                words = {vocab[word]: bytes(byte[c] for c in word) for word in plain}
            words |= {t["id"]: t["content"].encode() for t in added if not t["special"]}
            size = max([*words, *special]) + 1
            if size > MOST_IDS:
                raise DataError(f"tokenizer.json has ids up to {size}")
            self.words = [b"" if id in special else words.get(id, b"") for id in range(size)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"tokenizer.json cannot be read: {error!r}") from None
        ends = [id for id, content in special.items() if content == end_of_text]
        if end_of_text is not None and not ends:
            raise DataError(f"tokenizer.json has no special token {end_of_text!r}")
        self.end = ends[0] if ends else None
        self.special = {content: id for id, content in special.items()}
        self.ends = {self.end, self.special.get(END_OF_TURN) if chats else None}  # of a text
        first = self.words.index(b"\n") if b"\n" in self.words else 0
        self.start = first if self.end is None else self.end

    def __len__(self) -> int:
        return len(self.words)

    @property
    def unit(self) -> str:
        units = {"WordLevel": "characters", "BPE": "tokens"}
        if (model := self.document["model"]["type"]) not in units:
            raise DataError(f"tokenizer.json is of {model}, and must be of BPE over bytes")
        return units[model]

    def word(self, id: int) -> bytes:
        """The bytes of an id; b"" for a row beyond the vocabulary, as published models have."""
        return self.words[id] if id < len(self.words) else b""

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.word, ids)).decode(errors="replace")


def byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level BPE stands for, as in GPT-2's encoder.py.

    Printable bytes stand for themselves; the others, in order, have characters from 256.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


def character_tokenizer(vocabulary: str) -> dict[str, Any]:
    """tokenizer.json of one token per character, given back exactly.

    The format needs an unknown token in the vocabulary, or other tools raise an error for an
    unknown character; a space is the least harmful. Our own sampler refuses such characters.
    """
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {character: index for index, character in enumerate(vocabulary)},
            "unk_token": " " if " " in vocabulary else vocabulary[0],
        },
    }


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of the model in a directory. Raises DataError."""
    end = read_json(directory / "tokenizer_config.json").get("eos_token")
    end = end["content"] if isinstance(end, dict) else end
    return Tokenizer(read_json(directory / "tokenizer.json"), end)


LARGEST_JSON = 1 << 25  # bytes; a tokenizer of 150,000 ids has a third of that


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises DataError."""
    try:
        found = json.loads(read_file(path, LARGEST_JSON))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object")
    return found
