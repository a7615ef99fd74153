"""Get a text for users who have none."""

from __future__ import annotations

import hashlib
import logging
from functools import partial
from pathlib import Path

from sm_nanogpt.launcher.errors import ServiceError
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.settings import Settings, load_settings
from sm_nanogpt.launcher.text.threads import in_thread

logger = logging.getLogger(__name__)

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PATIENCE_SECONDS = 5.0


def first_text(settings: Settings | None = None) -> Path:
    """Return a file of the cache with tiny Shakespeare, which is downloaded once and verified.

    Many networks reach a package index and little else. Then the file has Python's language
    reference, which comes with Python. Raises ServiceError if this Python comes without it.
    """
    cache = (settings or load_settings()).home / "cache"
    shakespeare = cache / "shakespeare.txt"
    if shakespeare.is_file() and is_shakespeare(shakespeare.read_bytes()):
        return shakespeare
    try:
        content = download_shakespeare()
    except ServiceError as error:
        return python_reference(cache, error)
    storage.write_bytes(str(shakespeare), content)
    return shakespeare


def download_shakespeare() -> bytes:
    """Download tiny Shakespeare.

    Raises ServiceError if that fails, if it takes longer than PATIENCE_SECONDS, or if the answer is
    another file.
    """
    try:
        # If a name server does not answer, urllib waits for minutes, whatever its timeout is.
        content = in_thread(partial(download, SHAKESPEARE_URL)).result(PATIENCE_SECONDS)
    except TimeoutError:
        problem = f"no answer within {PATIENCE_SECONDS:.0f} s"
    except Exception as error:
        problem = str(getattr(error, "reason", error))  # that of urllib, without <urlopen error>
    else:
        if is_shakespeare(content):
            return content
        problem = "the answer is another file"  # such as a page of a proxy
    raise ServiceError(f"{SHAKESPEARE_URL}: {problem}", code="own-text")


def is_shakespeare(content: bytes) -> bool:
    return hashlib.sha256(content).hexdigest() == SHAKESPEARE_SHA256


def download(url: str) -> bytes:
    import urllib.request

    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
        return bytes(response.read())


def python_reference(cache: Path, error: ServiceError) -> Path:
    """Write Python's language reference, half a megabyte, into the cache; return the file.

    error: why there is no Shakespeare. It is raised if this Python has no reference either.
    """
    try:
        from pydoc_data.topics import topics  # of `help()`
    except ImportError:
        raise error from None
    instead = "took the language reference that comes with Python"
    logger.warning(f"{error}; {instead}", extra={"code": error.code})
    reference = cache / "python-reference.txt"
    storage.write_bytes(str(reference), "\n\n".join(topics.values()).encode())
    return reference
