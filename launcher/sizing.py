"""How large a model is: whether the memory holds it, and `--preset auto`.

Called by `submission`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from launcher.aws.instances import GPU_MEMORY, GPUS
from launcher.job import Request, TrainingJob

logger = logging.getLogger(__name__)

# Tokens that a parameter is worth (arXiv:2203.15556, table 3), and how often a text may be read
# before another reading is worth much less than new text (arXiv:2305.16264).
TOKENS_PER_PARAMETER, READINGS = 20, 4
MOST_READINGS = 20  # before a warning; `baby` reads its megabyte 16 times
FITTING = {True: ("baby", "small", "gpt2"), False: ("laptop",)}  # on GPUs or not, by size
SHORT_RUN = 10_000_000  # tokens; a run that only tries something is not warned about
GB = 2**30


def count_parameters(config: Any, vocabulary_size: int) -> int:
    """The parameters of a model, less those of its norms."""
    rows = config.vocab_size or vocabulary_size
    return int(config.matrix_parameters + rows * config.n_embd * (2 - config.tie_embeddings))


def check_memory(job: TrainingJob, vocabulary_size: int) -> None:
    """Warn of a GPU, or of this machine, that cannot hold the model.

    A parameter takes 16 bytes: itself, its gradient, and two states. Activations come on top.
    """
    config = job.config(1)
    if not hasattr(config, "matrix_parameters"):  # an edited script's model is its own
        return
    needed = 16 * count_parameters(config, vocabulary_size) / GB
    for instance in job.instances:
        gpu = GPUS.get(instance, (0, ""))[1]
        holder = f"each {gpu} of {instance}" if gpu else "this machine"
        there = GPU_MEMORY.get(gpu) or (local_memory() if instance == "local" else None)
        if there and needed > there:
            logger.warning(
                f"memory: the model takes {needed:.1f} GiB (16 bytes for each parameter), and"
                f" {holder} has {there:.0f} GiB"
            )


def local_memory() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB


def check_readings(job: TrainingJob, tokens: int) -> None:
    """Warn if the run reads its text too often."""
    config = job.config(1)
    seen = config.max_steps * config.batch_size * config.block_size
    readings = seen / tokens
    if readings > MOST_READINGS and seen > SHORT_RUN:
        logger.warning(
            f"the run reads the text {readings:.0f} times, and will memorize it; use more"
            " text, a smaller max_steps or --preset auto"
        )


def fitted(request: Request, tokens: int, vocabulary_size: int) -> Request:
    """The request with the largest preset that so many tokens of text can fill, and as many steps.

    The smallest preset for the machine keeps at least the steps that it has.
    """
    names = FITTING[request.instances[0] in GPUS]
    readable = READINGS * tokens

    def sized(name: str) -> Request:
        return request.model_copy(update={"preset": name})

    def worth(name: str) -> int:
        return TOKENS_PER_PARAMETER * count_parameters(sized(name).config(1), vocabulary_size)

    chosen = max((n for n in names if worth(n) <= readable), default=names[0], key=names.index)
    config = sized(chosen).config(1)
    step = config.batch_size * config.block_size
    steps = min(worth(chosen), readable) // step
    steps = max(steps, config.max_steps) if chosen == names[0] else max(1, steps)
    values = {"max_steps": steps, **request.hyperparameters}
    request = sized(chosen).model_copy(update={"hyperparameters": values})
    parameters = count_parameters(config, vocabulary_size)
    logger.info(
        f"preset: {chosen}, {parameters / 1e6:.1f} M parameters for {tokens / 1e6:.1f} M tokens of"
        f" text; {values['max_steps']} steps of {step} tokens"
    )
    return request
