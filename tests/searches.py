"""Searches by `try`: folders of a known gain or of tiny models, and a search of these."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import launching
import pytest
import runs

from sm_nanogpt import Request, entry_point
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.source import Source, keep_source
from sm_nanogpt.launcher.trying import history, search
from sm_nanogpt.launcher.trying.scoring import Judge, Score
from sm_nanogpt.launcher.trying.search import Search
from sm_nanogpt.launcher.trying.start import begin_search

QUICK = "n_layer=2, n_head=2, n_embd=176, n_hidden=480, block_size=64, batch_size=12,\n"
TINY = (
    QUICK,
    "n_layer=1, n_head=2, n_embd=32, block_size=32, batch_size=4, eval_tokens=1024,\n",
)
SHORT = ("max_steps=180, learning_rate=0.05", "max_steps=60, learning_rate=0.05")


def gain_of(source: Source) -> float:
    return float(source.files.get("gain.py", b"0"))


def edits_of(source: Source) -> str:
    """What a folder has besides the packaged one.

    Noise that is drawn from it stays as it is when the packaged folder changes.
    """
    packaged = Source.packaged().files
    return repr(
        [(name, text) for name, text in sorted(source.files.items()) if packaged.get(name) != text]
    )


def folder(path: Path, gain: float) -> Path:
    """A copy of the training folder that gains so much."""
    shutil.copytree(Path(entry_point.__file__).parent, path, dirs_exist_ok=True)
    (path / "gain.py").write_text(f"{gain}\n")
    return path


def tiny_folder(path: Path, *edits: tuple[str, str]) -> Path:
    """A copy of the training folder whose preset `quick` is trained in a second."""
    runs.edited_folder(path, TINY, SHORT, *edits)
    return path


def draw_same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = SimpleNamespace(randbelow=random.Random(1).randrange)
    monkeypatch.setattr(history, "secrets", drawn)


@pytest.fixture(scope="session")
def shared_search(tmp_path_factory, text):
    """A search of tiny runs, its folder, and a model of its base; it is shared."""

    def build(directory: Path) -> tuple[Path, Path, Path]:
        base = directory / "base"
        model = directory / "model"
        text_file = directory / "text.txt"
        text_file.write_text(text[:60_000])
        judge = Judge.score

        def score(
            self: Judge, trained: Path, source: Source, leak_check_bound: float, limit: float
        ) -> Score:
            shutil.copytree(trained, model, dirs_exist_ok=True)
            return judge(self, trained, source, leak_check_bound, limit)

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.setattr(search, "BASE_SEEDS", 2)
            patch.setattr(Judge, "score", score)
            request = Request(
                instance="local",
                preset="quick",
                data=str(text_file),
                entry_point=tiny_folder(base),
            )
            settings = Settings(home=directory / "home")
            begin_search("s", request, settings, 0.05, None).measure_base()
        return directory / "home", base, model

    home, base, model = launching.once(tmp_path_factory, "shared_search", build)
    return SimpleNamespace(home=Path(home), base=Path(base), model=Path(model))


@pytest.fixture
def tiny_search(shared_search, home, monkeypatch):
    """That search in this test's own home."""
    shutil.copytree(shared_search.home, home)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Search("s", Settings(home=home))


def check_folder(folder: Path, tiny_search: Search) -> None:
    source = Source.read(folder)
    keep_source(source, tiny_search.settings)
    tiny_search.check(source)
