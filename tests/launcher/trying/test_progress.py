"""What a search says of runs while they are made."""

from __future__ import annotations

import logging
import time

import launching
import pytest

from sm_nanogpt.launcher.files.progress import repeated
from sm_nanogpt.launcher.trying.progress import RunProgress


class Clock:
    """Seconds that pass only when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_runs_are_counted_and_their_time_left_is_told(clock, caplog):
    """After the first that are judged together, and then once in half a minute."""
    progress = RunProgress(8, 2)
    progress.begin("4 pairs of shared seeds")
    for _ in range(8):
        clock.now += 10
        progress.note_end()
    assert caplog.messages == [
        "4 pairs of shared seeds: 8 runs, 2 at a time",
        "2 of 8 runs, time left 0:01:00",
        "6 of 8 runs, time left 0:00:20",
    ]


def test_a_few_seconds_are_worth_no_line(clock, caplog):
    progress = RunProgress(4, 16)
    progress.begin("base")
    for _ in range(4):
        clock.now += 1
        progress.note_end()
    assert caplog.messages == ["base: 4 runs, 4 at a time"]


def test_the_time_left_after_a_job_is_that_of_judging(clock, caplog):
    progress = RunProgress(8, 1, made_by_job=True)
    clock.now += 3600  # of the job
    for _ in range(2):
        progress.note_made()
        clock.now += 10
        progress.note_end()
    assert caplog.messages == ["1 of 8 runs, time left 0:01:10"]


def test_runs_that_go_on_say_how_long(clock, caplog):
    progress = RunProgress(8, 2)
    clock.now += 31
    progress.note_time()
    clock.now += 9
    for _ in range(2):
        progress.note_end()
    progress.note_time()  # after the time left, which is still new
    clock.now += 31
    progress.note_time()
    assert caplog.messages == [
        "0 of 8 runs have ended after 0:00:31; the first 2 will show the time left",
        "2 of 8 runs, time left 0:02:00",
        "2 of 8 runs have ended after 0:01:11",
    ]


def test_the_time_is_logged_while_runs_go_on(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("sm_nanogpt.launcher.files.progress.LINE_SECONDS", 0.01)
    progress = RunProgress(8, 16)
    with repeated(progress.note_time):
        launching.until(lambda: len(caplog.messages) > 1)
    assert "0 of 8 runs have ended after 0:00:00" in caplog.messages
