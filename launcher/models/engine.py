"""Generate text fast, with the packaged model on this machine.

Most of the time of a token is spent on reading the weights. So keys and values are kept, and the
weights are packed for the CPU. The results are those of `GPT.forward`: tests compare them with the
plain loop, which is for edited models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from sm_nanogpt.entry_point.kernels import repeat_kv
from sm_nanogpt.entry_point.model import GPT, Attention, Block, Linear, norm, rotary
from sm_nanogpt.entry_point.waiting import Waiting
from sm_nanogpt.launcher.models.weights import copy_with_weights

# For so few sequences, the weights are stored as int8 (PackedLinear): reading them takes most of
# the time of a token.
MAX_INT8_SEQUENCES = 4
# A model with fewer parameters in its matrices gains nothing from packing: to call oneDNN takes
# longer than to read them.
MIN_PACKED_PARAMETERS = 1 << 20
# If the parameters, times the number of sequences, are fewer, several threads do not make a token
# faster, and on a busy machine it takes four times as long.
MIN_SHARED_PARAMETERS = 1 << 20

# Below this temperature, the most likely id is drawn, as logits divided by it may be infinite.
MIN_TEMPERATURE = 1e-30

# Called with the logits, float32 [B, V], and the ids, int64 [B], that were drawn from them.
Watch = Callable[[Tensor, Tensor], object]


class KeyValueCache:
    """The keys and values of the last `size` positions. A new position overwrites the oldest.

    k and v have [B, n_kv_head, size, head_dim] for each layer. Position p is stored in slot
    p % size. Keys are rotated before they are stored, so their slots do not matter, and the context
    can slide. `size` is block_size, or n_positions if that is less.
    """

    def __init__(self, model: GPT, batch_size: int, n_positions: int) -> None:
        c = model.config
        device = model.embed.weight.device
        self.size = min(n_positions, c.block_size)
        shape = (2, c.n_layer, batch_size, c.kv_heads, self.size, c.head_width)
        zeros = torch.zeros(shape, device=device, dtype=model.compute_dtype)
        self.k, self.v = (part.unbind() for part in zeros)
        self.length = 0  # positions seen so far

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v [B, n_kv_head, T, head_dim] of the newest T positions of a layer.

        T is 1; if the cache is empty, it may be up to the size. Returns all stored keys and values
        of the layer, [B, n_kv_head, n_stored, head_dim] each.
        """
        T = k.size(2)
        slot = self.length % self.size
        n_stored = min(self.length + T, self.size)
        keys = self.k[layer]
        values = self.v[layer]
        keys.narrow(2, slot, T).copy_(k)
        values.narrow(2, slot, T).copy_(v)
        return keys.narrow(2, 0, n_stored), values.narrow(2, 0, n_stored)


