"""Checkpoints, and the safetensors format (huggingface.co/docs/safetensors)."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointError, ConfigError, FormatError, log


class Checkpoints:
    """The checkpoints of one run in one directory.

    checkpoint-STEP holds weights, optimizer state and, as JSON, everything else that a resumed run
    needs, including its metrics; best-STEP holds the weights with the lowest validation loss. The
    last two checkpoints are kept, with the best weights that they refer to, so a damaged newest one
    is replaced by the one before.

    metrics-START holds the whole curve as the start of that number knows it; the newest counts.
    SageMaker copies the directory to each host at each start, and may upload what another host got
    over what rank 0 wrote since.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.start = 0  # the number of this start, once its curve has begun
        self.passed_over: dict[int, str] = {}  # steps of damaged checkpoints, and what is wrong

    def claim(self) -> None:
        """Locks the directory against other runs on this machine while this process lives.

        Raises:
            ConfigError: another run uses it.
            CheckpointError: it cannot be made.
        """
        with self.writing(self.directory):
            self.claimed = os.open(self.directory, os.O_RDONLY)
            try:
                fcntl.flock(self.claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another run uses {self.directory.parent}; wait until it ends and"
                    " resume it, or choose another directory"
                ) from None
            except OSError as error:  # some file systems have no locks
                log(
                    f"note: {self.directory} cannot be locked ({error.strerror}); do not start a"
                    " second run there"
                )

    def check_fresh(self) -> None:
        """Raises ConfigError if there is a checkpoint."""
        if self.steps("checkpoint"):
            raise ConfigError(
                f"{self.directory.parent} already holds a run; resume it with --resume, or"
                " choose another --out"
            )

    def path(self, kind: str, step: int) -> Path:
        suffix = "jsonl" if kind == "metrics" else "safetensors"
        return self.directory / f"{kind}-{step:08d}.{suffix}"

    def steps(self, kind: str) -> list[int]:
        """The steps of the files of a kind, newest first; of metrics, the starts."""
        names = self.directory.glob(f"{kind}-*{self.path(kind, 0).suffix}")
        stems = (path.stem.removeprefix(f"{kind}-") for path in names)
        return sorted((int(stem) for stem in stems if stem.isdecimal()), reverse=True)

    @contextmanager
    def writing(self, path: Path) -> Iterator[Path]:
        """Makes the directory for a file; raises CheckpointError where it cannot be written."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            yield path
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from None

    def save(self, kind: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Writes a checkpoint and then drops the files that no kept checkpoint needs.

        Raises:
            CheckpointError: it cannot be written; the earlier ones are untouched.
        """
        with self.writing(self.path(kind, state["step"])) as path:
            write_safetensors(path, tensors, {"format": "pt", "state": json.dumps(state)})
            if kind == "checkpoint":
                self.passed_over.pop(state["step"], None)
                self.prune(state["step"])

    def write_metrics(self, rows: Sequence[Mapping[str, Any]], append: bool) -> None:
        """Adds rows to the curve of this start, or begins it. Raises CheckpointError."""
        if not append:
            self.start = max(self.steps("metrics"), default=0) + 1
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        with self.writing(self.path("metrics", self.start)) as path:
            if append:
                with path.open("a") as file:
                    file.write(lines)
            else:
                with replacing(path) as temporary:
                    temporary.write_text(lines)

    def prune(self, newest: int) -> None:
        """Deletes all but the last two intact checkpoints up to `newest`, and what neither needs.

        Later ones are damaged: the run resumed from an earlier one.
        """
        whole = [step for step in self.steps("checkpoint") if step not in self.passed_over]
        kept = [step for step in whole if step <= newest][:2]
        best = [self.state_of(step).get("best_step") for step in kept]
        needed: dict[str, list[Any]] = {"checkpoint": kept, "best": best, "metrics": [self.start]}
        unneeded = [
            self.path(kind, step)
            for kind in needed
            for step in self.steps(kind)
            if step not in needed[kind]
        ]
        for path in (*unneeded, *self.directory.glob("*.sagemaker-ignore")):
            # If a file goes while SageMaker uploads it, the job may fail; a later call deletes it.
            uploading = path.with_name(f"{path.name}.sagemaker-uploading")
            if not uploading.exists() or uploading.with_suffix(".sagemaker-uploaded").exists():
                path.unlink()

    def state_of(self, step: int) -> dict[str, Any]:
        """The state that a checkpoint holds, without its tensors; {} if it cannot be read."""
        try:
            metadata = read_safetensors_header(self.path("checkpoint", step))[1]
            state = json.loads(metadata["state"])
        except (FormatError, OSError, KeyError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def latest_state(self) -> dict[str, Any]:
        """The state that load_latest gives, unlogged. Raises CheckpointError if none exists."""
        loaded = self.load_latest(keep=False, warn=lambda line: None)
        if loaded is None:
            raise CheckpointError(f"there is no checkpoint to resume from in {self.directory}")
        return loaded[1]

    def load(
        self, kind: str, step: int, keep: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors (none without `keep`) and the state of a file whose SHA-256 is right.

        Raises:
            FormatError, OSError: it is damaged or missing.
        """
        tensors, metadata = read_safetensors(self.path(kind, step), keep, sealed=True)
        try:
            state = json.loads(metadata["state"])
            if state["step"] != step:
                raise ValueError
        except (KeyError, ValueError, TypeError):
            name = self.path(kind, step).name
            raise FormatError(f"{name} is not a checkpoint of this script") from None
        return tensors, state

    def load_latest(
        self, keep: bool = True, warn: Callable[[str], None] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest intact checkpoint whose best weights are intact; None if no checkpoint exists.

        If no best weights are intact: the newest intact checkpoint, without a best so far.

        Raises:
            CheckpointError: all checkpoints are damaged.
        """
        warn = warn or log
        self.passed_over = {}
        found = fallback = None
        for step in self.steps("checkpoint"):
            loaded = None
            try:
                loaded = self.load("checkpoint", step, keep)
                if (best_step := loaded[1]["best_step"]) is not None:
                    self.load("best", best_step, keep=False)
                found = loaded
                break
            except (FormatError, OSError) as error:
                self.passed_over[step] = str(error)
                fallback = fallback or loaded
        if found is None and fallback is not None:
            tensors, state = fallback
            why = self.passed_over.pop(state["step"])
            warn(f"note: {why}; tracking the best weights anew from step {state['step']}")
            found = tensors, {**state, "best_step": None, "best_val_loss": None}
        if found is None and self.passed_over:
            why = next(iter(self.passed_over.values()))
            raise CheckpointError(f"every checkpoint in {self.directory} is damaged: {why}")
        for step, why in self.passed_over.items():
            warn(f"checkpoint of step {step} is skipped: {why}")
        return found


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes the file whole or not at all: under another name first, flushed to disk, renamed.

    A SHA-256 over header and tensors goes into the metadata.
    """
    header: dict[str, Any] = {}
    offset = 0
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for name, tensor in contents.items():
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    digest = content_digest(header, metadata)
    for tensor in contents.values():
        digest.update(raw_bytes(tensor))
    header["__metadata__"] = {**metadata, "sha256": digest.hexdigest()}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in contents.values():
            file.write(raw_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())


def content_digest(header: Mapping[str, Any], metadata: Mapping[str, str]) -> Any:
    return hashlib.sha256(json.dumps([header, metadata], sort_keys=True).encode())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that is renamed to `path`, for good, when the body succeeds.

    SageMaker uploads all new files in /opt/ml/checkpoints but those with this suffix.
    """
    temporary = path.with_name(f"{path.name}.sagemaker-ignore")
    try:
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


# Bytes. That of a checkpoint holds the curve, so it may exceed the safetensors library's 100 MB.
LARGEST_HEADER = 1_000_000_000


def read_safetensors_header(
    path: Path, largest: int = LARGEST_HEADER
) -> tuple[dict[str, Any], dict[str, str], int]:
    """The tensors' descriptions, the metadata, and where the data begin.

    largest is the size in bytes that the header may have.

    Raises:
        FormatError: the file is not safetensors, or shorter or longer than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise FormatError(f"{path.name} is damaged: it is shorter than its header says")
        if length > largest:
            raise FormatError(f"{path.name} is refused: its header has {length:,} bytes")
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            header = dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))
            end = 0
            for name, entry in header.items():
                first, last = entry["data_offsets"]
                shape, dtype = entry["shape"], DTYPES[entry["dtype"]]
                whole = all(type(n) is int and n >= 0 for n in (*shape, first, last))
                torch.empty(shape, dtype=dtype, device="meta")  # fails if torch cannot have it
                if not whole or first != end or last - first != math.prod(shape) * dtype.itemsize:
                    raise FormatError(f"{path.name} is damaged: bad size of {name!r}")
                end = last
            if not all(isinstance(word, str) for word in metadata.values()):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError):
            raise FormatError(f"{path.name} is damaged: its header cannot be read") from None
    if size != 8 + length + end:
        raise FormatError(
            f"{path.name} is damaged: {size} bytes, where its header says {8 + length + end}"
        )
    return header, metadata, 8 + length


def read_safetensors(
    path: Path, keep: bool = True, sealed: bool = False, largest: int = LARGEST_HEADER
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors (CPU) and the metadata; a SHA-256 in the metadata is checked.

    Without `keep`, the tensors are read only for this check, one at a time.

    Raises:
        FormatError: the file is damaged, or has no SHA-256 although it is `sealed` by one.
        OSError: it cannot be read.
    """
    header, metadata, start = read_safetensors_header(path, largest)
    sha256 = metadata.pop("sha256", None)
    if sealed and sha256 is None:
        raise FormatError(f"{path.name} is damaged: it has no SHA-256")
    digest = content_digest(header, metadata)
    tensors = {}
    with path.open("rb") as file:
        file.seek(start)
        for name, entry in header.items():
            tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
            if file.readinto(raw_bytes(tensor)) != tensor.nbytes:
                raise FormatError(f"{path.name} is damaged: it ends early")
            digest.update(raw_bytes(tensor))
            if keep:
                tensors[name] = tensor
    if sha256 is not None and digest.hexdigest() != sha256:
        raise FormatError(f"{path.name} is damaged: its SHA-256 does not match")
    return tensors, metadata


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, shared, readable and writable."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]  # which has to live as long
    return memoryview(array).cast("B")
