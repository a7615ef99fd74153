"""The passes of a step, the length of the text, and `--preset auto`."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from entry_point.config import Config, make_config
from entry_point.device import tokens_per_pass
from entry_point.model import GPT
from launcher.job import TrainingJob
from launcher.launching import start, texts


def job(instance: str = "ml.g5.12xlarge", preset: str | None = None, **values: Any) -> TrainingJob:
    return TrainingJob(instance=instance, data="/data", preset=preset, hyperparameters=values)


@pytest.mark.parametrize("values", [{}, {"tie_embeddings": True}, {"n_kv_head": 1, "head_dim": 32}])
def test_parameters_are_counted_as_the_model_has_them(values):
    config = Config(**values)
    with torch.device("meta"):
        model = GPT(config, 99)
    assert start.count_parameters(config, 99) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "preset, rows, world_size, passes",
    [("gpt2", 480, 4, 8), ("gpt2", 480, 1, 30), ("baby", 64, 1, 1), ("small", 128, 1, 4)],
)
def test_a_pass_has_at_most_16384_tokens(preset, rows, world_size, passes):
    config = make_config({}, preset)
    assert (config.batch_size, config.passes(world_size)) == (rows, passes)
    assert rows // world_size // passes * config.block_size <= 16384
    assert make_config({"gradient_accumulation_steps": 2}, preset).passes(1) == 2


@pytest.mark.parametrize(
    "gigabytes, n_layer, n_embd, tokens",
    [(24, 12, 768, 1 << 14), (85, 12, 768, 1 << 16), (24, 28, 2048, 5812), (85, 28, 2048, 20587)],
)
def test_a_pass_on_a_gpu_fits_half_of_its_memory(monkeypatch, gigabytes, n_layer, n_embd, tokens):
    found = Mock(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    config = Config(n_layer=n_layer, n_embd=n_embd)
    assert tokens_per_pass(config, torch.device("cuda")) == tokens
    assert tokens_per_pass(config, torch.device("cpu")) == 1 << 14


@pytest.mark.parametrize(
    "batch_size, world_size, block_size, passes",
    [(508, 4, 1024, 127), (97, 1, 256, 97), (97, 1, 64, 1), (6, 2, 1 << 15, 3)],
)
def test_passes_are_the_fewest_that_keep_the_limit(batch_size, world_size, block_size, passes):
    config = Config(batch_size=batch_size, block_size=block_size)
    assert config.passes(world_size) == passes


@pytest.mark.parametrize(
    "preset, tokens, steps",
    # Up to 8 readings are usual, or 20 with weight decay; presets fit tiny Shakespeare.
    [("quick", 2000, 10), ("cpu", 18_000, 93), ("cpu", 191_999, 999), ("cpu", 192_000, 0)]
    + [("laptop", 194_559, 379), ("laptop", 194_560, 0)]
    + [(preset, 1_003_854, 0) for preset in ("cpu", "quick", "laptop", "baby")],
)
def test_a_text_that_is_read_too_often_is_warned_about(preset, tokens, steps, caplog):
    texts.check_readings(job("local", preset).config(1), tokens)
    assert ("will memorize it" in caplog.text) is bool(steps)
    assert [record.steps for record in caplog.records] == [steps] * bool(steps)


@pytest.mark.parametrize(
    "instance, tokens, preset",
    [
        ("ml.g5.12xlarge", 1_000_000, "baby"),
        ("ml.g5.12xlarge", 100_000_000, "baby"),
        ("ml.g5.12xlarge", 200_000_000, "small"),
        ("ml.g5.12xlarge", 1_000_000_000, "gpt2"),
        ("ml.m5.large", 1_000_000_000, "laptop"),
        ("local", 1_000_000, "laptop"),
    ],
)
def test_auto_takes_the_largest_preset_that_the_text_fills(instance, tokens, preset):
    fitted = start.fitted(job(instance), tokens, 16384)
    assert fitted.preset == preset
    config = fitted.config(1)
    seen = config.max_steps * config.batch_size * config.block_size
    least = make_config({}, preset).max_steps
    step = config.batch_size * config.block_size
    assert seen <= max(least * step, 4 * tokens)
    worth = 20 * start.count_parameters(config, 16384)
    assert seen <= max(least * step, worth)
    assert seen > min(worth, 4 * tokens) - step or config.max_steps == least


@pytest.mark.parametrize(
    ("tokens", "chats", "preset", "steps"),
    [
        (2700, False, "quick", 14),  # a poem of 3 kB
        (585, False, "quick", 3),  # the shortest text that is taken
        (199_999, False, "quick", 1041),
        (200_000, False, "laptop", 1900),
        (2700, True, "laptop", 1900),
    ],
)
def test_auto_reads_a_short_text_a_few_times_on_a_cpu(tokens, chats, preset, steps):
    fitted = start.fitted(job("local"), tokens, 60, chats)
    assert (fitted.preset, fitted.config(1).max_steps) == (preset, steps)


def test_given_steps_are_kept():
    assert start.fitted(job(max_steps=7), 10**9, 16384).config(1).max_steps == 7
