"""Checkpoints, and the safetensors format (huggingface.co/docs/safetensors)."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import ConfigError, FormatError, TrainingError, log
from .files import open_file, replacing

CHECKPOINTS, CURVES = "checkpoint-*.safetensors", "metrics-*.jsonl"
Contents = Iterable[Tensor] | None
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
        self.kept: list[int] = []  # steps of the last two, written or loaded by this process
        self.saved_at = time.monotonic()  # when the newest was begun, or the curve
        self.cost = 0.0  # seconds to write the newest

    def claim(self, fresh: bool = False) -> None:
        """Locks the directory against other runs on this machine while this process lives.

        Raises ConfigError if another run uses it, or it holds a checkpoint and should be fresh;
        TrainingError if it cannot be made.
        """
        with self.writing(self.directory):
            self.claimed = os.open(self.directory, os.O_RDONLY)
        problem = ""
        try:
            fcntl.flock(self.claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = "is in use by another run; wait until it ends and resume it"
        except OSError:
            pass  # some file systems have no locks
        if fresh and not problem and self.steps():
            problem = "already holds a run; resume it with --resume"
        if problem:
            raise ConfigError(f"{self.directory.parent} {problem}, or choose another --out")

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
            raise TrainingError(f"cannot write {path}: {error.strerror}") from None

    def save(
        self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], contents: Contents = None
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
            older = [older for older in self.kept if older != step]
            self.kept = [step, *older][:2]
            self.prune()
        self.cost = time.monotonic() - self.saved_at

    def due(self, evaluates: bool, seconds: float) -> bool:
        """Whether to write a checkpoint after this step, by this rank's clock.

        If `seconds` is 0, evaluations write one, and so does each minute; but a checkpoint that
        took long to write waits until writing takes 2 % of the time, or for ten minutes.
        """
        passed = time.monotonic() - self.saved_at
        cheap_after = min(50 * self.cost, 600)
        return passed > (seconds or max(60, cheap_after)) or (evaluates and passed >= cheap_after)

    def begin_curve(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Begins the curve of this start with the rows before it. Raises TrainingError."""
        self.saved_at = time.monotonic()
        self.curve = self.directory / f"metrics-{max(self.files(CURVES), default=0) + 1:08d}.jsonl"
        with self.writing(self.curve), replacing(self.curve) as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())

    def extend_curve(self, row: Mapping[str, Any]) -> None:
        """Adds a row to the curve of this start. Raises TrainingError."""
        with self.writing(self.curve), self.curve.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def prune(self) -> None:
        """Deletes older checkpoints and curves, and checkpoints that load_latest passed over."""
        needed = {self.curve, *map(self.path, self.kept)}
        files = {*self.files(CHECKPOINTS).values(), *self.files(CURVES).values()}
        for path in files - needed:
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
        problem = ""  # of the newest
        for step in self.steps():
            try:
                contents = read(self.path(step))
            except (FormatError, OSError, KeyError, ValueError) as error:
                problem = problem or str(error)
                warn(f"checkpoint of step {step} is skipped: {error}")
            else:
                self.kept = [step]
                return contents
        if problem:
            raise TrainingError(f"every checkpoint in {self.directory} is damaged: {problem}")
        return None


