"""Texts to upload, and what an upload of them holds."""

from __future__ import annotations

from pathlib import Path

from sm_nanogpt.launcher.files.storage import local_path

LONG = "The quick brown fox jumps over the lazy dog.\n" * 100


def stored(uri: str) -> Path:
    path = local_path(uri)
    assert path is not None
    return path


FRENCH = "À l’heure où l’été s’éteint, «Noël» coûte 5 €. " * 60


def write_notes(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"Note {number} of many small ones.")
    return folder
