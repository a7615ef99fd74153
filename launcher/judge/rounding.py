"""Round the weights of a model to the fewest bits that hardly raise its validation loss."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
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
    BIT_WIDTHS,
    Quantized,
    quantize_model,
    with_quantized_weights,
)

logger = logging.getLogger(__name__)

MAX_COST_BITS = 0.005  # bits per byte that rounding may add to the loss
STANDARD_ERRORS = 2  # are added to the cost, since a short text measures it badly
PART_TOKENS = 64  # neighboring tokens, whose mean cost is one measurement
MIN_PARTS = 8  # fewer parts may be alike by chance
VALIDATION_TOKENS = 1 << 16  # on which the cost is measured
UNMEASURED_BITS = 8  # the bits of a weight, if there is no text to measure on
LOGITS_AT_ONCE = 1 << 24  # take 64 MB


@dataclass(frozen=True)
class Rounding:
    """Rounded weights, by name, with their number of bits.

    exact_loss is the loss of the model before rounding, and rounded_loss its loss after rounding,
    in bits per byte of the validation text. They are None if there is no validation text.
    """

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
    """Round the weights of a model to `bits` bits.

    The default is the fewest bits that raise the loss by at most MAX_COST_BITS, on the validation
    text and probably on other text of its kind. If the corpus is None, the cost is not measured,
    and the default is UNMEASURED_BITS.
    """
    if corpus is None:
        bits = bits or UNMEASURED_BITS
        return Rounding(bits, quantize_model(model, bits))
    exact = measure_losses(model, corpus)
    choices = BIT_WIDTHS if bits is None else (bits,)
    for choice in choices:
        parameters = quantize_model(model, choice)
        rounded = measure_losses(with_quantized_weights(model, parameters), corpus)
        rounding = Rounding(choice, parameters, exact.bits_per_byte, rounded.bits_per_byte)
        if largest_cost(exact, rounded) <= MAX_COST_BITS:
            break
    return rounding


@dataclass(frozen=True)
class TokenLosses:
    """The loss of each learned token of a validation text, in nats, float64 [n]."""

    nats: Tensor
    bytes_per_token: float

    @property
    def bits_per_byte(self) -> float:
        return float(self.nats.mean()) / self.bytes_per_token / math.log(2)


def largest_cost(exact: TokenLosses, rounded: TokenLosses) -> float:
    """What rounding costs on the text, plus STANDARD_ERRORS, in bits per byte; infinite for a text
    of fewer than MIN_PARTS.

    Without the standard errors, a text of 2,000 characters would show too low a cost by chance: a
    fifth of the models then cost over MAX_COST_BITS on other text of its kind.
    """
    differences = rounded.nats - exact.nats
    parts = torch.stack([part.sum() for part in differences.split(PART_TOKENS)])
    if len(parts) < MIN_PARTS:
        return math.inf
    standard_error = float(parts.std()) * math.sqrt(len(parts)) / len(differences)
    nats = float(differences.mean()) + STANDARD_ERRORS * standard_error
    return nats / exact.bytes_per_token / math.log(2)


@torch.inference_mode()
def measure_losses(model: GPT, corpus: Corpus) -> TokenLosses:
    """The losses of the first VALIDATION_TOKENS of a corpus, in the windows in which train.py
    evaluates."""
    config = replace(model.config, eval_tokens=VALIDATION_TOKENS)
    masks_documents = config.mask_documents or corpus.is_chat
    end = corpus.tokenizer.end if masks_documents else None
    n_logits = config.block_size * model.embed.num_embeddings  # for one window
    windows_at_once = max(1, LOGITS_AT_ONCE // n_logits)
    nats = []
    for chunk in eval_windows(corpus.val, config):
        for starts in chunk.split(windows_at_once):
            windows = read_windows(corpus.val, starts, config.block_size)
            inputs, targets = inputs_and_targets(windows, torch.device("cpu"))
            logits = model(inputs, end=end, chats=corpus.is_chat)
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            nats.append(losses[targets.flatten() != IGNORED].double())
    return TokenLosses(torch.cat(nats), bytes_per_token(corpus, config))
