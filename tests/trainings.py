"""Trainings of a small model, as a process or as a trainer in this one."""

from __future__ import annotations

import filecmp
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from models import ids, tokenizer_of
from runs import (
    SCRIPT,
    SMALL,
    Ended,
    metrics,
    run,
    words,
)

from entry_point.checkpoint import Checkpoints
from entry_point.command_line import Options
from entry_point.config import Config
from entry_point.container import Ranks, read_container
from entry_point.distributed import Group
from entry_point.text import Corpus
from entry_point.trainer import Trainer

ALONE = Ranks(0, 1, 0, 1, "hand")


def small(**how: Any) -> list[str]:
    """The arguments of a small training, with some hyperparameters changed."""
    return words(**{**SMALL, **how})


def trained(
    tmp_path: Path, env: Mapping[str, str] | None = None, *, status: int = 0, **how: Any
) -> Ended:
    """A small training that ends with this exit status."""
    command = how.pop("command", (sys.executable, str(SCRIPT)))
    end = run(small(**how), cwd=tmp_path, env=env, command=command)
    assert end.status == status, end.output
    return end


def trainer_of(tmp_path: Path, **how: Any) -> Trainer:
    """A trainer in this process."""
    container = read_container({}, Options(data="none", out=str(tmp_path)))
    group = Group(ALONE, torch.device("cpu"), container)
    tokens = ids(3000, seed=3)
    corpus = Corpus(tokenizer_of("abcdefghijk"), tokens[:1000], tokens[1000:], "")
    return Trainer(Config(**{**SMALL, **how}), container, group, corpus)


# Gradients of more than 1 MB, which DistributedDataParallel reduces in two buckets.
EXACT: dict[str, Any] = dict(n_embd=128, n_head=4, dropout=0.2, short_windows=0.6)


def assert_same_end(one: Path, other: Path) -> None:
    """Both trainings ended with the same bits: artefact, weights, optimizer state and curve."""
    models = [host / "model/model.safetensors" for host in (one, other)]
    # Of unequal bytes pytest would look for the difference, for minutes.
    assert filecmp.cmp(models[0], models[1], shallow=False)
    ours, theirs = (Checkpoints(host / "checkpoints").load_latest() for host in (one, other))
    assert ours is not None and theirs is not None
    assert ours[0].keys() == theirs[0].keys()
    assert any(name.startswith("optimizer.") for name in ours[0])
    for name, tensor in ours[0].items():
        assert torch.equal(tensor, theirs[0][name]), name
    curves = [
        [{**row, "tokens_per_second": None, "time": None} for row in metrics(host / "output/data")]
        for host in (one, other)
    ]
    assert curves[0] == curves[1]
