"""Conversations: as data, in training, in the terminal, and by OpenAI's API."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import launching
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import Ran
from models import SMALL, lively, tokenizer_of
from runs import metrics, run, words
from served import LETTERS, served
from starlette.testclient import TestClient
from talks import asked, write_chats

from entry_point.command_line import Options
from entry_point.config import Config
from entry_point.container import Ranks, read_container
from entry_point.conversations import CHAT_TEMPLATE, END_OF_TURN, IGNORED, TURN, Packed
from entry_point.data import Batches, evaluate
from entry_point.distributed import Group
from entry_point.errors import DataError
from entry_point.text import Tokenizer, load_corpus, read_tokenizer
from launcher.cli.models import converse, talk
from launcher.models.chat import Chat, Message, TooLong
from launcher.models.encoder import LONGEST
from launcher.models.load import export_checkpoint, own_model, published_model, read_checkpoint
from launcher.models.sample import answered
from launcher.text.chats import turns_of
from launcher.text.tokens import with_end_of_text
from launcher.views import api
from launcher.views.play import Player, make_app
from sm_nanogpt import InputError, Job, load_model, stream_samples

END = 99
STRANGE = (
    *("naïve café", "漢字かな交じり文", "🙂🚀👩‍🚀", "def f(x):\n    return x**2\n", "  leading"),
    *(
        "\n\nlines",
        "a\tb",
        "1234567890",
        "Жук",
        '{"k": [1, 2]}',
        "\r\n",
        "<|im_end|",
        "assistant\n",
    ),
)
HELLO = [{"role": "user", "content": "Hello"}]


# -- data ------------------------------------------------------------------------------------------


def said(*texts: Any, roles: str = "user assistant", to: str = "role content") -> list[Any]:
    """Messages of these texts, by turns from these roles."""
    who, what = to.split()
    return [{who: role, what: text} for role, text in zip(cycle(roles.split()), texts)]


PART = {"type": "text", "text": "a"}
ASKED = ["user\na", "assistant\nb"]
WITH_SYSTEM = ["system\nc", *ASKED]


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"messages": said("a", "b")}, ASKED),
        ({"messages": said("a", "b"), "text": "c", "tools": None}, ASKED),
        (said("a", "b"), ASKED),
        ({"messages": said("c", "a", "b", roles="developer user assistant")}, WITH_SYSTEM),
        ({"messages": said(" ", "a", "b", roles="system user assistant")}, ASKED),
        ({"messages": said("c", "a", "b", roles="user user assistant")}, ["user\nc", *ASKED]),
        ({"messages": said([PART, PART], "b")}, ["user\naa", "assistant\nb"]),
        ({"conversations": said("a", "b", roles="human gpt", to="from value")}, ASKED),
        ({"conversations": said("a", "b"), "system": "c"}, WITH_SYSTEM),
        ({"instruction": "a", "input": "", "output": "b"}, ASKED),
        ({"instruction": "a", "output": "b", "system": "c", "history": []}, WITH_SYSTEM),
        ({"instruction": "a", "input": "c", "output": "b"}, ["user\na\n\nc", "assistant\nb"]),
        ({"prompt": "a", "completion": "b", "messages": None, "label": True}, ASKED),
        ({"prompt": said("a"), "completion": said("b", roles="assistant")}, ASKED),
        ({"instruction": None, "input": "a", "output": "b"}, ASKED),
        ({"conversations": said("a", "b", roles="user bing", to="from value")}, ASKED),
        (
            {"messages": [], "prompt": None, "completion": "", "conversations": said("a", "b")},
            ASKED,
        ),
        ({"text": "a", "messages": None}, None),
        ({"text": "a", "messages": []}, None),
        ({"text": "a", "prompt": None, "completion": None}, None),
        ({"text": "a", "instruction": "", "output": " "}, None),
        ({"text": None, "prompt": None, "completion": None}, None),
        ({"prompt": "a"}, None),
    ],
)
def test_each_form_of_a_conversation_gives_its_turns(record, turns):
    assert turns_of(record, "") == turns


@pytest.mark.parametrize(
    ("record", "facts"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": None}, "no messages"),
        ({"prompt": None, "completion": ""}, "no messages"),
        ({"messages": {}}, "`messages`"),
        ({"messages": "[]"}, "`messages`"),
        (["a"], "message 1 role"),
        ({"messages": said("a", roles="tool")}, "message 1 'tool'"),
        ({"messages": said("a", " \n")}, "message 2 no text"),
        ({"messages": said("a", None)}, "message 2 no text"),
        ({"messages": said("a", [])}, "message 2 no text"),
        ({"messages": said("a", [PART, {"type": "image_url"}])}, "message 2 part"),
        ({"messages": said("a", "b", "c", roles="user assistant system")}, "message 3 first"),
        ({"messages": said("a")}, "says nothing"),
        ({"messages": [*said("a", "b"), {**said("c")[0], "weight": 0}]}, "message 3 weight"),
        ({"messages": [said("a")[0], {"role": "gpt", "tool_calls": [0]}]}, "message 2 tool_calls"),
        ({"conversations": said("a", "b", roles="human ape", to="from value")}, "message 2 'ape'"),
        ({"instruction": "a", "output": ""}, "`output` no text"),
        ({"instruction": "a", "input": {}, "output": "b"}, "`instruction` text"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "`history`"),
        ({"prompt": None, "completion": "b"}, "`prompt` no text"),
        ({"prompt": "a", "completion": "b", "label": False}, "`completion` bad"),
    ],
)
def test_what_cannot_be_learned_is_named(record, facts):
    with pytest.raises(InputError) as error:
        turns_of(record, "file:7")
    assert str(error.value).startswith("file:7: ")
    assert all(fact in str(error.value) for fact in facts.split()), error.value


def test_a_column_of_text_beats_an_empty_pair():
    record = {"story": "a", "prompt": None, "completion": None}
    assert turns_of(record, "", column="story") is None


def upload_records(cli: Any, path: Path, records: Sequence[Any]) -> Ran:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return cli("upload-data", str(path), "--tokenizer", "bpe", "--vocab-size", "300")


def sums(count: int) -> list[Any]:
    return [{"messages": asked(f"What is {n} + {n}?", str(2 * n))} for n in range(count)]


def test_a_bad_line_uploads_nothing_and_is_numbered(cli, home, tmp_path):
    for record in ({"text": "a"}, 0):
        ran = upload_records(cli, tmp_path / "chats.jsonl", [*sums(200), record])
        assert ran.failed(2, "chats.jsonl:201: ") and not ran.out
        assert not (home / "store/data").exists()


def test_what_cannot_teach_is_left_out_and_counted(cli, home, tmp_path):
    empty = {"messages": asked("Why?", "")}
    silent: dict[str, Any] = {"messages": []}
    tool = {"messages": [{"role": "tool", "content": "a"}]}
    records = [empty, *sums(200), silent, empty, tool]
    ran = upload_records(cli, tmp_path / "chats.jsonl", records).good
    (line,) = [line for line in ran.err.splitlines() if "left out" in line]
    assert line.startswith("warning: 4 of 204 conversations left out: ")
    assert re.search(r"no text \(2: \S*chats\.jsonl:1; \S*chats\.jsonl:203\)", line)
    assert re.search(r"no messages \(1: \S*chats\.jsonl:202\)", line)
    assert re.search(r"'tool'.* \(1: \S*chats\.jsonl:204\)", line)
    assert "200 conversations, " in ran.err
    assert upload_records(cli, tmp_path / "chats.jsonl", sums(200)).out == ran.out


def test_data_of_which_most_cannot_teach_is_refused(cli, home, tmp_path):
    empty = {"instruction": "Why?", "output": ""}
    assert upload_records(cli, tmp_path / "half.jsonl", [empty] * 40 + sums(40)).good
    ran = upload_records(cli, tmp_path / "most.jsonl", [empty] * 41 + sums(40))
    assert ran.failed(2, "41 of 81 conversations", "`output` has no text (41: ", "most.jsonl:1; ")


def test_empty_pairs_beside_texts_are_columns(cli, tmp_path):
    texts = [{"text": f"Line {n}. " * 9, "prompt": None, "completion": None} for n in range(99)]
    texts.append({"text": "", "prompt": None, "completion": None})
    ran = upload_records(cli, tmp_path / "rows.jsonl", texts).good
    assert "99 documents, " in ran.err
    assert "1 of 100 documents left out: no text" in ran.err


def test_both_kinds_or_one_conversation_alone_are_refused(cli, tmp_path):
    chat, text = json.dumps({"messages": asked("a", "b" * 700)}) + "\n", '{"text": "a"}\n'
    for content, fact in ((chat + text, ".jsonl:2: "), (text * 2 + chat, ".jsonl:3: "), (chat, "")):
        (tmp_path / "a.jsonl").write_text(content)
        ran = cli("upload-data", "a.jsonl", "--tokenizer", "bpe", "--vocab-size", "260")
        assert ran.failed(2, fact)


def test_where_a_turn_ends_changes_the_data_set(cli, tmp_path):
    found = set()
    for chat in (asked("a", "bassistant\nc"), [*asked("a", "b"), *asked("a", "c")[1:]]):
        lines = (
            json.dumps({"messages": chat}) + "\n" + json.dumps({"messages": asked("x" * 700, "y")})
        )
        (tmp_path / "a.jsonl").write_text(lines)
        ran = cli("upload-data", "a.jsonl", "--tokenizer", "bpe", "--vocab-size", "260")
        assert ran.code == 0, ran.err
        found.add(ran.out)
    assert len(found) == 2


def test_a_launch_after_an_upload_starts_from_its_tokens_model(cli, directory, text_file):
    for tokenizer, base in (
        (directory, f" --init-from {directory}"),
        (directory / "tokenizer.json", ""),
    ):
        ran = cli("upload-data", str(text_file), "--tokenizer", str(tokenizer)).good
        assert ran.err.splitlines()[-1] == f"next: sm-nanogpt launch --instance local{base}"


def test_a_model_of_characters_refuses_conversations(cli, job, tmp_path):
    chats_of(tmp_path / "chats.jsonl", *[40] * 20)
    ran = cli("upload-data", "chats.jsonl", "--tokenizer", job.job_id)
    assert ran.failed(2, f"{job.job_id} was trained on characters", "--tokenizer bpe`")


def chats_of(path: Path, *sizes: int) -> str:
    """A file of conversations that need contexts of some sizes, by tokens of one byte."""
    lines = []
    for number, size in enumerate(sizes):
        said = asked("x" * (size - 27), f"{number:07}")  # 27 other tokens, and the last is a target
        lines.append(json.dumps({"messages": said}) + "\n")
    path.write_text("".join(lines))
    return str(path)


@pytest.fixture
def launched(cli, tmp_path, home):
    """Uploads such conversations, and tries to launch a job on them."""

    def launch(block_size: int, sizes: list[int], *words: str) -> launching.Ran:
        path = chats_of(tmp_path / "chats.jsonl", *sizes)
        ran = cli("upload-data", path, "--tokenizer", "bpe", "--vocab-size", "259").good
        tiny = launching.sets(block_size=block_size, max_steps=1, n_embd=16, n_head=1, n_layer=1)
        uri = ran.out.strip()
        return cli("launch", "--instance", "local", "--data", uri, *tiny, *words)

    return launch


@pytest.mark.parametrize("block_size", [128, 97, 96])
def test_a_launch_says_how_many_conversations_are_too_long(launched, monkeypatch, block_size):
    monkeypatch.setattr(
        "launcher.local.backend.LocalBackend.submit", Mock(side_effect=InputError("no"))
    )
    ran = launched(block_size, [40] * 20 + [96] * 20 + [97, 128, 129, 200])
    longer = {128: 2, 97: 3, 96: 4}[block_size]
    assert f"{longer} of 44 conversations are longer than block_size={block_size}" in ran.err


def test_a_launch_refuses_a_context_that_holds_no_answer(launched, home):
    ran = launched(64, [300] * 20)
    assert ran.failed(2, "no conversation in train", "block_size=64", "block_size=299")
    assert not (home / "jobs").exists()


def test_the_context_that_a_launch_names_is_the_least(launched, tuned):
    _, _, data = tuned
    needed = json.loads(Path(f"{data}.json").read_text())["answers"]
    end: Any = read_tokenizer(data).end
    for part, least in needed.items():
        ids = tensor(memoryview((data / f"{part}-00000.bin").read_bytes()).cast("i"))
        assert len(Packed(ids, end, least))
        assert not len(Packed(ids, end, least - 1))


def test_a_preset_has_no_short_windows_for_conversations(launched, monkeypatch):
    monkeypatch.setattr(
        "launcher.local.backend.LocalBackend.submit", Mock(side_effect=InputError("no"))
    )
    ran = launched(128, [40] * 20, "--preset", "quick")
    assert "short_windows=0 (the preset's 0.3" in ran.err
    asked_for = launched(128, [40] * 20, "--preset", "quick", "--set", "short_windows=0.5")
    assert asked_for.failed(2, "short_windows")


def ids_of(chat: Chat, *messages: Message) -> list[int]:
    """Those of a whole conversation."""
    chat = copy(chat)
    chat.context_size = 1 << 30
    return chat.fitting(messages, 1)[1]


def test_a_message_that_is_not_utf8_is_refused(directory):
    with pytest.raises(InputError, match="UTF-8"):
        Chat(*load_model(directory)).fitting([Message("user", "\ud800")], 1)


@pytest.mark.parametrize("roles", [["user"], ["system", "user"], ["system"], ["user", "assistant"]])
def test_a_message_beyond_the_context_is_named(directory, roles):
    chat = Chat(*load_model(directory))
    with pytest.raises(TooLong, match="instruction" if "system" in roles else "message"):
        chat.fitting([Message(role, "a " * 1_000) for role in roles], 1)


def test_a_long_turn_is_encoded_in_parts(directory):
    """Else 60 MB in one message took 14 GB."""
    chat = Chat(*load_model(directory))
    fast = chat.encoder.encoder.fast = Mock(wraps=chat.encoder.encoder.fast)
    (turn,) = chat.encoder.encode(["assistant\n" + "What is 3? " * 100_000])
    parts = [len(part) for call in fast.encode_ordinary_batch.mock_calls for part in call.args[0]]
    assert max(parts) <= LONGEST < sum(parts)
    learned = [id for id in memoryview(turn).cast("i") if id >= 0]
    assert chat.encoder.tokenizer.decode(learned) == "What is 3? " * 100_000


def test_a_full_context_keeps_the_instruction_and_some_room(directory):
    model, tokenizer = load_model(directory)
    chat, size, tokenizer.ends = Chat(model, tokenizer), model.config.block_size, set()
    system, question = (Message(role, "What is 3?") for role in ("system", "user"))
    for n in range(20):
        asked_before = [question, Message("assistant", "3")] * n
        dropped, ids, most = chat.fitting([system, *asked_before, question], size)
        assert len(ids) <= size - size // 4
        assert ids == ids_of(chat, system, *asked_before[dropped:], question)
    assert dropped
    assert len(ids) + most == size


def test_a_tokenizer_without_turns_is_refused(cli, tmp_path, text_file):
    made = Path(
        cli("upload-data", str(text_file), "--tokenizer", "bpe", "--vocab-size", "300").out[7:-1]
    )
    document = json.loads((made / "tokenizer.json").read_text())
    document["added_tokens"] = [t for t in document["added_tokens"] if t["content"] != TURN]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    path = write_chats(tmp_path / "chats.jsonl")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    ran = cli("upload-data", str(path), "--tokenizer", str(tmp_path))
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
    for _ in range(200):
        roles = ["system"] * draw.randrange(2) + ["user", "assistant"] * draw.randint(1, 4)
        said = [Message(role, "".join(draw.choices(STRANGE, k=3))) for role in roles]
        documents = [vars(message) for message in said]
        wanted = theirs.apply_chat_template(documents, add_generation_prompt=True, return_dict=True)
        assert ids_of(chat, *said) == wanted["input_ids"]


def test_only_answers_are_learned(directory):
    tokenizer = read_tokenizer(directory)
    chat = Chat(*load_model(directory))
    (question, answer) = chat.encoder.encode(["user\nHello", "assistant\nHi 🙂"])
    assert all(id < 0 for id in memoryview(question).cast("i"))
    ids = list(memoryview(answer).cast("i"))
    learned = [id for id in ids if id >= 0]
    assert tokenizer.decode(learned) == "Hi 🙂"
    assert learned[-1] == tokenizer.special[END_OF_TURN]
    assert [id >= 0 for id in ids] == [*sorted(id >= 0 for id in ids[:-1]), False]


# -- rows ------------------------------------------------------------------------------------------


def tensor(ids: Iterable[int]) -> torch.Tensor:
    return torch.tensor([*ids], dtype=torch.int32)


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
    assert packed.cut == packed.dropped == sum(len(chat) > 10 for chat in chats)


def test_a_long_conversation_ends_with_an_answer_that_fits():
    packed = Packed(tensor([~1, 2, 2, ~3, ~3, 4, 4, 4, ~END]), END, block_size=5)
    assert packed.rows.tolist() == [[~1, 2, 2, ~END, ~END, ~END]]
    assert (packed.cut, packed.dropped) == (1, 0)
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
            weights = packed.loss_shares(starts, rank, world_size, passes)
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


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_tuning_resumes_to_the_same_bits(tuned, directory, tmp_path, processes):
    _, _, data = tuned
    values = dict(max_steps=8, eval_interval=8, batch_size=12, sample_length=0, device="cpu")
    given_words = words(data=data, init_from=directory, processes=processes, **values)

    def weights(out: Path) -> bytes:
        return (out / "model/model.safetensors").read_bytes()

    whole, half = tmp_path / "whole", tmp_path / "half"
    ended = run([*given_words, *words(out=whole, checkpoint_seconds=0.001)], cwd=tmp_path)
    assert ended.status == 0, ended.output
    shutil.copytree(whole, half)
    shutil.rmtree(half / "model")
    max((half / "checkpoints").glob("checkpoint-*")).unlink()
    ended = run(words(resume=half), cwd=tmp_path)
    assert "resumed from the checkpoint of step 7" in ended.output
    assert weights(whole) == weights(half)


def test_any_number_of_ranks_has_the_losses_of_each_alone(tuned, directory, tmp_path):
    _, _, data = tuned
    values = dict(max_steps=6, eval_interval=1, log_interval=1, batch_size=12, precision="float32")
    found = []
    for processes in (1, 2, 4):
        out = tmp_path / str(processes)
        given_words = words(data=data, init_from=directory, device="cpu", sample_length=0, **values)
        assert run([*given_words, *words(out=out, processes=processes)], cwd=tmp_path).status == 0
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


def test_a_tuned_model_says_how_it_ends(tuned, directory):
    _, job, _ = tuned
    tokenizer = read_tokenizer(directory)
    ends = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [tokenizer.special[END_OF_TURN], tokenizer.end]
    log = (job.directory / "logs/job.log").read_text()
    assert "180 conversations in " in log
    row = json.loads((directory.parent / "output/data/metrics.jsonl").read_text().splitlines()[-1])
    assert math.isfinite(row["bits_per_byte"]) and row["val_loss"] < 4


def test_a_checkpoint_of_a_tuning_answers(directory, tmp_path):
    export_checkpoint(read_checkpoint(directory.parent / "checkpoints"), tmp_path / "model")
    assert Chat(*own_model(tmp_path / "model"))


def test_a_sample_of_a_tuned_model_names_chat(cli, directory):
    sample = ("fetch-and-sample", str(directory), "--max-new-tokens", "1")
    assert f"`sm-nanogpt chat {directory}`" in cli(*sample).good.err


def test_a_prompt_is_answered_as_in_a_chat(cli, tuned, directory, chat, monkeypatch):
    base, job, _ = tuned
    sample_of = ("--max-new-tokens", "6", "--temperature", "1", "--seed", "5")
    ran = cli("fetch-and-sample", str(directory), *sample_of, "--prompt", "What is 3 + 3?").good
    assert ran.out == chat("What is 3 + 3?", heat="1").out
    monkeypatch.setenv("SM_NANOGPT_HOME", str(job.home))
    assert Job(job.job_id).sample("What is 3 + 3?", 6, temperature=1.0, seed=5) == ran.out[:-1]
    assert Job(base.job_id).sample("What", 6).startswith("What")


# -- the terminal ----------------------------------------------------------------------------------


@pytest.fixture
def chat(tuned, directory, cli, monkeypatch):
    def say(*lines: str, model: str = str(directory), heat: str = "0") -> launching.Ran:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        return cli("chat", model, "--max-new-tokens", "6", "--temperature", heat, "--seed", "5")

    return say


def test_a_conversation_is_kept(chat, directory):
    first, second = chat("Hi?", "What is 3 + 3?").out.removesuffix("\n").split("\n---\n")
    said = [Message("user", "Hi?"), Message("assistant", first), Message("user", "What is 3 + 3?")]
    loaded = load_model(directory)
    pieces = stream_samples(*loaded, *answered(*loaded, said, 6), temperature=0)
    assert second == "".join(piece for (piece,) in pieces)


def test_a_message_that_is_not_utf8_is_refused_alone(directory, chat):
    words_of_chat = ("chat", str(directory), "--max-new-tokens", "6", "--temperature", "0")
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    lines = b"caf\xe9?\r\nH\\\r\ni\r\n"
    command = [*launching.PROGRAM, *words_of_chat]
    ran = subprocess.run(command, input=lines, capture_output=True, env=strict)
    assert (ran.returncode, ran.stderr.count(b"not UTF-8")) == (0, 1)
    assert ran.stdout.decode() == chat("H\\", "i").out


def test_a_line_that_asks_nothing_has_no_answer(chat):
    assert chat("", " ", "Hi?", "").out == chat("Hi?").out


def test_each_answer_has_its_seed_and_is_kept_if_interrupted(directory):
    model, tokenizer = load_model(directory)
    chat, messages, tokenizer.ends = Chat(model, tokenizer), list[Message](), set()
    _, ids, most = chat.fitting([Message("user", "Hi?")], 20)
    columns = stream_samples(model, tokenizer, ids, most, 1, 1.0, seed=5 + 2)
    answer = [piece for (piece,) in columns]
    sampling = {"max_new_tokens": 20, "temperature": 1.0, "seed": 5}
    talked = talk(model, tokenizer, chat, messages, sampling, "Hi?", 2)
    assert [next(talked) for _ in range(9)] == answer[:9]
    talked.close()
    assert messages[1:] == [Message("assistant", "".join(answer[:9]))]


def test_old_turns_are_dropped_and_that_is_said(chat, directory):
    model, _ = load_model(directory)
    ran = chat(*["What is 1 + 1, and what is 2 + 2?"] * 6)
    assert (ran.code, ran.out.count("---")) == (0, 5)
    assert "oldest 6 messages" in ran.err
    ran = chat("a " * model.config.block_size)
    assert str(model.config.block_size) in ran.error


def test_an_instruction_that_leaves_no_room_is_refused(directory, cli):
    ran = cli("chat", str(directory), "--system", "a " * 100)
    assert ran.failed(2, "instruction", "128 tokens")


def test_a_closed_stdin_ends_the_chat(cli, directory, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert cli("chat", str(directory)).good.out == ""


def test_a_base_model_continues_what_is_typed(tuned, chat, cli):
    base, _, _ = tuned
    model = str(base.directory / "hosts/algo-1/model")
    ran = chat("The ", "A\\", "class", model=model, heat="1")
    words_of_one = ("fetch-and-sample", model, "--max-new-tokens", "6", "--temperature", "1")
    prompts = (("5", "The "), ("6", "A\nclass"))  # each has the next seed
    texts = [cli(*words_of_one, "--seed", seed, "--prompt", text).out for seed, text in prompts]
    assert ran.out == "---\n".join(texts)
    for wrong in (("--system", "x"), ("--top-p", "2")):
        assert cli("chat", model, *wrong).code == 2
    with pytest.raises(InputError, match="not learned from conversations"):
        Chat(*load_model(Path(model)))


def test_an_unknown_character_does_not_end_the_session(job, cli, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\x07\n\n"))
    ran = cli("chat", job.job_id, "--max-new-tokens", "5")
    assert (ran.code, len(ran.out)) == (0, 6)
    assert r": '\x07'; replace them or leave them out" in ran.error


def in_front_of(monkeypatch: pytest.MonkeyPatch, *typed: Any) -> None:
    """Let a person in a terminal type this."""
    monkeypatch.setattr("builtins.input", Mock(side_effect=[*typed, EOFError]))
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{name}.isatty", lambda: True, raising=False)


def test_ctrl_c_ends_an_answer_and_not_the_chat(capsys, monkeypatch):
    def talk(line: str, n: int) -> Generator[str]:
        yield f"{line}1"
        if n == 0:
            signal.raise_signal(signal.SIGINT)
        yield "2"

    in_front_of(monkeypatch, "a", "b")
    converse(talk)
    assert capsys.readouterr().out == "a1\nb12\n\n"


def test_ctrl_c_while_typing_drops_the_line(capsys, monkeypatch):
    in_front_of(monkeypatch, KeyboardInterrupt, "b")
    converse(lambda line, n: (piece for piece in [line]))
    assert capsys.readouterr().out == "\nb\n\n"


def in_a_terminal(*words: str) -> tuple[int, int]:
    """The pid of a command, and the end of its terminal at which a person sits."""
    command = [*launching.PROGRAM, *words]
    child, terminal = pty.fork()
    if child == 0:
        launching.hear_hangup()
        os.execve(command[0], command, {**os.environ, "TERM": "dumb"})
    return child, terminal


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_chat_at_its_prompt(job, sign):
    child, terminal = in_a_terminal("chat", str(job.directory / "hosts/algo-1/model"))
    try:
        seen = b""
        while not seen.endswith(b"> "):
            assert select.select([terminal], [], [], 60)[0], seen
            seen += os.read(terminal, 1 << 16)
        deadline = time.monotonic() + 20
        while not os.waitpid(child, os.WNOHANG)[0]:
            assert time.monotonic() < deadline
            os.kill(child, sign)  # again, since Python misses one just before it waits for a key
            time.sleep(0.2)
        child = 0
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(terminal)


def test_a_pseudo_terminal_streams_stops_and_ends(job):
    """The model continues without an end, until Ctrl-C; Ctrl-D then ends the command."""
    model = str(job.directory / "hosts/algo-1/model")
    child, terminal = in_a_terminal("chat", model, "--max-new-tokens", "100000000")
    seen = ""

    def read() -> None:
        nonlocal seen
        assert select.select([terminal], [], [], 60)[0], seen
        seen += os.read(terminal, 1 << 16).decode(errors="replace")

    def until(text: str) -> None:
        nonlocal seen
        while text not in seen:
            read()
        seen = seen.partition(text)[2]

    def press(keys: bytes) -> None:
        """Again, if nothing comes: Python misses a Ctrl-C just before it waits for a key."""
        os.write(terminal, keys)
        while not select.select([terminal], [], [], 1)[0]:
            os.write(terminal, keys)

    try:
        until("> ")
        press(b"half a line\x03")
        until("> ")
        press(b"The \n")
        until("The \r\nThe ")  # what is typed, and its continuation
        while len(seen) < 200:
            read()
        press(b"\x03")
        until("\r\n> ")
        press(b"\x04")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        child = 0
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        os.close(terminal)


def test_a_published_model_directory_chats(chat, directory, tmp_path):
    transformers = pytest.importorskip("transformers")
    published = tmp_path / "published"
    transformers.AutoModelForCausalLM.from_pretrained(directory).save_pretrained(published)
    transformers.AutoTokenizer.from_pretrained(directory).save_pretrained(published)
    ran = chat("What is 3 + 3?", model=str(published))
    assert (ran.code, ran.out) == (0, chat("What is 3 + 3?").out)
    assert "chat template" not in ran.err
    (published / "chat_template.jinja").write_text(THINKING)
    assert "not the model's own" in chat("Hi?", model=str(published)).err
    for ends in ([7, 8], 7):
        (published / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        assert 7 in published_model(published)[1].ends
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    ran = chat("Hi", model=str(published))
    assert ran.code == 2
    assert "llama" in ran.error


THINKING = CHAT_TEMPLATE.replace(
    "message['content']",
    "(message.content if loop.last else message.content.split('</think>')[-1].lstrip())",
)


# -- the API ---------------------------------------------------------------------------------------


@pytest.fixture
def player(directory):
    return Player("mine", *load_model(directory))


@pytest.fixture(scope="module")
def openai():
    """OpenAI's package, whose import takes a second."""
    import openai

    return openai


