"""The training folder, packaged or edited: its files, its hash, and its modules.

The hash says which folder trained a model. A launch keeps its folder below the home. A model is
only computed by a folder that was launched or named on this machine, never by code from S3.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from sm_nanogpt import entry_point
from sm_nanogpt.entry_point.errors import os_reason
from sm_nanogpt.entry_point.files import read_file
from sm_nanogpt.launcher.errors import InputError
from sm_nanogpt.launcher.files.storage import path_of
from sm_nanogpt.launcher.settings import Settings

MAX_FILE_BYTES = 1 << 20
# The names in each module of a folder that the launcher uses.
REQUIRED_NAMES = {
    "config": ("make_config", "check_resumable", "has_tuned_rates"),
    "command_line": ("hyperparameter_table",),
    "errors": ("TrainingError",),
    "huggingface": (
        "starting_values",
        "load_pretrained",
        "model_tensors",
        "with_weights",
        "write_artefact",
        "Tokenizer",
    ),
    "metrics": ("metric_definitions",),
    "model": ("GPT",),
    "presets": ("PRESETS",),
    "sizes": ("MOST_READINGS", "hyperparameters_for_size", "tokens_worth_training"),
    "text": ("read_tokenizer",),
}


@dataclass(frozen=True)
class Source:
    """The Python files of a training folder, by name, as they were when the folder was read."""

    directory: Path
    files: Mapping[str, bytes]
    configs: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    @lru_cache(1)  # read once, as Python reads its modules
    def packaged() -> Source:
        return Source.read(Path(entry_point.__file__).resolve().parent)

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read a folder, whose path is given, or that of its train.py. Raises InputError."""
        directory = path_of(path).absolute()
        if directory.name == "train.py":
            directory = directory.parent
        files = {}
        try:
            for file in sorted(directory.iterdir()):
                if file.suffix == ".py" and not file.name.startswith("."):  # that of an editor
                    files[file.name] = read_file(file, MAX_FILE_BYTES)
        except OSError as error:
            raise InputError(f"{error.filename or directory}: {os_reason(error)}") from None

        for name in files:
            if not name.removesuffix(".py").isidentifier():
                # Other names could look like lines of sha256sum.
                problem = f"the name {name!r} is no Python identifier; rename the file"
                raise InputError(f"{directory}: {problem}")
        for name in ("config.py", "train.py"):
            if name not in files:
                raise InputError(f"{directory}: has no {name}", code="copy-folder")
        if "setup.py" in files:
            raise InputError(f"{directory}: setup.py would run, not train.py", code="copy-folder")
        return cls(directory, files)

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 that `sha256sum *.py | sha256sum` prints in the folder, in the C locale."""
        sums = ""
        for name, content in sorted(self.files.items()):
            sums += f"{hashlib.sha256(content).hexdigest()}  {name}\n"
        return hashlib.sha256(sums.encode()).hexdigest()

    @cached_property
    def is_packaged(self) -> bool:
        return self.sha256 == Source.packaged().sha256

    def write(self, directory: Path) -> None:
        """Write the files that a directory does not have as they are. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            path = directory / name
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)

    def module(self, name: str) -> ModuleType:
        """Import a module of the folder, which runs no training. Raises InputError."""
        if self.is_packaged:
            return importlib.import_module(f"sm_nanogpt.entry_point.{name}")
        package = f"user_{self.sha256[:16]}"
        finders = [finder for finder in sys.meta_path if package_of(finder) != package]
        sys.meta_path[:] = [*finders, Importer(package, self)]  # the folder may have moved
        with self.user_errors():
            return importlib.import_module(f"{package}.{name}")

    def known_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters, of these, that the folder's Config has."""
        names = {field.name for field in dataclasses.fields(self.module("config").Config)}
        return {name: value for name, value in hyperparameters.items() if name in names}

    @contextlib.contextmanager
    def user_errors(self) -> Iterator[None]:
        """Raise errors of the folder's code as InputErrors, and print what it prints on stderr."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except (KeyboardInterrupt, InputError):
            raise
        except BaseException as error:  # also SystemExit
            raise self.error_of_code(error) from error

    def check_complete(self) -> None:
        """Raise InputError unless the folder has all that the launcher uses."""
        for name, content in self.files.items():
            with self.user_errors():
                compile(content, self.directory / name, "exec", dont_inherit=True)
        for module, required in REQUIRED_NAMES.items():
            defined = vars(self.module(module)) if f"{module}.py" in self.files else {}
            missing = [name for name in required if name not in defined]
            if missing:
                problem = f"not an edited copy of this version's folder: {module}.py has no"
                raise InputError(f"{self.directory}: {problem} {min(missing)}", code="copy-folder")

    def error_of_code(self, error: BaseException) -> InputError:
        """Turn an error of the folder's code into an InputError.

        A TrainingError, which the code raises on purpose, keeps its message. The message of another
        error gets the line of the code before it.
        """
        class_names = [kind.__name__ for kind in type(error).__mro__]
        if "TrainingError" in class_names:
            return InputError(str(error))
        location = self.last_line_of(error)
        message = str(error)
        if isinstance(error, SyntaxError):
            location = f"{error.filename}:{error.lineno}"
            message = error.msg
        return InputError(f"{location}: {type(error).__name__}: {message}")

    def last_line_of(self, error: BaseException) -> str:
        """The last line of the folder that ran before an error; the folder if there is none."""
        location = str(self.directory)
        for frame in traceback.extract_tb(error.__traceback__):
            if Path(frame.filename).parent == self.directory:
                location = f"{frame.filename}:{frame.lineno}"
        return location


class Importer(SourceLoader):
    """Imports the modules of a folder as a package of its own.

    The modules are read from memory, so that the code which runs is the code that was hashed.
    """

    def __init__(self, package: str, source: Source) -> None:
        self.package = package
        self.source = source

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, file = name.partition(".")
        if package != self.package or (file and f"{file}.py" not in self.source.files):
            return None
        spec = importlib.util.spec_from_loader(name, self, is_package=not file)
        if spec is not None and not file:
            spec.submodule_search_locations = []  # so that Python does not read files of the disk
        return spec

    def get_filename(self, fullname: str) -> str:
        file = fullname.removeprefix(self.package).removeprefix(".")
        return str(self.source.directory / f"{file or '__init__'}.py")

    def get_data(self, path: str) -> bytes:
        return self.source.files.get(Path(path).name, b"")  # __init__.py may be missing


def package_of(finder: object) -> str:
    """The package that an Importer imports; '' for any other finder of Python."""
    return finder.package if isinstance(finder, Importer) else ""


def keep_source(source: Source, settings: Settings) -> Path:
    """Write a folder below the home, so that the models that it trains can be loaded. Raises
    OSError."""
    directory = settings.home / "sources" / source.sha256
    source.write(directory)
    return directory


def find_source(sha256: str, settings: Settings, entry_point: Path | None = None) -> Source:
    """Find the folder with this SHA-256: the packaged one, entry_point, or one that a launch kept.

    Raises InputError if there is none.
    """
    packaged = Source.packaged()
    if sha256 == packaged.sha256:
        return packaged
    directory = entry_point or settings.home / "sources" / sha256
    if entry_point is not None or directory.is_dir():
        source = Source.read(directory)
        if source.sha256 == sha256:
            return source
    problem = f"the model belongs to the training folder with SHA-256 {sha256[:12]}..., "
    if entry_point:
        problem += f"and {directory} is another"
    else:
        problem += "which is not on this machine"
    raise InputError(problem, code="name-folder")
