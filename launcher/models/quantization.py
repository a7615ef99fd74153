"""Weights in few bits: whole numbers in groups, each group with a scale of its own.

A matrix is cut into groups of GROUP weights in the order of its rows. A weight is its group's scale
times a whole number of `bits` bits, as in the Q formats of llama.cpp. Weights of norms, which are
few, stay float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.launcher.models.weights import copy_with_weights

GROUP = 32  # weights of one scale
BITS = (4, 5, 6, 7, 8)
HEAD_BITS = 2  # more for the matrix whose errors stand in the logits, as no later layer mends them
# Factors on the scale with which the largest weight of a group would just fit: a smaller scale cuts
# the largest weights, and is finer for all others.
SHRINKAGE = torch.linspace(0.7, 1.0, 16)


@dataclass(frozen=True)
class Quantized:
    """A matrix: codes, int8 [groups, GROUP], and scales, float16 [groups]; the last group has
    zeros at its end where the matrix has no more weights."""

    codes: Tensor
    scales: Tensor
    shape: torch.Size

    def dequantize(self) -> Tensor:
        """The weights, float32, in the shape of the matrix."""
        weights = self.codes.float() * self.scales.float()[:, None]
        return weights.flatten()[: self.shape.numel()].view(self.shape)


def quantize(matrix: Tensor, bits: int) -> Quantized:
    """The codes and scales of a matrix that lose least: of several scales for each group, the one
    with the smallest sum of squared errors."""
    largest_code = 2 ** (bits - 1) - 1
    n_missing = -matrix.numel() % GROUP
    groups = torch.nn.functional.pad(matrix.detach().float().flatten(), (0, n_missing))
    groups = groups.view(-1, GROUP)
    fitting_scales = groups.abs().amax(dim=1) / largest_code

    best_errors = torch.full_like(fitting_scales, float("inf"))
    best_scales = torch.zeros_like(fitting_scales, dtype=torch.float16)
    for factor in SHRINKAGE:
        scales = (fitting_scales * factor).half()
        codes = encode(groups, scales, largest_code)
        errors = (codes * scales.float()[:, None] - groups).square().sum(dim=1)
        is_better = errors < best_errors
        best_errors = torch.where(is_better, errors, best_errors)
        best_scales = torch.where(is_better, scales, best_scales)
    codes = encode(groups, best_scales, largest_code).to(torch.int8)
    return Quantized(codes, best_scales, matrix.shape)


def encode(groups: Tensor, scales: Tensor, largest_code: int) -> Tensor:
    """The codes of groups [n, GROUP] with these scales, float16 [n], as float32."""
    divisors = scales.float().clamp_min(1e-20)[:, None]
    return (groups / divisors).round().clamp(-largest_code, largest_code)


def quantize_model(model: GPT, bits: int) -> dict[str, Quantized | Tensor]:
    """Each parameter by its name: matrices quantized, weights of norms as they are.

    The head has HEAD_BITS more than the others, up to 8.
    """
    head = "embed.weight" if model.head is None else "head.weight"
    parameters: dict[str, Quantized | Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameters[name] = parameter.detach().float()
        else:
            more_bits = HEAD_BITS if name == head else 0
            parameters[name] = quantize(parameter, min(bits + more_bits, max(BITS)))
    return parameters


def with_quantized_weights(model: GPT, parameters: Mapping[str, Quantized | Tensor]) -> GPT:
    """A copy of the model that computes with the quantized weights, in float32."""
    weights = {}
    for name, parameter in parameters.items():
        weights[name] = parameter.dequantize() if isinstance(parameter, Quantized) else parameter
    return copy_with_weights(model, weights)