@pytest.fixture
def client(player, openai):
    """OpenAI's own client of the server, without a socket."""

    def make(key: str = "secret", path: str = "/v1") -> Any:
        app = make_app([player], "secret", api.routes([player]))
        return openai.OpenAI(
            base_url=f"http://127.0.0.1{path}",
            api_key=key,
            http_client=TestClient(app, base_url="http://127.0.0.1"),
            max_retries=0,
        )

    return make


def test_the_client_of_openai_chats_and_completes(client, player, chat, monkeypatch, openai):
    monkeypatch.setattr("launcher.views.play.TURN", 0)  # each token is a chunk
    api_client = client()
    (model,) = api_client.models.list().data
    assert api_client.models.retrieve("mine") == model
    with pytest.raises(openai.NotFoundError):
        api_client.models.retrieve("other")
    wish: Any = dict(
        model="mine", messages=asked("What is 3 + 3?", "6")[:1], temperature=0, max_tokens=6
    )
    answer = api_client.chat.completions.create(**wish)
    text = answer.choices[0].message.content
    assert f"{text}\n" == chat("What is 3 + 3?").out
    ids = ids_of(player.chat, Message("user", "What is 3 + 3?"))
    assert answer.usage.prompt_tokens == len(ids)
    short = api_client.chat.completions.create(**{**wish, "max_tokens": 1})
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 1)
    newer = api_client.chat.completions.create(**wish, max_completion_tokens=1)
    assert newer.usage == short.usage
    parts = [{"type": "text", "text": text} for text in ("What is ", "3 + 3?")]
    said = [{"role": "developer", "content": "Hi"}, {"role": "user", "content": parts}]
    told = api_client.chat.completions.create(**{**wish, "messages": said})
    messages = [Message("system", "Hi"), Message("user", "What is 3 + 3?")]
    assert told.usage.prompt_tokens == len(ids_of(player.chat, *messages))
    chunks = [
        *api_client.chat.completions.create(
            **wish, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage == answer.usage
    roles = [c.choices[0].delta.role for c in chunks if c.choices]
    assert (roles[0], {*roles[1:]}) == ("assistant", {None})
    wish = dict(model="mine", prompt="What", max_tokens=5, seed=1)
    completed = api_client.completions.create(**wish).choices[0].text
    streamed = api_client.completions.create(**wish, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == completed
    (cut,) = api_client.completions.create(**wish, stop=[completed[1:2]]).choices
    assert (cut.text, cut.finish_reason) == (completed.partition(completed[1:2])[0], "stop")


def test_what_a_request_leaves_out_has_the_values_of_openai(client, player):
    player.tokenizer.ends = set()

    def text(**wish):
        answer = client().completions.create(model="mine", prompt="The", max_tokens=30, **wish)
        return answer.choices[0].text

    assert text(seed=1) == text(seed=1, temperature=1, top_p=1)
    assert text(seed=1) != text(temperature=0) == text(top_p=1e-9)
    assert text() != text()  # each has a seed of its own


def test_an_answer_ends_where_the_context_does(client, player):
    size, player.tokenizer.ends = player.model.config.block_size, set()
    messages = asked("What is 3 + 3?", "6") * 4 + HELLO
    for most in ({}, {"max_tokens": 10 * size}):
        usage = client().chat.completions.create(model="mine", messages=messages, **most).usage
        assert usage.prompt_tokens <= size - size // 4
        assert usage.total_tokens == size
    usage = client().completions.create(model="mine", prompt="a " * size, max_tokens=1).usage
    assert usage.prompt_tokens == size


def test_a_model_that_fails_is_an_error_of_the_server(client, monkeypatch, openai):
    monkeypatch.setattr("launcher.models.engine.generate", lambda *_, **__: map(int, "x"))
    wish: Any = dict(model="mine", prompt="The")
    with pytest.raises(openai.InternalServerError):
        client().completions.create(**wish)
    with pytest.raises(openai.APIError):
        [*client().completions.create(**wish, stream=True)]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"model": "other"}, 404),
        ({"messages": []}, 400),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, 400),
        ({"messages": [{"role": "user", "content": "a " * 500}]}, 400),
        ({"n": 2}, 400),
        ({"temperature": -1}, 400),
        ({"max_tokens": 0}, 400),
        ({"max_completion_tokens": 0}, 400),
        ({"logprobs": True}, 400),
        ({"stop": 5}, 400),
        ({"response_format": {"type": "json_object"}}, 400),
        ({"frequency_penalty": 1}, 400),
        ({"presence_penalty": 1}, 400),
        ({"logit_bias": {"1": 1}}, 400),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400),
        ({"prompt": "a", "echo": True}, 400),
        ({"prompt": "a", "best_of": 2}, 400),
        ({"prompt": "a", "suffix": "b"}, 400),
        ({"prompt": "a", "logprobs": 1}, 400),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(client, changes, status, openai):
    api = client().completions if "prompt" in changes else client().chat.completions
    asks = {} if "prompt" in changes else {"messages": HELLO}
    with pytest.raises(openai.APIStatusError) as error:
        api.create(**{"model": "mine", **asks, **changes})
    assert error.value.status_code == status
    body: Any = error.value.body
    assert body.keys() == {"message", "type", "param", "code"}


