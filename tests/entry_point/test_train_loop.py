"""The training loop, as real processes over gloo."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import functools
import gc
import itertools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch.distributed as dist
from launching import session_of, until
from models import ids, lively
from runs import (
    PROBE,
    SCRIPT,
    SMALL,
    Ended,
    edited_folder,
    ended,
    environment,
    free_port,
    kill,
    make_hosts,
    metrics,
    run,
    run_hosts,
    started,
    wait_for_file,
    wait_for_line,
    words,
)
from trainings import ALONE, EXACT, assert_same_end, small, trained, trainer_of

from entry_point import train
from entry_point.checkpoint import Checkpoints, read_safetensors
from entry_point.config import Config
from entry_point.container import read_container
from entry_point.cores import cores
from entry_point.cuda_graphs import record_passes
from entry_point.data import eval_windows, evaluate, inputs_and_targets, read_windows
from entry_point.device import can_use_graph, choose_precision, compiling_pays
from entry_point.errors import ConfigError, DataError, TrainingError
from entry_point.faults import read_fault
from entry_point.metrics import best_lines, metric_definitions, metric_line
from entry_point.model import GPT
from entry_point.optim import gradient_of, window_length
from entry_point.text import Corpus, load_corpus
from entry_point.trainer import Trainer
from launcher.models.load import own_model

LINE = re.compile(r"step=([0-9]+)/[0-9]+ train_loss=([0-9.]+)")


@pytest.fixture
def sagemaker(tmp_path, text):
    """The environment of a host that is laid out as SageMaker does it, in algo-1."""
    return make_hosts(tmp_path, text)[0]


def printed_losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LINE.findall(output)}


def steps_in(directory: Path) -> list[int]:
    return [row["step"] for row in metrics(directory)]


# -- the same training on any number of processes --------------------------------------------------

# The loss has to fall by a nat in these steps, or there would be little to agree on.
LEARNING = dict(max_steps=30, log_interval=1, eval_interval=15)


def losses_of(tmp_path: Path, text: str, n_hosts: int, per_host: int, **how: Any) -> list[float]:
    """The train losses of all steps, as metrics.jsonl has them and as the lines print them."""
    base = tmp_path / f"{n_hosts}x{per_host}"
    command = how.pop("command", (sys.executable, str(SCRIPT)))
    values = {**LEARNING, **how}
    arguments = small(**values, processes=per_host)
    envs = make_hosts(base, text, n_hosts)
    ends = run_hosts(arguments, cwd=tmp_path, envs=envs, command=command)
    assert all(end.status == 0 for end in ends), "".join(end.output for end in ends)
    assert f"= {n_hosts * per_host} process" in ends[0].output
    notes = [line for end in ends for line in end.output.splitlines() if "note: " in line]
    # torch's warnings are notes; it advises against Python 3.13.0.
    assert not [line for line in notes if "upgrading to Python 3.13.1" not in line]
    losses = [row["train_loss"] for row in metrics(base / "algo-1/output/data")]
    printed = printed_losses(ends[0].output)
    assert list(printed) == list(range(1, values["max_steps"] + 1))
    assert list(printed.values()) == pytest.approx(losses, abs=6e-6)
    return losses


def furthest(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / a for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "precision, tolerance, groups",
    [("float32", 1e-5, [(1, 2, 3), (2, 2, 1)]), ("auto", 1e-2, [(1, 3, 2)])],
    ids=["float32", "as shipped"],
)
def test_losses_do_not_depend_on_processes_or_hosts(tmp_path, text, precision, tolerance, groups):
    expected = losses_of(tmp_path, text, 1, 1, precision=precision)
    assert expected[0] - expected[-1] > 1
    for n_hosts, per_host, passes in groups:
        how = dict(precision=precision, gradient_accumulation_steps=passes)
        losses = losses_of(tmp_path, text, n_hosts, per_host, **how)
        assert furthest(expected, losses) < tolerance, f"{n_hosts} hosts of {per_host}"


# In place of a CUDA graph: the bare model on inputs that stay, with gradients that stay.
GRAPH_ON_CPU = """
from .cuda_graphs import PassGraph, flat_gradients

class Replay:
    def __init__(self, run, x, y):
        self.run, self.inputs = run, [x.clone(), y.clone(), torch.ones(())]
        self.result = run(*self.inputs)

    def __call__(self, x, y, weight):
        for given, kept in zip((x, y, weight), self.inputs, strict=True):
            kept.copy_(torch.as_tensor(given))
        return self.result.copy_(self.run(*self.inputs))

def record_passes(run, passes, parameters):
    gradients = flat_gradients(parameters)
    return {x.shape: Replay(run, x, y) for x, y, _ in passes}, gradients

def can_use_graph(*_):
    return True
