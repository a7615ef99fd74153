"""Conversations as ids, and models that answer."""

from __future__ import annotations

import json
import math
import random
from unittest.mock import Mock

import pytest
from talks import STRANGE, ids_of, write_chats

from sm_nanogpt import InputError, load_model
from sm_nanogpt.entry_point.conversations import END_OF_TURN, TURN
from sm_nanogpt.entry_point.text import Tokenizer, read_tokenizer
from sm_nanogpt.launcher.models.chat import Chat, Message, TooLong
from sm_nanogpt.launcher.models.encoder import MAX_PIECE
from sm_nanogpt.launcher.models.load import (
    export_checkpoint,
    generation_ends,
    own_model,
    read_checkpoint,
)
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.tokens import with_end_of_text


def learned_ids(turn: bytes) -> list[int]:
    """The ids of a turn whose loss counts; the others are negative."""
    return [id for id in memoryview(turn).cast("i") if id >= 0]


def test_a_message_that_is_not_utf8_is_refused(directory):
    with pytest.raises(InputError, match="UTF-8"):
        Chat(*load_model(directory)).fit([Message("user", "\ud800")], 1)


@pytest.mark.parametrize(
    ("roles", "named"),
    [
        (["user"], "message"),
        (["system", "user"], "instruction"),
    ],
)
def test_a_message_beyond_the_context_is_named(directory, roles, named):
    chat = Chat(*load_model(directory))
    with pytest.raises(TooLong, match=named):
        chat.fit([Message(role, "a " * 1_000) for role in roles], 1)


def test_a_long_turn_is_encoded_in_parts(directory):
    """Else 60 MB in one message took 14 GB."""
    chat = Chat(*load_model(directory))
    fast = chat.encoder.encoder.fast = Mock(wraps=chat.encoder.encoder.fast)
    text = "What is 3? " * 100_000
    (turn,) = chat.encoder.encode([f"assistant\n{text}"])
    sizes = []
    for call in fast.encode_ordinary_batch.mock_calls:
        sizes += [len(part) for part in call.args[0]]
    assert max(sizes) <= MAX_PIECE < sum(sizes)
    assert chat.encoder.tokenizer.decode(learned_ids(turn)) == text


def test_a_full_context_keeps_the_instruction_and_some_room(directory):
    model, tokenizer = load_model(directory)
    tokenizer.ends = set()
    chat = Chat(model, tokenizer)
    size = model.config.block_size
    system = Message("system", "What is 3?")
    question = Message("user", "What is 3?")
    answer = Message("assistant", "3")
    for n in range(20):
        turns = [question, answer] * n + [question]
        prompt = chat.fit([system, *turns], size)
        assert len(prompt.ids) <= size - size // 4
        assert prompt.ids == ids_of(chat, system, *turns[prompt.n_dropped :])
    assert prompt.n_dropped
    assert len(prompt.ids) + prompt.max_new_tokens == size


def test_a_tokenizer_without_turns_is_refused(directory, cli, tmp_path):
    text = (directory / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace(TURN, "<|other|>"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    path = write_chats(tmp_path / "chats.jsonl")
    ran = cli("upload-data", path, "--tokenizer", tmp_path)
    assert ran.code == 2
    assert TURN in ran.error and "--tokenizer bpe" in ran.error


def test_a_tokenizer_whose_text_ends_as_a_turn_gets_another_end(directory):
    """As those of Qwen: conversations would be cut at each turn."""
    content = (directory / "tokenizer.json").read_text()
    for end in (END_OF_TURN, "<|endoftext|>"):
        assert with_end_of_text(Tokenizer(json.loads(content), end)).end_of_text == "<|endoftext|>"
    other = json.loads(content.replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(InputError):
        with_end_of_text(Tokenizer(other, END_OF_TURN))


def test_ids_are_those_of_apply_chat_template(directory):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    chat, draw = Chat(*load_model(directory)), random.Random(1)
    for _ in range(40):
        roles = ["system"] * draw.randrange(2) + ["user", "assistant"] * draw.randint(1, 4)
        messages = [Message(role, "".join(draw.choices(STRANGE, k=3))) for role in roles]
        documents = [vars(message) for message in messages]
        expected = theirs.apply_chat_template(
            documents, add_generation_prompt=True, return_dict=True
        )
        assert ids_of(chat, *messages) == expected["input_ids"]


def test_only_answers_are_learned(directory):
    tokenizer = read_tokenizer(directory)
    chat = Chat(*load_model(directory))
    (question, answer) = chat.encoder.encode(["user\nHello", "assistant\nHi 🙂"])
    assert all(id < 0 for id in memoryview(question).cast("i"))
    learned = learned_ids(answer)
    assert tokenizer.decode(learned) == "Hi 🙂"
    assert learned[-1] == tokenizer.special[END_OF_TURN]
    ids = memoryview(answer).cast("i").tolist()
    assert ids[-1] < 0
    assert ids[-1 - len(learned) : -1] == learned  # no other id stands between them


def test_a_tuned_model_says_how_it_ends(tuned, directory):
    _, job, _ = tuned
    tokenizer = read_tokenizer(directory)
    ends = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [tokenizer.special[END_OF_TURN], tokenizer.end]
    log = (job.directory / "logs/job.log").read_text()
    assert "180 conversations, packed into " in log
    row = json.loads((directory.parent / "output/data/metrics.jsonl").read_text().splitlines()[-1])
    assert math.isfinite(row["bits_per_byte"])
    assert row["val_loss"] < 4


def test_a_checkpoint_of_a_tuning_answers(directory, tmp_path):
    export_checkpoint(
        read_checkpoint(directory.parent / "checkpoints"),
        tmp_path / "model",
        Settings(home=tmp_path),
    )
    assert Chat(*own_model(tmp_path / "model"))


@pytest.mark.parametrize(
    ("document", "ends"),
    [
        ({"eos_token_id": 0}, [0]),
        ({"eos_token_id": [0, 7]}, [0, 7]),
        ({"eos_token_id": None}, []),
        ({}, []),
    ],
)
def test_answers_end_at_each_id_that_a_published_model_names(tmp_path, document, ends):
    (tmp_path / "generation_config.json").write_text(json.dumps(document))
    assert generation_ends(tmp_path) == ends


def test_a_published_model_may_name_no_end(tmp_path):
    assert generation_ends(tmp_path) == []
