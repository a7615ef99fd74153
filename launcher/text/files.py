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

from sm_nanogpt.entry_point.errors import os_reason
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.progress import Progress, no_progress
from sm_nanogpt.launcher.text.documents import documents_in, list_left_out
from sm_nanogpt.launcher.text.encodings import is_encoding
from sm_nanogpt.launcher.text.formats import (
    ZIP,
    fill_in,
    format_of_name,
    is_packed,
    unused_file_name,
)
from sm_nanogpt.launcher.text.reading import File, detect_file
from sm_nanogpt.launcher.text.skipped import Skipped
from sm_nanogpt.launcher.text.sources import TextSource
from sm_nanogpt.launcher.text.talks import list_counts
from sm_nanogpt.launcher.text.unpacking import DETECT_BYTES, without_compression
from sm_nanogpt.launcher.values import is_utf8

logger = logging.getLogger(__name__)

HELD_OUT_WORDS = "(test|val|valid|validation|dev|eval)"
HELD_OUT = re.compile(rf"{HELD_OUT_WORDS}(?![a-z])", re.IGNORECASE)
HELD_OUT_LAST = re.compile(rf".*[^a-z]{HELD_OUT_WORDS}", re.IGNORECASE)  # wiki.test, data-test
TRAINED_ON = re.compile(r"(.*[^a-z])?train(ing)?([^a-z].*)?", re.IGNORECASE)
MAX_GLOBS_SHOWN = 8
MAX_NAMES_SHOWN = 3
DATASETS_FILES = {"dataset_info.json", "state.json"}  # written by `save_to_disk` of datasets


@dataclass(frozen=True)
class FileOptions:
    """Which files are taken, and how they are read."""

    include: Sequence[str] = ()  # patterns of files that are taken as plain text
    exclude: Sequence[str] = ()  # patterns of files and folders that are left out
    records: bool = False  # True: files of records are taken too, as for an upload of tokens
    column: str = "text"  # the field of a record that holds the text
    encoding: str = ""  # of files that are not UTF-8
    me: str = ""  # the person in exported chats whose messages a model learns


def find_files(
    sources: Sequence[TextSource],
    options: FileOptions = FileOptions(),
    progress: Progress = no_progress,
) -> list[File]:
    """Find the files to upload: each source that is a file, and the files of a known format in
    folders.

    Files that are left out of a folder are logged. Files from elsewhere are fetched before they are
    opened. Raises InputError if a file cannot be read or has a wrong format, or if an option fits
    no file.
    """
    return FileFinder(sources, options, progress).find()


