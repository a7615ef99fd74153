"""The files of a text, and whether they can be trained on."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import InputError
from launcher.files import storage
from launcher.files.documents import read_text

logger = logging.getLogger(__name__)

# The shortest context of any preset. Shorter text cannot fill one window for training and one in
# its last tenth for validation. A launch checks against the context of its job.
SHORTEST_BLOCK_SIZE = 64


@dataclass(frozen=True)
class Text:
    """What reading the files found; size is in bytes."""

    size: int
    characters: int
    vocabulary: str
    sha256: str


def is_plain_text(path: Path) -> bool:
    return path.suffix == ".txt"


def needs_tokenizer(path: Path) -> bool:
    """Whether a file is a text that only `upload-data --tokenizer` takes."""
    return path.suffix.lower() in (".jsonl", ".gz", ".zst") and ".tar" not in path.suffixes


def find_text(root: Path, wanted: Callable[[Path], bool] = is_plain_text) -> list[tuple[str, Path]]:
    """The files to upload, as (name in the data set, path); a single file becomes NAME.txt.

    Warns of the files of a directory that are not wanted.

    Raises:
        InputError: there is no text, it cannot be read, or a name is not UTF-8.
    """
    plain, other = wanted is is_plain_text, list[Path]()
    try:
        if root.is_file():
            if plain and needs_tokenizer(root):
                raise InputError(f"{root}: {way_to_take(root, root, plain)}")
            found = [(f"{root.stem}.txt", root)]
        elif not root.exists():
            raise InputError(f"{root}: no such file or directory")
        elif not root.is_dir():
            raise InputError(f"{root}: neither a file nor a directory")
        else:
            files = []
            for place, below, names in os.walk(root, onerror=raise_error):  # rglob ignores errors
                below[:] = (name for name in below if not name.startswith("."))  # such as .venv
                files += [Path(place, name) for name in names if not name.startswith(".")]
            files.sort()
            found = [(path.relative_to(root).as_posix(), path) for path in files if wanted(path)]
            other = [path for path in files if not wanted(path)]
            for path in (path for _, path in found if not path.is_file()):
                raise InputError(f"{path}: not a file, or a broken link; delete it")
    except OSError as error:
        raise InputError(f"{error.filename or root}: {error.strerror or error}") from None
    to_take = "; ".join(dict.fromkeys(way_to_take(path, root, plain) for path in other))
    if not found:
        if (root / "meta.json").exists():
            raise InputError(
                f"{root}: these are tokens; give the URI that `upload-data` printed for them"
            )
        has = f", but {kinds(other)}; {to_take}" if other else ""
        raise InputError(f"{root}: no {'*.txt' if plain else '*.txt or *.jsonl'} is there{has}")
    if other:
        logger.warning(f"{root}: left out {kinds(other)}; {to_take}")
    for name, path in found:
        try:
            name.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(path).decode(errors="backslashreplace")
            raise InputError(f"{shown}: its name is not UTF-8; rename it") from None
    return found


def way_to_take(path: Path, root: Path, plain: bool) -> str:
    """What to do to upload a file below root that is not taken."""
    if path.suffix.lower() == ".txt":
        return f"rename *{path.suffix} to *.txt"
    if not plain or not needs_tokenizer(path):
        return "join files of text into one *.txt file"
    return (
        f"JSON lines and compressed text need `sm-nanogpt upload-data {root} --tokenizer bpe`, or"
        " --tokenizer JOB-ID to tune the model of a job"
    )


def kinds(files: Sequence[Path]) -> str:
    """`24 *.md, 3 *.py`: how many files there are of each kind, the most frequent first."""
    counts = Counter(f"*{path.suffix}" if path.suffix else path.name for path in files)
    named = [f"{n:,} {kind}" for kind, n in counts.most_common(5)]
    return ", ".join([*named, *["others"] * (len(counts) > 5)])


def raise_error(error: OSError) -> None:
    raise error


def check_text(root: Path, files: Sequence[tuple[str, Path]]) -> Text:
    """Read every file as train.py would; files are those of find_text.

    Raises:
        InputError: a file is empty, binary or not UTF-8, or the text is too short.
    """
    digest, vocabulary, size, characters = hashlib.sha256(), set[str](), 0, 0
    for name, path in files:
        digest.update(f"{name}\0".encode())
        position = 0
        try:
            with path.open("rb") as file:
                for chunk, text in read_text(file, path, storage.CHUNK_BYTES):
                    digest.update(chunk)
                    vocabulary.update(text)
                    characters += len(text)
                    position += len(chunk)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        if not position:
            raise InputError(f"{path}: is empty")
        digest.update(position.to_bytes(8, "little"))
        size += position
    check_enough(root, characters)
    return Text(size, characters, "".join(sorted(vocabulary)), digest.hexdigest())


def check_enough(root: Path, characters: int) -> None:
    """Raise InputError if a text is too short for any run."""
    needed = 10 * (SHORTEST_BLOCK_SIZE + 1)
    if characters < needed:
        raise InputError(
            f"{root}: {characters} characters are too few to train and validate on; use at least"
            f" {needed}, better a million"
        )
