"""What counts as text, by a name and by its content."""

from __future__ import annotations

import codecs
import errno
import gzip
import json
import re
import shlex
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from unittest.mock import Mock

import launching
import pytest
from texts import FRENCH, LONG, stored

from sm_nanogpt import InputError, ServiceError, upload_data
from sm_nanogpt.launcher.text import formats, reading
from sm_nanogpt.launcher.text.documents import read_pieces, survey_text
from sm_nanogpt.launcher.text.encodings import guess_encodings
from sm_nanogpt.launcher.text.files import find_files
from sm_nanogpt.launcher.text.reading import detect_file
from sm_nanogpt.launcher.text.sources import TextSource

CHINESE = "春江潮水连海平，海上明月共潮生。" * 200
PDF = b"%PDF-1.7\n" + LONG.encode()
TAR = b"books/one.txt".ljust(257, b"\0") + b"ustar\x0000" + LONG.encode()


def refusal_of(path: Path) -> str:
    """Why a file or a folder is refused as a text of characters."""
    with pytest.raises(InputError) as refused:
        survey_text("a text", find_files([TextSource(path)])).check("a text")
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("mark.txt", codecs.BOM_UTF8, "has no text; use at least"),
        ("binary.bin", b"\x7fELF\x00\x01" * 500, "binary"),
        ("a paper.txt", PDF, r"is a PDF; `pdftotext '\S*a paper.txt' 'a paper-2.txt'`"),
        ("paper.docx", b"PK\x03\x04", r"is a document; .* -o paper.txt \S*paper.docx`"),
        ("books.tar.gz", gzip.compress(TAR), r"is an archive; .*`tar -xkf \S*books.tar.gz`"),
        ("dump.txt", b'\n<?xml version="1.0"?><dump>', "is XML; .* > dump-2.txt`"),
        ("a b.arrow", b"\xff" * 4, "is an Arrow file; `python -c .* 'a b.parquet'`"),
        ("a.parquet.gz", gzip.compress(b"PAR1"), r"is Parquet; `gunzip -k \S*` unpacks it"),
    ],
)
def test_what_is_not_text_is_refused_by_name(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    assert re.search(reason, refusal_of(tmp_path / name))


REFUSED = [format for format in formats.FORMATS if format.is_refused and "`" in format.advice]


@pytest.mark.parametrize("format", REFUSED, ids=lambda format: format.name)
def test_advice_writes_over_no_file(format, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = f"a{format.suffixes.split()[0]}"
    others = {"a.txt", "a.parquet", "a.py", "a.md"}
    for name in {file, *others}:
        Path(name).touch()
    for name in (file, "a.txt"):  # a file may have the suffix of a text
        command = shlex.split(re.findall("`([^`]*)`", formats.advice_for(format, name))[0])
        assert not (others - {name}).intersection(command)
        assert command.count(name) == 1


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("png.txt", "tesseract png.txt stdout > png-2.txt"),
        ("scan.png", "tesseract scan.png stdout > scan-2.txt"),
        ("scan.pdf", "pdftotext scan.pdf scan-2.txt"),
    ],
)
def test_a_program_is_given_the_name_that_it_writes(name, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("scan.txt").touch()
    beginning = b"%PDF-" if name == "scan.pdf" else b"\x89PNG"
    Path(name).write_bytes(beginning)
    assert f"`{command}`" in refusal_of(Path(name))


LATIN = LONG.encode() + b"caf\xe9 " * 5


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (LATIN, r"\(line 101, column 4: byte 0xe9\).*'[^']*café"),
        (LONG.encode() + b"\x93quoted\x94" * 5, r"\(line 101, column 1: .*“quoted”"),
        (b"Un caf\xe9", r"\(line 1, column 7: byte 0xe9\).*in cp1252 .*'Un café'"),
        (b"Au caf\xe9,\nun caf\xe9", r"\(line 1, column 7: byte 0xe9\).*in cp1252 .*'Au café,"),
    ],
)
def test_another_encoding_is_shown_by_what_it_reads(tmp_path, content, reason):
    (tmp_path / "a.txt").write_bytes(content)
    assert re.search(reason, refusal_of(tmp_path / "a.txt"))


