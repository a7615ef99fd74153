"""The files of a model directory, which somebody else may have published."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from sm_nanogpt.entry_point.files import open_file, read_file
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.storage import path_of

INDEX = "model.safetensors.index.json"
# What a run reads besides the weights, each with a name that it defines.
DOCUMENTS = {
    "config.json": "model_type",
    "training.json": "config",
    "tokenizer.json": "model",
    "tokenizer_config.json": "tokenizer_class",
    INDEX: "weight_map",
}
MARKERS = ("config.json", "SHA256SUMS", "tokenizer.json")  # a directory of a model has one
MAX_BYTES = 1 << 25  # of a document, or of the header of weights


def is_path(typed: str) -> bool:
    """True if a user typed a path and not a job: with a slash, or of a model or tokenizer."""
    if "/" in typed:
        return True
    directory = path_of(typed)
    return any((directory / name).exists() for name in MARKERS)


def model_files(directory: Path) -> list[Path]:
    """The documents that a run reads, and the weights: model.safetensors, or those of the index.

    A link may lead to any file of the user, such as a key. It is followed only to a file whose
    content is what its name says. Raises InputError.
    """
    names = {"config.json"}
    names.update(name for name in DOCUMENTS if (directory / name).exists())
    if INDEX in names:
        names |= weights_of_index(directory / INDEX)
    else:
        names.add("model.safetensors")
    paths = [directory / name for name in sorted(names)]
    for path in paths:
        check_model_file(path)
    return paths


def weights_of_index(index: Path) -> set[str]:
    """The names of the files of weights that an index lists. Raises InputError."""
    with suppress(Exception):  # whatever is in it
        names = set(json.loads(read_file(index, MAX_BYTES))["weight_map"].values())
        if all(re.fullmatch(r"[\w.-]+\.safetensors", name) for name in names):
            return names
    raise InputError(f"{index}: it does not name *.safetensors files")


def check_model_file(path: Path) -> None:
    """Raise InputError if a path is no file, or links to something that its name does not say."""
    if not path.is_file():
        problem = "no such file, or not a regular one"
    elif path.is_symlink() and not fits_name(path):
        problem = f"a link to {path.resolve()}, which is something else"
    else:
        return
    raise InputError(f"{path}: {problem}", "not-a-model")


def fits_name(path: Path) -> bool:
    """True if a file holds what its name says: a document of DOCUMENTS, or safetensors."""
    from sm_nanogpt.entry_point.safetensors_file import read_header

    with suppress(Exception):  # whatever is in it
        if path.name in DOCUMENTS:
            document = json.loads(read_file(path, MAX_BYTES))
            return isinstance(document, dict) and DOCUMENTS[path.name] in document
        with open_file(path) as file:
            read_header(file, MAX_BYTES)
        return True
    return False
