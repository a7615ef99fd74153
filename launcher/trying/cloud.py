"""The runs of a search as a job on SageMaker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from launcher.errors import InputError
from launcher.source import Source

if TYPE_CHECKING:
    from launcher.trying.search import Made, Search


class OnSageMaker:
    """Makes the runs of a stage as one job on SageMaker, since each start costs minutes."""

    looks: Sequence[int] = (32,)

    def __init__(self, search: Search) -> None:
        self.search = search

    def made(self, runs: Sequence[tuple[Source, int]]) -> Iterator[Made]:
        raise InputError("jobs on SageMaker are not made yet")