"""


def graphs_on_cpu(directory: Path, *edits: tuple[str, str]) -> tuple[str, str]:
    """The command of a train.py that replays passes, and adds gradients up once, on CPUs."""
    line = "from .cuda_graphs import PassGraph, record_passes\n"
    of_devices = "import can_use_graph, compiling_pays, "
    given = (line, GRAPH_ON_CPU), (of_devices, "import compiling_pays, ")
    return edited_folder(directory, *given, *edits)


def test_one_all_reduce_trains_as_ddp_does(tmp_path, text):
    """With a graph of each length of windows, and passes whose gradients add up."""
    how: dict[str, Any] = dict(short_windows=0.6, dropout=0.1)
    how |= dict(gradient_accumulation_steps=2)
    ddp = losses_of(tmp_path / "ddp", text, 1, 2, **how)
    command = graphs_on_cpu(tmp_path / "train")
    flat = losses_of(tmp_path / "flat", text, 1, 2, **how, command=command)
    assert ddp[0] - ddp[-1] > 1
    assert furthest(ddp, flat) < 1e-5


def test_one_all_reduce_takes_the_buffers_of_rank_0(tmp_path, text):
    """As DistributedDataParallel does before each step, so that a resumed run goes on the same."""
    blocks, first = "        self.blocks = ", "        x = norm(x, self.norm)\n"
    mean = '        self.register_buffer("mean", torch.zeros(()), persistent=False)\n'
    use = "        if self.training:\n            self.mean.lerp_(x.detach().max().float(), 0.5)\n"
    use += "        x = x * (1 + self.mean)\n"
    edits = (blocks, mean + blocks), (first, use + first)
    ddp = losses_of(tmp_path / "ddp", text, 1, 2, command=edited_folder(tmp_path / "own", *edits))
    command = graphs_on_cpu(tmp_path / "train", *edits)
    assert furthest(ddp, losses_of(tmp_path / "flat", text, 1, 2, command=command)) < 1e-5


def test_weights_of_another_type_are_not_recorded(monkeypatch, capsys):
    memory = Mock(return_value=Mock(total_memory=1e9))
    monkeypatch.setattr("torch.cuda.get_device_properties", memory)
    weights, x = [torch.zeros(2, dtype=torch.float16)], torch.zeros(1, 1)
    assert record_passes(Mock(), [(x, x, 1.0)], weights) == ({}, None)
    assert "no CUDA graph" in capsys.readouterr().out


def test_one_all_reduce_resumes_with_the_same_bits(tmp_path, text):
    command = graphs_on_cpu(tmp_path / "train")
    how = {**EXACT, "processes": 3, "command": command}
    trained(tmp_path, make_hosts(tmp_path / "calm", text)[0], **how)
    env = make_hosts(tmp_path / "cut", text)[0]
    with started(small(**EXACT, processes=3), cwd=tmp_path, env=env, command=command) as process:
        wait_for_line(process, "step=12/")
        kill(process)
    trained(tmp_path, env, **how)
    assert_same_end(tmp_path / "cut/algo-1", tmp_path / "calm/algo-1")


def test_ranks_go_without_graphs_if_one_cannot_record(tmp_path, text):
    """They train by DistributedDataParallel, as if none had tried."""
    records = "    return {x.shape: Replay"
    fails = "    if __import__('os').environ['RANK'] == '1':\n        return {}, None\n"
    command = graphs_on_cpu(tmp_path / "train", (records, fails + records))
    ddp = losses_of(tmp_path / "ddp", text, 1, 2)
    assert ddp == losses_of(tmp_path / "flat", text, 1, 2, command=command)


@pytest.mark.parametrize("flat", [False, True], ids=["ddp", "flat"])
def test_gradients_averaged_in_bfloat16_train_alike(tmp_path, text, flat):
    how: dict[str, Any] = {}
    if flat:
        how |= dict(command=graphs_on_cpu(tmp_path / "train"))
    exact = losses_of(tmp_path / "exact", text, 1, 2, **how)
    rounded = losses_of(tmp_path / "rounded", text, 1, 2, **how, reduce_precision="bfloat16")
    assert 0 < furthest(exact, rounded) < 1e-2


def test_ranks_that_compute_layers_twice_train_the_same(tmp_path, text):
    how: dict[str, Any] = dict(dropout=0.2, gradient_accumulation_steps=2)
    once, twice = (
        losses_of(tmp_path / str(value), text, 1, 2, **how, recompute=value)
        for value in (False, True)
    )
    assert once == twice


def run_ranks(directory: Path, text_file: Path, world_size: int, probe: str) -> list[Ended]:
    """A probe with the group and the text, as each rank on this machine, as a launcher would."""
    program = directory / "probe.py"
    program.write_text(
        "import hashlib, os, sys, torch\n"
        f"{PROBE}"
        f"container = train.read_container({{}}, train.Options(data={str(text_file)!r}))\n"
        "ranks = train.read_ranks(os.environ, 1)\n"
        "group = train.Group(ranks, torch.device('cpu'), container)\n"
        "def trainer_of(**values):\n"
        "    config = train.Config(**values)\n"
        "    corpus = train.load_corpus(container, config, group)\n"
        "    return train.Trainer(config, container, group, corpus)\n"
        "def randomize(model):\n"
        "    generator = torch.Generator().manual_seed(1)\n"
        "    for p in model.parameters():\n"
        "        p.data.copy_(torch.randn(p.shape, generator=generator) * 0.2)\n"
        f"{probe}"
        "group.close()\n"
        "sys.stdout.flush()\n"
        "os._exit(0)\n"
    )
    group = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    group |= dict(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    ranks = map(str, range(world_size))
    envs = [environment(**group, RANK=rank, LOCAL_RANK=rank) for rank in ranks]
    ends = run_hosts([], cwd=directory, envs=envs, command=(sys.executable, str(program)))
    assert all(end.status == 0 for end in ends), ends
    return ends


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
        "            digest.update(train.memory(p.grad))\n"
        "        trainer.model.zero_grad()\n"
        "        print(digest.hexdigest())\n"
    )
    ends = run_ranks(tmp_path, text_file, 3, probe)
    assert len({end.output for end in ends}) == 1, ends


def test_ranks_make_as_many_passes_as_the_smallest_gpu(tmp_path, text_file):
    probe = (
        "passes = sys.modules['entry_point.passes']\n"
        "passes.tokens_per_pass = lambda *_: (1 << 14, 1 << 7)[group.rank]\n"
        "print(trainer_of(block_size=64, batch_size=16).passes.n_passes)\n"
    )
    assert [end.output for end in run_ranks(tmp_path, text_file, 2, probe)] == ["4\n", "4\n"]


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_shared_updates_have_the_bits_of_one_rank(tmp_path, text_file, n_ranks):
    """In slices, of weights that are fused, wide and tall."""
    probe = (
        "optim = sys.modules['entry_point.optim']\n"
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
    ends = run_ranks(tmp_path, text_file, n_ranks, probe)
    assert {end.output for end in ends} == {2 * f"{n_ranks}\n"}


EXACT |= dict(max_steps=30, log_interval=1, eval_interval=5, checkpoint_seconds=3600)


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, text, n_ranks):
    how = {**EXACT, "processes": n_ranks}
    arguments = small(**how)
    trained(tmp_path, make_hosts(tmp_path / "calm", text)[0], **how)

    env = make_hosts(tmp_path / "cut", text)[0]
    host = tmp_path / "cut/algo-1"
    checkpoints = Checkpoints(host / "checkpoints")
    # First killed in the middle of training, two steps after a checkpoint.
    with started(arguments, cwd=tmp_path, env=env) as process:
        wait_for_line(process, "step=7/")
        kill(process)
    assert checkpoints.steps() == [5]

    # Then in the middle of writing one: half of the file is there.
    halfway = "        file.write(encoded)\n"
    stall = "        if 'checkpoint-' in path.name:\n            file.flush(), time.sleep(600)\n"
    command = edited_folder(tmp_path / "stalling", (halfway, halfway + stall))
    with started(arguments, cwd=tmp_path, env=env, command=command) as process:
        wait_for_line(process, "resumed from the checkpoint of step 5")
        wait_for_line(process, "step=10/")
        half = wait_for_file(host / "checkpoints", "*.sagemaker-ignore")
        kill(process)
    assert half.exists()
    assert checkpoints.steps() == [5]

    # Then stopped by a signal.
    with started(arguments, cwd=tmp_path, env=env) as process:
        wait_for_line(process, "step=12/")
        process.send_signal(SIGTERM)
        end = ended(process)
    stopped = checkpoints.steps()[0]
    assert 12 <= stopped < EXACT["max_steps"]
    assert end.status == 128 + SIGTERM
    assert end.last_line == f"stopped by a signal; the checkpoint of step {stopped} is written"
    assert not (host / "model").exists()

    end = trained(tmp_path, env, **how)
    assert f"resumed from the checkpoint of step {stopped}" in end.output
    assert_same_end(host, tmp_path / "calm/algo-1")
    assert steps_in(host / "output/data") == list(range(1, EXACT["max_steps"] + 1))
    assert not list((host / "checkpoints").glob("*.sagemaker-ignore"))


@pytest.mark.parametrize(
    "processes, numbers", [(1, [SIGINT]), (1, [SIGTERM]), (2, [SIGINT]), (2, [SIGTERM, SIGINT])]
)
def test_a_run_may_be_resumed_to_end_where_it_stopped(tmp_path, sagemaker, processes, numbers):
    """Between two evaluations, at a step whose train_loss is logged.

    Signals in quick succession are one, as from a supervisor.
    """
    how = dict(processes=processes, eval_interval=1000, log_interval=1)
    with started(small(**how, max_steps=10**6), cwd=tmp_path, env=sagemaker) as process:
        wait_for_line(process, "step=5/")
        for number in numbers:
            if len(numbers) == 1:
                process.send_signal(number)
            else:
                os.killpg(process.pid, number)
        end = ended(process)
    assert end.status in [128 + number for number in numbers]
    assert end.last_line.startswith("stopped by a signal; the checkpoint of step ")
    (step,) = Checkpoints(tmp_path / "algo-1/checkpoints").steps()
    end = trained(tmp_path, sagemaker, **how, max_steps=step)
    best = metrics(tmp_path / "algo-1/output/data")[-1]["val_loss"]
    assert f"best val_loss {best:.5f}" in end.output


def test_ranks_end_when_their_parent_is_killed_alone(tmp_path, text_file):
    """As orphans they would go on writing checkpoints beside whoever is started next."""
    with started(small(data=text_file, max_steps=10**6, processes=2), cwd=tmp_path) as process:
        wait_for_line(process, "step=5/")
        assert len(session_of(process.pid)) == 3
        process.send_signal(SIGKILL)
        process.wait()
        until(lambda: not session_of(process.pid))


def test_a_resumed_run_may_change_its_steps_alone(tmp_path):
    assert trainer_of(tmp_path).run()
    kept = Checkpoints(tmp_path / "checkpoints")
    before = kept.path(10).read_bytes()
    other_text = trainer_of(tmp_path, max_steps=20)
    other_text.corpus = dataclasses.replace(other_text.corpus, sha256="other")
    diverging = trainer_of(tmp_path, max_steps=20, log_interval=1, learning_rate=1e37)
    nonfinite = r"the loss is (nan|inf), .* step 1[1-5]; .* step 10 .* learning_rate"
    for trainer, error, said in [
        (trainer_of(tmp_path, n_embd=64, max_steps=20), ConfigError, "n_embd .from 32 to 64"),
        (trainer_of(tmp_path, max_steps=5), ConfigError, r"max_steps \(to 5, .* step 10\)"),
        (other_text, ConfigError, "cannot change its text"),
        (diverging, TrainingError, nonfinite),
    ]:
        with pytest.raises(error, match=said) as caught:
            trainer.run()
        assert caught.type is error
        assert kept.steps()[0] == 10
        assert kept.path(10).read_bytes() == before
    assert trainer_of(tmp_path, max_steps=20).run()
    assert steps_in(tmp_path / "output") == [5, 10, 15, 20]


def test_a_finished_run_started_again_rewrites_its_artefact(tmp_path, capsys):
    assert trainer_of(tmp_path).run()
    model = tmp_path / "model/model.safetensors"
    first, curve = model.read_bytes(), metrics(tmp_path / "output")
    shutil.rmtree(model.parent)
    capsys.readouterr()
    assert trainer_of(tmp_path).run()
    assert model.read_bytes() == first
    assert metrics(tmp_path / "output") == curve
    assert not LINE.search(capsys.readouterr().out)


def test_an_interruption_does_not_change_a_metric(tmp_path, text):
    """Checkpoints after every step, and an end between two metric lines."""
    how: dict[str, Any] = dict(log_interval=20, eval_interval=20, max_steps=20)
    how["checkpoint_seconds"] = 1e-6

    def losses_in(name: str) -> list[float]:
        return [row["train_loss"] for row in metrics(tmp_path / name / "algo-1/output/data")]

    trained(tmp_path, make_hosts(tmp_path / "whole", text)[0], processes=2, **how)
    for before, status, expected in [
        (2, 137, losses_in("whole")),
        (1, -9, pytest.approx(losses_in("whole"), rel=0.02)),
    ]:
        (env,) = make_hosts(tmp_path / f"cut {before}", text)
        fault = {"NANOGPT_FAULT": "0:12:kill"}
        trained(tmp_path, {**env, **fault}, status=status, processes=before, **how)
        end = trained(tmp_path, env, processes=2, **how)
        assert "resumed from the checkpoint of step 12" in end.output
        assert ("note: the checkpoint is of " in end.output) == (before == 1)
        assert losses_in(f"cut {before}") == expected


def test_a_killed_run_resumes_on_any_number_of_ranks(tmp_path, text_file):
    """With the losses of one that was not interrupted, to rounding, and checkpoints of one form."""
    how = dict(log_interval=1, weight_decay=0.1)
    killed = environment(NANOGPT_FAULT="1:6:kill")
    forms = []
    for out, status, env in (("calm", 0, None), ("cut", 137, killed)):
        often = dict(data=text_file, out=out, processes=3, checkpoint_seconds=1e-6)
        trained(tmp_path, env, status=status, **how, **often)
    for ranks in (1, 2, 4):
        out = f"on {ranks}"
        shutil.copytree(tmp_path / "cut", tmp_path / out)
        end = run(words(resume=out, processes=ranks), cwd=tmp_path)
        assert "resumed from the checkpoint of step 6" in end.output
        losses, expected = (
            [row["train_loss"] for row in metrics(tmp_path / name / "output")]
            for name in (out, "calm")
        )
        assert furthest(expected, losses) < 1e-5
        newest, _ = read_safetensors(Checkpoints(tmp_path / out / "checkpoints").path(10))
        forms.append({name: tensor.shape for name, tensor in newest.items()})
    assert forms[0] == forms[1] == forms[2]


def test_a_disk_full_amid_a_checkpoint_ends_all_ranks(tmp_path, text_file):
    """The limit on the size of a file is reached when the other rank sends what it owns."""
    limited = ("bash", "-c", 'ulimit -f 600; exec "$@"', "bash", sys.executable, str(SCRIPT))
    how: dict[str, Any] = dict(n_embd=64, processes=2, hang_seconds=600, command=limited)
    end = trained(tmp_path, status=1, data=text_file, out="out", **how)
    said = r"TrainingError: cannot write .*/checkpoint-00000005\.\w+: File too large"
    assert re.fullmatch(said, end.last_line)
    assert not list((tmp_path / "out/checkpoints").glob("checkpoint-*"))


def test_outside_sagemaker_only_resume_resumes_a_run(tmp_path, text_file):
    trained(tmp_path, data=text_file, out="mine", processes=3)
    model = tmp_path / "mine/model/model.safetensors"
    before = model.read_bytes()
    again = trained(tmp_path, status=2, data=text_file, out="mine")
    assert again.last_line.startswith("ConfigError: mine already holds a run; ")
    assert model.read_bytes() == before

    resumed = run(words(resume="mine", max_steps=20), cwd=tmp_path)
    assert resumed.status == 0, resumed.output
    assert "= 3 processes in one group" in resumed.output
    assert steps_in(tmp_path / "mine/output") == [5, 10, 15, 20]


def test_a_directory_in_use_by_another_run_is_refused(tmp_path, text_file):
    long = dict(data=text_file, max_steps=10**6, log_interval=1, eval_interval=10**6)
    long["checkpoint_seconds"] = 1e-6
    with started(small(**long, out="mine"), cwd=tmp_path) as process:
        wait_for_line(process, "step=5/")
        for how in ({"out": "mine", "processes": 2}, {"resume": "mine"}):
            refused = trained(tmp_path, status=2, **long, **how)
            assert refused.last_line.startswith("ConfigError: mine is in use by another run; ")
    rows = (tmp_path / "mine/checkpoints/metrics-00000001.jsonl").read_text().splitlines()
    steps = [json.loads(row)["step"] for row in rows[:-1]]  # the last may be cut off by the end
    assert steps == list(range(1, len(steps) + 1))


def test_a_run_that_began_during_tokenization_is_not_resumed(tmp_path, text_file, monkeypatch):
    def meanwhile(*arguments: Any) -> Corpus:
        trainer_of(tmp_path).save_checkpoint()
        return load_corpus(*arguments)

    monkeypatch.setattr("entry_point.train.load_corpus", meanwhile)
    monkeypatch.setattr("entry_point.train.keep_freed_memory", Mock())
    config, options = train.parse_argv(small(data=text_file, out=tmp_path))
    with pytest.raises(ConfigError, match="already holds a run"):
        train.train(config, options, read_container({}, options), ALONE)


def test_a_directory_that_cannot_be_locked_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "none available")))
    Checkpoints(tmp_path).claim()


def test_ranks_end_together_if_the_loss_of_one_is_nan(tmp_path, text_file):
    probe = (
        "trainer = trainer_of(n_layer=1, n_embd=16, block_size=8)\n"
        "trainer.loss_sum.fill_(float('nan') if group.rank else 1.0)\n"
        "try:\n"
        "    trainer.save_checkpoint()\n"
        "except train.TrainingError as error:\n"
        "    print(error)\n"
    )
    for end in run_ranks(tmp_path, text_file, 2, probe):
        assert end.last_line.startswith("the loss is nan, ")


# -- one step --------------------------------------------------------------------------------------


def test_short_windows_double_up_to_the_block_size(tmp_path):
    trainer = trainer_of(tmp_path, block_size=8, short_windows=0.6, max_steps=10)
    lengths = [window_length(step, trainer.config) for step in range(10)]
    assert lengths == [1, 1, 2, 2, 4, 4, 8, 8, 8, 8]
    seen: list[torch.Tensor] = []
    trainer.passes.trained_net.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0])
    )
    for step in (0, 2, 4, 6):
        trainer.passes.forward_backward(step)
        assert seen[-1].shape == (12 * 8 // lengths[step], lengths[step])
        assert torch.equal(seen[-1].view(12, 8), trainer.passes.batches.rows(step, 0, 1)[0])


@pytest.mark.parametrize(
    "short_windows, expected", [(0.6, [1, 2, 4, 8]), (1.0, [1, 2, 4]), (0.0, [8])]
)
def test_the_warm_up_makes_two_steps_of_each_window_length(tmp_path, short_windows, expected):
    how = dict(block_size=8, short_windows=short_windows, max_steps=10**9)
    trainer = trainer_of(tmp_path, **how)
    seen: list[int] = []
    trainer.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].size(1)))
    trainer.passes.trained_net = torch.nn.DataParallel(
        trainer.model
    )  # as if there were several ranks
    trainer.passes.warm_up()
    assert seen == [length for length in expected for _ in range(2)]


@pytest.mark.parametrize("rows, passes", [(12, 2), (12, 4), (12, 12), (13, 2), (14, 4)])
def test_accumulated_gradients_equal_the_whole_batchs(tmp_path, monkeypatch, rows, passes):
    whole = trainer_of(tmp_path, batch_size=rows)
    monkeypatch.setattr(Config, "passes", lambda *_: passes)
    parts = trainer_of(tmp_path, batch_size=rows)
    mean_loss = whole.model(*whole.passes.batches.rows(3, 0, 1)).detach()
    for trainer in (whole, parts):
        torch.testing.assert_close(trainer.passes.forward_backward(3), mean_loss)
    for one, other in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_too_small_for_float16_are_not_lost_in_it(tmp_path, passes):
    how = dict(batch_size=1024, block_size=8, gradient_accumulation_steps=passes)
    exact, ours = (trainer_of(tmp_path, precision=p, **how) for p in ("float32", "float16"))
    for trainer in (exact, ours):
        trainer.passes.forward_backward(0)
    seen = 0
    for one, other in zip(exact.model.parameters(), ours.model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        found = other.grad / ours.scaler.get_scale()
        assert float((found - one.grad).norm()) <= 0.02 * float(one.grad.norm())
        seen += int(one.grad.count_nonzero())
    assert seen > 100


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
        one = trainer_of(tmp_path, dropout=0.5, **values)
        one.group.rank, one.group.world_size = rank, rank + 1
        one.passes.forward_backward(step)
    first, *rest = seeds
    assert first == rest[0]
    assert len(set(rest)) == len(rest) == 6


def test_dropout_is_drawn_from_the_steps_own_seed(tmp_path):
    one = trainer_of(tmp_path, dropout=0.5)
    one.model.load_state_dict(lively(one.config).state_dict())
    torch.manual_seed(1)
    first = one.passes.forward_backward(3)
    torch.manual_seed(2)
    assert torch.equal(first, one.passes.forward_backward(3))
    assert not torch.equal(first, one.passes.forward_backward(4))


@pytest.mark.parametrize("cost, steps", [(1.0, [2, 8]), (0.0, [2, 4, 6, 8])])
def test_best_weights_are_exported_without_their_checkpoint(
    tmp_path, monkeypatch, capsys, cost, steps
):
    losses = iter([4.0, 2.0, 3.0, 2.05])
    seen: list[torch.Tensor] = []
    written: list[int] = []

    def evaluate(model: GPT, *_: Any) -> float:
        seen.append(model.embed.weight.detach().clone())
        return next(losses)

    def save(tensors: Any, state: dict[str, Any], contents: Any) -> None:
        written.append(state["step"])
        trainer.checkpoints.saved_at, trainer.checkpoints.cost = time.monotonic(), cost

    monkeypatch.setattr("entry_point.trainer.evaluate", evaluate)
    trainer = trainer_of(tmp_path, max_steps=8, eval_interval=2)
    monkeypatch.setattr(trainer.checkpoints, "save", save)
    assert trainer.run()
    assert written == steps
    model, _ = own_model(tmp_path / "model")
    assert torch.equal(model.embed.weight, seen[1])
    assert "note: the model is that of step 4; " in capsys.readouterr().out


def test_evaluations_change_no_bit_of_the_training(tmp_path, monkeypatch):
    evaluated: list[torch.Tensor] = []

    def record(model: GPT, *rest: Any) -> float:
        evaluated.append(model.embed.weight.detach().clone())
        return evaluate(model, *rest)

    monkeypatch.setattr("entry_point.trainer.evaluate", record)
    last_weights = []
    for interval in (1, 8):
        assert trainer_of(tmp_path / str(interval), max_steps=8, eval_interval=interval).run()
        last_weights.append(evaluated[-1])
    assert len(evaluated) == 8 + 1
    assert torch.equal(*last_weights)


def test_a_resumed_run_exports_the_best_weights_before_it(tmp_path, monkeypatch):
    losses = iter([2.0, 3.0, 4.0])
    monkeypatch.setattr("entry_point.trainer.evaluate", lambda *_: next(losses))
    first = trainer_of(tmp_path, max_steps=4, eval_interval=2)
    assert first.run()
    trainer = trainer_of(tmp_path, max_steps=6, eval_interval=2)
    assert trainer.run()
    assert trainer.best_step == 2
    model, _ = own_model(tmp_path / "model")
    assert torch.equal(model.embed.weight, first.best["embed.weight"])


@pytest.mark.parametrize(
    "evaluates, said, cost, seconds",
    [
        (False, 0.0, 0.1, 60),
        (False, 0.0, 2.0, 100),
        (False, 0.0, 60.0, 600),
        (False, 30.0, 2.0, 30),
        (False, 3600.0, 1.0, 3600),
        (True, 3600.0, 1.0, 50),  # evaluations spend 2 % of the time on them
    ],
)
def test_a_checkpoint_is_due_by_time_and_cost(
    tmp_path, monkeypatch, evaluates, said, cost, seconds
):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.cost = cost
    monkeypatch.setattr(time, "monotonic", lambda: 5000.0)
    for passed in (seconds - 1, seconds + 1):
        checkpoints.saved_at = 5000.0 - passed
        assert checkpoints.due(evaluates, said) is (passed > seconds)


def test_the_export_uses_the_cores_that_torchrun_leaves_idle(tmp_path, monkeypatch):
    """It sets one thread for each rank, and the others wait meanwhile."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert trainer_of(tmp_path, max_steps=1).run()
    threads = torch.get_num_threads()
    torch.set_num_threads(before)
    assert threads == cores()


