"""Text on its way into a store: what counts as text, and what is sent."""

from __future__ import annotations

import codecs
import errno
import gzip
import hashlib
import http.client
import http.server
import json
import logging
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import launching
import pytest

from launcher.files import storage
from launcher.files.storage import local_path
from launcher.settings import Settings, load_settings
from launcher.text import corpus, reading, writing
from launcher.text.channels import find_channel
from launcher.text.corpus import find_text, find_upload, last_upload
from launcher.text.documents import read_pieces
from launcher.text.first_text import first_text
from launcher.text.reading import detect_file
from launcher.text.unpacking import zstd
from sm_nanogpt import InputError, ServiceError, upload_data

URL = "https://127.0.0.1:9/a"
LONG = "The quick brown fox jumps over the lazy dog.\n" * 100


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "fox.txt"
    path.write_text(LONG)
    return path


def stored(uri: str) -> Path:
    path = local_path(uri)
    assert path is not None
    return path


# -- what is no text ------------------------------------------------------------------------------


@pytest.fixture(params=[("upload-data",), ("launch", "--instance", "local", "--data")])
def refusal(request, home, cli):
    """Why a text is refused, by the commands that take one; nothing of it is kept."""

    def refuse(path: str) -> str:
        ran = cli(*request.param, path)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
        assert launching.tree(home) == set()
        return ran.error

    return refuse


WORDS = "À l’heure où l’été s’éteint, «Noël» coûte 5 €. " * 60
CHINESE = "春江潮水连海平，海上明月共潮生。" * 200
PDF = b"%PDF-1.7\n" + LONG.encode()
TAR = b"books/one.txt".ljust(257, b"\0") + b"ustar\x0000" + LONG.encode()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.txt", b"", "0 characters are too few"),
        ("mark.txt", codecs.BOM_UTF8, "0 characters are too few"),
        ("binary.bin", b"\x7fELF\x00\x01" * 500, "binary"),
        ("late.bin", LONG.encode() * 10 + b"\x00", "zero at byte 45000"),
        ("short.txt", b"To be", "5 characters"),
        (
            "latin.txt",
            LONG.encode() + b"caf\xe9 " * 5,
            r"\(line 101, column 4: byte 0xe9\).*'[^']*café.*cp1252`",
        ),
        (
            "win.txt",
            LONG.encode() + b"\x93quoted\x94" * 5,
            r"\(line 101, column 1: byte 0x93\).*“quoted”.*cp1252`",
        ),
        ("french.txt", WORDS.encode("cp1252"), "À l’heure.* --encoding cp1252`"),
        ("czech.txt", ("Příliš žluťoučký kůň. " * 90).encode("cp1250"), "--encoding cp1250`"),
        ("russian.txt", ("зимнюю пору я из лесу " * 90).encode("koi8-r"), "--encoding koi8_r`"),
        ("chinese.txt", CHINESE.encode("gbk"), "--encoding gb18030`"),
        ("japanese.txt", ("いろはにほへと。" * 200).encode("shift-jis"), "--encoding cp932`"),
        ("utf16.txt", LONG.encode("utf-16-le"), "--encoding utf_16_le`"),
        ("cut.txt", LONG.encode() + "é".encode()[:1], "ends inside a character"),
        ("paper.pdf", PDF, r"is a PDF; `pdftotext \S*paper.pdf`"),
        ("a paper.txt", PDF, r"is a PDF; `pdftotext '\S*a paper.txt'`"),
        (
            "paper.docx",
            b"PK\x03\x04",
            r"is a document; `pandoc -t plain -o paper.txt \S*paper.docx`",
        ),
        ("notes.zip", b"PK\x03\x04", r"is a zip archive; .*`unzip \S*notes.zip`"),
        ("scan.png", b"\x89PNG", r"is an image; `tesseract \S*scan.png scan`"),
        ("ckpt.pt", b"", "is a pickle; "),
        ("books.tar.gz", gzip.compress(TAR), r"is an archive; .*`tar -xf \S*books.tar.gz`"),
        ("cut.txt.gz", gzip.compress(LONG.encode())[:60], "cut.txt.gz: damaged"),
        ("twice.gz", gzip.compress(gzip.compress(LONG.encode())), "binary"),
        ("texts/deep/bad.txt", b"\xff" * 100, "not UTF-8"),
        ("texts/meta.json", b"{}", "these are tokens"),
        ("page.html", b"<p>", r"is an HTML page; `pandoc -f html \S* plain -o page.txt"),
        ("page.txt", b"\n<!doctype HTML>" + LONG.encode(), "is an HTML page; "),
        ("page.md", codecs.BOM_UTF8 + b'<?xml version="1.0"?><html>', "is an HTML page; "),
        ("page.html.gz", gzip.compress(b"<html>"), r"`gunzip -k \S*` unpacks it; then `pandoc"),
        ("a.ipynb", b"{}", "is a notebook; `jupyter nbconvert "),
        ("a.arrow", b"\xff" * 4, "is an Arrow file; `python -c "),
        ("a.bin", b"ARROW1\0\0", "is a Feather file; `python -c "),
        ("texts/state.json", b"{}", "no text is there"),
        ("a.parquet.gz", gzip.compress(b"PAR1"), r"is Parquet; `gunzip -k \S*` unpacks it"),
    ],
)
def test_what_is_not_text_is_refused_by_name(refusal, tmp_path, name, content, reason):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(content)
    if name == "texts/deep/bad.txt":  # one bad file refuses them all
        (tmp_path / "texts/a.txt").write_text(LONG)
    path = name.partition("/")[0]
    error = refusal(path)
    assert (name if "bad" in name else path) in error
    assert re.search(reason, error)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        *((name, b'{"text": "a"}\n', "JSON lines") for name in ("A.JSONL", "a.ndjson")),
        ("a.json", b'{"text": "a"}\n', "JSON"),
        ("b.jsonl.gz", gzip.compress(b'{"text": "a"}\n'), "JSON lines"),
        ("array.json", b' [\n{"text": "a"}]', "JSON"),
        ("table.csv", b"text\na\n", "a table"),
        ("table.txt", b"PAR1", "Parquet"),
    ],
)
def test_records_are_sent_to_a_tokenizer(refusal, tmp_path, name, content, what):
    (tmp_path / "only").mkdir()
    path = tmp_path / "only" / name
    path.write_bytes(content)
    assert f"only/{name}: is {what}, " in (error := refusal(f"only/{name}"))
    assert re.search(rf"`sm-nanogpt upload-data \S*only/{name} --tokenizer bpe`", error)
    if path.suffix != ".txt":
        assert "only: no text is there; 1 file left out: 1 ." in (error := refusal("only"))
        assert re.search(r"`sm-nanogpt upload-data \S*only --tokenizer bpe`", error)


