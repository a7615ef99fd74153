"""The model, and what it computes with."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import SMALL, VOCABULARY_SIZE, ids, lively, small_config

from entry_point import kernels
from entry_point.config import Config
from entry_point.kernels import NORM_EPS, attend, chunk_size
from entry_point.model import GPT, Linear, norm, sample
from entry_point.optim import gradient_of
from launcher.models import engine


def test_a_prediction_sees_just_what_came_before():
    model, x = lively(), ids(1, 8)
    logits = model(x)[0]
    for place in range(8):
        other = x.clone()
        other[0, place] = (x[0, place] + 1) % VOCABULARY_SIZE
        found = model(other)[0]
        assert torch.equal(found[:place], logits[:place])
        assert not torch.allclose(found[place], logits[place])
        assert not torch.allclose(found[-1], logits[-1])


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 3e-3)]
)
def test_the_norm_and_its_gradient_equal_torchs(dtype, tolerance):
    generator = torch.Generator().manual_seed(1)
    dy, x = torch.randn(2, 3, 5, 16, generator=generator).to(dtype)
    x.requires_grad_()
    y, expected = norm(x), F.rms_norm(x, (16,), eps=NORM_EPS)
    torch.testing.assert_close(y, expected, atol=tolerance, rtol=tolerance)
    with torch.no_grad():
        assert torch.equal(norm(x), y)
    gradients = (torch.autograd.grad(out, x, dy)[0] for out in (y, expected))
    torch.testing.assert_close(*gradients, atol=tolerance, rtol=tolerance)


def test_the_norm_handles_a_row_too_long_for_float16():
    x = torch.full((1, 384), 4000.0, dtype=torch.float16)  # 78,000 long
    torch.testing.assert_close(norm(x), torch.ones_like(x))


@pytest.mark.parametrize("queries_at_once", [3, 512])
def test_bf16_attention_is_close_to_torchs_in_float32(monkeypatch, queries_at_once):
    monkeypatch.setattr("entry_point.kernels.QUERIES_AT_ONCE", queries_at_once)
    generator = torch.Generator().manual_seed(1)
    q, k, v, dy = torch.randn(4, 2, 3, 7, 8, generator=generator)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), dropout=0.0)
    assert y.dtype == torch.bfloat16
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    found, expected = (
        [out, *torch.autograd.grad(out, leaves, dy.to(out.dtype))] for out in (y, exact)
    )
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 2e-2


def test_sequences_of_a_batch_do_not_mix():
    model, x = lively(), ids(3, 8)
    alone = torch.cat([model(row[None]) for row in x])
    torch.testing.assert_close(model(x), alone, atol=1e-5, rtol=1e-5)


def test_the_loss_is_the_mean_cross_entropy():
    model, x, y = lively(), ids(3, 8), ids(3, 8, seed=1)
    logits = model(x)
    by_hand = -logits.log_softmax(-1).gather(-1, y[..., None]).mean()
    torch.testing.assert_close(model(x, y), by_hand)


AT_ONCE = "entry_point.kernels.LOGITS_AT_ONCE"
FEW = 16  # so few logits that 320 rows make three chunks, one of them short


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 4e-3)]
)
def test_computing_the_loss_in_chunks_does_not_change_it(monkeypatch, dtype, tolerance, tied):
    x, y = ids(40, 8), ids(40, 8, seed=1)
    found = []
    for at_once in (1 << 30, FEW):
        monkeypatch.setattr(AT_ONCE, at_once)
        model = lively(small_config(tie_embeddings=tied), dtype)
        loss = model(x, y)
        (1024 * loss).backward()  # as by a scaler
        found.append([loss.detach(), *(gradient_of(p) / 1024 for p in model.parameters())])
        with torch.no_grad():
            torch.testing.assert_close(model(x, y), loss, atol=tolerance, rtol=tolerance)
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "rows, most, size, count",
    [
        (16_384, 5336, 4096, 4),  # gpt2 on a GPU, 50,304 ids
        (65_536, 5336, 5120, 13),
        (16_384, 99, 128, 128),
        (300, 1 << 20, 384, 1),
    ],
)
def test_chunks_of_the_loss_are_even_and_of_whole_tiles(rows, most, size, count):
    assert chunk_size(rows, most) == size
    assert math.ceil(rows / size) == count
    assert size <= max(most, 128) or count == 1


def test_a_product_of_the_loss_has_a_multiple_of_64_columns(monkeypatch):
    monkeypatch.setattr(AT_ONCE, FEW)
    model, x, y = lively(), ids(40, 8), ids(40, 8, seed=1)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=cpu, record_shapes=True) as profile:
        model(x, y)
    shapes = [event.input_shapes[1] for event in profile.events() if event.name == "aten::mm"]
    assert shapes[-3:] == [[16, 64]] * 3


def test_the_loss_in_chunks_is_compiled_as_one_graph(monkeypatch):
    monkeypatch.setattr(AT_ONCE, FEW)
    x, y, model = ids(40, 8), ids(40, 8, seed=1), lively(small_config(n_layer=1))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    names, weights = zip(*model.named_parameters(), strict=True)
    found, expected = (torch.autograd.grad(net(x, y), weights) for net in (compiled, model))
    for name, one, other in zip(names, found, expected, strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_targets_are_compared_only_where_some_are_ignored(monkeypatch):
    monkeypatch.setattr(AT_ONCE, FEW)
    model, x, y = lively(), ids(3, 8), ids(3, 8, seed=1)
    for chats in (False, True):
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu) as profile:
            model(x, y, chats=chats)
        assert ("aten::ge" in {event.name for event in profile.events()}) is chats


def test_an_evaluation_computes_no_gradients(monkeypatch):
    monkeypatch.setattr(AT_ONCE, FEW)
    model, x, y = lively(), ids(40, 8), ids(40, 8, seed=1)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=cpu) as profile:
        model(x, y)
    products = [event.name for event in profile.events() if event.name == "aten::mm"]
    layers = sum(isinstance(module, Linear) for module in model.blocks.modules())
    assert len(products) == layers + 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # each by another kernel
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_masked_attention_stops_at_the_end_of_a_document(dtype, dropout):
    model = lively(small_config(dropout=dropout), dtype).train()
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


@pytest.mark.parametrize("n_kv_head", [1, 4])
@pytest.mark.parametrize("chats", [False, True])
def test_compiled_attention_within_documents_is_the_dense(monkeypatch, chats, n_kv_head):
    """Traced as for a GPU, and computed by torch's reference of FlexAttention."""
    from torch.nn.attention import flex_attention

    # It refuses gradients on a CPU, for which it has no kernel.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(kernels, "FLEX_DEVICE", "cpu")
    how = dict(n_layer=1, n_head=4, n_kv_head=n_kv_head, n_embd=64, block_size=128)
    model, x, graphs = lively(small_config(**how)).train(), ids(3, 128), []
    y = x.roll(-1, 1).masked_fill(x == 5, -100) if chats else x.roll(-1, 1)

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=keep, dynamic=False, fullgraph=True)
    found = []
    for net in (model, compiled):
        loss = net(x, y, end=0, chats=chats)
        found.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
    assert ["flex_attention" in graph for graph in graphs] == [True]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("own_end", [False, True])
