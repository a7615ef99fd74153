"""Unpack compressed files within bounds, and make files from chunks."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.progress import CHUNK_BYTES

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

DETECT_BYTES = 1 << 12  # the beginning of a file, by which its format is recognized
# Text packs to a tenth of its size, and logs of equal lines to a hundredth. A file that unpacks to
# more than MAX_RATIO times its size is no text.
MAX_RATIO = 200
RATIO_FREE_BYTES = 1 << 28  # that any file may unpack to


@dataclass(frozen=True)
class Compression:
    """A compression of a single file, which is unpacked while it is read."""

    suffix: str
    magic: bytes  # the first bytes of its files
    open: Callable[[IO[bytes]], Any]
    advice: str  # a command that unpacks a file


COMPRESSIONS = (
    Compression(".gz", b"\x1f\x8b", gzip.open, "`gunzip -k {path}`"),
    Compression(".zst", b"\x28\xb5\x2f\xfd", zstd.open, "`zstd -d {path}`"),
)


def compression_of(beginning: bytes) -> Compression | None:
    """The compression of a file that begins with such bytes, or None."""
    for compression in COMPRESSIONS:
        if beginning.startswith(compression.magic):
            return compression
    return None


def without_compression(path: Path) -> Path:
    """The path without the suffix of a compression."""
    suffixes = {compression.suffix for compression in COMPRESSIONS}
    if path.suffix.lower() in suffixes:
        return path.with_suffix("")
    return path


class Unpacking:
    """Counts the bytes that a packed file unpacks to, and refuses too many."""

    def __init__(self, name: str, packed_size: int) -> None:
        self.name = name
        self.size = 0
        self.limit = max(MAX_RATIO * packed_size, RATIO_FREE_BYTES)

    def add(self, n_bytes: int) -> None:
        """Count bytes. Raises InputError if there are too many."""
        self.size += n_bytes
        if self.size > self.limit:
            problem = f"unpacks to over {self.limit >> 20:,} MiB, over {MAX_RATIO} times its size"
            raise InputError(
                f"{self.name}: {problem}; if it is text, unpack it and give what comes out"
            )


# Reads a file from its position, and yields chunks of another content. Only the last may be empty.
MakeChunks = Callable[[IO[bytes]], Iterator[bytes]]


def buffered_file(file: IO[bytes], make_chunks: MakeChunks) -> io.BufferedReader:
    """A file whose content is made in chunks from another file."""
    return io.BufferedReader(ChunkedFile(file, make_chunks), CHUNK_BYTES)


class ChunkedFile(io.RawIOBase):
    """A file whose content is made in chunks from another file. It can only be read in order."""

    def __init__(self, file: IO[bytes], make_chunks: MakeChunks) -> None:
        self.file = file
        self.make_chunks = make_chunks
        self.begin()

    def begin(self) -> None:
        self.chunks = self.make_chunks(self.file)
        self.pending = b""  # the part of a chunk that was not read yet
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = 0) -> int:
        if (offset, whence) != (0, 0):
            raise io.UnsupportedOperation("only back to the beginning")
        self.file.seek(0)
        self.begin()
        return 0

    def readinto(self, buffer: Any) -> int:
        if not self.pending:
            self.pending = next(self.chunks, b"")
        size = min(len(buffer), len(self.pending))
        buffer[:size] = self.pending[:size]
        self.pending = self.pending[size:]
        self.position += size
        return size


def limit_unpacking(file: IO[bytes], name: str, packed_size: int) -> io.BufferedReader:
    """The content of an unpacked file. To read far more than packed_size raises InputError.

    name: what errors call the packed file. packed_size: its bytes.
    """

    def make_chunks(file: IO[bytes]) -> Iterator[bytes]:
        unpacking = Unpacking(name, packed_size)
        while chunk := file.read(CHUNK_BYTES):
            unpacking.add(len(chunk))
            yield chunk

    return buffered_file(file, make_chunks)
