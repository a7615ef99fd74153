"""The Hugging Face model directory: writing it, checking it, and starting from one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .causality import leak_of
from .config import Config, has_tuned_rates, read_value
from .conversations import CHAT_TEMPLATE, END_OF_TURN
from .errors import ConfigError, DataError, FormatError, TrainingError, is_out_of_memory, os_reason
from .files import file_sha256, member, read_json, replacing
from .kernels import NORM_EPS
from .model import GPT, activation_name
from .qwen3 import check_export, qwen3_config, qwen3_weights
from .safetensors_file import read_safetensors, write_safetensors
from .text import Tokenizer

MODEL_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "training.json",
)


EDITED = "sm-nanogpt-edited"


@dataclass(frozen=True)
class Export:
    """What a model directory holds of a model, and what was found out about it."""

    tensors: Mapping[str, Tensor]
    config_json: Mapping[str, Any]
    difference: str  # from Qwen3; "" if it is Qwen3's
    leak: str  # how the model looks ahead; "" if it is causal


def export_of(model: GPT, tokenizer: Tokenizer, chats: bool) -> Export:
    """The model as Qwen3, if it computes the same logits; else with its own names of the weights.

    config.json then has a `model_type` that no other tool takes for one it knows.
    """
    weights: dict[str, Tensor] = model.state_dict()
    leak = "it cannot be tested whether it looks ahead"
    try:
        leak = leak_of(model, tokenizer, chats)
        tensors = qwen3_weights(weights, model.config)
        config_json = qwen3_config(model.config, len(tokenizer), tokenizer.end)
        check_export(model, tensors, config_json)
        return Export(tensors, config_json, "", leak)
    except TrainingError as error:
        difference = str(error)
    except Exception as error:  # an edited model may have other parts, or another shape
        if is_out_of_memory(error):
            raise
        difference = f"it cannot be compared: {type(error).__name__}: {error}"
    config_json = {
        "model_type": EDITED,
        "why": f"not Qwen3: {difference}; the script of training.json's script_sha256 computes it",
        "vocab_size": len(tokenizer),
    }
    return Export(weights, config_json, difference, leak)


def tokenizer_documents(tokenizer: Tokenizer, block_size: int, chats: bool) -> dict[str, Any]:
    """The JSON files that say how text becomes ids, and which ids end it.

    A model that has learned from conversations, `chats`, gets the template that encodes them.
    """
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": block_size,
        "eos_token": tokenizer.end_of_text,
    }
    end_ids = []
    if chats:
        tokenizer_config["chat_template"] = CHAT_TEMPLATE
        end_ids.append(tokenizer.special[END_OF_TURN])
    if tokenizer.end is not None:
        end_ids.append(tokenizer.end)
    return {
        "tokenizer.json": tokenizer.document,
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": {"eos_token_id": end_ids} if end_ids else {},
    }


def write_artefact(
    directory: Path,
    model: GPT,
    tokenizer: Tokenizer,
    training: Mapping[str, Any],
    chats: bool = False,
) -> tuple[str, str]:
    """Writes the model (CPU, float32, evaluating) as a directory.

    Returns how it differs from Qwen3, and how it looks ahead, each "" if it does not. `chats`: it
    has learned from conversations.
    """
    directory.mkdir(parents=True, exist_ok=True)
    export = export_of(model, tokenizer, chats)
    write_safetensors(directory / "model.safetensors", export.tensors, {"format": "pt"})
    documents = tokenizer_documents(tokenizer, model.config.block_size, chats)
    documents["training.json"] = {
        "config": dataclasses.asdict(model.config),
        "model_sha256": MODEL_SHA256,
        "causal": not export.leak,
        "leak": export.leak,
        **training,
    }
    documents["config.json"] = export.config_json
    for name, content in documents.items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        with replacing(directory / name) as file:
            file.write(text.encode() + b"\n")
    write_sums(directory)
    return export.difference, export.leak


def sha256_sums(files: Iterable[Path]) -> str:
    """What `sha256sum` prints of the files in their folder."""
    return "".join(f"{file_sha256(file)}  {file.name}\n" for file in files)


def write_sums(directory: Path) -> None:
    """Writes SHA256SUMS over the files of a model."""
    with replacing(directory / "SHA256SUMS") as file:
        file.write(sha256_sums(directory / name for name in MODEL_FILES).encode())


def folder_sha256(folder: Path, *names: str) -> str:
    """What `sha256sum *.py | sha256sum` prints in a folder, in the C locale; or of these names."""
    files = sorted(folder.glob("[!.]*.py"))
    if names:
        files = [file for file in files if file.name in names]
    return hashlib.sha256(sha256_sums(files).encode()).hexdigest()


# The code that made a model: the hash of these files when they were loaded.
FOLDER = Path(__file__).resolve().parent
SCRIPT_SHA256 = folder_sha256(FOLDER)
# A model from another recipe, but the same kernels.py and model.py, is computed by the same code.
MODEL_SHA256 = folder_sha256(FOLDER, "kernels.py", "model.py")


def with_weights(config: Config, vocabulary_size: int, weights: Mapping[str, Tensor]) -> GPT:
    """A model with these weights, evaluating. Raises TrainingError unless all of them fit."""
    model = GPT(config, vocabulary_size)
    load_tensors(model.state_dict(), weights)
    return model.eval()


@torch.no_grad()
def load_tensors(
    live: Mapping[str, Tensor], saved: Mapping[str, Tensor], source: str = "the checkpoint"
) -> None:
    """Copies saved tensors into the live ones. Raises TrainingError unless all of them fit."""
    check_shapes(live, saved, source)
    for name, tensor in live.items():
        tensor.copy_(saved[name])


def check_shapes(live: Mapping[str, Tensor], saved: Mapping[str, Tensor], source: str) -> None:
    """Raises TrainingError, which names the first difference, unless names and shapes are alike."""
    for name in sorted(live.keys() | saved.keys()):
        ours = list(live[name].shape) if name in live else "nothing"
        theirs = list(saved[name].shape) if name in saved else "nothing"
        if ours != theirs:
            raise TrainingError(f"{name} is {theirs} in {source} and {ours} in this script")


def model_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint that are the model's, by their names in the model."""
    weights = {}
    for name, tensor in tensors.items():
        part, _, name_in_part = name.partition(".")
        if part == "model":
            weights[name_in_part] = tensor
    return weights


