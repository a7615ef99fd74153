"""Small models with random weights, for the tests of what computes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from sm_nanogpt.entry_point.command_line import Options
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.container import Ranks, read_container
from sm_nanogpt.entry_point.distributed import Group
from sm_nanogpt.entry_point.huggingface import SCRIPT_SHA256, write_artefact
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.optim import Optimizer
from sm_nanogpt.entry_point.text import Tokenizer, character_tokenizer

SMALL = Config(n_layer=2, n_head=2, n_embd=16, block_size=8, batch_size=12)
VOCABULARY_SIZE = 11


def tokenizer_of(vocabulary: str) -> Tokenizer:
    """A tokenizer of characters."""
    return Tokenizer(character_tokenizer(vocabulary))


def characters(tokenizer: Tokenizer) -> str:
    """The vocabulary of a tokenizer of characters."""
    return b"".join(tokenizer.words).decode()


def lively(
    config: Config = SMALL,
    dtype: torch.dtype = torch.float32,
    vocabulary_size: int = VOCABULARY_SIZE,
) -> GPT:
    """A model none of whose parts is idle; before training some projections are zero."""
    model = GPT(config, vocabulary_size, dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY_SIZE, shape, generator=generator)


def alone() -> Group:
    """The group of a process that trains alone."""
    container = read_container({}, Options(data="none"))
    return Group(Ranks(0, 1, 0, 1, "hand"), torch.device("cpu"), container)


def optimizer_of(model: GPT) -> Optimizer:
    return Optimizer(model, model.config, alone())


def some_model(directory: Path) -> Path:
    """The directory of a model that nobody trained."""
    trained = {"script_sha256": SCRIPT_SHA256, "corpus_sha256": "0" * 64, "step": 1}
    write_artefact(directory, lively(), tokenizer_of("\n abcdefghi"), trained)
    return directory


def small_config(**values: Any) -> Config:
    """The small configuration, with some values changed."""
    return dataclasses.replace(SMALL, **values)
