"""Find uploads, models, and training folders after the home or the store was moved.

Records have the path of such a directory. Its name has a hash of its content, or the id of a job,
so two directories of one name have the same content.
"""

from __future__ import annotations

import re
from pathlib import Path

from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.locations import last_part
from sm_nanogpt.launcher.settings import Settings

UPLOAD_NAME = re.compile(r"[a-z0-9-]+-[0-9a-f]{12}")
PART_OF_NAME = re.compile(r"[A-Za-z0-9-]{1,99}")  # may be a part of the name of an upload
IN_STORE = re.compile(rf"(?:data|models)/{UPLOAD_NAME.pattern}$")
IN_HOME = re.compile(r"models/[a-z0-9-]+/(?:[0-9a-f]{12}|step-\d{8})$|sources/[0-9a-f]{64}$")


def text_id(uri: str | None) -> str | None:
    """What identifies a text: the name of its upload; if it is no upload, its URI."""
    if uri is None:
        return None
    name = last_part(uri)
    if UPLOAD_NAME.fullmatch(name):
        return name
    return uri


def find_moved(location: str, settings: Settings) -> str:
    """Find an upload, a model, or a training folder that is no longer at its location.

    A directory of its name is looked for in the home and in the stores of this machine. The
    location is returned unchanged if it exists, if it is on S3, or if no such directory is there.
    """
    path = storage.local_path(location)
    if path is None or path.exists():
        return location
    for candidate in candidate_paths(path, settings):
        if candidate.exists():
            if location.startswith("file:"):
                return candidate.as_uri()
            return str(candidate)
    return location


def candidate_paths(path: Path, settings: Settings) -> list[Path]:
    """The paths in this home and in this machine's stores to which a path may have moved."""
    match = IN_STORE.search(str(path))
    if match:
        stores = (storage.local_path(settings.data_store), Path(settings.local_store))
        return [store / match[0] for store in stores if store is not None]
    match = IN_HOME.search(str(path))
    if match:
        return [settings.home / match[0]]
    return []
