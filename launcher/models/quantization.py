"""Quantize weights: store them in few bits, in groups that each have a scale.

A matrix is cut into groups of GROUP weights, row after row. A weight is the scale of its group
times a whole number of `bits` bits, as in the Q formats of llama.cpp. The weights of norms are few,
and stay float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.launcher.models.weights import copy_with_weights

GROUP = 32  # weights that share a scale
BIT_WIDTHS = (4, 5, 6, 7, 8)
HEAD_BITS = 2  # additional bits of the head, whose errors no later layer corrects
# Factors of the scale with which the largest weight of a group just fits. A smaller scale cuts the
# largest weights, and is finer for all others.
SCALE_FACTORS = torch.linspace(0.7, 1.0, 16)


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix: codes, int8 [groups, GROUP], and scales, float16 [groups].

    The last group is filled up with zeros.
    """

    codes: Tensor
    scales: Tensor
    shape: torch.Size

    def dequantize(self) -> Tensor:
        """The weights, float32, in the shape of the matrix."""
        weights = self.codes.float() * self.scales.float()[:, None]
        return weights.flatten()[: self.shape.numel()].view(self.shape)


def quantize(matrix: Tensor, bits: int) -> Quantized:
    """Quantize a matrix. Each group gets the scale, of several, with the smallest sum of squared
    errors."""
    largest_code = 2 ** (bits - 1) - 1
    n_missing = -matrix.numel() % GROUP
    groups = torch.nn.functional.pad(matrix.detach().float().flatten(), (0, n_missing))
    groups = groups.view(-1, GROUP)
    fitting_scales = groups.abs().amax(dim=1) / largest_code

    best_errors = torch.full_like(fitting_scales, float("inf"))
    best_scales = torch.zeros_like(fitting_scales, dtype=torch.float16)
    for factor in SCALE_FACTORS:
        scales = (fitting_scales * factor).half()
        codes = codes_of(groups, scales, largest_code)
        errors = (codes * scales.float()[:, None] - groups).square().sum(dim=1)
        is_better = errors < best_errors
        best_errors = torch.where(is_better, errors, best_errors)
        best_scales = torch.where(is_better, scales, best_scales)
    codes = codes_of(groups, best_scales, largest_code).to(torch.int8)
    return Quantized(codes, best_scales, matrix.shape)


def codes_of(groups: Tensor, scales: Tensor, largest_code: int) -> Tensor:
    """The codes, as float32, of groups [n, GROUP] with these scales, float16 [n]."""
    divisors = scales.float().clamp_min(1e-20)[:, None]
    return (groups / divisors).round().clamp(-largest_code, largest_code)


def quantize_model(model: GPT, bits: int) -> dict[str, Quantized | Tensor]:
    """Quantize the matrices of a model; return all parameters by name.

    The weights of norms stay as they are. The head has HEAD_BITS more than the other matrices, up
    to 8 in total.
    """
    head = "embed.weight" if model.head is None else "head.weight"
    parameters: dict[str, Quantized | Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameters[name] = parameter.detach().float()
        else:
            extra_bits = HEAD_BITS if name == head else 0
            parameters[name] = quantize(parameter, min(bits + extra_bits, max(BIT_WIDTHS)))
    return parameters


def with_quantized_weights(model: GPT, parameters: Mapping[str, Quantized | Tensor]) -> GPT:
    """A copy of the model that computes with the quantized weights, in float32."""
    weights = {}
    for name, parameter in parameters.items():
        weights[name] = parameter.dequantize() if isinstance(parameter, Quantized) else parameter
    return copy_with_weights(model, weights)
