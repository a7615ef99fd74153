"""The files of a model directory, which somebody else may have published."""

from __future__ import annotations

import json
import re
from pathlib import Path

from entry_point.files import open_file, read_file
from launcher.errors import InputError

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


def model_files(directory: Path) -> list[Path]:
    """The documents that a run reads, and the weights: model.safetensors, or what the index names.

    A link may lead to any file of the user, such as a key. It is followed only to a file that is
    what its name says.

    Raises:
        InputError: one is missing, or is something else.
    """
    weights = {"model.safetensors"}
    if (index := directory / INDEX).exists():
        try:
            weights = set(json.loads(read_file(index, LARGEST))["weight_map"].values())
            if not all(re.fullmatch(r"[\w.-]+\.safetensors", name) for name in weights):
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError(f"{index}: it does not name *.safetensors files") from None
    documents = {name for name in DOCUMENTS if (directory / name).exists()}
    paths = [directory / name for name in sorted(documents | weights)]
    for path in paths:
        try:
            with open_file(path):  # a regular file
                pass
            if path.is_symlink():
                check_kind(path)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError):
            kind = "such document" if path.name in DOCUMENTS else "safetensors file"
            raise InputError(f"{path}: it links to {path.resolve()}, which is no {kind}") from None
    return paths


def check_kind(path: Path) -> None:
    """Parse a file as far as to know that it is what its name says; errors of many types say no."""
    from entry_point.checkpoint import parse_header

    if path.name in DOCUMENTS:
        if DOCUMENTS[path.name] not in json.loads(read_file(path, LARGEST)):
            raise KeyError
        return
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LARGEST:
            raise ValueError
        parse_header(file.read(length), path.stat().st_size - 8 - length)
