"""Lines of the log that say how long an operation goes on."""

from __future__ import annotations

import time

import launching
import pytest

from sm_nanogpt.launcher.files.progress import repeated, time_logged


def test_long_work_logs_how_long_it_goes_on(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("sm_nanogpt.launcher.files.progress.LINE_SECONDS", 0.01)
    with time_logged("evaluating"):
        later = time.monotonic() + 90.0
        monkeypatch.setattr(time, "monotonic", lambda: later)
        launching.until(lambda: "evaluating: 0:01:30 so far" in caplog.messages)


def test_work_that_is_over_logs_nothing(monkeypatch):
    """Also if a line is being logged when it ends."""
    monkeypatch.setattr("sm_nanogpt.launcher.files.progress.LINE_SECONDS", 0.01)
    begun, ended = [], []

    def log() -> None:
        begun.append(1)
        time.sleep(0.1)
        ended.append(1)

    with pytest.raises(ValueError, match="it failed"), repeated(log):
        launching.until(lambda: bool(begun))
        raise ValueError("it failed")
    assert ended == begun
    time.sleep(0.1)
    assert ended == begun
