"""Hyperparameters: their types, defaults, ranges and meanings in `Config`. Imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError, counted, nearest_name
from .presets import PRESETS


def hyperparameter(
    default: Any,
    help: str,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    *,
    choices: Sequence[str] = (),
    kept_on_resume: bool = False,
    shape: bool = False,
    group: str = "",
) -> Any:
    """A field of Config; `group` begins a section of --help.

    A resumed run cannot change one that is `kept_on_resume`, or that is part of the model's
    `shape`. A run that starts from a model keeps its shape too.
    """
    facts = {
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "kept_on_resume": kept_on_resume or shape,
        "shape": shape,
        "group": group,
    }
    return field(default=default, metadata=facts)


# Tokens per forward and backward pass: enough to keep a GPU busy, few enough for `gpt2` to fit an
# A10G (24 GB).
TOKENS_PER_PASS = 1 << 14


@dataclass(frozen=True)
class OptimizerChoice:
    """A value of `optimizer`: what it is, and its peak learning rate where none is given."""

    description: str
    learning_rate: float
    averages: int  # that it keeps of the gradient of each matrix
    # Whether the ranks share them, so that each keeps only some.
    shares_averages: bool = False
    # Whether the learning rates of presets, sizes and fine-tuning are meant for it.
    has_tuned_rates: bool = False

    def averages_per_rank(self, n_ranks: int) -> float:
        return self.averages / n_ranks if self.shares_averages else self.averages


# optim.py makes each of them, by its name in BUILDERS.
OPTIMIZERS = {
    "muon": OptimizerChoice(
        "AdamW for all but matrices", 0.02, averages=1, shares_averages=True, has_tuned_rates=True
    ),
    "adamw": OptimizerChoice("for all weights", 0.001, averages=2),
}
DEFAULT_OPTIMIZER = "muon"


def has_tuned_rates(optimizer: str | None) -> bool:
    """Whether the learning rates of presets, sizes and fine-tuning are for this optimizer.

    None or "" is the default one. An unknown name is refused elsewhere.
    """
    choice = OPTIMIZERS.get(optimizer or DEFAULT_OPTIMIZER)
    return choice is not None and choice.has_tuned_rates


@dataclass(frozen=True)
class Config:
    """Every hyperparameter: its type, default, allowed range and meaning. The one source of truth.

    A value may be text. Raises ConfigError if it is out of its range, or two contradict each other.
    """

    n_layer: int = hyperparameter(4, "number of layers", 1, 1024, shape=True, group="model")
    n_head: int = hyperparameter(2, "number of attention heads", 1, 1024, shape=True)
    n_kv_head: int = hyperparameter(0, "heads of keys and values (0: n_head)", 0, 1024, shape=True)
    head_dim: int = hyperparameter(0, "width of a head (0: n_embd/n_head)", 0, 1 << 12, shape=True)
    n_embd: int = hyperparameter(128, "width of the model", 2, 1 << 16, shape=True)
    block_size: int = hyperparameter(64, "context length in tokens", 2, 1 << 17, shape=True)
    n_hidden: int = hyperparameter(0, "width of an MLP (0: 8/3 of n_embd)", 0, 1 << 18, shape=True)
    tie_embeddings: bool = hyperparameter(False, "use the embedding as the head", shape=True)
    norm_weights: bool = hyperparameter(False, "learn a weight for each norm", shape=True)
    rope_theta: float = hyperparameter(10000.0, "base of rotary wavelengths", 1, 1e12, shape=True)
    vocab_size: int = hyperparameter(
        0, "rows of embedding and head (0: one for each token)", 0, 1 << 20, shape=True
    )
    dropout: float = hyperparameter(0.0, "dropout probability", 0, 0.95)

    validation_fraction: float = hyperparameter(
        0.1,
        "fraction of the text, at its end, for validation",
        0.001,
        0.9,
        kept_on_resume=True,
        group="data",
    )
    mask_documents: bool = hyperparameter(
        False, "stop attention at the end of a document (for tokens; slower)", kept_on_resume=True
    )
    batch_size: int = hyperparameter(
        12, "sequences per optimizer step, over all processes", 1, 1 << 20, kept_on_resume=True
    )
    gradient_accumulation_steps: int = hyperparameter(
        0, "passes over a process's slice (0: of 16,384 tokens, or 65,536 on large GPUs)", 0
    )
    seed: int = hyperparameter(
        1337, "seed of initial weights, batches and dropout", 0, kept_on_resume=True
    )

    max_steps: int = hyperparameter(
        2000, "number of optimizer steps of each generation", 1, 10**9, group="schedule"
    )
    generations: int = hyperparameter(
        1,
        "models trained in turn, each later one also by the best before it",
        1,
        100,
        kept_on_resume=True,
    )
    teacher_share: float = hyperparameter(0.5, "share of a teacher in what is learned", 0, 1)
    teacher_temperature: float = hyperparameter(1.2, "divisor of a teacher's logits", 0.1, 100)
    optimizer: str = hyperparameter(
        DEFAULT_OPTIMIZER,
        ", ".join(f"{name} ({choice.description})" for name, choice in OPTIMIZERS.items()),
        choices=tuple(OPTIMIZERS),
        kept_on_resume=True,
    )
    learning_rate: float = hyperparameter(
        0.0,
        "peak, with muon that of the matrices (0: "
        + ", ".join(f"{choice.learning_rate} with {name}" for name, choice in OPTIMIZERS.items())
        + ")",
        0,
        1e37,
    )
    embedding_learning_rate: float = hyperparameter(
        0.1, "peak learning rate of the embedding (muon)", 0, 1e37
    )
    head_learning_rate: float = hyperparameter(
        0.02, "peak learning rate of the head, also if tied (muon)", 0, 1e37
    )
    warmup_steps: int = hyperparameter(0, "steps in which the learning rate rises to its peak", 0)
    decay_fraction: float = hyperparameter(
        0.8, "fraction of the steps, at the end, in which the learning rate falls", 0, 1
    )
    final_learning_rate: float = hyperparameter(
        0.0, "learning rate at the end, as a fraction of the peak", 0, 1
    )
    weight_decay: float = hyperparameter(0.0, "decoupled weight decay of the matrices", 0, 10)
    momentum: float = hyperparameter(0.9, "momentum of Muon", 0, 0.9999)
    beta1: float = hyperparameter(0.8, "decay of AdamW's mean gradient", 0, 0.9999)
    beta2: float = hyperparameter(0.95, "decay of AdamW's mean squared gradient", 0, 0.999999)
    short_windows: float = hyperparameter(
        0.0, "fraction of the steps, at first, with windows of block_size/8, /4, then /2", 0, 1
    )
    grad_clip: float = hyperparameter(0.0, "norm to clip gradients at (0: none)", 0, 10**9)

    log_interval: int = hyperparameter(50, "steps between metric lines", 1, group="report")
    eval_interval: int = hyperparameter(250, "steps between evaluations", 1)
    eval_tokens: int = hyperparameter(1 << 15, "validation tokens per evaluation (0: all)", 0)
    sample_length: int = hyperparameter(
        300, "tokens sampled after training (a third before)", 0, 10**6
    )
    checkpoint_seconds: float = hyperparameter(
        0.0, "seconds between checkpoints; evaluations write one too (0: 60 or more)", 0, 10**9
    )
    moments: int = hyperparameter(
        8,
        "models kept to show how it learned, from step 0 to the last (0: none; none over 5 million"
        " parameters)",
        0,
        100,
    )

    hang_seconds: float = hyperparameter(
        150.0, "fail after this long, and 5 steps, without progress", 5, 1800, group="machine"
    )
    device: str = hyperparameter("auto", "where to compute", choices=("auto", "cuda", "mps", "cpu"))
    precision: str = hyperparameter(
        "auto",
        "type of the matrix products (auto: the fastest here of bfloat16, float16 and float32)",
        choices=("auto", "bfloat16", "float16", "tf32", "float32"),
    )
    reduce_precision: str = hyperparameter(
        "float32", "type of the gradients that are sent", choices=("float32", "bfloat16")
    )
    recompute: bool = hyperparameter(
        False, "keep each layer's input alone, and compute the rest twice (less memory, slower)"
    )
    compile: str = hyperparameter(
        "auto", "torch.compile (auto: if it pays; off: no graph)", choices=("auto", "on", "off")
    )

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, read_value(f, getattr(self, f.name)))
        if not self.head_dim:
            heads = f"n_head={self.n_head} heads of equal and even width"
            self.check_divides("n_embd", 2 * self.n_head, f"cannot be divided into {heads}")
        self.check_divides("head_dim", 2, "is not even, as rotary positions need")
        self.check_divides("n_head", self.kv_heads, f"is no multiple of n_kv_head={self.kv_heads}")
        if self.short_windows:
            self.check_divides("block_size", 8, "is no multiple of 8, as short_windows needs")
        if self.warmup_steps > self.max_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} is over max_steps={self.max_steps}"
            )
        if not self.learning_rate:  # records and reports show the one that is used
            rate = OPTIMIZERS[self.optimizer].learning_rate
            object.__setattr__(self, "learning_rate", rate)
        self.check_world_size(1)

    def check_divides(self, name: str, divisor: int, cannot: str) -> None:
        """Raises ConfigError, with the nearest values that fit, unless the divisor divides it."""
        value = getattr(self, name)
        below = value - value % divisor
        if below == value:
            return
        nearest = f"{below} or {below + divisor}" if below > 0 else str(divisor)
        raise ConfigError(f"{name}={value} {cannot}; the nearest that fit: {name}={nearest}")

    @property
    def total_steps(self) -> int:
        """The optimizer steps of all generations, which are counted on."""
        return self.generations * self.max_steps

    @property
    def head_width(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def hidden_dim(self) -> int:
        """Width inside the gated MLP: 8/3 of n_embd gives it the size of an ungated 4x MLP."""
        return self.n_hidden or 8 * round(self.n_embd / 3)

    @property
    def matrix_parameters(self) -> int:
        """Parameters of the layers, without embedding and head."""
        attention = 2 * (self.n_head + self.kv_heads) * self.head_width
        return self.n_layer * self.n_embd * (attention + 3 * self.hidden_dim)

    def passes(self, world_size: int, tokens: int = TOKENS_PER_PASS) -> int:
        """The number of passes over a process's slice of a batch, of at most these tokens each.

        They have equally many rows, if at most twice the fewest passes allow that: a GPU compiles
        and records one for each number of rows. Else the fewest do, and differ by one row.
        """
        if self.gradient_accumulation_steps:
            return self.gradient_accumulation_steps
        rows = max(1, self.batch_size // world_size)
        fewest = math.ceil(rows / max(1, tokens // self.block_size))
        equal = (n for n in range(fewest, 2 * fewest + 1) if rows % n == 0)
        return next(equal, fewest)

    def check_world_size(self, world_size: int) -> None:
        """Raises ConfigError unless world_size processes share the batch evenly."""
        passes = max(1, self.gradient_accumulation_steps)
        cannot = f"cannot be shared by {counted(world_size, 'process')}"
        if passes > 1:
            cannot += f" with gradient_accumulation_steps={passes}"
        self.check_divides("batch_size", world_size * passes, cannot)


def check_resumable(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises ConfigError, which names the difference, unless `current` may continue from `saved`.

    Both have the config of a run and the hash of its text; saved may have the step that it reached.
    """
    differences = []
    for f in dataclasses.fields(Config):
        # A hyperparameter that is newer than the checkpoint was its default.
        saved_value = saved["config"].get(f.name, f.default)
        value = current["config"][f.name]
        is_kept = f.metadata["kept_on_resume"]
        if f.name == "max_steps" and current["config"]["generations"] > 1:
            is_kept = True  # a generation begins where the one before ended
        if is_kept and saved_value != value:
            differences.append(f"{f.name} (from {saved_value!r} to {value!r})")
    if saved["corpus_sha256"] != current["corpus_sha256"]:
        differences.append("its text")
    total_steps = Config(**current["config"]).total_steps
    if saved.get("step", 0) > total_steps:
        differences.append(f"max_steps (to {total_steps}, as it is at step {saved['step']})")
    if differences:
        raise ConfigError(
            f"a resumed run cannot change {', '.join(differences)}; leave this out, and a preset"
            " that sets it"
        )


