"""Text as ids."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from models import characters

from sm_nanogpt.entry_point.command_line import Options
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.container import Ranks, read_container
from sm_nanogpt.entry_point.distributed import Group
from sm_nanogpt.entry_point.errors import DataError
from sm_nanogpt.entry_point.text import Corpus, load_corpus

STRANGE = "naïve\tcafé\r\n“Жук” 漢字 🙂👩‍🚀\x00\x7f\u2028 end\n" * 40


def corpus_of(training: Path, validation: Path | None = None, **hyperparameters: Any) -> Any:
    options = Options(data=str(training), validation=str(validation or ""))
    container = read_container({}, options)
    group = Group(Ranks(0, 1, 0, 1, "hand"), torch.device("cpu"), container)
    return load_corpus(container, Config(**{"block_size": 8, **hyperparameters}), group)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def text_of(corpus: Corpus, *parts: Any) -> str:
    """The text of these parts, or the whole."""
    whole: Any = (corpus.train, corpus.val)
    ids = torch.cat(parts or whole)
    return corpus.tokenizer.decode(ids.tolist())


@pytest.mark.parametrize("text", [STRANGE, "é"])
def test_ids_decode_to_the_text(tmp_path, text):
    corpus = corpus_of(write(tmp_path / "a.txt", text * 200))
    assert text_of(corpus) == text * 200
    assert characters(corpus.tokenizer) == "".join(sorted(set(text)))  # as in nanoGPT


def test_a_text_longer_than_a_piece_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("sm_nanogpt.entry_point.text.PIECE", 7)
    write(tmp_path / "a.txt", "abcdefgh" * 9)
    write(tmp_path / "b.txt", STRANGE)
    assert text_of(corpus_of(tmp_path)) == "abcdefgh" * 9 + STRANGE


@pytest.mark.parametrize("n_characters, dtype", [(256, torch.uint8), (257, torch.int32)])
def test_ids_have_the_smallest_type_that_fits_the_vocabulary(tmp_path, n_characters, dtype):
    text = "".join(chr(0x4E00 + i) for i in range(n_characters - 1)) + "a" * 30
    corpus = corpus_of(write(tmp_path / "a.txt", text))
    assert len(corpus.tokenizer) == n_characters
    assert corpus.train.dtype == corpus.val.dtype == dtype
    assert text_of(corpus) == text


def test_tokenizing_does_not_change_the_number_of_threads(tmp_path):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        corpus_of(write(tmp_path / "a.txt", STRANGE))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_the_last_tenth_is_for_validation_as_in_nanogpt(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(1237))
    corpus = corpus_of(write(tmp_path / "a.txt", text))
    n = int(len(text) * 0.9)
    assert text_of(corpus, corpus.train) == text[:n]
    assert text_of(corpus, corpus.val) == text[n:]


def test_a_validation_channel_keeps_the_training_text_whole(tmp_path):
    training = write(tmp_path / "a.txt", "abcdefgh" * 5)
    corpus = corpus_of(training, write(tmp_path / "v.txt", "hijklmno" * 3))
    assert text_of(corpus, corpus.train) == "abcdefgh" * 5
    assert text_of(corpus, corpus.val) == "hijklmno" * 3


def test_a_directory_is_read_as_its_text_files_in_order(tmp_path):
    write(tmp_path / "b.TXT", "bbbb" * 20)
    write(tmp_path / "a/z.txt", "zzzz" * 20)
    write(tmp_path / "notes.md", "mmmm" * 20)
    write(tmp_path / "code.py", "not this")
    assert text_of(corpus_of(tmp_path)) == "z" * 80 + "b" * 80 + "m" * 80


def test_a_byte_order_mark_is_no_character(tmp_path):
    write(tmp_path / "a.txt", "\ufeff" + "ab" * 40)
    write(tmp_path / "b.txt", "\ufeff" + "cd" * 40 + "\ufeff")
    corpus = corpus_of(tmp_path)
    assert text_of(corpus) == "ab" * 40 + "cd" * 40 + "\ufeff"


def test_the_hash_changes_with_the_text_and_its_files(tmp_path):
    texts = {
        "text.txt": "ab" * 80,
        "same.txt": "ab" * 80,
        "another.txt": "ab" * 79 + "aa",
        "halves/a.txt": "ab" * 40,
        "halves/b.txt": "ab" * 40,
        "uneven/a.txt": "ab" * 30,
        "uneven/b.txt": "ab" * 50,
    }
    for name, content in texts.items():
        write(tmp_path / name, content)
    hashes = {
        name: corpus_of(tmp_path / name).sha256
        for name in ("text.txt", "same.txt", "another.txt", "halves", "uneven")
    }
    assert hashes.pop("same.txt") == hashes["text.txt"]
    assert len(set(hashes.values())) == 4


@pytest.mark.parametrize(
    "piece, content, offset",
    [
        (1000, b"\xff" + b"a" * 50, 0),
        (1000, b"a" * 50 + "🙂".encode()[:3], 50),
        (7, b"a" * 20 + b"\xed\xa0\x80" + b"a" * 20, 20),
        (7, "abcde漢字漢字".encode() + b"\xff", 17),
        (7, "abcde漢字漢字".encode() + "é".encode()[:1], 17),
    ],
)
def test_text_that_is_not_utf8_is_refused_by_place(tmp_path, monkeypatch, piece, content, offset):
    monkeypatch.setattr("sm_nanogpt.entry_point.text.PIECE", piece)
    write(tmp_path / "a.txt", "good " * 20)
    path = write(tmp_path / "b.txt", content)
    with pytest.raises(DataError) as caught:
        corpus_of(tmp_path)
    assert str(caught.value) == f"{path}: not UTF-8 text (byte {offset})"


def test_a_path_without_text_is_refused(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    for path, message in (
        (write(tmp_path / "a.txt", ""), "no text"),
        (tmp_path / "empty", r"no \*\.txt or \*\.md file"),
        (tmp_path / "none.txt", "no such file"),
        (Path("/dev/zero"), "no such file"),
    ):
        with pytest.raises(DataError, match=f"^{path}: {message}"):
            corpus_of(path)
    path = write(tmp_path / "b.txt", STRANGE)
    monkeypatch.setattr(Path, "open", Mock(side_effect=OSError(errno.EIO, "no answer")))
    with pytest.raises(DataError, match=f"^{path}: no answer"):
        corpus_of(path)


def test_a_part_shorter_than_one_window_is_an_error(tmp_path):
    path = write(tmp_path / "a.txt", "a" * 85)
    with pytest.raises(
        DataError, match=r"validation text has 9 .* block_size=9 needs 10: add more"
    ):
        corpus_of(path, block_size=9)
    corpus_of(path, block_size=8)
    with pytest.raises(DataError, match=r"training text has 8 .* block_size=8 needs 9"):
        corpus_of(write(tmp_path / "b.txt", "a" * 8), path)


def test_characters_have_no_documents_to_mask(tmp_path):
    path = write(tmp_path / "a.txt", STRANGE)
    with pytest.raises(DataError, match=r"^mask_documents needs tokens, .*; leave it out$"):
        corpus_of(path, mask_documents=True)


def test_more_characters_than_memory_holds_are_not_read(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", STRANGE)
    os.truncate(path, 2 * 10**9 + 1)
    monkeypatch.setattr(Path, "open", Mock(side_effect=AssertionError))
    with pytest.raises(DataError, match=r"a\.txt: over 2 GB .* upload-data --tokenizer"):
        corpus_of(path)
