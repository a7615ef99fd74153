"""Which sweeps this machine has launched: each has a record below HOME/sweeps."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from launcher.errors import ServiceError
from launcher.files import storage
from launcher.files.documents import Document
from launcher.settings import Settings


class Job(Document):
    name: str | None = None


class Record(Document):  # what a name needs of it; `sweeps.Sweep` is all
    job: Job


def record_of(group: str, settings: Settings) -> Path:
    return settings.home / "sweeps" / f"{group}.json"


def recorded_as(word: str, settings: Settings) -> str | None:
    """The id of the sweep of this machine that a word means: its id or its name."""
    if record_of(word, settings).exists():
        return word
    for path in record_of("*", settings).parent.glob("*.json"):
        with suppress(ServiceError):  # a damaged one is not this one
            record = storage.read_document(str(path), Record)
            if record is not None and record.job.name == word:
                return path.stem
    return None
