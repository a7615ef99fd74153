"""Chats that programs have exported, for the tests."""

from __future__ import annotations

from pathlib import Path

from sm_nanogpt.launcher.text.documents import documents_in
from sm_nanogpt.launcher.text.reading import detect_file
from sm_nanogpt.launcher.text.skipped import Skipped

ASKED = ["user\nHow are you?", "assistant\nFine.\nAnd you?"]
ANDROID = """\
12/03/24, 14:05 - Messages and calls are end-to-end encrypted.
12/03/24, 14:05 - Ann: How are you?
12/03/24, 14:06 - Bob: Fine.
12/03/24, 14:06 - Bob: And you?
12/03/24, 14:07 - Ann: <Media omitted>
12/03/24, 14:07 - Ann: This message was deleted
13/03/24, 09:30 - Ann: Two
lines: and this
13/03/24, 09:31 - Bob: Yes. <This message was edited>
"""


def conversations(path: Path, me: str = "") -> tuple[list[list[str]], Skipped]:
    """The turns of each conversation of a file, and what was left out."""
    skipped = Skipped()
    file = detect_file(path, me=me)
    documents = [list(document.pieces) for document in documents_in(file, skipped)]
    return documents, skipped
