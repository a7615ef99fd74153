"""Metrics: the numbers of a step, as a line of the log and as SageMaker reads them from it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

# Each with the format in which it is shown.
METRICS = {
    "train_loss": 5,
    "val_loss": 5,
    "best_loss": 5,  # the lowest val_loss so far, which is that of the model that is kept
    "bits_per_byte": 5,  # val_loss per byte of text, comparable between tokenizers
    "learning_rate": 7,
    "tokens_per_second": 0,
}


class StepTimer:
    """Seconds per step since `restart`, without pauses; 0.0 before the first."""

    def __init__(self) -> None:
        self.last = 0.0  # seconds that the host took for the last step; a GPU may lag behind it
        self.measured = 0.0  # seconds per step when the device was last waited for
        self.restart()

    def restart(self) -> None:
        self.steps = 0
        self.since = time.perf_counter()

    @contextmanager
    def step(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.last = time.perf_counter() - began
        self.steps += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began

    def measure(self) -> float:
        """The seconds per step; call it when the device has finished them."""
        if self.steps == 0:
            self.measured = 0.0
        else:
            self.measured = (time.perf_counter() - self.since) / self.steps
        return self.measured


def metric_line(row: Mapping[str, Any], max_steps: int, seconds_left: float | None) -> str:
    """`step=250/2000 train_loss=1.81234 ... time_left=0:00:12`, which metric regexes read."""
    metrics = [f"step={row['step']}/{max_steps}"]
    for name, digits in METRICS.items():
        if name in row:
            metrics.append(f"{name}={row[name]:.{digits}f}")
    if seconds_left is not None:
        metrics.append(f"time_left={duration(seconds_left)}")
    return " ".join(metrics)


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def best_lines(
    rows: Sequence[Mapping[str, Any]], best_step: int, generations: int = 1
) -> Iterator[str]:
    """Which step's model is kept, and why not the last one's."""
    # A run that is resumed where it is to end has a second row of its last step.
    best = next(row for row in reversed(rows) if row["step"] == best_step)
    last = rows[-1]
    yield f"best val_loss {best['val_loss']:.5f} at step {best_step}"
    val_loss_rose = last["val_loss"] > 1.05 * best["val_loss"]
    train_loss_fell = last.get("train_loss", math.inf) < best.get("train_loss", 0.0)
    was_early = 2 * best_step <= last["step"]
    if val_loss_rose and train_loss_fell and was_early and generations == 1:
        yield (
            f"note: the run memorized its text: val_loss rose to {last['val_loss']:.5f}, so the"
            f" model is that of step {best_step}; use more text, or set max_steps={best_step}"
        )
    elif best_step < last["step"]:
        of_generation = ""
        if generations > 1:
            number = max(1, math.ceil(best_step * generations / last["step"]))
            of_generation = f"generation {number} of {generations}, "
        kept = f"that of {of_generation}step {best_step}"
        yield f"note: the model is {kept}; no later val_loss was lower"


def metric_definitions() -> list[dict[str, str]]:
    """What SageMaker needs to read the metrics of a log; not anchored, as mpirun tags lines."""
    number = r"([0-9]+(?:\.[0-9]+)?)"
    return [{"Name": name, "Regex": f"{name}={number}"} for name in ("step", *METRICS)]
