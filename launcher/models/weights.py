"""A model with other weights than it was made with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sm_nanogpt.entry_point.model import GPT


def copy_with_weights(
    model: GPT, weights: Mapping[str, Tensor], compute_dtype: torch.dtype = torch.float32
) -> GPT:
    """A model of the same shape that computes with these weights, by their names.

    It shares their memory. Raises RuntimeError unless all of them fit.
    """
    with torch.device("meta"):  # takes no memory for weights of its own
        copy = GPT(model.config, model.embed.num_embeddings, compute_dtype)
    copy.load_state_dict(weights, assign=True)
    return copy.eval()
