"""Fixtures that the tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text() -> str:
    """Real English of several hundred thousand characters, which every CPython carries.

    Its last lines hold what a plain text seldom has: tabs, accents and emoji.
    """
    from pydoc_data.topics import topics

    strange = "naïve café\t– “quoted” …\n\tЖук 漢字 🙂🚀👩‍🚀\n"
    return "\n".join(topics[name] for name in sorted(topics)) + "\n" + strange * 20


@pytest.fixture(scope="session")
def text_file(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "input.txt"
    path.write_text(text, encoding="utf-8", newline="")
    return path
