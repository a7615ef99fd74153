"""A text as ids: cut, written, and decoded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entry_point.text import Ids, Tokenizer, unsigned

IDS_AT_ONCE = 1 << 20  # that are decoded


def drawn(ids: Ids, wanted: int) -> Tensor:
    """So many ids of a text, in blocks from all over it: the parts of most texts differ."""
    if wanted >= len(ids):
        found = ids[0 : len(ids)]
    else:
        block = min(1 << 13, max(1 << 10, wanted >> 5))
        count, all_blocks = max(1, wanted // block), len(ids) // block
        places = (torch.arange(count) * all_blocks // count * block).tolist()
        found = torch.cat([ids[place : place + block] for place in places])
    return found.to(torch.int16) if found.dtype == torch.uint8 else found


def write_ids(directory: Path, tokenizer: Tokenizer, train: Tensor, val: Tensor) -> None:
    """Write the ids of a text as `upload-data --tokenizer` does."""
    directory.mkdir()
    kind = {torch.int16: "uint16", torch.int32: "uint32"}[train.dtype]
    meta: dict[str, Any] = {"dtype": kind, "end_of_text": tokenizer.end_of_text}
    for name, ids in (("train", train), ("val", val)):
        path = directory / f"{name}.bin"
        torch.from_file(str(path), shared=True, size=len(ids), dtype=ids.dtype).copy_(ids)
        meta[name] = {"shards": [{"name": path.name, "tokens": len(ids)}]}
    (directory / "meta.json").write_text(json.dumps(meta))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer.document))


def content_of(ids: Ids, words: Sequence[bytes], limit: int = 1 << 30) -> bytearray:
    """The first bytes of a text; ids that are not learned, ~id, count too."""
    content = bytearray()
    for begin in range(0, len(ids), IDS_AT_ONCE):
        part = unsigned(ids[begin : min(begin + IDS_AT_ONCE, len(ids))])
        content += b"".join(map(words.__getitem__, (part ^ (part >> 63)).tolist()))
        if len(content) >= limit:
            break
    return content[:limit]
