"""In how few bits a model's weights may be kept, by its loss on its validation text."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sm_nanogpt.entry_point.conversations import IGNORED
from sm_nanogpt.entry_point.data import (
    bytes_per_token,
    eval_windows,
    inputs_and_targets,
    read_windows,
)
from sm_nanogpt.entry_point.model import GPT
from sm_nanogpt.entry_point.text import Corpus
from sm_nanogpt.launcher.models.quantization import (
    BITS,
    Quantized,
    quantize_model,
    with_quantized_weights,
)

logger = logging.getLogger(__name__)

MAX_COST = 0.005  # bits per byte that rounding may add to the loss
VALIDATION_TOKENS = 1 << 16  # on which it is measured
UNMEASURED_BITS = 8  # where there is no text to measure on


@dataclass(frozen=True)
class Rounding:
    """Rounded weights by name, and the losses with them and without, in bits per byte of the
    validation text; None if there is no text."""

    bits: int
    parameters: Mapping[str, Quantized | Tensor]
    exact_loss: float | None = None
    rounded_loss: float | None = None

    def __str__(self) -> str:
        if self.exact_loss is None or self.rounded_loss is None:
            return f"{self.bits} bits; what that costs is unknown, as there is no validation text"
        losses = f"{self.rounded_loss:.4f} bits per byte instead of {self.exact_loss:.4f}"
        return f"{self.bits} bits; {losses} on the validation text"


def round_weights(model: GPT, corpus: Corpus | None, bits: int | None = None) -> Rounding:
    """The weights of a model in `bits` bits, or in the fewest that cost at most MAX_COST."""
    if corpus is None:
        bits = bits or UNMEASURED_BITS
        return Rounding(bits, quantize_model(model, bits))
    exact_loss = bits_per_byte(model, corpus)
    choices = BITS if bits is None else (bits,)
    for choice in choices:
        parameters = quantize_model(model, choice)
        rounded_loss = bits_per_byte(with_quantized_weights(model, parameters), corpus)
        rounding = Rounding(choice, parameters, exact_loss, rounded_loss)
        if rounded_loss - exact_loss <= MAX_COST:
            break
    return rounding


@torch.inference_mode()
def bits_per_byte(model: GPT, corpus: Corpus) -> float:
    """The loss on VALIDATION_TOKENS of a corpus, in windows as an evaluation of train.py has."""
    config = replace(model.config, eval_tokens=VALIDATION_TOKENS)
    end = corpus.tokenizer.end if config.mask_documents else None
    nats, n_tokens = 0.0, 0
    for starts in eval_windows(corpus.val, config):
        windows = read_windows(corpus.val, starts, config.block_size)
        inputs, targets = inputs_and_targets(windows, torch.device("cpu"))
        count = int((targets != IGNORED).sum())
        nats += float(model(inputs, targets, end=end, chats=corpus.is_chat)) * count
        n_tokens += count
    return nats / n_tokens / bytes_per_token(corpus, config) / math.log(2)
