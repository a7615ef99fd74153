"""Texts, tokenizers, and uploads of tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sm_nanogpt.entry_point.command_line import Options
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.container import Ranks, read_container
from sm_nanogpt.entry_point.distributed import Group
from sm_nanogpt.entry_point.text import Corpus, Tokenizer, load_corpus
from sm_nanogpt.launcher.models.encoder import Encoder
from sm_nanogpt.launcher.text import tokens
from sm_nanogpt.launcher.text.documents import survey_documents
from sm_nanogpt.launcher.text.files import FileOptions, find_files
from sm_nanogpt.launcher.text.sources import TextSource
from sm_nanogpt.launcher.text.tokenizer import END_OF_TEXT, learn_tokenizer

STRANGE = "naïve\tcafé\r\n“Жук” 漢字 🙂👩‍🚀 \x00\x7f\u2028 <|endoftext|> end\n"
FOX = "The quick brown fox jumps over the lazy dog.\n"
NUMBERS = " ".join(map(str, range(9000))).encode()
BPE = ("--tokenizer", "bpe", "--vocab-size", "400")


def encode_text(path: Path, tokenizer: Tokenizer, directory: Path) -> Path:
    files = find_files([TextSource(path)], FileOptions(records=True))
    tokens.encode(files, survey_documents(files), tokenizer, directory, lambda n: None)
    return directory


def stories(count: int) -> list[str]:
    draw = random.Random(7)
    return [
        f"{number}: " + " ".join(draw.sample(FOX.split() * 3, 20)) + "\n" + STRANGE
        for number in range(count)
    ]


def corpus_of(directory: Path, validation: Path | None = None, **values: Any) -> Corpus:
    options = Options(data=str(directory), validation=str(validation or ""))
    container = read_container({}, options)
    group = Group(Ranks(0, 1, 0, 1, "hand"), torch.device("cpu"), container)
    return load_corpus(container, Config(**{"block_size": 8, **values}), group)


def ids_of(part: Any) -> list[int]:
    return (part[0 : len(part)].long() & 0xFFFF).tolist()


def documents_of(corpus: Corpus, part: Any) -> list[str]:
    texts: list[str] = []
    ids: list[int] = []
    for id in ids_of(part):
        if id == corpus.tokenizer.end:
            texts.append(corpus.tokenizer.decode(ids))
            ids = []
        else:
            ids.append(id)
    assert not ids
    return texts


GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


QWEN = LLAMA_3.replace("{1,3}", "")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def split(pattern: str) -> dict[str, Any]:
    by = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [by, {**BYTE_LEVEL, "use_regex": False}]}


def encoder_of(document: Any) -> Encoder:
    return Encoder(Tokenizer(document, END_OF_TEXT), "H")


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """A collection of 300 documents, a line each."""
    path = tmp_path_factory.mktemp("documents") / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in stories(300)))
    return path


@pytest.fixture(scope="session")
def tokenizer(documents):
    return learn_tokenizer(find_files([TextSource(documents)], FileOptions(records=True)), 400)
