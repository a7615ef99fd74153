"""Models that would lower their loss by what they must not use, and the cuts that find them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import tokenizer_of
from torch import Tensor

from sm_nanogpt import ServiceError
from sm_nanogpt.launcher.judge.causality import TOTAL_CUTS, check_causal, draw_cuts, in_passes
from sm_nanogpt.launcher.judge.score import losses_of_documents, window_spans
from sm_nanogpt.launcher.judge.texts import Text, encode_texts
from sm_nanogpt.launcher.judge.worker import PASS_TOKENS, Worker

VOCABULARY = "abcdefghijklmnop"
N_TOKENS = 4000
CONTEXT = 32
SURE = 9.0  # the logit of a token that a cheat knows
Rule = Callable[["Cheat", Tensor], Tensor]


class Cheat(Worker):
    """A worker without a process. Its model knows nothing, but for what a rule adds to its logits.

    The rule gets the worker, which remembers what it wants to, and rows of ids, int64 [n, T]. It
    returns the strength, float32 [n, T], with which the next id of the row is expected.
    """

    chats = False
    directory = Path("cheat")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.rows = 0
        self.seen = dict[bytes, int]()
        self.tokenizer = tokenizer_of(VOCABULARY)
        self.block_size = CONTEXT
        self.n_logits = len(VOCABULARY)

    def logits(self, ids: Tensor) -> Tensor:
        expected = F.one_hot(ids.roll(-1, 1), self.n_logits)
        logits = expected * self.rule(self, ids)[..., None]
        self.rows += len(ids)
        return logits


@pytest.fixture(scope="module")
def encoded():
    text = "".join(random.Random(1).choices(VOCABULARY, k=N_TOKENS))
    return encode_texts([Text("a", [text])], tokenizer_of(VOCABULARY))


def chosen(ids: Tensor, share: float) -> Tensor:
    """A share of the positions, which depend on the ids before them: bool [n, T]."""
    hashes = (ids * 40503 + ids.roll(1, 1) * 2654435 + ids.roll(2, 1) * 97).remainder(65537)
    return hashes < share * 65537


def honest(worker: Cheat, ids: Tensor) -> Tensor:
    return torch.zeros(ids.shape)


def looks_ahead(worker: Cheat, ids: Tensor) -> Tensor:
    return torch.full(ids.shape, SURE)


def counts_windows(worker: Cheat, ids: Tensor) -> Tensor:
    """In five windows of six, as if the sixth alone were computed again."""
    index = worker.rows + torch.arange(len(ids))
    return SURE * (index % 6 != 0).float()[:, None].expand(ids.shape)


def seldom_and_by_half(worker: Cheat, ids: Tensor) -> Tensor:
    """At one of 40 positions, with half of the strength."""
    return SURE / 2 * chosen(ids, 1 / 40).float()


def in_long_rows(worker: Cheat, ids: Tensor) -> Tensor:
    return torch.full(ids.shape, SURE * (ids.size(1) == CONTEXT))


def in_full_batches(worker: Cheat, ids: Tensor) -> Tensor:
    return torch.full(ids.shape, SURE * (len(ids) > 64))


def in_the_last_batch(worker: Cheat, ids: Tensor) -> Tensor:
    """Which alone has few rows."""
    return torch.full(ids.shape, SURE * (len(ids) < PASS_TOKENS // CONTEXT))


def after_the_start(worker: Cheat, ids: Tensor) -> Tensor:
    """In the first window of a text alone, which begins with the token before all texts."""
    begins = ids[:, :1] == worker.tokenizer.start
    return SURE * begins.float().expand(ids.shape)


def near_the_end(worker: Cheat, ids: Tensor) -> Tensor:
    return SURE * (torch.arange(ids.size(1)) >= CONTEXT - 4).float().expand(ids.shape)


def where_the_next_is(token: int) -> Rule:
    """Only before one token, such as the one that fills the end of a batch."""
    return lambda worker, ids: SURE * (ids.roll(-1, 1) == token).float()


def where_later_rows_agree(worker: Cheat, ids: Tensor) -> Tensor:
    """Of rows that begin in the same way, it knows the continuation by the longest."""
    strength = torch.zeros(ids.shape)
    for row, line in enumerate(ids.tolist()):
        for at in range(8, len(line) - 1):
            if worker.seen.get(bytes(line[at - 7 : at + 1])) == line[at + 1]:
                strength[row, at] = SURE
    for line in ids.tolist():
        for at in range(8, len(line) - 1):
            worker.seen[bytes(line[at - 7 : at + 1])] = line[at + 1]
    return strength


def after_some_windows(n: int) -> Rule:
    """With what is common to all texts of this kind, as soon as it has seen some of this one."""
    return lambda worker, ids: torch.full(ids.shape, SURE * (worker.rows >= n))


CHEATS: dict[str, Rule] = {
    "looks ahead": looks_ahead,
    "counts windows": counts_windows,
    "looks ahead seldom and by half": seldom_and_by_half,
    "looks ahead in long rows": in_long_rows,
    "looks ahead in full batches": in_full_batches,
    "looks ahead in the last batch": in_the_last_batch,
    "looks ahead in the first window": after_the_start,
    "looks ahead near the end of a window": near_the_end,
    "looks ahead before the first token": where_the_next_is(0),
    "remembers the windows before": where_later_rows_agree,
    "learns from the first window": after_some_windows(1),
    "learns from 100 windows": after_some_windows(100),
}


def judge(rule: Rule, encoded: list, n_cuts: int = TOTAL_CUTS) -> float:
    """The mean loss of a cheat that was not found."""
    nats = losses_of_documents(Cheat(rule), encoded)
    check_causal(Cheat(rule), encoded, nats, n_cuts)
    return float(torch.cat(nats).mean())


def test_an_honest_model_passes(encoded):
    assert judge(honest, encoded) == pytest.approx(math.log(len(VOCABULARY)))


class Rounding(Cheat):
    """An honest model whose logits round by the length of the row, as those of bfloat16 do."""

    def logits(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, self.n_logits) * (1 + ids.size(1) / 100)


def test_an_honest_model_that_rounds_by_length_passes():
    """Also with documents of many lengths, of which process 1 computes several in a pass."""
    draw = random.Random(2)
    texts = ["".join(draw.choices(VOCABULARY, k=draw.randrange(1, 90))) for _ in range(60)]
    documents = [Text(str(number), [text]) for number, text in enumerate(texts)]
    encoded = encode_texts(documents, tokenizer_of(VOCABULARY))
    nats = losses_of_documents(Rounding(honest), encoded)
    assert check_causal(Rounding(honest), encoded, nats, TOTAL_CUTS) == sum(map(len, texts))


@pytest.mark.parametrize("name", CHEATS)
def test_a_model_that_uses_what_follows_is_found(name, encoded):
    rule = CHEATS[name]
    [nats] = losses_of_documents(Cheat(rule), encoded)
    assert math.log(len(VOCABULARY)) - nats.mean() > 0.005
    with pytest.raises(ServiceError, match="not causal"):
        judge(rule, encoded)


# -- by how many cuts ------------------------------------------------------------------------------


def asked_of_the_second(n: int, context: int, n_cuts: int, chance: random.Random) -> set[int]:
    """The tokens of a text of n that cuts ask for before any row has shown them."""
    spans = window_spans(n, context)
    cuts = draw_cuts([range(counted - a, b - a) for a, b, counted in spans], n_cuts, chance)
    shown, positions = np.zeros(n, bool), set[int]()
    for together in in_passes(cuts, chance):
        ends = [spans[cut.window][0] + cut.length - 1 for cut in together]
        for cut, end in zip(together, ends, strict=True):
            shown[max(0, spans[cut.window][0] - 1) : end] = True
        positions |= {end for end in ends if not shown[end]}
    return positions


@pytest.mark.parametrize("context", [64, 1024])
def test_nearly_all_cuts_ask_for_a_token_not_yet_shown(context):
    """Of one that was shown before, a model that remembers it could give the loss."""
    positions = asked_of_the_second(100_000, context, TOTAL_CUTS, random.Random(1))
    assert len(positions) > 0.95 * TOTAL_CUTS


@pytest.mark.parametrize(("n", "n_cuts"), [(1, 1), (300, 300), (40_000, TOTAL_CUTS)])
def test_a_text_has_so_many_cuts_or_one_for_each_token(n, n_cuts):
    spans = window_spans(n, 16)
    scored = [range(counted - begin, end - begin) for begin, end, counted in spans]
    cuts = draw_cuts(scored, TOTAL_CUTS, random.Random(1))
    positions = [(cut.window, cut.length) for window in cuts for cut in window]
    assert len(positions) == len({*positions}) == n_cuts
    assert all(length - 1 in scored[window] for window, length in positions)
    passes = list(in_passes(cuts, random.Random(2)))
    assert sorted((cut.window, cut.length) for cuts in passes for cut in cuts) == positions
    assert {len(cuts) for cuts in passes[:64]} == {1}


def test_a_leak_at_one_of_2000_positions_is_found():
    """In 999 of 1,000 evaluations, and so in each of these."""
    chance = random.Random(3)
    n = 100_000
    for _ in range(4):
        leaks = {*chance.sample(range(n), n // 2000)}
        assert leaks & asked_of_the_second(n, 256, TOTAL_CUTS, chance)
