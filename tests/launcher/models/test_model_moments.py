"""The moments of a training, as its model's directory holds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import SMALL, VOCABULARY_SIZE, lively

from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.moments import earlier_moments, write_moments
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.models.moments import evenly_spaced, read_moments


@pytest.fixture
def directory(tmp_path):
    """What a run leaves of a model of step 9, with its weights of two earlier steps."""
    weights = {name: tensor.bfloat16() for name, tensor in lively().state_dict().items()}
    halves = {name: tensor / 2 for name, tensor in weights.items()}
    write_moments(tmp_path, {0: halves, 4: weights})
    (tmp_path / "training.json").write_text(json.dumps({"step": 9}))
    return tmp_path


def files(directory: Path) -> list[Path]:
    return sorted((directory / "moments").iterdir())


def test_moments_are_the_model_at_earlier_steps_and_itself(directory):
    model = lively()
    moments = read_moments(directory, model)
    assert [moment.step for moment in moments] == [0, 4, 9]
    assert moments[-1].model is model
    name = "blocks.0.mlp.down.weight"
    weights = [moment.model.state_dict()[name] for moment in moments]
    assert torch.equal(weights[1], weights[2].bfloat16().float())
    assert torch.equal(weights[0], weights[1] / 2)


@pytest.mark.parametrize("step, generation, steps", [(9, 2, [0, 4]), (5, 1, [0, 4, 5])])
def test_moments_count_the_steps_of_their_generation(step, generation, steps, tmp_path):
    weights = lively().state_dict()
    kept = earlier_moments({0: weights, 4: weights, 5: weights}, step, max_steps=5)
    write_moments(tmp_path, kept)
    training = {"step": step, "config": {"generations": 2, "max_steps": 5}}
    (tmp_path / "training.json").write_text(json.dumps(training))
    moments = read_moments(tmp_path, lively())
    assert [moment.step for moment in moments] == steps
    assert {moment.generation for moment in moments} == {generation}


def test_a_model_without_moments_has_an_empty_list(tmp_path):
    assert read_moments(tmp_path, lively()) == []


def test_damaged_moments_are_refused(directory):
    path = files(directory)[1]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ServiceError, match="is damaged: its SHA-256"):
        read_moments(directory, lively())


def test_moments_of_another_model_are_refused(directory):
    with pytest.raises(ServiceError, match=r"embed\.weight is"):
        read_moments(directory, GPT(SMALL, VOCABULARY_SIZE + 1))


def test_a_file_of_no_step_is_refused(directory):
    files(directory)[0].rename(directory / "moments/step-zero.safetensors")
    with pytest.raises(ServiceError, match="does not load"):
        read_moments(directory, lively())


@pytest.mark.parametrize(
    "count, chosen",
    [
        (9, [0, 1, 4, 14, 34]),
        (3, [0, 4, 34]),
        (2, [0, 34]),
        (1, [34]),
    ],
)
def test_fewer_moments_are_spread_evenly(count, chosen):
    assert evenly_spaced([0, 1, 4, 14, 34], count) == chosen


def test_no_moments_are_spread_to_none():
    assert evenly_spaced([], 3) == []
