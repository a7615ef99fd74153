"""Passes that are compiled, or recorded as CUDA graphs."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from runs import SMALL, command_line, edited_folder, environment, run
from trainings import furthest, losses_of, printed_losses, trainer_of

from sm_nanogpt.entry_point.config import Config, make_config
from sm_nanogpt.entry_point.cuda_graphs import flat_gradients
from sm_nanogpt.entry_point.device import can_use_graph, compiling_pays, graph_pays
from sm_nanogpt.entry_point.errors import TrainingError
from sm_nanogpt.entry_point.optim import gradient_of


@pytest.mark.parametrize("compiled", [False, True])
def test_one_process_warms_up_only_if_it_compiles(tmp_path, monkeypatch, compiled):
    monkeypatch.setattr(torch, "compile", lambda model, **_: functools.partial(model))
    trainer = trainer_of(tmp_path, max_steps=2, compile="on" if compiled else "off")
    rehearse = Mock()
    monkeypatch.setattr(trainer.passes, "rehearse", rehearse)
    assert trainer.run()
    assert rehearse.call_count == compiled


@pytest.mark.parametrize(
    "device, triton, steps, world_size, pays",
    [
        ("cuda", True, 10**8, 1, True),
        ("cuda", True, 10**8, 8, False),
        ("cuda", True, 10**7, 1, False),
        ("cuda", False, 10**8, 1, False),
        ("cpu", True, 10**8, 1, False),
    ],
)
def test_only_a_long_run_on_a_gpu_is_compiled_by_default(
    monkeypatch, device, triton, steps, world_size, pays
):
    monkeypatch.setattr("sm_nanogpt.entry_point.device.find_spec", lambda name: triton or None)
    config = Config(max_steps=steps, batch_size=16, block_size=32)
    assert compiling_pays(config, torch.device(device), 30_000, world_size) is pays


@pytest.mark.parametrize(
    "device, values, dtype, can_record",
    [
        ("cuda", {}, torch.bfloat16, True),
        ("cuda", {}, torch.float16, False),
        ("cuda", {"compile": "off"}, torch.bfloat16, False),
        ("cuda", {"recompute": True}, torch.bfloat16, True),
        ("cuda", {"recompute": True, "dropout": 0.1}, torch.bfloat16, False),
        ("cpu", {"compile": "on"}, torch.bfloat16, False),
    ],
)
def test_only_gpus_that_may_compile_record(device, values, dtype, can_record):
    assert can_use_graph(Config(**values), torch.device(device), dtype) is can_record


def test_the_compiler_is_imported_only_where_it_is_used():
    """It takes seconds, also in each evaluation and each process of a run on CPUs."""
    code = "import sys, sm_nanogpt.entry_point.train; print('torch._dynamo' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


@pytest.mark.parametrize(
    "preset, parameters, n_gpus, n_passes, pays",
    [
        ("baby", 10_666_752, 8, 1, True),
        ("baby", 10_666_752, 1, 1, True),
        ("gpt2", 123_568_128, 1, 8, True),
        ("gpt2", 123_568_128, 4, 8, False),  # of 24 GB
        ("gpt2", 123_568_128, 8, 1, False),  # of 80 GB
        ("gpt2", 123_568_128, 8, 15, True),
    ],
)
def test_several_gpus_record_short_passes_only(preset, parameters, n_gpus, n_passes, pays):
    """DistributedDataParallel averages the gradients of a long one while it computes."""
    config = make_config({}, preset)
    assert graph_pays(config, parameters, n_gpus, n_passes) is pays


@pytest.mark.parametrize("pays", [False, True])
def test_a_pass_is_recorded_only_where_that_pays(tmp_path, monkeypatch, pays):
    monkeypatch.setattr("sm_nanogpt.entry_point.passes.can_use_graph", lambda *_: True)
    monkeypatch.setattr("sm_nanogpt.entry_point.passes.graph_pays", lambda *_: pays)
    assert trainer_of(tmp_path).passes.uses_graphs is pays


def test_replayed_passes_train_as_executed_ones(tmp_path, cuda):
    values = dict(batch_size=4, gradient_accumulation_steps=2, dropout=0.1, max_steps=4)
    eager = trainer_of(tmp_path / "eager", **values)
    trainer = trainer_of(tmp_path / "recorded", **values)
    trainer.passes.uses_graphs = True
    trainer.passes.warm_up()
    (graph,) = trainer.passes.graphs.values()
    cuda.reset_peak_memory_stats.assert_called_once()
    replay = cuda.CUDAGraph.return_value.replay
    replay.side_effect = lambda: graph.result.copy_(trainer.passes.run_pass(*graph.inputs))
    gradients = [gradient_of(p) for p in trainer.optimizer.parameters.values()]
    for one in (eager, trainer):
        for _ in range(3):
            one.train_step()
    assert replay.call_count == 6
    assert torch.equal(trainer.loss_sum, eager.loss_sum)
    for name, weight in eager.optimizer.parameters.items():
        assert torch.equal(trainer.optimizer.parameters[name], weight)
    for parameter, gradient in zip(trainer.optimizer.parameters.values(), gradients, strict=True):
        assert parameter.grad is gradient  # at its place
    x, y, _ = trainer.passes.batch(0)[0]
    torch.manual_seed(1)
    whole = graph(x, y, 1.0).clone()
    torch.manual_seed(1)
    assert torch.equal(graph(x, y, 0.5), whole / 2)


def test_gradients_are_aligned_views_of_one_buffer():
    parameters = [torch.zeros(3, 11), torch.zeros(64), torch.zeros(1)]
    buffer = flat_gradients(parameters)
    assert len(buffer) == 64 + 64 + 32  # each in whole 128 bytes
    for parameter, begin in zip(parameters, (0, 64, 128), strict=True):
        gradient = gradient_of(parameter)
        assert gradient.shape == parameter.shape
        assert gradient.data_ptr() == buffer[begin:].data_ptr()


@pytest.fixture
def unequal(monkeypatch):
    """Seventeen rows of windows that double, in three passes."""
    monkeypatch.setattr("sm_nanogpt.entry_point.passes.tokens_per_pass", lambda *_: 6 * 32)
    return dict(batch_size=17, block_size=32, short_windows=0.6, max_steps=10)


def test_passes_of_each_shape_are_recorded(tmp_path, cuda, unequal):
    trainer = trainer_of(tmp_path, **unequal)
    trainer.passes.uses_graphs = True
    trainer.passes.warm_up()
    assert set(trainer.passes.graphs) == {  # (rows, length)
        (46, 4), (45, 4),
        (23, 8), (22, 8),
        (12, 16), (11, 16),
        (6, 32), (5, 32),
    }  # fmt: skip


def test_passes_of_each_shape_are_compiled(tmp_path, graphs, unequal):
    """Of a model and of its teacher: beyond a limit, Dynamo would run the others uncompiled."""
    trainer = trainer_of(tmp_path, **unequal, n_layer=1, generations=2, compile="on")
    assert trainer.teacher is not None
    trainer.passes.set_teacher(trainer.teacher)
    trainer.passes.rehearse([0, 2, 4, 6])
    assert len(graphs) == 8 + 8


@pytest.mark.parametrize("fault", ["memory", "it waits for the GPU"])
def test_where_nothing_can_be_recorded_there_is_no_graph(
    tmp_path, cuda, capsys, monkeypatch, fault
):
    trainer = trainer_of(tmp_path)
    trainer.passes.uses_graphs = True
    if fault == "memory":
        cuda.max_memory_allocated.return_value = 6
    modes: list[str] = []
    run_pass = trainer.passes.run_pass

    def waiting(*inputs):
        if modes == ["error"]:
            raise RuntimeError(fault)
        return run_pass(*inputs)

    cuda.set_sync_debug_mode.side_effect = modes.append
    monkeypatch.setattr(trainer.passes, "run_pass", waiting)
    trainer.passes.warm_up()
    assert trainer.passes.graphs == {}
    assert fault in capsys.readouterr().out
    assert modes == ([] if fault == "memory" else ["error", "default"])
    assert cuda.current_stream.return_value.wait_stream.called is (fault != "memory")
    assert all(p.grad is None for p in trainer.model.parameters())
    trainer.train_step()


def test_a_pass_that_fails_while_it_is_recorded_ends_the_run(tmp_path, cuda):
    trainer = trainer_of(tmp_path)
    trainer.passes.uses_graphs = True
    cuda.graph.side_effect = RuntimeError("operation not permitted")
    with pytest.raises(TrainingError, match="compile=off"):
        trainer.passes.warm_up()


def test_a_run_whose_compiler_fails_goes_on_eager_or_ends(tmp_path, monkeypatch, capsys):
    """As compile=auto and compile=on ask for."""
    broken = Mock(side_effect=OSError("no compiler"))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    monkeypatch.setattr("sm_nanogpt.entry_point.passes.compiling_pays", lambda *_: True)
    with pytest.raises(RuntimeError, match="no compiler"):
        trainer_of(tmp_path / "on", compile="on").run()
    losses = []
    with torch.compiler.set_stance("default"):  # which a failure changes, and this puts back
        for choice in ("off", "auto"):
            assert trainer_of(tmp_path / choice, compile=choice).run()
            output = capsys.readouterr().out
            losses.append(printed_losses(output))
            assert output.count("note: rank 0 does not compile: ") == (choice == "auto")
    assert losses[0]
    assert losses[0] == losses[1]


def test_ranks_go_on_together_if_one_cannot_compile(tmp_path, text_file):
    """And a later hang is not blamed on it, which has begun fewer passes than the others."""
    pays = "self.compiled = compiling_pays(config, device, self.n_parameters, world_size)"
    tries = (pays, "self.compiled = True")  # on a CPU too
    broken = (
        "dynamic=False, backend=lambda graph, _: graph.forward if self.group.rank == 0 else 1 / 0"
    )
    command = edited_folder(tmp_path / "train", ("dynamic=False", broken), tries)
    arguments = command_line(
        **SMALL, data=text_file, processes=2, short_windows=0.5, hang_seconds=5
    )
    env = environment(NANOGPT_FAULT="0:7:hang")
    end = run(arguments, cwd=tmp_path, command=command, env=env)
    assert end.output.count("does not compile: ") == 1
    assert "note: rank 1 does not compile: " in end.output
    assert "\nstep=5/" in end.output
    assert end.last_line.startswith("TrainingError: rank 0 on ")


def test_compiling_does_not_change_the_losses_of_ranks(tmp_path, text):
    """With buckets of gradients that cut the graph in two, and logits in chunks."""
    graph_only = ("dynamic=False", 'dynamic=False, backend="aot_eager"')
    chunks = ("LOGITS_AT_ONCE = 1 << 28", "LOGITS_AT_ONCE = 1 << 16")
    values: dict[str, Any] = dict(n_layer=1, n_embd=224)
    values |= dict(max_steps=4, eval_interval=4)
    command = edited_folder(tmp_path / "train", graph_only, chunks)
    eager = losses_of(tmp_path / "eager", text, 1, 2, **values, compile="off")
    compiled = losses_of(tmp_path / "compiled", text, 1, 2, **values, compile="on", command=command)
    assert furthest(eager, compiled) < 1e-4
