"""Tensors of all types and shapes, and what makes two sets of them the same."""

from __future__ import annotations

import torch

TENSORS = {
    "f32": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)),
    "bf16": torch.randn(7, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "f16": torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(3)).half(),
    "i64": torch.tensor([-(2**62), 0, 2**62]),
    "i32": torch.tensor([[1], [-1]], dtype=torch.int32),
    "i16": torch.tensor([-1], dtype=torch.int16),
    "i8": torch.tensor([-1], dtype=torch.int8),
    "c64": torch.tensor([1 - 2j]),
    "u8": torch.arange(255, dtype=torch.uint8),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(6.0).view(2, 3).T,
}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert tensor.shape == other[name].shape, name
        assert torch.equal(tensor, other[name]), name
