"""The text as ids: of its characters, or tokens that `upload-data --tokenizer` made."""

from __future__ import annotations

import codecs
import hashlib
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .config import Config
from .container import Container
from .conversations import END_OF_TURN, Packed
from .errors import DataError, counted, os_reason
from .files import (
    LARGEST_TEXT,
    TOO_MUCH_TEXT,
    file_sha256,
    is_text_name,
    member,
    open_file,
    read_json,
)

if TYPE_CHECKING:
    from .distributed import Group


@dataclass(frozen=True)
class Corpus:
    """The text as ids: train and val are of the smallest type that holds the vocabulary."""

    tokenizer: Tokenizer
    train: Ids
    val: Ids
    sha256: str

    @property
    def is_chat(self) -> bool:
        return isinstance(self.train, Packed)


def load_corpus(container: Container, config: Config, group: Group) -> Corpus:
    """The tokens in the channel, or else its text by characters.

    Raises DataError if it is missing, damaged, not UTF-8, or does not fit the config or the model;
    ConfigError if it is not the same on every host.
    """
    models = [container.init_from, container.teacher]
    tokenizers = [read_tokenizer(model) for model in models if model]
    start = tokenizers[0] if tokenizers else None
    corpus = read_corpus(container, config, start)
    advice = "every host needs all of it (on SageMaker: S3DataDistributionType FullyReplicated)"
    group.check_same({"the SHA-256 of the text": corpus.sha256}, advice)
    if any(tokenizer.words != tokenizers[0].words for tokenizer in tokenizers):
        raise DataError("the initial model and the teacher have different tokens")
    problem = misfit(corpus, container, config, start)
    if problem:
        raise DataError(problem)
    return corpus


def read_corpus(container: Container, config: Config, start: Tokenizer | None = None) -> Corpus:
    """As load_corpus, on one host, for any model."""
    directory = container.training
    if directory is None:
        raise DataError("no text: name it with --data FILE")
    if (directory / "meta.json").exists():
        return read_tokens(directory, config)
    return read_text(container, config, start)


def misfit(corpus: Corpus, container: Container, config: Config, start: Tokenizer | None) -> str:
    """Why a run of this config, from the model of `start`, cannot learn from the text; or ''."""
    tokenizer = corpus.tokenizer
    unit = tokenizer.unit
    size = config.block_size
    if start is not None and tokenizer.words != start.words:
        return "the model has other tokens; encode the text: upload-data --tokenizer MODEL"
    if unit == "tokens" and container.validation is not None:
        return "the tokens hold their own validation text; leave out the other channel"
    if config.mask_documents and tokenizer.end is None:
        return "mask_documents needs tokens, whose documents have an end; leave it out"
    if config.short_windows and corpus.is_chat:
        return "short_windows would cut conversations: set short_windows=0"
    if 0 < config.vocab_size < len(tokenizer):
        return f"vocab_size={config.vocab_size}: the text has {len(tokenizer)} different {unit}"
    for name, part in (("training", corpus.train), ("validation", corpus.val)):
        if corpus.is_chat and not len(part):
            return f"no {name} conversation has an answer within block_size={size} tokens"
        if len(part) < size + 1:
            problem = f"the {name} text has {len(part)} {unit}; block_size={size} needs {size + 1}"
            return f"{problem}: add more text, or set a smaller block_size"
    return ""


