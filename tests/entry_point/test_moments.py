"""The copies of the weights that show how a model has learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import SMALL
from trainings import ALONE, trainer_of

from sm_nanogpt.entry_point import moments
from sm_nanogpt.entry_point.moments import earlier_moments, moment_steps
from sm_nanogpt.entry_point.safetensors_file import read_safetensors


def files(directory: Path) -> dict[int, Path]:
    paths = (directory / "model/moments").glob("*")
    return {int(path.stem.removeprefix("step-")): path for path in paths}


@pytest.mark.parametrize(
    "n_moments, n_steps, steps",
    [
        (8, 2000, [0, 6, 47, 157, 373, 729, 1259]),
        (8, 3, [0, 1, 2]),
        (2, 2000, [0]),
        (1, 2000, []),
    ],
)
def test_moments_lie_closer_at_the_beginning(n_moments, n_steps, steps):
    assert moment_steps(n_moments, n_steps) == steps


def test_a_run_keeps_its_weights_of_each_moment(tmp_path):
    trainer = trainer_of(tmp_path, moments=4)
    assert trainer.run()
    assert trainer.best_step is not None
    paths = files(tmp_path)
    assert sorted(paths) == [step for step in (0, 1, 3) if step < trainer.best_step]

    again = trainer_of(tmp_path / "again")
    while again.step < max(paths):
        again.train_step()
    tensors, metadata = read_safetensors(paths[again.step], sealed=True)
    assert metadata["step"] == str(again.step)
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensors[name], tensor.bfloat16())


def test_moments_change_no_bit_of_the_model(tmp_path):
    assert trainer_of(tmp_path / "with", moments=8).run()
    assert trainer_of(tmp_path / "without", moments=0).run()
    weights = (tmp_path / "without/model/model.safetensors").read_bytes()
    assert (tmp_path / "with/model/model.safetensors").read_bytes() == weights
    assert not (tmp_path / "without/model/moments").exists()


def test_the_moments_of_a_model_are_of_its_generation(tmp_path):
    trainer = trainer_of(tmp_path, generations=2, max_steps=10)
    trainer.moments.weights = {0: {}, 5: {}, 10: {}, 15: {}}
    for best_step, steps in ((20, [10, 15]), (8, [0, 5]), (None, [])):
        trainer.best_step = best_step
        assert list(trainer.moments_of_best()) == steps


def test_a_longer_run_drops_moments_that_are_not_its_own(tmp_path):
    assert trainer_of(tmp_path).run()
    stale = tmp_path / "model/moments/step-00000099.safetensors"
    stale.write_bytes(b"")
    assert trainer_of(tmp_path, max_steps=SMALL["max_steps"] + 5).run()
    assert not stale.exists()
    assert files(tmp_path)


def test_a_large_model_keeps_no_moments(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(moments, "MAX_PARAMETERS", 1000)
    trainer = trainer_of(tmp_path)
    trainer.introduce(ALONE)
    assert "moments: none, as the model has over" in capsys.readouterr().out
    assert trainer.run()
    assert not files(tmp_path)


def test_moments_of_other_generations_are_not_on_the_way():
    of_steps: dict[int, dict[str, torch.Tensor]] = {0: {}, 5: {}, 10: {}, 15: {}, 20: {}}
    assert list(earlier_moments(of_steps, 20, max_steps=10)) == [10, 15]
    assert list(earlier_moments(of_steps, 7, max_steps=10)) == [0, 5]
    assert not earlier_moments(of_steps, 0, max_steps=10)
