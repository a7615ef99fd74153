"""The artefact of a training, as transformers and the launcher read it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from models import SMALL, characters, lively, tokenizer_of
from runs import command_line, run
from tensors import assert_same

from sm_nanogpt.entry_point import train
from sm_nanogpt.entry_point.checkpoint import Checkpoints
from sm_nanogpt.entry_point.errors import FormatError, TrainingError
from sm_nanogpt.entry_point.huggingface import SCRIPT_SHA256, write_artefact, write_sums
from sm_nanogpt.entry_point.qwen3 import qwen3_weights
from sm_nanogpt.entry_point.safetensors_file import read_safetensors, write_safetensors
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.models import engine
from sm_nanogpt.launcher.models.load import export_checkpoint, own_model, read_checkpoint
from sm_nanogpt.launcher.settings import Settings

STEPS = 60


@pytest.fixture(scope="module")
def trained(text_file, tmp_path_factory):
    """The model directory of a short training on a text with tabs, emoji and other scripts."""
    out = tmp_path_factory.mktemp("trained")
    steps = {"max_steps": STEPS, "eval_interval": STEPS, "log_interval": STEPS}
    values = {**runs.SMALL, **steps, "n_embd": 64}
    end = run(command_line(**values, data=text_file, out=out), cwd=out)
    assert end.status == 0, end.output
    return out


@pytest.fixture(scope="module")
def artefact(trained):
    return trained / "model"


@pytest.fixture
def model_copy(artefact, tmp_path):
    shutil.copytree(artefact, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "meta.json"])
def test_a_run_opens_only_regular_files(model_copy, text_file, tmp_path, name):
    """This holds for its initial model and for its data: a pipe would never end."""
    data = text_file
    file = model_copy / name
    if name == "meta.json":
        data = tmp_path / "data"
        data.mkdir()
        file = data / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    arguments = command_line(device="cpu", data=data, init_from=model_copy, out=tmp_path / "out")
    with pytest.raises(TrainingError, match="not a regular file") as caught:
        train.main(arguments)
    assert name in str(caught.value)


def ids_of(vocabulary: str, text: str) -> list[int]:
    return [vocabulary.index(character) for character in text]


def test_transformers_computes_the_same_logits(artefact, text):
    """Also beyond the context, where a cache slides."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(artefact)
    model, tokenizer = own_model(artefact)
    sample = "".join(text[i : i + 32] for i in range(0, 400_000, 25_000))
    x = torch.tensor(ids_of(characters(tokenizer), sample)).view(-1, 32)
    long = torch.tensor([ids_of(characters(tokenizer), text[1000:1100])])
    cache = engine.KeyValueCache(model, 1, 100)
    with torch.inference_mode():
        expected = theirs(x).logits
        assert float(expected.std()) > 1
        torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=0)
        steps = [engine.forward(model, long[:, i : i + 1], cache) for i in range(100)]
        expected = theirs(long).logits
        torch.testing.assert_close(torch.stack(steps, dim=1), expected, atol=1e-4, rtol=0)


def test_transformers_encodes_text_as_ours_does(artefact, text):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(artefact)
    vocabulary = characters(own_model(artefact)[1])
    assert {"\n", "\t", "🙂", "é", "漢", "\u200d"} < set(vocabulary)
    marks = ("\n\n\t \t\n", "🙂🚀👩‍🚀", "  a  ", " .  , ' n't \n\t ")
    for sample in (vocabulary, *vocabulary, *marks, text[-300:], text[:3000]):
        ids = theirs(sample)["input_ids"]
        assert ids == ids_of(vocabulary, sample)
        assert theirs.decode(ids) == sample
    assert theirs.decode(theirs("aЪb")["input_ids"]) == "a b"  # an unknown character


def test_the_artefact_holds_no_pickle(artefact):
    assert {path.suffix for path in artefact.iterdir()} == {".json", ".safetensors", ""}
    assert (artefact / "SHA256SUMS").exists()


def test_the_artefact_says_what_it_was_trained_with(artefact, trained):
    training = json.loads((artefact / "training.json").read_text())
    rows = (trained / "output/metrics.jsonl").read_text().splitlines()
    assert training["metrics"] == json.loads(rows[-1])
    assert training["val_loss"] == training["metrics"]["val_loss"]
    assert training["config"]["n_embd"] == 64
    assert training["causal"] is True
    assert len(training["corpus_sha256"]) == 64


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_read_back_as_it_was_written(tied, tmp_path):
    model = lively(dataclasses.replace(SMALL, tie_embeddings=tied))
    write_artefact(tmp_path, model, tokenizer_of("abcdefghijk"), {"script_sha256": SCRIPT_SHA256})
    read_back, tokenizer = own_model(tmp_path)
    assert characters(tokenizer) == "abcdefghijk"
    assert_same(dict(read_back.named_parameters()), dict(model.named_parameters()))


