"""Limit what a training folder of a search may use, by the runs of the search's first folder."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from sm_nanogpt.entry_point.files import open_file, read_json
from sm_nanogpt.entry_point.safetensors_file import LARGEST_HEADER, read_header
from sm_nanogpt.launcher.curve import total_steps
from sm_nanogpt.launcher.trying.history import SearchLedger
from sm_nanogpt.launcher.trying.refusal import Refused

MAX_SIZE_RATIO = 1.1  # times the parameters, and the bytes, of the first folder's model
MAX_TIME_RATIO = 1.3  # times the time of the first folder
# The limit on shared seeds: the runs of the base may be of a day when the machine was less busy.
MAX_TIME_RATIO_SHARED = 2 * MAX_TIME_RATIO
MAX_SIZE_RATIOS = {"tokens": 1.0, "parameters": MAX_SIZE_RATIO, "bytes": MAX_SIZE_RATIO}
# Fields of the entry of a run in the ledger.
RUN_TIME_FIELD = "seconds"
JUDGE_TIME_FIELD = "judge_seconds"
TIME_FIELDS = {RUN_TIME_FIELD: "time", JUDGE_TIME_FIELD: "time before the judge"}
ENTRY_BYTES = 64  # the times and the mode of a file can hold fewer bytes
# A run is ended after KILL_RATIO times the time of the first folder, and KILL_SECONDS more.
KILL_RATIO = 4.0
KILL_SECONDS = 60
MAX_SLOWDOWN = 2.0  # of runs by a busy machine


class Budget:
    """The limits for the folders of a search, by the runs in its ledger.

    A training folder is named by its SHA-256.
    """

    def __init__(self, ledger: SearchLedger) -> None:
        self.ledger = ledger

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raise Refused for more tokens, parameters, or bytes than the search began with."""
        runs = self.ledger.of("run")
        if not runs:
            return
        for name, size in sizes.items():
            first_size = runs[0][name]
            max_ratio = MAX_SIZE_RATIOS[name]
            if size > max_ratio * first_size:
                ratio = f"{size / first_size:.2f}x the {name} that the search began with"
                raise Refused(f"{ratio}; at most {max_ratio:g}x")

    def mean_seconds(self, folder: str, field: str = RUN_TIME_FIELD) -> float:
        """The mean seconds of a folder's runs; 0 if it has none. field: a key of TIME_FIELDS."""
        runs = self.ledger.runs_of(folder)
        if not runs:
            return 0.0
        return fmean(run[field] for run in runs)

    def first_seconds(self, field: str = RUN_TIME_FIELD) -> float:
        """The mean seconds of the runs of the search's first folder; 0 if it has none."""
        return self.mean_seconds(self.ledger.start["folder"], field)

    def check_time(self, folder: str, base: str, seeds: Sequence[int], max_ratio: float) -> None:
        """Raise Refused if the runs of a folder with these seeds take too long in total.

        The runs may take max_ratio times as long as the runs of the search's first folder. So may
        the processes that compute the runs' models for the judge. The sum counts, since a median
        would not show a folder that is slow for a few seeds.
        """
        runs = [run for run in self.ledger.runs_of(folder) if run["seed"] in seeds]
        for field, description in TIME_FIELDS.items():
            expected = len(runs) * self.first_seconds(field) * self.slowdown(base, seeds, field)
            ratio = sum(run[field] for run in runs) / expected
            if ratio > max_ratio:
                raise Refused(f"takes {ratio:.2f}x the {description} of the search's first folder")

    def slowdown(self, base: str, seeds: Sequence[int], field: str) -> float:
        """How many times longer runs with these seeds took on a busy machine: 1 to MAX_SLOWDOWN.

        The mean time of the base folder's runs with these seeds, divided by the mean of its runs
        with other seeds; 1 if either set is empty. base: the SHA-256 of the base folder. field: a
        key of TIME_FIELDS.

        A run on a CPU is measured in processor time. That too grows on a busy machine: other
        programs share the caches and the arithmetic units of the core.
        """
        times = list[float]()
        other_times = list[float]()
        for run in self.ledger.runs_of(base):
            if run["seed"] in seeds:
                times.append(run[field])
            else:
                other_times.append(run[field])
        if not times or not other_times:
            return 1.0
        return min(MAX_SLOWDOWN, max(1.0, fmean(times) / fmean(other_times)))

    def max_seconds(self, field: str = RUN_TIME_FIELD) -> float:
        """The seconds that a run may take; infinite for the first runs of the search.

        field: JUDGE_TIME_FIELD for the seconds that a model may compute for the judge.
        """
        first_seconds = self.first_seconds(field)
        if not first_seconds:
            return math.inf
        return KILL_SECONDS + KILL_RATIO * first_seconds


def sizes_of(model: Path) -> dict[str, int]:
    """The parameters of a model, the tokens that it was trained on, and the bytes of its directory.

    The tokens are as its training.json claims. Raises Refused if a size cannot be read.
    """
    try:
        config = read_json(model / "training.json")["config"]
        tokens_per_step = config["batch_size"] * config["block_size"]
        tokens = int(total_steps(config) * tokens_per_step)
        with open_file(model / "model.safetensors") as file:
            tensors, _ = read_header(file, LARGEST_HEADER)
        parameters = sum(math.prod(tensor["shape"]) for tensor in tensors.values())
        n_bytes = sum(bytes_of(path) for path in paths_below(model))
    except Exception as error:  # the run may have written anything
        raise Refused(f"its model cannot be read: {type(error).__name__}: {error}") from None
    return {"parameters": parameters, "tokens": tokens, "bytes": n_bytes}


def paths_below(directory: Path) -> Iterator[Path]:
    """Yield all files and directories below a directory.

    Raises OSError if a directory cannot be listed: its files could still be read by their names.
    """

    def fail(error: OSError) -> None:
        raise error

    for name, directories, files in os.walk(directory, onerror=fail):
        for child in (*directories, *files):
            yield Path(name, child)


def bytes_of(path: Path) -> int:
    """The bytes of a file or a directory: of its content, name, times, and mode.

    They all count, since a model could hide in the names of empty files.
    """
    size = path.lstat().st_size if path.is_file() else 0
    return size + len(os.fsencode(path.name)) + ENTRY_BYTES
