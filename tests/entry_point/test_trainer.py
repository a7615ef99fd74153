"""One step of a training, its checkpoints and its export, in this process."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from trainings import trainer_of

from sm_nanogpt.entry_point.checkpoint import Checkpoints
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.cores import cores
from sm_nanogpt.entry_point.data import evaluate
from sm_nanogpt.entry_point.errors import TrainingError
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.optim import gradient_of, window_length
from sm_nanogpt.entry_point.resume import save_checkpoint
from sm_nanogpt.launcher.models.load import own_model


def test_short_windows_double_up_to_the_block_size(tmp_path):
    trainer = trainer_of(tmp_path, block_size=8, short_windows=0.6, max_steps=10)
    lengths = [window_length(step, trainer.config) for step in range(10)]
    assert lengths == [1, 1, 2, 2, 4, 4, 8, 8, 8, 8]
    windows: list[torch.Tensor] = []
    trainer.passes.trained_net.register_forward_pre_hook(
        lambda module, inputs: windows.append(inputs[0])
    )
    for step in (0, 2, 4, 6):
        trainer.passes.forward_backward(step)
        assert windows[-1].shape == (12 * 8 // lengths[step], lengths[step])
        x, _ = trainer.passes.batches.rows(step, 0, 1)
        assert torch.equal(windows[-1].view(12, 8), x)


@pytest.mark.parametrize(
    "short_windows, expected", [(0.6, [1, 1, 2, 2, 4, 4, 8, 8]), (1.0, [1, 1, 2, 2, 4, 4])]
)
def test_the_warm_up_makes_two_steps_of_each_window_length(tmp_path, short_windows, expected):
    values = dict(block_size=8, short_windows=short_windows, max_steps=10**9)
    trainer = trainer_of(tmp_path, **values)
    lengths: list[int] = []
    trainer.model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].size(1)))
    # As if there were several ranks.
    trainer.passes.trained_net = torch.nn.DataParallel(trainer.model)
    trainer.passes.warm_up()
    assert lengths == expected


@pytest.mark.parametrize("rows, passes", [(12, 12), (14, 4)])
def test_accumulated_gradients_equal_the_whole_batchs(tmp_path, monkeypatch, rows, passes):
    whole = trainer_of(tmp_path, batch_size=rows)
    monkeypatch.setattr(Config, "passes", lambda *_: passes)
    parts = trainer_of(tmp_path, batch_size=rows)
    mean_loss = whole.model(*whole.passes.batches.rows(3, 0, 1)).detach()
    for trainer in (whole, parts):
        torch.testing.assert_close(trainer.passes.forward_backward(3), mean_loss)
    for one, other in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)


def test_gradients_too_small_for_float16_are_not_lost_in_it(tmp_path):
    values = dict(batch_size=1024, block_size=8, gradient_accumulation_steps=2)
    exact = trainer_of(tmp_path, precision="float32", **values)
    exact.passes.forward_backward(0)
    rounded = trainer_of(tmp_path, precision="float16", **values)
    rounded.passes.forward_backward(0)
    n_nonzero = 0
    for one, other in zip(exact.model.parameters(), rounded.model.parameters(), strict=True):
        exact_gradient = gradient_of(one)
        error = gradient_of(other) / rounded.scaler.get_scale() - exact_gradient
        assert float(error.norm()) <= 0.02 * float(exact_gradient.norm())
        n_nonzero += int(exact_gradient.count_nonzero())
    assert n_nonzero > 100


def test_dropout_is_a_function_of_seed_step_pass_and_rank(tmp_path, monkeypatch):
    seeds: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    for step, rank, values in [
        (3, 0, {}),
        (3, 0, {}),
        (4, 0, {}),
        (3, 1, {}),
        (3, 0, {"seed": 5}),
        (5, 0, {"gradient_accumulation_steps": 2}),
    ]:
        trainer = trainer_of(tmp_path, dropout=0.5, **values)
        trainer.group.rank = rank
        trainer.group.world_size = rank + 1
        trainer.passes.forward_backward(step)
    assert len(seeds) == 7
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 6


@pytest.mark.parametrize("is_main", [True, False])
def test_the_main_rank_logs_that_threads_sleep(tmp_path, monkeypatch, capsys, is_main):
    trainer = trainer_of(tmp_path, max_steps=2)
    trainer.is_main = is_main
    monkeypatch.setattr(trainer.waiting, "look", Mock(side_effect=[False, True]))
    trainer.run()
    n_lines = capsys.readouterr().out.count("other programs use the cores: ")
    assert n_lines == (1 if is_main else 0)


@pytest.mark.parametrize("cost, steps", [(1.0, [2, 8]), (0.0, [2, 4, 6, 8])])
def test_best_weights_are_exported_without_their_checkpoint(
    tmp_path, monkeypatch, capsys, cost, steps
):
    losses = iter([4.0, 2.0, 3.0, 2.05])
    evaluated: list[torch.Tensor] = []
    saved_steps: list[int] = []

    def evaluate(model: GPT, *_: Any) -> float:
        evaluated.append(model.embed.weight.detach().clone())
        return next(losses)

    def save(tensors: Any, state: dict[str, Any], contents: Any) -> None:
        saved_steps.append(state["step"])
        trainer.checkpoints.saved_at = time.monotonic()
        trainer.checkpoints.cost = cost

    monkeypatch.setattr("sm_nanogpt.entry_point.trainer.evaluate", evaluate)
    trainer = trainer_of(tmp_path, max_steps=8, eval_interval=2)
    monkeypatch.setattr(trainer.checkpoints, "save", save)
    assert trainer.run()
    assert saved_steps == steps
    model, _ = own_model(tmp_path / "model")
    assert torch.equal(model.embed.weight, evaluated[1])
    training = json.loads((tmp_path / "model/training.json").read_text())
    assert training["step"] == 4
    assert training["val_loss"] == 2.0
    assert "note: the model is that of step 4; " in capsys.readouterr().out


def test_evaluations_change_no_bit_of_the_training(tmp_path, monkeypatch):
    evaluated: list[torch.Tensor] = []

    def record(model: GPT, *arguments: Any) -> float:
        evaluated.append(model.embed.weight.detach().clone())
        return evaluate(model, *arguments)

    monkeypatch.setattr("sm_nanogpt.entry_point.trainer.evaluate", record)
    last_weights = []
    for interval in (1, 8):
        assert trainer_of(tmp_path / str(interval), max_steps=8, eval_interval=interval).run()
        last_weights.append(evaluated[-1])
    assert len(evaluated) == 8 + 1
    assert torch.equal(last_weights[0], last_weights[1])


def test_a_model_that_has_made_no_step_has_no_speed(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=2)
    trainer.log_metrics(evaluates=True)
    (row,) = trainer.metrics
    assert row.keys() == {
        "step", "val_loss", "best_loss", "bits_per_byte", "learning_rate", "time"
    }  # fmt: skip
    trainer.train_step_and_agree()
    trainer.log_metrics(evaluates=False)
    assert trainer.metrics[1]["tokens_per_second"] > 0


def test_a_resumed_run_exports_the_best_weights_before_it(tmp_path, monkeypatch):
    losses = iter([2.0, 3.0, 4.0])
    monkeypatch.setattr("sm_nanogpt.entry_point.trainer.evaluate", lambda *_: next(losses))
    first = trainer_of(tmp_path, max_steps=4, eval_interval=2)
    assert first.run()
    trainer = trainer_of(tmp_path, max_steps=6, eval_interval=2)
    assert trainer.run()
    assert trainer.best_step == 2
    model, _ = own_model(tmp_path / "model")
    assert torch.equal(model.embed.weight, first.best["embed.weight"])


@pytest.mark.parametrize(
    "evaluates, checkpoint_seconds, cost, seconds",
    [
        (False, 0.0, 0.1, 60),
        (False, 0.0, 2.0, 100),
        (False, 0.0, 60.0, 600),
        (False, 30.0, 2.0, 30),
        (True, 3600.0, 1.0, 50),  # evaluations spend 2 % of the time on them
    ],
)
def test_a_checkpoint_is_due_by_time_and_cost(
    tmp_path, monkeypatch, evaluates, checkpoint_seconds, cost, seconds
):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.cost = cost
    monkeypatch.setattr(time, "monotonic", lambda: 5000.0)
    for passed in (seconds - 1, seconds + 1):
        checkpoints.saved_at = 5000.0 - passed
        assert checkpoints.due(evaluates, checkpoint_seconds) is (passed > seconds)


def test_the_export_uses_the_cores_that_torchrun_leaves_idle(tmp_path, monkeypatch):
    """It sets one thread for each rank, and the others wait meanwhile."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    torch.set_num_threads(1)
    assert trainer_of(tmp_path, max_steps=1).run()
    assert torch.get_num_threads() == cores()


def test_a_full_disk_at_the_end_names_the_directory(tmp_path, monkeypatch):
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr("sm_nanogpt.entry_point.huggingface.write_artefact", full)
    with pytest.raises(TrainingError, match=r"/model: no space left on device"):
        trainer_of(tmp_path).run()


def test_nonfinite_numbers_make_no_checkpoint_and_no_metric(tmp_path, capsys):
    trainer = trainer_of(tmp_path)
    save_checkpoint(trainer)
    trainer.step = trainer.steps_summed = 5
    with torch.no_grad():
        trainer.model.embed.weight[3, 3] = math.nan
    with pytest.raises(TrainingError, match=r"weights .* step 0 is kept"):
        save_checkpoint(trainer)
    trainer.loss_sum.fill_(math.nan)
    for act in (lambda: save_checkpoint(trainer), lambda: trainer.log_metrics(False)):
        with pytest.raises(TrainingError, match="the loss is nan, not finite at step 5"):
            act()
    assert trainer.checkpoints.steps() == [0]
    assert trainer.metrics == []
    assert capsys.readouterr().out == ""
