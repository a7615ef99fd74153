"""Report the progress of an operation, in bytes, and show it by a bar."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

CHUNK_BYTES = 1 << 20  # of a file that are read at once, and then reported

Progress = Callable[[int], object]  # is called with the number of bytes since its last call


def no_progress(n_bytes: int) -> None:
    """A progress hook that shows nothing."""


def expect(progress: Progress, n_bytes: int) -> None:
    """Announce n_bytes that will be reported later, if the hook has a method `expect`."""
    if hasattr(progress, "expect"):
        progress.expect(n_bytes)


@contextmanager
def byte_progress(label: str) -> Iterator[ByteBar]:
    """Show a bar on stderr, if that is a terminal or a notebook. Yields its progress hook."""
    with warnings.catch_warnings(action="ignore"):  # a notebook without widgets has a plain bar
        from tqdm.auto import tqdm

    is_visible = sys.stderr.isatty() or "ipykernel" in sys.modules
    with tqdm(desc=label, unit="B", unit_scale=True, disable=not is_visible, delay=0.2) as bar:
        yield ByteBar(bar)


class ByteBar:
    """A progress hook that moves a bar."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self.bar = bar

    def __call__(self, n_bytes: int) -> None:
        self.bar.update(n_bytes)

    def expect(self, n_bytes: int) -> None:
        self.bar.total = (self.bar.total or 0) + n_bytes
