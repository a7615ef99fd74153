"""The same training on any number of processes and hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from runs import edited_folder, kill, make_hosts, started, wait_for_line
from trainings import EXACT, assert_same_end, furthest, losses_of, run_ranks, small, trained

from sm_nanogpt.entry_point.cuda_graphs import record_passes


@pytest.fixture(scope="module")
def ddp_losses(tmp_path_factory, text):
    """The losses of two ranks on one host."""
    return losses_of(tmp_path_factory.mktemp("ddp"), text, 1, 2)


def test_losses_do_not_depend_on_processes_or_hosts(tmp_path, text, ddp_losses):
    """And of all hosts and ranks, one prints and writes a model."""
    alone = losses_of(tmp_path, text, 1, 1)
    assert alone[0] - alone[-1] > 1
    assert furthest(alone, ddp_losses) < 1e-5
    of_two_hosts = losses_of(tmp_path, text, 2, 2, gradient_accumulation_steps=3)
    assert furthest(alone, of_two_hosts) < 1e-5
    models = [path.relative_to(tmp_path / "2x2") for path in tmp_path.glob("2x2/*/model")]
    assert models == [Path("algo-1/model")]


# In place of a CUDA graph: the bare model on inputs that stay, with gradients that stay.
GRAPH_ON_CPU = """
from .cuda_graphs import PassGraph, flat_gradients

class Replay:
    def __init__(self, run, x, y):
        self.run, self.inputs = run, [x.clone(), y.clone(), torch.ones(())]
        self.result = run(*self.inputs)

    def __call__(self, x, y, weight):
        for new, recorded in zip((x, y, weight), self.inputs, strict=True):
            recorded.copy_(torch.as_tensor(new))
        return self.result.copy_(self.run(*self.inputs))

def record_passes(run, passes, parameters):
    gradients = flat_gradients(parameters)
    return {x.shape: Replay(run, x, y) for x, y, _ in passes}, gradients

def can_use_graph(*_):
    return True