def test_json_that_is_called_text_is_warned_about(cli, tmp_path):
    (tmp_path / "chats.txt").write_text('{"text": "a"}\n' * 99)
    (tmp_path / "notes.jsonl.txt").write_text(LONG)
    assert "chats.txt: looks like JSON" in cli("upload-data", "chats.txt").good.err
    assert "JSON" not in cli("upload-data", "notes.jsonl.txt").good.err


@pytest.mark.parametrize("names", [("dataset_dict.json",), ("dataset_info.json", "state.json")])
def test_a_saved_data_set_is_known_by_its_files(refusal, tmp_path, names):
    (tmp_path / "texts/saved").mkdir(parents=True)
    for name in names:
        (tmp_path / "texts/saved" / name).write_text("{}")
    assert "load_from_disk('" in refusal("texts")


def test_a_page_is_text_for_who_includes_it(home, tmp_path):
    (tmp_path / "a.html").write_text(f"<html>{LONG}")
    assert upload_data(tmp_path, include="*.html").files == ("a.txt",)


def test_conversations_are_offered_the_tokens_of_a_model(cli, tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}))
    assert cli("upload-data", "chats.jsonl").failed(2, "chats.jsonl --tokenizer JOB-ID` encodes")


@pytest.mark.parametrize("text", ["id,text\n", "id,body\n"])
def test_a_table_that_is_called_text_is_warned_about(cli, tmp_path, text):
    (tmp_path / "table.txt").write_text(text + "1,a sea\n" * 99)
    assert "table.txt: looks like a table" in cli("upload-data", "table.txt").good.err


def test_a_full_temporary_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(LONG.encode()))

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("launcher.text.reading.shutil.copyfileobj", fail)
    full = pytest.raises(ServiceError, match=r"is full, where .*unpacked; TMPDIR names")
    with full, reading.file_to_upload(detect_file(tmp_path / "a.txt.gz")):
        pass


def test_a_packed_text_goes_straight_into_a_local_store(cli, tmp_path, monkeypatch):
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(LONG.encode()))
    packed.chmod(0o600)
    monkeypatch.setattr("tempfile.NamedTemporaryFile", Mock(side_effect=AssertionError))
    (copy,) = stored(cli("upload-data", "a.txt.gz").good.out.strip()).iterdir()
    assert copy.read_text() == LONG
    assert stat.S_IMODE(copy.stat().st_mode) == 0o400


