"""The optimizers, and the schedule of their learning rates."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import models
import pytest
import torch
from models import SMALL, alone, ids, lively, optimizer_of, small_config
from runs import run

from sm_nanogpt.entry_point import optim
from sm_nanogpt.entry_point.config import OPTIMIZERS, Config
from sm_nanogpt.entry_point.optim import (
    BUILDERS,
    Muon,
    gradient_of,
    learning_rate_scale,
    orthogonalize,
    tall,
)


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((64, 64), torch.float32),
        ((64, 64), torch.float16),
        ((128, 32), torch.bfloat16),
        ((64, 1), torch.float32),
    ],
)
def test_orthogonalized_matrices_have_singular_values_near_one(shape, dtype):
    """As near as three rounds come: from a spread of 1 : 1000 to within 0.88 of one."""
    generator = torch.Generator().manual_seed(1)
    u, _, vt = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    singular_values = torch.logspace(0, -3, shape[1])
    update = orthogonalize((u * singular_values @ vt)[None], dtype)[0].float()
    values = (u.T @ update @ vt.T).diagonal()
    large = singular_values / singular_values.norm() > 2e-3
    assert float(values[large].min()) > 0.12
    assert float(values.max()) < 1.88
    # The singular vectors stay what they were.
    assert float((u.T @ update @ vt.T - values.diag()).abs().max()) < 0.05


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-5), (torch.float16, 0.01)])
def test_orthogonalizing_ignores_the_size_of_the_gradient(dtype, error):
    matrices = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(1))
    direction = orthogonalize(matrices, dtype)
    for size in (1e-9, 1e6):
        other = orthogonalize(matrices * size, dtype)
        torch.testing.assert_close(direction, other, atol=error, rtol=0)
    assert not bool(orthogonalize(torch.zeros(1, 8, 4), dtype).any())


def test_parts_of_a_fused_matrix_are_updated_separately():
    matrices, gradients = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    fused = matrices.reshape(48, 16).clone()
    fused.grad = gradients.reshape(48, 16).clone()
    parts = {}
    for index in range(3):
        part = matrices[index].clone()
        part.grad = gradients[index].clone()
        parts[str(index)] = (part, 1)
    Muon({"fused": (fused, 3)}, SMALL, alone(), torch.float32).step(1.0)
    Muon(parts, SMALL, alone(), torch.float32).step(1.0)
    updated = torch.cat([part for part, _ in parts.values()])
    torch.testing.assert_close(fused, updated, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "rows, columns, n_fused, factor", [(64, 16, 1, 2), (16, 64, 1, 1), (64, 16, 4, 1)]
)
def test_the_update_of_a_tall_matrix_is_larger(rows, columns, n_fused, factor):
    """By the root of rows / columns, of each matrix of a fused one."""
    weight = torch.zeros(rows, columns)
    weight.grad = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    gradients = tall(weight.grad.clone(), n_fused)
    assert gradients.size(1) >= gradients.size(2)
    expected = orthogonalize(gradients, torch.float32)
    Muon({"weight": (weight, n_fused)}, SMALL, alone(), torch.float32).step(1.0)
    torch.testing.assert_close(tall(weight, n_fused), -0.02 * factor * expected)


PEAK = f"""
import itertools, json, sys
import torch
from sm_nanogpt.entry_point import optim
sys.path.insert(0, {str(Path(models.__file__).parent)!r})
from models import SMALL, alone

torch.set_num_threads(1)
optim.SLICE = 1 << 14
weights = {{str(i): (torch.zeros(64, 64), 1) for i in range(64)}}
for weight, _ in weights.values():
    weight.grad = torch.ones_like(weight)
