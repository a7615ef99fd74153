"""The files of an upload, and what a text of them is made of."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain, count
from pathlib import Path

from launcher.errors import InputError
from launcher.files import storage
from launcher.text.copies import Fill
from launcher.text.encodings import is_encoding, read_text
from launcher.text.formats import (
    COMPRESSIONS,
    PLAIN,
    Counts,
    File,
    bare,
    documents_of,
    first_with_magic,
    look,
    named,
    note_odd,
    opened,
)
from launcher.text.skipped import Skipped

logger = logging.getLogger("launcher.text")

HELD_OUT = re.compile(r"(test|val|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)
SAVED = {"dataset_info.json", "state.json"}


class Globs:
    """Patterns of names, or of paths below a folder, in any case, and those that matched none."""

    def __init__(self, field: str, patterns: Sequence[str]) -> None:
        self.field, self.patterns = field, [pattern.removeprefix("./") for pattern in patterns]
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
    fill: Fill = lambda wanted: None,
) -> list[File]:
    """The files to upload: each path that is a file, and all of a known format in each folder.

    include adds plain text by patterns of names, or of paths below a folder, and exclude leaves out
    files or folders. What else is left out is logged. Without tokens, only plain text is taken.
    fill is called with files before they are opened. Raises InputError.
    """
    added, skipped = Globs("include", include), Globs("exclude", exclude)
    files, names, alone = list[File](), set[str](), len(paths) == 1
    faults, problem = list[tuple[str, str, str]](), ""
    if encoding and not is_encoding(encoding):
        why = "is no encoding of files; for example: cp1252, gb18030"
        raise InputError(why, field="encoding", value=encoding)
    try:
        for root in paths:
            folder = root.is_dir()
            if folder:
                below = files_below(root, added, skipped, tokens, alone)
            else:
                below = [] if skipped.match(root, root) else [root]
            fill(below)
            prefix = Path(root.resolve().name if folder and not alone else "")
            for path in below:
                if folder and not os.access(path, os.R_OK):
                    raise unreadable(path, root)
                file = look(path, encoding, column, plain=added.match(path, root))
                if file.format is not PLAIN and not tokens:
                    raise needs_tokens(file)
                within = prefix / (path.relative_to(root) if folder else path.name)
                files.append(replace(file, name=name_in_upload(within, names)))
    except OSError as error:
        problem = f"{error.filename or root}: {error.strerror or error}"
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        problem = f"{shown}: its name is not UTF-8; rename it"
    if problem:
        raise InputError(problem)
    faults += [(g.field, each, "fits no file") for g in (added, skipped) for each in g.unused]
    if column != "text" and files and all(file.format is PLAIN for file in files):
        faults.append(("column", column, f"is for records, and {paths[0]} is plain text"))
    for field, value, why in faults:
        raise InputError(why, field=field, value=value)
    encodings = Counter(file.encoding for file in files if file.encoding not in ("", "utf-8-sig"))
    for encoding, n in encodings.items():
        logger.info(f"converted to UTF-8: {n:,} of {len(files):,} files, from {encoding}")
    return files


def needs_tokens(file: File) -> InputError:
    """The error for records where a text by characters was asked for."""
    is_chat = False
    with suppress(InputError):  # an upload with --tokenizer reports the error
        is_chat = next((is_chat for _, is_chat, _ in documents_of(file, Skipped())), False)
    what = f"{file.path}: is {file.format.name}, and records are read as tokens"
    path = shlex.quote(str(file.path))
    if is_chat:
        return InputError(what, "chats-need-tokens", path=path)
    return InputError(what, "needs-tokens", path=path)


def unreadable(path: Path, root: Path, why: str = "Permission denied") -> InputError:
    """The error for a file or folder below a folder that cannot be opened."""
    glob = shlex.quote(path.relative_to(root).as_posix())
    return InputError(f"{path}: {why}", "leave-out", glob=glob)


def warn_of_held_out(files: Sequence[File]) -> None:
    """Warn if some of the files, but not all, are called as those that nothing should learn."""
    globs_of = {file: held_out(file) for file in files}
    names = [Path(file.name).with_name(file.path.name) for file in files if globs_of[file]]
    if not names or len(names) == len(files):
        return
    globs = [shlex.quote(glob) for glob in dict.fromkeys(globs_of.values()) if glob]
    shown = ", ".join(map(str, names[:3]))
    if len(names) > 3:
        shown = f"{len(names):,} files, such as {shown}"
    facts = {"code": "hold-out", "globs": globs[:8]}
    logger.warning(f"also trained on, by their names for tests: {shown}", extra=facts)


def held_out(file: File) -> str:
    """The pattern of a file for tests or validation, by its name or that of a folder; or ''."""
    for folder in Path(file.name).parent.parts:
        if HELD_OUT.fullmatch(folder):
            return folder
    match = HELD_OUT.match(file.path.name)
    if not match:
        return ""
    return f"{match[0]}*" if match[0] == file.path.name else f"{file.path.name[: match.end() + 1]}*"


def check_saved(folder: Path, names: Sequence[str]) -> None:
    """Raise InputError if a folder is what `save_to_disk` of Hugging Face's datasets writes."""
    part = "['train']" if "dataset_dict.json" in names else ""
    if not part and not SAVED.issubset(names):
        return
    target = f"{folder.resolve().name}.parquet"
    read = f"d.load_from_disk('{folder}'){part}.to_parquet('{target}')"
    how = f'`python -c "import datasets as d; {read}"` makes Parquet of it'
    raise InputError(f"{folder}: was written by `save_to_disk` of datasets; {how}")


