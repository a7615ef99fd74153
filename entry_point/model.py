"""The model: a pre-norm decoder in the layout of Qwen3 (arXiv:2505.09388).

RMSNorm, rotary positions, QK-norm, a gated MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .config import Config, derive_seed
from .kernels import ChunkedLoss, Mask, attend, document_mask, logits_at_once, rms_norm, taught_loss


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config)
        self.dropout = config.dropout
        self.attention_norm = norm_weight(config, config.n_embd)
        self.mlp_norm = norm_weight(config, config.n_embd)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        y = norm(x, self.attention_norm)
        y = self.attention(y, cos, sin, mask)
        x = x + F.dropout(y, self.dropout, self.training)

        y = norm(x, self.mlp_norm)
        y = self.mlp(y)
        return x + F.dropout(y, self.dropout, self.training)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.n_kv_head = config.kv_heads
        self.head_dim = config.head_width
        self.dropout = config.dropout
        # q, k and v are one weight. Muon cuts it into equal matrices: n_head / n_kv_head for q, one
        # for k, one for v.
        n_fused = self.n_head // self.n_kv_head + 2
        self.qkv = Linear(config.n_embd, self.n_kv_head * self.head_dim, n_fused)
        self.out = Linear(self.n_head * self.head_dim, config.n_embd)
        self.q_norm = norm_weight(config, self.head_dim)
        self.k_norm = norm_weight(config, self.head_dim)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, normalized and rotated, [B, n_head, T, head_dim]; k likewise, and v, of n_kv_head."""
        B, T, _ = x.shape
        H, K = self.n_head, self.n_kv_head
        heads = self.qkv(x).view(B, T, H + 2 * K, self.head_dim)
        if torch.compiler.is_compiling():  # it reads and writes half as much in this layout
            q, k, v = heads.split((H, K, K), dim=2)  # [B, T, H or K, head_dim]
            q = rotate(norm(q, self.q_norm), cos[:, None], sin[:, None])
            k = rotate(norm(k, self.k_norm), cos[:, None], sin[:, None])
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

        qk, v = heads.transpose(1, 2).split((H + K, K), dim=1)
        qk = norm(qk)
        if self.q_norm is not None and self.k_norm is not None:
            weights = [self.q_norm.expand(H, 1, -1), self.k_norm.expand(K, 1, -1)]
            qk = qk * torch.cat(weights).to(qk.dtype)  # [H + K, 1, head_dim]
        q, k = rotate(qk, cos, sin).split((H, K), dim=1)
        return q, k, v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        q, k, v = self.heads(x, cos, sin)
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, dropout, mask)
        return self.out(y.transpose(1, 2).flatten(2))


