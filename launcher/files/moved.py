"""What was recorded by its place on this machine, after its home or store was moved.

Names of uploads, models and training folders hold a hash of the content, or the id of a job: what
has the name is the same, wherever it is.
"""

from __future__ import annotations

import re
from pathlib import Path

from launcher.files import storage
from launcher.settings import Settings

NAME = re.compile(r"[a-z0-9-]+-[0-9a-f]{12}")  # of an upload
PART = re.compile(r"[A-Za-z0-9-]{1,99}")  # what may be a part of such a name
IN_STORE = re.compile(rf"(?:data|models)/{NAME.pattern}$")
IN_HOME = re.compile(r"models/[a-z0-9-]+/(?:[0-9a-f]{12}|step-\d{8})$|sources/[0-9a-f]{64}$")


def text_id(uri: str | None) -> str | None:
    """What identifies a text: the name of an upload, wherever it is, or else its URI."""
    if uri is None:
        return None
    name = uri.rstrip("/").rpartition("/")[2]
    return name if NAME.fullmatch(name) else uri


def find_moved(location: str, settings: Settings) -> str:
    """The location of an upload, a model or a training folder, by its name if it is not there.

    The location itself if it is on S3, still there, or nowhere in the home and the store.
    """
    path = storage.local_path(location)
    if path is None or path.exists():
        return location
    for candidate in candidates(path, settings):
        if candidate.exists():
            return candidate.as_uri() if location.startswith("file:") else str(candidate)
    return location


def candidates(path: Path, settings: Settings) -> list[Path]:
    """Where what was at a path would be in this home and in the stores of this machine."""
    if match := IN_STORE.search(str(path)):
        stores = map(storage.local_path, (settings.data_store, settings.local_store))
        return [store / match[0] for store in stores if store is not None]
    if match := IN_HOME.search(str(path)):
        return [settings.home / match[0]]
    return []