class Globs:
    """Patterns of file names, or of paths below a folder. Upper and lower case are one."""

    def __init__(self, field: str, patterns: Sequence[str]) -> None:
        self.field = field  # of FileOptions
        self.patterns = [pattern.removeprefix("./") for pattern in patterns]
        self.used: set[str] = set()  # the patterns that have matched a path

    def match(self, path: Path, root: Path) -> bool:
        """True if a pattern matches the name of a path, or the path below `root`."""
        names = (path.name.lower(), path.relative_to(root).as_posix().lower())
        matches = set()
        for pattern in self.patterns:
            if any(fnmatchcase(name, pattern.lower()) for name in names):
                matches.add(pattern)
        self.used |= matches
        return bool(matches)

    def check_used(self) -> None:
        """Raise InputError if a pattern matched nothing."""
        for pattern in self.patterns:
            if pattern not in self.used:
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
                raise InputError(f"{source.shown(path)}: {os_reason(error)}") from None
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
        """Raise InputError if a column was given, and all files are plain text."""
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
        """Fetch and add the files of a source. Several folders are folders in the upload too."""
        root = source.path
        if root.is_dir():
            paths = self.files_of_folder(source)
            source.fetch(paths, self.progress)
            prefix = Path() if self.is_single else Path(root.resolve().name)
            for path in paths:
                if not os.access(path, os.R_OK):
                    raise unreadable_error(path, source)
                self.add_file(path, source, prefix / path.relative_to(root))
        elif not self.exclude.match(root, root):
            source.fetch([root], self.progress)
            self.add_file(root, source, Path(root.name))

    def add_file(self, path: Path, source: TextSource, name: Path) -> None:
        """Add a file of a source. Its name in the upload is like `name`.

        Raises InputError if its name is not UTF-8, if detect_file refuses it, or if it is a file of
        records and the upload is to be characters.
        """
        file = detect_file(
            path,
            self.options.encoding,
            self.options.column,
            as_plain=self.include.match(path, source.path),
            source=source.shown(path),
            me=self.options.me,
        )
        if not (file.format.is_plain or self.options.records):
            raise needs_tokens_error(file)
        if not is_utf8(str(name)):
            shown = os.fsencode(path).decode(errors="backslashreplace")
            raise InputError(f"{shown}: its name is not UTF-8; rename it")
        self.files.append(replace(file, name=self.name_in_upload(name)))

    def name_in_upload(self, name: Path) -> str:
        """Like `name`, but ends in .txt, and differs from the earlier names of the upload.

        No two names differ only by upper and lower case.
        """
        stem = without_compression(name).with_suffix("").as_posix()
        name_in_upload = f"{stem}.txt"
        number = 1
        while name_in_upload.lower() in self.names:
            number += 1
            name_in_upload = f"{stem}-{number}.txt"
        self.names.add(name_in_upload.lower())
        return name_in_upload

    def files_of_folder(self, source: TextSource) -> list[Path]:
        """The files of a folder that are taken, sorted. The other files are logged.

        Raises InputError if no file is taken and there is no other source.
        """
        files: list[Path] = []
        not_taken: list[Path] = []
        n_skipped: Counter[str] = Counter()
        for path in self.walk(source, n_skipped):
            if self.is_to_upload(path, source.path):
                files.append(path)
            else:
                not_taken.append(path)
        shown = source.shown(source.path)
        if n_skipped:
            logger.info(f"{shown}: {list_left_out(n_skipped)}")
        for message in left_out_messages(source, not_taken, has_texts=bool(files)):
            if self.is_single and not files:
                raise InputError(f"{shown}: {message.text}", **message.remedy)
            logger.warning(f"{shown}: {message.text}", extra=message.remedy)
        return sorted(files)

    def walk(self, source: TextSource, n_skipped: Counter[str]) -> Iterator[Path]:
        """Yield the files below a folder, and count what is skipped, by reason, in n_skipped.

        Raises InputError if a folder cannot be read, or if `save_to_disk` of datasets wrote it.
        """

        def raise_unreadable(error: OSError) -> None:  # os.walk would ignore the error
            raise unreadable_error(Path(error.filename), source, os_reason(error))

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
        """Why a file or a folder is left out without a look at its content; or ''."""
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

    def is_to_upload(self, path: Path, root: Path) -> bool:
        """True for a file of a folder that `include` names, or whose format can be read."""
        if self.include.match(path, root):
            return True
        format = format_of_name(path)
        if format is None or format.advice:
            return False
        return format.is_plain or self.options.records


def needs_tokens_error(file: File) -> InputError:
    """The error for a file of records, if the upload is to be characters."""
    skipped = Skipped()
    document = None
    try:
        document = next(documents_in(file, skipped), None)
    except InputError as error:
        if file.format is ZIP:  # it has no chat, so that a tokenizer would not help
            return error
        # For other files, an upload with a tokenizer reports it.
    path = shlex.quote(file.shown)
    people = list_counts(skipped.talks.authors)  # of a chat that a messenger exported
    if people:
        problem = f"{file.shown}: is a chat of {people}, which is read as tokens"
        return InputError(problem, code="talks-need-tokens", path=path)
    problem = f"{file.shown}: is {file.format.name}, which is read as tokens"
    if document is not None and document.is_chat:
        return InputError(problem, code="chats-need-tokens", path=path)
    return InputError(problem, code="needs-tokens", path=path)


def unreadable_error(
    path: Path, source: TextSource, problem: str = "permission denied"
) -> InputError:
    """The error for a file or folder of a source that cannot be opened."""
    if path == source.path:
        return InputError(f"{source.shown(path)}: {problem}")
    glob = shlex.quote(path.relative_to(source.path).as_posix())
    return InputError(f"{source.shown(path)}: {problem}", code="leave-out", glob=glob)


def check_no_saved_dataset(folder: Path, source: TextSource, names: Sequence[str]) -> None:
    """Raise InputError if `save_to_disk` of Hugging Face's datasets wrote a folder."""
    part = "['train']" if "dataset_dict.json" in names else ""
    if not part and not DATASETS_FILES.issubset(names):
        return
    shown = source.shown(folder)
    target = unused_file_name(folder.resolve(), ".parquet")
    convert = f"d.load_from_disk('{shown}'){part}.to_parquet('{target}')"
    raise InputError(
        f"{shown}: was written by `save_to_disk` of datasets;"
        f' `python -c "import datasets as d; {convert}"` makes Parquet of it'
    )


# -- what is left out of a folder ------------------------------------------------------------------


