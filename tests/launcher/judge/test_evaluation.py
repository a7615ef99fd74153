"""Intervals of a loss, and the passages that a model knows worst."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from judged_texts import documents, plain

from sm_nanogpt.launcher.judge import evaluate, measures
from sm_nanogpt.launcher.judge.evaluation import ANCHORS, Evaluation, Passage, margin, total
from sm_nanogpt.launcher.judge.score import passages
from sm_nanogpt.launcher.judge.texts import Encoded, Text


def test_the_interval_covers_the_loss_of_the_whole():
    whole, chance, covered = documents(2000, 1), random.Random(2), 0
    truth = total(whole).bits_per_byte
    for _ in range(500):
        some = chance.choices(whole, k=60)
        covered += abs(total(some).bits_per_byte - truth) <= (margin(some) or 0.0)
    assert 0.90 <= covered / 500 <= 0.98


def test_the_interval_counts_that_neighbors_are_alike():
    """Passages whose losses have a correlation of 0.45 from one to the next, as those of books."""
    chance, covered = random.Random(3), 0
    for _ in range(500):
        drift, parts = chance.gauss(0, 0.2 / math.sqrt(1 - 0.67**2)), []
        for _ in range(120):
            drift = 0.67 * drift + chance.gauss(0, 0.2)
            parts.append(Passage("", 1000 * (2 + drift + chance.gauss(0, 0.19)), 1000, 1000))
        covered += abs(total(parts).bits_per_byte - 2 / math.log(2)) <= (margin(parts) or 0.0)
    assert 0.90 <= covered / 500 <= 0.98


def test_evaluations_that_are_kept_stay_readable():
    required = set()
    for field in dataclasses.fields(Evaluation):
        has_factory = field.default_factory is not dataclasses.MISSING
        if field.default is dataclasses.MISSING and not has_factory:
            required.add(field.name)
    assert required == {"model", "text", "size", "tokens", "bits_per_byte"}, (
        "a new field needs a default, or evaluations of older versions are left out of reports"
    )


def test_few_parts_have_no_interval():
    assert margin(documents(9, 1)) is None
    assert margin(documents(10, 1)) is not None


@given(st.text("ab\né🙂", min_size=1, max_size=300), st.integers(1, 90), st.integers(1, 7))
def test_passages_hold_each_byte_and_loss_once(text, min_tokens, width):
    content = text.encode()
    widths = torch.tensor([len(content[n : n + width]) for n in range(0, len(content), width)])
    ids, nats = torch.zeros_like(widths), torch.rand(len(widths), dtype=torch.float64)
    document = Encoded(Text("a", [text]), ids, ids == 0, widths, torch.zeros_like(nats))
    parts = passages(document, nats, min_tokens)
    assert total(parts).size == len(content)
    assert total(parts).tokens == len(nats)
    assert total(parts).nats == pytest.approx(float(nats.sum()))
    assert all(part.size < 3 * min_tokens for part in parts)


def test_the_worst_passage_names_its_line_and_shows_its_token():
    lines = [f"This is the line of the number {n}, and it is like all others.\n" for n in range(99)]
    lines[70] = lines[70].replace("like", "LIKE")
    text = "".join(lines)
    nats = torch.where(plain(text) < 96, 0.5, 0.1).double()
    nats[text.index("LIKE")] = 90.0
    ids = torch.zeros(len(text), dtype=torch.int64)
    document = Encoded(Text("a.txt", [text]), ids, ids == 0, ids + 1, torch.zeros_like(nats))
    first = evaluate.worst_first(passages(document, nats, 200))[0]
    line = int(first.place.removeprefix("a.txt, line "))
    assert line <= 71 < line + 8
    assert "LIKE" in first.excerpt


def test_short_passages_are_not_the_worst():
    parts = [Passage("short", 99.0, 99, 99), Passage("a", 50.0, 200, 200)]
    parts += [Passage("b", 60.0, 200, 200)]
    assert [part.place for part in evaluate.worst_first(parts)] == ["b", "a", "short"]


@pytest.mark.parametrize("name", ANCHORS)
def test_an_anchor_is_a_field_with_a_function_of_its_name(name):
    assert name in {field.name for field in dataclasses.fields(Evaluation)}
    assert callable(getattr(measures, name))
