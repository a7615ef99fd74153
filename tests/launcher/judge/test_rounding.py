"""In how few bits weights are kept: what rounding costs on a text, and how surely."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import SMALL, VOCABULARY_SIZE, alone, ids, lively, tokenizer_of

from sm_nanogpt.entry_point.conversations import Packed
from sm_nanogpt.entry_point.data import evaluate
from sm_nanogpt.entry_point.text import Corpus
from sm_nanogpt.launcher.judge import rounding
from sm_nanogpt.launcher.judge.rounding import (
    MAX_COST_BITS,
    PART_TOKENS,
    TokenLosses,
    largest_cost,
    measure_losses,
    round_weights,
)

CORPUS = Corpus(tokenizer_of("abcdefghijk"[:VOCABULARY_SIZE]), ids(4000), ids(2000), "")


def losses(*parts: float, n_parts: int = 8) -> TokenLosses:
    """TokenLosses that are equal within each part, in bits; these parts are repeated."""
    bits = torch.tensor(parts, dtype=torch.float64).repeat(n_parts // len(parts))
    nats = bits.repeat_interleave(PART_TOKENS) * math.log(2)
    return TokenLosses(nats, bytes_per_token=1.0)


def test_the_loss_is_that_of_an_evaluation():
    model = lively()
    loss = evaluate(model, CORPUS.val, SMALL, alone())
    model.eval()
    assert measure_losses(model, CORPUS).bits_per_byte == pytest.approx(loss / math.log(2))


def test_only_answers_of_conversations_are_measured():
    """Without the conversations that share their row. ~id is one that is not learned."""
    end = VOCABULARY_SIZE - 1
    conversations = torch.tensor([~1, 2, 2, ~end, ~3, 4, 5, ~end, ~6, 7, ~end] * 20)
    val = Packed(conversations, end, SMALL.block_size)
    tokenizer: Any = SimpleNamespace(end=end, words=[b"a"] * VOCABULARY_SIZE)
    model = lively()
    loss = evaluate(model, val, SMALL, alone(), end)
    losses = measure_losses(model.eval(), Corpus(tokenizer, val, val, ""))
    assert len(losses.nats) == int(val.learned.sum())
    assert losses.bits_per_byte == pytest.approx(loss / math.log(2))


def test_a_masked_document_sees_no_earlier_one():
    config = replace(SMALL, mask_documents=True)
    end = VOCABULARY_SIZE - 1
    tokenizer: Any = SimpleNamespace(end=end, words=[b"a"] * VOCABULARY_SIZE)
    model = lively(config)
    loss = evaluate(model, CORPUS.val, config, alone(), end)
    losses = measure_losses(model.eval(), replace(CORPUS, tokenizer=tokenizer))
    assert losses.bits_per_byte == pytest.approx(loss / math.log(2))


def test_large_vocabularies_are_scored_in_parts(monkeypatch):
    """Which are of a window at least."""
    exact = measure_losses(lively(), CORPUS)
    monkeypatch.setattr(rounding, "LOGITS_AT_ONCE", 1)
    assert torch.allclose(measure_losses(lively(), CORPUS).nats, exact.nats)


def test_two_standard_errors_count_with_the_cost():
    exact = losses(1)
    assert largest_cost(exact, losses(1.2)) == pytest.approx(0.2)
    rounded = losses(1.1, 1.3)
    standard_error = math.sqrt(8 * 0.1**2 / 7) / math.sqrt(8)
    assert largest_cost(exact, rounded) == pytest.approx(0.2 + 2 * standard_error)


def round_with_costs(monkeypatch: pytest.MonkeyPatch, costs: dict[int, TokenLosses]) -> int:
    """The bits that are chosen where each number of bits has these losses, and none has 0."""
    exact = losses(0)
    by_choice = iter([exact, *costs.values()])
    monkeypatch.setattr(rounding, "measure_losses", lambda *_: next(by_choice))
    return round_weights(lively(), CORPUS).bits


def test_a_gain_by_chance_chooses_no_bits(monkeypatch):
    """On another text of the kind, it may be a cost."""
    gain = losses(-0.4, 0.3)
    sure = losses(MAX_COST_BITS / 2)
    assert round_with_costs(monkeypatch, {4: gain, 5: sure}) == 5
    assert round_with_costs(monkeypatch, {4: sure}) == 4


def test_a_text_too_short_to_measure_takes_the_most_bits(monkeypatch):
    assert largest_cost(losses(1, n_parts=7), losses(1, n_parts=7)) == math.inf
    corpus = replace(CORPUS, val=ids(7 * PART_TOKENS))
    assert round_weights(lively(), corpus).bits == 8
