"""The validation loss during a training."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from models import ids, lively
from trainings import run_ranks, trainer_of

from sm_nanogpt.entry_point.data import eval_windows, evaluate, inputs_and_targets, read_windows
from sm_nanogpt.entry_point.trainer import Trainer


def loss_of(trainer: Trainer) -> float:
    return evaluate(trainer.model, trainer.corpus.val, trainer.config, trainer.group)


@pytest.mark.parametrize("n_tokens, count", [(0, 62), (1, 1), (351, 10), (10**6, 62)])
def test_every_evaluation_takes_the_same_spread_windows(tmp_path, monkeypatch, n_tokens, count):
    trainer = trainer_of(tmp_path, eval_tokens=n_tokens)
    windows_read: list[int] = []

    def spy(tokens: Any, starts: Any, *arguments: Any) -> Any:
        windows_read.extend(starts.tolist())
        return read_windows(tokens, starts, *arguments)

    monkeypatch.setattr("sm_nanogpt.entry_point.data.read_windows", spy)
    loss = loss_of(trainer)
    starts = windows_read.copy()
    torch.manual_seed(5)
    trainer.passes.forward_backward(3)
    windows_read.clear()
    assert loss_of(trainer) == loss
    assert windows_read == starts

    assert len(starts) == count
    for start in starts:
        assert start % 32 == 0
        assert start + 33 <= 2000
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    if gaps:
        assert min(gaps) > 0
        assert max(gaps) - min(gaps) <= 32


def test_evaluation_is_the_mean_loss_without_dropout(tmp_path):
    trainer = trainer_of(tmp_path, eval_tokens=0, dropout=0.5)
    # The layers begin as nothing, also to dropout.
    trainer.model.load_state_dict(lively(trainer.config).state_dict())
    value = loss_of(trainer)
    assert trainer.model.training  # on which goes with dropout
    windows = read_windows(trainer.corpus.val, torch.arange(62) * 32, 32)
    x, y = inputs_and_targets(windows, torch.device("cpu"))
    trainer.model.eval()
    with torch.no_grad():
        assert value == pytest.approx(trainer.model(x, y).item(), rel=1e-5)


def test_evaluation_does_not_depend_on_the_number_of_ranks(tmp_path, text_file):
    """With as many threads each as a machine of three cores would give them."""
    probe = (
        "torch.set_num_threads(3 // ranks.world_size)\n"
        "for precision in ('float32', 'bfloat16'):\n"
        "    how = dict(n_layer=2, n_embd=64, block_size=32, batch_size=12)\n"
        "    trainer = trainer_of(**how, precision=precision)\n"
        "    randomize(trainer.model)\n"
        "    value = train.evaluate(trainer.model, trainer.corpus.val, trainer.config, group)\n"
        "    assert isinstance(value, float)\n"
        "    print(value.hex())\n"
    )
    (alone,) = run_ranks(tmp_path, text_file, 1, probe)
    for end in run_ranks(tmp_path, text_file, 3, probe):
        assert end.output == alone.output


@pytest.mark.parametrize("n_ranks", [1, 7])
def test_ranks_show_equally_often_that_they_evaluate(tmp_path, n_ranks):
    """Also those that have fewer chunks: else the watchdog would take them for hung."""
    trainer = trainer_of(tmp_path, block_size=16, eval_tokens=0)
    val = ids(40_000, seed=3)
    counts: list[int] = []
    for rank in range(n_ranks):
        group = MagicMock(rank=rank, world_size=n_ranks, device=torch.device("cpu"))
        group.sum_.side_effect = lambda sums: sums + 1
        evaluate(trainer.model, val, trainer.config, group)
        counts.append(group.heartbeat.call_count)
    n_chunks = len(eval_windows(val, trainer.config))
    assert counts == [math.ceil(n_chunks / n_ranks)] * n_ranks


def test_a_step_may_take_as_long_as_measured_ones(tmp_path, monkeypatch):
    """The host only starts the kernels of a GPU, and waits for them before a metric line."""
    trainer = trainer_of(tmp_path, max_steps=4, log_interval=2, eval_interval=4)
    seconds = 0.0
    allowed_seconds: list[float] = []

    def synchronize() -> None:
        nonlocal seconds
        seconds += 200.0

    monkeypatch.setattr(time, "perf_counter", lambda: seconds)
    monkeypatch.setattr(trainer.group, "synchronize", synchronize)
    monkeypatch.setattr(trainer.group, "allow_seconds", allowed_seconds.append)
    assert trainer.run()
    assert allowed_seconds[:3] == [0.0, 0.0, 5 * 100.0]