def test_a_full_disk_at_the_end_names_the_directory(tmp_path, monkeypatch):
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr("entry_point.huggingface.write_artefact", full)
    with pytest.raises(TrainingError, match=r"/model: No space left on device"):
        trainer_of(tmp_path).run()


def test_nonfinite_numbers_make_no_checkpoint_and_no_metric(tmp_path, capsys):
    trainer = trainer_of(tmp_path)
    trainer.save_checkpoint()
    trainer.step = trainer.steps_summed = 5
    with torch.no_grad():
        trainer.model.embed.weight[3, 3] = math.nan
    with pytest.raises(TrainingError, match=r"weights .* step 0 is kept"):
        trainer.save_checkpoint()
    trainer.loss_sum.fill_(math.nan)
    for act in (trainer.save_checkpoint, lambda: trainer.log_metrics(False)):
        with pytest.raises(TrainingError, match="the loss is nan, not finite at step 5"):
            act()
    assert trainer.checkpoints.steps() == [0]
    assert (trainer.metrics, capsys.readouterr().out) == ([], "")


# -- float16 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "capability, dtype",
    [((8, 6), "bfloat16"), ((7, 5), "float16"), ((7, 0), "float16"), ((6, 1), "float32")],
)
def test_each_gpu_computes_in_its_fastest_16_bit_type(monkeypatch, capability, dtype):
    def supported(including_emulation: bool = True) -> bool:
        return including_emulation or capability >= (8, 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    gpu = torch.device("cuda", 0)
    assert choose_precision(Config(), gpu) == getattr(torch, dtype)
    for precision in ("bfloat16", "float16", "float32"):  # which the person knows best
        assert choose_precision(Config(precision=precision), gpu) == getattr(torch, precision)


def test_infinite_gradients_change_only_the_scale(tmp_path):
    trainer = trainer_of(tmp_path, precision="float16", max_steps=3)
    first = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 2.0**100})
    assert trainer.run()
    assert trainer.scaler.get_scale() == 2.0**97
    for name, tensor in trainer.tensors().items():
        assert torch.equal(tensor, first[name]), name