def files_below(root: Path, added: Globs, skipped: Globs, tokens: bool, alone: bool) -> list[Path]:
    """The files of a folder that are taken, sorted; the others are logged. alone: one must be."""
    taken, left, aside, errors = list[Path](), list[Path](), Counter[str](), list[OSError]()
    for place, folders, names in os.walk(root, onerror=errors.append):
        check_saved(Path(place), names)
        folders.sort()  # a file system lists them in any order
        for path in [Path(place, name) for name in sorted([*folders, *names])]:
            if why := reason_to_skip(path, root, skipped):
                aside[why] += 1
                folders[:] = [name for name in folders if name != path.name]
            elif path.name not in folders:
                known = named(path)
                read = known is PLAIN or (tokens and known is not None and known.read)
                (taken if added.match(path, root) or read else left).append(path)
    for error in errors:  # which rglob ignores
        raise unreadable(Path(error.filename), root, str(error.strerror))
    if aside:
        logger.info(f"{root}: {listed(aside)}")
    lines = left_out(left, root)
    if not taken and (root / "meta.json").exists():
        lines = [("these are tokens, which a launch takes", dict(code="no-upload"))]
    if not taken:
        lines = [(f"no text is there; {what}", advice) for what, advice in lines]
        lines = lines or [("no text is there", {})]
    for what, advice in lines:
        if alone and not taken:
            raise InputError(f"{root}: {what}", **advice)
        logger.warning(f"{root}: {what}", extra=advice)
    return sorted(taken)


def reason_to_skip(path: Path, root: Path, skipped: Globs) -> str:
    """Why a file or a folder is left out, whatever is in it."""
    if skipped.match(path, root):
        return "excluded"
    if path.name.startswith("."):
        return "hidden"
    with suppress(PermissionError):  # the walk names the folder
        if (path / "pyvenv.cfg").exists():
            return "virtual environment"
    if path.is_symlink() and not path.is_file():
        return "link to a folder" if path.is_dir() else "broken link"
    return ""


def listed(counts: Counter[str]) -> str:
    """`27 files left out: 24 .md, 3 .py`, the most frequent kinds first."""
    kinds = [f"{n:,} {kind}" for kind, n in counts.most_common(8)] + ["others"] * (len(counts) > 8)
    total = counts.total()
    return f"{total:,} file{'s' * (total > 1)} left out: {', '.join(kinds)}"


def left_out(files: Sequence[Path], root: Path) -> list[tuple[str, dict[str, str]]]:
    """What is left out, by what can be done about it, with the code and facts of that."""
    kind_of = {path: bare(path).suffix.lower() or path.name for path in files}
    one = {kind: path for path, kind in kind_of.items()}
    groups = dict[str, tuple[Counter[str], str, dict[str, str]]]()
    for kind, n in Counter(kind_of.values()).most_common():
        known, how, facts = named(one[kind]), "", dict[str, str]()
        if known and known.read:
            facts = dict(code="needs-tokens", path=shlex.quote(str(root)))
        elif known:
            how = f"; {known.advice.format(path='FILE', stem='NAME')}"
        elif is_plain(one[kind]):
            glob = shlex.quote(f"{'*' * kind.startswith('.')}{kind}")
            facts = dict(code="take-plain", glob=glob)
        groups.setdefault(facts.get("code", how), (Counter(), how, facts))[0][kind] = n
    return [(f"{listed(kinds)}{how}", facts) for kinds, how, facts in groups.values()]


def is_plain(path: Path) -> bool:
    """Whether a file begins as text; not if it is empty, as a copy that was not fetched."""
    with path.open("rb") as file:
        begins = file.read(512)
    is_packed = any(begins.startswith(magic) for magic, _ in COMPRESSIONS.values())
    return bool(begins) and b"\0" not in begins and not is_packed and not first_with_magic(begins)


def name_in_upload(within: Path, taken: set[str]) -> str:
    """The name of a file in an upload, where all are called *.txt; no case makes a difference."""
    stem = bare(within).with_suffix("").as_posix()
    names = chain([f"{stem}.txt"], (f"{stem}-{number}.txt" for number in count(2)))
    name = next(name for name in names if name.lower() not in taken)
    taken.add(name.lower())
    name.encode()  # raises if it is not UTF-8
    return name


def read_plain(name: str, files: Sequence[File]) -> tuple[Counts, list[File]]:
    """Read every file as train.py would. Returns also the files without empty and equal ones."""
    counts, digest, vocabulary = Counts(), hashlib.sha256(), set[str]()
    kept, seen, aside = list[File](), set[bytes](), Counter[str]()
    for file in files:
        own, length, characters = hashlib.sha256(), 0, 0
        with opened(file) as content:
            for chunk, text in read_text(content, file.path, storage.CHUNK_BYTES):
                own.update(chunk)
                vocabulary.update(text)
                note_odd(chunk, str(file.path), counts.odd)
                characters += len(text)
                length += len(chunk)
        if not length or own.digest() in seen:
            aside["equal to another" if length else "empty"] += 1
            continue
        seen.add(own.digest())
        kept.append(file)
        digest.update(f"{file.name}\0".encode() + own.digest())
        counts.size += length
        counts.characters += characters
    counts.check(name)
    if aside:
        logger.warning(listed(aside))
    counts.sha256, counts.vocabulary = digest.hexdigest(), "".join(sorted(vocabulary))
    return counts, kept
