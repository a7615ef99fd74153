"""How much of a validation text stands in its training text, and where that is said."""

from __future__ import annotations

import random
import textwrap
from pathlib import Path
from typing import Any

import launching
import pytest

from sm_nanogpt import Request, Settings, upload_data
from sm_nanogpt.launcher.launching.launch import prepare
from sm_nanogpt.launcher.text import repeats
from sm_nanogpt.launcher.text.reading import File
from sm_nanogpt.launcher.text.repeats import (
    RUN_BYTES,
    repeated_share,
    sampled_ranges,
    share_within_text,
)


def random_text(seed: int, count: int = 4000) -> str:
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(draw.choices(letters, k=5)) for _ in range(count))


def share(training: str, validation: str) -> float:
    content = training.encode()
    pieces = [content[at : at + 1000] for at in range(0, len(content), 1000)]
    return repeated_share(pieces, validation.encode(), len(content))


def test_a_new_text_has_no_share_and_an_old_one_all():
    assert share(random_text(1), random_text(2)) == 0
    assert share(random_text(1), random_text(1)[7000:17000]) == 1
    assert share("", random_text(1)) == share(random_text(1), "") == 0


def test_the_share_is_of_the_bytes_in_long_runs():
    old, new = random_text(1), random_text(2)
    assert share(old, new[:3000] + old[500:1500]) == pytest.approx(0.25, abs=0.001)
    assert share(old, new[:600] + old[500 : 500 + RUN_BYTES - 1]) == 0


def test_line_breaks_and_spaces_make_no_difference():
    text = random_text(1)
    again = textwrap.fill(text[6000:18000], 40).replace("\n", "\r\n  ")
    assert share(text, again) > 0.99


def test_a_long_training_text_is_looked_up_in_steps(monkeypatch):
    monkeypatch.setattr(repeats, "MAX_LOOKUPS", 10)
    old, new = random_text(1), random_text(2)
    assert share(old, new[:5000] + old[500:5500]) == pytest.approx(0.5, abs=0.02)


def test_a_long_validation_text_is_sampled_in_parts():
    assert sampled_ranges(100, limit=160) == [(0, 100)]
    ranges = sampled_ranges(1600, limit=160)
    assert len(ranges) == 16
    assert ranges[:2] == [(0, 10), (100, 110)]
    assert ranges[-1] == (1500, 1510)


@pytest.fixture
def twice(tmp_path: Path) -> Path:
    (tmp_path / "twice.txt").write_text(random_text(1) * 2)
    return tmp_path / "twice.txt"


WARNING = "100% of the validation text stands in the training text"


def test_a_text_that_stands_twice_is_said_at_upload(cli, twice):
    assert WARNING in cli("upload-data", twice).good.err
    assert WARNING in cli("upload-data", twice).good.err  # already in the store


def prepare_launch(
    data: Path, home: Path, validation: Path | None = None, **hyperparameters: Any
) -> None:
    request = Request(
        instance="local",
        data=str(data),
        validation=None if validation is None else str(validation),
        hyperparameters={**launching.TINY, **hyperparameters},
    )
    prepare(request, Settings(home=home))


def test_a_text_that_stands_twice_is_said_at_launch(home, twice, caplog):
    prepare_launch(twice, home)
    assert caplog.text.count(WARNING) == 1


def test_another_fraction_is_measured_by_itself(home, tmp_path, caplog):
    """The last tenth is new, and the quarter before it stands at the beginning."""
    text = random_text(1) + random_text(1)[:6000] + random_text(2)[:3500]
    (tmp_path / "data.txt").write_text(text)
    prepare_launch(tmp_path / "data.txt", home)
    assert WARNING not in caplog.text
    prepare_launch(tmp_path / "data.txt", home, validation_fraction=0.25)
    assert "of the validation text stands in the training text" in caplog.text


def test_all_of_many_files_are_compared(tmp_path):
    """The last files have the text of those in the middle, below other titles."""
    files = []
    for number in range(20):
        path = tmp_path / f"{number:02}.txt"
        seed = number if number < 18 else number - 8
        path.write_text(f"Title {number}\n{random_text(seed, 100)}\n")
        files.append(File(path.name, path))
    n_characters = sum(file.path.stat().st_size for file in files)
    assert share_within_text(files, n_characters) > 0.95
    assert share_within_text(files[:18], n_characters * 18 // 20) == 0


def test_tokens_of_a_text_that_stands_twice_are_said(cli, twice):
    ran = cli("upload-data", twice, "--tokenizer", "bpe", "--vocab-size", "300").good
    assert WARNING in ran.err


def test_a_validation_text_within_the_training_text_is_said(home, tmp_path, caplog):
    (tmp_path / "data.txt").write_text(random_text(1))
    (tmp_path / "part.txt").write_text(random_text(1)[9000:20000])
    (tmp_path / "other.txt").write_text(random_text(2))
    prepare_launch(tmp_path / "data.txt", home, validation=tmp_path / "other.txt")
    assert WARNING not in caplog.text
    prepare_launch(tmp_path / "data.txt", home, validation=tmp_path / "part.txt")
    assert WARNING in caplog.text


def test_the_share_is_kept_in_the_manifest(home, twice, monkeypatch):
    assert upload_data(twice).repeated == 1
    monkeypatch.delattr(repeats, "repeated_share")
    assert upload_data(twice).repeated == 1