def test_gradients_infinite_at_any_scale_end_the_run(tmp_path):
    trainer = trainer_of(tmp_path, precision="float16", max_steps=100)
    trainer.model.embed.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(TrainingError, match=r"gradients are not .* or precision=float32"):
        trainer.run()


def test_ranks_resume_a_curve_of_11_mb_and_their_scale(tmp_path, text_file):
    probe = (
        "how = dict(n_layer=1, n_embd=16, block_size=8, precision='float16')\n"
        "first, resumed = (trainer_of(**how) for _ in range(2))\n"
        "state = {**first.scaler.state_dict(), 'scale': 128.0, '_growth_tracker': 7}\n"
        "first.scaler.load_state_dict(state)\n"
        "first.metrics = [{'step': step, 'text': 100 * '1'} for step in range(90_000)]\n"
        "first.save_checkpoint()\n"
        "resumed.restore()\n"
        "print(resumed.scaler.state_dict() == state, len(resumed.metrics))\n"
    )
    ends = run_ranks(tmp_path, text_file, 2, probe)
    assert [end.last_line for end in ends] == ["True 90000", "True 0"]


def test_gradients_in_float16_are_clipped_as_in_float32(tmp_path):
    states = []
    for precision in ("float32", "float16"):
        how = dict(precision=precision, max_steps=1, grad_clip=0.01)
        trainer = trainer_of(tmp_path / precision, **how)
        assert trainer.run()
        states.append(trainer.optimizer.state())
    for name, exact in states[0].items():
        assert float((states[1][name] - exact).norm()) <= 0.02 * float(exact.norm()), name