def rotary(positions: Tensor, config: Config, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin of the rotary angles (arXiv:2104.09864), [positions, head_dim].

    Both halves of head_dim have the same angles; the first half of sin is negative.
    """
    n = config.head_width
    exponents = torch.arange(0, n, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None] * config.rope_theta ** (-exponents / n)  # [positions, n/2]
    cos = angles.cos().to(dtype)
    sin = angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pairs (i, i + head_dim / 2) of x [..., T, head_dim] by the angles of rotary."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, dims=-1), sin)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202)."""

    activation = staticmethod(F.silu)  # its name goes into config.json

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_up = Linear(config.n_embd, config.hidden_dim, n_fused=2)
        self.down = Linear(config.hidden_dim, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


def activation_name() -> str:
    return getattr(MLP.activation, "__name__", type(MLP.activation).__name__)


def norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Root-mean-square norm over the last dimension (arXiv:1910.07467), times the weight."""
    y = rms_norm(x)
    return y if weight is None else y * weight.to(y.dtype)


def norm_weight(config: Config, n: int) -> nn.Parameter | None:
    return nn.Parameter(torch.ones(n)) if config.norm_weights else None


class Linear(nn.Linear):
    """y = x W^T with fp32 master weights, computed in the type of x.

    The weight holds n_fused matrices of equal shape, stacked along its rows.
    """

    def __init__(self, n_in: int, n_out: int, n_fused: int = 1) -> None:
        super().__init__(n_in, n_out * n_fused, bias=False)
        self.n_fused = n_fused

    def reset_parameters(self) -> None:
        """Leaves the weight to GPT.init_weights; a bias, which an edit may add, begins at 0."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class GPT(nn.Module):
    """The language model.

    compute_dtype is the type of the matrix products and activations; weights stay float32. The
    weights have no values before init_weights or load_state_dict.
    """

    def __init__(
        self, config: Config, vocabulary_size: int, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        # Embedding draws from a normal distribution. On the meta device, that imports torch's
        # compiler, which takes a second.
        rows = config.vocab_size or vocabulary_size
        weight = torch.empty(rows, config.n_embd)
        self.embed: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = norm_weight(config, config.n_embd)
        self.head = None if config.tie_embeddings else Linear(config.n_embd, rows)

    def init_weights(self, seed: int) -> None:
        """Draws the initial weights on the CPU, so that every device begins with the same.

        Projections back into the residual stream begin at zero, so each block begins as the
        identity (modded-nanogpt).
        """
        generator = torch.Generator().manual_seed(derive_seed(seed, "weights"))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:  # of a norm, which begins as ones
                continue
            n_in = parameter.size(-1)
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                std = 0.0
            elif name.startswith("embed") and self.head is not None:
                std = 1.0
            elif name.startswith(("embed", "head")):
                std = 0.02
            else:
                std = n_in**-0.5
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def angles(self, T: int) -> tuple[Tensor, Tensor]:
        """rotary of the first T positions."""
        positions = torch.arange(T, device=self.embed.weight.device)
        return rotary(positions, self.config, self.compute_dtype)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        angles: tuple[Tensor, Tensor] | None = None,
        end: int | None = None,
        chats: bool = False,
        taught: Tensor | None = None,
    ) -> Tensor:
        """Logits, float32 [B, T, V], of ids [B, T]; with targets [B, T], the mean loss.

        angles are self.angles(T), computed once for many steps, since a compiled graph would
        compute them again in every layer. Attention does not cross the id `end`. With `chats`,
        conversations do not see each other's end token, and targets below 0 are ignored. `taught`
        are a teacher's logits, whose probabilities are learned beside the targets.
        """
        teaching: tuple[Any, ...] = ()
        if taught is not None:
            share, temperature = self.config.teacher_share, self.config.teacher_temperature
            teaching = (taught.flatten(0, 1), share, temperature)
        mask = None if end is None else document_mask(idx, end, chats, self.config)
        cos, sin = angles or self.angles(idx.size(1))

        x = self.embed(idx).to(self.compute_dtype)
        x = F.dropout(x, self.config.dropout, self.training)
        recompute = self.config.recompute and torch.is_grad_enabled()
        has_dropout = self.config.dropout > 0
        for block in self.blocks:
            if recompute:
                x = checkpoint(
                    block, x, cos, sin, mask, use_reentrant=False, preserve_rng_state=has_dropout
                )
            else:
                x = block(x, cos, sin, mask)
        x = norm(x, self.norm)

        head = self.embed if self.head is None else self.head
        if targets is not None and targets.numel() * len(head.weight) > logits_at_once(x.device):
            # needs_input_grad is true for a parameter even under no_grad.
            weight = head.weight if torch.is_grad_enabled() else head.weight.detach()
            return ChunkedLoss.apply(x.flatten(0, 1), weight, targets.flatten(), chats, *teaching)
        logits = F.linear(x, head.weight.to(x.dtype)).float()
        if targets is None:
            return logits
        if teaching:
            return taught_loss(logits.flatten(0, 1), targets.flatten(), *teaching)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.inference_mode()
def sample(model: GPT, start: Sequence[int], length: int, seed: int = 1337) -> list[int]:
    """`length` ids after the ids `start`, each drawn after a forward pass over those before it.

    Each window has the same length, since some GPU kernels need 20 ms or more to plan for a new
    length. Its end is padding, which attention never reads: no position looks ahead.
    """
    device = model.embed.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    n_start = len(start)
    n_ids = n_start + length
    window = min(model.config.block_size, n_ids - 1)
    ids = torch.zeros((1, n_ids), dtype=torch.long, device=device)
    ids[0, :n_start] = torch.tensor(start)
    for n in range(n_start, n_ids):  # ids so far
        begin = max(0, n - window)
        logits = model(ids[:, begin : begin + window])[0, n - begin - 1]
        ids[0, n] = logits.softmax(dim=-1).multinomial(1, generator=generator)
    return ids[0, n_start:].tolist()