def test_another_encoding_needs_no_temporary_file(home, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(WORDS.encode("utf-16"))
    monkeypatch.setattr("tempfile.TemporaryFile", Mock(side_effect=OSError))
    assert list(read_pieces(detect_file(tmp_path / "a.txt"))) == [WORDS]


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
def test_a_small_file_unpacks_to_little(home, tmp_path, monkeypatch, pack):
    monkeypatch.setattr("launcher.text.unpacking.RATIO_FREE_BYTES", 1 << 20)
    (tmp_path / "a.txt.gz").write_bytes(pack(bytes([97]) * (1 << 23)))
    with pytest.raises(InputError, match=r"a\.txt\.gz: unpacks to over \d+ MiB"):
        upload_data(tmp_path / "a.txt.gz")


# -- folders --------------------------------------------------------------------------------------


@pytest.fixture
def notes(tmp_path):
    """A folder as people have it; each text is another."""
    folder = tmp_path / "notes"
    names = (
        "a.txt",
        "B.TXT",
        "c.Md",
        "deep/a.txt",
        "deep/a.md",
        "x.py",
        "code/y.py",
        "LICENSE",
    )
    aside = (".git/config.txt", "deep/.e.txt", "env/pyvenv.cfg", "env/lib/license.txt")
    for name in (*names, *aside, "scan.pdf", "chats.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name + LONG)
    (folder / "link").symlink_to(folder / "deep", target_is_directory=True)
    return folder


def test_a_folder_gives_its_texts_and_says_what_it_leaves(cli, notes):
    ran = cli("upload-data", "notes").good
    kept = {"a.txt", "B.txt", "c.txt", "deep", "deep/a.txt", "deep/a-2.txt"}
    assert launching.tree(stored(ran.out.strip())) == kept
    for left in (
        "3 files left out: 2 .py, 1 LICENSE; `--include '*.py'` takes such files",
        "1 file left out: 1 .pdf; `pdftotext FILE`",
        "1 file left out: 1 .jsonl; `sm-nanogpt upload-data notes --tokenizer bpe`",
    ):
        assert f"warning: notes: {left}" in ran.err
    assert "2 hidden, 1 virtual environment, 1 link to a folder" in ran.err


def test_files_for_tests_are_warned_about(cli, tmp_path):
    names = ("train", "test-00000", "testimony", "validation/a", "dev_b")
    for name in names:
        (tmp_path / f"texts/{name}.txt").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"texts/{name}.txt").write_text(name + LONG)
    options = ["--exclude", "dev_*", "--exclude", "test-*", "--exclude", "validation"]
    ran = cli("upload-data", "texts").good
    assert "trained on too: dev_b.txt, test-00000.txt, validation/a.txt; " in ran.err
    assert f"`{shlex.join(options)}`" in ran.err
    ran = cli("upload-data", "texts", *options).good
    assert "for tests" not in ran.err and "2 files" in ran.err
    assert "for tests" not in cli("upload-data", "texts/validation").good.err


def test_advice_is_for_files_that_were_looked_at(cli, notes):
    (notes / "weights.bin").touch()  # as a copy that was not fetched
    (notes / "packed.xyz").write_bytes(gzip.compress(LONG.encode()))
    ran = cli("upload-data", "notes").good
    assert "1 .bin" in ran.err and "--include '*.bin'" not in ran.err
    assert "1 .xyz" in ran.err and "--include '*.xyz'" not in ran.err


def test_patterns_add_and_leave_out(home, notes):
    def names(**options: Any) -> set[str]:
        return set(upload_data(notes, **options).files)

    plain = {"a.txt", "B.txt", "c.txt", "deep/a.txt", "deep/a-2.txt"}
    assert names(include=["*.py"]) == plain | {"x.txt", "code/y.txt"}
    assert names(include=["x*", "LICENSE"]) == plain | {"x.txt", "LICENSE.txt"}
    assert names(exclude=["deep", "b.txt"]) == {"a.txt", "c.txt"}
    assert names(exclude=["deep/*.md"]) == plain - {"deep/a-2.txt"}
    for option in ("include", "exclude"):
        with pytest.raises(InputError, match=rf"{option}=\*\.rst: fits no file"):
            names(**{option: ["*.rst"]})
    given = [notes / "a.txt", notes / "x.py", notes / "c.Md"]
    assert upload_data(given, include=["./x.py"], exclude=["./C.md"]).files == ("a.txt", "x.txt")


def test_what_a_folder_lacks_does_not_stop_others(cli, notes, tmp_path):
    (notes / "gone.txt").symlink_to("nowhere")
    (tmp_path / "attachments").mkdir()
    (tmp_path / "attachments/a.bin").write_bytes(b"\1\0")
    ran = cli("upload-data", "notes", "attachments").good
    assert "1 broken link" in ran.err
    (line,) = [line for line in ran.err.splitlines() if "attachments: no text is there" in line]
    assert "--include" not in line


def test_several_paths_make_one_upload(home, notes, source):
    other = source.parent / "deep/fox.md"
    other.parent.mkdir()
    other.write_text(LONG + "more")
    upload = upload_data([notes / "deep", source, str(other)])
    assert upload.files == ("deep/a.txt", "deep/a-2.txt", "fox.txt", "fox-2.txt")
    assert "/deep-" in upload.uri


def test_equal_and_empty_files_are_left_out_and_counted(cli, tmp_path):
    (tmp_path / "texts").mkdir()
    for name, content in (("a.txt", LONG), ("b.md", LONG), ("c.txt", LONG + "c"), ("d.txt", "")):
        (tmp_path / "texts" / name).write_text(content)
    (tmp_path / "texts/a.txt.gz").write_bytes(gzip.compress(LONG.encode()))
    ran = cli("upload-data", "texts").good
    assert launching.tree(stored(ran.out.strip())) == {"a.txt", "c.txt"}
    assert "warning: 3 files left out: 2 equal to another, 1 empty" in ran.err


# -- encodings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("road", ["upload", "launch", "tokens"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("mark.txt", codecs.BOM_UTF8 + WORDS.encode()),
        *((f"{codec}.txt", WORDS.encode(codec)) for codec in ("utf-16", "utf-32")),
        ("be.txt", codecs.BOM_UTF16_BE + WORDS.encode("utf-16-be")),
        ("a.txt.gz", gzip.compress(WORDS.encode())),
        ("a.md.ZST", zstd.compress(WORDS.encode("utf-16"))),
        ("called.txt", zstd.compress(WORDS.encode())),
    ],
)
def test_what_is_sent_is_plain_utf8(road, home, tmp_path, name, content, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / name).write_bytes(content)
    if road == "tokens":
        found = detect_file(tmp_path / name)
        assert list(read_pieces(found)) == [WORDS]
        return
    if road == "upload":
        upload = upload_data(tmp_path / name)
    else:
        settings = Settings(home=home)
        channel = find_channel(str(tmp_path / name), settings)
        assert channel.upload is not None
        upload = channel.upload
        corpus.send(upload, channel.sources, settings, lambda n: None)
    (sent,) = stored(upload.uri).iterdir()
    assert sent.read_text() == WORDS
    assert (upload.characters, upload.size) == (len(WORDS), len(WORDS.encode()))
    assert find_upload(upload.uri, Settings(home=home)) is not None
    told = sum("converted to UTF-8: 1 of 1" in message for message in caplog.messages)
    assert told == ("utf" in name or name in ("be.txt", "a.md.ZST"))


