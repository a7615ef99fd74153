"""Bytes as text: what a text is that is not UTF-8 in some place, and what to do."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import logging
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
from texts import FRENCH, LONG, stored

from sm_nanogpt import InputError, upload_data
from sm_nanogpt.launcher.cli.remedies import sentence
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.documents import (
    Survey,
    read_pieces,
    survey_documents,
    survey_text,
)
from sm_nanogpt.launcher.text.encodings import as_utf8, read_text
from sm_nanogpt.launcher.text.files import FileOptions, find_files
from sm_nanogpt.launcher.text.reading import File, detect_file
from sm_nanogpt.launcher.text.records import read_json_lines
from sm_nanogpt.launcher.text.sources import TextSource
from sm_nanogpt.launcher.text.store import find_upload
from sm_nanogpt.launcher.text.unpacking import zstd

ACCENTS = "L’été à la rivière, façade et fenêtre.\n" * 20
PASTED = ACCENTS.encode() + b"L\x92\xe9t\xe9 \xe0 la rivi\xe8re.\n" + ACCENTS.encode()


def cesu8(text: str) -> bytes:
    """A text with an emoji, as MySQL and Java write it."""
    high, low = "\ud83d".encode("utf-8", "surrogatepass"), "\ude42".encode("utf-8", "surrogatepass")
    return text.encode() + high + low + b"\n" + text.encode()


FAULTS = {
    "a pasted line": (PASTED, "UTF-8 except for one line (line 21, column 2: byte 0x92)"),
    "two pasted lines": (PASTED + b"\xe9t\xe9\n", "UTF-8 except for 2 lines, the first (line 21, "),
    "surrogates": (cesu8("The lamp.\n"), "has surrogates (line 2, column 1: byte 0xed)"),
    "a cut": (ACCENTS.encode() + b"\xc3", "it ends inside a character, at line 21, column 1"),
    "a zero": (b"The lamp.\na\0b\n" + ACCENTS.encode(), "a zero at byte 11 (line 2, column 2)"),
}
COMMAND = r"`((?:iconv|python3|tr) .* FILE > NEW-FILE)`"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_its_remedy_works(fault, tmp_path):
    content, fact = FAULTS[fault]
    with pytest.raises(InputError) as refused:
        list(read_text(io.BytesIO(content), "a.txt"))
    assert fact in str(refused.value)

    advice = re.search(COMMAND, sentence(refused.value))
    assert advice
    command = advice[1].replace("NEW-FILE", "mended.txt").replace("FILE", "a.txt")
    (tmp_path / "a.txt").write_bytes(content)
    # A shell, as the user has. iconv ends with 1 if it left something out.
    subprocess.run(command, shell=True, cwd=tmp_path, check=False)
    mended = (tmp_path / "mended.txt").read_bytes()
    text = "".join(read_text(io.BytesIO(mended), "mended.txt"))
    valid = content.decode(errors="ignore").replace("\0", "")
    assert text.replace("\U0001f642", "") == valid


@pytest.mark.parametrize("fault", ["a pasted line", "a zero"])
def test_a_fault_is_the_same_in_small_chunks(fault, monkeypatch):
    monkeypatch.setattr("sm_nanogpt.launcher.text.encodings.CHUNK_BYTES", 7)
    content, fact = FAULTS[fault]
    with pytest.raises(InputError) as refused:
        list(read_text(io.BytesIO(content), "a.txt"))
    assert fact in str(refused.value)


def test_a_packed_text_is_unpacked_before_it_is_mended(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(PASTED))
    with pytest.raises(InputError) as refused:
        pieces = read_pieces(detect_file(tmp_path / "a.txt.gz"))
        list(pieces)
    assert "unpack it first: `gunzip -k " in str(refused.value)


def test_no_encoding_spoils_what_is_utf8_elsewhere(tmp_path):
    (tmp_path / "a.txt").write_bytes(PASTED)
    with pytest.raises(InputError, match="line 21"):
        detect_file(tmp_path / "a.txt", encoding="cp1252")


def test_a_text_with_the_mark_of_utf8_is_no_other_encoding(tmp_path):
    content = codecs.BOM_UTF8 + b"To be or not.\n" * 100_000 + b"caf\xe9\n"  # in another chunk
    (tmp_path / "a.txt").write_bytes(content)
    file = detect_file(tmp_path / "a.txt")
    with pytest.raises(InputError, match=r"mark of UTF-8, .* except for one line") as refused:
        "".join(read_pieces(file))
    assert refused.value.code == "mend-utf8"


def test_a_bad_byte_in_read_json_lines_is_no_other_encoding():
    record = json.dumps({"text": ACCENTS}, ensure_ascii=False).encode()
    content = io.BytesIO(record + b'\n{"text": "a \x92"}')
    with pytest.raises(InputError) as refused:
        list(read_json_lines(content, File("a.jsonl", Path("a.jsonl"))))
    assert str(refused.value).startswith("a.jsonl:2: is UTF-8 except for one line (column 13: ")
    assert refused.value.code == "mend-utf8"


def test_another_encoding_has_places_too():
    content = "あ\nい\n".encode("euc_jp") + b"a\xff"
    with pytest.raises(InputError, match=r"is not EUC_JP text \(line 3, column 2: byte 0xff\)"):
        as_utf8(io.BytesIO(content), "a.txt", "euc_jp").read()


ENCODED = {
    "mark.txt": codecs.BOM_UTF8 + FRENCH.encode(),
    "utf-32.txt": FRENCH.encode("utf-32"),
    "be.txt": codecs.BOM_UTF16_BE + FRENCH.encode("utf-16-be"),
    "a.md.ZST": zstd.compress(FRENCH.encode("utf-16")),
    "called.txt": zstd.compress(FRENCH.encode()),
}


@pytest.mark.parametrize("name", ENCODED)
def test_what_is_read_is_plain_utf8(name, tmp_path):
    (tmp_path / name).write_bytes(ENCODED[name])
    assert list(read_pieces(detect_file(tmp_path / name))) == [FRENCH]


def test_what_is_sent_is_plain_utf8(home, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "a.md.ZST").write_bytes(ENCODED["a.md.ZST"])
    upload = upload_data(tmp_path / "a.md.ZST")
    (path,) = stored(upload.uri).iterdir()
    assert path.read_text() == FRENCH
    assert upload.characters == len(FRENCH)
    assert upload.size == len(FRENCH.encode())
    assert find_upload(upload.uri, Settings(home=home)) is not None
    assert "converted to UTF-8: 1 of 1 files, from utf-16" in caplog.messages


def texts_of(folder: Path, encoding: str) -> list[str]:
    files = find_files([TextSource(folder)], FileOptions(encoding=encoding))
    return ["".join(read_pieces(file)) for file in files]


def test_an_encoding_is_for_what_is_not_utf8(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "a.txt").write_bytes(FRENCH.encode("cp1252"))
    (tmp_path / "b.txt").write_bytes(FRENCH.encode())
    (tmp_path / "c.txt").write_bytes(FRENCH.encode("utf-16"))
    (tmp_path / "d.txt").write_bytes(LONG.encode())
    assert texts_of(tmp_path, "cp1252") == [FRENCH, FRENCH, FRENCH, LONG]
    assert "converted to UTF-8: 1 of 4 files, from cp1252" in caplog.messages


def test_utf16_without_a_mark_needs_the_order_of_its_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(FRENCH.encode("utf-16-le"))
    (tmp_path / "b.txt").write_bytes(LONG.encode())
    with pytest.raises(InputError, match=r"a.txt: .*BOM; .* utf-16-le or"):
        texts_of(tmp_path, "utf-16")
    assert texts_of(tmp_path, "utf-16-le") == [FRENCH, LONG]


@pytest.mark.parametrize("name", ["hex", "utf-nine", "idna"])
def test_what_no_file_is_written_in_is_no_encoding(name, tmp_path):
    with pytest.raises(InputError, match="is no encoding") as refused:
        texts_of(tmp_path, name)
    assert (refused.value.field, refused.value.value) == ("encoding", name)


@pytest.mark.parametrize(
    ("characters", "problem"),
    [
        ("\x92", "U+0080 to U+009F"),
        ("\ufffd", "U+FFFD"),
        ("Ã©", "read as Windows-1252"),
        ("\ra", "carriage returns"),
        ("\x1b[32mINFO\x1b[0m", "escape sequences"),
    ],
)
def test_odd_characters_are_suspicious(characters, problem):
    survey = Survey()
    survey.note_suspicions(f"{LONG}{characters}{LONG}".encode(), "odd.txt")
    (suspicion,) = survey.suspicions
    assert problem in suspicion.problem


def test_usual_characters_are_not_suspicious():
    survey = Survey()
    survey.note_suspicions("\r\n é’\xa0".encode(), "usual.txt")
    assert not survey.suspicions


@pytest.mark.parametrize("survey", [survey_documents, partial(survey_text, "odd.txt")])
def test_odd_characters_are_warned_about(tmp_path, caplog, survey):
    (tmp_path / "odd.txt").write_text(f"{LONG}\ufffd{LONG}")
    survey([detect_file(tmp_path / "odd.txt")]).check("odd.txt")
    assert "odd.txt: has U+FFFD" in caplog.text
