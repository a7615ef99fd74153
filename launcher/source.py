"""The training folder, packaged or edited: its files, its hash, and its modules.

The hash says which folder trained a model. A launch keeps each folder below the home, and models
are computed only by folders that were launched or named here, never by code from S3.
"""

from __future__ import annotations

import contextlib
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

import entry_point
from entry_point.files import read_file
from launcher.errors import InputError
from launcher.files.storage import path_of
from launcher.settings import Settings

LARGEST = 1 << 20  # bytes of a file
NEEDED = {
    "config": "make_config check_resumable has_tuned_rates",
    "command_line": "hyperparameter_table",
    "errors": "TrainingError",
    "huggingface": "starting_values load_pretrained model_tensors with_weights write_artefact"
    " Tokenizer",
    "metrics": "metric_definitions",
    "model": "GPT",
    "presets": "PRESETS",
    "sizes": "MOST_READINGS hyperparameters_for_size tokens_worth_training",
    "text": "read_tokenizer",
}


@dataclass(frozen=True)
class Source:
    """The Python files of a training folder, by name, as they were when it was read."""

    directory: Path
    files: Mapping[str, bytes]
    configs: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    @lru_cache(1)  # Python, too, reads its modules once
    def packaged() -> Source:
        return Source.read(Path(entry_point.__file__).parent)

    @classmethod
    def read(cls, place: Path) -> Source:
        """Read a folder, named by itself or by its train.py."""
        place = path_of(place).absolute()
        directory = place.parent if place.name == "train.py" else place
        try:
            paths = sorted(directory.glob("[!.]*.py"))  # as a shell, and without editors' files
            files = {path.name: read_file(path, LARGEST) for path in paths}
        except OSError as error:
            raise InputError(f"{error.filename or directory}: {error.strerror}") from None
        for path in paths:
            if not path.stem.isidentifier():  # it might pass for a line of sha256sum
                problem = f"the name {path.name!r} is no Python identifier; rename the file"
                raise InputError(f"{directory}: {problem}")
        missing = {"config.py", "train.py"} - files.keys()
        if missing or "setup.py" in files:
            problem = f"has no {min(missing)}" if missing else "setup.py would run, not train.py"
            raise InputError(f"{directory}: {problem}", "copy-folder")
        return cls(directory, files)

    @cached_property
    def sha256(self) -> str:
        """What `sha256sum *.py | sha256sum` prints in the folder, in the C locale."""
        sums = (f"{hashlib.sha256(self.files[n]).hexdigest()}  {n}\n" for n in sorted(self.files))
        return hashlib.sha256("".join(sums).encode()).hexdigest()

    @cached_property
    def is_packaged(self) -> bool:
        return self.sha256 == Source.packaged().sha256

    def write(self, directory: Path) -> None:
        """Write the files that are not in a directory yet. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            path = directory / name
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)

    def module(self, name: str) -> ModuleType:
        """Import a module of the folder; this runs no training."""
        if self.is_packaged:
            return importlib.import_module(f"entry_point.{name}")
        package = f"user_{self.sha256[:16]}"
        others = [each for each in sys.meta_path if getattr(each, "package", "") != package]
        sys.meta_path[:] = [*others, Importer(package, self)]  # the folder may have moved
        with self.running():
            return importlib.import_module(f"{package}.{name}")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run code of the folder. What it prints goes to stderr."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except (KeyboardInterrupt, InputError):
            raise
        except BaseException as error:  # also SystemExit
            raise self.refusal(error) from error

    def check_complete(self) -> None:
        """Raise InputError unless all that the launcher needs of the folder is there."""
        for name, content in self.files.items():
            with self.running():
                compile(content, self.directory / name, "exec", dont_inherit=True)
        for name, needed in NEEDED.items():
            found = vars(self.module(name)) if f"{name}.py" in self.files else {}
            if missing := set(needed.split()) - found.keys():
                problem = f"not an edited copy of this version's folder: {name}.py has no"
                raise InputError(f"{self.directory}: {problem} {min(missing)}", "copy-folder")

    def refusal(self, error: BaseException) -> InputError:
        """An error that the folder's code raises on purpose, or another with its file and line."""
        if "TrainingError" in {kind.__name__ for kind in type(error).__mro__}:
            return InputError(str(error))
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if Path(f.filename).parent == self.directory]
        place = f"{own[-1].filename}:{own[-1].lineno}" if own else str(self.directory)
        words: object = error
        if isinstance(error, SyntaxError):
            place, words = f"{error.filename}:{error.lineno}", error.msg
        return InputError(f"{place}: {type(error).__name__}: {words}")


class Importer(SourceLoader):
    """Imports the modules of a folder as a package of its own, from memory, so that what runs here
    is what was hashed."""

    def __init__(self, package: str, source: Source) -> None:
        self.package, self.source = package, source

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, file = name.partition(".")
        if package != self.package or (file and f"{file}.py" not in self.source.files):
            return None
        spec = importlib.util.spec_from_loader(name, self, is_package=not file)
        if spec is not None and not file:
            spec.submodule_search_locations = []  # else Python would find the files on the disk
        return spec

    def get_filename(self, fullname: str) -> str:
        file = fullname.removeprefix(self.package).removeprefix(".")
        return str(self.source.directory / f"{file or '__init__'}.py")

    def get_data(self, path: str) -> bytes:
        return self.source.files.get(Path(path).name, b"")  # __init__.py may be missing


def keep(source: Source, settings: Settings) -> Path:
    """Keep a folder below the home, for the models that it trains. Raises OSError."""
    kept = settings.home / "sources" / source.sha256
    source.write(kept)
    return kept


def find_source(sha256: str, settings: Settings, entry_point: Path | None = None) -> Source:
    """The folder with this SHA-256: the packaged one, entry_point, or one kept by a launch."""
    packaged = Source.packaged()
    if sha256 == packaged.sha256:
        return packaged
    place = entry_point or settings.home / "sources" / sha256
    if entry_point is not None or place.is_dir():
        source = Source.read(place)
        if source.sha256 == sha256:
            return source
    but = f"and {place} is another" if entry_point else "which is not on this machine"
    problem = f"the model belongs to the training folder with SHA-256 {sha256[:12]}..., {but}"
    raise InputError(problem, "name-folder")
