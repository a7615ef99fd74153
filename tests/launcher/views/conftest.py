"""A page of `play`, and a tokenizer, that the tests of views share."""

from __future__ import annotations

import pytest
from hard_strings import STRINGS
from models import lively, tokenizer_of
from served import LETTERS, served

from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.launcher.text.reading import detect_file
from sm_nanogpt.launcher.text.tokenizer import learn_tokenizer
from sm_nanogpt.launcher.views.play import ServedModel


class Edited(GPT):
    """The model of an edited script."""


@pytest.fixture(scope="module")
def site():
    """A page with a model, another one of other weights, and that of an edited script."""
    models = [lively() for _ in range(3)]
    models[1].embed.weight.data.neg_()
    models[2].__class__ = Edited
    served_models = [
        ServedModel(f"model-{n}", model, tokenizer_of(LETTERS)) for n, model in enumerate(models)
    ]
    with served(served_models) as site:
        yield site


@pytest.fixture(scope="module")
def tokenizer(text, tmp_path_factory):
    """One of BPE, with merges of what is hard to split."""
    path = tmp_path_factory.mktemp("text") / "input.txt"
    strings = "\n".join(STRINGS).replace("\0", "")  # no text has a zero
    path.write_text(text[:200_000] + strings, encoding="utf-8")
    return learn_tokenizer([detect_file(path)], 600)