def test_blocks_without_a_key_to_attend_are_skipped(monkeypatch, own_end):
    """And those with keys alone are computed without the mask."""
    config, x = small_config(n_embd=64, block_size=512), ids(2, 512).clamp_min(1)
    x[0, 130], x[1, [200, 300]] = 0, 0
    mask = kernels.document_mask(x, 0, own_end, config)
    monkeypatch.setattr(kernels, "FLEX_DEVICE", "cpu")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    blocks = kernels.document_mask(x, 0, own_end, config)
    cut = mask.unfold(2, 128, 128).unfold(3, 128, 128).flatten(-2)
    for n, places, expected in (
        (blocks.kv_num_blocks, blocks.kv_indices, cut.any(-1) & ~cut.all(-1)),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices, cut.all(-1)),
    ):
        listed = torch.arange(4) < n[..., None]
        assert torch.equal(torch.zeros(cut.shape[:-1]).scatter(-1, places.long(), listed.float()),
                           expected.float())  # fmt: skip
    assert not blocks.to_dense().bool().logical_not()[cut.any(-1)].any()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_computed_twice_have_the_same_gradients(dropout, dtype):
    found, layers = [], []
    for recompute in (False, True):
        model = lively(small_config(dropout=dropout, recompute=recompute), dtype).train()
        model.blocks[0].register_forward_pre_hook(lambda *_: layers.append(1))
        torch.manual_seed(1)
        loss = model(ids(12, 8), ids(12, 8, seed=1), end=0)
        found.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
        with torch.no_grad():
            model(ids(12, 8))
    assert len(layers) == 2 + 3  # an evaluation computes them once
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


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
    model, x = lively(small_config(tie_embeddings=True)), torch.tensor([[3]])
    assert model.head is None
    before = model(x)[0, 0, 7].item()
    with torch.no_grad():
        model.embed.weight[7] *= -1
    assert model(x)[0, 0, 7].item() == -before


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
    model, x = lively(small_config(dropout=0.5)), ids(1, 8)
    assert torch.equal(model(x), model(x))
    assert torch.equal(model(x), lively()(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_bf16_is_close_to_float32():
    x = ids(4, 8)
    with torch.no_grad():
        exact, ours = lively()(x), lively(dtype=torch.bfloat16)(x)
    assert ours.dtype == torch.float32
    assert float((ours - exact).norm() / exact.norm()) < 3e-2


@pytest.mark.parametrize("length", [0, 1, 5, 30])
def test_a_padded_window_draws_what_a_growing_one_does(length):
    drawn = sample(lively(), [3], length, seed=5)
    plain = engine.generate(lively(), torch.tensor([[3]]), length, seed=5, use_cache=False)
    assert drawn == [int(id) for id in plain]


def test_all_windows_of_a_sample_have_one_shape():
    model = lively()
    seen = set()
    model.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].shape))
    sample(model, [3], 30)
    assert seen == {(1, 8)}
