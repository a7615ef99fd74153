"""Our model as Qwen3 (arXiv:2505.09388): its names of the weights, its config.json, its logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .causality import LONGEST_WINDOW
from .config import Config
from .errors import TrainingError
from .kernels import NORM_EPS
from .model import GPT, activation_name


def qwen3_weights(weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The weights by Qwen3's names, as views: fused matrices cut apart, absent norms as ones.

    Raises TrainingError if Qwen3 lacks one of the weights, KeyError if it has one that is not here.
    """
    remaining = dict(weights)

    def take_norm(name: str, n: int) -> Tensor:
        return remaining.pop(name) if config.norm_weights else torch.ones(n)

    q_width = config.n_head * config.head_width
    kv_width = config.kv_heads * config.head_width
    tensors = {"model.embed_tokens.weight": remaining.pop("embed.weight")}
    for layer in range(config.n_layer):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        qkv = remaining.pop(ours + "attention.qkv.weight")
        q, k, v = qkv.split((q_width, kv_width, kv_width))
        gate, up = remaining.pop(ours + "mlp.gate_up.weight").chunk(2)
        out = remaining.pop(ours + "attention.out.weight")
        down = remaining.pop(ours + "mlp.down.weight")
        q_norm = take_norm(ours + "attention.q_norm", config.head_width)
        k_norm = take_norm(ours + "attention.k_norm", config.head_width)
        attention_norm = take_norm(ours + "attention_norm", config.n_embd)
        mlp_norm = take_norm(ours + "mlp_norm", config.n_embd)
        tensors[theirs + "self_attn.q_proj.weight"] = q
        tensors[theirs + "self_attn.k_proj.weight"] = k
        tensors[theirs + "self_attn.v_proj.weight"] = v
        tensors[theirs + "self_attn.o_proj.weight"] = out
        tensors[theirs + "mlp.gate_proj.weight"] = gate
        tensors[theirs + "mlp.up_proj.weight"] = up
        tensors[theirs + "mlp.down_proj.weight"] = down
        tensors[theirs + "self_attn.q_norm.weight"] = q_norm
        tensors[theirs + "self_attn.k_norm.weight"] = k_norm
        tensors[theirs + "input_layernorm.weight"] = attention_norm
        tensors[theirs + "post_attention_layernorm.weight"] = mlp_norm
    tensors["model.norm.weight"] = take_norm("norm", config.n_embd)
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = remaining.pop("head.weight")
    if remaining:
        raise TrainingError(f"Qwen3 has no weight {next(iter(remaining))!r}")
    return tensors


def qwen3_logits(ids: Tensor, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Logits [T, V] of ids [T], as other tools compute them from an exported model.

    It follows the Qwen3 report, model.safetensors and config.json, and shares no code with GPT, so
    whatever an edit changes in GPT shows as a difference.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], config["rms_norm_eps"])

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"])

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    def heads(x: Tensor, name: str) -> Tensor:  # [n, T, head_dim]
        return linear(x, name).unflatten(-1, (-1, head_dim)).transpose(0, 1)

    head_dim = config["head_dim"]
    activation = getattr(F, config["hidden_act"])
    frequencies = config["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(len(ids)), frequencies).repeat(1, 2)  # [T, head_dim]

    x = tensors["model.embed_tokens.weight"][ids]  # [T, hidden_size]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        y = norm(x, prefix + "input_layernorm")
        q = heads(y, prefix + "self_attn.q_proj")
        k = heads(y, prefix + "self_attn.k_proj")
        v = heads(y, prefix + "self_attn.v_proj")
        q = rotated(norm(q, prefix + "self_attn.q_norm"))
        k = rotated(norm(k, prefix + "self_attn.k_norm"))
        k = k.repeat_interleave(len(q) // len(k), dim=0)
        v = v.repeat_interleave(len(q) // len(v), dim=0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(0, 1).flatten(1), prefix + "self_attn.o_proj")

        y = norm(x, prefix + "post_attention_layernorm")
        gate = activation(linear(y, prefix + "mlp.gate_proj"))
        up = linear(y, prefix + "mlp.up_proj")
        x = x + linear(gate * up, prefix + "mlp.down_proj")
    x = norm(x, "model.norm")
    return linear(x, "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head")


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
    logits = model(ids[None])[0]
    difference = float((qwen3_logits(ids, tensors, config) - logits).abs().max())
    if not difference <= LOGIT_TOLERANCE * float(logits.abs().max()):  # NaN differs
        raise TrainingError(f"its logits differ from Qwen3's by {difference:.2g}")


def qwen3_config(config: Config, vocabulary_size: int, end: int | None = None) -> dict[str, Any]:
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
