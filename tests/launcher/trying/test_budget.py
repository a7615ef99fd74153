"""What a folder may use: tokens, parameters, bytes, and time beside the search's first folder."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from models import SMALL, some_model
from safetensors.torch import load_file

from sm_nanogpt.launcher.trying.budget import (
    ENTRY_BYTES,
    JUDGE_TIME_FIELD,
    RUN_TIME_FIELD,
    Budget,
    sizes_of,
)
from sm_nanogpt.launcher.trying.history import SearchLedger
from sm_nanogpt.launcher.trying.refusal import Refused

SIZES = {"tokens": 1000, "parameters": 100, "bytes": 100}
MAX_RATIO = 1.3


@pytest.fixture
def budget(tmp_path):
    """The budget of a search whose first folder has two runs, of seeds 1 and 2."""
    ledger = SearchLedger(tmp_path)
    ledger.add("start", folder="first", ceiling=None)
    budget = Budget(ledger)
    add_runs(budget, "first", [10.0, 10.0])
    return budget


def add_runs(budget: Budget, folder: str, seconds: Sequence[float], first_seed: int = 1) -> None:
    """The runs of a folder, which take so many seconds, and a tenth of them before the judge."""
    for seed, run_seconds in enumerate(seconds, first_seed):
        times = {RUN_TIME_FIELD: run_seconds, JUDGE_TIME_FIELD: run_seconds / 10}
        budget.ledger.add("run", folder=folder, seed=seed, **SIZES, **times)


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "limit"), [("tokens", 1000), ("parameters", 110), ("bytes", 110)])
def test_sizes_are_limited_by_the_first_model(budget, name, limit):
    budget.check_sizes({name: limit})
    with pytest.raises(Refused, match=name):
        budget.check_sizes({name: limit + 1})


@pytest.mark.parametrize(
    "forge",
    [
        lambda model: (model / "more.bin").write_bytes(bytes(99_999)),  # weights beside the weights
        lambda model: [(model / f"{n:0200}").touch() for n in range(500)],  # in names of files
        lambda model: [(model / f"{n:0200}").mkdir() for n in range(500)],
        lambda model: (model / "training.json").write_text('{"config": {"max_steps": NaN}}'),
        lambda model: (model / "model.safetensors").write_bytes(b"\xff" * 99),
    ],
)
def test_a_forged_model_directory_is_refused(forge, tmp_path):
    model = some_model(tmp_path / "model")
    ledger = SearchLedger(tmp_path)
    ledger.add("run", folder="first", **sizes_of(model))
    Budget(ledger).check_sizes(sizes_of(model))
    forge(model)
    with pytest.raises(Refused):
        Budget(ledger).check_sizes(sizes_of(model))


def test_sizes_are_those_of_all_steps_and_files(tmp_path):
    model = some_model(tmp_path / "model")
    sizes = sizes_of(model)
    assert sizes["tokens"] == SMALL.max_steps * SMALL.batch_size * SMALL.block_size
    tensors = load_file(model / "model.safetensors")
    assert sizes["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    (model / "more").mkdir()
    (model / "more/weights").write_bytes(bytes(1000))
    n_added = 1000 + len("more" + "weights") + 2 * ENTRY_BYTES
    assert sizes_of(model)["bytes"] == sizes["bytes"] + n_added


def test_a_directory_that_cannot_be_listed_is_refused(tmp_path, monkeypatch):
    """A model can open what is in it by its name, and nobody would count it."""
    model = some_model(tmp_path / "model")
    hidden = model / "hidden"
    hidden.mkdir()
    scandir = os.scandir

    def scandir_of_user(path: Any) -> Any:
        if Path(path) == hidden:
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_of_user)
    with pytest.raises(Refused, match="PermissionError"):
        sizes_of(model)


# -- time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "is_refused"),
    [
        ([13.0] * 5, False),
        ([13.1] * 5, True),
        ([100.0, 100.0, 1.0, 1.0, 1.0], True),  # slow for some seeds, which no median shows
    ],
)
def test_the_time_of_all_runs_together_is_limited(budget, seconds, is_refused):
    add_runs(budget, "mine", seconds)
    seeds = range(1, 6)
    if is_refused:
        with pytest.raises(Refused, match="the time of the search's first folder"):
            budget.check_time("mine", "first", seeds, MAX_RATIO)
    else:
        budget.check_time("mine", "first", seeds, MAX_RATIO)


def test_runs_of_other_seeds_do_not_count(budget):
    add_runs(budget, "mine", [10.0, 90.0])
    budget.check_time("mine", "first", [1], MAX_RATIO)


def test_the_time_before_the_judge_is_limited_too(budget):
    times = {RUN_TIME_FIELD: 10.0, JUDGE_TIME_FIELD: 1.4}
    budget.ledger.add("run", folder="mine", seed=1, **SIZES, **times)
    with pytest.raises(Refused, match=r"takes 1\.40x the time before the judge"):
        budget.check_time("mine", "first", [1], MAX_RATIO)


@pytest.mark.parametrize(("seconds", "slowdown"), [(16.0, 1.6), (90.0, 2.0), (5.0, 1.0)])
def test_a_busy_machine_allows_up_to_twice_the_time(budget, seconds, slowdown):
    """As the fresh runs of the base show, which are made beside those of the folder."""
    add_runs(budget, "base", [10.0, 10.0])
    assert budget.slowdown("base", [1, 2], RUN_TIME_FIELD) == 1.0  # there are no others
    add_runs(budget, "base", [seconds, seconds], first_seed=11)
    assert budget.slowdown("base", [11, 12], RUN_TIME_FIELD) == slowdown
    add_runs(budget, "mine", [13.0 * slowdown, 13.0 * slowdown], first_seed=11)
    budget.check_time("mine", "base", [11, 12], MAX_RATIO)
    with pytest.raises(Refused):
        budget.check_time("mine", "base", [11, 12], MAX_RATIO - 0.01)


def test_a_run_may_take_four_times_as_long_and_a_minute(budget, tmp_path):
    assert budget.max_seconds() == 100.0
    assert budget.max_seconds(JUDGE_TIME_FIELD) == 64.0
    (tmp_path / "new").mkdir()
    ledger = SearchLedger(tmp_path / "new")
    ledger.add("start", folder="first")
    assert Budget(ledger).max_seconds() == math.inf