def test_an_encoding_is_for_what_is_not_utf8(home, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "texts").mkdir()
    for name, content in (
        ("a.txt", WORDS.encode("cp1252")),
        ("b.txt", f"b{WORDS}".encode()),
        ("c.txt", f"c{WORDS}".encode("utf-16")),
        ("d.txt", LONG.encode()),
    ):
        (tmp_path / "texts" / name).write_bytes(content)
    upload = upload_data(tmp_path / "texts", encoding="cp1252")
    texts = [(stored(upload.uri) / name).read_text() for name in upload.files]
    assert texts == [WORDS, f"b{WORDS}", f"c{WORDS}", LONG]
    assert "converted to UTF-8: 1 of 4 files, from cp1252" in caplog.messages
    (tmp_path / "mute.txt").write_bytes(WORDS.encode("utf-16-le"))
    with pytest.raises(InputError, match=r"mute.txt: .*BOM; .* utf-16-le or"):
        upload_data(tmp_path / "mute.txt", encoding="utf-16")
    upload = upload_data([tmp_path / "mute.txt", tmp_path / "texts/d.txt"], encoding="utf-16-le")
    texts = [(stored(upload.uri) / name).read_text() for name in upload.files]
    assert texts == [WORDS, LONG]
    with pytest.raises(InputError, match=r"a.txt: is not EUC_JP text"):
        upload_data(tmp_path / "texts", encoding="euc_jp")
    for wrong in ("hex", "utf-nine", "idna", "undefined"):
        with pytest.raises(InputError, match=f"encoding={wrong}: is no encoding"):
            upload_data(tmp_path / "texts", encoding=wrong)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ("\x92", "U+0080 to U+009F"),
        ("\ufffd", "U+FFFD"),
        ("Ã©", "read as Windows-1252"),
        ("â€™", "read as Windows-1252"),
        ("\ra", "carriage returns"),
        ("\x1b[32mINFO\x1b[0m", "escape sequences"),
        ("\x1b]0;a title\x07", "escape sequences"),
        ("\r\n é’\xa0", ""),
    ],
)
def test_odd_characters_are_warned_about(home, tmp_path, caplog, odd, what, tokens):
    (tmp_path / "odd.txt").write_text(LONG + odd + LONG, newline="")
    how: dict[str, Any] = {"tokenizer": "bpe", "vocab_size": 300} if tokens else {}
    upload_data(tmp_path / "odd.txt", **how)
    warned = [m for m in caplog.messages if "odd.txt: has " in m]
    assert [what in message for message in warned] == [True] * (what != "")