def whole_number(text: str) -> int:
    """Reads 1000, 1000.0 and 1e3. Raises ValueError."""
    number = float(text)
    if "e" in text.lower() and number.is_integer():
        return int(number)
    return int(text.removesuffix(".0"))


TRUTH = {"true": True, "1": True, "false": False, "0": False}

# How to read each type of field, and what to call it.
TYPES: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (whole_number, "a whole number"),
    "float": (float, "a number"),
    "bool": (lambda text: TRUTH[text.lower()], "True or False"),
    "str": (str, "text"),
}


def read_value(f: dataclasses.Field[Any], setting: Any) -> Any:
    """The value of a field, read from its text. Raises ConfigError unless the field allows it."""
    read, _ = TYPES[str(f.type)]
    with suppress(ValueError, KeyError):
        value = read(str(setting))
        if is_allowed(f, value):
            return value
    suggestion = nearest_name(str(setting), f.metadata["choices"])
    raise ConfigError(f"{f.name}={setting!r}: must be {allowed(f)}{suggestion}")


def is_allowed(f: dataclasses.Field[Any], value: Any) -> bool:
    """Whether a value is one of the choices of a field, or in its range."""
    if f.type == "str":
        choices = f.metadata["choices"]
        return not choices or value in choices
    return bool(f.metadata["minimum"] <= value <= f.metadata["maximum"])


