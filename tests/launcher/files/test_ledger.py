"""Entries that are only added: what others do to their file meanwhile."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import IO, Any

import pytest

from sm_nanogpt import ServiceError
from sm_nanogpt.launcher.files import locks
from sm_nanogpt.launcher.files.ledger import Ledger


def test_each_ledger_has_what_another_one_adds(tmp_path):
    first = Ledger(tmp_path / "ledger.jsonl")
    first.add("start", text="a")
    second = Ledger(tmp_path / "ledger.jsonl")
    second.add("try", number=1)
    first.add("try", number=2)
    assert [entry["number"] for entry in first.of("try")] == [1, 2]


def test_what_a_killed_command_began_counts_for_nothing(tmp_path):
    path = tmp_path / "ledger.jsonl"
    Ledger(path).add("start", text="a")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"previous": "')
    ledger = Ledger(path)
    assert len(ledger.entries) == 1
    ledger.add("try", number=1)
    assert path.read_bytes().startswith(whole)
    assert len(Ledger(path).entries) == 2


def test_a_changed_entry_is_refused_by_its_number(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.add("start", text="a")
    ledger.add("try", number=1)
    path.write_bytes(path.read_bytes().replace(b'"text": "a"', b'"text": "b"'))
    with pytest.raises(ServiceError, match="entry 2, or the one before it, was changed"):
        Ledger(path)


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_ledger_that_is_removed_gets_no_entry(is_made_anew, tmp_path, monkeypatch):
    """As by a deletion while this one waits for the lock."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.add("start", text="a")
    lock = locks.lock

    def lock_late(file: IO[Any]) -> bool:
        is_locked = lock(file)
        path.unlink()
        Path(file.name).unlink()
        if is_made_anew:
            Path(file.name).touch()
        return is_locked

    monkeypatch.setattr(locks, "lock", lock_late)
    with pytest.raises(ServiceError, match=r"ledger\.jsonl was removed"):
        ledger.add("try", number=1)
    assert not path.exists()


def test_an_error_below_the_lock_is_not_about_the_ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError) as raised, ledger.locked():
        missing.read_bytes()
    assert raised.value.filename == str(missing)
    ledger.add("start", text="a")  # the lock is free again


def test_an_entry_that_the_disk_does_not_take_names_the_ledger(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "ledger.jsonl")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sm_nanogpt.launcher.files.ledger.flush_to_disk", fail)
    with pytest.raises(ServiceError, match=r"ledger\.jsonl: .* disk is full"):
        ledger.add("start", text="a")
