"""Find the files of an upload."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.progress import Progress, no_progress
from sm_nanogpt.launcher.text.documents import documents_in, list_left_out
from sm_nanogpt.launcher.text.encodings import is_encoding
from sm_nanogpt.launcher.text.formats import format_of_name, is_packed
from sm_nanogpt.launcher.text.reading import File, detect_file
from sm_nanogpt.launcher.text.skipped import Skipped
from sm_nanogpt.launcher.text.sources import TextSource
from sm_nanogpt.launcher.text.unpacking import without_compression
from sm_nanogpt.launcher.values import is_utf8

logger = logging.getLogger(__name__)

HELD_OUT_WORDS = "(test|val|valid|validation|dev|eval)"
HELD_OUT = re.compile(rf"{HELD_OUT_WORDS}(?![a-z])", re.IGNORECASE)
HELD_OUT_LAST = re.compile(rf".*[^a-z]{HELD_OUT_WORDS}", re.IGNORECASE)  # as wiki.test, data-test
TRAINED_ON = re.compile(r"(.*[^a-z])?train(ing)?([^a-z].*)?", re.IGNORECASE)
MAX_GLOBS, MAX_NAMES = 8, 3  # in a warning
DATASETS_FILES = {"dataset_info.json", "state.json"}  # as `save_to_disk` of datasets writes them
SNIFF_BYTES = 512


@dataclass(frozen=True)
class FileOptions:
    """Which files are taken, and how they are read."""

    include: Sequence[str] = ()  # patterns of files that are taken as plain text
    exclude: Sequence[str] = ()  # patterns of files and folders that are left out
    records: bool = False  # whether files of records are taken too; an upload of tokens can
    column: str = "text"  # the field of a record that holds the text
    encoding: str = ""  # of files that are not UTF-8
    me: str = ""  # whose messages a model learns, of exported chats


def find_files(
    sources: Sequence[TextSource],
    options: FileOptions = FileOptions(),
    progress: Progress = no_progress,
) -> list[File]:
    """Find the files to upload: each source that is a file, and those of a known format in folders.

    What is left out of a folder is logged. Copies are fetched before they are opened. Raises
    InputError if a file cannot be read or is of a wrong format, or if an option fits no file.
    """
    return FileFinder(sources, options, progress).find()


class Globs:
    """Patterns of names, or of paths below a folder, in any case."""

    def __init__(self, field: str, patterns: Sequence[str]) -> None:
        self.field = field  # of FileOptions
        self.patterns = [pattern.removeprefix("./") for pattern in patterns]
        self.unused = set(self.patterns)

    def match(self, path: Path, root: Path) -> bool:
        names = (path.name.lower(), path.relative_to(root).as_posix().lower())
        matches = set()
        for pattern in self.patterns:
            if any(fnmatchcase(name, pattern.lower()) for name in names):
                matches.add(pattern)
        self.unused -= matches
        return bool(matches)

    def check_used(self) -> None:
        """Raise InputError if a pattern matched nothing."""
        for pattern in self.unused:
            raise InputError("fits no file", field=self.field, value=pattern)


class FileFinder:
    """Collects the files of some sources, in their order."""

    def __init__(
        self, sources: Sequence[TextSource], options: FileOptions, progress: Progress
    ) -> None:
        self.sources = sources
        self.options = options
        self.progress = progress
        self.include = Globs("include", options.include)
        self.exclude = Globs("exclude", options.exclude)
        self.files: list[File] = []
        self.names: set[str] = set()  # of the files in the upload, in lower case

    @property
    def is_single(self) -> bool:
        return len(self.sources) == 1

    def find(self) -> list[File]:
        self.check_encoding()
        for source in self.sources:
            try:
                self.add_source(source)
            except OSError as error:
                path = Path(error.filename or source.path)
                raise InputError(f"{source.shown(path)}: {error.strerror or error}") from None
        self.include.check_used()
        self.exclude.check_used()
        self.check_column()
        self.log_conversions()
        return self.files

    def check_encoding(self) -> None:
        encoding = self.options.encoding
        if encoding and not is_encoding(encoding):
            problem = "is no encoding of files; for example: cp1252, gb18030"
            raise InputError(problem, field="encoding", value=encoding)

    def check_column(self) -> None:
        """Raise InputError if there is a column, and all files are plain text."""
        column = self.options.column
        if column == "text" or not self.files:
            return
        if all(file.format.is_plain for file in self.files):
            first = self.sources[0]
            problem = f"is for records, and {first.shown(first.path)} is plain text"
            raise InputError(problem, field="column", value=column)

    def log_conversions(self) -> None:
        encodings = Counter(file.encoding for file in self.files)
        for encoding, n_files in encodings.items():
            if encoding not in ("", "utf-8-sig"):
                total = len(self.files)
                logger.info(f"converted to UTF-8: {n_files:,} of {total:,} files, from {encoding}")

    def add_source(self, source: TextSource) -> None:
        root = source.path
        if root.is_dir():
            paths = self.files_of_folder(source)
            source.fetch(paths, self.progress)
            prefix = Path() if self.is_single else Path(root.resolve().name)
            for path in paths:
                if not os.access(path, os.R_OK):
                    raise unreadable(path, source)
                self.add_file(path, source, prefix / path.relative_to(root))
        elif not self.exclude.match(root, root):
            source.fetch([root], self.progress)
            self.add_file(root, source, Path(root.name))

    def add_file(self, path: Path, source: TextSource, name: Path) -> None:
        """Add a file, which has this name in the upload unless another has it."""
        file = detect_file(
            path,
            self.options.encoding,
            self.options.column,
            plain=self.include.match(path, source.path),
            source=source.shown(path),
            me=self.options.me,
        )
        if not (file.format.is_plain or self.options.records):
            raise records_need_tokens(file)
        if not is_utf8(str(name)):
            shown = os.fsencode(path).decode(errors="backslashreplace")
            raise InputError(f"{shown}: its name is not UTF-8; rename it")
        self.files.append(replace(file, name=self.free_name(name)))

    def free_name(self, name: Path) -> str:
        """The name of a file in the upload, where all are called *.txt.

        No two names differ by case alone.
        """
        stem = without_compression(name).with_suffix("").as_posix()
        free_name = f"{stem}.txt"
        number = 1
        while free_name.lower() in self.names:
            number += 1
            free_name = f"{stem}-{number}.txt"
        self.names.add(free_name.lower())
        return free_name

    def files_of_folder(self, source: TextSource) -> list[Path]:
        """The files of a folder that are taken, sorted. What else is there is logged.

        Raises InputError if none is taken and there is no other source.
        """
        files: list[Path] = []
        others: list[Path] = []
        n_skipped: Counter[str] = Counter()
        for path in self.walk(source, n_skipped):
            if self.is_taken(path, source.path):
                files.append(path)
            else:
                others.append(path)
        shown = source.shown(source.path)
        if n_skipped:
            logger.info(f"{shown}: {list_left_out(n_skipped)}")
        for message, advice in self.left_out_messages(source, others, is_empty=not files):
            if self.is_single and not files:
                raise InputError(f"{shown}: {message}", **advice)
            logger.warning(f"{shown}: {message}", extra=advice)
        return sorted(files)

    def walk(self, source: TextSource, n_skipped: Counter[str]) -> Iterator[Path]:
        """Yield the files below a folder, and count what is skipped, by the reason.

        Raises InputError if a folder cannot be read, or is one that datasets saved.
        """

        def raise_unreadable(error: OSError) -> None:  # which os.walk would ignore
            raise unreadable(Path(error.filename), source, str(error.strerror))

        for directory, folders, names in os.walk(source.path, onerror=raise_unreadable):
            check_no_saved_dataset(Path(directory), source, names)
            for name in sorted([*folders, *names]):
                path = Path(directory, name)
                reason = self.reason_to_skip(path, source.path)
                if reason:
                    n_skipped[reason] += 1
                    if name in folders:
                        folders.remove(name)  # os.walk then leaves it out
                elif name not in folders:
                    yield path
            folders.sort()  # a file system lists them in any order

    def reason_to_skip(self, path: Path, root: Path) -> str:
        """Why a file or a folder is left out, whatever is in it; or ''."""
        if self.exclude.match(path, root):
            return "excluded"
        if path.name.startswith("."):
            return "hidden"
        with suppress(PermissionError):  # os.walk reports the folder
            if (path / "pyvenv.cfg").exists():
                return "virtual environment"
        if path.is_symlink() and not path.is_file():
            return "link to a folder" if path.is_dir() else "broken link"
        return ""

    def is_taken(self, path: Path, root: Path) -> bool:
        """True for a file of a folder that is included, or of a format that is read."""
        if self.include.match(path, root):
            return True
        format = format_of_name(path)
        if format is None or format.advice:
            return False
        return format.is_plain or self.options.records

    def left_out_messages(
        self, source: TextSource, others: Sequence[Path], is_empty: bool
    ) -> list[tuple[str, dict[str, str]]]:
        """What to say of the files of a folder that are left out, with the code of a remedy.

        is_empty: none is taken.
        """
        messages = [(str(group), group.remedy) for group in left_out_groups(others, source)]
        if not is_empty:
            return messages
        if (source.path / "meta.json").exists():
            messages = [("these are tokens, which a launch takes", {"code": "no-upload"})]
        if not messages:
            return [("no text is there", {})]
        return [(f"no text is there; {message}", remedy) for message, remedy in messages]


def records_need_tokens(file: File) -> InputError:
    """The error for records where a text by characters was asked for."""
    skipped = Skipped()
    is_chat = False
    with suppress(InputError):  # which an upload with a tokenizer reports
        document = next(documents_in(file, skipped), None)
        is_chat = document.is_chat if document else bool(skipped.talks.authors)
    problem = f"{file.shown}: is {file.format.name}, which is read as tokens"
    path = shlex.quote(file.shown)
    if is_chat:
        return InputError(problem, "chats-need-tokens", path=path)
    return InputError(problem, "needs-tokens", path=path)


def unreadable(path: Path, source: TextSource, problem: str = "Permission denied") -> InputError:
    """The error for a file or folder below a folder that cannot be opened."""
    glob = shlex.quote(path.relative_to(source.path).as_posix())
    return InputError(f"{source.shown(path)}: {problem}", "leave-out", glob=glob)


def check_no_saved_dataset(folder: Path, source: TextSource, names: Sequence[str]) -> None:
    """Raise InputError if a folder is what `save_to_disk` of Hugging Face's datasets writes."""
    part = "['train']" if "dataset_dict.json" in names else ""
    if not part and not DATASETS_FILES.issubset(names):
        return
    shown = source.shown(folder)
    target = f"{folder.resolve().name}.parquet"
    convert = f"d.load_from_disk('{shown}'){part}.to_parquet('{target}')"
    raise InputError(
        f"{shown}: was written by `save_to_disk` of datasets;"
        f' `python -c "import datasets as d; {convert}"` makes Parquet of it'
    )


