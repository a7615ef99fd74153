"""Intervals of a loss, and the passages that a model knows worst."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from judged_texts import documents, plain

from sm_nanogpt.launcher.cli.evaluate import print_evaluations
from sm_nanogpt.launcher.judge import evaluate
from sm_nanogpt.launcher.judge.evaluation import Evaluation, Passage, margin_of_bits, total
from sm_nanogpt.launcher.judge.score import passages
from sm_nanogpt.launcher.judge.texts import EncodedDocument, Text


def test_the_interval_covers_the_loss_of_the_whole():
    whole = documents(2000, 1)
    truth = total(whole).bits_per_byte
    chance = random.Random(2)
    n_covered = 0
    for _ in range(250):
        some = chance.choices(whole, k=60)
        n_covered += abs(total(some).bits_per_byte - truth) <= (margin_of_bits(some) or 0.0)
    assert 0.90 <= n_covered / 250 <= 0.98


def test_the_interval_counts_that_neighbors_are_alike():
    """Passages whose losses have a correlation of 0.45 from one to the next, as those of books."""
    chance = random.Random(3)
    n_covered = 0
    for _ in range(250):
        drift = chance.gauss(0, 0.2 / math.sqrt(1 - 0.67**2))
        parts = []
        for _ in range(120):
            drift = 0.67 * drift + chance.gauss(0, 0.2)
            parts.append(Passage("", 1000 * (2 + drift + chance.gauss(0, 0.19)), 1000, 1000))
        error = abs(total(parts).bits_per_byte - 2 / math.log(2))
        n_covered += error <= (margin_of_bits(parts) or 0.0)
    assert 0.90 <= n_covered / 250 <= 0.98


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
    assert margin_of_bits(documents(9, 1)) is None
    assert margin_of_bits(documents(10, 1)) is not None


@given(st.text("ab\né🙂", min_size=1, max_size=300), st.integers(1, 90), st.integers(1, 7))
def test_passages_hold_each_byte_and_loss_once(text, min_tokens, width):
    content = text.encode()
    widths = torch.tensor([len(content[n : n + width]) for n in range(0, len(content), width)])
    ids, nats = torch.zeros_like(widths), torch.rand(len(widths), dtype=torch.float64)
    document = EncodedDocument(Text("a", [text]), ids, ids == 0, widths, torch.zeros_like(nats))
    parts = passages(document, nats, min_tokens)
    assert total(parts).size == len(content)
    assert total(parts).tokens == len(nats)
    assert total(parts).nats == pytest.approx(float(nats.sum()))
    assert all(0 < part.size < 3 * min_tokens for part in parts)


def test_the_worst_passage_names_its_line_and_shows_its_token():
    lines = [f"This is the line of the number {n}, and it is like all others.\n" for n in range(99)]
    lines[70] = lines[70].replace("like", "LIKE")
    text = "".join(lines)
    nats = torch.where(plain(text) < 96, 0.5, 0.1).double()
    nats[text.index("LIKE")] = 90.0
    ids = torch.zeros(len(text), dtype=torch.int64)
    document = EncodedDocument(
        Text("a.txt", [text]), ids, ids == 0, ids + 1, torch.zeros_like(nats)
    )
    first = evaluate.worst_first(passages(document, nats, 200))[0]
    line = int(first.place.removeprefix("a.txt, line "))
    assert line <= 71 < line + 8
    assert "LIKE" in first.excerpt


def test_short_passages_are_not_the_worst():
    parts = [Passage("short", 99.0, 99, 99), Passage("a", 50.0, 200, 200)]
    parts += [Passage("b", 60.0, 200, 200)]
    assert [part.place for part in evaluate.worst_first(parts)] == ["b", "a", "short"]


@pytest.fixture
def evaluation():
    return Evaluation(model="a", text="b", size=1000, tokens=900, bits_per_byte=2.5)


def test_two_models_are_compared_by_the_same_passages(evaluation):
    """What both find hard is no difference."""
    parts = documents(50, 1)
    worse = [replace(part, nats=part.nats + 0.05 * part.size) for part in parts]
    first = replace(evaluation, parts=parts)
    second = replace(evaluation, parts=worse)
    difference = second.facts(first)["less the first"]
    bits, low, high = map(float, re.findall(r"-?\d\.\d+", difference))
    assert bits == pytest.approx(0.05 / math.log(2), abs=1e-3)
    assert high - low < 0.01 < (margin_of_bits(parts) or 0.0)
    assert "less the first" not in first.facts(first)


def test_no_interval_of_bits_goes_below_zero(evaluation):
    short = replace(evaluation, bits_per_byte=1.5, half=2.0, parts=[])
    assert short.facts()["bits per byte"] == "1.500 (0.000 to 3.500)"


def test_unknown_characters_have_their_share_of_the_bits(evaluation):
    facts = replace(evaluation, n_unknown=40, unknown_bits=0.25).facts()
    assert facts["unknown characters"] == "40, which cost 0.250 of the bits"
    assert "unknown characters" not in evaluation.facts()


def test_a_text_without_an_interval_is_said_to_be_short(evaluation, capfd):
    print_evaluations([evaluation])
    err = capfd.readouterr().err
    assert "too short for an interval" in err
    assert "95 %" not in err
