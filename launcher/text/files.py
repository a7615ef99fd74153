"""The files of a text, and whether they can be trained on."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain, count
from pathlib import Path, PurePath

from launcher.errors import InputError
from launcher.files import storage
from launcher.files.documents import read_text
from launcher.text.formats import File, bare, look, named, note_odd, opened, warn_of

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


class Globs:
    """Patterns of file names, or of paths below a folder, and which of them were of use."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns, self.used = patterns, set[str]()

    def match(self, path: Path, root: Path) -> bool:
        relative = path.relative_to(root).as_posix() if path != root else path.name
        hits = [p for p in self.patterns if fnmatchcase(relative, p) or fnmatchcase(path.name, p)]
        self.used.update(hits)
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
    added, skipped, found = Globs(include), Globs(exclude), dict[str, File]()
    for root in paths:
        folder = root.is_dir()
        try:
            files = files_below(root, added, skipped, tokens) if folder else [root]
            for path in files:
                file = look(path, encoding, column, plain=added.match(path, root))
                if file.format.needs_tokens and not tokens:
                    raise InputError(f"{path}: is {file.format.name}; {to_tokens(path)}")
                within = path.relative_to(root) if folder else Path(path.name)
                if folder and len(paths) > 1:
                    within = root.absolute().name / within
                try:
                    str(within).encode()
                except UnicodeEncodeError:
                    shown = os.fsencode(path).decode(errors="backslashreplace")
                    raise InputError(f"{shown}: its name is not UTF-8; rename it") from None
                name = name_in_store(within, found)
                found[name.lower()] = replace(file, name=name)
        except OSError as error:
            raise InputError(f"{error.filename or root}: {error.strerror or error}") from None
    for option, globs in (("include", added), ("exclude", skipped)):
        for pattern in globs.patterns:
            if pattern not in globs.used:
                raise InputError(f"--{option} {pattern}: no file is called so")
    tell_conversions(list(found.values()))
    return list(found.values())


def files_below(root: Path, added: Globs, skipped: Globs, tokens: bool) -> list[Path]:
    """The files of a folder that are taken, sorted; the others are logged."""
    taken, left, aside = list[Path](), list[Path](), Counter[str]()
    for place, folders, names in os.walk(root, onerror=raise_error):  # rglob ignores errors
        for path in [Path(place, name) for name in folders + names]:
            folder = path.name in folders
            if path.name.startswith("."):
                aside["hidden"] += 1
            elif skipped.match(path, root):
                aside["excluded"] += 1
            elif folder and (path / "pyvenv.cfg").exists():
                aside["virtual environment"] += 1
            elif folder and path.is_symlink():
                aside["link to a folder"] += 1
            elif folder:
                continue
            else:
                known = named(path)
                reads = known is not None and known.read and (tokens or not known.needs_tokens)
                (taken if reads or added.match(path, root) else left).append(path)
            if folder:
                folders.remove(path.name)
    if aside:
        logger.info(f"{root}: {listed(aside)}")
    what = left_out(left, root, tokens) if left else ""
    if not taken:
        if (root / "meta.json").exists():
            raise InputError(
                f"{root}: these are tokens; give the URI that `upload-data` printed for them"
            )
        raise InputError(f"{root}: no text is there{what and f'; {what}'}")
    for path in taken:
        if not path.is_file():
            raise InputError(f"{path}: not a file, or a broken link; delete it")
    if what:
        logger.warning(f"{root}: {what}")
    return sorted(taken)


def raise_error(error: OSError) -> None:
    raise error


def listed(counts: Counter[str]) -> str:
    """`27 files left out: 24 .md, 3 .py`, the most frequent kinds first."""
    kinds = [f"{n:,} {kind}" for kind, n in counts.most_common(5)]
    kinds += ["others"] * (len(counts) > 5)
    total = counts.total()
    return f"{total:,} file{'s' * (total > 1)} left out: {', '.join(kinds)}"


def left_out(files: Sequence[Path], root: Path, tokens: bool) -> str:
    """How many files are left out, and what would take each kind."""
    kinds = Counter(bare(path).suffix.lower() or path.name for path in files)
    ways = dict[str, None]()
    for path in files:
        known, suffix = named(path), bare(path).suffix.lower()
        if known is None:
            suffix = f"*{path.suffix}" if path.suffix else path.name
            ways.setdefault(f"`--include '{suffix}'` takes such as plain text")
        elif known.read:
            ways.setdefault(to_tokens(root))
        else:
            ways.setdefault(f"{suffix}: {known.advice.format(path='FILE', stem='NAME')}")
    return f"{listed(kinds)}; {'; '.join(ways)}"


def to_tokens(path: Path) -> str:
    """What to type for files of records."""
    return (
        f"documents and conversations need `sm-nanogpt upload-data {path} --tokenizer bpe`, or"
        " --tokenizer JOB-ID to tune the model of a job"
    )


def name_in_store(within: PurePath, taken: Container[str]) -> str:
    """The name of a file in a data set, where every file of a text is called *.txt."""
    stem = bare(within).with_suffix("").as_posix()
    names = chain([f"{stem}.txt"], (f"{stem}-{number}.txt" for number in count(2)))
    return next(name for name in names if name.lower() not in taken)


def tell_conversions(files: Sequence[File]) -> None:
    converted = Counter(file.encoding for file in files if file.encoding not in ("", "utf-8-sig"))
    for encoding, n in converted.items():
        logger.info(f"converted to UTF-8: {n:,} of {len(files):,} files, from {encoding}")


def check_text(root: Path, files: Sequence[File]) -> tuple[Text, list[File]]:
    """Read every file as train.py would. Returns also the files without empty and equal ones.

    Raises:
        InputError: a file is binary or not UTF-8, or the text is too short.
    """
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
        logger.warning(f"{root}: {listed(aside)}")
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