# -- what is left out of a folder ------------------------------------------------------------------


@dataclass
class LeftOut:
    """Files that are left out of a folder, of kinds for which the same can be done."""

    advice: str = ""  # how to make texts of them
    remedy: dict[str, str] = field(default_factory=dict)  # or the code and the facts of a remedy
    n_files: Counter[str] = field(default_factory=Counter)  # by kind

    def __str__(self) -> str:
        files = list_left_out(self.n_files)
        if not self.advice:
            return files
        return f"{files}; {self.advice}"


def left_out_groups(files: Sequence[Path], source: TextSource) -> list[LeftOut]:
    """Group files by what can be done about them. A kind is a suffix, or a name without one."""
    kinds = {path: without_compression(path).suffix.lower() or path.name for path in files}
    examples = {kind: path for path, kind in kinds.items()}
    groups: dict[str, LeftOut] = {}
    for kind, n_files in Counter(kinds.values()).most_common():
        group = left_out(kind, examples[kind], source)
        group = groups.setdefault(group.remedy.get("code", group.advice), group)
        group.n_files[kind] = n_files
    return list(groups.values())


def left_out(kind: str, example: Path, source: TextSource) -> LeftOut:
    """What can be done about the files of a kind, by one of them."""
    format = format_of_name(example)
    if format is None:
        if not is_plain_text(example):
            return LeftOut()
        glob = f"*{kind}" if kind.startswith(".") else kind
        return LeftOut(remedy={"code": "take-plain", "glob": shlex.quote(glob)})
    if format.advice:
        return LeftOut(advice=format.advice.format(path="FILE", stem="NAME", text="NAME.txt"))
    path = shlex.quote(source.shown(source.path))
    return LeftOut(remedy={"code": "needs-tokens", "path": path})


