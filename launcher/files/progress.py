"""Report the progress of an operation, in bytes, and show it by a bar."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sm_nanogpt.launcher.values import in_units

if TYPE_CHECKING:
    from tqdm import tqdm

CHUNK_BYTES = 1 << 20  # of a file that are read at once, and then reported

logger = logging.getLogger(__name__)

Progress = Callable[[int], object]  # is called with the number of bytes since its last call


def no_progress(n_bytes: int) -> None:
    """A progress hook that shows nothing."""


def expect(progress: Progress, n_bytes: int) -> None:
    """Announce n_bytes that will be reported later, if the hook has a method `expect`."""
    if hasattr(progress, "expect"):
        progress.expect(n_bytes)


@contextmanager
def byte_progress(label: str, source: str = "") -> Iterator[ByteBar]:
    """Show a bar on stderr, if that is a terminal or a notebook. Yields its progress hook.

    source: the name of a text, if the log is to say how many bytes of it are copied.
    """
    with warnings.catch_warnings(action="ignore"):  # a notebook without widgets has a plain bar
        from tqdm.auto import tqdm

    is_visible = sys.stderr.isatty() or "ipykernel" in sys.modules
    with tqdm(desc=label, unit="B", unit_scale=True, disable=not is_visible, delay=0.2) as bar:
        yield ByteBar(bar, source)


class ByteBar:
    """A progress hook that moves a bar."""

    def __init__(self, bar: tqdm[Any], source: str) -> None:
        self.bar = bar
        self.source = source

    def __call__(self, n_bytes: int) -> None:
        self.bar.update(n_bytes)

    def expect(self, n_bytes: int) -> None:
        if self.source:
            logger.info(f"{self.source}: copying {in_units(n_bytes)}")
        self.bar.total = (self.bar.total or 0) + n_bytes
