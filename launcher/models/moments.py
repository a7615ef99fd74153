"""Read the moments of a model: its weights at earlier steps, which its training run kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sm_nanogpt.entry_point.errors import TrainingError
from sm_nanogpt.entry_point.files import read_json
from sm_nanogpt.entry_point.huggingface import check_shapes, check_values
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.moments import DIRECTORY, FILES, generation_start
from sm_nanogpt.entry_point.safetensors_file import read_safetensors
from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.models.load import is_edited
from sm_nanogpt.launcher.models.weights import copy_with_weights

MAX_HEADER = 1 << 24  # bytes
T = TypeVar("T")


@dataclass(frozen=True)
class Moment:
    """A model as it was after so many steps of its generation.

    generation is counted from 1; None if the run trains only one generation.
    """

    step: int
    model: GPT
    generation: int | None = None


def read_moments(directory: Path, model: GPT) -> list[Moment]:
    """Read the moments of the generation of a model that its run kept; the last is the model.

    Returns [] if the run kept none, or if an edited folder computes the model. Raises ServiceError
    if a file is damaged or of another model.
    """
    paths = sorted((directory / DIRECTORY).glob(FILES))
    if not paths or is_edited(model):
        return []
    moments = []
    try:
        training = read_json(directory / "training.json")
        last_step = int(training["step"])
        first_step, generation = generation_of(last_step, training.get("config", {}))
        for path in paths:
            step = step_of(path) - first_step
            moments.append(Moment(step, read_moment(path, model), generation))
    except (TrainingError, KeyError, TypeError, ValueError, OSError) as error:
        raise ServiceError(f"{directory / DIRECTORY} does not load: {error}") from None
    return [*moments, Moment(last_step - first_step, model, generation)]


def generation_of(step: int, config: Mapping[str, Any]) -> tuple[int, int | None]:
    """The number of steps before the generation of a step, and the number of the generation.

    Generations count from 1. Returns 0 and None if the run trains only one. config: the
    hyperparameters of the run.
    """
    if config.get("generations", 1) == 1:
        return 0, None
    max_steps = config["max_steps"]
    first_step = generation_start(step, max_steps)
    return first_step, first_step // max_steps + 1


def step_of(path: Path) -> int:
    """The step of the file of a moment, such as step-00000100.safetensors."""
    return int(path.stem.rpartition("-")[2])


def read_moment(path: Path, model: GPT) -> GPT:
    """Read a model with the shape of `model` and the weights in a file."""
    tensors, _ = read_safetensors(path, sealed=True, largest=MAX_HEADER)
    check_shapes(model.state_dict(), tensors, path.name)
    check_values(path, tensors)
    return copy_with_weights(model, {name: tensor.float() for name, tensor in tensors.items()})


def evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """Choose up to `count` items at equal distances, with the first and the last."""
    if count >= len(items):
        return list(items)
    if count <= 1:
        return [items[-1]]
    last = len(items) - 1
    return [items[round(i * last / (count - 1))] for i in range(count)]
