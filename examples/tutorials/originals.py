"""Show by numbers what is wrong in the tutorials that this project grew out of.

    python examples/tutorials/originals.py

It takes seconds on a CPU. README.md beside it explains each fault.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from pydoc_data.topics import topics  # Python's language reference, which every Python has

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

TEXT = "".join(topics.values())[:60_000]
TOKENS = torch.tensor([ord(character) for character in TEXT]).clamp_max(127)
TRAINING, HELD_OUT = TOKENS[:10_000], TOKENS[10_000:]
SEEN = 8  # characters of context


def windows(tokens: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs [count, SEEN] and targets [count] from random places."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - SEEN, (count,), generator=generator)
    return tokens[starts[:, None] + torch.arange(SEEN)], tokens[starts + SEEN]


def loss_of(model: nn.Module, tokens: Tensor, count: int, seed: int) -> Tensor:
    inputs, targets = windows(tokens, count, seed)
    return F.cross_entropy(model(inputs), targets)


@cache
def trained(steps: int, batch_size: int) -> nn.Module:
    """A model after some steps of AdamW on TRAINING, at a constant learning rate."""
    torch.manual_seed(0)
    inner = nn.Linear(24 * SEEN, 256), nn.GELU(), nn.Linear(256, 128)
    model = nn.Sequential(nn.Embedding(128, 24), nn.Flatten(), *inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, TRAINING, batch_size, step).backward()
        optimizer.step()
    return model.requires_grad_(False)


def attention_scale() -> dict[str, float]:
    """a. Entropy of attention, in nats: scores times 64**-0.5, as heads are 64 wide; times C**-0.5,
    where the embedding is C = 384 wide; and times C**-0.05."""
    torch.manual_seed(0)
    q, k = torch.randn(1000, 64), torch.randn(256, 64)
    figures = {}
    for name, scale in (("head**-0.5", 64**-0.5), ("C**-0.5", 384**-0.5), ("C**-0.05", 384**-0.05)):
        weights = (q @ k.mT * scale).softmax(dim=-1)
        figures[name] = float(torch.special.entr(weights).sum(dim=-1).mean())
    return figures


def validation_on_training_text() -> dict[str, float]:
    """b. Loss of one model on the text that it was trained on, and on other text."""
    model = trained(600, 64)
    return {
        "training text": float(loss_of(model, TRAINING, 4096, seed=0)),
        "other text": float(loss_of(model, HELD_OUT, 4096, seed=0)),
    }


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def residual_replaced_by_norm() -> dict[str, float]:
    """c. After 12 layers of x + attn(norm(x)), or of x = norm(x); x = x + attn(x): how long the
    rows of x are, and the cosine between them and the input. What attn adds has length 1."""

    def attn(x: Tensor, weights: Tensor) -> Tensor:
        q, k, v = x @ weights
        return norm(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    torch.manual_seed(0)
    start = norm(torch.randn(8, 32, 64))
    added = replaced = start
    for weights in torch.randn(12, 3, 1, 64, 64) / 8:
        added = added + attn(norm(added), weights)
        replaced = norm(replaced)
        replaced = replaced + attn(replaced, weights)
    figures = {}
    for name, x in (("added", added), ("replaced", replaced)):
        figures[f"{name}: length"] = float(x.square().mean().sqrt())
        figures[f"{name}: cosine"] = float(F.cosine_similarity(start, x, dim=-1).mean())
    return figures


def keys_at_queries() -> dict[str, float]:
    """d. Causal attention by k @ q.mT: how much an earlier output changes with the last token; its
    distance from q @ k.mT; and its distance from a query with cached keys."""

    def swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.full((len(q), len(q)), float("-inf")).triu(1)
        return (k @ q.mT * q.size(-1) ** -0.5 + mask).softmax(dim=-1) @ v

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 32, 64)
    edited = torch.stack((q, k, v))
    edited[:, -1:] = torch.randn(3, 1, 64)  # the last token is another one
    outputs = swapped(q, k, v)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    cached = F.scaled_dot_product_attention(q[-1:], k, v)
    return {
        "leak": float((swapped(*edited) - outputs)[:-1].abs().max()),
        "to q @ k": float((outputs - right).abs().max()),
        "to cached keys": float((outputs[-1:] - cached).abs().max()),
    }


def rank_of_the_host() -> dict[str, float]:
    """e. Different samples that 4 processes on 2 hosts draw, 8 each, with either rank as seed."""
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    figures = {}
    for name, ranks in (("rank of the process", (0, 1, 2, 3)), ("of the host", (0, 0, 1, 1))):
        drawn = torch.cat([order[8 * rank : 8 * rank + 8] for rank in ranks])
        figures[name] = float(len(drawn.unique()))
    return figures


def own_batches() -> dict[str, float]:
    """f. The losses that 4 ranks measure for one model, each on 64 windows of its own; and the
    loss after as many samples, with one process, and with two that each use a whole batch."""
    model = trained(600, 64)
    losses = [float(loss_of(model, HELD_OUT, 64, seed=rank)) for rank in range(4)]
    return {
        "least": min(losses),
        "most": max(losses),
        "one process": float(loss_of(trained(160, 32), HELD_OUT, 4096, seed=0)),
        "two": float(loss_of(trained(80, 64), HELD_OUT, 4096, seed=0)),
    }


def dropout_lost() -> dict[str, float]:
    """g. The part of the attention weights that a dropout of 0.2 sets to zero in training."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 8, 64, 64)
    v = torch.eye(64).expand(8, 64, 64)  # the output is then the weights themselves
    figures = {}
    for name, p in (("with dropout_p", 0.2), ("without", 0.0)):
        weights = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        visible = weights[:, *torch.tril_indices(64, 64)]
        figures[name] = float((visible == 0).float().mean())
    return figures


def misspelled_option() -> dict[str, float]:
    """h. Settings that the SageMaker SDK sends for `enabled` and for `enable`, to start a rank for
    each GPU. Without them, train.py starts once on each host."""
    os.environ["SAGEMAKER_SUPPRESS_V2_WARNING"] = "1"
    logging.getLogger("sagemaker.config").setLevel(logging.WARNING)
    from sagemaker.pytorch import PyTorch

    estimator = PyTorch.__new__(PyTorch)  # the constructor would ask AWS
    estimator.instance_type = "ml.g5.12xlarge"
    figures = {}
    for option in ("enabled", "enable"):
        distribution = {"pytorchddp": {option: True}}
        figures[option] = float(len(estimator._pytorch_distribution_configuration(distribution)))
    return figures


FAULTS = {
    "scale of attention: entropy": attention_scale,
    "validation on the training text: loss": validation_on_training_text,
    "residual replaced by its norm": residual_replaced_by_norm,
    "k @ q for q @ k: differences": keys_at_queries,
    "rank of the host alone: different samples": rank_of_the_host,
    "batches of each rank's own: loss": own_batches,
    "dropout lost: weights dropped": dropout_lost,
    "misspelled option: settings sent": misspelled_option,
}


def main() -> None:
    torch.set_num_threads(1)  # the tensors are too small to share
    for fault, show in FAULTS.items():
        numbers = ", ".join(f"{name} {value:.3g}" for name, value in show().items())
        print(f"{fault:<41} | {numbers}")


if __name__ == "__main__":
    main()