def read_state(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The state in a checkpoint's metadata. Raises FormatError if it is damaged, or if an older
    version of this file wrote it; KeyError."""
    if "state_sha256" not in metadata:
        raise FormatError("its state has no SHA-256; an older version of the script wrote it")
    if sha256_of(metadata["state"]) != metadata["state_sha256"]:
        raise FormatError("its state is damaged: its SHA-256 does not match")
    state: dict[str, Any] = json.loads(metadata["state"])
    return state


def sha256_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Bytes. That of a checkpoint holds the curve, so it may exceed the safetensors library's 100 MB.
LARGEST_HEADER = 1_000_000_000


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    contents: Contents = None,
) -> None:
    """Writes the file whole or not at all: under another name first, flushed to disk, renamed.

    `contents` are the same tensors with their values, if these come from elsewhere; they are taken
    and written one by one. A SHA-256 over header and tensors goes into the metadata.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name]["data_offsets"] = [end, end := end + tensor.nbytes]
    digest = header_digest(header, metadata)
    place = "0" * 64  # of the SHA-256
    encoded = json.dumps({**header, "__metadata__": {**metadata, "sha256": place}}).encode()
    encoded += b" " * (-len(encoded) % 8)
    with replacing(path) as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors.values() if contents is None else contents:
            content = tensor.detach().cpu().contiguous()
            digest.update(memory(content))
            file.write(memory(content))
        file.seek(8 + encoded.rindex(place.encode()))
        file.write(digest.hexdigest().encode())


def read_safetensors(
    path: Path, sealed: bool = False, largest: int = LARGEST_HEADER, mapped: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors (CPU) and the metadata; a SHA-256 in the metadata is checked.

    With `mapped`, the tensors lie in the pages of the file itself, which all processes of a machine
    share.

    Raises FormatError if the file is damaged, its header has more than `largest` bytes, or it has
    no SHA-256 although it is `sealed` by one; OSError if it cannot be read.
    """
    tensors = {}
    with open_file(path) as file:
        header, metadata = sound_header(file, path, largest)
        sha256 = metadata.pop("sha256", None)
        digest = header_digest(header, metadata)
        if mapped:
            tensors = mapped_parts(path, file.tell(), header)
        for name, entry in header.items():
            if not mapped:
                tensors[name] = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
                file.readinto(memory(tensors[name]))
            if sha256 is not None:
                digest.update(memory(tensors[name]))
    if sha256 != digest.hexdigest() and (sealed or sha256 is not None):
        found = "is missing" if sha256 is None else "does not match"
        raise FormatError(f"{path.name} is damaged: its SHA-256 {found}")
    return tensors, metadata


def mapped_parts(path: Path, begin: int, header: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory; `begin` is the byte at which their data begin."""
    size = path.stat().st_size
    content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        part = content[begin + first : begin + last]
        if (begin + first) % dtype.itemsize:  # no tensor begins there
            part = part.clone()
        tensors[name] = part.view(dtype).view(entry["shape"])
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file. Raises FormatError if its header is damaged; OSError."""
    with open_file(path) as file:
        return sound_header(file, path, LARGEST_HEADER)[1]


def sound_header(
    file: BufferedReader, path: Path, largest: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """As read_header; raises FormatError if the header is damaged, or does not fit the file."""
    try:
        return read_header(file, largest)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError):
        raise FormatError(f"{path.name} is damaged: its header does not fit it") from None


def read_header(file: BufferedReader, largest: int) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors' descriptions, in the order of their data, and the metadata.

    Anybody may have written them, so all that memory is allocated by is checked. Raises ValueError;
    Python and torch may raise other errors.
    """
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(min(length, largest)))
    metadata = header.pop("__metadata__", {})
    header = dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))
    fits = length <= largest and all(isinstance(word, str) for word in metadata.values())
    end = 0
    for entry in header.values():
        first, last = entry["data_offsets"]
        shape, dtype = entry["shape"], DTYPES[entry["dtype"]]
        torch.empty(shape, dtype=dtype, device="meta")  # fails if torch cannot have it
        fits &= all(type(n) is int and n >= 0 for n in (*shape, first, last))
        fits &= first == end and last - first == math.prod(shape) * dtype.itemsize
        end = last
    if not fits or 8 + length + end != os.fstat(file.fileno()).st_size:
        raise ValueError
    return header, metadata


def header_digest(header: Mapping[str, Any], metadata: Mapping[str, str]) -> Any:
    return hashlib.sha256(json.dumps([header, metadata], sort_keys=True).encode())


def memory(tensor: Tensor) -> Any:
    """The bytes of a contiguous CPU tensor, to read and to write while the tensor lives."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
