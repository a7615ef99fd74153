"""Weights in few bits."""

from __future__ import annotations

import torch
from models import lively

from sm_nanogpt.launcher.models.quantization import quantize_model, with_quantized_weights


def test_no_weight_of_eight_bits_is_off_by_a_hundredth():
    """The head has more bits than the others, up to 8, which is all that int8 holds."""
    model = lively()
    rounded = with_quantized_weights(model, quantize_model(model, 8))
    for weight, approximation in zip(model.parameters(), rounded.parameters(), strict=True):
        largest = float(weight.detach().abs().max())
        torch.testing.assert_close(approximation, weight, atol=largest / 100, rtol=0)
