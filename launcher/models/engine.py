"""Fast generation by the packaged model on this machine.

A token costs the reading of the weights and little else, so keys and values are kept, and the
weights are packed for the CPU. It computes what `GPT.forward` does: the tests hold it
against the plain loop, which serves edited models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from entry_point.kernels import repeat_kv
from entry_point.model import GPT, Attention, Block, Linear, norm, rotary

# With so few sequences at once, sampling a token is bound by the reading of the weights, which int8
# makes smaller (PackedLinear).
FEW_SEQUENCES = 4
# A model with so many numbers in its matrices gains from packing: below, calling oneDNN takes
# longer than reading them.
PACKED_FROM = 1 << 20

# Called with the logits, float32 [B, V], and the ids, int64 [B], that were drawn from them.
Watch = Callable[[Tensor, Tensor], object]


class KeyValueCache:
    """Keys and values of the last positions, block_size at most, which new ones overwrite in turn.

    k and v hold, for each layer, [B, n_kv_head, size, head_dim]; position p lives in slot p % size.
    Keys hold their rotary angle, so their slot does not matter, and the context slides. `positions`
    is how many there will be: a short text takes no more than it needs.
    """

    def __init__(self, model: GPT, batch_size: int, positions: int) -> None:
        c, device = model.config, model.embed.weight.device
        self.size = min(positions, c.block_size)
        shape = (2, c.n_layer, batch_size, c.kv_heads, self.size, c.head_width)
        zeros = torch.zeros(shape, device=device, dtype=model.compute_dtype)
        self.k, self.v = (part.unbind() for part in zeros)
        self.length = 0  # positions seen so far

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k and v [B, n_kv_head, T, head_dim] of the newest positions; returns all kept.

        T is 1, or the cache is empty and T is at most its size.
        """
        T = k.size(2)
        slot, kept = self.length % self.size, min(self.length + T, self.size)
        all_k, all_v = self.k[layer], self.v[layer]
        all_k.narrow(2, slot, T).copy_(k)
        all_v.narrow(2, slot, T).copy_(v)
        return all_k.narrow(2, 0, kept), all_v.narrow(2, 0, kept)


class PackedLinear(nn.Module):
    """A Linear of float32 activations whose products, of few rows, are of type float32 or bf16.

    The weight lies in oneDNN's own layout, with which they take half the time or less. Where dtype
    is bf16 and the rows are very few it is of int8 instead, each of its rows scaled to [-127, 127].
    The operators are those that torch.compile turns a Linear into on a CPU.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, rows: int) -> None:
        super().__init__()
        self.dtype = dtype
        self.scale: Tensor | None = None
        # The operator reads 16 columns at a time, and checks nothing.
        if dtype == torch.bfloat16 and rows <= FEW_SEQUENCES and weight.size(1) % 16 == 0:
            largest = weight.float().abs().amax(dim=1).clamp_min(1e-12)
            self.scale = (largest / 127).to(dtype)
            # The scale was rounded, so the largest may come to 128.
            scaled = (weight.float() / self.scale.float()[:, None]).round_().clamp_(-127, 127)
            self.weight = scaled.to(torch.int8)
        else:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), rows)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        if self.scale is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "").float()
        if x.size(0) * x.size(1) > FEW_SEQUENCES:  # a prompt
            return (F.linear(x, self.weight.to(x.dtype)) * self.scale).float()
        y = torch.ops.aten._weight_int8pack_mm(x.flatten(0, -2), self.weight, self.scale)
        return y.view(*x.shape[:-1], -1).float()


@torch.inference_mode()
def for_sampling(model: GPT, batch_size: int, dtype: torch.dtype) -> GPT:
    """A copy that computes in dtype, for batch_size sequences; its weights are cast once.

    On a CPU dtype is that of a large model's matrix products alone: a token costs the reading of
    their weights, so a short type elsewhere would gain nothing and lose precision.
    """
    on_cpu = model.embed.weight.device.type == "cpu"
    large = model.config.matrix_parameters >= PACKED_FROM
    with torch.device("meta"):
        copy = GPT(model.config, model.embed.num_embeddings, torch.float32 if on_cpu else dtype)
    weights = {name: p.detach().to(copy.compute_dtype) for name, p in model.named_parameters()}
    copy.load_state_dict(weights, assign=True)
    packs = on_cpu and large and torch.backends.mkldnn.is_available()
    if packs and dtype == torch.bfloat16:
        packs = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if packs and dtype in (torch.float32, torch.bfloat16):
        for part in list(copy.blocks.modules()):
            for name, child in part.named_children():
                if isinstance(child, Linear):
                    setattr(part, name, PackedLinear(child.weight, dtype, batch_size))
    return copy.eval()


def forward(model: GPT, ids: Tensor, cache: KeyValueCache) -> Tensor:
    """Logits, float32 [B, V], after ids [B, T], which continue what the cache has seen."""
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
    part: Attention, layer: int, x: Tensor, cos: Tensor, sin: Tensor, cache: KeyValueCache
) -> Tensor:
    """Attention.forward over x [B, T, n_embd] and the positions that the cache holds."""
    q, k, v = part.heads(x, cos, sin)
    k, v = cache.update(layer, k, v)
    k, v = repeat_kv(k, q.size(1)), repeat_kv(v, q.size(1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=q.size(2) > 1)
    return part.out(y.transpose(1, 2).flatten(2))


def logits_to_probabilities(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Probabilities [B, V] after temperature, the top_k most likely (0: all) and nucleus top_p.

    The nucleus is the smallest set of most likely tokens with at least top_p of the probability
    (arXiv:1904.09751).
    """
    logits = logits / temperature
    if 0 < top_k < logits.size(-1):
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
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
    """The next ids, int64 [B], of logits [B, V].

    A temperature of 0, or close to 0, takes the most likely id.
    """
    if temperature < 1e-30:  # logits divided by a smaller number may be infinite
        return logits.argmax(dim=-1)
    probabilities = logits_to_probabilities(logits, temperature, top_k, top_p)
    # The same as torch.multinomial, without its checks of the probabilities.
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
    plainly: bool = False,
) -> Iterator[Tensor]:
    """Yields the next ids, int64 [B], of a prompt [B, T], one at a time; a seed gives the same ids.

    Temperature 0 computes in float32: rounding must not choose between two that are almost equally
    likely. The last block_size ids of a longer prompt count; the context then slides on. plainly:
    by a forward pass over the last block_size ids for each token, which cuts the context anew. It
    is slow, and correct for any model, so also for an edited one.
    """
    size, generator = model.config.block_size, torch.Generator(prompt.device).manual_seed(seed)
    ids = prompt[:, -size:]
    if not plainly:
        dtype = torch.float32 if temperature < 1e-30 else model.compute_dtype
        model = for_sampling(model, prompt.size(0), dtype)
        cache = KeyValueCache(model, ids.size(0), ids.size(1) + max_new_tokens)
    for _ in range(max_new_tokens):
        logits = model(ids)[:, -1] if plainly else forward(model, ids, cache)
        following = draw(logits, temperature, top_k, top_p, generator)
        if watch is not None:
            watch(logits, following)
        yield following
        following = following[:, None]
        ids = torch.cat((ids, following), dim=1)[:, -size:] if plainly else following
