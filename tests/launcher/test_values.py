"""What Python users pass: numbers of other libraries, arrays, paths, uploads, jobs, texts."""

from __future__ import annotations

import math
import runpy
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sm_nanogpt as sm
from sm_nanogpt.launcher import values
from sm_nanogpt.launcher.groups.sweep import list_values
from sm_nanogpt.launcher.values import plain

TEXT = "\n".join(f"line {n} of a text that stands where a path belongs" for n in range(200))
FULL_ID = "sm-nanogpt-20260101-000000-abcdef"


def test_a_value_of_another_library_becomes_pythons():
    cases = [
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("adamw"), "adamw"),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (Fraction(1, 2), 0.5),
        (True, True),
    ]
    for value, expected in cases:
        assert plain(value) == expected
        assert type(plain(value)) is type(expected)


def test_a_sweep_takes_any_sequence_of_values():
    cases = [
        (np.array(["muon", "adamw"]), ["muon", "adamw"]),
        (torch.tensor([1, 2]), [1, 2]),
        ((np.int64(n) for n in (1, 2)), [1, 2]),
        ({1: "a", 2: "b"}.keys(), [1, 2]),
    ]
    for case, expected in cases:
        plain_values = list_values("x", case)
        assert plain_values == expected
        assert [type(value) for value in plain_values] == [type(value) for value in expected]


def test_no_list_of_different_values_is_refused():
    cases = [
        "adamw",
        np.array(5),
        np.eye(2),
        [],
        [0.1, 0.1],
        [0.1, math.inf],
        [None, 1],
        [b"a"],
    ]
    for case in cases:
        with pytest.raises(sm.InputError) as caught:
            list_values("x", case)
        assert caught.value.field == "sweep"
        assert "x" in str(caught.value)


def test_a_request_takes_numbers_of_numpy_as_pythons():
    values = {"max_steps": np.int64(3), "tie_embeddings": np.bool_(True)}
    request = sm.Request(instance=np.str_("local"), hyperparameters=values)
    assert repr(request.hyperparameters) == "{'max_steps': 3, 'tie_embeddings': True}"
    spent = sm.Request(instance="ml.g5.xlarge", max_cost=Decimal("2.5"), max_run=np.int32(600))
    assert spent.max_cost == 2.5
    assert spent.max_run == 600


def test_a_request_takes_paths_uploads_and_jobs(home, upload):
    assert sm.Request(instance="local", data=Path("~/x.txt")).data == "~/x.txt"
    assert sm.Request(instance="local", data=upload, validation=upload).data == upload.uri
    assert sm.Request(instance="local", init_from=sm.Job(FULL_ID)).init_from == FULL_ID
    assert sm.Settings(store=home / "store").store == str(home / "store")


def test_an_upload_takes_lists_of_paths_of_any_kind(home, short_text_file, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name + short_text_file.read_text()[:9000])
    names = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    files: list[Any] = [np.array(names), map(Path, names), [np.str_(n) for n in names]]
    assert {sm.upload_data(paths).files for paths in files} == {("a.txt", "b.txt")}
    assert sm.upload_data(sm.upload_data(names)).files == ("a.txt", "b.txt")


def test_the_home_directory_of_a_path_is_found(home, short_text_file):
    (Path.home() / "mine.txt").write_text(short_text_file.read_text())
    assert sm.upload_data(Path("~/mine.txt")).files == ("mine.txt",)


def test_values_need_no_numpy(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    module = runpy.run_path(str(values.__file__))
    assert module["plain"]([1]) == [1]


def local(**fields: Any) -> sm.Plan:
    return sm.prepare(sm.Request(instance="local", **fields))


@pytest.fixture
def upload(home, short_text_file):
    return sm.upload_data(short_text_file)


@pytest.mark.parametrize(
    "call",
    [
        sm.upload_data,
        sm.job,
        lambda text: local(data=text),
        lambda text: local(entry_point=text),
        lambda text: local(hyperparameters={"learning_rate": text}),
        lambda text: local(hyperparameters={text: 1}),
        lambda text: sm.Request(instance="local", name=text),
        lambda text: sm.Request(instance=text),
    ],
)
def test_a_text_for_a_name_gives_a_short_error(home, upload, call):
    with pytest.raises((sm.InputError, sm.Missing)) as caught:
        call(TEXT)
    assert len(str(caught.value)) < 1100 < len(TEXT)


def test_a_text_for_a_path_is_called_so(home):
    for location in (TEXT, "a/" * 2048):
        with pytest.raises(sm.InputError, match="is a text, not a path"):
            sm.upload_data(location)
    with pytest.raises(sm.InputError, match="is a text, not a path"):
        local(data=TEXT)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("preset", "fast"),
        ("hyperparameters", {"n_layr": 3}),
        ("data", "nofile.txt"),
        ("validation", "short.txt"),
        ("init_from", "nope"),
        ("teacher", "./nope"),
        ("resume", "nope"),
        ("entry_point", "nope"),
        ("size", 99),
        ("name", "latest"),
    ],
)
def test_an_error_about_a_field_has_its_name_and_value(home, upload, tmp_path, field, value):
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises((sm.InputError, sm.ServiceError)) as caught:
        local(**{field: value})
    assert caught.value.field == field
    assert str(caught.value.value) == str(value)


def test_a_launch_without_any_upload_is_about_data(home):
    with pytest.raises(sm.InputError) as caught:
        local()
    assert caught.value.field == "data"
    assert caught.value.value is None