def test_a_run_may_be_resumed_in_another_precision(tmp_path):
    """As on another GPU."""
    for max_steps, precision in enumerate(("float16", "bfloat16", "float16", "float32"), start=5):
        assert trainer_of(tmp_path, precision=precision, max_steps=max_steps).run()


@pytest.mark.parametrize(
    "how",
    [dict(precision="bfloat16", dropout=0.1), dict(precision="float32")],
    ids=["attention by products", "fused attention"],
)
def test_nothing_is_compiled_after_the_warm_up(tmp_path, graphs, how):
    """With windows of four lengths."""
    lengths = dict(n_layer=1, short_windows=0.5, max_steps=8, eval_interval=4)
    trainer = trainer_of(tmp_path, compile="on", **how, **lengths)
    trainer.passes.warm_up()
    compiled = len(graphs)
    assert compiled
    assert trainer.run()
    assert len(graphs) == compiled


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
    monkeypatch.setattr("entry_point.device.find_spec", lambda name: triton or None)
    config = Config(max_steps=steps, batch_size=16, block_size=32)
    assert compiling_pays(config, torch.device(device), 30_000, world_size) is pays


@pytest.mark.parametrize(
    "device, how, dtype, may",
    [
        ("cuda", {}, torch.bfloat16, True),
        ("cuda", {}, torch.float16, False),
        ("cuda", {"compile": "off"}, torch.bfloat16, False),
        ("cuda", {"recompute": True}, torch.bfloat16, True),
        ("cuda", {"recompute": True, "dropout": 0.1}, torch.bfloat16, False),
        ("cpu", {"compile": "on"}, torch.bfloat16, False),
    ],
)
def test_only_gpus_that_may_compile_record(device, how, dtype, may):
    assert can_use_graph(Config(**how), torch.device(device), dtype) is may


