"""Search the account's training jobs, newest first, by our tags."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from launcher.job import time_of


def search_jobs(client: Any, tags: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The account's training jobs with these tags, newest first."""
    pages = client.get_paginator("search").paginate(
        Resource="TrainingJob",
        SearchExpression={
            "Filters": [
                {"Name": f"Tags.{key}", "Operator": "Equals", "Value": value}
                for key, value in tags.items()
            ]
        },
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

    Search finds a new job only after seconds; `ask` describes it.
    """
    told = False
    for raw in found:
        name = raw["TrainingJobName"]
        if not told and name != job_id and time_of(name) <= time_of(job_id):
            yield from ask()
            told = True
        if name != job_id or not told:
            yield raw
        told = told or name == job_id
    if not told:
        yield from ask()
