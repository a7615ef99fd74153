"""A progress bar for bytes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


@contextmanager
def byte_progress(label: str) -> Iterator[Bytes]:
    """A bar on stderr where somebody sees it: in a terminal or a notebook."""
    with warnings.catch_warnings(action="ignore"):  # a notebook without widgets has a plain bar
        from tqdm.auto import tqdm

    seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    with tqdm(desc=label, unit="B", unit_scale=True, disable=not seen, delay=0.2) as bar:
        yield Bytes(bar)


class Bytes:
    """A progress hook that moves a bar; storage.expect adds to its total."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self.bar = bar

    def __call__(self, n: int) -> None:
        self.bar.update(n)

    def expect(self, n: int) -> None:
        self.bar.total = (self.bar.total or 0) + n
