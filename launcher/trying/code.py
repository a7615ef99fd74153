"""What the files of a folder may hold."""

from __future__ import annotations

from launcher.judge.anchors import as_tensor, overlap
from launcher.source import Source
from launcher.trying.refusal import Refused


def check_code(source: Source, first: Source, judged: bytes) -> None:
    """Raise Refused if a file has a part of the judge's text that the first folder does not have.

    first is the folder that the search began with.
    """
    first_lines = set(b"".join(first.files.values()).splitlines())
    lines = b"".join(source.files.values()).splitlines()
    new_text = b"\n".join(line for line in lines if line not in first_lines)
    if new_text and overlap(as_tensor(judged), [as_tensor(new_text)]) > 0:
        raise Refused("a file of the folder holds a part of the judge's text")
