"""Hyperparameters by the size of a model and the length of its text. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

MOST_READINGS = 16  # of a text, as in `baby`: more of them are worth little


def size_of_model(size: float) -> tuple[int, int, int]:
    """Layers, heads and width of a size, which is the width / 64: 3 is as wide as `laptop`, 6 as
    `baby`, 8 as `small`, 12 as `gpt2`."""
    # In few seconds two layers learn more; from 6 on, depth and width grow alike.
    layers = round(max(size, 2 + 2 * size / 3)) if size >= 0.75 else 2
    # Two heads of 40 are 0.02 nats better than one of 80, and two of 64 better than four of 32.
    heads = max(2, round(size)) if size < 5 else math.ceil(size / 2)
    return layers, heads, 8 * heads * max(1, round(8 * size / heads))


def tokens_worth_training(size: float) -> int:
    """The tokens that a model of a size is worth, however short the text is.

    Two for each parameter as in `cpu` and `laptop`, ten in `small`, 27 in `gpt2`
    (arXiv:2203.15556 says 20).
    """
    layers, _, width = size_of_model(size)
    parameters = layers * width * (4 * width + 24 * round(width / 3))
    return round(parameters * min(28, 1.8 + (size / 3.55) ** 2.65))


def hyperparameters_for_size(
    size: float, tokens: int, chats: bool = False, ranks: int = 1
) -> dict[str, Any]:
    """The hyperparameters of a size for a text of so many tokens to train on.

    chats: it is of conversations. ranks: how many share a batch. docs/sizes.md has what was
    measured behind each formula.
    """
    layers, heads, width = size_of_model(size)
    # It doubles from size to size: a better model makes use of more.
    context = min(1024, max(64, 64 * round(4 * 2 ** (size - 1))))
    context = min(context, max(16, tokens // 12 // 8 * 8))  # the validation text has to fill one
    context = 1024 if chats else context  # a conversation has to fit, and its row may be padded
    rows = (600 * size + 5 * size**4.4) / context
    # Few rows are rounded down: a short text gains more by more steps than by larger ones.
    batch = max(1, int(rows)) if rows < 4 else 2 ** round(math.log2(rows))
    batch = math.ceil(batch / ranks) * ranks
    steps = max(
        20, round(min(tokens_worth_training(size), MOST_READINGS * tokens) / (batch * context))
    )
    trained = steps * batch * context
    readings = trained / tokens
    # One for each reading shows where a model begins to memorize, and that one before it is kept.
    evaluations = min(10, max(1, round(trained / 1e6), round(readings)))
    return {
        "n_layer": layers,
        "n_head": heads,
        "n_embd": width,
        "tie_embeddings": size >= 7,
        "block_size": context,
        "batch_size": batch,
        "max_steps": steps,
        **optimizer_values(size, steps, readings),
        # Small models lose by it, even after many readings.
        "dropout": round(0.2 * clip((size - 4) / 2) * clip((readings - 8) / 8), 2),
        "short_windows": 0.0 if chats else 0.5,
        "eval_interval": math.ceil(steps / evaluations),
        "eval_tokens": 1 << 17,
    }


def optimizer_values(size: float, steps: int, readings: float) -> dict[str, float]:
    """The optimizer's hyperparameters for so many steps, which read the text so often."""
    # 0.05 for 180 steps as in `quick`, 0.03 for 1000 as in `baby`.
    rate = min(0.05, max(0.02, 0.024 * (2000 / steps) ** 0.3))
    # By how many factors of e the weights decay in all: one for each reading after the first, and
    # up to ten more in large models.
    decay = max(0, readings - 1) + 10 * clip((size - 3) / 5)
    return {
        "learning_rate": round(rate, 4),
        "momentum": round(min(0.95, 0.9 + 0.05 * math.log10(steps / 1800)), 3),
        "weight_decay": round(min(1, decay / (rate * steps)), 3),
    }


def clip(value: float) -> float:
    return min(1.0, max(0.0, value))
