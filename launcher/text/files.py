"""The files of a text, and whether they can be trained on."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain, count
from pathlib import Path

from launcher.errors import InputError
from launcher.files import storage
from launcher.files.documents import read_text
from launcher.text.formats import PLAIN, File, bare, look, named, note_odd, opened, warn_of

logger = logging.getLogger("launcher.text")

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


class Globs:
    """Patterns of names, or of paths below a folder, in any case, and those that matched none."""

    def __init__(self, option: str, patterns: Sequence[str]) -> None:
        self.option, self.patterns = option, [pattern.removeprefix("./") for pattern in patterns]
        self.unused = set(self.patterns)

    def match(self, path: Path, root: Path) -> bool:
        names = (path.name, path.relative_to(root).as_posix())
        hits = {p for p in self.patterns for n in names if fnmatchcase(n.lower(), p.lower())}
        self.unused -= hits
        return bool(hits)


def find_files(
    paths: Sequence[Path],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    tokens: bool = False,
    encoding: str = "",
    column: str = "text",
) -> list[File]:
    """The files to upload: each path that is a file, and all of a known format in each folder.

    include adds plain text by patterns of names, or of paths below a folder, and exclude leaves out
    files or folders. What else is left out is logged. Without tokens, only plain text is taken.

    Raises:
        InputError: there is no text, it cannot be read, it is of a format that is refused, a name
            is not UTF-8, or a pattern matches nothing.
    """
    try:
        "".encode(encoding or "utf-8")
    except LookupError:
        raise InputError(f"--encoding {encoding}: unknown; for example: cp1252, gb18030") from None
    added, skipped = Globs("include", include), Globs("exclude", exclude)
    found, named_so = list[File](), set[str]()
    for root in paths:
        folder = root.is_dir()
        prefix = Path(root.resolve().name if folder and len(paths) > 1 else "")
        try:
            given = [] if skipped.match(root, root) else [root]
            alone = len(paths) == 1
            for path in files_below(root, added, skipped, tokens, alone) if folder else given:
                if path.exists() and not path.is_file():
                    raise InputError(f"{path}: not a file{'' if folder else '; `-` reads a pipe'}")
                file = look(path, encoding, column, plain=added.match(path, root))
                if file.format.needs_tokens and not tokens:
                    raise InputError(f"{path}: is {file.format.name}; {to_tokens(path)}")
                within = prefix / (path.relative_to(root) if folder else path.name)
                found.append(replace(file, name=name_in_store(within, named_so)))
        except OSError as error:
            raise InputError(f"{error.filename or root}: {error.strerror or error}") from None
        except UnicodeEncodeError:
            shown = os.fsencode(path).decode(errors="backslashreplace")
            raise InputError(f"{shown}: its name is not UTF-8; rename it") from None
    for globs in (added, skipped):
        for pattern in globs.unused:
            raise InputError(f"--{globs.option} {pattern} fits no file")
    if column != "text" and found and not any(file.format.needs_tokens for file in found):
        raise InputError(f"--column is for records, and {paths[0]} is plain text")
    encodings = Counter(file.encoding for file in found if file.encoding not in ("", "utf-8-sig"))
    for encoding, n in encodings.items():
        logger.info(f"converted to UTF-8: {n:,} of {len(found):,} files, from {encoding}")
    return found


def files_below(root: Path, added: Globs, skipped: Globs, tokens: bool, alone: bool) -> list[Path]:
    """The files of a folder that are taken, sorted; the others are logged. alone: one must be."""
    taken, left, aside = list[Path](), list[Path](), Counter[str]()
    for place, folders, names in os.walk(root, onerror=raise_error):  # rglob ignores errors
        for folder in [Path(place, name) for name in folders]:
            if why := reason_to_skip(folder, root, skipped):
                aside[why] += 1
                folders.remove(folder.name)
        for path in [Path(place, name) for name in names]:
            if why := reason_to_skip(path, root, skipped):
                aside[why] += 1
            elif added.match(path, root) or is_read(path, tokens):
                taken.append(path)
            else:
                left.append(path)
    if aside:
        logger.info(f"{root}: {listed(aside)}")
    what = left_out(left, root) if left else ""
    if not taken and (root / "meta.json").exists():
        raise InputError(f"{root}: these are tokens; give the URI that `upload-data` printed")
    if not taken:
        what = f"no text is there{what and f'; {what}'}"
    if not taken and alone:
        raise InputError(f"{root}: {what}")
    if what:
        logger.warning(f"{root}: {what}")
    return sorted(taken)


def reason_to_skip(path: Path, root: Path, skipped: Globs) -> str:
    """Why a file or a folder is left out, whatever is in it."""
    if skipped.match(path, root):
        return "excluded"
    if path.name.startswith("."):
        return "hidden"
    if (path / "pyvenv.cfg").exists():
        return "virtual environment"
    if path.is_symlink() and not path.is_file():
        return "link to a folder" if path.is_dir() else "broken link"
    return ""


def may_be_read(
    path: Path, root: Path, include: Sequence[str], exclude: Sequence[str], tokens: bool
) -> bool:
    """Whether files_below may take a file, before its folder is on this machine."""
    parts = [path, *(folder for folder in path.parents if root in folder.parents)]
    if any(reason_to_skip(part, root, Globs("exclude", exclude)) for part in parts):
        return False
    return Globs("include", include).match(path, root) or is_read(path, tokens)


def is_read(path: Path, tokens: bool) -> bool:
    """Whether a file in a folder is read because of its name."""
    return (known := named(path)) is PLAIN or (tokens and known is not None and known.read != "")


def raise_error(error: OSError) -> None:
    raise error


def listed(counts: Counter[str]) -> str:
    """`27 files left out: 24 .md, 3 .py`, the most frequent kinds first."""
    kinds = [f"{n:,} {kind}" for kind, n in counts.most_common(8)] + ["others"] * (len(counts) > 8)
    total = counts.total()
    return f"{total:,} file{'s' * (total > 1)} left out: {', '.join(kinds)}"


def left_out(files: Sequence[Path], root: Path) -> str:
    """How many files are left out, and at most two ways to take some of them."""
    kinds = Counter(bare(path).suffix.lower() or path.name for path in files)
    one = {bare(path).suffix.lower() or path.name: path for path in files}
    ways, globs = list[str](), list[str]()
    for kind, _ in kinds.most_common():
        if known := named(one[kind]):
            way = f"{kind}: {known.advice.format(path='FILE', stem='NAME')}"
            ways.append(to_tokens(root) if known.read else way)
        elif not is_binary(one[kind]):
            globs.append(f"--include '{'*' * kind.startswith('.')}{kind}'")
    if globs:
        ways.insert(0, f"`{' '.join(globs[:3])}` takes such files as plain text")
    return "; ".join([listed(kinds), *list(dict.fromkeys(ways))[:2]])


def is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(512)


def to_tokens(path: Path) -> str:
    """What to type for files of records."""
    return (
        f"tables and JSON are read with `sm-nanogpt upload-data {shlex.quote(str(path))}"
        " --tokenizer bpe`; to tune the model of a job, `--tokenizer JOB-ID`"
    )


def name_in_store(within: Path, taken: set[str]) -> str:
    """The name of a file in a data set, where all are called *.txt; no case makes a difference."""
    stem = bare(within).with_suffix("").as_posix()
    names = chain([f"{stem}.txt"], (f"{stem}-{number}.txt" for number in count(2)))
    name = next(name for name in names if name.lower() not in taken)
    taken.add(name.lower())
    name.encode()  # raises if it is not UTF-8
    return name


def check_text(root: Path, files: Sequence[File]) -> tuple[Text, list[File]]:
    """Read every file as train.py would. Returns also the files without empty and equal ones."""
    digest, vocabulary, size, characters = hashlib.sha256(), set[str](), 0, 0
    kept, odd, seen, aside = list[File](), dict[bytes, str](), set[bytes](), Counter[str]()
    for file in files:
        own, length, n = hashlib.sha256(), 0, 0
        with opened(file) as content:
            for chunk, text in read_text(content, file.path, storage.CHUNK_BYTES):
                own.update(chunk)
                vocabulary.update(text)
                note_odd(chunk, str(file.path), odd)
                n += len(text)
                length += len(chunk)
        if not length or own.digest() in seen:
            aside["equal to another" if length else "empty"] += 1
            continue
        seen.add(own.digest())
        kept.append(file)
        digest.update(f"{file.name}\0".encode() + own.digest())
        size += length
        characters += n
    check_enough(root, characters)
    if aside:
        logger.warning(listed(aside))
    warn_of(odd)
    return Text(size, characters, "".join(sorted(vocabulary)), digest.hexdigest()), kept


def check_enough(root: Path, characters: int) -> None:
    """Raise InputError if a text is too short for any run."""
    needed = 10 * (SHORTEST_BLOCK_SIZE + 1)
    if characters < needed:
        raise InputError(
            f"{root}: {characters} characters are too few to train and validate on; use at least"
            f" {needed}, better a million"
        )