def test_a_wrong_path_is_refused_by_name(refusal, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/open.txt").write_text(LONG)
    os.mkfifo(tmp_path / "texts/gone.txt")
    os.mkfifo(tmp_path / "pipe")
    assert "texts/gone.txt: not a regular file" in refusal("texts")
    assert "pipe: not a regular file; for a pipe, give -" in refusal("pipe")
    assert "missing.txt: no such file" in refusal("missing.txt").lower()
    assert re.fullmatch(r"https://127\.0\.0\.1:9/a: .*(`curl -L https|download it).*", refusal(URL))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("missing.txt", "`sm-nanogpt upload-data` takes tiny Shakespeare"),
        ("a.txt --vocab-size 500", "--vocab-size 500: needs the tokenizer bpe"),
        ("a.txt --tokenizer no/where", "no/where: No such file or directory"),
        ("short.txt --tokenizer bpe", "11 characters are too few"),
        ("a.txt --column Review", "--column Review: is for records, and a.txt is plain text"),
    ],
)
def test_upload_data_refuses_what_it_cannot_take(words, reason, cli, tmp_path):
    (tmp_path / "a.txt").write_text(LONG)
    (tmp_path / "short.txt").write_text("some words\n")
    assert cli("upload-data", *words.split()).failed(2, reason)


@pytest.mark.parametrize(
    ("paths", "options", "reason"),
    [([], {}, "no path"), (["a.txt"], {"vocab_size": 300}, "needs the tokenizer bpe")],
)
def test_upload_data_in_python_refuses_as_the_command(paths, options, reason):
    with pytest.raises(InputError, match=reason):
        upload_data(paths, **options)


def test_upload_data_takes_any_paths_and_one_pattern(home, tmp_path):
    for name in ("a.txt", "b.py", "c.py"):
        (tmp_path / name).write_text(f"{name} {LONG}")
    upload = upload_data((path for path in [tmp_path]), include="*.py", exclude="c.py")
    assert upload.files == ("a.txt", "b.txt")


@pytest.mark.parametrize(("times", "preset"), [(1, " --preset auto"), (60, "")])
def test_the_suggested_launch_fits_a_short_text(cli, source, times, preset):
    source.write_text(LONG * times)
    ran = cli("upload-data", str(source)).good
    assert ran.err.endswith(f"\nnext: sm-nanogpt launch --instance local{preset}\n")


@pytest.mark.skipif(sys.platform == "darwin", reason="which has no such names")
def test_a_name_that_is_not_utf8_is_refused(refusal, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / os.fsdecode(b"caf\xe9.txt")).write_text(LONG)
    assert r"texts/caf\xe9.txt: its name is not UTF-8" in refusal("texts")


def test_a_subdirectory_that_cannot_be_read_is_named(refusal, tmp_path, monkeypatch):
    (tmp_path / "texts/closed").mkdir(parents=True)
    (tmp_path / "texts/open.txt").write_text(LONG)
    scandir = os.scandir

    def refuse(place: str) -> Any:
        if Path(place).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refuse)
    error = refusal("texts")
    assert "texts/closed: Permission denied; `--exclude closed`" in error


def test_a_text_that_changes_meanwhile_is_refused(home, cli, source, monkeypatch):
    write = storage.write_file

    def write_late(path: Path, *rest: Any) -> None:
        path.write_bytes(path.read_bytes() + b"more")
        write(path, *rest)

    monkeypatch.setattr(storage, "write_file", write_late)
    assert cli("upload-data", str(source)).failed(2, "the text changed")
    assert list((home / "store/data").glob("*.json")) == []


