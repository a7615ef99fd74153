"""The Hugging Face model directory: writing it, checking it, and starting from one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .causality import LONGEST_WINDOW, leak_of
from .config import Config, has_tuned_rates, read_value
from .conversations import CHAT_TEMPLATE, END_OF_TURN
from .errors import ConfigError, DataError, FormatError, TrainingError, is_out_of_memory
from .files import file_sha256, replacing
from .kernels import NORM_EPS
from .model import GPT, activation_name
from .safetensors_file import read_safetensors, write_safetensors
from .text import Tokenizer, read_json

MODEL_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "training.json",
)


def to_hugging_face(weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The weights by Qwen3's names, as views: fused matrices cut apart, absent norms as ones.

    Raises TrainingError if Qwen3 lacks one of the weights, KeyError if it has one that is not here.
    """

    def of_norm(name: str, n: int) -> Tensor:
        return remaining.pop(name) if config.norm_weights else torch.ones(n)

    remaining = dict(weights)
    width = config.n_head * config.head_width
    kv_width = config.kv_heads * config.head_width
    out = {"model.embed_tokens.weight": remaining.pop("embed.weight")}
    for layer in range(config.n_layer):
        ours = f"blocks.{layer}."
        q, k, v = remaining.pop(ours + "attention.qkv.weight").split((width, kv_width, kv_width))
        gate, up = remaining.pop(ours + "mlp.gate_up.weight").chunk(2)
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": remaining.pop(ours + "attention.out.weight"),
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": remaining.pop(ours + "mlp.down.weight"),
            "self_attn.q_norm": of_norm(ours + "attention.q_norm", config.head_width),
            "self_attn.k_norm": of_norm(ours + "attention.k_norm", config.head_width),
            "input_layernorm": of_norm(ours + "attention_norm", config.n_embd),
            "post_attention_layernorm": of_norm(ours + "mlp_norm", config.n_embd),
        }
        out |= {f"model.layers.{layer}.{name}.weight": part for name, part in parts.items()}
    out["model.norm.weight"] = of_norm("norm", config.n_embd)
    if not config.tie_embeddings:
        out["lm_head.weight"] = remaining.pop("head.weight")
    if remaining:
        raise TrainingError(f"Qwen3 has no weight {next(iter(remaining))!r}")
    return out


