"""Files as documents."""

from __future__ import annotations

import gzip
import json

import pytest
from token_texts import FOX, NUMBERS, stories

from sm_nanogpt import InputError
from sm_nanogpt.launcher.text.documents import read_pieces, survey_documents
from sm_nanogpt.launcher.text.files import FileOptions, find_files
from sm_nanogpt.launcher.text.reading import File, detect_file
from sm_nanogpt.launcher.text.sources import TextSource
from sm_nanogpt.launcher.text.unpacking import zstd


@pytest.mark.parametrize(("suffix", "squeeze"), [(".gz", gzip.compress), (".zst", zstd.compress)])
def test_a_compressed_file_has_the_same_documents(suffix, squeeze, tmp_path):
    content = "".join(json.dumps({"text": text}) + "\n" for text in stories(5)).encode()
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(squeeze(content[:200]) + squeeze(content[200:]))  # as pzstd and cat make
    survey = survey_documents([detect_file(path)])
    assert survey.documents == 5
    assert survey.characters == sum(map(len, stories(5)))


def test_blank_lines_and_empty_texts_are_no_documents(tmp_path, caplog):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "a"}\n\n{"text": ""}\n{"text": "b"}\r\n \n')
    for name, content in (("empty.txt", ""), ("deep/c.txt", FOX), ("notes.md", FOX)):
        (tmp_path / name).write_text(content)
    survey = survey_documents(find_files([TextSource(tmp_path)], FileOptions(records=True)))
    assert survey.documents == 4
    assert survey.empty == 2
    assert caplog.messages == ["2 of 6 documents left out: no text"]


def test_a_long_text_is_read_in_pieces_of_lines(tmp_path):
    (tmp_path / "a.txt").write_text(FOX * 20_000)
    pieces = list(read_pieces(File("a.txt", tmp_path / "a.txt")))
    assert "".join(pieces) == FOX * 20_000
    assert len(pieces) > 2
    assert all(piece.endswith("\n") for piece in pieces)


GZIPPED = gzip.compress(NUMBERS, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text" "b"}\n', "a.jsonl:2: not JSON at column 9 ("),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl:1: half of a surrogate pair"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', "a.jsonl:1: is not UTF-8 text (column 14: "),
        ("a.txt.gz", GZIPPED[:40] + b"x" * 40, "a.txt.gz: damaged"),
        ("a.txt.zst", zstd.compress(NUMBERS)[:-9], "a.txt.zst: damaged"),
    ],
)
def test_a_file_that_is_not_text_is_named(name, content, reason, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as raised:
        survey_documents([detect_file(tmp_path / name)])
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)
