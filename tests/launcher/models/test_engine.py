"""Generation: by the engine, and by the plain loop, which it must equal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from models import SMALL, VOCABULARY_SIZE, ids, lively, tokenizer_of

from sm_nanogpt.entry_point.huggingface import write_artefact
from sm_nanogpt.entry_point.model import GPT, Linear
from sm_nanogpt.launcher.models import engine
from sm_nanogpt.launcher.models.engine import (
    MAX_INT8_SEQUENCES,
    KeyValueCache,
    forward,
    logits_to_probabilities,
)

Generate = Callable[..., Iterator[torch.Tensor]]
plainly = partial(engine.generate, use_cache=False)


@pytest.fixture
def packed(monkeypatch):
    """Lets the engine pack the matrices of small models, too."""
    monkeypatch.setattr(engine, "MIN_PACKED_PARAMETERS", 0)


def sampled(
    generate: Generate, model: GPT, prompt: torch.Tensor, n: int, **options: Any
) -> list[int]:
    """The ids that follow a prompt [1, length]."""
    return [int(id) for id in generate(model, prompt, n, **options)]


# -- the cache -------------------------------------------------------------------------------------


def test_decoding_with_a_cache_equals_a_forward_pass():
    model = lively()
    x = ids(5, 8)
    with torch.inference_mode():
        cache = KeyValueCache(model, 5, 8)
        logits = [forward(model, x[:, :3], cache)]
        for position in range(3, 8):
            logits.append(forward(model, x[:, position : position + 1], cache))
        expected = model(x)[:, 2:]
        torch.testing.assert_close(torch.stack(logits, dim=1), expected, atol=1e-5, rtol=1e-5)


def test_one_layers_context_slides_as_if_cropped():
    """With one layer no older position can speak through a newer one, so the two are equal."""
    model = lively(dataclasses.replace(SMALL, n_layer=1))
    x = ids(5, 30)
    with torch.inference_mode():
        cache = KeyValueCache(model, 5, 8)
        forward(model, x[:, :5], cache)
        for end in range(6, 31):
            logits = forward(model, x[:, end - 1 : end], cache)
            cropped = model(x[:, max(0, end - 8) : end])[:, -1]
            torch.testing.assert_close(logits, cropped, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("generate", [plainly, engine.generate], ids=["plain", "engine"])
def test_the_last_window_of_a_long_prompt_counts(generate):
    model = lively()
    prompt = ids(1, 20)
    after_prompt = sampled(generate, model, prompt, 20, temperature=0)
    after_window = sampled(generate, model, prompt[:, -8:], 20, temperature=0)
    assert after_prompt == after_window


def test_sliding_past_the_context_equals_transformers(tmp_path):
    import transformers

    model = lively(dataclasses.replace(SMALL, tie_embeddings=True))
    assert write_artefact(tmp_path, model, tokenizer_of("abcdefghijk"), {})[0] == ""
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    all_ids = set[int]()
    for seed in range(2):
        prompt = ids(1, 5, seed=seed)
        with torch.inference_mode():
            expected = theirs.generate(prompt, max_new_tokens=40, do_sample=False)[0, 5:].tolist()
        assert sampled(engine.generate, model, prompt, 40, temperature=0) == expected
        all_ids.update(expected)
    assert len(all_ids) > 2


# -- packed weights --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("min_packed", "shape"),
    [
        (0, {"n_head": 4, "n_kv_head": 2, "head_dim": 48, "norm_weights": True}),
        (engine.MIN_PACKED_PARAMETERS, {}),
    ],
)
def test_greedy_ids_equal_the_plain_loops_in_float32(min_packed, shape, monkeypatch):
    """Of a model of any precision."""
    monkeypatch.setattr(engine, "MIN_PACKED_PARAMETERS", min_packed)
    config = dataclasses.replace(SMALL, n_embd=32, block_size=64, **shape)
    prompts = ids(MAX_INT8_SEQUENCES + 1, 4)
    plain = torch.stack(list(plainly(lively(config), prompts, 60, temperature=0)))
    model = lively(config, torch.bfloat16)
    ours = torch.stack(list(engine.generate(model, prompts, 60, temperature=0)))
    assert torch.equal(ours, plain)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize(
    ("dtype", "n_embd", "tolerance"),
    [
        (torch.float32, 32, 1e-5),
        (torch.bfloat16, 32, 3e-2),
        (torch.bfloat16, 40, 3e-2),  # bytes are for multiples of 16 alone
    ],
)
def test_a_packed_copy_equals_the_model(dtype, n_embd, tolerance):
    for batch_size in (MAX_INT8_SEQUENCES, MAX_INT8_SEQUENCES + 1):
        assert error_of_copy(dtype, batch_size, 1, n_embd) < tolerance  # a token
        assert error_of_copy(dtype, batch_size, 8, n_embd) < tolerance  # a prompt


def test_a_copy_of_a_small_model_is_exact():
    assert error_of_copy(torch.bfloat16, batch_size=1, length=8, n_embd=32) < 1e-5


@pytest.mark.usefixtures("packed")
def test_a_copy_in_float16_is_not_packed():
    assert error_of_copy(torch.float16, batch_size=1, length=8, n_embd=32) < 1e-5


def error_of_copy(dtype: torch.dtype, batch_size: int, length: int, n_embd: int) -> float:
    """How far the logits of a sampling copy are from those of its model, relative to them."""
    model = lively(dataclasses.replace(SMALL, n_embd=n_embd))
    x = ids(batch_size, length)
    with torch.inference_mode():
        exact = model(x)
        ours = engine.sampling_copy(model, batch_size, dtype)(x)
    return float((ours - exact).norm() / exact.norm())


def test_only_the_matrices_of_large_models_are_packed(monkeypatch):
    model = lively()
    n_parameters = model.config.matrix_parameters
    for limit, kind in ((n_parameters, engine.PackedLinear), (n_parameters + 1, Linear)):
        monkeypatch.setattr(engine, "MIN_PACKED_PARAMETERS", limit)
        copy = engine.sampling_copy(model, 1, torch.float32)
        kinds = {type(part) for part in copy.blocks.modules()}
        assert kinds & {engine.PackedLinear, Linear} == {kind}


def test_a_cpu_samples_in_float32_but_for_products():
    copy = engine.sampling_copy(lively(dtype=torch.bfloat16), 1, torch.bfloat16)
    assert copy.compute_dtype == torch.float32


@pytest.mark.usefixtures("packed")
def test_weights_of_zero_can_be_sampled():
    model = GPT(dataclasses.replace(SMALL, n_embd=32), VOCABULARY_SIZE, torch.bfloat16)
    model.init_weights(1)  # projections back into the stream begin at zero
    with torch.inference_mode():
        assert engine.sampling_copy(model, 1, torch.bfloat16)(ids(1, 8)).isfinite().all()


# -- what is drawn ---------------------------------------------------------------------------------


PROBABILITIES = [
    [0.4, 0.3, 0.2, 0.1],
    [0.1, 0.2, 0.3, 0.4],
]
LOGITS = torch.tensor(PROBABILITIES).log()


def test_top_k_keeps_the_k_most_likely():
    p = logits_to_probabilities(LOGITS, 1.0, top_k=2)
    expected = [
        [4 / 7, 3 / 7, 0, 0],
        [0, 0, 3 / 7, 4 / 7],
    ]
    torch.testing.assert_close(p, torch.tensor(expected))
    for top_k in (0, 4, 100):  # none, or all
        torch.testing.assert_close(logits_to_probabilities(LOGITS, 1.0, top_k=top_k), LOGITS.exp())


@pytest.mark.parametrize("top_p, n_kept", [(0.39, 1), (0.41, 2), (1.0, 4)])
def test_top_p_keeps_the_fewest_likely_enough(top_p, n_kept):
    p = logits_to_probabilities(LOGITS, 1.0, top_p=top_p)
    torch.testing.assert_close(p.sum(dim=-1), torch.ones(2))
    first, second = (p > 0).tolist()
    n_dropped = 4 - n_kept
    assert first == [True] * n_kept + [False] * n_dropped
    assert second == [False] * n_dropped + [True] * n_kept


def test_temperature_sharpens_and_flattens():
    cold = logits_to_probabilities(LOGITS, 0.5)[0, 0]
    hot = logits_to_probabilities(LOGITS, 2.0)[0, 0]
    assert cold > 0.4 > hot > 0.25


def test_generating_does_not_change_the_model():
    model = lively(dtype=torch.bfloat16).train()
    weights_before = {name: p.detach().clone() for name, p in model.named_parameters()}
    list(engine.generate(model, ids(1, 3), 5))
    assert model.training
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert torch.equal(parameter, weights_before[name])


def test_ids_are_drawn_as_often_as_they_are_likely():
    model = lively(dataclasses.replace(SMALL, n_layer=1))
    n = 20_000
    prompt = ids(1, 4)
    (drawn,) = engine.generate(model, prompt.expand(n, -1), 1, temperature=2.0)
    with torch.inference_mode():
        expected = logits_to_probabilities(model(prompt)[:, -1], 2.0)[0]
    frequencies = drawn.bincount(minlength=VOCABULARY_SIZE) / n
    torch.testing.assert_close(frequencies, expected, atol=0.02, rtol=0)


def drawn(**options: Any) -> list[int]:
    return sampled(engine.generate, lively(), ids(1, 3), 40, **options)


def test_the_seed_alone_decides_what_is_drawn():
    torch.manual_seed(1)
    one = drawn(seed=3)
    torch.manual_seed(2)
    assert drawn(seed=3) == one
    assert drawn(seed=4) != one


def test_engine_and_plain_loop_draw_the_same_ids():
    model = lively(dataclasses.replace(SMALL, block_size=64))
    options = {"seed": 5, "temperature": 0.8, "top_k": 7}
    plain = sampled(plainly, model, ids(1, 3), 60, **options)
    assert sampled(engine.generate, model, ids(1, 3), 60, **options) == plain


def test_temperature_zero_is_greedy_with_any_seed():
    greedy = drawn(temperature=0, seed=1)
    assert greedy == drawn(temperature=0, seed=2)
    assert greedy == drawn(temperature=1e-40, seed=2)  # logits over it are infinite
    assert greedy == drawn(top_k=1, seed=3)
    assert greedy == drawn(top_p=1e-6, seed=4)


@pytest.mark.usefixtures("packed")
def test_a_batch_of_prompts_is_sampled_together():
    model = lively()
    prompts = ids(3, 4)
    together = torch.stack(list(engine.generate(model, prompts, 12, temperature=0)))
    for n in range(3):
        alone = sampled(engine.generate, model, prompts[n : n + 1], 12, temperature=0)
        assert together[:, n].tolist() == alone


def test_generation_is_lazy():
    endless = engine.generate(lively(), ids(1, 3), 10**6)
    assert len(list(itertools.islice(endless, 5))) == 5


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_small", [True, False])
def test_a_small_model_samples_by_one_thread(monkeypatch, is_small):
    """The caller's number of threads is as before after each token."""
    monkeypatch.setattr(engine, "MIN_SHARED_PARAMETERS", 1 << 20 if is_small else 0)
    while_computing = []

    def draw(logits: torch.Tensor, *_: Any) -> torch.Tensor:
        while_computing.append(torch.get_num_threads())
        return logits.argmax(dim=-1)

    monkeypatch.setattr(engine, "draw", draw)
    n_before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        between = [torch.get_num_threads() for _ in engine.generate(lively(), ids(1, 3), 4)]
    finally:
        torch.set_num_threads(n_before)
    assert while_computing == [1 if is_small else 2] * 4
    assert between == [2] * 4
