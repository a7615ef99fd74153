"""Trainings of a small model, as a process or as a trainer in this one."""

from __future__ import annotations

import filecmp
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from models import ids, tokenizer_of
from runs import (
    PROBE,
    SCRIPT,
    SMALL,
    Ended,
    command_line,
    environment,
    free_port,
    make_hosts,
    metrics,
    run,
    run_hosts,
)

from sm_nanogpt.entry_point.checkpoint import Checkpoints
from sm_nanogpt.entry_point.command_line import Options
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.container import Container, Ranks, read_container
from sm_nanogpt.entry_point.distributed import Group
from sm_nanogpt.entry_point.text import Corpus
from sm_nanogpt.entry_point.trainer import Trainer

ALONE = Ranks(0, 1, 0, 1, "hand")


def small(**values: Any) -> list[str]:
    """The arguments of a small training, with some hyperparameters changed."""
    return command_line(**{**SMALL, **values})


def trained(
    tmp_path: Path, env: Mapping[str, str] | None = None, *, status: int = 0, **values: Any
) -> Ended:
    """A small training that ends with this exit status."""
    command = values.pop("command", (sys.executable, str(SCRIPT)))
    end = run(small(**values), cwd=tmp_path, env=env, command=command)
    assert end.status == status, end.output
    return end


def trainer_of(tmp_path: Path, **values: Any) -> Trainer:
    """A trainer in this process."""
    container = read_container({}, Options(data="none", out=str(tmp_path)))
    group = Group(ALONE, torch.device("cpu"), container)
    tokens = ids(3000, seed=3)
    corpus = Corpus(tokenizer_of("abcdefghijk"), tokens[:1000], tokens[1000:], "")
    return Trainer(Config(**{**SMALL, **values}), container, group, corpus)


# A run that is interrupted: its checkpoints come with its evaluations.
CUT: dict[str, Any] = dict(dropout=0.2, short_windows=0.6, max_steps=30)
CUT |= dict(log_interval=1, eval_interval=5, checkpoint_seconds=3600)
# Gradients of more than 1 MB, which DistributedDataParallel reduces in two buckets.
EXACT: dict[str, Any] = {**CUT, "n_embd": 128, "n_head": 4}


def assert_same_end(one: Path, other: Path) -> None:
    """Both trainings ended with the same bits.

    These are of the artefact with its moments, the weights, the optimizer's state, and the curve.
    """
    models = [host / "model/model.safetensors" for host in (one, other)]
    # Of unequal bytes pytest would look for the difference, for minutes.
    assert filecmp.cmp(models[0], models[1], shallow=False)
    moments = [sorted((host / "model/moments").iterdir()) for host in (one, other)]
    assert [path.name for path in moments[0]] == [path.name for path in moments[1]]
    for ours_path, theirs_path in zip(*moments, strict=True):
        assert filecmp.cmp(ours_path, theirs_path, shallow=False)
    ours, theirs = (Checkpoints(host / "checkpoints").load_latest() for host in (one, other))
    assert ours is not None and theirs is not None
    assert ours[0].keys() == theirs[0].keys()
    assert any(name.startswith("optimizer.") for name in ours[0])
    for name, tensor in ours[0].items():
        assert torch.equal(tensor, theirs[0][name]), name
    assert curve_without_clock(one) == curve_without_clock(other)


class Killed(Exception):
    """In place of a kill, for a trainer in this process."""


def run_until_killed(trainer: Trainer, step: int) -> None:
    """Runs up to a step, and leaves the files as a kill after it does."""
    train_step = trainer.train_step

    def train_or_die() -> None:
        train_step()
        if trainer.step == step:
            raise Killed

    with patch.object(trainer, "train_step", train_or_die), pytest.raises(Killed):
        trainer.run()


def curve_without_clock(host: Path) -> list[dict[str, Any]]:
    output = host / "output/data"
    if not output.exists():  # outside of a container
        output = host / "output"
    rows = metrics(output)
    for row in rows:
        del row["tokens_per_second"], row["time"]
    return rows


def container(base: Path = Path("ml"), **changes: Any) -> Container:
    """The container of `base`, with some things changed."""
    values: dict[str, Any] = dict(
        inside=True,
        hosts=("algo-1", "algo-2"),
        current_host="algo-2",
        num_gpus=None,
        interface="eth0",
        training=base / "input/data/training",
        validation=None,
        init_from=None,
        model_dir=base / "model",
        output_dir=base / "output/data",
        checkpoint_dir=base / "checkpoints",
    )
    return Container(**{**values, **changes})


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)


def rank_variables(
    rank: int, size: int, local_rank: int, local_size: int, by: Sequence[str] = TORCHRUN
) -> dict[str, str]:
    """The variables by which a launcher tells a process its rank."""
    values = [str(value) for value in (rank, size, local_rank, local_size)]
    return dict(zip(by, values, strict=True))


LINE = re.compile(r"step=([0-9]+)/[0-9]+ train_loss=([0-9.]+)")


def printed_losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LINE.findall(output)}


# The loss has to fall by a nat in these steps, or there would be little to agree on.
LEARNING = dict(max_steps=12, log_interval=1, eval_interval=6)


def losses_of(tmp_path: Path, text: str, n_hosts: int, per_host: int, **values: Any) -> list[float]:
    """The train losses of all steps, as metrics.jsonl has them and as the lines print them."""
    base = tmp_path / f"{n_hosts}x{per_host}"
    command = values.pop("command", (sys.executable, str(SCRIPT)))
    values = {**LEARNING, **values}
    arguments = small(**values, processes=per_host)
    envs = make_hosts(base, text, n_hosts)
    ends = run_hosts(arguments, cwd=tmp_path, envs=envs, command=command)
    assert all(end.status == 0 for end in ends), "".join(end.output for end in ends)
    assert f"= {n_hosts * per_host} process" in ends[0].output
    for line in ends[0].output.splitlines():
        # torch's warnings are notes; it advises against Python 3.13.0.
        assert "note: " not in line or "upgrading to Python 3.13.1" in line
    assert not any(end.output for end in ends[1:])
    losses = [row["train_loss"] for row in metrics(base / "algo-1/output/data")]
    printed = printed_losses(ends[0].output)
    assert list(printed) == list(range(1, values["max_steps"] + 1))
    assert list(printed.values()) == pytest.approx(losses, abs=6e-6)
    return losses


def furthest(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / a for a, b in zip(one, other, strict=True))


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
