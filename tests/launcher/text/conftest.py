"""Uploads that tests of text share."""

from __future__ import annotations

import launching
import pytest
from texts import LONG
from token_texts import encode_text


@pytest.fixture(scope="session")
def token_upload(documents, tokenizer, tmp_path_factory):
    """The upload of these documents."""
    return encode_text(documents, tokenizer, tmp_path_factory.mktemp("made"))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "fox.txt"
    path.write_text(LONG)
    return path


@pytest.fixture
def refusal(home, cli):
    """Why a text is refused; nothing of it is kept."""

    def refuse(path: str) -> str:
        ran = cli("upload-data", path)
        assert ran.code == 2, ran
        assert ran.out == "", ran
        assert ran.err.count("\n") == 1, ran
        assert launching.tree(home) == set()
        return ran.error

    return refuse
