"""The safetensors format (huggingface.co/docs/safetensors): reading and writing files."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import FormatError
from .files import open_file, replacing

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Bytes. That of a checkpoint holds the curve, so it may exceed the safetensors library's 100 MB.
LARGEST_HEADER = 1_000_000_000
BLANK_SHA256 = "0" * 64  # stands in the header until all tensors are written


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    contents: Iterable[Tensor] | None = None,
) -> None:
    """Writes the file whole or not at all: under another name first, flushed to disk, renamed.

    `contents` are the same tensors with their values, if these come from elsewhere; they are taken
    and written one by one. A SHA-256 over header and tensors goes into the metadata.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    digest = header_digest(header, metadata)
    header["__metadata__"] = {**metadata, "sha256": BLANK_SHA256}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)

    with replacing(path) as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors.values() if contents is None else contents:
            content = tensor.detach().cpu().contiguous()
            digest.update(memory_of(content))
            file.write(memory_of(content))
        file.seek(8 + encoded.rindex(BLANK_SHA256.encode()))
        file.write(digest.hexdigest().encode())


def read_safetensors(
    path: Path, sealed: bool = False, largest: int = LARGEST_HEADER, mapped: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors (CPU) and the metadata; a SHA-256 in the metadata is checked.

    With `mapped`, the tensors lie in the pages of the file itself, which all processes of a machine
    share.

    Raises FormatError if the file is damaged, its header has more than `largest` bytes, or it has
    no SHA-256 although it is `sealed` by one; OSError if it cannot be read.
    """
    with open_file(path) as file:
        header, metadata = checked_header(file, path, largest)
        begin = file.tell()
        tensors = map_tensors(path, begin, header) if mapped else read_tensors(file, header)

    sha256 = metadata.pop("sha256", None)
    if sha256 is None:
        if sealed:
            raise FormatError(f"{path.name} is damaged: its SHA-256 is missing")
        return tensors, metadata
    digest = header_digest(header, metadata)
    for tensor in tensors.values():
        digest.update(memory_of(tensor))
    if sha256 != digest.hexdigest():
        raise FormatError(f"{path.name} is damaged: its SHA-256 does not match")
    return tensors, metadata


def read_tensors(file: BufferedReader, header: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file, whose data begin where it stands."""
    tensors = {}
    for name, entry in header.items():
        tensors[name] = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        file.readinto(memory_of(tensors[name]))
    return tensors


def map_tensors(path: Path, begin: int, header: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory; `begin` is the byte at which their data begin."""
    size = path.stat().st_size
    content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        data = content[begin + first : begin + last]
        if (begin + first) % dtype.itemsize:  # no tensor of this type begins at such an address
            data = data.clone()
        tensors[name] = data.view(dtype).view(entry["shape"])
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file. Raises FormatError if its header is damaged; OSError."""
    with open_file(path) as file:
        _, metadata = checked_header(file, path, LARGEST_HEADER)
    return metadata


def checked_header(
    file: BufferedReader, path: Path, largest: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """As read_header; raises FormatError if the header is damaged, or does not fit the file."""
    try:
        return read_header(file, largest)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError):
        raise FormatError(f"{path.name} is damaged: its header does not fit it") from None


def read_header(file: BufferedReader, largest: int) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors' descriptions, in the order of their data, and the metadata.

    Anybody may have written them, so all that memory is allocated by is checked. Raises ValueError;
    Python and torch may raise other errors.
    """
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(min(length, largest)))
    if length > largest:
        raise ValueError("the header is too long")
    metadata = header.pop("__metadata__", {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the metadata are not text")

    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    end = 0
    for _, entry in entries:
        check_entry(entry, begin=end)
        end = entry["data_offsets"][1]
    if 8 + length + end != os.fstat(file.fileno()).st_size:
        raise ValueError("the data have another size")
    return dict(entries), metadata


def check_entry(entry: Mapping[str, Any], begin: int) -> None:
    """Raises ValueError unless a tensor's data begin there, and are as long as its shape says."""
    first, last = entry["data_offsets"]
    shape, dtype = entry["shape"], DTYPES[entry["dtype"]]
    torch.empty(shape, dtype=dtype, device="meta")  # fails if torch cannot have it
    if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
        raise ValueError("a size or an offset is no whole number")
    if first != begin or last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError("the data are elsewhere, or of another size")


def header_digest(header: Mapping[str, Any], metadata: Mapping[str, str]) -> Any:
    return hashlib.sha256(json.dumps([header, metadata], sort_keys=True).encode())


def memory_of(tensor: Tensor) -> Any:
    """The bytes of a contiguous CPU tensor, to read and to write while the tensor lives."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
