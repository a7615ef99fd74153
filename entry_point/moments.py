"""Moments: copies of the weights from the first step on, which show how a model has learned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from .config import Config
from .safetensors_file import write_safetensors

# A model with more parameters keeps no moments, as their files would be too large.
MAX_PARAMETERS = 5_000_000
DIRECTORY = "moments"  # in that of a model
FILES = "step-*.safetensors"
PART = "moment"  # of their names in a checkpoint


def moment_steps(n_moments: int, n_steps: int) -> list[int]:
    """The steps of these moments but the last, which is `n_steps`: the first is 0.

    They lie closer at the beginning, where what a model writes changes most: a moment at half of
    the moments is at an eighth of the steps, as one at a third is at a 27th.
    """
    steps: list[int] = []
    for i in range(n_moments - 1):
        step = round(n_steps * (i / (n_moments - 1)) ** 3)
        earliest = steps[-1] + 1 if steps else 0
        steps.append(max(step, earliest))
    return [step for step in steps if step < n_steps]


class Moments:
    """The copies of one run, in bfloat16, by their step; rank 0 alone has them.

    Checkpoints hold them too, so a resumed run ends with those of one that never stopped.
    """

    def __init__(self, config: Config, n_parameters: int) -> None:
        self.is_too_large = config.moments > 1 and n_parameters > MAX_PARAMETERS
        self.max_steps = config.max_steps
        n_moments = 0 if self.is_too_large else config.moments
        self.steps = frozenset(moment_steps(n_moments, config.max_steps))  # of a generation
        self.weights: dict[int, dict[str, Tensor]] = {}

    def keep(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Copies the weights that a run has after so many steps, if they are a moment's."""
        if step % self.max_steps in self.steps:
            self.weights[step] = {name: as_bfloat16(tensor) for name, tensor in weights.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Each of them under its name in a checkpoint."""
        tensors = {}
        for step, weights in self.weights.items():
            for name, tensor in weights.items():
                tensors[f"{PART}.{step}.{name}"] = tensor
        return tensors


def as_bfloat16(tensor: Tensor) -> Tensor:
    """A copy on the CPU; what an edited model has besides floating-point numbers stays as it is."""
    dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True)


def pop_moments(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Removes the moments from the tensors of a checkpoint; returns their weights by step."""
    moments: dict[int, dict[str, Tensor]] = {}
    for name in [name for name in tensors if name.startswith(f"{PART}.")]:
        _, step, name_in_model = name.split(".", 2)
        moments.setdefault(int(step), {})[name_in_model] = tensors.pop(name)
    return moments


def generation_start(step: int, max_steps: int) -> int:
    """The number of steps before the generation to which a step belongs."""
    return (step - 1) // max_steps * max_steps


def earlier_moments(
    moments: Mapping[int, dict[str, Tensor]], step: int, max_steps: int
) -> dict[int, dict[str, Tensor]]:
    """The moments before a step, of its generation alone, by step."""
    first = generation_start(step, max_steps)
    return {earlier: moments[earlier] for earlier in sorted(moments) if first <= earlier < step}


def write_moments(model_dir: Path, moments: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Writes each as a file below the directory of its model, in place of those that are there."""
    directory = model_dir / DIRECTORY
    for path in directory.glob(FILES):
        path.unlink()
    if not moments:
        return
    directory.mkdir(parents=True, exist_ok=True)
    for step, weights in moments.items():
        metadata = {"format": "pt", "step": str(step)}
        write_safetensors(directory / f"step-{step:08d}.safetensors", weights, metadata)
