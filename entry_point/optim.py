"""The learning-rate schedule, and the optimizers: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim.adamw import adamw

from .config import Config
from .distributed import Group
from .errors import TrainingError
from .model import GPT, Linear


def doublings(config: Config) -> list[int]:
    """The three steps from which windows are twice as long."""
    early = config.short_windows * config.max_steps
    return [math.ceil(n * early / 3) for n in (1, 2, 3)]


def window_length(step: int, config: Config) -> int:
    """The length that a step's windows are cut into: it doubles three times, up to block_size.

    Attention over short windows is cheap, and a model learns short distances first
    (arXiv:2108.06084).
    """
    step %= config.max_steps
    n_later = sum(step < doubling for doubling in doublings(config))
    return config.block_size >> n_later


def first_steps(config: Config) -> list[int]:
    """The first step of each length of windows that comes, in order."""
    return sorted(step for step in {0, *doublings(config)} if step < config.max_steps)


def learning_rate_scale(step: int, config: Config) -> float:
    """The learning rate of a step as a fraction of its peak: warm-up, plateau, linear decay.

    Each generation has its own.
    """
    step %= config.max_steps
    warm_up = min(1.0, (step + 1) / (config.warmup_steps + 1))
    decay_steps = config.decay_fraction * config.max_steps
    height = 1.0  # above the final rate: 1 until the decay begins, then down to 0
    if decay_steps:
        height = min(1.0, (config.max_steps - step) / decay_steps)
    final = config.final_learning_rate
    return warm_up * (final + (1 - final) * height)


# Polar Express (arXiv:2505.16932, Algorithm 1): the polynomials a x + b x^3 + c x^5, in turn, that
# bring all singular values in [0.001, 1] to 1 fastest.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
)


def orthogonalize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Roughly the nearest semi-orthogonal matrix of each in [n, rows, columns], rows >= columns."""
    # Normalized before rounding: in float16 the gradient itself may be 0.
    norms = x.norm(dim=(-2, -1), keepdim=True)
    x = (x / (norms * 1.02 + 1e-20)).to(dtype)
    for a, b, c in POLAR_EXPRESS:
        gram = x.mT @ x
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, gram, beta=a)
    return x


def tall(tensor: Tensor, n_fused: int) -> Tensor:
    """A view of a Linear's weight, or its gradient: [n_fused, rows, columns], rows >= columns."""
    matrices = tensor.view(n_fused, -1, tensor.size(1))
    return matrices if matrices.size(1) >= matrices.size(2) else matrices.mT


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None  # check_gradients made sure of it
    return parameter.grad


# Numbers that a rank orthogonalizes at once: enough to keep a GPU busy (by arithmetic, a product of
# them takes an H100 20 us, and its start 5), and few enough to need no more than 100 MB.
SLICE = 1 << 23


def deal(counts: Mapping[str, int], n_slices: int, n_ranks: int) -> list[list[list[str]]]:
    """Splits the weights into n_slices x n_ranks shares of about equal size, by their names.

    The largest weight goes first, and each to the smallest share.
    """
    shares: list[list[str]] = [[] for _ in range(n_slices * n_ranks)]
    sizes = [0] * len(shares)
    for name in sorted(counts, key=counts.__getitem__, reverse=True):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(name)
        sizes[smallest] += counts[name]
    return [shares[first : first + n_ranks] for first in range(0, len(shares), n_ranks)]


@dataclass(frozen=True)
class WeightSlice:
    """Weights whose matrices are updated together: the names of each rank's share.

    momentum is that of this rank's share, [n, rows, columns]. Ranks send stacks of one size, n, so
    smaller shares are padded.
    """

    shares: list[list[str]]
    momentum: Tensor


