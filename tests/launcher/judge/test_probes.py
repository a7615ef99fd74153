"""Secrets that a model may have kept, and questions that it answers."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from judged_texts import chat_of
from torch import Tensor
from workers import Fake

from sm_nanogpt import InputError, Settings
from sm_nanogpt.launcher.judge.probes import (
    Question,
    count_right_answers,
    measure_exposure,
    read_canaries,
    read_questions,
)
from sm_nanogpt.launcher.judge.texts import read_texts


def counting(text: str, vocabulary: str) -> Callable[[Tensor], Tensor]:
    """A model that has counted the followers of three characters in a text."""
    followers: dict[str, Counter[str]] = {}
    for n, character in enumerate(text):
        context = text[max(0, n - 3) : n]
        followers.setdefault(context, Counter())[character] += 1

    def row(context: str) -> list[float]:
        counts = followers.get(context, Counter())
        return [math.log(counts[character] + 8) for character in vocabulary]

    def logits(ids: Tensor) -> Tensor:  # [rows, n] to [rows, n, vocabulary]
        all_rows = []
        for ids_of_row in ids.tolist():
            context = "".join(vocabulary[id] for id in ids_of_row)
            all_rows.append([row(context[max(0, n - 2) : n + 1]) for n in range(len(context))])
        return torch.tensor(all_rows)

    return logits


def test_exposure_rises_with_the_copies_of_a_secret():
    chance = random.Random(3)
    text = ""
    lines = []
    for name, n_copies in {"a": 0, "b": 4, "c": 64}.items():
        secret = f"{chance.randrange(10**7):07}"
        text += f"key of {name} is {secret}\n" * n_copies
        lines.append(f"key of {name} is {{{secret}}}")
    for _ in range(500):
        text += f"no {chance.randrange(10**9)}\n"
    vocabulary = "\n 0123456789abcdefghijklmnopqrstuvwxyz"
    worker = Fake(vocabulary, counting(text, vocabulary))

    exposures = measure_exposure(worker, lines)
    assert [canary.line for canary in exposures] == lines
    bits = [canary.exposure for canary in exposures]
    assert bits == sorted(bits)
    assert bits[0] < 8 < 14 < bits[-1]


def test_a_short_secret_has_few_bits():
    """The likeliest of ten digits has as many bits as there are for ten."""
    vocabulary = "\n 0123456789 iskey"
    worker = Fake(vocabulary, counting("key is 7\n" * 500, vocabulary))
    (exposure,) = measure_exposure(worker, ["key is {7}"])
    assert exposure.exposure == pytest.approx(math.log2(10))


def test_questions_are_conversations_without_their_last_message(tmp_path):
    records = [{**chat_of("2 + 3?", "5"), "kind": "sum"}, chat_of("a", "b", "c", " d\n")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "a.json").write_text(json.dumps(records))

    for name in ("a.jsonl", "a.json"):
        first, second = read_questions(tmp_path / name)
        assert first.messages == chat_of("2 + 3?")["messages"]
        assert first.answer == "5"
        assert first.kind == "sum"
        assert second.messages == chat_of("a", "b", "c")["messages"]
        assert second.answer == "d"
        assert second.kind == "all"


@pytest.mark.parametrize(
    "record",
    [chat_of("a", "b", "c"), {"messages": chat_of("a", "b")["messages"][1:]}, {}],
)
def test_a_question_without_an_answer_is_refused(record, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"a.jsonl"):
        read_questions(tmp_path / "a.jsonl")


def test_a_chat_between_people_is_judged_by_the_answers_of_one(home, tmp_path):
    lines = [f"12/1/26, 10:{n:02} - {('Ann', 'Bob')[n % 2]}: message {n}" for n in range(20)]
    (tmp_path / "chat.txt").write_text("\n".join(lines) + "\n")
    paths = [str(tmp_path / "chat.txt")]
    settings = Settings(home=home)
    with pytest.raises(InputError, match=r"chat of Ann \(10\), Bob \(10\)"):
        read_texts(paths, settings)
    with pytest.raises(InputError, match="these did: Ann"):
        read_texts(paths, settings, me="Eve")
    texts = read_texts(paths, settings, me="Bob")
    assert texts
    assert all(text.is_chat for text in texts)


def test_a_conversation_without_an_answer_is_not_judged(home, tmp_path, caplog):
    chats = [chat_of("a", "b"), chat_of("a", "c"), {"messages": []}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    texts = read_texts([str(tmp_path / "chats.jsonl")], Settings(home=home))
    assert [text.is_chat for text in texts] == [True, True]
    assert "1 of 3 conversations left out" in caplog.text


@pytest.mark.parametrize("read", [read_canaries, read_questions])
def test_a_file_without_anything_to_ask_is_refused(read, tmp_path):
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(InputError, match=r"none\.jsonl: no "):
        read(tmp_path / "none.jsonl")


@pytest.mark.parametrize("line", ["the code is 8231", "the code is {}", "{東京}"])
def test_a_line_without_a_secret_to_vary_is_refused(line, tmp_path):
    (tmp_path / "lines.txt").write_text(f"a {{1}} b\n\n{line}\n")
    with pytest.raises(InputError, match=r"lines\.txt:3: "):
        read_canaries(tmp_path / "lines.txt")


@pytest.mark.parametrize("chats", [False, True])
def test_exact_answers_are_counted_by_kind(chats):
    """The first line is the answer of a model that has not learned from conversations."""
    answers = {"a": "1\nuser", "b": " 2 ", "c": "2", "d": "1"}
    right = {"a": ("1", "sum"), "b": ("2", "other"), "c": ("1", "sum"), "d": ("1", "sum")}
    questions = [
        Question([{"role": "user", "content": question}], answer, kind, "asked.jsonl:1")
        for question, (answer, kind) in right.items()
    ]

    def answer(prompts: Sequence[Any], **sampling: Any) -> list[str]:
        assert sampling["temperature"] == 0
        return [answers[prompt[0]["content"]] for prompt in prompts]

    worker = Fake("abcd", samples=answer)
    worker.chats = chats
    counts = count_right_answers(worker, questions)
    assert counts["sum"] == (1 if chats else 2, 3)
    assert counts["other"] == (1, 1)


def test_a_question_of_unknown_characters_names_its_place():
    question = Question([{"role": "user", "content": "é?"}], "1", "sum", "asked.jsonl:3")
    with pytest.raises(InputError, match=r"asked\.jsonl:3 has .*'\?', 'é'"):
        count_right_answers(Fake("ab"), [question])