def test_replayed_passes_train_as_executed_ones(tmp_path, cuda):
    how = dict(batch_size=4, gradient_accumulation_steps=2, dropout=0.1, max_steps=4)
    eager, trainer = (trainer_of(tmp_path / name, **how) for name in ("eager", "recorded"))
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


@pytest.fixture
def unequal(monkeypatch):
    """Seventeen rows of windows that double, in three passes."""
    monkeypatch.setattr("entry_point.passes.tokens_per_pass", lambda *_: 6 * 32)
    return dict(batch_size=17, block_size=32, short_windows=0.6, max_steps=10)


def test_passes_of_each_shape_are_recorded(tmp_path, cuda, unequal):
    trainer = trainer_of(tmp_path, **unequal)
    trainer.passes.uses_graphs = True
    trainer.passes.warm_up()
    lengths = {4: (46, 45), 8: (23, 22), 16: (12, 11), 32: (6, 5)}
    shapes = {(rows, length) for length, both in lengths.items() for rows in both}
    assert trainer.passes.graphs.keys() == shapes


def test_passes_of_each_shape_are_compiled(tmp_path, monkeypatch, unequal):
    """Those of a teacher too: beyond a limit, Dynamo would run the others uncompiled."""
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    trainer = trainer_of(tmp_path, **unequal, n_layer=1, generations=2, compile="on")
    torch.compiler.reset()
    trainer.passes.rehearse([0, 2, 4, 6])
    assert len(compiled) == 8
    assert trainer.teacher is not None
    trainer.passes.set_teacher(trainer.teacher)
    trainer.passes.rehearse([0, 2, 4, 6])
    assert len(compiled) == 8 + 16
    torch.compiler.reset()


@pytest.mark.parametrize("fault", ["memory", "it waits for the GPU"])
def test_where_nothing_can_be_recorded_there_is_no_graph(
    tmp_path, cuda, capsys, monkeypatch, fault
):
    trainer = trainer_of(tmp_path)
    trainer.passes.uses_graphs = True
    if fault == "memory":
        cuda.max_memory_allocated.return_value = 6
    modes, run_pass = list[str](), trainer.passes.run_pass

    def waiting(*given):
        if modes == ["error"]:
            raise RuntimeError(fault)
        return run_pass(*given)

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
    monkeypatch.setattr("entry_point.passes.compiling_pays", lambda *_: True)
    with pytest.raises(RuntimeError, match="no compiler"):
        trainer_of(tmp_path / "on", compile="on").run()
    losses = []
    with torch.compiler.set_stance("default"):  # which a failure changes, and this puts back
        for how in ("off", "auto"):
            assert trainer_of(tmp_path / how, compile=how).run()
            output = capsys.readouterr().out
            losses.append(printed_losses(output))
            assert output.count("note: rank 0 does not compile: ") == (how == "auto")
    assert losses[0] == losses[1] != {}


def test_ranks_go_on_together_if_one_cannot_compile(tmp_path, text_file):
    """And a later hang is not blamed on it, which has begun fewer passes than the others."""
    pays = "self.compiled = compiling_pays(config, group.device, size, group.world_size)"
    tries = (pays, "self.compiled = True")  # on a CPU too
    broken = (
        "dynamic=False, backend=lambda graph, _: graph.forward if self.group.rank == 0 else 1 / 0"
    )
    command = edited_folder(tmp_path / "train", ("dynamic=False", broken), tries)
    arguments = words(**SMALL, data=text_file, processes=2, short_windows=0.5, hang_seconds=5)
    env = environment(NANOGPT_FAULT="0:7:hang")
    end = run(arguments, cwd=tmp_path, command=command, env=env)
    assert end.output.count("does not compile: ") == 1
    assert "note: rank 1 does not compile: " in end.output
    assert "\nstep=5/" in end.output
    assert end.last_line.startswith("TrainingError: rank 0 on ")


def test_compiling_does_not_change_the_losses_of_ranks(tmp_path, text):
    """With lengths of windows that change, and buckets of gradients that cut the graph in two."""
    graph_only = ("dynamic=False", 'dynamic=False, backend="aot_eager"')
    how: dict[str, Any] = dict(n_layer=1, n_embd=224, short_windows=0.6)
    how |= dict(max_steps=10, eval_interval=5)
    command = edited_folder(tmp_path / "train", graph_only)
    eager = losses_of(tmp_path / "eager", text, 1, 2, **how, compile="off")
    compiled = losses_of(tmp_path / "compiled", text, 1, 2, **how, compile="on", command=command)
    assert furthest(eager, compiled) < 1e-4


# -- evaluation ------------------------------------------------------------------------------------


def loss_of(trainer: Trainer) -> float:
    return evaluate(trainer.model, trainer.corpus.val, trainer.config, trainer.group)