class Muon:
    """Momentum, orthogonalized (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    Matrices of one shape, up to transposition, are stacked and updated together, slice by slice;
    each of a fused weight is a matrix of its own. All ranks have the same gradients. Each keeps the
    momentum of its share of a slice, computes its updates, and sends them to the others.
    """

    def __init__(
        self,
        weights: Mapping[str, tuple[Tensor, int]],
        config: Config,
        group: Group,
        dtype: torch.dtype,
    ) -> None:
        self.weights = weights
        self.config = config
        self.group = group
        self.dtype = dtype
        counts_by_shape: dict[torch.Size, dict[str, int]] = {}  # n_fused of each weight
        for name, (weight, n_fused) in weights.items():
            shape = tall(weight, n_fused).shape[1:]
            counts_by_shape.setdefault(shape, {})[name] = n_fused

        self.slices: list[WeightSlice] = []
        for shape, counts in counts_by_shape.items():
            n_matrices = sum(counts.values())
            n_stacks = min(n_matrices * shape.numel() / SLICE, len(counts))
            n_slices = math.ceil(n_stacks / group.world_size)
            for shares in deal(counts, n_slices, group.world_size):
                sizes = [sum(counts[name] for name in share) for share in shares]
                momentum = torch.zeros(max(sizes), *shape, device=group.device)
                self.slices.append(WeightSlice(shares, momentum))

    def split(self, names: Sequence[str], stack: Tensor) -> Iterable[tuple[str, Tensor]]:
        """The matrices [n_fused, rows, columns] of each weight of a share, which is padded."""
        counts = [self.weights[name][1] for name in names]
        return zip(names, stack[: sum(counts)].split(counts), strict=True)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update of every matrix from its gradient, at `scale` times the peak rate."""
        learning_rate = self.config.learning_rate * scale
        travelling: deque[tuple[WeightSlice, Callable[[], Tensor]]] = deque()
        for weight_slice in self.slices:
            update = orthogonalize(self.nesterov(weight_slice), self.dtype)
            travelling.append((weight_slice, self.group.async_all_gather(update)))
            del update
            # A slice travels while the next one is computed; more of them would need more memory.
            if len(travelling) > 1 or self.group.world_size == 1:
                self.apply(*travelling.popleft(), learning_rate)
        while travelling:
            self.apply(*travelling.popleft(), learning_rate)

    def apply(
        self,
        weight_slice: WeightSlice,
        wait_for_updates: Callable[[], Tensor],
        learning_rate: float,
    ) -> None:
        """Updates the weights of a slice, once its updates [world_size, n, ...] have arrived."""
        for names, stack in zip(weight_slice.shares, wait_for_updates(), strict=True):
            for name, update in self.split(names, stack):
                weight, n_fused = self.weights[name]
                stretch = max(1.0, weight.size(0) / n_fused / weight.size(1)) ** 0.5
                if self.config.weight_decay:
                    weight.mul_(1 - learning_rate * self.config.weight_decay)
                tall(weight, n_fused).add_(update, alpha=-learning_rate * stretch)

    def nesterov(self, weight_slice: WeightSlice) -> Tensor:
        """Adds the gradients of this rank's share to its momentum; returns an average of both."""
        momentum = weight_slice.momentum
        stacks = []
        for name in weight_slice.shares[self.group.rank]:
            weight, n_fused = self.weights[name]
            stacks.append(tall(gradient_of(weight), n_fused))
        n_matrices = sum(map(len, stacks))
        padding = torch.zeros_like(momentum[n_matrices:])
        gradient = torch.cat([*stacks, padding])
        momentum.lerp_(gradient, 1 - self.config.momentum)
        return gradient.lerp_(momentum, self.config.momentum)

    def owners(self) -> dict[str, int]:
        """For the momentum of each weight, the rank that has it."""
        owners: dict[str, int] = {}
        for weight_slice in self.slices:
            for rank, names in enumerate(weight_slice.shares):
                for name in names:
                    owners[f"momentum.{name}"] = rank
        return owners

    def state(self) -> dict[str, Tensor]:
        """The momentum of each weight; that of other ranks' is on the meta device."""
        momentum: dict[str, Tensor] = {}
        for weight_slice in self.slices:
            for rank, names in enumerate(weight_slice.shares):
                is_own = rank == self.group.rank
                stack = weight_slice.momentum if is_own else weight_slice.momentum.to("meta")
                momentum.update(self.split(names, stack))
        return {f"momentum.{name}": momentum[name] for name in self.weights}