def test_a_character_may_lie_across_two_chunks(home, tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.text.documents.CHUNK_BYTES", 5)
    (tmp_path / "wide.txt").write_text("🙂漢é" * 300)
    upload = upload_data(tmp_path / "wide.txt")
    assert (upload.characters, upload.vocabulary_size) == (900, 3)


# -- what is sent ---------------------------------------------------------------------------------


def test_an_upload_prints_only_its_uri(cli, source):
    ran = cli("upload-data", str(source)).good
    assert re.fullmatch(r"file:///\S+/store/data/fox-[0-9a-f]{12}\n", ran.out)
    assert (stored(ran.out.strip()) / "fox.txt").read_text() == LONG
    assert "1 file, 4,500 bytes, 4,500 characters, 30 distinct" in ran.err
    told = json.loads(cli("upload-data", str(source), "--json").out)
    shown = (ran.out.strip(), False, 4500, 4500)
    assert tuple(told[key] for key in ("uri", "uploaded", "size", "characters")) == shown


def test_only_a_changed_or_damaged_text_is_sent_again(home, source):
    sent: list[int] = []
    first, second = upload_data(source), upload_data(source, progress=sent.append)
    assert (second.uri, second.uploaded, sent) == (first.uri, False, [])
    storage.write_bytes(f"{first.uri}/fox.txt", b"cut")
    assert upload_data(source).uploaded
    assert (stored(first.uri) / "fox.txt").read_text() == LONG
    source.write_text(LONG + "more")
    other = upload_data(source)
    assert other.uri != first.uri
    assert other.uploaded
    assert (stored(first.uri) / "fox.txt").read_text() == LONG


def test_a_leftover_file_is_in_no_other_upload(home, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "WRITERS", 1)
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"texts/{name}.txt").write_text(LONG + name)

    def interrupt(_: int) -> None:
        if list(home.glob("store/data/*/a.txt")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload_data(tmp_path / "texts", progress=interrupt)
    (tmp_path / "texts/a.txt").rename(tmp_path / "texts/a1.txt")
    uri = upload_data(tmp_path / "texts").uri
    assert launching.tree(stored(uri)) == {"a1.txt", "b.txt"}
    assert find_upload(uri, launching.settings_of(home)) is not None


def write_notes(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"Note {number} of many small ones.")
    return folder


def test_small_files_are_written_side_by_side(home, tmp_path, monkeypatch):
    write, together = storage.write_file, threading.Barrier(4)

    def write_with_others(*args: Any) -> None:
        together.wait(timeout=10)
        write(*args)

    monkeypatch.setattr(storage, "write_file", write_with_others)
    upload = upload_data(write_notes(tmp_path / "notes", 40))
    assert len(launching.tree(stored(upload.uri))) == 40


def test_large_files_are_written_in_turn(home, tmp_path, monkeypatch):
    write, writing = storage.write_file, threading.Lock()

    def write_alone(*args: Any) -> None:
        assert writing.acquire(blocking=False)
        write(*args)
        writing.release()

    monkeypatch.setattr(storage, "write_file", write_alone)
    monkeypatch.setattr("launcher.text.writing.SMALL_FILE", 0)
    upload = upload_data(write_notes(tmp_path / "notes", 40))
    assert len(launching.tree(stored(upload.uri))) == 40


def test_no_file_is_begun_after_one_that_fails(home, tmp_path, monkeypatch):
    begun = list[str]()

    def fail(path: Path, *_: Any) -> None:
        begun.append(path.name)
        raise ServiceError("the line is cut")

    monkeypatch.setattr(storage, "write_file", fail)
    with pytest.raises(ServiceError, match="cut"):
        upload_data(write_notes(tmp_path / "notes", 400))
    assert len(begun) <= 2 * writing.WRITERS
    assert list((home / "store/data").glob("*.json")) == []


def test_a_killed_upload_is_none_and_the_next_completes_it(home, tmp_path):
    folder = write_notes(tmp_path / "notes", 400)
    program = """
import time
from launcher.cli import main
from launcher.text import corpus
corpus.digest_of = lambda files: time.sleep(100)
main()
"""
    command = [sys.executable, "-c", program, "upload-data", str(folder)]
    with subprocess.Popen(command, env=launching.environment(home)) as process:
        launching.until(lambda: len(list(home.glob("store/data/*/*.txt"))) > 9)
        process.kill()
    assert list((home / "store/data").glob("*.json")) == []
    upload = upload_data(folder)
    assert upload.uploaded
    assert find_upload(upload.uri, launching.settings_of(home)) is not None


def test_a_prefix_without_a_manifest_is_not_an_upload(home, source):
    uri = upload_data(source).uri
    Path(f"{stored(uri)}.json").unlink()
    assert find_upload(uri, launching.settings_of(home)) is None


def test_two_simultaneous_uploads_both_work(home, source):
    words = ["upload-data", str(source)]
    both = launching.all_ended([words, words], home)
    assert [ran.code for ran in both] == [0, 0], both
    assert both[0].out == both[1].out
    uri = both[0].out.strip()
    assert find_upload(uri, launching.settings_of(home)) is not None
    assert launching.tree(stored(uri)) == {"fox.txt"}


# -- the last upload ------------------------------------------------------------------------------


def test_launch_takes_the_last_upload_and_names_it(cli, source, text_file):
    cli("upload-data", str(source))
    cli("upload-data", str(text_file))
    last = cli("upload-data", str(source)).out.strip()
    ran = cli(*launching.launching("--detach"))
    assert f"data: {last} (the last upload)" in ran.err


def test_a_shared_store_gives_this_machines_upload(tmp_path, s3, source, text_file):
    store = f"s3://{s3.bucket}/shared"
    mine, other = (Settings(home=tmp_path / name, store=store) for name in ("mine", "other"))
    theirs = upload_data(source, other).uri
    with pytest.raises(InputError, match=r"nothing was uploaded to .* from here"):
        last_upload(mine)
    stayed = upload_data(text_file, mine.model_copy(update={"store": ""})).uri
    assert last_upload(mine) == last_upload(mine.with_offline(True)) == stayed
    ours = upload_data(text_file, mine).uri
    upload_data(source, other)
    assert last_upload(mine) == last_upload(mine.with_offline(True)) == ours
    assert last_upload(other) == theirs


def test_an_upload_to_another_directory_is_not_taken(tmp_path, home, text_file):
    """Text stays in this machine's own store only where S3 cannot be asked."""
    upload_data(text_file, Settings(home=home))
    other = Settings(home=home, store=str(tmp_path / "other"))
    for settings in (other, other.with_offline(True)):
        with pytest.raises(InputError, match=r"nothing was uploaded to .*other from here"):
            last_upload(settings)


def test_all_spellings_of_a_store_mean_the_same_store(home, cli, source, tmp_path):
    store = str(tmp_path / "the store")
    uri = cli("--store", store, "upload-data", str(source)).out.strip()
    for spelling in (f"{store}/", "the store", Path(store).as_uri()):
        assert last_upload(load_settings(store=spelling)) == uri


def test_a_launch_without_an_upload_asks_for_one(home, cli, source):
    def refused() -> bool:
        ran = cli("launch", "--instance", "local")
        return ran.code == 2 and "`sm-nanogpt upload-data FILE`" in ran.error

    assert refused()
    assert launching.tree(home) == set()
    shutil.rmtree(stored(cli("upload-data", str(source)).out.strip()))
    assert refused()


def test_an_earlier_upload_is_named_by_uri_or_path(home, cli, source, text_file):
    earlier = cli("upload-data", str(source)).out.strip()
    last = cli("upload-data", str(text_file)).out.strip()
    settings = launching.settings_of(home)
    for location in (earlier, str(stored(earlier))):
        assert find_channel(location, settings).uri == earlier
    assert cli("launch", "--instance", "local", "--data", "fox-123456789012").failed(2, "data`")
    name = earlier.rpartition("/")[2]
    ran = cli(*launching.launching("--detach", "--validation", str(source), data=name))
    assert f"data: {earlier}\n" in ran.err
    assert "warning: validation is the text to train on" in ran.err
    assert len(list((home / "store/data").glob("*/"))) == 2
    assert last_upload(settings) == last  # which a launch's own text is not


@pytest.fixture
def two_uploads(home, tmp_path):
    """The names of an upload `fox` and one `fox-notes`, of this machine."""
    names = list[str]()
    for stem in ("fox", "fox-notes"):
        path = tmp_path / f"{stem}.txt"
        path.write_text(LONG + stem)
        names.append(upload_data(path).uri.rpartition("/")[2])
    return names


def test_a_part_of_a_name_means_its_upload(home, two_uploads, caplog, monkeypatch, tmp_path):
    fox, notes = two_uploads
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    for part, name in (("fox", fox), (fox[:8], fox), (fox[-6:], fox), ("fox-notes", notes)):
        assert find_text(part, load_settings()) == f"{(home / 'store/data').as_uri()}/{name}"
        assert f"{part} is upload {name}" in caplog.text


def test_a_file_of_the_name_is_meant_before_an_upload(two_uploads, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fox").write_text(LONG)
    assert find_text("fox", load_settings()) == "fox"


def test_a_part_of_several_names_is_refused_with_them(two_uploads, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"2 uploads: {', '.join(sorted(two_uploads))}"):
        find_text("fox-", load_settings())


@pytest.mark.parametrize("word", ["fix", "Fox", "fix-123456789012"])
@pytest.mark.parametrize("option", ["--data", "--validation"])
def test_a_word_of_nothing_is_no_path_that_the_user_meant(two_uploads, cli, option, word):
    words = ("launch", "--instance", "local", "--data", two_uploads[0], option, word)
    ran = cli(*words)
    assert ran.failed(2, f"neither a file nor an upload {word};", "`sm-nanogpt data`")
    assert str(Path.cwd()) not in ran.error


def test_a_part_is_looked_for_in_each_store(tmp_path, s3, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings(home=tmp_path / "mine", store=f"s3://{s3.bucket}/shared")
    (tmp_path / "fox.txt").write_text(LONG)
    uri = upload_data(tmp_path / "fox.txt", settings).uri
    assert find_text("fox", settings) == uri
    with pytest.raises(ServiceError, match="cannot find the upload 'fox'"):
        find_text("fox", settings.with_offline(True))


# -- the built-in text ----------------------------------------------------------------------------


@pytest.fixture
def shakespeare(monkeypatch):
    """A public home of Shakespeare on loopback; yields what was asked of it."""
    asked: list[str] = []

    class Home(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(LONG)))
            self.end_headers()
            self.wfile.write(LONG.encode())

        def log_message(self, *_: Any) -> None:
            pass

    sha256 = hashlib.sha256(LONG.encode()).hexdigest()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Home) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        url = f"http://127.0.0.1:{server.server_port}/input.txt"
        monkeypatch.setattr("launcher.text.first_text.SHAKESPEARE_URL", url)
        monkeypatch.setattr("launcher.text.first_text.SHAKESPEARE_SHA256", sha256)
        yield asked
        server.shutdown()


@pytest.mark.usefixtures("home", "shakespeare")
def test_notebooks_get_shakespeare_without_settings():
    assert first_text().read_text() == LONG


def test_shakespeare_is_downloaded_only_once(home, cli, shakespeare):
    ran = cli("upload-data").good
    assert (stored(ran.out.strip()) / "shakespeare.txt").read_text() == LONG
    assert cli("upload-data").code == 0
    assert shakespeare == ["/input.txt"]
    (home / "cache/shakespeare.txt").write_text("damaged")
    assert cli("upload-data").code == 0
    assert shakespeare == ["/input.txt"] * 2
    assert (home / "cache/shakespeare.txt").read_text() == LONG


@pytest.fixture
def black_hole():
    """An address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/input.txt"


def name_server_that_is_silent(*_: Any, **__: Any) -> None:
    time.sleep(2)
    raise socket.gaierror("no answer")


@pytest.mark.parametrize(
    "trouble", ["refused", "silent", "no name", "silent name server", "cut", "another file"]
)
def test_without_shakespeare_pythons_own_reference_is_taken(
    trouble, home, cli, shakespeare, black_hole, monkeypatch
):
    module = "launcher.text.first_text"
    monkeypatch.setattr(f"{module}.PATIENCE_SECONDS", 0.5)
    urls = {
        "refused": "http://127.0.0.1:9/input.txt",
        "silent": black_hole,
        "no name": "http://nowhere.invalid/input.txt",
    }
    if url := urls.get(trouble):
        monkeypatch.setattr(f"{module}.SHAKESPEARE_URL", url)
    elif trouble == "silent name server":
        monkeypatch.setattr("socket.getaddrinfo", name_server_that_is_silent)
    elif trouble == "cut":
        cut = Mock(side_effect=http.client.IncompleteRead(b"some"))
        monkeypatch.setattr("urllib.request.urlopen", cut)
    else:
        monkeypatch.setattr(f"{module}.SHAKESPEARE_SHA256", "0" * 64)
    began = time.monotonic()
    ran = cli("upload-data").good
    assert time.monotonic() - began < 4
    (line,) = [line for line in ran.err.splitlines() if "comes with Python" in line]
    assert "/input.txt: " in line and "`sm-nanogpt upload-data FILE`" in line
    text = (stored(ran.out.strip()) / "python-reference.txt").read_text()
    assert len(text) > 300_000 and 'The "while" statement' in text
    assert not (home / "cache/shakespeare.txt").exists()


def test_without_either_text_an_own_one_is_asked_for(cli, monkeypatch):
    url = "http://127.0.0.1:9/input.txt"
    monkeypatch.setattr("launcher.text.first_text.SHAKESPEARE_URL", url)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    ran = cli("upload-data")
    assert ran.failed(1, url, "`sm-nanogpt upload-data FILE`") and not ran.out