@pytest.mark.parametrize("n_tokens, count", [(0, 62), (1, 1), (320, 10), (351, 10), (10**6, 62)])
def test_every_evaluation_takes_the_same_spread_windows(tmp_path, monkeypatch, n_tokens, count):
    trainer = trainer_of(tmp_path, eval_tokens=n_tokens)
    seen: list[int] = []

    def spy(tokens: Any, places: Any, *where: Any) -> Any:
        seen.extend(places.tolist())
        return read_windows(tokens, places, *where)

    monkeypatch.setattr("entry_point.data.read_windows", spy)
    first = loss_of(trainer)
    starts = seen.copy()
    torch.manual_seed(5)
    trainer.passes.forward_backward(3)
    seen.clear()
    assert loss_of(trainer) == first
    assert seen == starts
    assert len(set(starts)) == len(starts) == count
    assert all(start % 32 == 0 and start + 33 <= 2000 for start in starts)
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert not gaps or max(gaps) - min(gaps) <= 32


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
    """With as many threads each as a machine of four cores would give them."""
    probe = (
        "torch.set_num_threads(4 // ranks.world_size)\n"
        "for precision in ('float32', 'bfloat16'):\n"
        "    how = dict(n_layer=2, n_embd=64, block_size=32, eval_tokens=0, batch_size=12)\n"
        "    trainer = trainer_of(**how, precision=precision)\n"
        "    randomize(trainer.model)\n"
        "    value = train.evaluate(trainer.model, trainer.corpus.val, trainer.config, group)\n"
        "    assert isinstance(value, float)\n"
        "    print(value.hex())\n"
    )
    ends = [end for n in (1, 3) for end in run_ranks(tmp_path, text_file, n, probe)]
    assert len({end.output for end in ends}) == 1, ends


@pytest.mark.parametrize("n_ranks", [1, 3, 7])
def test_ranks_show_equally_often_that_they_evaluate(tmp_path, n_ranks):
    """Also those that have fewer chunks: else the watchdog would take them for hung."""
    trainer = trainer_of(tmp_path, block_size=16, eval_tokens=0)
    val, counts = ids(40_000, seed=3), list[int]()
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
    clock, allowed = [0.0], list[float]()

    def synchronize() -> None:
        clock[0] += 200.0

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(trainer.group, "synchronize", synchronize)
    monkeypatch.setattr(trainer.group, "allow_seconds", allowed.append)
    assert trainer.run()
    assert allowed[:3] == [0.0, 0.0, 5 * 100.0]


# -- what it prints and leaves ---------------------------------------------------------------------


def test_a_long_run_says_once_how_long_it_takes(tmp_path, monkeypatch, capsys):
    trainer = trainer_of(tmp_path, max_steps=100)
    trainer.step, trainer.timer = 8, Mock(measure=Mock(return_value=10.0))
    trainer.log_duration()
    note = capsys.readouterr().out
    assert note == "note: 10 s a step: about 0:15:20 to step 100\n"
    trainer.timer.measure.return_value = 0.3
    trainer.log_duration()  # half a minute for the rest
    assert not capsys.readouterr().out

    monkeypatch.setattr("entry_point.trainer.LONG_RUN", 0.0)
    for steps in (5, 10):  # the second resumes
        trainer = trainer_of(tmp_path, max_steps=steps)
        monkeypatch.setattr(time, "perf_counter", lambda one=trainer: 10.0 * one.step)
        assert trainer.run()
        assert capsys.readouterr().out.count("note: 10 s a step: about 0:00:20 to step ") == 1


@pytest.mark.parametrize("prefix", ["", "[1,mpirank:0,algo-1]<stdout>:"])
def test_each_metric_regex_finds_only_its_own_number(prefix):
    row = dict(step=250, train_loss=2.130314, val_loss=10.5, best_loss=9.25, learning_rate=0.00001)
    row |= {"bits_per_byte": 2.25, "tokens_per_second": 25765.4}
    line = prefix + metric_line(row, 2000, 72.4)
    found = {each["Name"]: re.findall(each["Regex"], line) for each in metric_definitions()}
    assert found == {
        "step": ["250"],
        "train_loss": ["2.13031"],
        "val_loss": ["10.50000"],
        "best_loss": ["9.25000"],
        "bits_per_byte": ["2.25000"],
        "learning_rate": ["0.0000100"],
        "tokens_per_second": ["25765"],
    }
    assert re.match(r".*step=250/2000 train_loss=2.13031 .* time_left=0:01:12$", line)
    del row["val_loss"]
    assert "val_loss" not in metric_line(row, 2000, 0)


def test_a_run_whose_log_has_no_reader_ends(tmp_path, sagemaker):
    endless = small(max_steps=10**6, processes=2)
    with started(endless, cwd=tmp_path, env=sagemaker, stderr=subprocess.PIPE) as process:
        wait_for_line(process, "step=5/")
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        status = process.wait()
    assert (status, said) == (1, "BrokenPipeError: [Errno 32] Broken pipe\n")


@pytest.fixture(scope="module")
def mpirun(tmp_path_factory, text):
    """A host on which mpirun has started two processes, and what each printed."""
    base = tmp_path_factory.mktemp("mpirun")
    (env,) = make_hosts(base, text)
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")]
    envs = [{**env, **dict(zip(names, (rank, rank, "2", "2"), strict=True))} for rank in "01"]
    ends = run_hosts(small(sample_length=90), cwd=base, envs=envs)
    assert [end.status for end in ends] == [0, 0], ends
    return base / "algo-1", *(end.output for end in ends)


def test_under_mpirun_only_rank_0_prints(mpirun):
    host, first, second = mpirun
    assert "2 processes in one group (launched by mpirun" in first
    assert second == ""
    rows = metrics(host / "output/data")
    assert [round(row["train_loss"], 5) for row in rows] == [*printed_losses(first).values()]
    model, tokenizer = own_model(host / "model")
    parameters = sum(p.numel() for p in model.parameters())
    assert f"\n{parameters:,} parameters; " in first
    assert f" vocabulary {len(tokenizer)}\n" in first


def test_samples_are_printed_before_and_after_training(mpirun):
    heads = r"^--- sample (before|after) training ---\n"
    start, *rest = re.split(heads, mpirun[1], flags=re.M)
    assert rest[::2] == ["before", "after"]
    parts = [start, *rest[1::2]]
    assert [bool(LINE.search(part)) for part in parts] == [False, True, False]
    lengths = [len("\n".join(re.findall(r"^\| (.*)$", part, re.M))) for part in parts]
    assert lengths == [0, 30, 90]


@pytest.fixture(scope="module")
def unforked(tmp_path_factory, text_file):
    """A run of one process, with a log of ASCII, that samples its own model in the end."""
    code = (
        "import pathlib, sys\n"
        "from entry_point import train\n"
        "from entry_point.model import sample\n"
        "from launcher.models.load import own_model\n"
        "status = train.main(sys.argv[1:])\n"
        "model, tokenizer = own_model(pathlib.Path('out/model'))\n"
        "sample(model, [tokenizer.start], 9)\n"
        "print(status, 'torch._dynamo' in sys.modules)"
    )
    arguments = small(sample_length=150, processes=1, data=text_file, out="out")
    env = environment(PYTHONPATH=str(SCRIPT.parents[1]), PYTHONIOENCODING="ascii")
    cwd = tmp_path_factory.mktemp("unforked")
    return run(arguments, cwd=cwd, env=env, command=(sys.executable, "-c", code))


