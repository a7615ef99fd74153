"""Files that are read through a filter, and a bound on what a small file may unpack to."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO, Any

from launcher.errors import InputError

CHUNK = 1 << 20  # bytes of a file that are read at once
# Text packs to a tenth, and logs of equal lines to a hundredth. What unpacks to more is no text.
LARGEST_RATIO = 200
RATIO_FREE_BYTES = 1 << 28


class Unpacking:
    """Counts the bytes that come out of a packed file, and refuses too many of them."""

    def __init__(self, name: object, packed_size: int) -> None:
        self.name = name
        self.size = 0
        self.limit = max(LARGEST_RATIO * packed_size, RATIO_FREE_BYTES)

    def add(self, n_bytes: int) -> None:
        """Count bytes. Raises InputError if there are too many."""
        self.size += n_bytes
        if self.size > self.limit:
            what = f"unpacks to over {self.limit >> 20:,} MiB, over {LARGEST_RATIO} times its size"
            raise InputError(
                f"{self.name}: {what}; if it is text, unpack it and give what comes out"
            )


class Filter(io.RawIOBase):
    """A file as something makes it of another; it is read in order, and again from its beginning.

    `chunks` begins to read, and returns what gives the next bytes, b"" at the end.
    """

    def __init__(self, file: IO[bytes], chunks: Callable[[IO[bytes]], Callable[[], bytes]]) -> None:
        self.file, self.chunks = file, chunks
        self.begin()

    def begin(self) -> None:
        self.next_chunk = self.chunks(self.file)
        self.pending = b""
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
        self.pending = self.pending or self.next_chunk()
        size = min(len(buffer), len(self.pending))
        buffer[:size] = self.pending[:size]
        self.pending = self.pending[size:]
        self.position += size
        return size


def bounded(file: IO[bytes], name: object, packed_size: int) -> io.BufferedReader:
    """What a file unpacks to. Reading raises InputError if that is far more than its size."""

    def chunks(file: IO[bytes]) -> Callable[[], bytes]:
        unpacking = Unpacking(name, packed_size)

        def next_chunk() -> bytes:
            chunk = file.read(CHUNK)
            unpacking.add(len(chunk))
            return chunk

        return next_chunk

    return io.BufferedReader(Filter(file, chunks), CHUNK)
