"""Measure how long a job of each size takes on this machine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression
from typing import Any

from sm_nanogpt.entry_point.cores import cores
from sm_nanogpt.entry_point.text import Corpus
from sm_nanogpt.launcher.forecast.pilots import MAX_SAMPLE_TOKENS, PlannedPilot, Trial, run_trials
from sm_nanogpt.launcher.forecast.sizes import Sizes
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.launching.forecasts import ForecastLedger, Pilot
from sm_nanogpt.launcher.local.backend import LocalPlacement, plan_processes
from sm_nanogpt.launcher.machines import is_busy

logger = logging.getLogger(__name__)

LONG_STEP_SECONDS = 0.25  # the time of a longer step is computed from that of a smaller size
ROUND_STEPS = 24  # twelve steps with windows of the whole length, and four of each shorter length
MAX_ROUNDS = 6  # of steps that are timed for a small model
TIMED_SECONDS = 4.0  # that timing one size may take


@dataclass(frozen=True)
class LocalTimes:
    """The time of a job of each size on this machine."""

    seconds: dict[float, float | None]  # by size; None if it is not known
    busy: bool  # True: other programs use the machine, so times come from the pilots


@dataclass(frozen=True)
class LocalClock:
    """Times jobs on this machine by a few of their steps, and logs each measurement.

    The ledger keeps the measurements.
    """

    sizes: Sizes
    corpus: Corpus
    ledger: ForecastLedger

    def times(self, sizes: Sequence[float], pilots: Mapping[PlannedPilot, Pilot]) -> LocalTimes:
        """The time of a job of each size on this machine, by a few of its steps.

        If other programs use the machine, times are computed from the processor time of the pilots,
        which hardly depends on other programs.
        """
        seconds = self.timed_seconds(sizes)
        if seconds is not None:
            return LocalTimes(seconds, busy=False)
        step_seconds = self.fit_step_seconds(pilots)
        by_size = dict[float, float | None]()
        for size in sizes:
            by_size[size] = None
            if step_seconds is not None and not self.placement(size).gpus:
                config = self.sizes.config(size)
                by_size[size] = self.steps_with_evaluations(config) * step_seconds(config)
        return LocalTimes(by_size, busy=True)

    def timed_seconds(self, sizes: Sequence[float]) -> dict[float, float | None] | None:
        """The seconds of a job of each size, by steps that are timed; None on a busy machine.

        sizes are in rising order. The time of a long step is computed from the speed of a smaller
        size.
        """
        seconds = dict[float, float | None]()
        operations_per_second = math.inf  # so that the steps of the first size are timed
        seconds_around = 0.0
        for size in sizes:
            config = self.sizes.config(size)
            n_operations = self.sizes.operations_of_step(config)
            step_seconds = n_operations / operations_per_second
            if step_seconds < LONG_STEP_SECONDS:
                n_steps = min(steps_to_time(step_seconds), config.max_steps)
                pilot = self.time_trial(self.first_steps(size, n_steps))
                if pilot is None:
                    return None
                seconds_around = pilot.around
                step_seconds = pilot.step_seconds
                operations_per_second = n_operations / step_seconds
            seconds[size] = seconds_around + step_seconds * self.steps_with_evaluations(config)
        return seconds

    def fit_step_seconds(
        self, pilots: Mapping[PlannedPilot, Pilot]
    ) -> Callable[[Any], float] | None:
        """A function that gives the seconds of a step on all cores, for a config.

        It is a line through the processor seconds of the pilots' steps, over the operations of a
        step. All cores share the operations; the constant cost of a step is on one core. None if no
        processor time is recorded, or if the line does not rise.
        """
        works = []
        seconds = []
        for planned, pilot in pilots.items():
            if pilot.cpu_seconds is None:
                return None
            config = self.sizes.config(planned.size, planned.n_tokens)
            works.append(self.sizes.operations_of_step(config))
            seconds.append(pilot.cpu_seconds / config.max_steps)
        slope, intercept = linear_regression(works, seconds)

        def step_seconds(config: Any) -> float:
            return max(0.0, intercept) + slope * self.sizes.operations_of_step(config) / cores()

        return step_seconds if slope > 0 else None

    def steps_with_evaluations(self, config: Any) -> float:
        """The steps of a run, plus as many as its evaluations take, without the last one."""
        n_tokens = min(len(self.corpus.val), config.eval_tokens)
        # A step without its backward pass takes a third of the time.
        evaluation = n_tokens / (config.batch_size * config.block_size) / 3
        n_evaluations = (config.max_steps - 1) // config.eval_interval
        return float(config.max_steps + n_evaluations * evaluation)

    def placement(self, size: float) -> LocalPlacement:
        """The processes and the GPUs that a job of a size gets on this machine."""
        job = TrainingJob(data="file:///", hyperparameters=self.sizes.hyperparameters(size))
        job._source = self.sizes.training_folder
        return plan_processes(job)

    def first_steps(self, size: float, n_steps: int) -> Trial:
        """A trial of the first steps of a job on this machine, with windows of all its lengths."""
        values = self.sizes.hyperparameters(size)
        placement = self.placement(size)
        values |= {"max_steps": n_steps, "device": "auto", "log_interval": 1, "sample_length": 300}
        if not placement.gpus:
            values["processes"] = placement.processes
        threads = max(1, cores() // placement.processes)
        n_tokens = min(self.sizes.n_tokens, MAX_SAMPLE_TOKENS)
        return Trial(f"speed of size {size:g}", values, n_tokens, threads)

    def time_trial(self, trial: Trial) -> Pilot | None:
        """Run the first steps of a job, unless the ledger has their times.

        Returns None, and keeps nothing, if other programs use this machine: the steps would seem
        too slow.
        """
        recorded = self.ledger.pilots.get(trial.name)
        if recorded is not None:
            return recorded
        if is_busy():
            return None
        [(_, pilot)] = run_trials([trial], self.corpus, self.sizes.training_folder, 1)
        if is_busy():
            return None
        self.ledger.add_pilot(trial.name, pilot)
        logger.info(f"pilot: {trial.name}: {pilot.seconds:.0f} s (1 of 1)")
        return pilot


def steps_to_time(step_seconds: float) -> int:
    """How many steps to time, in about TIMED_SECONDS. step_seconds is 0 if it is not known."""
    n_rounds = MAX_ROUNDS
    if step_seconds:
        n_rounds = round(TIMED_SECONDS / ROUND_STEPS / step_seconds)
    return ROUND_STEPS * max(1, min(n_rounds, MAX_ROUNDS))
