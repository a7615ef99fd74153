"""Sample, write, and decode a text that is ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sm_nanogpt.entry_point.files import file_sha256
from sm_nanogpt.entry_point.text import Ids, Tokenizer, unsigned
from sm_nanogpt.launcher.files.storage import json_bytes

IDS_AT_ONCE = 1 << 20  # ids that are decoded at once
N_BLOCKS = 32  # of a sample, unless they would be smaller than MIN_BLOCK or larger than MAX_BLOCK
MIN_BLOCK = 1 << 10  # ids
MAX_BLOCK = 1 << 13


def draw_ids(ids: Ids, limit: int) -> Tensor:
    """Sample at most `limit` ids of a text, in blocks from all over it, as its parts may differ."""
    if limit >= len(ids):
        sample = ids[0 : len(ids)]
    else:
        block_size = min(MAX_BLOCK, max(MIN_BLOCK, limit // N_BLOCKS))
        n_blocks = max(1, limit // block_size)
        begins = torch.arange(n_blocks) * (len(ids) // block_size) // n_blocks * block_size
        blocks = [ids[begin : begin + block_size] for begin in begins.tolist()]
        sample = torch.cat(blocks)
    if sample.dtype == torch.uint8:
        return sample.to(torch.int16)
    return sample


def write_ids(directory: Path, tokenizer: Tokenizer, train: Tensor, val: Tensor) -> None:
    """Write the ids of a text into a new directory, as `upload-data --tokenizer` does."""
    directory.mkdir()
    parts: dict[str, Any] = {}
    for name, ids in (("train", train), ("val", val)):
        path = directory / f"{name}.bin"
        file_ids = torch.from_file(str(path), shared=True, size=len(ids), dtype=ids.dtype)
        file_ids.copy_(ids)
        parts[name] = {"shards": [{"name": path.name, "tokens": len(ids)}]}
    write_tokenizer(directory, tokenizer)
    type_name = {torch.int16: "uint16", torch.int32: "uint32"}[train.dtype]
    write_meta(directory, tokenizer, type_name, parts)


def write_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Write a tokenizer in the files that the `tokenizers` library and transformers read."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": tokenizer.end_of_text,
    }
    content = json.dumps(tokenizer.document, ensure_ascii=False, separators=(",", ":"))
    (directory / "tokenizer.json").write_bytes(content.encode())
    (directory / "tokenizer_config.json").write_bytes(json_bytes(config))


def write_meta(
    directory: Path, tokenizer: Tokenizer, type_name: str, parts: Mapping[str, Any]
) -> None:
    """Write meta.json: the shards of each part, the type of their ids, and the hash of
    tokenizer.json, which has to be there."""
    meta = {
        "dtype": type_name,
        "end_of_text": tokenizer.end_of_text,
        "tokenizer_sha256": file_sha256(directory / "tokenizer.json"),
        **parts,
    }
    (directory / "meta.json").write_bytes(json_bytes(meta))


def content_of(ids: Ids, vocabulary: Sequence[bytes], max_bytes: int = 1 << 30) -> bytearray:
    """Decode the first max_bytes of a text. Ids that are not learned, stored as ~id, count."""
    content = bytearray()
    for begin in range(0, len(ids), IDS_AT_ONCE):
        part = unsigned(ids[begin : min(begin + IDS_AT_ONCE, len(ids))])
        learned = part ^ (part >> 63)  # ~id becomes id
        content += b"".join(vocabulary[i] for i in learned.tolist())
        if len(content) >= max_bytes:
            break
    return content[:max_bytes]
