"""How large a model is: memory and time of a run on GPUs, and `--preset auto`.

Called by `submission`. GPU figures are arithmetic from data sheets; none was measured.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from launcher.aws.instances import GPU_FACTS, GPUS
from launcher.errors import InputError
from launcher.job import TrainingJob

logger = logging.getLogger(__name__)

# Tokens that a parameter is worth (arXiv:2203.15556, table 3), and how often a text may be read
# before another reading is worth much less than new text (arXiv:2305.16264).
TOKENS_PER_PARAMETER, READINGS = 20, 4
MOST_READINGS = 20  # before a warning; `baby` reads its megabyte 16 times
FITTING = {True: ("baby", "small", "gpt2"), False: ("laptop",)}  # on GPUs or not, by size
SHORT_RUN = 10_000_000  # tokens; a run that only tries something is not warned about
PART_OF_PEAK = 0.35
GB = 2**30


def count_parameters(config: Any, vocabulary_size: int) -> int:
    """The parameters of a model, less those of its norms."""
    rows = config.vocab_size or vocabulary_size
    return int(config.matrix_parameters + rows * config.n_embd * (2 - config.tie_embeddings))


def rank_bytes(config: Any, vocabulary_size: int, world_size: int) -> tuple[int, int]:
    """The bytes of a rank on a GPU: the least that it can need, and about what it needs uncompiled.

    Weights and gradients are float32; Muon has one state for each parameter, AdamW two. A layer
    keeps, for each token, some activations of 16 bits; a compiled one computes most of them again.
    """
    parameters, matrices = count_parameters(config, vocabulary_size), config.matrix_parameters
    muon = matrices if config.optimizer == "muon" else 0
    states = 4 * muon + 8 * (parameters - muon)
    fixed = 8 * parameters + states
    tokens = config.batch_size // world_size // config.passes(world_size) * config.block_size
    heads = (config.n_head + config.kv_heads) * config.head_width
    rows = config.vocab_size or vocabulary_size
    least = fixed + 2 * tokens * config.n_layer * 2 * (heads + config.n_embd + config.hidden_dim)
    kept = 4 * heads + 4 * config.n_embd + 4 * config.hidden_dim
    logits = 3 * 4 * min(tokens * rows, 1 << 26)
    return least, fixed + 6 * matrices + 2 * tokens * config.n_layer * kept + logits + GB


def check_memory(job: TrainingJob, vocabulary_size: int) -> None:
    """Log the memory of a rank. Raise InputError if it cannot fit one of the job's GPUs."""
    config = job.config(1)
    for instance in job.instances:
        count, gpu = GPUS.get(instance, (0, ""))
        if gpu not in GPU_FACTS:
            continue
        there = GPU_FACTS[gpu][0]
        ranks = count * job.instance_count
        least, about = (n / GB for n in rank_bytes(config, vocabulary_size, ranks))
        remedy = (
            f"set a larger gradient_accumulation_steps (now {config.passes(ranks)}), a smaller"
            " block_size or model, or use a larger GPU"
        )
        if least > there:
            raise InputError(
                f"--instance {instance}: a rank needs at least {least:.0f} GB, and its {gpu} has"
                f" {there} GB; {remedy}"
            )
        logger.info(f"memory: about {about:.0f} of the {there} GB of each {gpu}")
        if about > there:
            logger.warning(f"the run may need more memory than that: {remedy}")


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


def seconds_on_gpus(job: TrainingJob, vocabulary_size: int) -> float | None:
    """Seconds of training on the job's GPUs; None if they are not known.

    6 operations for each parameter and token (arXiv:2001.08361, section 2.1), and the attention's.
    """
    config = job.config(1)
    count, gpu = GPUS.get(job.instances[0], (0, ""))
    if gpu not in GPU_FACTS:
        return None
    parameters = config.matrix_parameters + config.n_embd * vocabulary_size
    attention = config.n_layer * config.n_head * config.head_width * config.block_size
    tokens = config.max_steps * config.batch_size * config.block_size
    speed = GPU_FACTS[gpu][1] * 1e12 * PART_OF_PEAK * count * job.instance_count
    return float(6 * (parameters + attention) * tokens / speed)


def fitted(job: TrainingJob, tokens: int, vocabulary_size: int) -> TrainingJob:
    """The job with the largest preset that so many tokens of text can fill, and as many steps.

    The smallest preset for the machine keeps at least the steps that it has.
    """
    names = FITTING[job.instance != "local" and job.instances[0] in GPUS]
    readable = READINGS * tokens

    def sized(name: str) -> TrainingJob:
        return job.model_copy(update={"preset": name})

    def worth(name: str) -> int:
        return TOKENS_PER_PARAMETER * count_parameters(sized(name).config(1), vocabulary_size)

    chosen = max((n for n in names if worth(n) <= readable), default=names[0], key=names.index)
    config = sized(chosen).config(1)
    step = config.batch_size * config.block_size
    steps = min(worth(chosen), readable) // step
    steps = max(steps, config.max_steps) if chosen == names[0] else max(1, steps)
    values = {"max_steps": steps, **job.hyperparameters}
    job = sized(chosen).model_copy(update={"hyperparameters": values})
    parameters = count_parameters(config, vocabulary_size)
    seconds = seconds_on_gpus(job, vocabulary_size)
    took = ""
    if seconds is not None:
        took = f", about {timedelta(seconds=round(seconds))} at 35 % of the GPUs' peak"
    logger.info(
        f"preset: {chosen}, {parameters / 1e6:.1f} M parameters for {tokens / 1e6:.1f} M tokens of"
        f" text; {values['max_steps']} steps of {step} tokens{took}"
    )
    if seconds and seconds > job.time_limit:
        logger.warning(f"that is more than the time limit of {job.time_limit} s: set --max-run")
    return job