def read_text(container: Container, config: Config, start: Tokenizer | None) -> Corpus:
    """The text by characters: those of `start`, the initial model's tokenizer, or else its own.

    Without a validation channel, the end of the text is kept for validation, as in
    nanoGPT's data/shakespeare_char/prepare.py.
    """
    sha256 = hashlib.sha256()
    texts: list[list[Tensor]] = []  # each in pieces of code points
    for channel in (container.training, container.validation):
        if channel is not None:
            digest = hashlib.sha256()
            pieces: list[Tensor] = []
            for path in text_files(channel):
                pieces.extend(code_points(path, digest))
            texts.append(pieces)
            sha256.update(digest.hexdigest().encode())

    characters = distinct(chain(*texts))
    vocabulary = characters
    if start is not None and start.unit == "characters":
        vocabulary = torch.tensor([ord(word.decode()) for word in start.words])
    check_characters(characters, vocabulary)
    dtype = torch.uint8 if len(vocabulary) <= 1 << 8 else torch.int32
    id_of_code = torch.zeros(int(vocabulary.max()) + 1, dtype=dtype)
    id_of_code[vocabulary] = torch.arange(len(vocabulary), dtype=dtype)

    train = look_up(id_of_code, texts[0])
    if len(texts) > 1:
        val = look_up(id_of_code, texts[1])
    else:
        n_train = int(len(train) * (1 - config.validation_fraction))
        train, val = train[:n_train], train[n_train:]
    tokenizer = Tokenizer(character_tokenizer("".join(map(chr, vocabulary.tolist()))))
    return Corpus(tokenizer, train, val, sha256.hexdigest())


def check_characters(characters: Tensor, vocabulary: Tensor) -> None:
    """Raises DataError if a text has characters that the vocabulary of a first model lacks."""
    unknown = characters[~torch.isin(characters, vocabulary)].tolist()
    if unknown:
        raise DataError(
            f"the text has {counted(len(unknown), 'character')} that the initial model does not"
            f" know: {', '.join(repr(chr(code)) for code in unknown[:20])}; replace them or leave"
            " them out, or train a new model on tokens (upload-data --tokenizer bpe)"
        )


def text_files(path: Path) -> list[Path]:
    """The file itself, or *.txt and *.md below a directory, sorted.

    Raises DataError if there is no text, or more than LARGEST_TEXT.
    """
    if path.is_file():
        files = [path]
    else:
        files = []
        for file in sorted(path.rglob("*")):
            if is_text_name(file.name) and file.is_file():
                files.append(file)
    size = sum(file.stat().st_size for file in files)
    problem = ""
    if not (path.is_file() or path.is_dir()):
        problem = "no such file or directory"
    elif not size:
        problem = "no text in it" if files else "no *.txt or *.md file in it"
    elif size > LARGEST_TEXT:
        problem = TOO_MUCH_TEXT
    if problem:
        raise DataError(f"{path}: {problem}")
    return files


PIECE = 1 << 22  # bytes of a text at a time, so that what is made of them stays in the cache


