"""A page of `play` that the tests of views share."""

from __future__ import annotations

import pytest
from models import lively, tokenizer_of
from served import LETTERS, served

from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.launcher.views.play import Player


class Edited(GPT):
    """The model of an edited script."""


@pytest.fixture(scope="module")
def site():
    """A page with a model, another one of other weights, and that of an edited script."""
    models = [lively() for _ in range(3)]
    models[1].embed.weight.data.neg_()
    models[2].__class__ = Edited
    players = [Player(f"model-{n}", model, tokenizer_of(LETTERS)) for n, model in enumerate(models)]
    with served(players) as site:
        yield site
