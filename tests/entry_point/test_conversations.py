"""Conversations in training: rows of them, their loss, and a tuning."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
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
from tensors import assert_same

from sm_nanogpt.entry_point.checkpoint import Checkpoints
from sm_nanogpt.entry_point.command_line import Options
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.container import Ranks, read_container
from sm_nanogpt.entry_point.conversations import IGNORED, Packed
from sm_nanogpt.entry_point.data import Batches, evaluate
from sm_nanogpt.entry_point.distributed import Group
from sm_nanogpt.entry_point.errors import DataError
from sm_nanogpt.entry_point.report import data_lines
from sm_nanogpt.entry_point.text import Corpus, load_corpus
from sm_nanogpt.launcher.models.chat import Chat
from sm_nanogpt.launcher.models.load import own_model

END = 99


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30))
def test_rows_hold_whole_conversations_once(lengths):
    """Each has a question and an answer of these numbers of ids."""
    ids: list[int] = []
    fitting_ids: list[int] = []
    n_long = 0
    for number, (n_question, n_answer) in enumerate(lengths):
        chat = [~number] * n_question + [number] * n_answer
        ids += [*chat, ~END]
        if len(chat) <= 10:
            fitting_ids += chat
        else:
            n_long += 1

    packed = Packed(tensor(ids), END, block_size=9)

    packed_ids = packed.rows.flatten().tolist()
    assert [id for id in packed_ids if id != ~END] == fitting_ids
    assert torch.equal(packed.learned, (packed.rows[:, 1:] >= 0).sum(dim=1))
    assert packed.n_cut == n_long
    assert packed.n_dropped == n_long


def test_a_long_conversation_ends_with_an_answer_that_fits():
    packed = Packed(tensor([~1, 2, 0, ~3, ~3, 4, 4, 4, ~END]), END, block_size=5)
    assert packed.rows.tolist() == [[~1, 2, 0, ~END, ~END, ~END]]
    assert packed.n_cut == 1
    assert packed.n_dropped == 0
    assert packed.question() == [1]


def test_the_log_counts_the_tokens_and_those_of_answers():
    """Not those that fill a row."""
    packed = Packed(tensor([~1, 2, 2, ~END, ~3, 4, ~END]), END, block_size=19)
    corpus = Corpus(Mock(unit="tokens", __len__=lambda _: 100), packed, packed, "")
    first, train, _ = data_lines(corpus, 5000)
    assert first == "5,000 parameters; 7 tokens to train on, 7 to validate on, vocabulary 100"
    assert train == (
        "train: 2 conversations, packed into 1 row;"
        " 3 of their tokens are answers, which alone are learned"
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_size": 128, "short_windows": 0.5}, "short_windows would cut conversations"),
        ({"block_size": 4}, "no training conversation has an answer within block_size=4"),
    ],
)
def test_conversations_that_cannot_be_packed_are_refused(tuned, values, message):
    container = read_container({}, Options(data=str(tuned[2])))
    with pytest.raises(DataError, match=message):
        load_corpus(container, Config(**values), Mock())


@given(st.integers(0, 1000))
@settings(max_examples=20)
def test_means_of_passes_make_the_mean_of_the_batch(seed):
    """On any number of ranks."""
    chance = random.Random(seed)
    ids: list[int] = []
    for _ in range(24):
        ids += [~1] + [2] * chance.randint(1, 8) + [~END]
    packed = Packed(tensor(ids), END, block_size=9)
    starts = torch.arange(12) * 10 % len(packed)
    losses = torch.rand(12, 9, generator=torch.Generator().manual_seed(seed))
    learned = packed.rows[starts // 10][:, 1:] >= 0
    expected = float(losses[learned].mean())
    for world_size, passes in ((1, 1), (2, 3), (4, 1), (3, 2), (1, 5), (2, 4)):
        total = 0.0
        for rank in range(world_size):
            weights = packed.loss_weights(starts, rank, world_size, passes)
            losses_of_passes = losses.chunk(world_size)[rank].tensor_split(passes)
            learned_of_passes = learned.chunk(world_size)[rank].tensor_split(passes)
            for number in range(passes):
                mean = losses_of_passes[number][learned_of_passes[number]].mean()
                total += float(mean) * weights[number] / passes
        assert total / world_size == pytest.approx(expected, rel=1e-5)


def test_conversations_in_a_row_do_not_see_each_other():
    model = lively()
    first = torch.tensor([[1, 2, 3]])
    second = torch.tensor([[4, 5, 6, 7]])
    end = torch.tensor([[9]])
    together = model(torch.cat((first, end, second), dim=1), end=9, chats=True)[0]
    torch.testing.assert_close(together[:3], model(first)[0])
    torch.testing.assert_close(together[4:], model(second)[0], atol=1e-5, rtol=1e-5)


def ids_in(content: bytes) -> torch.Tensor:
    return tensor(memoryview(content).cast("i"))


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
    model = lively()
    config = replace(SMALL, eval_tokens=0)
    end = 9
    long = [~1, ~2, 3, 4, 5, 6, 7, 8, ~end]
    short = [~4, 5, 6, ~end]
    ids = tensor([*long * 1024, *short * 2048])  # two short ones a row, 1024 rows a chunk
    group = Group(Ranks(0, 1, 0, 1, "hand"), torch.device("cpu"), Mock())
    loss = evaluate(model, Packed(ids, end, config.block_size), config, group, end)
    expected = loss_of_each_alone(model, tensor([*long, *short * 2]), end)
    assert loss == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("at_once", [1 << 26, 1])
def test_a_masked_loss_and_its_gradients_are_torchs(monkeypatch, at_once):
    monkeypatch.setattr("sm_nanogpt.entry_point.kernels.LOGITS_AT_ONCE", at_once)
    model = lively()
    x = torch.randint(9, (40, 8), generator=torch.Generator().manual_seed(0))
    y = x.roll(-1, 1).masked_fill(torch.arange(8) % 3 > 0, IGNORED)
    loss = model(x, y, chats=True)
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    expected = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_the_loss_is_transformers_loss_of_labels(directory):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)
    model, tokenizer = own_model(directory)
    turns = Chat(model, tokenizer).encoder.encode(["user\nWhat is 3?", "assistant\n6"])
    ids = ids_in(b"".join(turns))
    x = torch.where(ids < 0, ~ids, ids)[None].long()
    labels = x.masked_fill(ids < 0, IGNORED)
    ours = model(x[:, :-1], labels[:, 1:], end=tokenizer.end, chats=True)
    expected = theirs(x, labels=labels).loss
    assert ours.item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.fixture(scope="module")
def tunings(tuned, directory, tmp_path_factory):
    """A tuning of the model by one process, and by two; the directory of each."""
    base = tmp_path_factory.mktemp("tunings")
    for processes in (1, 2):
        arguments = command_line(
            data=tuned[2],
            init_from=directory,
            out=processes,
            max_steps=6,
            eval_interval=1,
            log_interval=1,
            batch_size=12,
            sample_length=0,
            device="cpu",
            precision="float32",
            processes=processes,
            checkpoint_seconds=0.001,
        )
        ended = run(arguments, cwd=base)
        assert ended.status == 0, ended.output
    return base / "1", base / "2"


def test_a_tuning_resumes_to_the_same_bits(tunings, tmp_path):
    _, whole = tunings
    half = tmp_path / "half"
    shutil.copytree(whole, half)
    max((half / "checkpoints").glob("checkpoint-*")).unlink()
    ended = run(command_line(resume=half), cwd=tmp_path)

    assert "resumed from the checkpoint of step 5" in ended.output
    expected = Checkpoints(whole / "checkpoints").load_latest()
    loaded = Checkpoints(half / "checkpoints").load_latest()
    assert expected is not None and loaded is not None
    assert_same(loaded[0], expected[0])


def test_any_number_of_ranks_has_the_losses_of_each_alone(tuned, directory, tunings):
    _, _, data = tuned
    curves = [metrics(out / "output") for out in tunings]

    model, tokenizer = own_model(directory)
    end: Any = tokenizer.end
    train_ids = ids_in((data / "train-00000.bin").read_bytes())
    val_ids = ids_in((data / "val-00000.bin").read_bytes())
    config = Config(block_size=model.config.block_size, batch_size=12)
    packed = Packed(train_ids, end, config.block_size)
    starts = Batches(packed, config, torch.device("cpu")).window_starts(0)
    batch = F.pad(packed.rows[starts // (config.block_size + 1)], (0, 1), value=~end)
    val_loss = loss_of_each_alone(model, val_ids, end)
    train_loss = loss_of_each_alone(model, batch.flatten(), end)

    val_losses_alone = [row["val_loss"] for row in curves[0]]
    for rows in curves:
        val_losses = [row["val_loss"] for row in rows]
        assert val_losses[0] == val_losses_alone[0]  # of the same weights
        assert val_losses[0] == pytest.approx(val_loss, rel=1e-5)
        assert val_losses == pytest.approx(val_losses_alone, rel=1e-4)
        assert rows[1]["train_loss"] == pytest.approx(train_loss, rel=1e-5)