# Defaults of a run that starts from a model.
FINE_TUNING: dict[str, Any] = {
    "learning_rate": 0.005,
    "embedding_learning_rate": 0.005,
    "head_learning_rate": 0.002,
    "max_steps": 500,
    "eval_tokens": 1 << 17,
}


def starting_values(directory: Path, requested: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a run that starts from the model in a directory.

    They are the requested ones, those that the model prescribes, and FINE_TUNING. Raises
    ConfigError if a requested one differs from the model's, or this script computes no such model;
    DataError if the model cannot be read.
    """
    try:
        shape, suggested = read_shape(directory)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{directory / 'training.json'} is of another kind: {error}") from None
    values = {}
    for name, value in requested.items():
        if value not in (None, ""):
            values[name.replace("-", "_")] = value
    for f in dataclasses.fields(Config):
        if f.name in values and f.name in shape:
            value = read_value(f, values[f.name])
            if value != shape[f.name]:
                raise ConfigError(f"{f.name}={value!r}: the initial model has {shape[f.name]!r}")
    defaults = FINE_TUNING.copy()
    if not has_tuned_rates(values.get("optimizer")):
        del defaults["learning_rate"]
    return {**defaults, **suggested, **values, **shape}


def read_shape(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The hyperparameters that a model prescribes, and those that it suggests.

    Raises ConfigError if this script does not compute the model.
    """
    document = with_rope_values(read_json(directory / "config.json"))
    training_json = directory / "training.json"  # of ours; others have none
    training = read_json(training_json) if training_json.exists() else {"config": {}}
    config = member(training, "config", dict)
    suggested = {"mask_documents": config.get("mask_documents", False)}
    if document.get("model_type") == EDITED:
        return shape_of_edited(training), suggested

    check_computable(document)
    longest = positions(document, "max_position_embeddings")
    if document.get("use_sliding_window") and document.get("sliding_window"):
        longest = min(longest, positions(document, "sliding_window"))
    suggested["block_size"] = min(longest, 1024)
    return shape_of_qwen3(document, config), suggested


def shape_of_edited(training: Mapping[str, Any]) -> dict[str, Any]:
    """The shape of a model that an edited script trained. Raises ConfigError for another script."""
    script = member(training, "script_sha256", str)
    if script != SCRIPT_SHA256:
        raise ConfigError(
            f"an edited script trained the initial model (SHA-256 {script[:12]}...), which is not"
            " Qwen3's; use that script"
        )
    names = [f.name for f in dataclasses.fields(Config) if f.metadata["shape"]]
    return {name: training["config"][name] for name in names}


def shape_of_qwen3(document: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """The shape of a model by its config.json and, if it is ours, the config that trained it."""
    # config.json cannot say that norms have no weights.
    norm_weights = trained.get("norm_weights", False) if trained else True
    names = {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_kv_head": "num_key_value_heads",
        "head_dim": "head_dim",
        "n_embd": "hidden_size",
        "n_hidden": "intermediate_size",
        "tie_embeddings": "tie_word_embeddings",
        "rope_theta": "rope_theta",
        "vocab_size": "vocab_size",
    }
    shape = {"norm_weights": norm_weights}
    for hyperparameter, name in names.items():
        if document.get(name) is None:  # which would be this script's default
            raise ConfigError(f"config.json has no {name}")
        shape[hyperparameter] = document[name]
    return shape


def with_rope_values(document: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with all values side by side: some versions nest those of rotary positions.

    Raises ConfigError if those are no object.
    """
    rope = document.get("rope_scaling") or document.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"config.json: {rope!r} are no values of rotary positions")
    defaults = {"model_type": None, "rope_type": rope.get("type", "default")}
    return {**defaults, **rope, **document}


def check_computable(document: Mapping[str, Any]) -> None:
    """Raises ConfigError, which names the first difference, unless this script computes a model."""
    computed = {
        "model_type": "qwen3",
        "hidden_act": activation_name(),
        "rms_norm_eps": NORM_EPS,
        "attention_bias": False,
        "quantization_config": None,
        "rope_type": "default",
    }
    for name, value in computed.items():
        if document.get(name, value) != value:
            raise ConfigError(
                f"the initial model has {name}={document[name]!r}; this script computes only"
                f" {value!r} (if an edited script trained the model, use that script)"
            )


def positions(document: Mapping[str, Any], name: str) -> int:
    """A number of positions in config.json. Raises ConfigError unless it is a whole one, over 0."""
    value: Any = document.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 1 <= value < math.inf or value != int(value):
        raise ConfigError(f"config.json: {name}={value!r}: must be a whole number, at least 1")
    return int(value)


def check_teacher(values: Mapping[str, Any], block_size: int) -> None:
    """Raise ConfigError if the context of a model with these starting_values is too short."""
    context = values["block_size"]
    if context < min(block_size, 1024):  # starting_values gives no more
        raise ConfigError(
            f"{block_size=}: must be at most {context}, the teacher's context; set"
            f" block_size={context}"
        )


def check_values(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises DataError unless all weights are finite numbers of a floating-point type."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise DataError(f"{directory}: {name} is of type {kind}, as no weights are")
        if not tensor.isfinite().all():
            raise DataError(f"{directory}: {name} has values that are infinite or not numbers")


def is_edited(directory: Path) -> bool:
    """Whether an edited script, whose model is not Qwen3's, made the model in a directory."""
    return bool(read_json(directory / "config.json").get("model_type") == EDITED)


def read_weights(directory: Path) -> dict[str, Tensor]:
    """The weights of the model in a directory, which may be in several files, mapped into memory.

    Raises DataError or FormatError as load_pretrained.
    """
    tensors: dict[str, Tensor] = {}
    index = directory / "model.safetensors.index.json"
    names = {"model.safetensors"}
    try:
        if index.exists():
            file_of_weight = read_json(index)["weight_map"]
            names = {Path(file).name for file in file_of_weight.values()}
        for name in sorted(names):
            part, _ = read_safetensors(directory / name, largest=1 << 24, mapped=True)
            tensors |= part
    except OSError as error:
        raise FormatError(f"{error.filename or directory}: {os_reason(error)}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"the weights in {directory} cannot be read: {error}") from None
    if not is_edited(directory):  # whose buffers may hold anything
        check_values(directory, tensors)
    return tensors


def load_pretrained(model: GPT, directory: Path) -> None:
    """Reads the weights of the model in a directory, which may be in several files, of any type.

    A meta model is given memory, on the CPU, only after all shapes have been checked. Raises
    TrainingError if they do not fit, DataError or FormatError if a file is missing or damaged, or
    holds other values than finite numbers.
    """
    tensors = read_weights(directory)
    if model.head is None:  # published files may hold the tied head too
        tensors.pop("lm_head.weight", None)
    names_are_ours = is_edited(directory)

    def live_tensors() -> dict[str, Tensor]:
        weights: dict[str, Tensor] = model.state_dict()
        return weights if names_are_ours else qwen3_weights(weights, model.config)

    check_shapes(live_tensors(), tensors, "the model")
    if any(weight.is_meta for weight in model.parameters()):
        give_memory(model)
    load_tensors(live_tensors(), tensors, "the model")


def give_memory(model: GPT) -> None:
    """As `model.to_empty(device="cpu")`, which imports SymPy and takes two seconds."""
    memory = {}
    for name, tensor in model.state_dict().items():
        memory[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
    model.load_state_dict(memory, assign=True)
