"""The model, and what it computes with."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from models import SMALL, VOCABULARY_SIZE, ids, lively, small_config

from sm_nanogpt.entry_point import kernels
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.kernels import NORM_EPS, attend, chunk_size
from sm_nanogpt.entry_point.model import GPT, Linear, norm, sample
from sm_nanogpt.entry_point.optim import gradient_of
from sm_nanogpt.launcher.models import engine


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 3e-3)])
def test_the_norm_and_its_gradient_equal_torchs(dtype, tolerance):
    generator = torch.Generator().manual_seed(1)
    dy, x = torch.randn(2, 3, 5, 16, generator=generator).to(dtype)
    x.requires_grad_()
    y, expected = norm(x), F.rms_norm(x, (16,), eps=NORM_EPS)
    torch.testing.assert_close(y, expected, atol=tolerance, rtol=tolerance)
    with torch.no_grad():
        assert torch.equal(norm(x), y)
    (dx,) = torch.autograd.grad(y, x, dy)
    (expected_dx,) = torch.autograd.grad(expected, x, dy)
    torch.testing.assert_close(dx, expected_dx, atol=tolerance, rtol=tolerance)


def test_the_norm_handles_a_row_too_long_for_float16():
    x = torch.full((1, 384), 4000.0, dtype=torch.float16)  # 78,000 long
    torch.testing.assert_close(norm(x), torch.ones_like(x))


@pytest.mark.parametrize("queries_at_once", [3, 512])
def test_bf16_attention_is_close_to_torchs_in_float32(monkeypatch, queries_at_once):
    monkeypatch.setattr("sm_nanogpt.entry_point.kernels.QUERIES_AT_ONCE", queries_at_once)
    generator = torch.Generator().manual_seed(1)
    q, k, v, dy = torch.randn(4, 2, 3, 7, 8, generator=generator)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), dropout=0.0)
    assert y.dtype == torch.bfloat16
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradients = torch.autograd.grad(y, leaves, dy.bfloat16())
    exact_gradients = torch.autograd.grad(exact, leaves, dy)
    results = (y.detach(), *gradients)
    exact_results = (exact.detach(), *exact_gradients)
    for one, other in zip(results, exact_results, strict=True):
        assert float((one - other).norm() / other.norm()) < 2e-2


def test_the_loss_is_the_mean_cross_entropy():
    model, x, y = lively(), ids(3, 8), ids(3, 8, seed=1)
    logits = model(x)
    by_hand = -logits.log_softmax(-1).gather(-1, y[..., None]).mean()
    torch.testing.assert_close(model(x, y), by_hand)


AT_ONCE = "sm_nanogpt.entry_point.kernels.LOGITS_AT_ONCE"
FEW = 16  # so few logits that 320 rows make three chunks, one of them short


@pytest.mark.parametrize(
    "dtype, tolerance, tied",
    [
        (torch.float32, 1e-5, True),
        (torch.bfloat16, 0.02, False),
        (torch.float16, 4e-3, False),
    ],
)
def test_computing_the_loss_in_chunks_does_not_change_it(monkeypatch, dtype, tolerance, tied):
    x, y = ids(40, 8), ids(40, 8, seed=1)
    losses = []
    gradients = []
    for at_once in (1 << 30, FEW):
        monkeypatch.setattr(AT_ONCE, at_once)
        model = lively(small_config(tie_embeddings=tied), dtype)
        loss = model(x, y)
        (1024 * loss).backward()  # as by a scaler
        losses.append(loss.detach())
        gradients.append([gradient_of(p) / 1024 for p in model.parameters()])
        with torch.no_grad():
            torch.testing.assert_close(model(x, y), loss, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(losses[1], losses[0], atol=tolerance, rtol=tolerance)
    for whole, chunked in zip(gradients[0], gradients[1], strict=True):
        torch.testing.assert_close(chunked, whole, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "rows, limit, size, count",
    [
        (16_384, 5336, 4096, 4),  # gpt2 on a GPU, 50,304 ids
        (16_384, 99, 128, 128),
        (300, 1 << 20, 384, 1),
    ],
)
def test_chunks_of_the_loss_are_even_and_of_whole_tiles(rows, limit, size, count):
    assert chunk_size(rows, limit) == size
    assert math.ceil(rows / size) == count
    assert size <= max(limit, 128) or count == 1


def test_more_logits_than_the_limit_are_computed_in_chunks(monkeypatch):
    apply = Mock(side_effect=kernels.ChunkedLoss.apply)
    monkeypatch.setattr(kernels.ChunkedLoss, "apply", apply)
    x, y = ids(40, 8), ids(40, 8, seed=1)
    n_logits = 40 * 8 * VOCABULARY_SIZE
    for limit, n_calls in ((n_logits, 0), (n_logits - 1, 1)):
        monkeypatch.setattr(AT_ONCE, limit << 4)  # a CPU takes a sixteenth of it
        lively()(x, y)
        assert apply.call_count == n_calls


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
    model = lively(small_config(n_layer=1))
    x, y = ids(40, 8), ids(40, 8, seed=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    weights = list(model.parameters())
    gradients = torch.autograd.grad(compiled(x, y), weights)
    expected = torch.autograd.grad(model(x, y), weights)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_heads_equal_eager_ones(monkeypatch):
    """In the layout that the compiler reads least of."""
    model = lively(small_config(n_head=4, n_kv_head=2, norm_weights=True))
    attention: Any = model.get_submodule("blocks.0.attention")
    x = torch.randn(2, 8, model.config.n_embd, generator=torch.Generator().manual_seed(1))
    cos, sin = model.angles(8)
    eager = attention.heads(x, cos, sin)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for heads, expected in zip(attention.heads(x, cos, sin), eager, strict=True):
        torch.testing.assert_close(heads, expected)


@pytest.mark.parametrize("memory, n_chunks", [(24e9, 12), (80e9, 3)])
def test_a_large_gpu_computes_the_loss_of_gpt2_in_few_chunks(monkeypatch, memory, n_chunks):
    properties = Mock(total_memory=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    n_rows = 61_440
    max_rows = kernels.logits_at_once(torch.device("cuda", 0)) // 50_304
    assert math.ceil(n_rows / chunk_size(n_rows, max_rows)) == n_chunks


def test_the_memory_of_a_gpu_is_a_constant_of_a_graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Mock(total_memory=80e9))

    def times_two(x: torch.Tensor) -> torch.Tensor:
        return 2 * x if kernels.has_large_memory(x.device) else x

    compiled = torch.compile(times_two, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


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


@pytest.mark.parametrize(
    "dtype, dropout",
    [(torch.float32, 0.0), (torch.float32, 0.5), (torch.bfloat16, 0.5)],  # each by another kernel
)
def test_masked_attention_stops_at_the_end_of_a_document(dtype, dropout):
    model = lively(small_config(dropout=dropout), dtype).train()
    x = torch.tensor([[1, 2, 3, 0, 4, 5, 6, 7]])
    for position in range(3):
        other = x.clone()
        other[0, position] += 3
        logits = []
        for tokens in (x, other):
            torch.manual_seed(1)
            logits.append(model(tokens, end=0)[0])
        assert torch.equal(logits[0][:position], logits[1][:position])
        assert not torch.allclose(logits[0][position:3], logits[1][position:3])
        assert torch.equal(logits[0][3:], logits[1][3:])
    if not dropout:  # alone in its window, a document's tokens see the same
        angles = tuple(angle[3:8] for angle in model.angles(8))
        alone = model(x[:, 3:], angles=angles, end=0)[0]
        torch.testing.assert_close(alone, model(x, end=0)[0, 3:], atol=1e-2, rtol=1e-2)


def loss_and_gradients(
    model: GPT, net: Any, x: torch.Tensor, y: torch.Tensor, **options: Any
) -> list[torch.Tensor]:
    """Of the model, computed by `net`, which may be the compiled one."""
    loss = net(x, y, **options)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def test_compiled_attention_within_documents_is_the_dense(monkeypatch):
    """Traced as for a GPU, and computed by torch's reference of FlexAttention."""
    from torch.nn.attention import flex_attention

    # It refuses gradients on a CPU, for which it has no kernel.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(kernels, "FLEX_DEVICE", "cpu")
    values = dict(n_layer=1, n_head=4, n_kv_head=1, n_embd=64, block_size=128)
    model = lively(small_config(**values)).train()
    x = ids(3, 128)
    y = x.roll(-1, 1).masked_fill(x == 5, -100)
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=keep, dynamic=False, fullgraph=True)
    dense = loss_and_gradients(model, model, x, y, end=0, chats=True)
    flexible = loss_and_gradients(model, compiled, x, y, end=0, chats=True)
    (graph,) = graphs
    assert "flex_attention" in graph
    for one, other in zip(dense, flexible, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("own_end", [False, True])
def test_blocks_without_a_key_to_attend_are_skipped(monkeypatch, own_end):
    """And those with keys alone are computed without the mask."""
    config = small_config(n_embd=64, block_size=512)
    x = ids(2, 512).clamp_min(1)
    x[0, 130] = 0
    x[1, [200, 300]] = 0
    mask = kernels.document_mask(x, 0, own_end, config)
    monkeypatch.setattr(kernels, "FLEX_DEVICE", "cpu")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    blocks = kernels.document_mask(x, 0, own_end, config)
    cut = mask.unfold(2, 128, 128).unfold(3, 128, 128).flatten(-2)
    for n, indices, expected in (
        (blocks.kv_num_blocks, blocks.kv_indices, cut.any(-1) & ~cut.all(-1)),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices, cut.all(-1)),
    ):
        is_listed = torch.arange(4) < n[..., None]
        has_block = torch.zeros(expected.shape).scatter(-1, indices.long(), is_listed.float())
        assert torch.equal(has_block, expected.float())
    assert not blocks.to_dense().bool().logical_not()[cut.any(-1)].any()


