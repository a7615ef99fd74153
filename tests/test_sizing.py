"""The memory of a rank, the length of the text, and `--preset auto`."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch

from entry_point import train
from launcher import InputError, TrainingJob, sizing
from launcher.aws.instances import GPU_FACTS, GPUS


def job(instance: str = "ml.g5.12xlarge", preset: str | None = None, **values: Any) -> TrainingJob:
    return TrainingJob(instance=instance, preset=preset, hyperparameters=values)


@pytest.mark.parametrize("values", [{}, {"tie_embeddings": True}, {"n_kv_head": 1, "head_dim": 32}])
def test_parameters_are_counted_as_the_model_has_them(values: dict[str, Any]) -> None:
    config = train.Config(**values)
    with torch.device("meta"):
        model = train.GPT(config, 99)
    assert sizing.count_parameters(config, 99) == sum(p.numel() for p in model.parameters())


def test_every_gpu_that_sagemaker_has_is_known() -> None:
    assert {gpu for _, gpu in GPUS.values()} == set(GPU_FACTS)


@pytest.mark.parametrize(
    "preset, rows, world_size, passes",
    [("gpt2", 480, 4, 8), ("gpt2", 480, 1, 30), ("baby", 64, 1, 1), ("small", 128, 1, 4)],
)
def test_a_pass_has_at_most_16384_tokens(
    preset: str, rows: int, world_size: int, passes: int
) -> None:
    config = train.make_config({}, preset)
    assert (config.batch_size, config.passes(world_size)) == (rows, passes)
    assert rows // world_size // passes * config.block_size <= 16384
    assert train.make_config({"gradient_accumulation_steps": 2}, preset).passes(1) == 2


@pytest.mark.parametrize(
    "batch_size, world_size, block_size, passes",
    [(508, 4, 1024, 127), (97, 1, 256, 97), (97, 1, 64, 1), (6, 2, 1 << 15, 3)],
)
def test_passes_are_the_fewest_that_keep_the_limit(
    batch_size: int, world_size: int, block_size: int, passes: int
) -> None:
    config = train.Config(batch_size=batch_size, block_size=block_size)
    assert config.passes(world_size) == passes


def test_a_model_that_cannot_fit_its_gpu_is_refused() -> None:
    large = job(n_layer=48, n_embd=4096, n_head=32, block_size=2048, batch_size=64)
    with pytest.raises(InputError, match=r"needs at least \d+ GB, and its A10G has 24 GB; set a"):
        sizing.check_memory(large, 50304)
    sizing.check_memory(large.model_copy(update={"instance": "ml.p6-b300.48xlarge"}), 50304)


def test_a_model_that_may_not_fit_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    sizing.check_memory(job("ml.g4dn.xlarge", "gpt2", gradient_accumulation_steps=10), 50304)
    assert "may need more memory than that: set a larger gradient_accum" in caplog.text


@pytest.mark.parametrize("preset", ["baby", "small", "gpt2"])
def test_the_presets_fit_the_default_instance(
    preset: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sizing.check_memory(job(preset=preset), 50304)
    assert "of the 24 GB of each A10G" in caplog.text
    assert "may need more" not in caplog.text


@pytest.mark.parametrize(
    "steps, tokens, warned",
    [(100_000, 1_000_000, True), (100_000, 10_000_000, False), (1000, 1000, False)],
)
def test_a_text_that_is_read_too_often_is_warned_about(
    steps: int, tokens: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sizing.check_readings(job("local", max_steps=steps), tokens)
    assert ("will memorize it" in caplog.text) is warned


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
def test_auto_takes_the_largest_preset_that_the_text_fills(
    instance: str, tokens: int, preset: str
) -> None:
    fitted = sizing.fitted(job(instance), tokens, 16384)
    assert fitted.preset == preset
    config = fitted.config(1)
    seen = config.max_steps * config.batch_size * config.block_size
    least = train.make_config({}, preset).max_steps
    step = config.batch_size * config.block_size
    assert seen <= max(least * step, 4 * tokens)
    worth = 20 * sizing.count_parameters(config, 16384)
    assert seen <= max(least * step, worth)
    assert seen > min(worth, 4 * tokens) - step or config.max_steps == least


def test_given_steps_are_kept() -> None:
    assert sizing.fitted(job(max_steps=7), 10**9, 16384).config(1).max_steps == 7


def test_a_predicted_time_over_the_limit_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizing.fitted(job(), 10**9, 16384)
    assert "more than the time limit of 3600 s: set --max-run" in caplog.text
    seconds = sizing.seconds_on_gpus(job(preset="gpt2"), 50304)
    assert seconds is not None
    assert math.isclose(seconds, 5.8 * 3600, rel_tol=0.2)