for dtype in (torch.float32, torch.bfloat16):
    muon = optim.Muon(weights, SMALL, alone(), dtype)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        muon.step(1.0)
    profile.export_chrome_trace(sys.argv[1])
    with open(sys.argv[1]) as file:
        events = json.load(file)["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    print("peak", max(itertools.accumulate(event["args"]["Bytes"] for event in changes)))
"""


def test_a_step_of_muon_needs_memory_for_one_slice(tmp_path):
    """However many matrices there are.

    In a process of its own: after a compiler that failed, torch keeps a slice longer.
    """
    command = (sys.executable, "-c", PEAK)
    end = run([str(tmp_path / "trace.json")], cwd=tmp_path, command=command)
    assert end.status == 0, end.output
    in_float32, in_bfloat16 = map(int, re.findall(r"^peak (\d+)$", end.output, re.MULTILINE))
    numbers = 1 << 14  # of a slice; each of them takes some bytes, and the norms a little
    assert 4 * numbers < in_float32 < 12.1 * numbers
    assert 4 * numbers < in_bfloat16 < 10.1 * numbers


def test_two_slices_at_most_travel_between_ranks(monkeypatch):
    """Each that travels needs memory."""
    monkeypatch.setattr(optim, "SLICE", 1 << 8)
    weights = {}
    for index in range(8):
        weight = torch.zeros(16, 16)
        weight.grad = torch.ones_like(weight)
        weights[str(index)] = (weight, 1)
    travelling: list[int] = []
    counts: list[int] = []

    def async_all_gather(update: torch.Tensor) -> Callable[[], torch.Tensor]:
        travelling.append(1)
        counts.append(len(travelling))

        def result() -> torch.Tensor:
            travelling.pop()
            return torch.stack([update, update])

        return result

    group: Any = Mock(rank=0, world_size=2, device=torch.device("cpu"))
    group.async_all_gather = async_all_gather
    Muon(weights, SMALL, group, torch.float32).step(1.0)
    assert counts == [1, 2, 2, 2]
    assert not travelling


@pytest.mark.parametrize("optimizer, tied", [("muon", True), *((name, False) for name in BUILDERS)])
def test_every_weight_is_trained_and_every_state_has_a_name(optimizer, tied):
    config = small_config(optimizer=optimizer, tie_embeddings=tied)
    model = lively(config).train()
    first_weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained_optimizer = optimizer_of(model)
    for seed in range(2):
        x = ids(12, 8, seed=seed)
        y = ids(12, 8, seed=9 + seed)
        model(x, y).backward()
        trained_optimizer.step(1.0)
        model.zero_grad()
    state = trained_optimizer.state()
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, first_weights[name]), name
        assert any(key.endswith(f".{name}") for key in state)
    for name, tensor in state.items():
        assert bool(tensor.any()), name


@pytest.mark.parametrize("optimizer", BUILDERS)
def test_an_optimizer_keeps_the_averages_of_its_row(optimizer):
    """By which the launcher computes what a GPU has to hold."""
    config = small_config(optimizer=optimizer)
    built = optimizer_of(lively(config))
    tensors = [tensor for name, tensor in built.state().items() if ".blocks." in name]
    n_numbers = sum(tensor.numel() for tensor in tensors if tensor.dim())
    row = OPTIMIZERS[optimizer]
    assert n_numbers == row.averages * config.matrix_parameters
    assert bool(built.owners) == row.shares_averages


@pytest.mark.parametrize("optimizer", BUILDERS)
def test_weight_decay_shrinks_only_the_matrices(optimizer):
    config = small_config(optimizer=optimizer, weight_decay=0.5)
    model = lively(config)
    first_weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer_of(model).step(1.0)
    for name, parameter in model.named_parameters():
        has_shrunk = bool((parameter.abs() < first_weights[name].abs()).all())
        assert has_shrunk == name.startswith("blocks"), name


@pytest.mark.parametrize(
    "tied, rates",
    [(False, {"embed.weight": 0.3, "head.weight": 0.5}), (True, {"embed.weight": 0.5})],
)
def test_an_embedding_that_is_no_head_has_its_own_rate(tied, rates):
    """With muon. AdamW's first step is as long as its learning rate."""
    config = small_config(tie_embeddings=tied, embedding_learning_rate=0.3, head_learning_rate=0.5)
    model = lively(config)
    first_weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer_of(model).step(1.0)
    parameters = dict(model.named_parameters())
    for name, rate in rates.items():
        change = first_weights[name] - parameters[name]
        torch.testing.assert_close(change, torch.full_like(change, rate))


def test_gradients_are_clipped_to_grad_clip():
    config = small_config(grad_clip=1e-3, optimizer="adamw")
    model = lively(config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer_of(model).step(0.0)
    length = torch.cat([gradient_of(p).flatten() for p in model.parameters()]).norm()
    assert float(length) == pytest.approx(1e-3, rel=1e-3)


def scale(step: int, **changes: Any) -> float:
    values: dict[str, Any] = dict(max_steps=100, warmup_steps=0, decay_fraction=0.8)
    values["final_learning_rate"] = 0.0
    values |= changes
    return learning_rate_scale(step, Config(**values))


@pytest.mark.parametrize(
    "changes, scales",
    [
        ({}, {0: 1, 10: 1, 20: 1, 21: 79 / 80, 60: 0.5, 99: 1 / 80}),
        ({"final_learning_rate": 0.1}, {60: 0.1 + 0.9 * 0.5, 99: 0.1 + 0.9 / 80}),
        ({"warmup_steps": 4}, {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 1}),
        ({"decay_fraction": 0.0}, {99: 1}),
    ],
)
def test_the_learning_rate_follows_its_schedule(changes, scales):
    for step, expected in scales.items():
        assert scale(step, **changes) == pytest.approx(expected)


def test_warm_up_and_decay_may_span_the_whole_run():
    for step in range(100):
        assert 0 < scale(step, warmup_steps=100, decay_fraction=1.0) <= 1