def allowed(f: dataclasses.Field[Any]) -> str:
    """The values that the field allows, in words."""
    minimum, maximum = f.metadata["minimum"], f.metadata["maximum"]
    if f.metadata["choices"]:
        return f"one of {', '.join(f.metadata['choices'])}"
    _, number = TYPES[str(f.type)]
    if maximum < math.inf:
        return f"{number} from {minimum} to {maximum}"
    if minimum > -math.inf:
        return f"{number}, at least {minimum}"
    return number


def make_config(
    values: Mapping[str, Any], preset: str | None = None, base: Mapping[str, Any] | None = None
) -> Config:
    """A Config of values (text or typed) over a preset over a base over the defaults.

    A name may have `-` instead of `_`. An empty value counts as not given, since SageMaker turns an
    unset hyperparameter into that. Raises ConfigError for an unknown name or a wrong value.
    """
    base = base or {}
    preset_values = dict(PRESETS[preset]) if preset else {}
    if not has_tuned_rates(values.get("optimizer") or base.get("optimizer")):
        preset_values.pop("learning_rate", None)
    chosen = {**base, **preset_values}
    names = [f.name for f in dataclasses.fields(Config)]
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in names:
            raise ConfigError(
                f"{key}={value!r}: there is no such hyperparameter{nearest_name(name, names)}"
            )
        if value not in (None, ""):
            chosen[name] = value
    return Config(**chosen)


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that is a pure function of its parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1
