"""Checkpoints: what a resumed run needs, in one file, and the curve of metrics beside it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from .errors import ConfigError, FormatError, TrainingError, log, os_reason
from .files import replacing
from .safetensors_file import read_metadata, read_safetensors, write_safetensors

CHECKPOINTS = "checkpoint-*.safetensors"
CURVES = "metrics-*.jsonl"
T = TypeVar("T")


class Checkpoints:
    """The checkpoints of one run in one directory.

    checkpoint-STEP holds weights, optimizer state, the weights with the lowest validation loss so
    far and, as JSON, everything else that a resumed run needs, including its metrics. The last two
    are kept, so a damaged newest one is replaced by the one before.

    metrics-N is the whole curve, as written since the N-th start of the run; the last start's file
    is the one to read. Each start has its own file because SageMaker copies the directory to each
    host, and another host's old copy may be uploaded over the file that rank 0 writes.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.curve = directory / "metrics-00000000.jsonl"  # until begin_curve
        # The steps of the checkpoints, two at most, that this process wrote or loaded, and keeps.
        self.last_steps: list[int] = []
        self.saved_at = time.monotonic()  # when the newest was begun, or the curve
        self.cost = 0.0  # seconds to write the newest

    def claim(self, is_new: bool) -> None:
        """Locks the directory against other runs on this machine while this process lives.

        Raises ConfigError if another run uses it, or if this run is new and the directory holds a
        checkpoint; TrainingError if it cannot be made.
        """
        with self.writing(self.directory):
            self.lock = os.open(self.directory, os.O_RDONLY)
        run_directory = self.directory.parent
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{run_directory} is in use by another run; wait until it ends and resume it, or"
                " choose another --out"
            ) from None
        except OSError:
            pass  # some file systems have no locks
        if is_new and self.steps():
            raise ConfigError(
                f"{run_directory} already holds a run; resume it with --resume, or choose another"
                " --out"
            )

    def path(self, step: int) -> Path:
        return self.directory / f"checkpoint-{step:08d}.safetensors"

    def files(self, pattern: str) -> dict[int, Path]:
        """The files of a pattern, by the number in their names."""
        files = {}
        for path in self.directory.glob(pattern):
            number = path.stem.partition("-")[2]
            if number.isdecimal():
                files[int(number)] = path
        return files

    def steps(self) -> list[int]:
        """The steps of the checkpoints, newest first."""
        return sorted(self.files(CHECKPOINTS), reverse=True)

    @contextmanager
    def writing(self, path: Path) -> Iterator[Path]:
        """Makes the directory of the checkpoints. An OSError becomes a TrainingError for `path`."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            yield path
        except OSError as error:
            raise TrainingError(f"cannot write {path}: {os_reason(error)}") from None

    def save(
        self,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        contents: Iterable[Tensor] | None = None,
    ) -> None:
        """Writes the checkpoint of state["step"], and then drops all but the last two.

        Raises TrainingError if it cannot be written; the earlier ones are untouched.
        """
        self.saved_at = time.monotonic()
        step = state["step"]
        text = json.dumps(state)
        metadata = {"format": "pt", "state": text, "state_sha256": sha256_of(text)}
        with self.writing(self.path(step)) as path:
            write_safetensors(path, tensors, metadata, contents)
            earlier_steps = [earlier for earlier in self.last_steps if earlier != step]
            self.last_steps = [step, *earlier_steps][:2]
            self.prune()
        self.cost = time.monotonic() - self.saved_at

    def due(self, evaluates: bool, seconds: float) -> bool:
        """Whether to write a checkpoint after this step, by this rank's clock.

        If `seconds` is 0, evaluations write one, and so does each minute; but a checkpoint that
        took long to write waits until writing takes 2 % of the time, or for ten minutes.
        """
        seconds_passed = time.monotonic() - self.saved_at
        cheap_after = min(50 * self.cost, 600)
        if evaluates and seconds_passed >= cheap_after:
            return True
        return seconds_passed > (seconds or max(60, cheap_after))

    def begin_curve(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Begins the curve of this start with the rows before it. Raises TrainingError."""
        self.saved_at = time.monotonic()
        number = max(self.files(CURVES), default=0) + 1
        self.curve = self.directory / f"metrics-{number:08d}.jsonl"
        with self.writing(self.curve), replacing(self.curve) as file:
            for row in rows:
                file.write(json.dumps(row).encode() + b"\n")

    def extend_curve(self, row: Mapping[str, Any]) -> None:
        """Adds a row to the curve of this start. Raises TrainingError."""
        with self.writing(self.curve), self.curve.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def prune(self) -> None:
        """Deletes older checkpoints and curves, and checkpoints that load_latest passed over."""
        needed = {self.curve, *map(self.path, self.last_steps)}
        files = [*self.files(CHECKPOINTS).values(), *self.files(CURVES).values()]
        for path in files:
            if path in needed:
                continue
            # If a file goes while SageMaker uploads it, the job may fail; a later call deletes it.
            uploading = path.with_name(f"{path.name}.sagemaker-uploading")
            if not uploading.exists() or uploading.with_suffix(".sagemaker-uploaded").exists():
                path.unlink()

    def latest_state(self) -> dict[str, Any]:
        """The state of the newest checkpoint, for --resume. Raises ConfigError if there is none.

        Every rank asks for it, so it reads no tensors: load_latest finds out if they are damaged.
        The state has a SHA-256 of its own.
        """
        state = self.newest_intact(lambda path: read_state(read_metadata(path)), lambda line: None)
        if state is None:
            raise ConfigError(f"--resume: there is no checkpoint in {self.directory}")
        return state

    def load_latest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest intact checkpoint; None for none. Raises TrainingError if all are damaged."""

        def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
            tensors, metadata = read_safetensors(path, sealed=True)
            return tensors, read_state(metadata)

        return self.newest_intact(read, log)

    def newest_intact(self, read: Callable[[Path], T], warn: Callable[[str], None]) -> T | None:
        """What `read` makes of the newest checkpoint that it can read; None if there is none.

        Raises TrainingError if all are damaged.
        """
        problem = ""  # of the newest that is damaged
        for step in self.steps():
            try:
                contents = read(self.path(step))
            except (FormatError, OSError, KeyError, ValueError) as error:
                problem = problem or str(error)
                warn(f"checkpoint of step {step} is skipped: {error}")
            else:
                self.last_steps = [step]
                return contents
        if problem:
            raise TrainingError(f"every checkpoint in {self.directory} is damaged: {problem}")
        return None


def read_state(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The state in a checkpoint's metadata.

    Raises FormatError if it is damaged, or if an older version of this file wrote it; KeyError.
    """
    if "state_sha256" not in metadata:
        raise FormatError("its state has no SHA-256; an older version of the script wrote it")
    if sha256_of(metadata["state"]) != metadata["state_sha256"]:
        raise FormatError("its state is damaged: its SHA-256 does not match")
    state: dict[str, Any] = json.loads(metadata["state"])
    return state


def sha256_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
