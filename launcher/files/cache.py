"""Keep documents in the home that commands can do without, such as the last known prices."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.files import storage

T = TypeVar("T")


@dataclass(frozen=True)
class Cache(Generic[T]):
    """A file with a JSON document. Its type has an empty value, such as a dict or a list."""

    file: Path
    kind: type[T]

    def read(self) -> T:
        """Return the document, or an empty one if the file is missing or damaged."""
        with suppress(ServiceError):
            document = storage.read_document(str(self.file), self.kind)
            if document is not None:
                return document
        return self.kind()

    def write(self, document: T) -> None:
        """Write the document, if the disk takes it."""
        with suppress(ServiceError):
            storage.write_json(str(self.file), document)
