"""The model, its optimizers and its sampling."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import SMALL, VOCABULARY_SIZE, ids, lively, tokenizer_of

from entry_point import model as model_module
from entry_point.config import Config, Options
from entry_point.container import Ranks, read_container
from entry_point.data import Corpus
from entry_point.distributed import Group
from entry_point.model import GPT, NORM_EPS, Linear, attend, sample
from entry_point.optim import (
    Muon,
    Optimizer,
    gradient_of,
    learning_rate_scale,
    orthogonalize,
    window_length,
)
from entry_point.trainer import Trainer
from launcher.models import engine

# -- the forward pass ------------------------------------------------------------------------------


def test_a_prediction_does_not_see_what_comes_after():
    model, x = lively(), ids(1, 8)
    logits = model(x)
    for place in range(1, 8):
        other = x.clone()
        other[0, place] = (x[0, place] + 1) % VOCABULARY_SIZE
        changed = model(other)
        assert torch.equal(changed[0, :place], logits[0, :place])
        assert not torch.allclose(changed[0, place:], logits[0, place:])


def test_a_prediction_sees_all_that_came_before():
    model, x = lively(), ids(1, 8)
    last = model(x)[0, -1]
    for place in range(8):
        other = x.clone()
        other[0, place] = (x[0, place] + 1) % VOCABULARY_SIZE
        assert not torch.allclose(model(other)[0, -1], last)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 3e-3)]
)
def test_the_norm_and_its_gradient_equal_torchs(dtype, tolerance):
    generator = torch.Generator().manual_seed(1)
    dy, x = torch.randn(2, 3, 5, 16, generator=generator).to(dtype)
    x.requires_grad_()
    y, expected = model_module.norm(x), F.rms_norm(x, (16,), eps=NORM_EPS)
    torch.testing.assert_close(y, expected, atol=tolerance, rtol=tolerance)
    with torch.no_grad():
        assert torch.equal(model_module.norm(x), y)
    gradients = (torch.autograd.grad(out, x, dy)[0] for out in (y, expected))
    torch.testing.assert_close(*gradients, atol=tolerance, rtol=tolerance)


def test_the_norm_handles_a_row_too_long_for_float16():
    x = torch.full((1, 384), 4000.0, dtype=torch.float16)  # 78,000 long
    torch.testing.assert_close(model_module.norm(x), torch.ones_like(x))


def test_attention_in_training_equals_torchs(monkeypatch):
    monkeypatch.setattr("entry_point.model.QUERIES_AT_ONCE", 3)
    generator = torch.Generator().manual_seed(1)
    q, k, v, dy = torch.randn(4, 2, 3, 7, 8, generator=generator).to(torch.bfloat16)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    y = attend(q, k, v, dropout=0.0)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(y, expected, atol=0.03, rtol=0.03)
    ours, theirs = (torch.autograd.grad(out, inputs, dy) for out in (y, expected))
    torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0.03)


def test_sequences_of_a_batch_do_not_mix():
    model, x = lively(), ids(3, 8)
    alone = torch.cat([model(row[None]) for row in x])
    torch.testing.assert_close(model(x), alone, atol=1e-5, rtol=1e-5)


def test_the_loss_is_the_mean_cross_entropy():
    model, x, y = lively(), ids(3, 8), ids(3, 8, seed=1)
    logits = model(x)
    by_hand = -logits.log_softmax(-1).gather(-1, y[..., None]).mean()
    torch.testing.assert_close(model(x, y), by_hand)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 4e-3)]
)
def test_computing_the_loss_in_chunks_does_not_change_it(monkeypatch, dtype, tolerance, tied):
    x, y = ids(3, 8), ids(3, 8, seed=1)
    found = []
    for at_once in (
        1 << 30,
        4 * 5 * VOCABULARY_SIZE,
    ):  # 24 rows make five chunks, one of them short
        monkeypatch.setattr("entry_point.model.LOGITS_AT_ONCE", at_once)
        model = lively(dataclasses.replace(SMALL, tie_embeddings=tied), dtype)
        loss = model(x, y)
        (1024 * loss).backward()  # as by a scaler
        found.append([loss.detach(), *(gradient_of(p) / 1024 for p in model.parameters())])
        with torch.no_grad():
            torch.testing.assert_close(model(x, y), loss, atol=tolerance, rtol=tolerance)
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, atol=tolerance, rtol=tolerance)


def test_the_loss_in_chunks_is_compiled_as_one_graph(monkeypatch):
    monkeypatch.setattr("entry_point.model.LOGITS_AT_ONCE", 4 * 5 * VOCABULARY_SIZE)
    x, y, model = ids(3, 8), ids(3, 8, seed=1), lively()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    names, weights = zip(*model.named_parameters(), strict=True)
    found, expected = (torch.autograd.grad(net(x, y), weights) for net in (compiled, model))
    for name, one, other in zip(names, found, expected, strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_an_evaluation_computes_no_gradients(monkeypatch):
    monkeypatch.setattr(
        "entry_point.model.LOGITS_AT_ONCE", 4 * 6 * VOCABULARY_SIZE
    )  # four chunks of 24 rows
    model, x, y = lively(), ids(3, 8), ids(3, 8, seed=1)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=cpu) as profile:
        model(x, y)
    products = [event.name for event in profile.events() if event.name == "aten::mm"]
    layers = sum(isinstance(module, Linear) for module in model.blocks.modules())
    assert len(products) == layers + 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # each by another kernel
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_masked_attention_stops_at_the_end_of_a_document(dtype, dropout):
    model = lively(dataclasses.replace(SMALL, dropout=dropout), dtype).train()
    x = torch.tensor([[1, 2, 3, 0, 4, 5, 6, 7]])
    for place in range(3):
        other = x.clone()
        other[0, place] += 3
        logits = []
        for ids_there in (x, other):
            torch.manual_seed(1)
            logits.append(model(ids_there, end=0)[0])
        assert torch.equal(logits[0][:place], logits[1][:place])
        assert not torch.allclose(logits[0][place:3], logits[1][place:3])
        assert torch.equal(logits[0][3:], logits[1][3:])
    if not dropout:  # alone in its window, a document's tokens see the same
        alone = model(x[:, 3:], angles=tuple(a[3:8] for a in model.angles(8)), end=0)[0]
        torch.testing.assert_close(alone, model(x, end=0)[0, 3:], atol=1e-2, rtol=1e-2)


def test_an_untrained_model_knows_nothing():
    model = GPT(SMALL, VOCABULARY_SIZE)
    model.init_weights(1)
    loss = model(ids(50, 8), ids(50, 8, seed=1)).item()
    assert abs(loss - torch.tensor(float(VOCABULARY_SIZE)).log()) < 0.1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("n_hidden", [0, 24])
def test_the_number_of_parameters_matches_the_formula(tied, n_hidden):
    config = Config(n_layer=3, n_embd=48, n_head=4, n_hidden=n_hidden, tie_embeddings=tied)
    model = GPT(config, VOCABULARY_SIZE)
    hidden = n_hidden or 8 * 48 // 3
    expected = 3 * (4 * 48 * 48 + 3 * 48 * hidden) + (1 if tied else 2) * VOCABULARY_SIZE * 48
    assert sum(p.numel() for p in model.parameters()) == expected


def test_a_tied_head_is_the_embedding():
    model = lively(dataclasses.replace(SMALL, tie_embeddings=True))
    assert model.head is None
    x = ids(1, 8)
    before = model(x)
    with torch.no_grad():
        model.embed.weight[7] = -model.embed.weight[7]
    without_7 = x[x != 7][None, :1]
    after = model(without_7)
    torch.testing.assert_close(after[0, 0, 7], -lively(model.config)(without_7)[0, 0, 7])
    assert before.shape == (1, 8, VOCABULARY_SIZE)


def test_the_seed_determines_the_weights():
    def weights(seed: int) -> torch.Tensor:
        model = GPT(SMALL, VOCABULARY_SIZE)
        model.init_weights(seed)
        return torch.cat([p.flatten() for p in model.parameters()])

    torch.manual_seed(99)
    one = weights(5)
    torch.manual_seed(98)
    assert torch.equal(one, weights(5))
    assert not torch.equal(one, weights(6))


def test_dropout_acts_only_in_training():
    model, x = lively(dataclasses.replace(SMALL, dropout=0.5)), ids(1, 8)
    assert torch.equal(model(x), model(x))
    assert torch.equal(model(x), lively()(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_bf16_attention_is_close_to_float32():
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 3, 8, 16, generator=generator).bfloat16() for _ in range(3))
    ours = attend(q.requires_grad_(), k, v, dropout=0.0)
    exact = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    torch.testing.assert_close(ours.float(), exact, atol=3e-2, rtol=2e-2)


def test_bf16_attention_gradients_are_close_to_float32():
    generator = torch.Generator().manual_seed(2)
    base = [torch.randn(2, 3, 8, 16, generator=generator) for _ in range(3)]
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [t.clone().requires_grad_() for t in base]
        q, k, v = (t.to(dtype) for t in leaves)
        attend(q, k, v, 0.0).float().square().sum().backward()
        rows.append([leaf.grad for leaf in leaves])
    for ours, exact in zip(*rows, strict=True):
        assert ours is not None and exact is not None
        assert float((ours - exact).norm() / exact.norm()) < 2e-2


def test_bf16_is_close_to_float32():
    x = ids(4, 8)
    with torch.no_grad():
        exact, ours = lively()(x), lively(dtype=torch.bfloat16)(x)
    assert ours.dtype == torch.float32
    assert float((ours - exact).norm() / exact.norm()) < 3e-2


# -- sampling --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 5, 30])
def test_a_padded_window_draws_what_a_growing_one_does(length):
    drawn = sample(lively(), 3, length, seed=5)
    plain = engine.generate_plainly(lively(), torch.tensor([[3]]), length, seed=5)
    assert drawn == [int(id) for id in plain]


def test_all_windows_of_a_sample_have_one_shape():
    model = lively()
    seen = set()
    model.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].shape))
    sample(model, 3, 30)
    assert seen == {(1, 8)}


# -- optimizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 64), (128, 32)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape, dtype):
    """As near as three rounds come: from a spread of 1 : 1000 to within 0.88 of one."""
    generator = torch.Generator().manual_seed(1)
    u, _, vt = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    given = torch.logspace(0, -3, shape[1])
    update = orthogonalize((u * given @ vt)[None], dtype)[0].float()
    values = (u.T @ update @ vt.T).diagonal()
    large = given / given.norm() > 2e-3
    assert float(values[large].min()) > 0.12
    assert float(values.max()) < 1.88
    # The singular vectors stay what they were.
    assert float((u.T @ update @ vt.T - values.diag()).abs().max()) < 0.05


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 0.01)]
)
def test_orthogonalizing_ignores_the_size_of_the_gradient(dtype, error):
    matrices = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(1))
    one = orthogonalize(matrices, dtype)
    for size in (1e-9, 1e6):
        other = orthogonalize(matrices * size, dtype)
        torch.testing.assert_close(one, other, atol=error, rtol=0)
    assert not bool(orthogonalize(torch.zeros(1, 8, 4), dtype).any())


def test_parts_of_a_fused_matrix_are_updated_separately():
    parts = [torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    gradients = [
        torch.randn(16, 16, generator=torch.Generator().manual_seed(9 + i)) for i in range(3)
    ]
    fused = torch.cat(parts)
    fused.grad = torch.cat(gradients)
    apart = {}
    for i in range(3):
        apart[str(i)] = (parts[i], 1)
        parts[i].grad = gradients[i].clone()
    Muon({"fused": (fused, 3)}, SMALL).step(0.02, torch.float32)
    Muon(apart, SMALL).step(0.02, torch.float32)
    torch.testing.assert_close(fused, torch.cat(parts), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_is_trained_and_every_state_has_a_name(optimizer, tied):
    config = dataclasses.replace(SMALL, optimizer=optimizer, tie_embeddings=tied)
    model = lively(config).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    one = Optimizer(model, config)
    for seed in range(2):
        model(ids(12, 8, seed=seed), ids(12, 8, seed=9 + seed)).backward()
        one.step(1.0)
        one.zero_grad()
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
        assert any(key.endswith(f".{name}") for key in one.state())
    assert all(bool(tensor.any()) for tensor in one.state().values())


def test_weight_decay_shrinks_only_the_matrices():
    for optimizer in ("muon", "adamw"):
        config = dataclasses.replace(SMALL, optimizer=optimizer, weight_decay=0.5)
        model = lively(config)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        Optimizer(model, config).step(1.0)
        for name, parameter in model.named_parameters():
            shrunk = bool((parameter.abs() < before[name].abs()).all())
            assert shrunk == name.startswith("blocks"), (optimizer, name)


def test_gradients_are_clipped_to_grad_clip():
    config = dataclasses.replace(SMALL, grad_clip=1e-3, optimizer="adamw")
    model = lively(config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    one = Optimizer(model, config)
    one.step(0.0)
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


def alone() -> Group:
    """A group of one process."""
    container = read_container({}, Options(data="none"))
    return Group(Ranks(0, 1, 0, 1, "hand"), torch.device("cpu"), container)


def trainer_of(config: Config, tmp_path: Path) -> Trainer:
    container = read_container({}, Options(data="none", out=str(tmp_path)))
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY_SIZE, (1000,), generator=generator)
    corpus = Corpus(tokenizer_of("abcdefghijk"), tokens[:900], tokens[900:], "")
    return Trainer(config, container, alone(), corpus)


def test_short_windows_double_up_to_the_block_size(tmp_path):
    config = dataclasses.replace(SMALL, short_windows=0.6, max_steps=10, device="cpu")
    lengths = [window_length(step, config) for step in range(10)]
    assert lengths == [1, 1, 2, 2, 4, 4, 8, 8, 8, 8]
    trainer = trainer_of(config, tmp_path)
    seen: list[torch.Tensor] = []
    trainer.ddp.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    for step in (0, 2, 4, 6):
        trainer.forward_backward(step)
        assert seen[-1].shape == (12 * 8 // lengths[step], lengths[step])
        assert torch.equal(seen[-1].view(12, 8), trainer.batches.rows(step, 0, 1)[0])


@pytest.mark.parametrize(
    ("short_windows", "expected"), [(0.6, [1, 2, 4, 8]), (1.0, [1, 2, 4]), (0.0, [8])]
)
def test_the_warm_up_makes_two_steps_of_each_window_length(tmp_path, short_windows, expected):
    config = dataclasses.replace(SMALL, short_windows=short_windows, max_steps=10**9, device="cpu")
    trainer = trainer_of(config, tmp_path)
    seen: list[int] = []
    trainer.ddp.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].size(1)))
    trainer.warm_up()
    assert seen == [length for length in expected for _ in range(2)]


@pytest.mark.parametrize("passes", [2, 4, 12])
def test_accumulated_gradients_equal_the_whole_batchs(tmp_path, passes):
    config = dataclasses.replace(SMALL, precision="float32", device="cpu")
    whole = trainer_of(config, tmp_path)
    parts = trainer_of(dataclasses.replace(config, gradient_accumulation_steps=passes), tmp_path)
    torch.testing.assert_close(parts.forward_backward(3), whole.forward_backward(3))
    for one, other in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_too_small_for_float16_are_not_lost_in_it(tmp_path, passes):
    config = dataclasses.replace(
        SMALL, batch_size=1024, gradient_accumulation_steps=passes, device="cpu"
    )
    exact, ours = (
        trainer_of(dataclasses.replace(config, precision=precision), tmp_path)
        for precision in ("float32", "float16")
    )
    for trainer in (exact, ours):
        trainer.forward_backward(0)
    seen = 0
    for one, other in zip(exact.model.parameters(), ours.model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        found = other.grad / ours.scaler.get_scale()
        assert float((found - one.grad).norm()) <= 0.02 * float(one.grad.norm())
        seen += int(one.grad.count_nonzero())
    assert seen > 100


def test_dropout_is_a_function_of_seed_step_pass_and_rank(tmp_path, monkeypatch):
    config = dataclasses.replace(SMALL, dropout=0.5, precision="float32", device="cpu")
    seeds: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)

    def seeds_of(step: int, rank: int = 0, **values: Any) -> list[int]:
        one = trainer_of(dataclasses.replace(config, **values), tmp_path)
        one.group.rank, one.group.world_size = rank, rank + 1
        seeds.clear()
        one.forward_backward(step)
        return seeds.copy()

    assert seeds_of(3) == seeds_of(3)
    every = [*seeds_of(3), *seeds_of(4), *seeds_of(3, rank=1), *seeds_of(3, seed=5)]
    every += seeds_of(5, gradient_accumulation_steps=2)
    assert len(set(every)) == len(every) == 6


def test_dropout_is_drawn_from_the_steps_own_seed(tmp_path):
    config = dataclasses.replace(SMALL, dropout=0.5, precision="float32", device="cpu")
    one = trainer_of(config, tmp_path)
    with torch.no_grad():
        one.model.load_state_dict(lively(config).state_dict())
    torch.manual_seed(1)
    first = one.forward_backward(3)
    torch.manual_seed(2)
    assert torch.equal(first, one.forward_backward(3))
    assert not torch.equal(first, one.forward_backward(4))


# -- the schedule ----------------------------------------------------------------------------------


def scale(step: int, **how: Any) -> float:
    values = dict(max_steps=100, warmup_steps=0, decay_fraction=0.8, final_learning_rate=0.0)
    return learning_rate_scale(step, Config(**{**values, **how}))


def test_the_learning_rate_is_at_its_peak_until_the_decay():
    assert [scale(step) for step in (0, 10, 20)] == [1.0, 1.0, 1.0]
    assert scale(21) < 1.0


def test_the_learning_rate_falls_linearly_to_almost_nothing():
    assert scale(60) == pytest.approx(0.5)
    assert scale(99) == pytest.approx(1 / 80)


def test_the_learning_rate_ends_at_final_learning_rate():
    assert scale(60, final_learning_rate=0.1) == pytest.approx(0.1 + 0.9 * 0.5)
    assert scale(100, final_learning_rate=0.1) == pytest.approx(0.1)
    assert scale(99, final_learning_rate=1.0) == 1.0


def test_the_learning_rate_warms_up_linearly_from_above_zero():
    assert [scale(s, warmup_steps=4) for s in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_the_learning_rate_is_constant_without_a_decay():
    assert scale(99, decay_fraction=0.0) == 1.0


def test_warm_up_and_decay_may_span_the_whole_run():
    scales = [scale(s, warmup_steps=100, decay_fraction=1.0) for s in range(100)]
    assert all(0 < s <= 1 for s in scales)


def test_the_default_learning_rate_depends_on_the_optimizer():
    assert Config().learning_rate == 0.02
    assert Config(optimizer="adamw").learning_rate == 0.001
    assert Config(learning_rate=0.5).learning_rate == 0.5
