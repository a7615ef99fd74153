"""Copy a model with other weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sm_nanogpt.entry_point.model import GPT


def copy_with_weights(
    model: GPT, weights: Mapping[str, Tensor], compute_dtype: torch.dtype = torch.float32
) -> GPT:
    """Make a model of the same shape that computes with these weights, which are by name.

    The copy shares their memory. Raises RuntimeError if a weight is missing or does not fit.
    """
    with torch.device("meta"):  # takes no memory for weights
        copy = GPT(model.config, model.embed.num_embeddings, compute_dtype)
    copy.load_state_dict(weights, assign=True)
    return copy.eval()
