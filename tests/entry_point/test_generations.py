"""Generations: models trained in turn, each of them also by the best one before it."""

from __future__ import annotations

import dataclasses
from signal import SIGTERM
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import ended, kill, make_hosts, metrics, started, wait_for_line
from trainings import CUT, EXACT, assert_same_end, run_until_killed, small, trained, trainer_of

from sm_nanogpt.entry_point import kernels
from sm_nanogpt.entry_point.config import Config, check_resumable
from sm_nanogpt.entry_point.conversations import IGNORED
from sm_nanogpt.entry_point.errors import ConfigError
from sm_nanogpt.entry_point.kernels import ChunkedLoss, taught_loss
from sm_nanogpt.entry_point.optim import learning_rate_scale, window_length
from sm_nanogpt.launcher.curve import seconds_left, total_steps
from sm_nanogpt.launcher.job import Request
from sm_nanogpt.launcher.launching.texts import FEW_READINGS, check_readings

THREE = dict(max_steps=10, generations=3, eval_interval=5)


# -- what is learned -------------------------------------------------------------------------------


@pytest.fixture
def logits_and_teacher():
    """Logits of a model, as x @ weight.T; of its teacher; and targets, two of them ignored."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 8, generator=generator) for n in (300, 70))
    teacher = torch.randn(300, 70, generator=generator)
    targets = torch.randint(70, (300,), generator=generator)
    targets[[3, 200]] = IGNORED
    return x.requires_grad_(), weight.requires_grad_(), teacher, targets


def test_the_loss_is_of_the_targets_and_of_the_teacher(logits_and_teacher):
    x, weight, teacher, targets = logits_and_teacher
    logits = x @ weight.T
    learned = targets >= 0
    p = (teacher / 2).softmax(-1)[learned]
    soft = -(p * logits.log_softmax(-1)[learned]).sum(-1).mean()
    hard = F.cross_entropy(logits, targets, ignore_index=IGNORED)
    loss = taught_loss(logits, targets, teacher, 0.3, 2.0)
    assert torch.allclose(loss, 0.3 * soft + 0.7 * hard)


def test_the_loss_in_chunks_has_the_gradients_of_the_whole(logits_and_teacher, monkeypatch):
    x, weight, teacher, targets = logits_and_teacher
    whole = taught_loss(x @ weight.T, targets, teacher, 0.5, 1.2)
    expected = torch.autograd.grad(whole, (x, weight))
    monkeypatch.setattr(kernels, "LOGITS_AT_ONCE", 16 * 128 * 128)
    chunked = ChunkedLoss.apply(x, weight, targets, True, teacher, 0.5, 1.2)
    assert torch.allclose(chunked, whole)
    dx, dweight = torch.autograd.grad(chunked, (x, weight))
    assert torch.allclose(dx, expected[0], atol=1e-7)
    assert torch.allclose(dweight, expected[1], atol=1e-7)


# -- a generation ----------------------------------------------------------------------------------


def test_a_generation_begins_anew_and_its_teacher_is_the_best(tmp_path):
    trainer = trainer_of(tmp_path, **THREE)
    first = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    trainer.train_step()
    trainer.step = THREE["max_steps"]
    trainer.log_metrics(evaluates=True)
    best = {name: t.clone() for name, t in trainer.best.items()}
    trainer.train_step()
    trainer.step = THREE["max_steps"]
    trainer.begin_generation()
    assert trainer.teacher is not None
    for name, tensor in trainer.teacher.state_dict().items():
        assert torch.equal(tensor, best[name])
    new = trainer.model.state_dict()
    assert not torch.equal(new["embed.weight"], first["embed.weight"])
    assert float(new["embed.weight"].std()) == pytest.approx(1, abs=0.1)
    assert not any(bool(tensor.any()) for tensor in trainer.optimizer.state().values())


def test_a_teacher_is_not_trained(tmp_path):
    trainer = trainer_of(tmp_path, **THREE)
    trainer.step = THREE["max_steps"]
    trainer.begin_generation()
    assert trainer.teacher is not None
    weights = [weight.clone() for weight in trainer.teacher.parameters()]
    trainer.train_step()
    for parameter, weight in zip(trainer.teacher.parameters(), weights, strict=True):
        assert torch.equal(parameter, weight)
        assert parameter.grad is None


def test_each_generation_has_the_whole_schedule():
    config = Config(max_steps=100, generations=2, short_windows=0.5, warmup_steps=3)
    for step in (0, 1, 40, 99):
        for function in (learning_rate_scale, window_length):
            assert function(step, config) == function(step + 100, config)


def test_passes_with_a_teacher_are_replayed_as_executed(tmp_path, cuda):
    eager = trainer_of(tmp_path / "eager", **THREE)
    trainer = trainer_of(tmp_path / "recorded", **THREE)
    trainer.passes.uses_graphs = True
    trainer.passes.warm_up()
    plain = dict(trainer.passes.graphs)
    for one in (eager, trainer):
        one.step = THREE["max_steps"]
        one.begin_generation()
    (graph,) = trainer.passes.graphs.values()
    assert graph not in plain.values()
    replay = cuda.CUDAGraph.return_value.replay
    replay.side_effect = lambda: graph.result.copy_(trainer.passes.run_pass(*graph.inputs))
    for one in (eager, trainer):
        for _ in range(3):
            one.train_step()
    assert replay.call_count == 3
    for a, b in zip(eager.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_each_warm_up_compiles_all_that_follows(tmp_path, monkeypatch, graphs):
    """A graph for each of four lengths of windows."""
    lengths = dict(short_windows=0.5, max_steps=8, generations=2, eval_interval=8)
    values = dict(precision="bfloat16", dropout=0.1)  # attention by products
    trainer = trainer_of(tmp_path, n_layer=1, compile="on", **values, **lengths)
    warm_up = trainer.warm_up
    n_graphs: list[int] = []

    def warm_up_and_count() -> None:
        warm_up()
        n_graphs.append(len(graphs))

    monkeypatch.setattr(trainer, "warm_up", warm_up_and_count)
    assert trainer.run()
    assert n_graphs == [4, 12]  # of the model, then of the teacher and of the model that it teaches
    assert len(graphs) == 12


# -- the whole run ---------------------------------------------------------------------------------


def test_killed_generations_end_with_the_same_bits(tmp_path):
    values = {**CUT, **THREE}
    assert trainer_of(tmp_path / "calm", **values).run()
    for step in (17, 23):  # of the second generation and the third
        run_until_killed(trainer_of(tmp_path / "cut", **values), step)
    assert trainer_of(tmp_path / "cut", **values).run()
    assert_same_end(tmp_path / "cut", tmp_path / "calm")


def test_interrupted_generations_of_ranks_do_so_too(tmp_path, text):
    values = {**EXACT, **THREE, "processes": 2}
    trained(tmp_path, make_hosts(tmp_path / "calm", text)[0], **values)
    env = make_hosts(tmp_path / "cut", text)[0]
    with started(small(**values), cwd=tmp_path, env=env) as process:
        wait_for_line(process, "step=17/30")
        kill(process)
    with started(small(**values), cwd=tmp_path, env=env) as process:
        wait_for_line(process, "step=26/30")
        process.send_signal(SIGTERM)
        assert ended(process).status == 128 + SIGTERM
    trained(tmp_path, env, **values)
    assert_same_end(tmp_path / "cut/algo-1", tmp_path / "calm/algo-1")


def test_generations_do_not_depend_on_processes(tmp_path, text):
    """Nor on a kill amid the second of them."""
    values: dict[str, Any] = dict(generations=2, max_steps=10, log_interval=1, eval_interval=10)
    values["checkpoint_seconds"] = 1e-6
    trained(tmp_path, make_hosts(tmp_path / "alone", text)[0], processes=1, **values)
    (env,) = make_hosts(tmp_path / "killed", text)
    fault = {"NANOGPT_FAULT": "1:13:kill"}
    trained(tmp_path, {**env, **fault}, status=137, processes=2, **values)
    trained(tmp_path, env, processes=2, **values)

    losses = {}
    for name in ("alone", "killed"):
        rows = metrics(tmp_path / name / "algo-1/output/data")
        losses[name] = [row["train_loss"] for row in rows]
    assert len(losses["alone"]) == 20
    assert losses["killed"] == pytest.approx(losses["alone"], rel=1e-4)


def test_a_resumed_run_keeps_its_generations():
    config = dataclasses.asdict(Config(max_steps=10, generations=2))
    state = {"config": config, "corpus_sha256": ""}
    with pytest.raises(ConfigError, match="max_steps"):
        check_resumable(state, {**state, "config": {**config, "max_steps": 20}})
    with pytest.raises(ConfigError, match="generations"):
        check_resumable(state, {**state, "config": {**config, "generations": 3}})


def test_progress_is_that_of_all_generations():
    values = dict(max_steps=100, generations=3, batch_size=2, block_size=5)
    assert total_steps(values) == 300
    assert seconds_left({"step": 250, "tokens_per_second": 10}, values) == 50
    assert total_steps({}) is None


def test_generations_on_a_text_read_seldom_are_warned_about(caplog):
    for generations, steps in ((1, 100), (2, 100), (2, 100 * FEW_READINGS)):
        config = Config(max_steps=steps, generations=generations, batch_size=1, block_size=10)
        caplog.clear()
        check_readings(Request(instance="local"), config, 1000)
        assert bool(caplog.records) is (generations == 2 and steps == 100)


def test_the_models_of_a_run_begin_with_other_weights(tmp_path):
    trainer = trainer_of(tmp_path, **THREE)
    weights: list[torch.Tensor] = []
    for step in (10, 20):
        trainer.step = step
        trainer.begin_generation()
        weights.append(trainer.model.embed.weight.detach().clone())
    assert not torch.equal(weights[0], weights[1])
