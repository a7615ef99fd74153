"""Conversations in training: rows of them, their loss, and a tuning."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SMALL, lively
from runs import command_line, metrics, run
from talks import tensor

from entry_point.command_line import Options
from entry_point.config import Config
from entry_point.container import Ranks, read_container
from entry_point.conversations import IGNORED, Packed
from entry_point.data import Batches, evaluate
from entry_point.distributed import Group
from entry_point.errors import DataError
from entry_point.text import load_corpus
from launcher.models.chat import Chat
from launcher.models.load import own_model

END = 99


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30))
def test_rows_hold_whole_conversations_once(lengths):
    """Each has a question and an answer of so many ids."""
    chats = [[~n] * question + [n] * answer for n, (question, answer) in enumerate(lengths)]
    packed = Packed(tensor(id for chat in chats for id in (*chat, ~END)), END, block_size=9)
    kept = [id for row in packed.rows.tolist() for id in row if id != ~END]
    assert kept == [id for chat in chats if len(chat) <= 10 for id in chat]
    assert packed.learned.tolist() == [
        sum(id >= 0 for id in row[1:]) for row in packed.rows.tolist()
    ]
    assert packed.n_cut == packed.n_dropped == sum(len(chat) > 10 for chat in chats)


def test_a_long_conversation_ends_with_an_answer_that_fits():
    packed = Packed(tensor([~1, 2, 2, ~3, ~3, 4, 4, 4, ~END]), END, block_size=5)
    assert packed.rows.tolist() == [[~1, 2, 2, ~END, ~END, ~END]]
    assert (packed.n_cut, packed.n_dropped) == (1, 0)
    assert packed.question() == [1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"block_size": 128, "short_windows": 0.5}, "short_windows would cut conversations"),
        ({"block_size": 4}, "no training conversation has an answer within block_size=4"),
    ],
)
def test_conversations_that_cannot_be_packed_are_refused(tuned, values, said):
    container = read_container({}, Options(data=str(tuned[2])))
    with pytest.raises(DataError, match=said):
        load_corpus(container, Config(**values), Mock())


@given(st.integers(0, 1000))
@settings(max_examples=20)
def test_means_of_passes_make_the_mean_of_the_batch(seed):
    """On any number of ranks."""
    chance = random.Random(seed)
    chats = [[~1] + [2] * chance.randint(1, 8) + [~END] for _ in range(24)]
    packed = Packed(tensor(id for chat in chats for id in chat), END, block_size=9)
    starts = torch.arange(12) * 10 % len(packed)
    losses = torch.rand(12, 9, generator=torch.Generator().manual_seed(seed))
    learned = packed.rows[starts // 10][:, 1:] >= 0
    wanted = float(losses[learned].mean())
    for world_size, passes in ((1, 1), (2, 3), (4, 1), (3, 2), (1, 5), (2, 4)):
        total = 0.0
        for rank in range(world_size):
            weights = packed.loss_weights(starts, rank, world_size, passes)
            own = zip(
                losses.chunk(world_size)[rank].tensor_split(passes),
                learned.chunk(world_size)[rank].tensor_split(passes),
                weights,
                strict=True,
            )
            total += sum(float(part[known].mean()) * weight for part, known, weight in own) / passes
        assert total / world_size == pytest.approx(wanted, rel=1e-5)


def test_conversations_in_a_row_do_not_see_each_other():
    first, second = [1, 2, 3], [4, 5, 6, 7]
    model, end = lively(), 9
    row = torch.tensor([[*first, end, *second]])
    together = model(row, end=end, chats=True)[0]
    torch.testing.assert_close(together[: len(first)], model(torch.tensor([first]))[0])
    alone = model(torch.tensor([second]))[0]
    torch.testing.assert_close(together[len(first) + 1 :], alone, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def loss_of_each_alone(model, ids, end):
    """The mean loss of what the assistant says, each conversation computed by itself."""
    total, learned = 0.0, 0
    for chat in ids.long().tensor_split((ids == ~end).nonzero().flatten() + 1)[:-1]:
        logits = model(torch.where(chat < 0, ~chat, chat)[None])[0, :-1]
        targets = chat.masked_fill(chat < 0, IGNORED)[1:]
        total += float(F.cross_entropy(logits, targets, reduction="sum"))
        learned += int((targets >= 0).sum())
    return total / learned


def test_an_evaluation_in_chunks_is_the_mean_of_each_alone():
    model, end, config = lively(), 9, replace(SMALL, eval_tokens=0)
    long, short = [~1, ~2, *range(3, 9), ~end], [~4, 5, 6, ~end]
    ids = tensor([*long * 1024, *short * 2048])  # two short ones a row, 1024 rows a chunk
    group = Group(Ranks(0, 1, 0, 1, "hand"), torch.device("cpu"), Mock())
    loss = evaluate(model, Packed(ids, end, config.block_size), config, group, end)
    wanted = loss_of_each_alone(model, tensor([*long, *short * 2]), end)
    assert loss == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("at_once", [1 << 26, 1])
def test_a_masked_loss_and_its_gradients_are_torchs(monkeypatch, at_once):
    monkeypatch.setattr("entry_point.kernels.LOGITS_AT_ONCE", at_once)
    model, x = lively(), torch.randint(9, (40, 8), generator=torch.Generator().manual_seed(0))
    y = x.roll(-1, 1).masked_fill(torch.arange(8) % 3 > 0, IGNORED)
    loss = model(x, y, chats=True)
    loss.backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    wanted = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for one, other in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad)


def test_the_loss_is_transformers_loss_of_labels(directory):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)
    model, tokenizer = own_model(directory)
    turns = Chat(model, tokenizer).encoder.encode(["user\nWhat is 3?", "assistant\n6"])
    ids = torch.tensor([id for turn in turns for id in memoryview(turn).cast("i")])
    x = torch.where(ids < 0, ~ids, ids)[None].long()
    labels = x.masked_fill(ids < 0, IGNORED)
    ours = model(x[:, :-1], labels[:, 1:], end=tokenizer.end, chats=True)
    assert float(ours) == pytest.approx(float(theirs(x, labels=labels).loss), abs=1e-5)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_tuning_resumes_to_the_same_bits(tuned, directory, tmp_path, processes):
    _, _, data = tuned
    values = dict(max_steps=8, eval_interval=8, batch_size=12, sample_length=0, device="cpu")
    given_words = command_line(data=data, init_from=directory, processes=processes, **values)

    def weights(out: Path) -> bytes:
        return (out / "model/model.safetensors").read_bytes()

    whole, half = tmp_path / "whole", tmp_path / "half"
    ended = run([*given_words, *command_line(out=whole, checkpoint_seconds=0.001)], cwd=tmp_path)
    assert ended.status == 0, ended.output
    shutil.copytree(whole, half)
    shutil.rmtree(half / "model")
    max((half / "checkpoints").glob("checkpoint-*")).unlink()
    ended = run(command_line(resume=half), cwd=tmp_path)
    assert "resumed from the checkpoint of step 7" in ended.output
    assert weights(whole) == weights(half)


def test_any_number_of_ranks_has_the_losses_of_each_alone(tuned, directory, tmp_path):
    _, _, data = tuned
    values = dict(max_steps=6, eval_interval=1, log_interval=1, batch_size=12, precision="float32")
    found = []
    for processes in (1, 2, 4):
        out = tmp_path / str(processes)
        given_words = command_line(
            data=data, init_from=directory, device="cpu", sample_length=0, **values
        )
        assert (
            run([*given_words, *command_line(out=out, processes=processes)], cwd=tmp_path).status
            == 0
        )
        found.append(metrics(out / "output"))
    model, tokenizer = own_model(directory)
    end: Any = tokenizer.end
    train, val = (
        tensor(memoryview((data / f"{part}-00000.bin").read_bytes()).cast("i"))
        for part in ("train", "val")
    )
    config = Config(block_size=model.config.block_size, batch_size=12)
    packed = Packed(train, end, config.block_size)
    starts = Batches(packed, config, torch.device("cpu")).window_starts(0)
    batch = F.pad(packed.rows[starts // (config.block_size + 1)], (0, 1), value=~end)
    parts = (val, batch.flatten())
    validated, trained = (loss_of_each_alone(model, ids, end) for ids in parts)
    for rows in found:
        losses = [row["val_loss"] for row in rows]
        assert losses[0] == found[0][0]["val_loss"]  # of the same weights
        assert losses == pytest.approx([row["val_loss"] for row in found[0]], rel=1e-4)
        assert (losses[0], rows[1]["train_loss"]) == pytest.approx((validated, trained), rel=1e-5)
