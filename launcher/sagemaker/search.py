"""Search the account's training jobs, newest first, by our tags."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

from launcher.job import time_of


def search_jobs(client: Any, tags: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The account's training jobs with these tags, newest first."""
    filters = [
        {"Name": f"Tags.{key}", "Operator": "Equals", "Value": value} for key, value in tags.items()
    ]
    pages = client.get_paginator("search").paginate(
        Resource="TrainingJob",
        SearchExpression={"Filters": filters},
        SortBy="CreationTime",
        SortOrder="Descending",
    )
    for page in pages:
        for result in page["Results"]:
            yield result["TrainingJob"]


def with_last(
    found: Iterable[dict[str, Any]], job_id: str, ask: Callable[[], Iterator[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """What Search found, with the last launched job put where its time belongs.

    Search finds a new job only after seconds; `ask` describes it. The jobs of one second stay in
    the order of Search if it is among them, else it is the newest.
    """
    name, placed = itemgetter("TrainingJobName"), False
    for time, jobs in groupby(found, key=lambda raw: time_of(name(raw))):
        if placed or time > time_of(job_id):
            yield from (raw for raw in jobs if name(raw) != job_id)
            continue
        second = list(jobs)
        if job_id not in map(name, second):
            yield from ask()
        yield from second
        placed = True
    if not placed:
        yield from ask()