@pytest.mark.parametrize("dtype, dropout", [(torch.float32, 0.5), (torch.bfloat16, 0.0)])
def test_layers_computed_twice_have_the_same_gradients(dtype, dropout):
    results = []
    layers = []
    x, y = ids(12, 8), ids(12, 8, seed=1)
    for recompute in (False, True):
        model = lively(small_config(dropout=dropout, recompute=recompute), dtype).train()
        model.blocks[0].register_forward_pre_hook(lambda *_: layers.append(1))
        torch.manual_seed(1)
        results.append(loss_and_gradients(model, model, x, y, end=0))
        with torch.no_grad():
            model(x)
    assert len(layers) == 2 + 3  # an evaluation computes them once
    for once, twice in zip(results[0], results[1], strict=True):
        assert torch.equal(once, twice)


def test_an_untrained_model_knows_nothing():
    model = GPT(SMALL, VOCABULARY_SIZE)
    model.init_weights(1)
    loss = model(ids(50, 8), ids(50, 8, seed=1)).item()
    assert abs(loss - torch.tensor(float(VOCABULARY_SIZE)).log()) < 0.1


@pytest.mark.parametrize("tied, n_hidden", [(False, 0), (True, 24)])
def test_the_number_of_parameters_matches_the_formula(tied, n_hidden):
    config = Config(n_layer=3, n_embd=48, n_head=4, n_hidden=n_hidden, tie_embeddings=tied)
    model = GPT(config, VOCABULARY_SIZE)
    hidden = n_hidden or 8 * 48 // 3
    embedding = VOCABULARY_SIZE * 48
    head = 0 if tied else embedding
    expected = 3 * (4 * 48 * 48 + 3 * 48 * hidden) + embedding + head
    assert sum(p.numel() for p in model.parameters()) == expected


def test_a_tied_head_is_the_embedding():
    model, x = lively(small_config(tie_embeddings=True)), torch.tensor([[3]])
    assert model.head is None
    logit = model(x)[0, 0, 7].item()
    with torch.no_grad():
        model.embed.weight[7] *= -1
    assert model(x)[0, 0, 7].item() == -logit


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


@pytest.mark.parametrize("length", [0, 5, 30])
def test_a_padded_window_draws_what_a_growing_one_does(length):
    padded = sample(lively(), [3], length, seed=5)
    growing = engine.generate(lively(), torch.tensor([[3]]), length, seed=5, use_cache=False)
    assert padded == [int(id) for id in growing]


def test_all_windows_of_a_sample_have_one_shape():
    model = lively()
    shapes = set()
    model.register_forward_pre_hook(lambda _, inputs: shapes.add(inputs[0].shape))
    sample(model, [3], 30)
    assert shapes == {(1, 8)}
