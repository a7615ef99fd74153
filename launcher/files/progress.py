"""Report the progress of an operation: in bytes, by a bar; and in time, by lines of the log."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from sm_nanogpt.entry_point.metrics import duration
from sm_nanogpt.launcher.values import in_units

if TYPE_CHECKING:
    from tqdm import tqdm

CHUNK_BYTES = 1 << 20  # of a file that are read at once, and then reported
LINE_SECONDS = 30  # between two lines of the log on an operation that goes on

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


def time_logged(operation: str) -> AbstractContextManager[None]:
    """While the body runs, log every LINE_SECONDS how long it has run."""
    start_time = time.monotonic()

    def log_time() -> None:
        passed = duration(time.monotonic() - start_time)
        logger.info(f"{operation}: {passed} so far")

    return repeated(log_time)


@contextmanager
def repeated(log: Callable[[], object]) -> Iterator[None]:
    """While the body runs, call `log` every LINE_SECONDS, in a thread; never after it."""
    is_over = Event()

    def watch() -> None:
        while not is_over.wait(LINE_SECONDS):
            log()

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