class AdamW:
    """Adam with weight decay that is separate from the gradient (arXiv:1711.05101).

    torch's class imports the compiler, which takes as long as importing torch.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], peak: float, weight_decay: float, config: Config
    ) -> None:
        self.parameters = parameters
        self.peak = peak
        self.weight_decay = weight_decay
        self.config = config
        self.steps: dict[str, Tensor] = {}
        self.exp_avg: dict[str, Tensor] = {}
        self.exp_avg_sq: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            self.steps[name] = torch.zeros((), device=parameter.device)
            self.exp_avg[name] = torch.zeros_like(parameter)
            self.exp_avg_sq[name] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update of every parameter from its gradient, at `scale` times the peak rate."""
        adamw(
            list(self.parameters.values()),
            [gradient_of(parameter) for parameter in self.parameters.values()],
            list(self.exp_avg.values()),
            list(self.exp_avg_sq.values()),
            [],
            list(self.steps.values()),
            fused=True,
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=self.peak * scale,
            weight_decay=self.weight_decay,
            eps=1e-10,
            maximize=False,
        )

    def owners(self) -> dict[str, int]:
        return {}

    def state(self) -> dict[str, Tensor]:
        states = {"step": self.steps, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        state = {}
        for key, tensors in states.items():
            for name, tensor in tensors.items():
                state[f"{key}.{name}"] = tensor
        return state


class Part(Protocol):
    """An optimizer of some of the weights."""

    def step(self, scale: float) -> None:
        """One update from the gradients, at `scale` times the peak learning rate."""

    def state(self) -> dict[str, Tensor]:
        """The state by name: live tensors; what another rank owns is on the meta device."""

    def owners(self) -> dict[str, int]:
        """For each tensor of the state that only one rank has, that rank."""


@dataclass(frozen=True)
class Weights:
    """The parameters of a model by name: its matrices, each with its n_fused, and all others."""

    model: GPT
    matrices: dict[str, tuple[Tensor, int]]
    others: dict[str, Tensor]


def weights_of(model: GPT, parameters: Mapping[str, nn.Parameter]) -> Weights:
    """The parameters of a model, parted: the matrices of its layers, and all others."""
    matrices: dict[str, tuple[Tensor, int]] = {}
    for name, module in model.blocks.named_modules(prefix="blocks"):
        if isinstance(module, Linear) and module.weight.requires_grad:
            matrices[f"{name}.weight"] = (module.weight, module.n_fused)
    others: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if name not in matrices:
            others[name] = parameter
    return Weights(model, matrices, others)


def muon_and_adamw(weights: Weights, config: Config, group: Group) -> list[Part]:
    """Muon for the matrices, AdamW for the rest."""
    model = weights.model
    by_peak: dict[float, dict[str, Tensor]] = {}
    for name, parameter in weights.others.items():
        is_untied = parameter is model.embed.weight and model.head is not None
        peak = config.embedding_learning_rate if is_untied else config.head_learning_rate
        by_peak.setdefault(peak, {})[name] = parameter
    parts: list[Part] = [Muon(weights.matrices, config, group, model.compute_dtype)]
    for peak, parameters in by_peak.items():
        parts.append(AdamW(parameters, peak, 0.0, config))
    return parts


def adamw_alone(weights: Weights, config: Config, group: Group) -> list[Part]:
    """AdamW for everything; only the matrices decay."""
    matrices = {name: weight for name, (weight, _) in weights.matrices.items()}
    return [
        AdamW(matrices, config.learning_rate, config.weight_decay, config),
        AdamW(weights.others, config.learning_rate, 0.0, config),
    ]


# What each of config.OPTIMIZERS consists of.
BUILDERS: dict[str, Callable[[Weights, Config, Group], list[Part]]] = {
    "muon": muon_and_adamw,
    "adamw": adamw_alone,
}


class Optimizer:
    """The optimizer of a run, which has parts for different weights."""

    def __init__(self, model: GPT, config: Config, group: Group) -> None:
        self.config = config
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        build = BUILDERS[config.optimizer]
        self.parts = build(weights_of(model, self.parameters), config, group)
        self.owners: dict[str, int] = {}  # the rank of each tensor of the state that one rank has
        for part in self.parts:
            self.owners |= part.owners()

    def step(self, scale: float) -> None:
        """One update from the gradients, at `scale` times the peak learning rates."""
        self.check_gradients()
        if self.config.grad_clip:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.config.grad_clip)
        for part in self.parts:
            part.step(scale)

    @property
    def param_groups(self) -> list[dict[str, list[nn.Parameter]]]:
        """The parameters, as torch's GradScaler asks for them."""
        return [{"params": list(self.parameters.values())}]

    def check_gradients(self) -> None:
        """Raises TrainingError if a parameter has no gradient."""
        names = [name for name, p in self.parameters.items() if p.grad is None]
        if names:
            shown = ", ".join(names[:3])
            if len(names) > 3:
                shown += " and more"
            raise TrainingError(f"{shown}: no gradient arrives; does forward use it?")

    def reset(self) -> None:
        """Sets the state to zero, for a new model."""
        for tensor in self.state().values():
            tensor.zero_()  # does nothing to another rank's, which is on the meta device

    def state(self) -> dict[str, Tensor]:
        """The state by name: the live tensors; what another rank owns is on the meta device."""
        state = {}
        for part in self.parts:
            state.update(part.state())
        return state