@dataclass
class LeftOut:
    """Files that are left out of a folder, and that one advice or remedy is for."""

    advice: str = ""  # how to make texts of them
    remedy: dict[str, str] = field(default_factory=dict)  # code and facts of a remedy, if no advice
    n_files: Counter[str] = field(default_factory=Counter)  # by kind

    def __str__(self) -> str:
        files = list_left_out(self.n_files)
        if not self.advice:
            return files
        return f"{files}; {self.advice}"


@dataclass(frozen=True)
class LeftOutMessage:
    """A message on files that are left out of a folder."""

    text: str
    remedy: dict[str, str] = field(default_factory=dict)  # code and facts, as InputError takes them


def left_out_messages(
    source: TextSource, not_taken: Sequence[Path], has_texts: bool
) -> list[LeftOutMessage]:
    """Say which files of a folder are left out. has_texts: some files of the folder are taken."""
    groups = left_out_groups(not_taken, source)
    if has_texts:
        return [LeftOutMessage(str(group), group.remedy) for group in groups]
    if (source.path / "meta.json").exists():  # `launch` takes the folder as it is
        tokens = "no text is there; these are tokens, which a launch takes"
        return [LeftOutMessage(tokens, {"code": "no-upload"})]
    if not groups:
        return [LeftOutMessage("no text is there")]
    return [LeftOutMessage(f"no text is there; {group}", group.remedy) for group in groups]


def left_out_groups(files: Sequence[Path], source: TextSource) -> list[LeftOut]:
    """Group files by their advice or remedy.

    The kind of a file is its suffix, or its name if it has no suffix.
    """
    kinds = {path: without_compression(path).suffix.lower() or path.name for path in files}
    examples = {kind: path for path, kind in kinds.items()}
    groups: dict[str, LeftOut] = {}
    for kind, n_files in Counter(kinds.values()).most_common():
        new_group = group_for_kind(kind, examples[kind], source)
        key = new_group.remedy.get("code", new_group.advice)
        groups.setdefault(key, new_group).n_files[kind] = n_files
    return list(groups.values())


def group_for_kind(kind: str, example: Path, source: TextSource) -> LeftOut:
    """A group with the advice or the remedy for the files of a kind, of which `example` is one."""
    format = format_of_name(example)
    if format is None:
        if not is_plain_text(example):
            return LeftOut()
        glob = f"*{kind}" if kind.startswith(".") else kind
        return LeftOut(remedy={"code": "take-plain", "glob": shlex.quote(glob)})
    if format.advice:
        return LeftOut(advice=fill_in(format.advice, "FILE"))
    path = shlex.quote(source.shown(source.path))
    return LeftOut(remedy={"code": "needs-tokens", "path": path})


def is_plain_text(path: Path) -> bool:
    """True if a file begins as text; False if it is empty, as an unfetched copy is."""
    with path.open("rb") as file:
        beginning = file.read(DETECT_BYTES)
    return bool(beginning) and b"\0" not in beginning and not is_packed(beginning)


# -- files for tests -------------------------------------------------------------------------------


def warn_of_held_out(files: Sequence[File]) -> None:
    """Warn if some of the files, and not all, are named as files for tests or validation."""
    has_training_file = any(TRAINED_ON.fullmatch(stem_of(file)) for file in files)
    globs = {file: held_out_glob(file, has_training_file) for file in files}
    held_out = [file for file in files if globs[file]]
    if not held_out or len(held_out) == len(files):
        return
    names = [str(Path(file.name).with_name(file.path.name)) for file in held_out]
    examples = ", ".join(names[:MAX_NAMES_SHOWN])
    if len(names) > MAX_NAMES_SHOWN:
        examples = f"{len(names):,} files, such as {examples}"
    unique_globs = [shlex.quote(glob) for glob in dict.fromkeys(globs.values()) if glob]
    extra = {"code": "hold-out", "globs": unique_globs[:MAX_GLOBS_SHOWN]}
    logger.warning(f"files that are named as tests are trained on too: {examples}", extra=extra)


def stem_of(file: File) -> str:
    return without_compression(file.path).stem


def held_out_glob(file: File, has_training_file: bool) -> str:
    """A pattern that leaves out a file for tests or validation, or its folder; '' for other files.

    The last word of a name counts only if there is a file for training: without one, a file may be
    a note called driving-test.
    """
    for folder in Path(file.name).parent.parts:
        if HELD_OUT.fullmatch(folder):
            return folder
    name = file.path.name
    match = HELD_OUT.match(name)
    if match is not None:
        n_characters = match.end() + 1  # includes the character after the word: `test-*`
        return f"{name[:n_characters]}*"
    if has_training_file and HELD_OUT_LAST.fullmatch(stem_of(file)):
        return name
    return ""
