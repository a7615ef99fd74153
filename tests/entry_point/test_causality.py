"""Whether a model looks ahead: edits that leak later tokens, and edits that do not."""

from __future__ import annotations

import json
import re
from typing import Any

import launching
import pytest
import runs
import torch
import torch.nn.functional as F
from edits import EDITS, HEAD, module_of
from leaks import BLOCK, LAYERS, LEAKS, insert_before
from models import tokenizer_of
from torch import Tensor

from sm_nanogpt.entry_point.causality import Leak, find_leak

V = 11
MASKED = "    if mask is not None:\n"
HONEST: dict[str, list[tuple[str, str]]] = {
    "learned positions": EDITS["learned positions"],
    "linear biases of attention": [  # as ALiBi
        (
            MASKED,
            "    T = torch.arange(q.size(2))\n"
            "    mask = (T - T[:, None]).float()\n"
            f"    mask = mask.masked_fill(mask > 0, -torch.inf)\n{MASKED}",
        )
    ],
    "long convolution": [  # by Fourier transforms, whose rounding moves earlier positions
        insert_before(
            BLOCK,
            "n = 2 * x.size(1); decay = torch.fft.rfft(0.8 ** torch.arange(n // 2), n)[:, None]; "
            "x = x + torch.fft.irfft(torch.fft.rfft(x, n, 1) * decay, n, 1)[:, : n // 2]",
        )
    ],
    "masked columns": [(HEAD, f"{HEAD}\n        logits[..., 9:] = -torch.inf")],
    "bfloat16": [
        insert_before(LAYERS, "x, cos, sin = x.bfloat16(), cos.bfloat16(), sin.bfloat16()")
    ],
}


@pytest.fixture
def leak_of(tmp_path):
    """The leak of a small model of an edited folder, none of whose parts is idle."""

    def leak_of(*edits: tuple[str, str], n_cuts: int = 64, **values: Any) -> Leak | None:
        module = module_of(launching.edited(tmp_path / "mine", *edits))
        values = {"n_layer": 2, "n_embd": 32, "block_size": 128, **values}
        model = module.GPT(module.make_config(values), V).eval()
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
        windows = torch.randint(V, (8, 128), generator=generator)
        return find_leak(model, windows, V, seed=1, n_cuts=n_cuts)

    return leak_of


@pytest.mark.parametrize("edit", LEAKS)
def test_a_model_that_looks_ahead_is_found(edit, leak_of):
    leak = leak_of(LEAKS[edit])
    assert leak is not None
    assert leak.token is not None
    assert leak.token > leak.position


@pytest.mark.parametrize("edit", HONEST)
def test_an_honest_edit_has_no_leak(edit, leak_of):
    assert leak_of(*HONEST[edit]) is None


def test_the_packaged_model_has_no_leak(leak_of):
    assert leak_of(n_kv_head=1, tie_embeddings=True, vocab_size=64) is None


def test_a_mask_of_documents_that_looks_ahead_is_found(tmp_path):
    """In the mask that a run of the config trains and evaluates with."""
    masks = "documents[:, None, None, :])"
    folder = launching.edited(tmp_path / "mine", (f"{masks}.tril()", masks))
    module = module_of(folder)
    tokenizer = tokenizer_of("abcdefghijk")
    tokenizer.end = 3
    for masks_documents in (False, True):
        config = module.make_config({"mask_documents": masks_documents})
        model = module.GPT(config, len(tokenizer)).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        assert bool(module.leak_of(model, tokenizer, False)) is masks_documents


def test_a_run_says_that_its_model_looks_ahead(text_file, tmp_path):
    command = runs.edited_folder(tmp_path / "mine", LEAKS["shift"])
    arguments = runs.command_line(**launching.TINY, data=text_file, out="out")
    end = runs.run(arguments, cwd=tmp_path, command=command)
    assert end.status == 0
    (leak,) = re.findall("\nwarning: (not causal: .*; val_loss means nothing)\n", end.output)
    training = json.loads((tmp_path / "out/model/training.json").read_text())
    assert training["causal"] is False
    assert training["leak"] == leak
    steps = re.findall(r"warning: at step (\d+), not causal: ", end.output)
    assert steps == ["5"]  # of 10


def next_at(distance: int) -> Any:
    """A model that knows the token at this distance ahead, near the end of the window none."""

    def logits(ids: Tensor) -> Tensor:
        later_ids = F.pad(ids, (0, distance))[:, distance:]
        return 3.0 * F.one_hot(later_ids, V).float()

    return logits


@pytest.mark.parametrize("distance", [1, 40])
def test_a_leak_names_the_position_and_its_source(distance):
    leak = find_leak(next_at(distance), torch.randint(V, (4, 64)), V, seed=3, n_cuts=64)
    assert leak is not None
    assert leak.token == leak.position + distance
    assert str(leak) == f"logits at {leak.position} depend on token {leak.token} (by 3)"


def uncertain(ids: Tensor) -> Tensor:
    return torch.rand(*ids.shape, V)


def of_batch(ids: Tensor) -> Tensor:
    batch_means = ids.float().mean(0)[:, None]
    return F.one_hot(ids, V).float() + batch_means * torch.arange(V)


@pytest.mark.parametrize("model", [uncertain, of_batch])
def test_a_leak_of_no_later_token_says_so(model):
    leak = find_leak(model, torch.randint(V, (4, 16)), V, seed=3, n_cuts=16)
    assert leak is not None
    assert leak.token is None
    assert "more than earlier tokens" in str(leak)


def test_nan_counts_as_moved():
    def model(ids: Tensor) -> Tensor:
        factors = torch.where(ids.roll(-1, 1) == 3, torch.nan, 1)
        return F.one_hot(ids, V).float() * factors[..., None]

    assert find_leak(model, torch.randint(V, (4, 16)), V, seed=3, n_cuts=64)


@pytest.mark.parametrize("size", [1, 2])
def test_the_smallest_windows_can_be_tested(size):
    windows = torch.zeros(1, 2, dtype=torch.long)
    assert find_leak(lambda ids: torch.zeros(*ids.shape, size), windows, size, 1) is None
