"""The ledger of a search: its chain, its locks, and its ceiling."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from pathlib import Path

import pytest

from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.groups.ledger import OverCeiling
from sm_nanogpt.launcher.trying.history import SearchLedger, draw_seeds

CEILING = 10.0


@pytest.fixture
def directory(tmp_path):
    ledger = SearchLedger(tmp_path)
    ledger.add("start", folder="a", ceiling=CEILING, note="naïve – café")
    for seed in range(3):
        ledger.add("run", folder="a", seed=seed, loss=1.5 + seed / 10)
    return tmp_path


def file_of(directory: Path) -> Path:
    return directory / "ledger.jsonl"


def test_any_edited_byte_but_the_last_lines_is_found(directory):
    content = file_of(directory).read_bytes()
    last = content.rindex(b"\n", 0, -1) + 1
    for at in range(last):
        for byte in {content[at] ^ 1, ord("\n")} - {content[at]}:
            file_of(directory).write_bytes(content[:at] + bytes([byte]) + content[at + 1 :])
            with pytest.raises(ServiceError, match="was changed after it was written"):
                SearchLedger(directory)


def test_a_note_of_any_bytes_is_kept(directory):
    note = os.fsdecode(b"caf\xe9 \xf0\x9f\x8c\x8d")  # as a command gets an argument
    SearchLedger(directory).add("try", number=1, note=note)
    assert SearchLedger(directory).of("try")[0]["note"] == note


def test_the_folder_that_is_tried_is_known_until_a_verdict(tmp_path):
    ledger = SearchLedger(tmp_path)
    ledger.add("start", folder="a", ceiling=None)
    assert ledger.begun_folder == ""
    ledger.add("begun", runs=[["a", 1], ["a", 2]])
    assert ledger.begun_folder == "a"
    ledger.add("base", loss=1.5)
    assert ledger.begun_folder == ""
    ledger.add("begun", runs=[["a", 3], ["b", 3]])
    ledger.add("begun", runs=[["a", 4]])
    assert ledger.begun_folder == "b"
    ledger.add("try", number=1, folder="b", verdict="no better")
    assert ledger.begun_folder == ""


@pytest.mark.parametrize(
    "order",
    [
        (0, 1, 3),  # one is removed
        (0, 1, 2, 2, 3),
        (0, 2, 1, 3),
    ],
)
def test_lines_that_moved_are_found(directory, order):
    lines = file_of(directory).read_bytes().splitlines(keepends=True)
    file_of(directory).write_bytes(b"".join(lines[index] for index in order))
    with pytest.raises(ServiceError, match="was changed after it was written"):
        SearchLedger(directory)


@pytest.mark.parametrize("line", [b"{}\n", b"[]\n"])
def test_a_line_that_is_no_entry_is_found(directory, line):
    with file_of(directory).open("ab") as file:
        file.write(line)
    with pytest.raises(ServiceError, match=r"entry 5, .* was changed after it was written"):
        SearchLedger(directory)


def test_a_line_cut_anywhere_counts_for_nothing(directory):
    content = file_of(directory).read_bytes()
    begin = content.rindex(b"\n", 0, -1) + 1
    for end in range(begin, len(content), 5):
        file_of(directory).write_bytes(content[:end])
        ledger = SearchLedger(directory)
        assert len(ledger.entries) == 3
        ledger.add("try", verdict="kept")
        assert SearchLedger(directory).entries[-1]["kind"] == "try"
        assert len(file_of(directory).read_bytes().splitlines()) == 4


def test_nobody_can_foresee_a_seed(tmp_path):
    first, second = draw_seeds(64, set()), draw_seeds(64, set())
    assert len({*first, *second}) == 128


def test_a_seed_that_is_used_is_not_drawn_again(monkeypatch):
    numbers = iter([6, 6, 7, 8])
    monkeypatch.setattr("secrets.randbelow", lambda limit: next(numbers))
    assert draw_seeds(2, used={8}) == [7, 9]


def test_seeds_are_drawn_once_and_only_those_that_lack(directory):
    seeds = SearchLedger(directory).seeds("fresh pairs", 4)
    assert SearchLedger(directory).seeds("fresh pairs", 4) == seeds
    assert SearchLedger(directory).seeds("fresh pairs", 8)[:4] == seeds
    entries = SearchLedger(directory).of("seeds")
    assert [len(entry["seeds"]) for entry in entries] == [4, 4]


def test_each_use_of_seeds_has_its_own(directory, monkeypatch):
    """Whatever is drawn: here, each number comes twice."""
    numbers = itertools.count()
    monkeypatch.setattr("secrets.randbelow", lambda limit: next(numbers) // 2)
    ledger = SearchLedger(directory)
    first = ledger.seeds("first", 4)
    numbers = itertools.count()
    second = ledger.seeds("second", 4)
    assert len({*first, *second}) == 8
    assert ledger.seeds("first", 4) == first


@pytest.mark.parametrize(
    ("kills", "runs", "is_often"), [(3, 0, False), (4, 0, True), (5, 80, False), (6, 80, True)]
)
def test_a_folder_is_often_killed(directory, kills, runs, is_often):
    """Three times, or once for sixteen runs. A run could wait for a kill until it was lucky."""
    ledger = SearchLedger(directory)
    for seed in range(runs):
        ledger.add("begun", runs=[("a", seed), ("b", seed)])
        ledger.add("run", folder="a", seed=seed, loss=1.0)
        ledger.add("run", folder="b", seed=seed, loss=1.0)
    for _ in range(kills):
        ledger.add("begun", runs=[("a", 99), ("b", 99)])
        ledger.add("run", folder="a", seed=99, loss=1.0)
    assert ledger.is_often_killed("b") == is_often
    assert not ledger.is_often_killed("a")
    ledger.add("anew", folder="b")
    assert ledger.runs_of("b") == []
    for _ in range(3):  # as many as at first
        ledger.add("begun", runs=[("b", 99)])
    assert not ledger.is_often_killed("b")


def reserve_many(directory: Path, who: int) -> None:
    ledger = SearchLedger(directory)
    for n in range(20):
        try:
            ledger.reserve(f"{who}-{n}", 1.0, runs=[])
        except OverCeiling:
            continue
        if n % 3 == 0:
            ledger.settle_all(lambda entry: 0.25 if entry["job"].startswith(f"{who}-") else None)


def test_several_processes_reserve_no_more_than_the_ceiling(directory):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=reserve_many, args=(directory, who)) for who in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0

    ledger = SearchLedger(directory)  # each entry follows the one before it
    held = dict[str, float]()
    for entry in ledger.entries:
        if entry["kind"] in ("reserved", "settled"):
            held[entry["job"]] = entry["usd"]
            assert sum(held.values()) <= CEILING
    settled = [entry["job"] for entry in ledger.of("settled")]
    assert len(settled) == len(set(settled)) > 4
    with pytest.raises(OverCeiling, match="spent"):
        ledger.reserve("more", CEILING, runs=[])
