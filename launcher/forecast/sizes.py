"""The runs of each size on a text: their hyperparameters, and their operations."""

from __future__ import annotations

from typing import Any

from sm_nanogpt.launcher.forecast.law import CompleteRun
from sm_nanogpt.launcher.source import Source


class Sizes:
    """The runs of each size on a text, by the rules of a training folder.

    n_tokens is the length of the text, and vocabulary_size the number of tokens of its tokenizer.
    Methods that take n_tokens are about a part of the text with this length; by default, about the
    whole text.
    """

    def __init__(self, training_folder: Source, n_tokens: int, vocabulary_size: int) -> None:
        self.training_folder = training_folder
        self.n_tokens = n_tokens
        self.vocabulary_size = vocabulary_size

    def hyperparameters(self, size: float, n_tokens: int | None = None) -> dict[str, Any]:
        """The hyperparameters of a run of a size."""
        sizes = self.training_folder.module("sizes")
        with self.training_folder.user_errors():
            return dict(sizes.hyperparameters_for_size(size, n_tokens or self.n_tokens))

    def config(self, size: float, n_tokens: int | None = None) -> Any:
        """The Config of a run of a size, by the training folder."""
        config_class = self.training_folder.module("config").Config
        values = self.hyperparameters(size, n_tokens)
        with self.training_folder.user_errors():
            return config_class(**values)

    def run(self, size: float, n_tokens: int | None = None) -> CompleteRun:
        """A run of a size, whose loss is not known."""
        config = self.config(size, n_tokens)
        trained_on = config.max_steps * config.batch_size * config.block_size
        return CompleteRun(config.matrix_parameters, trained_on, n_tokens or self.n_tokens)

    def operations_of_step(self, config: Any) -> float:
        """The operations of a step of a run with this config."""
        return operations_of_step(config, self.vocabulary_size)

    def run_operations(self, size: float) -> float:
        """The operations of a run of a size on the whole text."""
        config = self.config(size)
        return self.operations_of_step(config) * float(config.max_steps)


def operations_of_step(config: Any, vocabulary_size: int) -> float:
    """The operations of a step: for each token, 6 for each parameter, and attention's."""
    head = vocabulary_size * config.n_embd
    attention = config.n_layer * config.n_embd * config.block_size
    per_token = 6 * (config.matrix_parameters + head + attention)
    return float(per_token * config.batch_size * config.block_size)
