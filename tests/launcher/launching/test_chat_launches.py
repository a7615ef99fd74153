"""What a launch says of conversations before they are paid for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import launching
import pytest
from talks import exchange, tensor

from sm_nanogpt import InputError
from sm_nanogpt.entry_point.conversations import Packed
from sm_nanogpt.entry_point.text import read_tokenizer
from sm_nanogpt.launcher.cli.upload import next_command
from sm_nanogpt.launcher.launching.texts import warn_of_few_conversations
from sm_nanogpt.launcher.text.store import Upload


def test_a_launch_after_an_upload_starts_from_its_tokens_model(cli, directory, text_file):
    for tokenizer, base in (
        (directory, f" --init-from {directory}"),
        (directory / "tokenizer.json", ""),
    ):
        ran = cli("upload-data", text_file, "--tokenizer", tokenizer).good
        assert ran.err.splitlines()[-1] == f"next: sm-nanogpt launch --instance local{base}"


def chats_of_tokens(n_tokens: int) -> Upload:
    return Upload("file:///data", 0, "", (), train_tokens=n_tokens, chats=True)


def test_few_conversations_come_after_a_base_model(caplog):
    few = chats_of_tokens(10_000)
    assert next_command(few, "bpe") == "sm-nanogpt upload-data TEXT --tokenizer bpe"
    warn_of_few_conversations(few)
    [record] = caplog.records
    assert record.getMessage().startswith("10,000 tokens of conversations are few for a new model")
    assert vars(record)["code"] == "base-first"


def test_many_conversations_may_be_all_that_a_model_reads(caplog):
    many = chats_of_tokens(1_000_000)
    assert next_command(many, "bpe") == "sm-nanogpt launch --instance local"
    warn_of_few_conversations(many)
    assert not caplog.records


def test_a_model_of_characters_refuses_conversations(cli, job, tmp_path):
    chats_of(tmp_path / "chats.jsonl", *[40] * 20)
    ran = cli("upload-data", "chats.jsonl", "--tokenizer", job.job_id)
    assert ran.failed(2, f"{job.job_id} was trained on characters", "--tokenizer bpe`")


def chats_of(path: Path, *sizes: int) -> str:
    """A file of conversations that need contexts of some sizes, by tokens of one byte."""
    lines = []
    for number, size in enumerate(sizes):
        chat = exchange(
            "x" * (size - 27), f"{number:07}"
        )  # 27 other tokens, and the last is a target
        lines.append(json.dumps({"messages": chat}) + "\n")
    path.write_text("".join(lines))
    return str(path)


@pytest.fixture
def launched(cli, tmp_path, home):
    """Uploads such conversations, and tries to launch a job on them."""

    def launch(block_size: int, sizes: list[int], *arguments: str) -> launching.Ran:
        path = chats_of(tmp_path / "chats.jsonl", *sizes)
        ran = cli("upload-data", path, "--tokenizer", "bpe", "--vocab-size", "259").good
        tiny = launching.sets(block_size=block_size, max_steps=1, n_embd=16, n_head=1, n_layer=1)
        uri = ran.out.strip()
        return cli("launch", "--instance", "local", "--data", uri, tiny, arguments)

    return launch


@pytest.mark.parametrize("block_size", [97, 96])
def test_a_launch_says_how_many_conversations_are_too_long(launched, monkeypatch, block_size):
    monkeypatch.setattr(
        "sm_nanogpt.launcher.local.backend.LocalBackend.submit", Mock(side_effect=InputError("no"))
    )
    ran = launched(block_size, [40] * 20 + [96] * 20 + [97, 128, 129, 200])
    longer = {97: 3, 96: 4}[block_size]
    assert f"{longer} of 44 conversations are longer than block_size={block_size}" in ran.err
    assert "are few for a new model" in ran.err


def test_a_launch_refuses_a_context_that_holds_no_answer(launched, home):
    ran = launched(64, [300] * 20)
    assert ran.failed(2, "no conversation in train", "block_size=64", "block_size=299")
    assert not (home / "jobs").exists()


def test_the_context_that_a_launch_names_is_the_least(launched, tuned):
    _, _, data = tuned
    answers = json.loads(Path(f"{data}.json").read_text())["answers"]
    end: Any = read_tokenizer(data).end
    for part, context in answers.items():
        ids = tensor(memoryview((data / f"{part}-00000.bin").read_bytes()).cast("i"))
        assert len(Packed(ids, end, context))
        assert not len(Packed(ids, end, context - 1))


def test_a_preset_has_no_short_windows_for_conversations(launched, monkeypatch):
    monkeypatch.setattr(
        "sm_nanogpt.launcher.local.backend.LocalBackend.submit", Mock(side_effect=InputError("no"))
    )
    ran = launched(128, [40] * 20, "--preset", "quick")
    assert "short_windows=0 (the preset's 0.3" in ran.err
    asked_for = launched(128, [40] * 20, "--preset", "quick", "--set", "short_windows=0.5")
    assert asked_for.failed(2, "short_windows")
