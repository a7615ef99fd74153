"""The files of a model directory, which somebody else may have published."""

from __future__ import annotations

import json
import re
from contextlib import suppress
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


def is_path(place: str) -> bool:
    """Whether a path is meant, not a job: it has a slash, or a model or tokenizer is there."""
    path, marks = path_of(place), ("config.json", "SHA256SUMS", "tokenizer.json")
    return "/" in place or any((path / name).exists() for name in marks)


def model_files(directory: Path) -> list[Path]:
    """The documents that a run reads, and the weights: model.safetensors, or what the index names.

    A link may lead to any file of the user, such as a key. It is followed only to a file that is
    what its name says. Raises InputError.
    """
    index = directory / INDEX
    weights = named_weights(index) if index.exists() else {"model.safetensors"}
    documents = {name for name in DOCUMENTS if (directory / name).exists()}
    paths = [directory / name for name in sorted({"config.json"} | documents | weights)]
    for path in paths:
        problem = "" if path.is_file() else "no such file, or not a regular one"
        if path.is_symlink() and not problem and not is_what_it_says(path):
            problem = f"a link to {path.resolve()}, which is something else"
        if problem:
            raise InputError(f"{path}: {problem}", "not-a-model")
    return paths


def named_weights(index: Path) -> set[str]:
    with suppress(Exception):  # whatever is in it
        names = set(json.loads(read_file(index, LARGEST))["weight_map"].values())
        if all(re.fullmatch(r"[\w.-]+\.safetensors", name) for name in names):
            return names
    raise InputError(f"{index}: it does not name *.safetensors files")


def is_what_it_says(path: Path) -> bool:
    from entry_point.checkpoint import read_header

    with suppress(Exception):  # whatever is in it
        if path.name in DOCUMENTS:
            found = json.loads(read_file(path, LARGEST))
            return isinstance(found, dict) and DOCUMENTS[path.name] in found
        with open_file(path) as file:
            read_header(file, LARGEST)
        return True
    return False