IMAGE = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"messages": [{"role": "user", "content": IMAGE}]}, "messages.0.content: must be text"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content: must be text"),
        ({"prompt": ["a", "b"]}, "prompt: must be one text"),
        ({"prompt": [1, 2]}, "prompt: must be one text"),
        ({"stop": [1]}, "stop: must be a string or a list of strings"),
        ({"tools": TOOLS}, "tools: not supported here"),
        ({"functions": [{"name": "f"}]}, "functions: not supported here"),
        ({"n": 2}, "n: not supported here"),
        ({"presence_penalty": 0.5}, "presence_penalty: not supported here"),
    ],
)
def test_a_refusal_is_a_sentence_of_our_own(client, changes, said, openai):
    api = client().completions if "prompt" in changes else client().chat.completions
    asks = {} if "prompt" in changes else {"messages": HELLO}
    with pytest.raises(openai.BadRequestError) as error:
        api.create(model="mine", **{**asks, **changes})
    body: Any = error.value.body
    assert body["message"].startswith(said)


def test_a_message_beyond_the_context_has_the_code_of_openai(client, openai):
    with pytest.raises(openai.BadRequestError) as error:
        client().chat.completions.create(
            model="mine", messages=[{"role": "user", "content": "a " * 10**6}]
        )
    assert error.value.code == "context_length_exceeded"


