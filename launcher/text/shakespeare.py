"""Tiny Shakespeare, the text for those who have none yet."""

from __future__ import annotations

import hashlib
import http.client
import urllib.request
from pathlib import Path

from launcher.errors import ServiceError
from launcher.files import storage
from launcher.files.storage import Progress
from launcher.settings import Settings, load_settings

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def shakespeare(settings: Settings | None = None, progress: Progress = lambda n: None) -> Path:
    """Tiny Shakespeare, as a file in the cache: downloaded once, and verified by its SHA-256.

    Raises:
        ServiceError: the download failed.
    """
    target = (settings or load_settings()).cache_dir / "shakespeare.txt"
    return download(SHAKESPEARE_URL, SHAKESPEARE_SHA256, target, progress)


def download(url: str, sha256: str, target: Path, progress: Progress) -> Path:
    """Download a file, unless the cache has it intact."""
    if target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == sha256:
        return target
    content = bytearray()
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            storage.expect(progress, response.length or 0)
            while chunk := response.read(1 << 16):
                content += chunk
                progress(len(chunk))
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ServiceError(
            f"{url}: {reason}; try again, or name a text of yours: `sm-nanogpt upload-data FILE`"
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ServiceError(
            f"{url}: its SHA-256 is {found}, expected {sha256}; discarded the download"
        )
    storage.write_bytes(str(target), bytes(content))
    return target
