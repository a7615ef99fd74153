"""A model directory as train.py writes it, read with suspicion; or made of a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entry_point import train
from entry_point.train import GPT, CheckpointError, Config, ConfigError, FormatError


def from_hugging_face(tensors: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The inverse of to_hugging_face.

    Raises:
        FormatError: a norm has weights.
    """
    out = {"embed.weight": tensors["model.embed_tokens.weight"]}
    for layer in range(config.n_layer):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        qkv = [tensors[f"{theirs}self_attn.{name}_proj.weight"] for name in "qkv"]
        gate_up = [tensors[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        out[ours + "attention.qkv.weight"] = torch.cat(qkv)
        out[ours + "attention.out.weight"] = tensors[theirs + "self_attn.o_proj.weight"]
        out[ours + "mlp.gate_up.weight"] = torch.cat(gate_up)
        out[ours + "mlp.down.weight"] = tensors[theirs + "mlp.down_proj.weight"]
    if not config.tie_embeddings:
        out["head.weight"] = tensors["lm_head.weight"]
    for name, tensor in tensors.items():
        if name.endswith("norm.weight") and not bool((tensor == 1).all()):
            raise FormatError(f"model.safetensors is of another kind: {name} is not all ones")
    return out


def known_config(values: Mapping[str, Any]) -> Config:
    """The Config of a model that a script with hyperparameters of its own may have trained.

    Those are left out; what the model is, config.json and the shapes of its tensors say too.
    """
    known = {f.name for f in dataclasses.fields(Config)}
    return train.make_config({name: value for name, value in values.items() if name in known})


def load_artefact(directory: Path) -> tuple[GPT, str]:
    """The model (CPU, float32, evaluating) and the vocabulary of a model directory.

    Raises:
        FormatError: the directory is not one that write_artefact wrote, or is damaged.
    """
    try:
        documents = {
            name: json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
            for name in ("config", "tokenizer", "training")
        }
        config = known_config(documents["training"]["config"])
        ids = documents["tokenizer"]["model"]["vocab"]
        vocabulary = "".join(sorted(ids, key=ids.__getitem__))
        if ids != {character: index for index, character in enumerate(vocabulary)}:
            raise ValueError("tokenizer.json is not one of characters")
        expected = train.hugging_face_config(config, len(vocabulary))
        found = {key: documents["config"].get(key) for key in expected}
        tensors, _ = train.read_safetensors(directory / "model.safetensors")
        if config.n_layer > len(tensors):
            raise ValueError(f"n_layer={config.n_layer} is more than there are tensors")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{directory.name}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        raise FormatError(
            f"{directory.name}: not a model directory of this script ({error})"
        ) from None
    for key, value in expected.items():
        if found[key] != value:
            raise FormatError(
                f"config.json and training.json disagree: {key} is {found[key]!r}, not {value!r}"
            )
    with torch.device("meta"):
        model = GPT(config, len(vocabulary))
        shapes = train.to_hugging_face(dict(model.named_parameters()), config)
    for name in sorted(shapes.keys() | tensors.keys()):
        said, there = (
            f"{str(t[name].dtype).removeprefix('torch.')} {list(t[name].shape)}"
            if name in t
            else "nothing"
            for t in (shapes, tensors)
        )
        if said != there:
            raise FormatError(f"model.safetensors: {name} should be {said} and is {there}")
    model.load_state_dict(from_hugging_face(tensors, config), assign=True)
    return model.eval(), vocabulary


def export_checkpoint(checkpoint_dir: Path, model_dir: Path) -> int:
    """Writes the newest whole checkpoint of a training as a model directory; returns its step.

    Raises:
        CheckpointError: there is none.
        FormatError: it is of a script whose model is another.
    """
    with contextlib.redirect_stdout(sys.stderr):  # on which it tells what it passes over
        loaded = train.Checkpoints(checkpoint_dir).load_latest()
    if loaded is None:
        raise CheckpointError(f"no checkpoint in {checkpoint_dir}")
    tensors, state = loaded
    weights = train.model_tensors(tensors)
    training = {"corpus_sha256": state["corpus_sha256"], "step": state["step"]}
    config = known_config(state["config"])
    try:
        train.write_artefact(model_dir, weights, config, state["vocabulary"], training)
    except (KeyError, ValueError, RuntimeError) as error:
        raise FormatError(
            f"the checkpoint of step {state['step']} is of a script whose model is another"
            f" ({type(error).__name__}: {error})"
        ) from None
    return state["step"]
