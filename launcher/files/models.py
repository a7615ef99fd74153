"""The files of a model directory, which somebody else may have published."""

from __future__ import annotations

import json
import re
from pathlib import Path

from entry_point.files import open_file, read_file
from launcher.errors import InputError
from launcher.files.storage import path_of

INDEX = "model.safetensors.index.json"
# What a run reads besides the weights, each with a name that it defines.
DOCUMENTS = {
    "config.json": "model_type",
    "training.json": "config",
    "tokenizer.json": "model",
    "tokenizer_config.json": "tokenizer_class",
    INDEX: "weight_map",
}
LARGEST = 1 << 25  # bytes of a document, or of the header of weights
NOT_PARSED = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError)


def is_path(word: str) -> bool:
    """Whether a word means a path, not a job: it has a slash, or a model or tokenizer is there."""
    path, marks = path_of(word), ("config.json", "SHA256SUMS", "tokenizer.json")
    return "/" in word or any((path / name).exists() for name in marks)


def model_files(directory: Path) -> list[Path]:
    """The documents that a run reads, and the weights: model.safetensors, or what the index names.

    A link may lead to any file of the user, such as a key. It is followed only to a file that is
    what its name says.
    """
    index = directory / INDEX
    weights = named_weights(index) if index.exists() else {"model.safetensors"}
    documents = {name for name in DOCUMENTS if (directory / name).exists()}
    paths = [directory / name for name in sorted(documents | weights)]
    for path in paths:
        if not path.is_file():
            raise InputError(f"{path}: no such file, or not a regular one")
        if path.is_symlink() and not is_what_it_says(path):
            raise InputError(f"{path}: a link to {path.resolve()}, which is something else")
    return paths


def named_weights(index: Path) -> set[str]:
    """The files that an index names. Raises InputError."""
    try:
        names = set(json.loads(read_file(index, LARGEST))["weight_map"].values())
        if all(re.fullmatch(r"[\w.-]+\.safetensors", name) for name in names):
            return names
    except (OSError, *NOT_PARSED):
        pass
    raise InputError(f"{index}: it does not name *.safetensors files")


def is_what_it_says(path: Path) -> bool:
    """Whether a file holds what its name promises."""
    from entry_point.checkpoint import parse_header

    try:
        if path.name in DOCUMENTS:
            found = json.loads(read_file(path, LARGEST))
            return isinstance(found, dict) and DOCUMENTS[path.name] in found
        with open_file(path) as file:
            length = int.from_bytes(file.read(8), "little")
            parse_header(file.read(min(length, LARGEST)), path.stat().st_size - 8 - length)
        return True
    except (OSError, *NOT_PARSED):
        return False
