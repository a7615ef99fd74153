"""Check the files of a model directory, which a stranger may have published."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from sm_nanogpt.entry_point.files import open_file, read_file
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.storage import path_of

INDEX = "model.safetensors.index.json"
# The documents that a run reads besides the weights, each with a field that it has.
DOCUMENTS = {
    "config.json": "model_type",
    "training.json": "config",
    "tokenizer.json": "model",
    "tokenizer_config.json": "tokenizer_class",
    INDEX: "weight_map",
}
MARKERS = ("config.json", "SHA256SUMS", "tokenizer.json")  # a model directory has one of them
MAX_BYTES = 1 << 25  # of a document, or of the header of a file of weights


def is_path(typed: str) -> bool:
    """True if a user typed a path, and not a job: a text with a slash, or the directory of a model
    or a tokenizer."""
    if "/" in typed:
        return True
    directory = path_of(typed)
    return any((directory / name).exists() for name in MARKERS)


def model_files(directory: Path) -> list[Path]:
    """The documents that a run reads, and the weights: model.safetensors, or those of the index.

    A link may lead to any file of the user, such as a key. So it is followed only to a file whose
    content fits the name of the link. Raises InputError.
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
    with suppress(Exception):  # the file may hold anything
        names = set(json.loads(read_file(index, MAX_BYTES))["weight_map"].values())
        if all(re.fullmatch(r"[\w.-]+\.safetensors", name) for name in names):
            return names
    raise InputError(f"{index}: it does not name *.safetensors files")


def check_model_file(path: Path) -> None:
    """Raise InputError if a path is no file, or a link to a file whose content does not fit its
    name."""
    if not path.is_file():
        problem = "no such file, or not a regular one"
    elif path.is_symlink() and not fits_name(path):
        problem = f"a link to {path.resolve()}, which is something else"
    else:
        return
    raise InputError(f"{path}: {problem}", code="not-a-model")


def fits_name(path: Path) -> bool:
    """True if the content of a file fits its name: a document of DOCUMENTS, or safetensors."""
    from sm_nanogpt.entry_point.safetensors_file import read_header

    with suppress(Exception):  # the file may hold anything
        if path.name in DOCUMENTS:
            document = json.loads(read_file(path, MAX_BYTES))
            return isinstance(document, dict) and DOCUMENTS[path.name] in document
        with open_file(path) as file:
            read_header(file, MAX_BYTES)
        return True
    return False