def test_any_number_of_stop_strings_is_taken_in_any_order(client):
    """Continue sends up to 14."""
    wish: Any = dict(model="mine", prompt="What", max_tokens=20, temperature=2, seed=1)
    text = client().completions.create(**wish).choices[0].text
    stops = [text[3:5], text[2:5], text[4:7], *(f"<{n}>" for n in range(11))]
    for order in (stops, stops[::-1]):
        (choice,) = client().completions.create(**wish, stop=order).choices
        assert choice.text == text[:2]


def test_a_base_url_without_v1_is_told(client, openai):
    without = client(path="/")
    for call in (
        without.models.list,
        partial(without.chat.completions.create, model="mine", messages=HELLO),
    ):
        with pytest.raises(openai.NotFoundError, match="/v1 is missing from the base URL"):
            call()


@pytest.fixture
def ask(player):
    """Asks the API of two models, one of which is that of a job with a name."""
    named = replace(player, name="named", job_id="sm-nanogpt-20261128-182734-6306f7")
    other = replace(player, name="/models/other")
    http = {
        number: TestClient(make_app(players, "t", api.routes(players)))
        for number, players in {1: [named], 2: [named, other]}.items()
    }

    def ask(path: str, body: Any = None, models: int = 2) -> Any:
        method = "GET" if body is None else "POST"
        headers = {"authorization": "bearer t"}
        url = f"http://testserver{path}"
        return http[models].request(method, url, json=body, headers=headers)

    return ask