def test_one_process_does_not_import_torchs_compiler(unforked):
    assert unforked.last_line == "0 False", unforked.output


def test_samples_are_escaped_in_a_log_of_ascii(unforked):
    assert "\\u" in unforked.output


def test_the_artefact_is_the_model_of_the_best_validation_loss(tmp_path, capsys):
    """A run soon memorizes a short text of random characters."""
    how = dict(n_embd=64, max_steps=60, eval_interval=10, learning_rate=0.05)
    trainer = trainer_of(tmp_path, **how)
    assert trainer.run()
    rows = [row for row in metrics(tmp_path / "output") if "val_loss" in row]
    best = min(rows, key=lambda row: row["val_loss"])
    assert best["val_loss"] < rows[-1]["val_loss"] - 0.1
    assert f"so the model is that of step {best['step']}; " in capsys.readouterr().out
    training = json.loads((tmp_path / "model/training.json").read_text())
    assert (training["step"], training["val_loss"]) == (best["step"], best["val_loss"])
    model, _ = own_model(tmp_path / "model")
    value = evaluate(model, trainer.corpus.val, trainer.config, trainer.group)
    assert value == pytest.approx(best["val_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(5, 3.0, 3.0), (10, 2.0, 3.2)], "memorized its text: val_loss rose to 3.2"),
        ([(4, 3.0, 3.0), (10, 2.0, 3.1)], "no later val_loss was lower"),  # rose little
        ([(5, 2.0, 3.0), (10, 2.0, 3.2)], "no later val_loss was lower"),  # not by memorizing
        ([(6, 3.0, 3.0), (10, 2.0, 3.2)], "no later val_loss was lower"),  # late
        ([(5, 2.0, 3.1), (10, 3.0, 3.0)], ""),
        ([(5, 2.0, 3.1), (10, 3.0, None), (10, None, 3.0)], ""),  # resumed where it ends
    ],
)
def test_the_last_lines_say_why_an_earlier_step_is_kept(rows, said):
    names = ("step", "train_loss", "val_loss")
    rows = [{k: v for k, v in zip(names, row, strict=True) if v is not None} for row in rows]
    best = min((row for row in rows if "val_loss" in row), key=lambda row: row["val_loss"])
    first, *notes = best_lines(rows, best["step"])
    assert first == f"best val_loss 3.00000 at step {best['step']}"
    assert len(notes) == bool(said) and said in "".join(notes)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_the_first_lines_name_devices_and_choices(tmp_path, capsys, precision):
    trainer_of(tmp_path, precision=precision, gradient_accumulation_steps=2).introduce(ALONE)
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("running on 1 host x 1 CPU = 1 process in one group (launched by hand;")
    assert second == f"chosen: {precision}, eager, 2 passes a step"


@pytest.mark.parametrize("fault", ["kill", "1:kill", "0:4:explode", "-1:4:kill"])
def test_an_impossible_fault_is_refused(fault):
    with pytest.raises(ConfigError, match="RANK:STEP:ACTION"):
        read_fault(fault)


@pytest.fixture
def garbage():
    """Has Python look for garbage as before, after a test in which a run did not."""
    yield gc
    gc.unfreeze()
    gc.enable()


def test_a_run_never_looks_for_garbage_among_its_imports(monkeypatch, garbage):
    """With those of torch, each checkpoint would take a tenth of a second longer."""
    frozen: list[int] = []
    monkeypatch.setattr(os, "_exit", Mock(side_effect=SystemExit))
    monkeypatch.setattr("entry_point.train.main", lambda _: frozen.append(gc.get_freeze_count()))
    with pytest.raises(SystemExit):
        train.run([])
    assert frozen[0] > 100_000
    assert not gc.isenabled()


@pytest.mark.usefixtures("garbage")
def test_what_may_be_an_echo_of_a_failure_is_reported_late(monkeypatch):
    """The first cause may be on the same log, which takes the last line for the reason."""
    slept: list[float] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(os, "_exit", Mock(side_effect=SystemExit))
    for error in (DataError("none"), AttributeError("gleu"), RuntimeError("closed by peer")):
        monkeypatch.setattr("entry_point.train.main", Mock(side_effect=error))
        with pytest.raises(SystemExit):
            train.run([])
    assert slept == [5]


# Where every rank comes by, before it joins the group.
EARLY = "    device_type = choose_device(config, container, ranks.world_size)\n"


def test_a_warning_is_printed_without_its_class_name(tmp_path, text_file):
    """SageMaker would take that for the reason of a failure."""
    warning = "    warnings.warn('two\\nlines')\n    raise ConfigError('none')\n"
    command = edited_folder(tmp_path / "train", (EARLY, warning + EARLY))
    end = trained(tmp_path, status=2, data=text_file, processes=1, command=command)
    assert end.output == "note: two lines\nConfigError: none\n"


def test_a_rank_that_ignores_signals_ends_after_a_failure(tmp_path, text_file):
    deaf = (
        "    if ranks.rank == 0:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "        time.sleep(600)\n"
        "    raise ConfigError('that is enough')\n"
    )
    command = edited_folder(tmp_path / "train", (EARLY, deaf + EARLY))
    end = trained(tmp_path, status=2, data=text_file, processes=2, command=command)
    assert end.last_line == "ConfigError: that is enough"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone gives memory back so eagerly")
def test_freed_tensors_memory_is_reused():
    code = (
        "import resource, torch\n"
        "from entry_point import train\n"
        "train.keep_freed_memory()\n"
        "def pages_asked_for():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    tensors = [torch.ones(10 << 20) for _ in range(3)]\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "print(*(pages_asked_for() for _ in range(30)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *later = map(int, done.stdout.split())
    assert statistics.median(later) < first / 10  # the first few still arrange the heap


def test_the_buffers_of_an_edit_count_steps_alone(text_file, tmp_path):
    """The steps before the first one, which lay out DDP's buckets, leave no trace."""
    blocks, first = "        self.blocks = ", "        x = norm(x, self.norm)\n"
    seen = '        self.register_buffer("seen", torch.zeros(()))\n'
    count = "        if self.training:\n            self.seen = self.seen + 1\n"
    command = edited_folder(tmp_path / "mine", (blocks, seen + blocks), (first, count + first))
    trained(tmp_path, data=text_file, out="out", processes=2, command=command)
    newest = max((tmp_path / "out/checkpoints").glob("checkpoint-*"))
    tensors, _ = read_safetensors(newest)
    assert int(tensors["model.seen"]) == SMALL["max_steps"]