def code_points(path: Path, digest: Any) -> Iterator[Tensor]:
    """Yields the characters of a text file in pieces: uint8 [n] if all are ASCII, else int32 [n].

    The digest gets the bytes of the file. Raises DataError if it cannot be read, or is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    position = 0
    is_at_end = False
    try:
        with open_file(path) as file:
            while not is_at_end:
                content = file.read(PIECE)
                is_at_end = not content
                digest.update(content)
                position += len(content)
                text = decoder.decode(content, final=is_at_end)
                if text.isascii():
                    codes, dtype = bytearray(text, "ascii"), torch.uint8
                else:
                    codes, dtype = bytearray(text, "utf-32-le"), torch.int32
                if codes:
                    yield torch.frombuffer(codes, dtype=dtype)
    except OSError as error:
        raise DataError(f"{path}: {os_reason(error)}") from None
    except UnicodeDecodeError as error:
        byte = position - len(error.object) + error.start
        raise DataError(f"{path}: not UTF-8 text (byte {byte})") from None
    digest.update(position.to_bytes(8, "little"))  # the ends of files count too


def distinct(pieces: Iterable[Tensor]) -> Tensor:
    """The different characters of a text, sorted: int64. torch.unique would sort the whole text."""
    counts = (torch.bincount(piece, minlength=1 << 7) for piece in pieces)
    return torch.cat([count.nonzero().flatten() for count in counts]).unique()


def look_up(table: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    """table[codes] of all pieces, one after the other."""
    lengths = [len(piece) for piece in pieces]
    values = torch.empty(sum(lengths), dtype=table.dtype)
    for target, piece in zip(values.split(lengths), pieces, strict=True):
        torch.index_select(table, 0, piece.int(), out=target)
    return values


def read_tokens(directory: Path, config: Config) -> Corpus:
    """The tokens that `upload-data --tokenizer` wrote in shards; meta.json describes them.

    Raises DataError if a file is missing, damaged, or of another tokenizer.
    """
    try:
        meta = read_json(directory / "meta.json")
        tokenizer = Tokenizer(read_json(directory / "tokenizer.json"), meta["end_of_text"])
        dtype = TOKEN_TYPES[meta["dtype"]]
        parts: list[Ids] = []
        for part in ("train", "val"):
            files = []
            for shard in meta[part]["shards"]:
                path = directory / Path(shard["name"]).name
                files.append(map_ids(path, shard["tokens"], dtype, len(tokenizer)))
            parts.append(Shards(files))
    except (KeyError, TypeError) as error:
        raise DataError(f"{directory / 'meta.json'} cannot be read: {error!r}") from None
    if meta["dtype"] == "int32":  # of conversations
        end = tokenizer.special[meta["end_of_text"]]
        parts = [Packed(part[0 : len(part)], end, config.block_size) for part in parts]
    train, val = parts
    return Corpus(tokenizer, train, val, file_sha256(directory / "meta.json"))


# meta.json's type of the ids, and the tensor's of equal width.
TOKEN_TYPES = {"uint16": torch.int16, "uint32": torch.int32, "int32": torch.int32}


def map_ids(path: Path, size: int, dtype: torch.dtype, vocabulary: int) -> Tensor:
    """The ids in a file, read from it as they are used. Raises DataError."""
    if not path.is_file() or path.stat().st_size != size * dtype.itemsize:
        raise DataError(f"{path} is missing or damaged: its size is not that in meta.json")
    # Not shared, since a FUSE mount, as FastFile's, may refuse shared maps.
    ids = torch.from_file(str(path), shared=False, size=size, dtype=dtype)
    # Only the first million ids: on FastFile, to read a shard is to download it.
    first = unsigned(ids[: 1 << 20])
    first = torch.where(first < 0, ~first, first)  # conversations have ~id for what is not learned
    if int(first.max()) >= vocabulary:
        raise DataError(f"{path} has ids beyond the {vocabulary} of the tokenizer")
    return ids


class Shards:
    """Ids in mapped files, as one sequence. They are of int32, or of int16, as which uint16 is."""

    def __init__(self, files: Sequence[Tensor]) -> None:
        self.files = files
        self.ends = list(accumulate(len(file) for file in files))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, span: slice) -> Tensor:
        """The ids from start to stop, which may lie in several files."""
        parts = []
        start = span.start
        while start < span.stop:
            index = bisect(self.ends, start)
            in_file = self.files[index][start - self.ends[index] :]
            part = in_file[: span.stop - start]
            parts.append(part)
            start += len(part)
        return torch.cat(parts)


Ids = Tensor | Shards | Packed


def unsigned(ids: Tensor) -> Tensor:
    """The ids as int64; int16 stands for uint16."""
    return ids.long() & 0xFFFF if ids.dtype == torch.int16 else ids.long()


class Tokenizer:
    """A tokenizer.json (huggingface.co/docs/tokenizers) of characters, or of BPE over bytes.

    words holds the bytes of each id. end_of_text is the token that ends a document, and `end` its
    id; text of characters has neither. `chats`: the model has learned from conversations.
    Raises DataError if it is of another type.
    """

    def __init__(
        self, document: Mapping[str, Any], end_of_text: str | None = None, chats: bool = False
    ) -> None:
        self.document = document
        self.end_of_text = end_of_text
        self.chats = chats
        self.special: dict[str, int] = {}  # ids of tokens that stand for no text
        try:
            self.unit, words = self.read_words(document)
            self.words = [words.get(id, b"") for id in range(max(words) + 1)]
            if end_of_text is not None and end_of_text not in self.special:
                raise ValueError(f"it has no special token {end_of_text!r}, the end of a text")
        except ValueError as error:
            kinds = "BPE over bytes, or of characters"
            raise DataError(f"tokenizer.json is no tokenizer of {kinds}: {error}") from None

        self.end = None if end_of_text is None else self.special[end_of_text]
        self.ends = {self.end, self.special.get(END_OF_TURN) if chats else None}  # of a text
        if self.end is not None:
            self.start = self.end
        elif b"\n" in self.words:
            self.start = self.words.index(b"\n")
        else:
            self.start = 0

    def read_words(self, document: Mapping[str, Any]) -> tuple[str, dict[int, bytes]]:
        """What an id stands for, and the bytes of each id. Raises ValueError."""
        model = member(document, "model", dict)
        vocab = member(model, "vocab", dict)
        tokens = member(document, "added_tokens", list)
        check_ids(vocab.values())
        check_ids(member(token, "id", int) for token in tokens)
        if len(set(vocab.values())) < len(vocab):
            raise ValueError("two words have the same id")

        kind = member(model, "type", str)
        if kind == "WordLevel":
            unit, words = "characters", {id: word.encode() for word, id in vocab.items()}
        elif kind == "BPE":
            unit, words = "tokens", words_of_bytes(vocab)
        else:
            raise ValueError(f"it is of the type {kind}")
        for token in tokens:
            id, content = token["id"], member(token, "content", str)
            if member(token, "special", bool):
                self.special[content] = id
                words[id] = b""
            else:
                words[id] = content.encode()
        if not words:
            raise ValueError("its vocabulary is empty")
        return unit, words

    def __len__(self) -> int:
        return len(self.words)

    def word(self, id: int) -> bytes:
        """The bytes of an id; b"" for a row beyond the vocabulary, as published models have."""
        return self.words[id] if id < len(self.words) else b""

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.word, ids)).decode(errors="replace")


def words_of_bytes(vocab: Mapping[str, int]) -> dict[int, bytes]:
    """The bytes of each id of a byte-level BPE; words with other characters have none."""
    byte_of = byte_characters()
    words = {}
    for word, id in vocab.items():
        if byte_of.keys() >= set(word):
            words[id] = bytes(byte_of[character] for character in word)
    return words


LARGEST_VOCABULARY = 1 << 21  # ids; there are 1.1 million characters


def check_ids(ids: Iterable[Any]) -> None:
    """Raises ValueError unless all are whole numbers below LARGEST_VOCABULARY."""
    for id in ids:
        if type(id) is not int or not 0 <= id < LARGEST_VOCABULARY:
            raise ValueError(f"the id {id!r} is no whole number from 0 to {LARGEST_VOCABULARY - 1}")


def byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level BPE stands for, as in GPT-2's encoder.py.

    Printable bytes stand for themselves; the others, in order, have characters from 256.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    for number, byte in enumerate(others):
        byte_of[chr(256 + number)] = byte
    return byte_of


def character_tokenizer(vocabulary: str) -> dict[str, Any]:
    """tokenizer.json of one token per character, given back exactly.

    The format needs an unknown token in the vocabulary, or other tools raise an error for an
    unknown character; a space is the least harmful. Our own sampler refuses such characters.
    """
    vocab = {character: index for index, character in enumerate(vocabulary)}
    unknown = " " if " " in vocab else vocabulary[0]
    return dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=[],
        normalizer=None,
        pre_tokenizer=dict(
            type="Split", pattern={"Regex": r"[\s\S]"}, behavior="Isolated", invert=False
        ),
        post_processor=None,
        decoder={"type": "Fuse"},
        model=dict(type="WordLevel", vocab=vocab, unk_token=unknown),
    )


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of the model in a directory. Raises DataError."""
    end_of_text = read_json(directory / "tokenizer_config.json").get("eos_token")
    if isinstance(end_of_text, dict):
        end_of_text = end_of_text.get("content")
    if not isinstance(end_of_text, str | None):
        raise DataError(f"{directory / 'tokenizer_config.json'}: eos_token is no string")
    return Tokenizer(read_json(directory / "tokenizer.json"), end_of_text)