@pytest.mark.parametrize("path", ["//v1/models", "/v1//models", "/v1/models/", "///v1///models//"])
def test_several_slashes_are_one(ask, path):
    assert [model["id"] for model in ask(path).json()["data"]] == ["named", "/models/other"]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/models", "/v1 is missing from the base URL"),
        ("/v1beta/models", "/v1 is missing from the base URL"),
        ("/v1/v1/models", "/v1 is twice in the base URL"),
        ("//v1//v1", "/v1 is twice in the base URL"),
        ("/v1", "/v1/models lists the models"),
        ("/v1/responses", "GET /v1/responses is not there"),
    ],
)
def test_a_wrong_path_says_what_is_wrong_with_it(ask, path, hint):
    answer = ask(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith(hint)


@pytest.mark.parametrize(
    "name", ["named", "sm-nanogpt-20261128-182734-6306f7", "named (…6306f7)", "/models/other"]
)
def test_a_model_answers_to_each_of_its_names(ask, name):
    done = ask("/v1/completions", {"model": name, "prompt": "The", "max_tokens": 1})
    listed = "/models/other" if name == "/models/other" else "named"
    assert (done.status_code, done.json()["model"]) == (200, listed)
    assert ask(f"/v1/models/{name}").json()["id"] == listed


def test_a_model_alone_needs_no_name(ask):
    assert ask("/v1/completions", {"prompt": "The", "max_tokens": 1}, models=1).status_code == 200
    several = ask("/v1/completions", {"model": None, "prompt": "The"})
    assert several.status_code == 400
    assert "named, /models/other" in several.json()["error"]["message"]


def test_a_prompt_of_null_is_as_one_left_out(ask):
    wish = {"model": "named", "max_tokens": 5, "seed": 1}
    texts = [ask("/v1/completions", body).json() for body in (wish, {**wish, "prompt": None})]
    assert texts[0]["choices"] == texts[1]["choices"]
    assert texts[0]["usage"] == texts[1]["usage"]


def test_a_wrong_method_is_told_the_right_one(client, openai):
    with pytest.raises(openai.APIStatusError, match="405") as caught:
        client().get("/chat/completions", cast_to=object)
    assert (caught.value.status_code, caught.value.response.headers["allow"]) == (405, "POST")
    with pytest.raises(openai.NotFoundError, match="GET /v1/other is not there"):
        client().get("/other", cast_to=object)


def test_only_a_named_origin_may_ask_from_its_pages(player):
    app = make_app([player], "secret", api.routes([player]), ["http://localhost:3000"])
    http = TestClient(app)
    for origin, status in (("http://localhost:3000", 200), ("http://localhost:3001", 400)):
        asks = {"access-control-request-method": "POST", "origin": origin}
        asks["access-control-request-headers"] = "authorization, x-stainless-os"
        assert http.options("/v1/chat/completions", headers=asks).status_code == status
        for key in ("secret", "wrong"):  # a page reads why it is refused
            headers = {"origin": origin, "authorization": f"Bearer {key}"}
            allowed = http.get("/v1/models", headers=headers).headers
            assert allowed.get("access-control-allow-origin") == (origin if status == 200 else None)


@pytest.fixture
def api_of(openai):
    """OpenAI's own client of a server on a socket."""
    with contextlib.ExitStack() as stack:

        def make(player: Player) -> Any:
            site = stack.enter_context(served([player]))
            url = f"http://127.0.0.1:{site.port}/v1"
            return openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=60)

        yield make


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_its_answer(api_of, streams, openai):
    api_client = api_of(Player("mine", lively(), tokenizer_of(LETTERS)))
    endless: Any = dict(model="mine", prompt="a", max_tokens=10**9)
    if streams:
        stream = api_client.completions.create(**endless, stream=True)
        next(stream)
        stream.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            api_client.with_options(timeout=0.3).completions.create(**endless)
    # It would wait for the other one.
    assert api_client.completions.create(model="mine", prompt="a", max_tokens=1).choices


def test_twenty_clients_wait_their_turn(api_of, player):
    api_client = api_of(player)
    wish: Any = dict(model="mine", messages=HELLO, temperature=0, max_tokens=4)

    def answer(n: int) -> Any:
        chunks = api_client.chat.completions.create(**wish, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    alone = api_client.chat.completions.create(**wish).choices[0].message.content
    with ThreadPoolExecutor(20) as pool:
        assert set(pool.map(answer, range(20))) == {alone}


def test_a_request_needs_the_key(client, openai):
    with pytest.raises(openai.AuthenticationError):
        client("wrong").models.list()


def test_a_base_model_refuses_to_chat_and_completes(tuned):
    base, _, _ = tuned
    player = Player("base", *load_model(base.directory / "hosts/algo-1/model"))
    app = make_app([player], "t", api.routes([player]))
    http = TestClient(app, headers={"authorization": "bearer t"})
    refused = http.post("/v1/chat/completions", json={"model": "base", "messages": HELLO})
    done = http.post("/v1/completions", json={"model": "base", "prompt": "The", "seed": 1})
    assert (refused.status_code, done.status_code) == (400, 200)
    assert done.json()["usage"]["completion_tokens"] == 16
