"""The loss of a model on a text, against plain computations of it."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from judged_texts import STRANGE, chat_of
from models import tokenizer_of

from sm_nanogpt import InputError, load_model
from sm_nanogpt.entry_point.conversations import IGNORED
from sm_nanogpt.launcher.cli.remedies import sentence
from sm_nanogpt.launcher.judge.score import (
    cut_windows,
    losses_of_documents,
    losses_of_windows,
    passages,
    window_spans,
)
from sm_nanogpt.launcher.judge.texts import Text, encode_known_characters, encode_texts

ODD: dict[str, bytes] = {
    "crlf.txt": b"one line\r\nanother\r\n\r\nthe end",
    "one.txt": b"x",
    "long.txt": b"".join(b"line %d of many, and not the last\n" % n for n in range(40)),
    "records.jsonl": b"".join(
        json.dumps({"text": text}, ensure_ascii=bool(flag)).encode() + b"\n"
        for flag, text in enumerate(["first", STRANGE, "", "\n", "the last one"])
    ),
}


@pytest.fixture(scope="module", params=["characters", "tokens"])
def judged(request, models, start):
    """A worker and the tokenizer of each model."""
    directory = models[request.param]
    with start(directory) as worker:
        yield worker


@pytest.mark.parametrize("name", ODD)
def test_losses_are_those_of_transformers(name, judged, write):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = write(**{name: ODD[name]})
    encoded = encode_texts(texts, judged.tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(judged.directory)
    model: Any = AutoModelForCausalLM.from_pretrained(judged.directory)
    for document in encoded:
        assert document.ids.tolist() == tokenizer.encode("".join(document.text.pieces))

    windows = cut_windows(encoded, judged.tokenizer.start, judged.block_size)
    for (inputs, targets), nats in zip(windows, losses_of_windows(judged, windows), strict=True):
        with torch.inference_mode():
            logits = model(inputs[None]).logits[0]
        expected = F.cross_entropy(logits, targets, reduction="none")
        torch.testing.assert_close(nats.float(), expected[-len(nats) :], rtol=0, atol=1e-4)

    counted = torch.cat([targets[targets != IGNORED] for _, targets in windows])
    all_ids = torch.cat([document.ids for document in encoded])
    assert torch.equal(counted, all_ids)


def test_all_bytes_of_a_text_count(judged, write):
    for name, content in ODD.items():
        encoded = encode_texts(write(**{name: content}), judged.tokenizer)
        if name.endswith("jsonl"):
            records = [json.loads(line) for line in content.splitlines()]
            content = "".join(record["text"] for record in records).encode()
        assert sum(document.size for document in encoded) == len(content)


def test_a_byte_order_mark_is_no_text(write):
    (text,) = write(**{"a.txt": b"\xef\xbb\xbfwords\n"})
    assert text.content == b"words\n"


@given(st.integers(1, 2000), st.integers(1, 300))
def test_windows_count_each_token_once(n, size):
    counted_before = 0
    for begin, end, counted in window_spans(n, size):
        assert counted == counted_before < end
        assert end - begin <= size
        assert begin == 0 or counted - begin >= min(64, size // 2)
        counted_before = end
    assert counted_before == n


def test_the_order_of_documents_changes_no_loss(judged):
    line = "A document, and its words.\n"
    texts = [Text(f"{n}", [line * (1 + 7 * n % 5)]) for n in range(30)]
    order = random.Random(0).sample(range(30), 30)
    encoded = encode_texts(texts, judged.tokenizer)
    in_order = losses_of_documents(judged, encoded)
    shuffled = losses_of_documents(judged, [encoded[n] for n in order])
    for n, nats in zip(order, shuffled, strict=True):
        torch.testing.assert_close(nats, in_order[n], rtol=0, atol=1e-5)


def test_conversations_count_their_answers_only(models, write):
    tokenizer = load_model(models["tokens"])[1]
    texts = write(**{"a.jsonl": json.dumps(chat_of("What?", "So 🙂")).encode()})
    (document,) = encode_texts(texts, tokenizer)

    answer_ids = document.ids[document.is_scored].tolist()
    answer = b"".join(tokenizer.words[id] for id in answer_ids)
    assert answer == "So 🙂".encode()
    assert document.size == len(answer)
    assert answer_ids[-1] == tokenizer.special["<|im_end|>"]

    learned = b"".join(tokenizer.words[id] for id in document.ids.tolist())
    assert document.text.content == learned == "user\nWhat?\nassistant\nSo 🙂\n".encode()
    (passage,) = passages(document, torch.ones(len(document.ids)), 200)
    assert "What?" in passage.excerpt
    assert passage.excerpt.endswith("So 🙂")


def test_unknown_characters_count_as_an_escape_and_bytes(write):
    texts = write(**{"a.txt": "“ab\nab”ééb".encode(), "b.txt": b"abb"})
    first, second = encode_known_characters(texts, tokenizer_of("ab\n"))
    assert (first.n_unknown, second.n_unknown) == (4, 0)
    assert first.size == int(first.widths.sum()) == len("“ab\nab”ééb".encode())

    nats = first.unknown_nats.sum() + second.unknown_nats.sum()
    share = 4 / 13  # of all characters
    n_bytes = 3 + 3 + 2 + 2
    code = 4 * -math.log(share) + n_bytes * math.log(256) - 9 * math.log(1 - share)
    assert float(nats) == pytest.approx(code)


def test_a_text_without_a_known_character_is_refused(write):
    for content in ("Жук", "ab\r\nab\r\n"):
        with pytest.raises(InputError, match=r"a.txt .* the model has "):
            encode_known_characters(write(**{"a.txt": content.encode()}), tokenizer_of("ab\n"))


def test_characters_that_a_model_never_saw_are_refused(write):
    with pytest.raises(InputError, match=r"a.txt has .*'é'"):
        encode_texts(write(**{"a.txt": "ab\nabéé".encode() + b"b"}), tokenizer_of("ab\n"))


def test_a_text_with_crlf_is_told_how_to_lose_it():
    with pytest.raises(InputError, match=r"a\.txt ends its lines in CRLF") as refused:
        encode_texts([Text("a.txt", ["a\r\nb\r\n"])], tokenizer_of("ab\n"))
    assert r"`tr -d '\r' < FILE > NEW-FILE`" in sentence(refused.value)


def test_unknown_characters_of_many_texts_are_named_at_once():
    texts = [
        Text("0.txt", ["ab"]),
        Text("1.txt", ["a#"]),
        Text("2.txt", ["b"]),
        Text("3.txt", ["’a"]),
    ]
    with pytest.raises(InputError, match=r"1\.txt, as 1 other document, has .*: '#', '’'; replace"):
        encode_texts(texts, tokenizer_of("ab"))