@pytest.mark.parametrize(
    ("text", "encoding", "guess"),
    [
        (FRENCH, "cp1252", "cp1252"),
        ("Příliš žluťoučký kůň. " * 90, "cp1250", "cp1250"),
        (CHINESE, "gbk", "gb18030"),
        (LONG, "utf-16-le", "utf_16_le"),
        ("El niño", "cp1252", "cp1252"),  # as short as these, a text fits Chinese encodings too
        ("résumé", "cp1252", "cp1252"),
        ("5 €!", "cp1252", "cp1252"),
        ("# 春江潮水连海平\nx = 1\n" * 9, "gbk", "gb18030"),
    ],
)
def test_the_encoding_of_a_text_is_guessed(text, encoding, guess):
    assert guess_encodings(text.encode(encoding))[0] == guess


@pytest.mark.parametrize(
    ("name", "reason"), [("meta.json", "these are tokens"), ("state.json", "no text is there")]
)
def test_a_folder_without_text_is_refused(tmp_path, name, reason):
    (tmp_path / name).write_text("{}")
    assert reason in refusal_of(tmp_path)


@pytest.mark.parametrize("command", ["upload-data", "launch --instance local --data"])
def test_each_command_refuses_what_is_no_text(cli, home, tmp_path, command):
    (tmp_path / "latin.txt").write_bytes(LATIN)
    ran = cli(command.split(), "latin.txt")
    assert ran.failed(2, "latin.txt: is not UTF-8", "--encoding cp1252`")
    assert ran.out == ""
    assert launching.tree(home) == set()


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("A.JSONL", b'{"text": "a"}\n', "JSON lines"),
        ("array.json.gz", gzip.compress(b' [\n{"text": "a"}]'), "JSON"),
        ("table.txt", b"PAR1", "Parquet"),
    ],
)
def test_records_need_tokens(tmp_path, name, content, kind):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name}: is {kind}, ") as refused:
        find_files([TextSource(tmp_path / name)])
    assert refused.value.code == "needs-tokens"


def test_no_tokenizer_is_advised_for_an_archive_of_texts(tmp_path):
    with zipfile.ZipFile(tmp_path / "texts.zip", "w") as archive:
        archive.writestr("a.txt", "a sea of text\n" * 9)
    with pytest.raises(InputError) as refused:
        find_files([TextSource(tmp_path / "texts.zip")])
    assert "unzip" in str(refused.value)
    assert refused.value.code != "needs-tokens"


def test_records_are_sent_to_a_tokenizer(refusal, tmp_path):
    (tmp_path / "only").mkdir()
    (tmp_path / "only/a.csv").write_text("text\na\n")
    error = refusal("only/a.csv")
    assert re.search(r"`sm-nanogpt upload-data \S*only/a.csv --tokenizer bpe`", error)
    error = refusal("only")
    assert "only: no text is there; 1 file left out: 1 .csv" in error
    assert re.search(r"`sm-nanogpt upload-data \S*only --tokenizer bpe`", error)


@pytest.mark.parametrize(
    ("name", "content", "warning"),
    [
        ("chats.txt", '{"text": "a"}\n' * 99, "looks like JSON"),
        ("table.txt", "id,body\n" + "1,a sea\n" * 99, "looks like a table"),
    ],
)
def test_records_that_are_called_text_are_warned_about(tmp_path, caplog, name, content, warning):
    (tmp_path / name).write_text(content)
    assert detect_file(tmp_path / name).format is formats.PLAIN
    [message] = caplog.messages
    assert warning in message


def test_text_that_is_called_json_before_txt_is_text(tmp_path, caplog):
    (tmp_path / "notes.jsonl.txt").write_text(LONG)
    assert detect_file(tmp_path / "notes.jsonl.txt").format is formats.PLAIN
    assert not caplog.messages


