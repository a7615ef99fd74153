"""The files of an upload, and what a text of them is made of."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain, count
from pathlib import Path

from launcher.errors import InputError
from launcher.files import storage
from launcher.files.documents import read_text
from launcher.text.copies import Fill
from launcher.text.formats import PLAIN, Counts, File, bare, look, named, note_odd, opened

logger = logging.getLogger("launcher.text")


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
    try:
        "".encode(encoding or "utf-8")
        for root in paths:
            folder = root.is_dir()
            if folder:
                below = files_below(root, added, skipped, tokens, alone)
            else:
                below = [] if skipped.match(root, root) else [root]
            fill(below)
            prefix = Path(root.resolve().name if folder and not alone else "")
            for path in below:
                file = look(path, encoding, column, plain=added.match(path, root))
                if file.format is not PLAIN and not tokens:
                    given = shlex.quote(str(path))
                    raise InputError(f"{path}: is {file.format.name}", "needs-tokens", path=given)
                within = prefix / (path.relative_to(root) if folder else path.name)
                files.append(replace(file, name=name_in_upload(within, names)))
    except OSError as error:
        problem = f"{error.filename or root}: {error.strerror or error}"
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        problem = f"{shown}: its name is not UTF-8; rename it"
    except LookupError:
        faults.append(("encoding", encoding, "unknown; for example: cp1252, gb18030"))
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


def files_below(root: Path, added: Globs, skipped: Globs, tokens: bool, alone: bool) -> list[Path]:
    """The files of a folder that are taken, sorted; the others are logged. alone: one must be."""
    taken, left, aside, errors = list[Path](), list[Path](), Counter[str](), list[OSError]()
    for place, folders, names in os.walk(root, onerror=errors.append):
        for path in [Path(place, name) for name in (*folders, *names)]:
            if why := reason_to_skip(path, root, skipped):
                aside[why] += 1
                folders[:] = [name for name in folders if name != path.name]
            elif path.name not in folders:
                known = named(path)
                read = known is PLAIN or (tokens and known is not None and known.read)
                (taken if added.match(path, root) or read else left).append(path)
    for error in errors:  # which rglob ignores
        raise error
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
        elif not is_binary(one[kind]):
            glob = shlex.quote(f"{'*' * kind.startswith('.')}{kind}")
            facts = dict(code="take-plain", glob=glob)
        groups.setdefault(facts.get("code", how), (Counter(), how, facts))[0][kind] = n
    return [(f"{listed(kinds)}{how}", facts) for kinds, how, facts in groups.values()]


def is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(512)


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
