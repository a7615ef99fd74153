"""Checkpoints: what is kept, what is read back, and what a resumed run may change."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import resource
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tensors import TENSORS, assert_same

from sm_nanogpt.entry_point.checkpoint import Checkpoints
from sm_nanogpt.entry_point.config import Config, check_resumable
from sm_nanogpt.entry_point.errors import ConfigError, TrainingError


def state_of(step: int, **config: Any) -> dict[str, Any]:
    config = dataclasses.asdict(Config(**config))
    return {"step": step, "config": config, "corpus_sha256": "abc"}


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save({"model.w": torch.full((1000,), float(step))}, state_of(step))


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints")


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(p.name.removesuffix(".safetensors") for p in checkpoints.directory.iterdir())


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_gives_back_what_was_saved(checkpoints):
    assert checkpoints.load_latest() is None
    checkpoints.save(TENSORS, state_of(7))
    loaded = checkpoints.load_latest()
    assert loaded is not None
    assert_same(loaded[0], TENSORS)
    assert loaded[1] == state_of(7)
    assert checkpoints.latest_state() == state_of(7)


def test_pruning_keeps_the_last_two_checkpoints(checkpoints):
    save(checkpoints, 10)
    others = {"checkpoint-best", "checkpoint-1.txt", "notes"}
    for name in others:
        (checkpoints.directory / name).write_text("mine")
    save(checkpoints, 20)
    save(checkpoints, 30)
    assert set(names(checkpoints)) == {"checkpoint-00000020", "checkpoint-00000030"} | others
    assert checkpoints.steps() == [30, 20]


def test_a_file_is_deleted_only_after_its_upload(checkpoints):
    """SageMaker's checkpoint agent makes such markers beside a file that it uploads."""
    save(checkpoints, 10)
    first = checkpoints.path(10)
    first.with_name(f"{first.name}.sagemaker-uploading").touch()
    save(checkpoints, 20)
    save(checkpoints, 30)
    assert first.exists()
    first.with_name(f"{first.name}.sagemaker-uploaded").touch()
    save(checkpoints, 40)
    assert not first.exists()


def test_a_broken_checkpoint_is_passed_over(checkpoints, capsys):
    save(checkpoints, 10)
    save(checkpoints, 20)
    spoil(checkpoints.path(20))
    loaded = checkpoints.load_latest()
    assert loaded is not None
    assert loaded[1]["step"] == 10
    assert "checkpoint of step 20 is skipped" in capsys.readouterr().out
    save(checkpoints, 25)
    assert checkpoints.steps() == [25, 10]


def test_the_options_of_a_resumed_run_need_no_tensors(checkpoints, monkeypatch):
    """Every rank asks for them, and rank 0 alone reads the tensors."""
    save(checkpoints, 10)
    save(checkpoints, 20)
    content = checkpoints.path(20).read_bytes()
    checkpoints.path(20).write_bytes(content[:-1])
    monkeypatch.setattr(
        "sm_nanogpt.entry_point.checkpoint.read_safetensors", Mock(side_effect=AssertionError)
    )
    assert checkpoints.latest_state()["step"] == 10
    checkpoints.path(20).write_bytes(content)
    assert checkpoints.latest_state()["step"] == 20


def test_checkpoints_that_are_all_broken_are_an_error(checkpoints):
    save(checkpoints, 10)
    save(checkpoints, 20)
    spoil(checkpoints.path(10))
    path = checkpoints.path(20)
    path.write_bytes(path.read_bytes().replace(b'"sha256"', b'"sha257"'))
    with pytest.raises(TrainingError, match=r"every checkpoint in .* SHA-256 is missing"):
        checkpoints.load_latest()


def test_a_checkpoint_of_an_older_version_is_called_that(checkpoints):
    save(checkpoints, 10)
    path = checkpoints.path(10)
    path.write_bytes(path.read_bytes().replace(b'"state_sha256"', b'"state_sha257"'))
    with pytest.raises(TrainingError, match="older version"):
        checkpoints.latest_state()


def test_an_unreadable_checkpoint_is_skipped(checkpoints):
    save(checkpoints, 10)
    checkpoints.path(15).symlink_to("nowhere")
    checkpoints.path(20).mkdir()
    assert checkpoints.latest_state()["step"] == 10
    loaded = checkpoints.load_latest()
    assert loaded is not None and loaded[1]["step"] == 10


def test_resume_may_change_length_and_schedule():
    new_state = state_of(0, max_steps=9999, learning_rate=0.5, dropout=0.3, log_interval=1)
    check_resumable(state_of(7), new_state)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"tie_embeddings": True}, "tie_embeddings (from False to True)"),
        ({"seed": 1, "n_layer": 5}, "n_layer (from 4 to 5), seed (from 1337 to 1)"),
        ({"optimizer": "adamw"}, "optimizer (from 'muon' to 'adamw')"),
    ],
)
def test_the_values_that_define_a_run_may_not_change(config, message):
    with pytest.raises(ConfigError, match=f" {re.escape(message)};"):
        check_resumable(state_of(7), state_of(0, **config))


def test_of_model_and_data_only_two_values_may_change():
    group = ""
    changeable = []
    for field in dataclasses.fields(Config):
        group = field.metadata["group"] or group
        if group in ("model", "data") and not field.metadata["kept_on_resume"]:
            changeable.append(field.name)
    assert changeable == ["dropout", "gradient_accumulation_steps"]


def test_the_text_of_a_run_may_not_change():
    with pytest.raises(ConfigError, match="text"):
        check_resumable(state_of(7), {**state_of(0), "corpus_sha256": "def"})


def test_new_hyperparameters_resume_as_defaults():
    old_state = state_of(7)
    del old_state["config"]["mask_documents"]
    check_resumable(old_state, state_of(0))
    with pytest.raises(ConfigError, match="mask_documents"):
        check_resumable(old_state, state_of(0, mask_documents=True))


def test_a_full_disk_keeps_the_earlier_checkpoints(checkpoints, monkeypatch):
    """The limit on the size of a file stands for the end of the disk."""
    save(checkpoints, 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(TrainingError, match=r"checkpoint-00000020\.\w+: file too large"):
            save(checkpoints, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(TrainingError, match=r"checkpoint-00000020\.\w+: input/output error"):
        save(checkpoints, 20)
    assert names(checkpoints) == ["checkpoint-00000010"]
    assert checkpoints.latest_state()["step"] == 10