class PackedLinear(nn.Module):
    """A Linear for inputs of few rows. Inputs and outputs are float32, and products are of dtype.

    The weight has the layout of oneDNN, with which it takes half the time or less. For bfloat16 and
    at most MAX_INT8_SEQUENCES rows, the weight is int8, with a scale for each of its rows. The
    operators are those into which torch.compile turns a Linear on a CPU.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, rows: int) -> None:
        super().__init__()
        self.dtype = dtype
        self.scale: Tensor | None = None
        # The operator reads 16 columns at a time, without a check.
        if dtype == torch.bfloat16 and rows <= MAX_INT8_SEQUENCES and weight.size(1) % 16 == 0:
            largest = weight.float().abs().amax(dim=1).clamp_min(1e-12)
            self.scale = (largest / 127).to(dtype)
            # The scale was rounded, so the largest value may become 128.
            scaled = (weight.float() / self.scale.float()[:, None]).round_().clamp_(-127, 127)
            self.weight = scaled.to(torch.int8)
        else:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), rows)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        if self.scale is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "").float()
        if x.size(0) * x.size(1) > MAX_INT8_SEQUENCES:  # a prompt
            return (F.linear(x, self.weight.to(x.dtype)) * self.scale).float()
        y = torch.ops.aten._weight_int8pack_mm(x.flatten(0, -2), self.weight, self.scale)
        return y.view(*x.shape[:-1], -1).float()


@torch.inference_mode()
def sampling_copy(model: GPT, batch_size: int, dtype: torch.dtype) -> GPT:
    """Return a copy of a model that computes in dtype, for batch_size sequences.

    The weights are cast once. On a CPU, only the matrix products of a large model are of dtype, and
    all else is float32: reading their weights takes most of the time, so a shorter type elsewhere
    would lose precision and gain nothing.
    """
    on_cpu = model.embed.weight.device.type == "cpu"
    is_large = model.config.matrix_parameters >= MIN_PACKED_PARAMETERS
    compute_dtype = torch.float32 if on_cpu else dtype
    weights = {name: p.detach().to(compute_dtype) for name, p in model.named_parameters()}
    copy = copy_with_weights(model, weights, compute_dtype)

    can_pack = on_cpu and is_large and torch.backends.mkldnn.is_available()
    if can_pack and dtype == torch.bfloat16:
        can_pack = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if can_pack and dtype in (torch.float32, torch.bfloat16):
        for module in list(copy.blocks.modules()):
            for name, child in module.named_children():
                if isinstance(child, Linear):
                    setattr(module, name, PackedLinear(child.weight, dtype, batch_size))
    return copy


def forward(model: GPT, ids: Tensor, cache: KeyValueCache) -> Tensor:
    """Return the logits, float32 [B, V], after ids [B, T] that follow those in the cache."""
    T = ids.size(1)
    positions = torch.arange(cache.length, cache.length + T, device=ids.device)
    cos, sin = rotary(positions, model.config, model.compute_dtype)
    x = model.embed(ids).to(model.compute_dtype)
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        y = norm(x, block.attention_norm)
        x = x + attention(block.attention, layer, y, cos, sin, cache)
        x = x + block.mlp(norm(x, block.mlp_norm))
    cache.length += T
    head = model.embed if model.head is None else model.head
    x = norm(x[:, -1], model.norm)
    return F.linear(x, head.weight.to(x.dtype)).float()


def attention(
    module: Attention, layer: int, x: Tensor, cos: Tensor, sin: Tensor, cache: KeyValueCache
) -> Tensor:
    """As Attention.forward, for x [B, T, n_embd], which also attends to positions in the cache."""
    q, k, v = module.heads(x, cos, sin)
    k, v = cache.update(layer, k, v)
    k = repeat_kv(k, q.size(1))
    v = repeat_kv(v, q.size(1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=q.size(2) > 1)
    return module.out(y.transpose(1, 2).flatten(2))


def logits_to_probabilities(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Return probabilities [B, V]. They are 0 except for the top_k ids (0: all) in the nucleus.

    The nucleus is the smallest set of most likely ids whose probabilities sum to at least top_p
    (arXiv:1904.09751). logits are [B, V].
    """
    logits = logits / temperature
    if 0 < top_k < logits.size(-1):
        lowest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    probabilities = logits.softmax(dim=-1)
    if top_p < 1.0:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        outside = ordered.cumsum(dim=-1) - ordered >= top_p
        outside = torch.zeros_like(outside).scatter(-1, order, outside)
        probabilities = probabilities.masked_fill(outside, 0.0)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return probabilities


def draw(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> Tensor:
    """Draw the next ids, int64 [B], by logits [B, V].

    Below MIN_TEMPERATURE, the most likely id is taken.
    """
    if temperature < MIN_TEMPERATURE:
        return logits.argmax(dim=-1)
    probabilities = logits_to_probabilities(logits, temperature, top_k, top_p)
    # As torch.multinomial, without its checks of the probabilities.
    noise = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / noise).argmax(dim=-1)


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1337,
    watch: Watch | None = None,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Yield ids, int64 [B], that continue a prompt [B, T], one position at a time.

    The same seed gives the same ids. Only the last block_size ids of a prompt count, and later the
    context slides. Without use_cache, each position takes a forward pass over the last block_size
    ids. That is slow, and correct for any model, also for an edited one.
    """
    size = model.config.block_size
    generator = torch.Generator(prompt.device).manual_seed(seed)
    ids = prompt[:, -size:]
    if use_cache:
        dtype = model.compute_dtype
        if temperature < MIN_TEMPERATURE:  # rounding must not decide between two similar logits
            dtype = torch.float32
        model = sampling_copy(model, prompt.size(0), dtype)
        cache = KeyValueCache(model, ids.size(0), ids.size(1) + max_new_tokens)
    n_threads = torch.get_num_threads()
    if use_cache and prompt.size(0) * model.config.matrix_parameters < MIN_SHARED_PARAMETERS:
        n_threads = 1
    waiting = Waiting(n_threads)
    try:
        for _ in range(max_new_tokens):
            waiting.look()
            with torch_threads(n_threads):
                logits = forward(model, ids, cache) if use_cache else model(ids)[:, -1]
                next_ids = draw(logits, temperature, top_k, top_p, generator)
            if watch is not None:
                watch(logits, next_ids)
            yield next_ids
            if use_cache:
                ids = next_ids[:, None]
            else:
                ids = torch.cat((ids, next_ids[:, None]), dim=1)[:, -size:]
    finally:
        waiting.wake()


@contextmanager
def torch_threads(n_threads: int) -> Iterator[None]:
    """Let torch compute with n_threads during the body; then, with as many as before."""
    n_before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(n_before)
