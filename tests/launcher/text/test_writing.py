"""How files of an upload are written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import launching
import pytest
from texts import stored, write_notes

from sm_nanogpt import ServiceError, upload_data
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.text import writing


def test_small_files_are_written_side_by_side(home, tmp_path, monkeypatch):
    write, together = storage.write_file, threading.Barrier(4)

    def write_with_others(*args: Any) -> None:
        together.wait(timeout=10)
        write(*args)

    monkeypatch.setattr(storage, "write_file", write_with_others)
    upload = upload_data(write_notes(tmp_path / "notes", 40))
    assert len(launching.tree(stored(upload.uri))) == 40


def test_large_files_are_written_in_turn(home, tmp_path, monkeypatch):
    write, writing = storage.write_file, threading.Lock()

    def write_alone(*args: Any) -> None:
        assert writing.acquire(blocking=False)
        write(*args)
        writing.release()

    monkeypatch.setattr(storage, "write_file", write_alone)
    monkeypatch.setattr("sm_nanogpt.launcher.text.writing.SMALL_FILE_BYTES", 0)
    upload = upload_data(write_notes(tmp_path / "notes", 40))
    assert len(launching.tree(stored(upload.uri))) == 40


def test_no_file_is_begun_after_one_that_fails(home, tmp_path, monkeypatch):
    started = list[str]()

    def fail(path: Path, *_: Any) -> None:
        started.append(path.name)
        raise ServiceError("the line is cut")

    monkeypatch.setattr(storage, "write_file", fail)
    with pytest.raises(ServiceError, match="cut"):
        upload_data(write_notes(tmp_path / "notes", 100))
    assert len(started) <= 2 * writing.MAX_WRITERS
    assert list((home / "store/data").glob("*.json")) == []