"""


def graphs_on_cpu(directory: Path, *edits: tuple[str, str]) -> tuple[str, str]:
    """The command of a train.py that replays passes, and adds gradients up once, on CPUs."""
    replay = ("from .cuda_graphs import PassGraph, record_passes\n", GRAPH_ON_CPU)
    use = ("    can_use_graph,\n", "")
    return edited_folder(directory, replay, use, *edits)


def test_one_all_reduce_trains_as_ddp_does(tmp_path, text):
    """With a graph of each length of windows, and passes whose gradients add up.

    And layers that DDP's ranks compute twice have the same dropout.
    """
    values: dict[str, Any] = dict(short_windows=0.6, dropout=0.1, gradient_accumulation_steps=2)
    ddp = losses_of(tmp_path / "ddp", text, 1, 2, **values, recompute=True)
    command = graphs_on_cpu(tmp_path / "train")
    flat = losses_of(tmp_path / "flat", text, 1, 2, **values, command=command)
    assert ddp[0] - ddp[-1] > 1
    assert furthest(ddp, flat) < 1e-5


def test_one_all_reduce_takes_the_buffers_of_rank_0(tmp_path, text):
    """As DistributedDataParallel does before each step, so that a resumed run goes on the same."""
    blocks = "        self.blocks = "
    buffer = '        self.register_buffer("mean", torch.zeros(()), persistent=False)\n'
    last_norm = "        x = norm(x, self.norm)\n"
    use = (
        "        if self.training:\n"
        "            self.mean.lerp_(x.detach().max().float(), 0.5)\n"
        "        x = x * (1 + self.mean)\n"
    )
    edits = [(blocks, buffer + blocks), (last_norm, use + last_norm)]
    ddp = losses_of(tmp_path / "ddp", text, 1, 2, command=edited_folder(tmp_path / "own", *edits))
    command = graphs_on_cpu(tmp_path / "train", *edits)
    assert furthest(ddp, losses_of(tmp_path / "flat", text, 1, 2, command=command)) < 1e-5


def test_weights_of_another_type_are_not_recorded(monkeypatch, capsys):
    memory = Mock(return_value=Mock(total_memory=1e9))
    monkeypatch.setattr("torch.cuda.get_device_properties", memory)
    weights = [torch.zeros(2, dtype=torch.float16)]
    x = torch.zeros(1, 1)
    assert record_passes(Mock(), [(x, x, 1.0)], weights) == ({}, None)
    assert "no CUDA graph" in capsys.readouterr().out


def test_one_all_reduce_resumes_with_the_same_bits(tmp_path, text):
    command = graphs_on_cpu(tmp_path / "train")
    values = {**EXACT, "processes": 2, "command": command}
    trained(tmp_path, make_hosts(tmp_path / "calm", text)[0], **values)
    env = make_hosts(tmp_path / "cut", text)[0]
    with started(small(**EXACT, processes=2), cwd=tmp_path, env=env, command=command) as process:
        wait_for_line(process, "step=12/")
        kill(process)
    trained(tmp_path, env, **values)
    assert_same_end(tmp_path / "cut/algo-1", tmp_path / "calm/algo-1")


def test_ranks_go_without_graphs_if_one_cannot_record(tmp_path, text, ddp_losses):
    """They train by DistributedDataParallel, as if none had tried."""
    records = "    return {x.shape: Replay"
    fails = "    if __import__('os').environ['RANK'] == '1':\n        return {}, None\n"
    command = graphs_on_cpu(tmp_path / "train", (records, fails + records))
    assert ddp_losses == losses_of(tmp_path, text, 1, 2, command=command)


@pytest.mark.parametrize("flat", [False, True], ids=["ddp", "flat"])
def test_gradients_averaged_in_bfloat16_train_alike(tmp_path, text, ddp_losses, flat):
    values: dict[str, Any] = dict(reduce_precision="bfloat16")
    if flat:
        values["command"] = graphs_on_cpu(tmp_path / "train")
    rounded = losses_of(tmp_path, text, 1, 2, **values)
    assert 1e-5 < furthest(ddp_losses, rounded) < 1e-2


def test_ranks_average_gradients_in_float32(tmp_path, text_file):
    """In three steps, as DDP lays its buckets out anew after its first."""
    probe = (
        "for precision in ('float32', 'bfloat16', 'float16'):\n"
        "    how = dict(n_layer=2, n_embd=64, block_size=32, batch_size=12)\n"
        "    trainer = trainer_of(**how, gradient_accumulation_steps=2, precision=precision)\n"
        "    trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), 'scale': 64.0})\n"
        "    randomize(trainer.model)\n"
        "    for step in range(3):\n"
        "        with trainer.passes.trained_net.no_sync():\n"
        "            trainer.passes.forward_backward(step)\n"
        "        own = [p.grad.clone() for p in trainer.model.parameters()]\n"
        "        trainer.model.zero_grad()\n"
        "        trainer.passes.forward_backward(step)\n"
        "        digest = hashlib.sha256()\n"
        "        for mine, p in zip(own, trainer.model.parameters(), strict=True):\n"
        "            mean = group.sum_(mine) / group.world_size\n"
        "            assert (p.grad - mean).abs().max() <= 2**-18 * mean.abs().max(), step\n"
        "            assert (p.grad != p.grad.bfloat16()).any(), step\n"
        "            assert (p.grad != p.grad.half()).any(), step\n"
        "            digest.update(train.memory_of(p.grad))\n"
        "        trainer.model.zero_grad()\n"
        "        print(digest.hexdigest())\n"
    )
    ends = run_ranks(tmp_path, text_file, 3, probe)
    assert len({end.output for end in ends}) == 1, ends


def test_ranks_make_as_many_passes_as_the_smallest_gpu(tmp_path, text_file):
    probe = (
        "passes = sys.modules['sm_nanogpt.entry_point.passes']\n"
        "passes.tokens_per_pass = lambda *_: (1 << 14, 1 << 7)[group.rank]\n"
        "print(trainer_of(block_size=64, batch_size=16).passes.n_passes)\n"
    )
    assert [end.output for end in run_ranks(tmp_path, text_file, 2, probe)] == ["4\n", "4\n"]


def test_shared_updates_have_the_bits_of_one_rank(tmp_path, text_file):
    """In slices, of weights that are fused, wide and tall."""
    probe = (
        "optim = sys.modules['sm_nanogpt.entry_point.optim']\n"
        "optim.SLICE = 1 << 9\n"
        "alone = types.SimpleNamespace(rank=0, world_size=1, device=group.device)\n"
        "alone.async_all_gather = lambda update: lambda: update[None]\n"
        "generator = torch.Generator().manual_seed(1)\n"
        "config = train.Config(weight_decay=0.1)\n"
        "for dtype in (torch.float32, torch.bfloat16):\n"
        "    shared, whole = {}, {}\n"
        "    for i, (rows, columns, n) in enumerate(4 * [(48, 16, 3), (16, 16, 1), (86, 16, 2),"
        " (16, 43, 1)]):\n"
        "        weight = torch.randn(rows, columns, generator=generator)\n"
        "        shared[str(i)], whole[str(i)] = (weight.clone(), n), (weight, n)\n"
        "    given = (shared, group), (whole, alone)\n"
        "    muons = [optim.Muon(weights, config, who, dtype) for weights, who in given]\n"
        "    assert len(muons[1].slices) > 10\n"
        "    for step in range(5):\n"
        "        for name, (weight, _) in whole.items():\n"
        "            weight.grad = torch.randn(weight.shape, generator=generator)\n"
        "            shared[name][0].grad = weight.grad\n"
        "        for muon in muons:\n"
        "            muon.step(1.0)\n"
        "    assert all(torch.equal(shared[name][0], whole[name][0]) for name in whole)\n"
        "    ours, theirs = (muon.state() for muon in muons)\n"
        "    assert list(ours) == list(theirs)\n"
        "    for name, owner in muons[0].owners().items():\n"
        "        assert ours[name].shape == theirs[name].shape\n"
        "        assert ours[name].is_meta == (owner != group.rank)\n"
        "        assert ours[name].is_meta or torch.equal(ours[name], theirs[name])\n"
        "    print(len(set(muons[0].owners().values())))\n"
    )
    for end in run_ranks(tmp_path, text_file, 3, probe):
        assert end.output == "3\n3\n"  # ranks that own a part, in each precision
