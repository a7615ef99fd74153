"""The passes of a step, the length of the text, and `--preset auto`."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sm_nanogpt import InputError
from sm_nanogpt.entry_point.config import Config, make_config
from sm_nanogpt.entry_point.device import tokens_per_pass
from sm_nanogpt.entry_point.huggingface import FINE_TUNING
from sm_nanogpt.entry_point.sizes import hyperparameters_for_size
from sm_nanogpt.launcher.job import SEARCH_VARIABLE, Request, TrainingJob
from sm_nanogpt.launcher.launching import sizing, texts
from sm_nanogpt.launcher.source import Source
from sm_nanogpt.launcher.text.channels import Channel
from sm_nanogpt.launcher.text.store import VALIDATION_FRACTION, Upload


def job(
    instance: str = "ml.g5.12xlarge",
    preset: str | None = None,
    size: float | None = None,
    **values: Any,
) -> TrainingJob:
    return TrainingJob(
        instance=instance, data="/data", preset=preset, size=size, hyperparameters=values
    )


def test_a_pass_has_at_most_16384_tokens():
    cases = [("gpt2", 480, 4, 8), ("gpt2", 480, 1, 30), ("baby", 64, 1, 1), ("small", 128, 1, 4)]
    for preset, rows, world_size, passes in cases:
        config = make_config({}, preset)
        assert config.batch_size == rows
        assert config.passes(world_size) == passes
        assert rows // world_size // passes * config.block_size <= 16384
        assert make_config({"gradient_accumulation_steps": 2}, preset).passes(1) == 2


@pytest.mark.parametrize(
    "gigabytes, n_layer, n_embd, tokens",
    [
        (24, 12, 768, 1 << 14),
        (85, 12, 768, 1 << 16),
        (24, 28, 2048, 5812),
    ],
)
def test_a_pass_on_a_gpu_fits_half_of_its_memory(monkeypatch, gigabytes, n_layer, n_embd, tokens):
    gpu = Mock(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    config = Config(n_layer=n_layer, n_embd=n_embd)
    assert tokens_per_pass(config, torch.device("cuda")) == tokens
    assert tokens_per_pass(config, torch.device("cpu")) == 1 << 14


def test_passes_are_the_fewest_or_at_most_twice_as_many():
    cases = [
        (500, 1, 1024, 50),
        (508, 4, 1024, 8),
        (67, 1, 1024, 5),
        (97, 1, 256, 2),
        (97, 1, 64, 1),
        (6, 2, 1 << 15, 3),
    ]
    for batch_size, world_size, block_size, passes in cases:
        config = Config(batch_size=batch_size, block_size=block_size)
        assert config.passes(world_size) == passes


@pytest.mark.parametrize(
    "preset, tokens, steps",
    # Up to 8 readings are usual, or 20 with weight decay; presets fit tiny Shakespeare.
    [
        ("cpu", 191_999, 999),
        ("cpu", 192_000, 0),
        ("laptop", 194_559, 379),
        ("laptop", 194_560, 0),
    ],
)
def test_a_text_that_is_read_too_often_is_warned_about(preset, tokens, steps, caplog):
    request = Request(instance="local", hyperparameters={"max_steps": 1})
    texts.check_readings(request, job("local", preset).config(), tokens)
    if steps:
        [record] = caplog.records
        assert "will memorize it" in record.message
        assert record.steps == steps
    else:
        assert not caplog.records


@pytest.mark.parametrize(
    "values, code",
    [
        ({}, "fitting-size"),
        ({"preset": "auto"}, "more-text"),
        ({"fit": "1MB"}, "more-text"),
        ({"preset": "auto", "hyperparameters": {"max_steps": 900}}, "fewer-steps"),
        ({"init_from": "JOB"}, "fewer-steps"),
        ({"resume": "JOB"}, ""),
        ({"environment": {SEARCH_VARIABLE: "words"}}, ""),
    ],
)
def test_what_helps_against_memorizing_is_still_open(values, code, caplog):
    """A small text asks for a small model; four steps of a large one would train nothing."""
    texts.check_readings(Request(instance="ml.m5.xlarge", **values), Config(), 2000)
    assert [getattr(record, "code", "") for record in caplog.records] == [code]


def text(tokens: int, chats: bool = False) -> dict[str, Channel]:
    upload = Upload("file:///data", 0, "", (), train_tokens=tokens, chats=chats)
    return {"data": Channel("text", "file:///data", upload)}


@pytest.mark.parametrize(
    "values, tokens, steps",
    [
        ({"init_from": "JOB"}, 2_000, 10),  # 250 steps of 768 tokens would read it 96 times
        ({"init_from": "JOB", "hyperparameters": {"batch_size": 3}}, 2_000, 41),
        ({"init_from": "JOB"}, 1_000_000, None),
        ({"init_from": "JOB", "preset": "quick"}, 2_000, None),
        # 500 are the steps of fine-tuning, which come before those of a preset.
        ({"init_from": "JOB", "preset": "quick", "hyperparameters": FINE_TUNING}, 2_000, 10),
        ({"init_from": "JOB", "hyperparameters": {"warmup_steps": 20}}, 2_000, None),
        ({}, 2_000, None),
    ],
)
def test_a_start_from_a_model_reads_a_short_text_4_times(values, tokens, steps):
    request = Request(instance="local", **values)
    filled = sizing.with_fitting_steps(request, text(tokens))
    assert filled.hyperparameters.get("max_steps") == steps


@pytest.mark.parametrize("tokens, warns", [(600, True), (2_000, False)])
def test_a_start_from_a_model_in_few_steps_warns(tokens, warns, caplog):
    request = Request(instance="local", init_from="JOB")
    sizing.with_fitting_steps(request, text(tokens))
    assert any("so few steps" in message for message in caplog.messages) is warns


def plain_text(characters: int) -> dict[str, Channel]:
    upload = Upload("file:///data", characters, "", (), characters=characters)
    return {"data": Channel("text", "file:///data", upload)}


def test_a_size_is_for_the_part_of_the_text_that_trains():
    half = job("local", size=1.0, validation_fraction=0.5)
    length = sizing.text_length(half, plain_text(100_000))
    assert length.n_tokens == 50_000
    all_of_it = job("local", size=1.0, validation_fraction=0.9999)
    with pytest.raises(InputError, match="must be a number from"):
        sizing.text_length(all_of_it, plain_text(4_000))


def test_an_upload_and_a_run_validate_by_the_same_fraction():
    assert Config().validation_fraction == VALIDATION_FRACTION


def test_readings_count_the_part_of_the_text_that_trains():
    upload = Upload("file:///data", 100_000, "", (), characters=100_000)
    assert texts.tokens_to_read(upload, Config(validation_fraction=0.5), part="") == 50_000
    assert texts.tokens_to_read(upload, Config(), part="training") == 100_000


@pytest.mark.parametrize(
    "instance, tokens, size",
    [
        ("local", 585, 0.25),  # the shortest text that is taken
        ("local", 18_000, 1.0),  # read 15 times: size 0.75 reads it 6 times
        ("local", 27_000, 1.5),  # worth 23 readings, and read 16 times
        ("local", 36_000, 1.5),  # size 1.75 is worth 24.4 readings
        ("local", 90_000, 1.75),  # size 2 reads it 13 times
        ("local", 300_000, 2.75),  # size 3 reads it 14 times
        ("ml.m5.large", 4_000_000_000, 3.0),
        ("ml.g5.12xlarge", 1_000_000, 4.0),  # read 12.4 times
        ("ml.g5.12xlarge", 4_000_000_000, 16.0),
    ],
)
def test_auto_takes_the_largest_size_that_the_text_fills(instance, tokens, size):
    sized = sizing.sized(job(instance, "auto"), text(tokens))
    assert sized.size == size
    assert sized.preset is None
    config = sized.config()
    step = config.batch_size * config.block_size
    assert config.max_steps * step <= max(20 * step, 16 * tokens + step)
    assert tokens // 9 > config.block_size


@pytest.mark.parametrize(
    "fields",
    [
        {"hyperparameters": {"generations": 1}},
        {"hyperparameters": {"max_steps": 500}},
        {"hyperparameters": {"optimizer": "adamw"}},
        {"teacher": "/some/model"},
    ],
)
def test_one_run_gets_a_smaller_size_than_two_generations(fields):
    """A longer run of one generation memorizes the text."""
    assert sizing.sized(job("local", "auto"), text(42_000)).size == 1.75
    request = job("local", "auto").replaced(**fields)
    assert sizing.sized(request, text(42_000)).size == 1.25


@pytest.mark.parametrize("generations", ["2", 3])
def test_generations_that_a_user_sets_get_the_size_of_two(generations):
    request = job("local", "auto", generations=generations)
    assert sizing.sized(request, text(42_000)).size == 1.75


def test_a_folder_without_generations_gets_the_size_of_one_run(monkeypatch):
    """As of a copy that is older than they are."""
    monkeypatch.setattr(Source, "known_hyperparameters", lambda *_: {})
    sized = sizing.sized(job("local", "auto"), text(42_000))
    assert sized.size == 1.25
    assert "generations" not in sized.hyperparameters


def test_a_size_of_conversations_is_that_of_one_run():
    assert sizing.sized(job("local", "auto"), text(42_000, chats=True)).size == 1.25


@pytest.mark.parametrize(
    "instance, tokens, chats, generations",
    [
        ("local", 54_000, False, 2),
        ("local", 54_000, True, None),  # conversations were not measured
        ("local", 4_000_000, False, None),  # it is read once
        ("ml.g5.12xlarge", 1_000_000, False, None),  # size 4, read 12 times
    ],
)
def test_auto_trains_two_generations_where_they_gain(instance, tokens, chats, generations, caplog):
    caplog.set_level("INFO")
    sized = sizing.sized(job(instance, "auto"), text(tokens, chats))
    assert sized.hyperparameters.get("generations") == generations
    assert ("take about 2.25 times as long as one" in caplog.text) is (generations == 2)
    codes = {getattr(record, "code", "") for record in caplog.records}
    assert ("one-generation" in codes) is (generations == 2)


@pytest.mark.parametrize(
    "tokens, chats, is_said", [(59_999, False, True), (60_000, False, False), (30_000, True, False)]
)
def test_a_short_text_is_said_to_need_a_measured_size(tokens, chats, is_said, caplog):
    caplog.set_level("INFO")
    sizing.sized(job("local", "auto"), text(tokens, chats))
    codes = {getattr(record, "code", "") for record in caplog.records}
    assert ("measure-sizes" in codes) is is_said


@pytest.mark.parametrize("values, expected", [({"generations": 1}, 1), ({"max_steps": 500}, None)])
def test_auto_leaves_generations_to_the_user(values, expected):
    sized = sizing.sized(job("local", "auto", **values), text(54_000))
    assert sized.hyperparameters.get("generations") == expected
    assert "generations" not in sizing.sized(job("local", size=1.5), text(54_000)).hyperparameters


def test_auto_leaves_a_run_with_a_teacher_alone():
    taught = job("local", "auto").replaced(teacher="/some/model")
    assert "generations" not in sizing.sized(taught, text(54_000)).hyperparameters


def test_all_gpus_share_a_batch():
    for size in (0.25, 2, 2.5, 3, 5, 12):
        sizing.sized(job("ml.g5.48xlarge", size=size), text(10**6)).config(8)


def test_a_size_leaves_what_is_given():
    config = sizing.sized(job(size=3, max_steps=7), text(10**9)).config()
    assert config.max_steps == 7
    assert config.n_embd == 192


def test_a_size_has_no_learning_rate_for_adamw():
    sized = sizing.sized(job(size=3, optimizer="adamw"), text(10**6))
    assert sized.config().learning_rate == Config(optimizer="adamw").learning_rate


def test_a_size_does_not_cut_conversations():
    config = sizing.sized(job(size=1), text(2700, chats=True)).config()
    assert config.short_windows == 0
    assert config.block_size == 1024


def test_the_dial_is_smooth():
    """A twentieth more size never changes the work by more than a step of its depth does."""
    sizes = [n / 20 for n in range(15, 321)]
    for tokens in (10**6, 10**10):
        configs = [Config(**hyperparameters_for_size(size, tokens)) for size in sizes]
        for name in ("matrix_parameters", "n_embd", "block_size", "learning_rate", "momentum"):
            values = [getattr(config, name) for config in configs]
            for one, other in itertools.pairwise(values):
                assert 0.6 < other / one < 1.8, name


def test_few_rows_are_rounded_down_for_more_steps():
    """600 N + 5 N^4.4 tokens are 1.6, 2.6 and 2.55 rows of these contexts."""
    rows = {size: hyperparameters_for_size(size, 54_000)["batch_size"] for size in (0.5, 1.1, 2)}
    assert rows == {0.5: 1, 1.1: 2, 2: 2}


@pytest.mark.parametrize("preset, size, tokens", [("baby", 6, 1e6), ("gpt2", 12, 5e9)])
def test_the_dial_meets_the_presets_for_gpus(preset, size, tokens):
    ours, theirs = Config(**hyperparameters_for_size(size, int(tokens))), make_config({}, preset)
    assert ours.n_layer == theirs.n_layer
    assert ours.n_head == theirs.n_head
    assert ours.n_embd == theirs.n_embd
    for name in ("learning_rate", "momentum", "dropout"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=0.1)
    trained = [c.max_steps * c.batch_size * c.block_size for c in (ours, theirs)]
    assert trained[0] == pytest.approx(trained[1], rel=0.1)


def test_each_reading_of_a_text_is_followed_by_an_evaluation():
    for size, tokens, evaluations in [(1.25, 54_000, 8), (1, 18_000, 10), (1, 10**6, 1)]:
        config = Config(**hyperparameters_for_size(size, tokens))
        assert math.ceil(config.max_steps / config.eval_interval) == evaluations


def test_a_text_shorter_than_a_window_is_refused():
    upload = Upload("file:///data", 0, "", (), characters=500)
    config = Config(block_size=64, validation_fraction=0.1)
    problem = "the validation text has 50 characters, and one window of block_size=64 needs 65"
    with pytest.raises(InputError, match=f"text: {problem}; use more text"):
        texts.check_upload(upload, "text", config, "")
    texts.check_upload(upload, "text", Config(block_size=49, validation_fraction=0.1), "")