def qwen3_logits(ids: Tensor, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Logits [T, V] of ids [T], as other tools compute them from an exported model.

    It follows the Qwen3 report (arXiv:2505.09388), model.safetensors and config.json, and shares no
    code with GPT, so whatever an edit changes in GPT shows as a difference.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], config["rms_norm_eps"])

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"])

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    head_dim, activation = config["head_dim"], getattr(F, config["hidden_act"])
    frequencies = config["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(len(ids)), frequencies).repeat(1, 2)
    x = tensors["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        attn, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        y = norm(x, f"model.layers.{layer}.input_layernorm")
        q, k, v = (
            linear(y, f"{attn}{name}_proj").unflatten(-1, (-1, head_dim)).transpose(0, 1)
            for name in "qkv"
        )
        q = rotated(norm(q, attn + "q_norm"))
        k = rotated(norm(k, attn + "k_norm"))
        k = k.repeat_interleave(len(q) // len(k), dim=0)
        v = v.repeat_interleave(len(q) // len(v), dim=0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(0, 1).flatten(1), attn + "o_proj")
        y = norm(x, f"model.layers.{layer}.post_attention_layernorm")
        y = activation(linear(y, mlp + "gate_proj")) * linear(y, mlp + "up_proj")
        x = x + linear(y, mlp + "down_proj")
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return linear(norm(x, "model.norm"), head)


# Largest difference by rounding, as a fraction of the largest logit. Measured: 1e-6 in `cpu`, 2e-6
# in 12 layers of 768; the mildest edit tried (no QK-norm, 10 steps) makes 1e-2.
LOGIT_TOLERANCE = 1e-4


@torch.inference_mode()
def check_export(model: GPT, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Compares the exported model's logits with the model's own (CPU, float32).

    One window shows an edit, and all GPUs wait meanwhile. Raises TrainingError if the logits
    differ, as config.json then describes another model.
    """
    T, V = min(model.config.block_size, LONGEST_WINDOW), config["vocab_size"]
    ids = torch.arange(T) * max(1, V // T) % V
    own = model(ids[None])[0]
    difference = float((qwen3_logits(ids, tensors, config) - own).abs().max())
    if not difference <= LOGIT_TOLERANCE * float(own.abs().max()):
        raise TrainingError(f"its logits differ from Qwen3's by {difference:.2g}")


def hugging_face_config(
    config: Config, vocabulary_size: int, end: int | None = None
) -> dict[str, Any]:
    """config.json; end is the id of the end of a document.

    The window and max_window_layers=0 make transformers' cache slide like ours.
    """
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size or vocabulary_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": activation_name(),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": True,
        "sliding_window": config.block_size,
        "max_window_layers": 0,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }


EDITED = "sm-nanogpt-edited"


def write_artefact(
    directory: Path,
    model: GPT,
    tokenizer: Tokenizer,
    training: Mapping[str, Any],
    chats: bool = False,
) -> tuple[str, str]:
    """Writes the model (CPU, float32, evaluating) as a directory.

    Returns why it is not Qwen3's, and why it is not causal; each is "" if it is. The weights of
    another model, which an edited script may compute, keep their own names, and config.json has a
    `model_type` that no other tool takes for one it knows. A model that has learned from
    conversations, `chats`, gets the template that encodes them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config, values, why = model.config, dataclasses.asdict(model.config), ""
    weights: dict[str, Tensor] = model.state_dict()
    leak = "it cannot be tested whether it looks ahead"
    try:
        leak = leak_of(model, tokenizer, chats)
        tensors = to_hugging_face(weights, config)
        document = hugging_face_config(config, len(tokenizer), tokenizer.end)
        check_export(model, tensors, document)
    except TrainingError as error:
        why = str(error)
    except Exception as error:  # an edited model may have other parts, or another shape
        if is_out_of_memory(error):
            raise
        why = f"it cannot be compared: {type(error).__name__}: {error}"
    if why:
        tensors = weights
        document = {
            "model_type": EDITED,
            "why": f"not Qwen3: {why}; the script of training.json's script_sha256 computes it",
            "vocab_size": len(tokenizer),
        }
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    ends = [] if tokenizer.end is None else [tokenizer.end]
    if chats:
        ends.insert(0, tokenizer.special[END_OF_TURN])
    found = {"model_sha256": MODEL_SHA256, "causal": not leak, "leak": leak}
    documents = {
        "tokenizer.json": tokenizer.document,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.block_size,
            "eos_token": tokenizer.end_of_text,
            **({"chat_template": CHAT_TEMPLATE} if chats else {}),
        },
        "generation_config.json": {"eos_token_id": ends} if ends else {},
        "training.json": {"config": values, **found, **training},
        "config.json": document,
    }
    for name, content in documents.items():
        with replacing(directory / name) as file:
            file.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
    write_sums(directory)
    return why, leak


def sha256_sums(files: Iterable[Path]) -> str:
    """What `sha256sum` prints of the files in their folder."""
    return "".join(f"{file_sha256(file)}  {file.name}\n" for file in files)


def write_sums(directory: Path) -> None:
    """Writes SHA256SUMS over the files of a model."""
    with replacing(directory / "SHA256SUMS") as file:
        file.write(sha256_sums(directory / name for name in MODEL_FILES).encode())


def folder_sha256(folder: Path, *names: str) -> str:
    """What `sha256sum *.py | sha256sum` prints in a folder, in the C locale; or of these names."""
    files = (f for f in sorted(folder.glob("[!.]*.py")) if not names or f.name in names)
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
    live: Mapping[str, Tensor], given: Mapping[str, Tensor], source: str = "the checkpoint"
) -> None:
    """Copies the given tensors into the live ones. Raises TrainingError unless all of them fit."""
    for name in sorted(live.keys() | given.keys()):
        ours = list(live[name].shape) if name in live else "nothing"
        theirs = list(given[name].shape) if name in given else "nothing"
        if ours != theirs:
            raise TrainingError(f"{name} is {theirs} in {source} and {ours} in this script")
    for name, tensor in live.items():
        tensor.copy_(given[name])


def model_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = "model."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


# Defaults of a run that starts from a model.
FINE_TUNING: dict[str, Any] = {
    "learning_rate": 0.005,
    "embedding_learning_rate": 0.005,
    "head_learning_rate": 0.002,
    "max_steps": 500,
    "eval_tokens": 1 << 17,
}


def starting_values(directory: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a run that starts from the model in a directory.

    They are the given ones, those that the model prescribes, and FINE_TUNING. Raises ConfigError if
    a given one differs from the model's, or this script computes no such model; DataError if the
    model cannot be read.
    """
    try:
        shape, free = read_shape(directory)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{directory / 'config.json'} is of another kind: {error!r}") from None
    values = {}
    for name, value in given.items():
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
    return {**defaults, **free, **values, **shape}


def read_shape(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The hyperparameters that a model prescribes, and those that it suggests.

    Raises ConfigError if this script does not compute the model.
    """
    found = read_json(directory / "config.json")
    ours = directory / "training.json"  # config.json cannot say that norms have no weights
    training = read_json(ours) if ours.exists() else {"config": {}}
    trained = training["config"]
    free = {"mask_documents": trained.get("mask_documents", False)}
    if found.get("model_type") == EDITED:
        if (needed := training["script_sha256"]) != SCRIPT_SHA256:
            raise ConfigError(
                f"an edited script trained the initial model (SHA-256 {needed[:12]}...), which is"
                " not Qwen3's; use that script"
            )
        fields = dataclasses.fields(Config)
        return {f.name: trained[f.name] for f in fields if f.metadata["shape"]}, free
    rope = found.get("rope_scaling") or found.get("rope_parameters") or {}
    found = {"model_type": None, "rope_type": rope.get("type", "default"), **rope, **found}
    computed = {
        "model_type": "qwen3",
        "hidden_act": activation_name(),
        "rms_norm_eps": NORM_EPS,
        "attention_bias": False,
        "quantization_config": None,
        "rope_type": "default",
    }
    for name, value in computed.items():
        if found.get(name, value) != value:
            raise ConfigError(
                f"the initial model has {name}={found[name]!r}; this script computes only"
                f" {value!r} (if an edited script trained the model, use that script)"
            )
    shape = {
        "n_layer": found["num_hidden_layers"],
        "n_head": found["num_attention_heads"],
        "n_kv_head": found["num_key_value_heads"],
        "head_dim": found["head_dim"],
        "n_embd": found["hidden_size"],
        "n_hidden": found["intermediate_size"],
        "tie_embeddings": found["tie_word_embeddings"],
        "norm_weights": trained.get("norm_weights", not trained),
        "rope_theta": found["rope_theta"],
        "vocab_size": found["vocab_size"],
    }
    longest = positions(found, "max_position_embeddings")
    if found.get("use_sliding_window") and found.get("sliding_window"):
        longest = min(longest, positions(found, "sliding_window"))
    return shape, {"block_size": min(longest, 1024), **free}


def positions(document: Mapping[str, Any], name: str) -> int:
    """A number of positions in config.json. Raises ConfigError unless it is a whole one, over 0."""
    value = document[name]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 1 <= value < math.inf or value != int(value):
        raise ConfigError(f"config.json: {name}={value!r}: must be a whole number, at least 1")
    return int(value)


def check_teacher(values: Mapping[str, Any], block_size: int) -> None:
    """Raise ConfigError if the context of a model with these starting_values is too short."""
    if (context := values["block_size"]) < min(block_size, 1024):  # starting_values gives no more
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
    index, files = directory / "model.safetensors.index.json", {"model.safetensors"}
    try:
        if index.exists():
            files = {Path(name).name for name in read_json(index)["weight_map"].values()}
        for name in sorted(files):
            tensors |= read_safetensors(directory / name, largest=1 << 24, mapped=True)[0]
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"the weights in {directory} cannot be read: {error}") from None
    if not is_edited(directory):  # whose buffers may hold anything
        check_values(directory, tensors)
    return tensors


def load_pretrained(model: GPT, directory: Path) -> None:
    """Reads the weights of the model in a directory, which may be in several files, of any type.

    A meta model is given memory, on the CPU, only after all shapes have been checked. Raises
    TrainingError if they do not, DataError or FormatError if a file is missing or damaged, or holds
    other values than finite numbers.
    """
    tensors = read_weights(directory)
    if model.head is None:  # published files may hold the tied head too
        tensors.pop("lm_head.weight", None)
    edited = is_edited(directory)

    def fill() -> None:
        weights: dict[str, Tensor] = model.state_dict()
        live = weights if edited else to_hugging_face(weights, model.config)
        load_tensors(live, tensors, "the model")

    fill()
    if any(weight.is_meta for weight in model.parameters()):
        # `Module.to_empty` does the same, but imports SymPy, which takes two seconds.
        shaped = model.state_dict()
        memory = {name: torch.empty(w.shape, dtype=w.dtype) for name, w in shaped.items()}
        model.load_state_dict(memory, assign=True)
        fill()
