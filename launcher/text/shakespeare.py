"""The text for those who have none yet: tiny Shakespeare, or one that Python brings along."""

from __future__ import annotations

import hashlib
import http.client
import logging
import queue
import threading
import urllib.request
from pathlib import Path

from launcher.errors import ServiceError
from launcher.files import storage
from launcher.settings import Settings, load_settings

logger = logging.getLogger(__name__)

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PATIENCE_SECONDS = 5.0


def first_text(settings: Settings | None = None) -> Path:
    """Tiny Shakespeare, as a file in the cache: downloaded once, and verified by its SHA-256.

    Many networks reach a package index and little else. There it is Python's language reference,
    which comes with Python; without it, this raises ServiceError.
    """
    cache = (settings or load_settings()).home / "cache"
    shakespeare = cache / "shakespeare.txt"
    if shakespeare.is_file() and is_shakespeare(shakespeare.read_bytes()):
        return shakespeare
    answer = download(SHAKESPEARE_URL)
    if isinstance(answer, bytes) and is_shakespeare(answer):
        storage.write_bytes(str(shakespeare), answer)
        return shakespeare
    # Another file may be the page of a proxy.
    other = "the answer is another file" if isinstance(answer, bytes) else answer
    why = f"{SHAKESPEARE_URL}: {getattr(answer, 'reason', other)}"
    try:
        from pydoc_data.topics import topics  # of `help()`: half a megabyte of the reference
    except ImportError:
        raise ServiceError(why, "own-text") from None
    what = "took the language reference that comes with Python"
    logger.warning(f"{why}; {what}", extra={"code": "own-text"})
    reference = cache / "python-reference.txt"
    storage.write_bytes(str(reference), "\n\n".join(topics.values()).encode())
    return reference


def is_shakespeare(content: bytes) -> bool:
    return hashlib.sha256(content).hexdigest() == SHAKESPEARE_SHA256


def download(url: str) -> bytes | Exception:
    """The content of a URL, or why there is none after PATIENCE_SECONDS.

    A name server or a firewall that does not answer takes minutes, which no timeout of urllib
    bounds, so the main thread stops waiting for the download.
    """
    answer: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def fetch() -> None:
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
                answer.put(response.read())
        except (OSError, http.client.HTTPException) as error:
            answer.put(error)

    threading.Thread(target=fetch, daemon=True).start()
    try:
        return answer.get(timeout=PATIENCE_SECONDS)
    except queue.Empty:
        return TimeoutError(f"no answer within {PATIENCE_SECONDS:.0f} s")