def test_an_unknown_or_missing_weight_is_not_exported():
    weights = dict(lively().named_parameters())
    with pytest.raises(TrainingError, match=r"Qwen3 has no weight 'blocks\.0\.mlp\.bias'"):
        qwen3_weights({**weights, "blocks.0.mlp.bias": torch.zeros(3)}, SMALL)
    del weights["blocks.1.mlp.down.weight"]
    with pytest.raises(KeyError, match=r"blocks\.1\.mlp\.down\.w"):
        qwen3_weights(weights, SMALL)


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors, _ = read_safetensors(directory / "model.safetensors")
    change(tensors)
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    write_sums(directory)


def change_json(directory: Path, name: str, change: Callable[[Any], object]) -> None:
    document = json.loads((directory / name).read_text())
    change(document)
    (directory / name).write_text(json.dumps(document))
    write_sums(directory)


Q = "model.layers.0.self_attn.q_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"
V = "model.layers.0.self_attn.v_proj.weight"
EXTRA = "model.layers.2.mlp.up_proj.weight"  # of a layer that the model has not


@pytest.mark.parametrize(
    "name, change, shape",
    [
        (V, lambda t: t.pop(V), "nothing"),
        (Q, lambda t: t.update({Q: t[Q][:, :-2].clone()}), "[64, 62]"),
        (K, lambda t: t.update({Q: torch.zeros(128, 64), K: torch.zeros(0, 64)}), "[0, 64]"),
        (EXTRA, lambda t: t.update({EXTRA: torch.zeros(2)}), "[2]"),
    ],
)
def test_tensors_that_do_not_fit_are_a_format_error(model_copy, name, change, shape):
    change_tensors(model_copy, change)
    with pytest.raises(FormatError, match=rf"^{name} is .*{re.escape(shape)}"):
        own_model(model_copy)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("training.json", lambda d: d["config"].update(n_embd=128), r", 64\] in the model and"),
        ("training.json", lambda d: d["config"].update(n_embd="many"), "n_embd='many'"),
        ("training.json", lambda d: d.update(config=[]), "training.json .*config: "),
        ("tokenizer.json", lambda d: d["model"]["vocab"].update(a=10_000), r"10001, 64\]"),
        ("tokenizer.json", lambda d: d.update(model={"vocab": {"ab": 0}}), "is no tokenizer"),
        ("tokenizer.json", lambda d: d.update(model=[]), "tokenizer.json is no tokenizer"),
    ],
)
def test_documents_that_do_not_fit_are_a_format_error(model_copy, name, change, message):
    change_json(model_copy, name, change)
    with pytest.raises(FormatError, match=message):
        own_model(model_copy)


def test_an_added_recipe_hyperparameter_is_accepted(model_copy):
    change_json(model_copy, "training.json", lambda d: d["config"].update(mine=1))
    change_json(model_copy, "training.json", lambda d: d.update(script_sha256="f" * 64))
    model, _ = own_model(model_copy)
    assert model.config.n_embd == 64


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda t, state: state.update(script_sha256="f" * 64), InputError, r"SHA-256 f{12}\."),
        (lambda t, state: t.pop("model.embed.weight"), FormatError, r"embed\.weight is nothing"),
    ],
)
def test_a_checkpoint_of_another_script_is_refused(trained, tmp_path, change, error, message):
    loaded = Checkpoints(trained / "checkpoints").load_latest()
    assert loaded is not None
    change(*loaded)
    Checkpoints(tmp_path / "checkpoints").save(*loaded)
    with pytest.raises(error, match=message):
        export_checkpoint(
            read_checkpoint(tmp_path / "checkpoints"), tmp_path / "model", Settings(home=tmp_path)
        )


def test_a_checkpoint_can_be_made_a_model(trained, artefact, tmp_path):
    checkpoint = read_checkpoint(trained / "checkpoints")
    step = export_checkpoint(checkpoint, tmp_path / "model", Settings(home=tmp_path))
    assert step == STEPS
    assert_same(
        read_safetensors(tmp_path / "model/model.safetensors")[0],
        read_safetensors(artefact / "model.safetensors")[0],
    )
    model, tokenizer = own_model(tmp_path / "model")
    assert len(tokenizer) == model.embed.num_embeddings


def test_export_without_a_checkpoint_makes_no_model(tmp_path):
    with pytest.raises(TrainingError, match="no checkpoint in"):
        export_checkpoint(read_checkpoint(tmp_path), tmp_path / "model", Settings(home=tmp_path))
    assert not (tmp_path / "model").exists()
