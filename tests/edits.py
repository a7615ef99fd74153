"""Edits of the training folder that a user may make, as (old, new) pieces of its files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sm_nanogpt.launcher.source import Source

HEAD = "logits = F.linear(x, head.weight.to(x.dtype)).float()"
BLOCKS = "        self.blocks = "
FIELD = "    dropout: float = hyperparameter("
EDITS: dict[str, list[tuple[str, str]]] = {
    "activation": [("self.activation(gate) * up", "F.relu(gate) ** 2 * up")],
    "no QK-norm": [("        qk = norm(qk)\n", "")],
    "learned positions": [  # which change as the context slides
        ("rotate(qk, cos, sin)", "qk"),
        (
            BLOCKS,
            f"        self.positions = nn.Embedding(config.block_size, config.n_embd)\n{BLOCKS}",
        ),
        (
            "x = self.embed(idx).to(self.compute_dtype)",
            "x = self.embed(idx) + self.positions.weight[: idx.size(1)]\n"
            "        x = x.to(self.compute_dtype)",
        ),
    ],
    "buffers": [
        (
            BLOCKS,
            '        self.register_buffer("hot", torch.ones(()))\n'
            f'        self.register_buffer("mask", torch.full((9,), -torch.inf))\n{BLOCKS}',
        ),
        (
            HEAD,
            "if self.training:\n            self.hot *= 1.02\n"
            f"        {HEAD}\n        logits = logits * self.hot",
        ),
    ],
    "hyperparameter": [
        (FIELD, f'    softcap: float = hyperparameter(2.0, "of logits", shape=True)\n{FIELD}'),
        (
            HEAD,
            f"{HEAD}\n        c = self.config.softcap\n        logits = c * (logits / c).tanh()",
        ),
    ],
    "more weights": [  # last: it overwrites lines that the edits above look for
        ("n_out * n_fused, bias=False)", "n_out * n_fused, bias=True)"),
        (
            "F.linear(x, self.weight.to(x.dtype))\n",
            "F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))\n",
        ),
        (HEAD, "logits = head(x).float()"),
        (BLOCKS, f"        self.final_norm = nn.LayerNorm(config.n_embd)\n{BLOCKS}"),
        ("x = norm(x, self.norm)", "x = self.final_norm(x.float()).to(x.dtype)"),
    ],
}


def module_of(folder: Path) -> SimpleNamespace:
    """What the files of a training folder define, together."""
    source = Source.read(folder)
    definitions: dict[str, Any] = {}
    for name in ("errors", "config", "text", "model", "huggingface"):
        definitions |= vars(source.module(name))
    return SimpleNamespace(**{k: v for k, v in definitions.items() if not k.startswith("__")})