@pytest.mark.parametrize("names", [("dataset_dict.json",), ("dataset_info.json", "state.json")])
def test_a_saved_data_set_is_known_by_its_files(tmp_path, names):
    (tmp_path / "texts/saved").mkdir(parents=True)
    for name in names:
        (tmp_path / "texts/saved" / name).write_text("{}")
    assert "load_from_disk('" in refusal_of(tmp_path / "texts")


def test_what_the_refusal_of_xml_advises_makes_text(tmp_path):
    (tmp_path / "a dump.xml").write_text(f"<dump><p>{LONG}</p> caf\u00e9</dump>")
    advice = re.search("`(.*)`", refusal_of(tmp_path / "a dump.xml"))
    assert advice
    command = advice[1].replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "a dump.txt").read_text() == f"{LONG} caf\u00e9\n"


def test_a_page_is_text_for_who_includes_it(tmp_path):
    (tmp_path / "a.html").write_text("<html>a</html>")
    file = detect_file(tmp_path / "a.html", as_plain=True)
    assert list(read_pieces(file)) == ["<html>a</html>"]


def test_conversations_are_offered_the_tokens_of_a_model(cli, tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}))
    assert cli("upload-data", "chats.jsonl").failed(2, "chats.jsonl --tokenizer JOB-ID` encodes")


def test_a_chat_of_people_is_offered_tokens_and_a_person(cli, tmp_path):
    lines = [f"12/03/2024 14:{minute} - Ann: How are you?\n" for minute in range(10, 30)]
    (tmp_path / "WhatsApp Chat with Ann.txt").write_text("".join(lines))
    ran = cli("upload-data", "WhatsApp Chat with Ann.txt")
    assert ran.failed(2, "a chat of Ann (20)", "--tokenizer JOB-ID --me NAME`")


def test_a_full_temporary_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(LONG.encode()))

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sm_nanogpt.launcher.text.reading.shutil.copyfileobj", fail)
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
    (tmp_path / "a.txt").write_bytes(FRENCH.encode("utf-16"))
    monkeypatch.setattr("tempfile.TemporaryFile", Mock(side_effect=OSError))
    assert list(read_pieces(detect_file(tmp_path / "a.txt"))) == [FRENCH]


def test_a_small_file_unpacks_to_little(tmp_path, monkeypatch):
    monkeypatch.setattr("sm_nanogpt.launcher.text.unpacking.RATIO_FREE_BYTES", 1 << 20)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"a" * (1 << 20)))
    assert len("".join(read_pieces(detect_file(path)))) == 1 << 20
    path.write_bytes(gzip.compress(b"a" * ((1 << 20) + 1)))
    with pytest.raises(InputError, match=r"a\.txt\.gz: unpacks to over 1 MiB"):
        list(read_pieces(detect_file(path)))


def without_times(content: IO[bytes]) -> Iterator[str]:
    for line in content:
        if not re.match(rb"\d+$|\d\d:.*-->", line):
            yield line.decode()


def test_a_format_of_texts_needs_its_row_alone(home, cli, tmp_path, monkeypatch):
    verses = formats.Format("verses", ".of-a-test", help="what is sung", extractor=without_times)
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, verses))
    lines = "".join(f"{n}\n00:00:01 --> 00:00:02\nTo be, or not to be.\n" for n in range(90))
    (tmp_path / "songs").mkdir()
    (tmp_path / "songs/song.OF-A-TEST.gz").write_bytes(gzip.compress(lines.encode("utf-16")))
    [text] = stored(upload_data(tmp_path / "songs").uri).rglob("*.txt")
    assert text.read_text() == "To be, or not to be.\n" * 90
    assert re.search(r"\*\.of-a-test +what is sung\n", cli("upload-data", "--help").good.out)


def test_the_help_lists_records_below_plain_text(cli):
    output = cli("upload-data", "--help").good.out
    plain, title, records = output.partition("With --tokenizer also records")
    assert title
    assert "*.html" in plain
    assert "*.jsonl" in records
    assert "*.pdf" not in output  # which is refused