def is_plain_text(path: Path) -> bool:
    """True if a file begins as text; False if it is empty, as a copy that was not fetched."""
    with path.open("rb") as file:
        beginning = file.read(SNIFF_BYTES)
    return bool(beginning) and b"\0" not in beginning and not is_packed(beginning)


# -- files for tests -------------------------------------------------------------------------------


def warn_of_held_out(files: Sequence[File]) -> None:
    """Warn if some of the files, but not all, have names of files that no model should learn."""
    has_training_file = any(TRAINED_ON.fullmatch(stem_of(file)) for file in files)
    globs = {file: held_out_glob(file, has_training_file) for file in files}
    held_out = [file for file in files if globs[file]]
    if not held_out or len(held_out) == len(files):
        return
    names = [str(Path(file.name).with_name(file.path.name)) for file in held_out]
    shown = ", ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        shown = f"{len(names):,} files, such as {shown}"
    quoted = [shlex.quote(glob) for glob in dict.fromkeys(globs.values()) if glob]
    extra = {"code": "hold-out", "globs": quoted[:MAX_GLOBS]}
    logger.warning(f"files that are named as tests are trained on too: {shown}", extra=extra)


def stem_of(file: File) -> str:
    return without_compression(file.path).stem


def held_out_glob(file: File, has_training_file: bool) -> str:
    """A pattern that leaves out a file for tests or validation, or its folder; '' for other files.

    The last word of a name counts only beside a file for training: a note may well be called
    driving-test.
    """
    for folder in Path(file.name).parent.parts:
        if HELD_OUT.fullmatch(folder):
            return folder
    name = file.path.name
    match = HELD_OUT.match(name)
    if match is not None:
        n_characters = match.end() + 1  # with the one after the word: `test-*`
        return f"{name[:n_characters]}*"
    if has_training_file and HELD_OUT_LAST.fullmatch(stem_of(file)):
        return name
    return ""
